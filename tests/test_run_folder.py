"""The run folder: nothing on disk is damaged, whatever the user or a kill does."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torchrl.record.loggers.csv import CSVLogger

from torchrl_rslstorage import _files
from torchrl_rslstorage._extras import require_extra
from torchrl_rslstorage._files import atomic_write_text
from torchrl_rslstorage.trainers import run_folder
from torchrl_rslstorage.trainers.run_folder import (
    LENGTH_SCALAR,
    RETURN_SCALAR,
    RunFolder,
    RunFolderError,
    versions,
)


def tree(path: Path) -> dict[str, bytes | None]:
    """Everything under ``path``: the bytes of a file, None for a folder."""
    entries = sorted(path.rglob("*"))
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in entries}


def log(folder: RunFolder, name: str, rows: list[tuple[int, float]]) -> None:
    """Logs ``rows`` with TorchRL's own logger, then lets its files go."""
    logger = CSVLogger(exp_name="logs", log_dir=str(folder.path))
    for step, value in rows:
        logger.log_scalar(name, value, step=step)
    for handle in logger.experiment.files.values():
        handle.close()


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", {"seed": 3})


# -- create and open ---------------------------------------------------------------------------


def test_a_new_run_can_be_opened_again_with_the_config_it_was_created_with(tmp_path):
    config = {"task": "pendulum", "seed": 3, "clip": 0.2, "limit": math.inf, "hidden": [64, 64]}
    created = RunFolder.create(tmp_path / "a" / "b", config)
    assert RunFolder.open(tmp_path / "a" / "b").config == config
    assert created.checkpoints.is_dir()
    assert created.logs.is_dir()


