"""What a reader of the docs may rely on: every public name is explained, and every example runs.

Each check is a function that returns what is wrong, and has a test that plants a fault for it.
"""

from __future__ import annotations

import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import torchrl_rslstorage as package

ROOT = Path(package.__file__).parent.parent
README = ROOT / "README.md"
README_BLOCK_LIMIT_S = 240  # a block may train the one-minute example, on a busy machine

# From the ground up: a room imports from its own row and from the rows above it in this list, never
# from those below. A module that is not a room (`_compat`, `_extras`) is the ground.
ROOMS = [
    {"data"},
    {"motions"},
    {"objectives", "modules"},
    {"collectors", "envs"},
    {"trainers"},
    {"rsl_rl"},
    {"cli"},
    {"__main__", ""},  # "" is the package itself, which collects the names of every room
]


def module_name(file: Path) -> str:
    """The dotted name of a source file of the package."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# From the files and not from pkgutil, which overlooks a folder without __init__.py.
SOURCES = {module_name(file): file for file in sorted(ROOT.glob(f"{package.__name__}/**/*.py"))}


# -- docstrings --------------------------------------------------------------------------------


def public_members(cls: type, owner: str) -> dict[str, object]:
    """The public methods and properties of ``cls`` that are written in the package ``owner``."""
    members: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] != owner:
            continue
        for name, member in vars(base).items():
            if name.startswith("_"):
                continue
            if isinstance(member, classmethod | staticmethod):
                member = member.__func__
            if isinstance(member, property | functools.cached_property) or (
                inspect.isfunction(member) and member.__module__.partition(".")[0] == owner
            ):
                members[name] = member
    return members


def own_docstring(thing: object) -> str:
    """The docstring written for ``thing``: neither inherited nor made up by ``@dataclass``."""
    doc = thing.__dict__.get("__doc__") if isinstance(thing, type) else thing.__doc__
    made_up = (
        isinstance(thing, type)
        and dataclasses.is_dataclass(thing)
        and (doc or "").startswith(f"{thing.__name__}(")
    )
    return "" if made_up else (doc or "").strip()


def undocumented(module: ModuleType, owner: str) -> list[str]:
    """The public names of ``module``, and the members of its classes, that have no docstring."""
    missing = []
    for name in module.__all__:
        thing = getattr(module, name)
        if isinstance(thing, type):
            members = public_members(thing, owner)
            missing += [f"{name}.{m}" for m, v in members.items() if not own_docstring(v)]
        if (inspect.isroutine(thing) or isinstance(thing, type)) and not own_docstring(thing):
            missing.append(name)
    return missing


def without_example(module: ModuleType) -> list[str]:
    """The public classes and functions of ``module`` whose docstring shows no example."""
    things = {name: getattr(module, name) for name in module.__all__}
    documented = {n: t for n, t in things.items() if isinstance(t, type) or inspect.isroutine(t)}
    return [n for n, t in documented.items() if not doctest.DocTestParser().get_examples(own(t))]


def own(thing: object) -> str:
    """The docstring as the doctest parser wants it: without the indentation of the source."""
    return inspect.cleandoc(own_docstring(thing))


def test_the_public_names_exist_once():
    names = package.__all__
    assert names, "the package exports nothing"
    assert sorted(set(names)) == sorted(names)
    assert [name for name in names if not hasattr(package, name)] == []


def test_every_public_name_method_and_property_has_a_docstring():
    assert undocumented(package, package.__name__) == []


def test_every_public_class_and_function_shows_an_example():
    assert without_example(package) == []


def test_a_missing_docstring_or_example_is_found():
    source = '''
import dataclasses, functools

class Documented:
    """Says what it is.

    >>> 1 + 1
    2
    """
    def explained(self): "Yes."
    def unexplained(self): ...
    @property
    def value(self): ...
    @classmethod
    def made(cls): ...
    @functools.cached_property
    def cached(self): ...
    def _private(self): ...

class Inherits(Documented):
    def explained(self): ...

@dataclasses.dataclass
class Config:
    lr: float = 0.1

def function(): "No example."

__all__ = ["Documented", "Inherits", "Config", "function"]
'''
    planted = ModuleType("planted")
    sys.modules["planted"] = planted  # where @dataclass looks for its module
    try:
        exec(source, planted.__dict__)
        faults = [f"Documented.{name}" for name in ("unexplained", "value", "made", "cached")]
        faults += [f"Inherits.{fault.partition('.')[2]}" for fault in ["X.explained", *faults]]
        faults += ["Inherits", "Config"]
        assert undocumented(planted, "planted") == faults
        assert without_example(planted) == ["Inherits", "Config", "function"]
    finally:
        del sys.modules["planted"]


# -- examples ----------------------------------------------------------------------------------


def failed_examples(module: ModuleType) -> tuple[str, int]:
    """The report of every failing doctest of ``module``, and how many examples were tried."""
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(test, out=report.append)
    return "".join(report), runner.tries


@pytest.mark.parametrize("name", [n for n in SOURCES if not n.endswith("__main__")])
def test_the_examples_of_every_module_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report, _ = failed_examples(importlib.import_module(name))
    if report:
        pytest.fail(report, pytrace=False)


def test_a_failing_example_is_reported():
    planted = ModuleType("planted", ">>> 1 + 1\n3\n\n>>> [1,\n...  2]\n[1, ...]\n")
    report, tries = failed_examples(planted)
    assert "Expected:\n    3\nGot:\n    2" in report
    assert tries == 2


# -- the README --------------------------------------------------------------------------------


def python_blocks(markdown: str) -> list[tuple[int, str]]:
    """The line number and source of each python block that is not marked ``<!-- no-run -->``."""
    pattern = r"(^<!-- no-run -->[ \t]*\n\s*)?^[ \t]*```py[^\n]*\n(.*?)^[ \t]*```[ \t]*$"
    found = re.finditer(pattern, markdown, flags=re.MULTILINE | re.DOTALL)
    return [
        (markdown.count("\n", 0, match.start(2)) + 1, textwrap.dedent(match.group(2)))
        for match in found
        if match.group(1) is None
    ]


def run_block(source: str, folder: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Runs ``source`` as a script of its own, in ``folder``."""
    script = folder / "readme_block.py"
    script.write_text(source, encoding="utf-8")
    bootstrap = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); "
    bootstrap += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", bootstrap],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        # Two threads wait for each other on a machine that runs other things beside the tests.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