def test_an_empty_folder_and_one_with_foreign_files_both_take_a_run(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    RunFolder.create(tmp_path, {})
    assert (tmp_path / "note.txt").read_text() == "mine"


def test_paths_in_a_config_are_kept_as_strings(tmp_path):
    assert RunFolder.create(tmp_path / "run", {"out": Path("x/y")}).config == {"out": "x/y"}


def test_a_config_that_json_cannot_say_leaves_no_folder(tmp_path):
    with pytest.raises(TypeError, match="JSON cannot hold"):
        RunFolder.create(tmp_path / "run", {"actor": object()})
    assert tree(tmp_path) == {}


def test_a_second_run_in_the_same_folder_is_refused_and_changes_nothing(folder):
    log(folder, "loss", [(1, 0.5)])
    before = tree(folder.path)
    with pytest.raises(RunFolderError, match="already holds a run"):
        RunFolder.create(folder.path, {"seed": 4})
    assert tree(folder.path) == before


@pytest.mark.parametrize("left", ["logs", "checkpoints"])
def test_logs_or_checkpoints_of_unknown_origin_are_never_written_into(tmp_path, left):
    (tmp_path / left).mkdir()
    with pytest.raises(RunFolderError, match="already holds a run"):
        RunFolder.create(tmp_path, {})
    assert tree(tmp_path) == {left: None}


def test_of_many_runs_that_start_together_in_one_folder_one_gets_it(tmp_path):
    def start(seed: int) -> int | None:
        try:
            RunFolder.create(tmp_path / "run", {"seed": seed})
        except RunFolderError:
            return None
        return seed

    with ThreadPoolExecutor(8) as pool:
        winners = [seed for seed in pool.map(start, range(32)) if seed is not None]
    assert len(winners) == 1
    assert RunFolder.open(tmp_path / "run").config == {"seed": winners[0]}


def test_a_file_where_the_folder_should_be_is_named_and_kept(tmp_path):
    file = tmp_path / "run"
    file.write_text("mine")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(file, {})
    with pytest.raises(RunFolderError, match="cannot make the run folder"):
        RunFolder.create(file / "below", {})
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(RunFolderError, match="Permission denied"):
            RunFolder.create(tmp_path / "run", {})
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a /proc where nobody can make a folder")
def test_an_unwritable_place_gives_one_sentence_also_for_root():
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create("/proc/run", {})
    assert str(caught.value).startswith("cannot make the run folder /proc/run: ")
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_up_during_create_leaves_the_folder_free_for_another_try(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_files.os, "fsync", full)
        with pytest.raises(RunFolderError, match="No space left on device"):
            RunFolder.create(tmp_path / "run", {})
    assert tree(tmp_path / "run") == {}
    RunFolder.create(tmp_path / "run", {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json"),
        ("", "is broken"),
        ('{"seed": ', "is broken"),
        (b"\xff\xfe\x00", "is broken"),
        ("[1, 2]", "holds no JSON object"),
    ],
)
def test_opening_what_is_not_a_run_says_why(tmp_path, content, message):
    if isinstance(content, str):
        content = content.encode()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    before = tree(tmp_path)
    with pytest.raises(RunFolderError, match=message):
        RunFolder.open(tmp_path)
    assert tree(tmp_path) == before


def test_opening_a_missing_folder_or_a_file_says_that_it_is_no_run_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(RunFolderError, match="is not a run folder"):
            RunFolder.open(path)


# -- scalars -----------------------------------------------------------------------------------


def test_scalars_of_torchrls_logger_are_read_back_exactly(folder):
    rows = [(10, 0.1), (20, -1e-30), (30, 12345678.9)]
    log(folder, "loss/value", rows)
    assert folder.read_scalar("loss/value") == rows
    assert (folder.scalars / "loss" / "value.csv").is_file()


def test_an_unknown_scalar_is_answered_with_the_known_ones(folder):
    with pytest.raises(RunFolderError, match="it has: none"):
        folder.read_scalar("loss")
    log(folder, "loss/value.mean", [(1, 0.0)])
    log(folder, "lr", [(1, 0.0)])
    with pytest.raises(RunFolderError, match=r"no scalar 'loss'; it has: loss/value.mean, lr\."):
        folder.read_scalar("loss")


def test_cutting_back_keeps_the_frame_itself_and_gives_the_run_that_was_never_killed(tmp_path):
    names = ["lr", "loss/value", "late"]
    rows = {"lr": [(f, f / 7) for f in range(1, 6)], "loss/value": [(2, 0.1), (4, math.nan)]}
    rows["late"] = [(5, 1.0)]
    whole, killed = (RunFolder.create(tmp_path / name, {}) for name in ("whole", "killed"))
    for name in names:
        log(whole, name, rows[name])
        log(killed, name, rows[name])
    killed.truncate_logs(3)
    assert killed.read_scalar("lr") == rows["lr"][:3]
    assert killed.read_scalar("late") == []
    for name in names:
        log(killed, name, [row for row in rows[name] if row[0] > 3])
    assert tree(killed.path) == tree(whole.path)


def test_a_last_line_torn_at_any_byte_costs_that_line_at_most(folder):
    log(folder, "lr", [(6144, 0.001), (12288, 0.00025)])
    file = folder.scalars / "lr.csv"
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        file.write_bytes(whole[:size])
        assert folder.read_scalar("lr") == [(6144, 0.001)]
        folder.truncate_logs(999_999)
        assert file.read_bytes() == whole[:first]


def test_a_line_broken_in_the_middle_is_named_and_no_file_is_cut(folder):
    log(folder, "a", [(1, 0.1), (9, 0.2)])
    log(folder, "b", [(1, 0.1)])
    (folder.scalars / "b.csv").write_text("1,0.1\n2,0.\x005,7\n3,0.1\n")
    before = tree(folder.path)
    with pytest.raises(RunFolderError, match=r"b\.csv is broken in line 2"):
        folder.truncate_logs(1)
    assert tree(folder.path) == before


def test_cutting_back_a_run_that_never_logged_does_nothing(folder):
    before = tree(folder.path)
    folder.truncate_logs(0)
    assert tree(folder.path) == before


# -- summary -----------------------------------------------------------------------------------


def test_a_summary_is_strict_json_whatever_the_numbers_are(folder):
    folder.write_summary(
        {
            "return": torch.tensor(1.5),
            "length": math.nan,
            "best": -math.inf,
            "nested": {"sizes": (1, torch.tensor([2.0, math.nan]))},
            "folder": folder.path,
            "resumed": True,
            "note": None,
        }
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads((folder.path / "summary.json").read_text(), parse_constant=refuse)
    assert read == {
        "return": 1.5,
        "length": None,
        "best": None,
        "nested": {"sizes": [1, [2.0, None]]},
        "folder": str(folder.path),
        "resumed": True,
        "note": None,
    }


def test_a_summary_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(RunFolderError, match=r"cannot write .*summary\.json: There is no folder"):
        RunFolder(tmp_path / "gone").write_summary({})


# -- whole files -------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failure, stage):
    file = tmp_path / "summary.json"
    file.write_text("old")

    def fail(*_):
        raise failure

    monkeypatch.setattr(*((_files.os, "fsync") if stage == "fsync" else (Path, "replace")), fail)
    with pytest.raises(type(failure)):
        atomic_write_text(file, "new")
    assert tree(tmp_path) == {"summary.json": b"old"}


def test_a_kill_before_the_rename_leaves_the_old_file(tmp_path):
    file = tmp_path / "summary.json"
    file.write_text("old")
    dies_as_a_killed_process_does = f"""
import os, pathlib, runpy
write = runpy.run_path({_files.__file__!r})["atomic_write_bytes"]
pathlib.Path.replace = lambda *_: os._exit(9)
write({str(file)!r}, b"new")
"""
    done = subprocess.run([sys.executable, "-c", dies_as_a_killed_process_does], check=False)
    assert done.returncode == 9
    assert file.read_text() == "old"


def test_the_bytes_are_on_disk_before_the_rename(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(_files.os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (calls.append("rename"), replace(a, b)))
    atomic_write_text(tmp_path / "file", "größer\n")
    assert calls == ["fsync", "rename"]
    assert (tmp_path / "file").read_bytes() == "größer\n".encode()


def test_a_written_file_has_the_permissions_of_any_other_file(tmp_path):
    (tmp_path / "plain").write_text("")
    atomic_write_text(tmp_path / "atomic", "")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


# -- the learning curve ------------------------------------------------------------------------


def pixels(file: Path):
    from matplotlib import image

    return image.imread(file)


def test_the_learning_curve_is_drawn_from_the_logged_scalars(folder):
    log(folder, RETURN_SCALAR, [(0, math.nan), (1000, -1200.0), (2000, -150.0)])
    file = folder.plot_learning_curve("pendulum")
    assert file == folder.path / "learning_curve.png"
    rising = pixels(file)
    log(folder, LENGTH_SCALAR, [(1000, 200.0), (2000, 200.0)])
    two_panels = pixels(folder.plot_learning_curve("pendulum"))
    assert two_panels.shape[0] > rising.shape[0]
    folder.truncate_logs(1000)
    flat = pixels(folder.plot_learning_curve("pendulum"))
    assert flat.shape == two_panels.shape
    assert (flat != two_panels).any()


def test_a_run_without_a_finished_episode_still_gets_its_picture(folder):
    log(folder, RETURN_SCALAR, [(0, math.nan)])
    assert pixels(folder.plot_learning_curve()).size > 0


def test_rows_without_a_finished_episode_do_not_change_the_picture(folder):
    log(folder, RETURN_SCALAR, [(1000, -1200.0), (2000, -150.0)])
    before = pixels(folder.plot_learning_curve())
    log(folder, RETURN_SCALAR, [(3000, math.nan)])
    assert (pixels(folder.plot_learning_curve()) == before).all()


def test_a_run_without_the_scalar_is_told_which_scalars_it_has(folder):
    log(folder, "lr", [(0, 0.1)])
    with pytest.raises(RunFolderError, match="it has: lr"):
        folder.plot_learning_curve()


def test_drawing_touches_neither_pyplot_nor_the_users_backend(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    log(folder, RETURN_SCALAR, [(0, 1.0)])
    folder.plot_learning_curve()
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_the_error_names_the_extra(folder, monkeypatch):
    log(folder, RETURN_SCALAR, [(0, 1.0)])
    for name in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install torchrl-rslstorage\[cli\]"):
        folder.plot_learning_curve()


# -- extras and versions -----------------------------------------------------------------------


def test_an_extra_that_is_installed_but_broken_says_what_broke(tmp_path, monkeypatch):
    (tmp_path / "broken_extra.py").write_text("import not_there_either\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"rslstorage\[gym\] \(it is installed.*not_there_either"):
        require_extra("broken_extra", "gym")


def test_versions_are_those_of_the_installed_packages(monkeypatch):
    assert versions()["torch"].startswith(torch.__version__.partition("+")[0])

    def missing(name):
        raise run_folder.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(run_folder.metadata, "version", missing)
    assert versions()["torchrl_rslstorage"] == "unknown"