BLOCKS = python_blocks(README.read_text(encoding="utf-8")) if README.is_file() else []


def test_there_is_a_readme_with_examples():
    assert README.is_file()
    assert BLOCKS


@pytest.mark.parametrize(("line", "source"), BLOCKS, ids=[f"line {line}" for line, _ in BLOCKS])
def test_every_python_block_of_the_readme_runs(line, source, tmp_path):
    done = run_block(source, tmp_path, README_BLOCK_LIMIT_S)
    assert done.returncode == 0, f"README.md, block at line {line}:\n{done.stdout}{done.stderr}"
    assert "nan" not in done.stdout.split(), f"README.md, block at line {line} prints {done.stdout}"


def test_python_blocks_are_found_and_marked_ones_are_left_out():
    markdown = (
        "```python\na = 1\n\nb = 2\n```\ntext\n```bash\nls\n```\n"
        "<!-- no-run -->\n```python\nskipped\n```\n<!-- no-run -->\n\n```python\nskipped\n```\n"
        "<!-- no-run --> is a marker\n  ```python\n  c = 3\n  ```\n"
    )
    assert python_blocks(markdown) == [(2, "a = 1\n\nb = 2\n"), (21, "c = 3\n")]


def test_a_readme_block_that_raises_or_hangs_is_noticed(tmp_path):
    failed = run_block("raise SystemError('planted')", tmp_path, 30)
    assert failed.returncode == 1
    assert "planted" in failed.stderr
    with pytest.raises(subprocess.TimeoutExpired):
        run_block("while True: pass", tmp_path, 0.5)


# -- rooms -------------------------------------------------------------------------------------


def imports(source: str, module: str, is_package: bool) -> set[str]:
    """The dotted names that ``source``, the text of ``module``, imports anywhere in it."""
    found = set()
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def room(dotted: str) -> str:
    """The room of ``package.room.anything``; a public name of the package itself is in ``""``."""
    first = dotted.split(".")[1] if "." in dotted else ""
    path = Path(package.__file__).parent / first
    return first if path.is_dir() or path.with_suffix(".py").is_file() else ""


def floor(name: str) -> int:
    """How high a room lies; the ground is -1."""
    return next((i for i, rooms in enumerate(ROOMS) if name in rooms), -1)


def forbidden_imports(source: str, module: str, is_package: bool) -> list[str]:
    """The imports of ``source`` that reach up, or out into the tests and benchmarks."""
    wrong = []
    for name in sorted(imports(source, module, is_package)):
        top = name.partition(".")[0]
        outside = top in {"tests", "benchmarks"}
        upward = top == package.__name__ and floor(room(name)) > floor(room(module))
        if outside or upward:
            wrong.append(f"{module} imports {name}")
    return wrong


def test_no_room_imports_a_room_above_it():
    wrong = []
    for module, file in SOURCES.items():
        text = file.read_text(encoding="utf-8")
        wrong += forbidden_imports(text, module, is_package=file.name == "__init__.py")
    assert len(SOURCES) > 10
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "line", "allowed"),
    [
        ("data.storages", "from torchrl_rslstorage._compat import x", True),
        ("data.storages", "from torchrl_rslstorage.data import x", True),
        ("data.storages", "from .writers import x", True),
        ("data.storages", "from torchrl_rslstorage.objectives.ppo import x", False),
        ("data.storages", "from ..objectives import x", False),
        ("data.storages", "from .. import objectives", False),
        ("data.storages", "from torchrl_rslstorage import RolloutBuffer", False),
        ("data.storages", "import torchrl_rslstorage.trainers as t", False),
        ("data.storages", "def f():\n    from torchrl_rslstorage.envs import x", False),
        ("_compat", "from torchrl_rslstorage.data import x", False),
        ("_extras", "import tests.oracles", False),
        ("trainers.ppo", "from benchmarks import x", False),
        ("trainers.ppo", "import torchrl.trainers", True),
        ("trainers.ppo", "from torchrl_rslstorage.envs import x", True),
        ("trainers.ppo", "from torchrl_rslstorage.cli import main", False),
        ("cli", "from torchrl_rslstorage.trainers import x", True),
    ],
)
def test_an_import_that_reaches_up_is_noticed(module, line, allowed):
    wrong = forbidden_imports(line, f"torchrl_rslstorage.{module}", is_package=False)
    assert (wrong == []) == allowed
