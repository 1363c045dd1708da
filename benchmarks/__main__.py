"""Every benchmark, one table: ``python -m benchmarks [write mini_batches gae loss iteration recurrent …]``.

    python -m benchmarks --compile --json bench.json --png bench.png
    python -m benchmarks gae mini_batches --shape L --seconds 20
    python -m benchmarks --device cuda --shape L

Run it from the root of a checkout, with the package's extra ``test`` installed, on a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path, as `rslstorage bench` does
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import (
    bench_bridge,
    bench_distillation,
    bench_gae,
    bench_history,
    bench_iteration,
    bench_loss,
    bench_memory,
    bench_mini_batches,
    bench_recurrent,
    bench_write,
    report,
)
from benchmarks.bench_memory import MemoryRow
from benchmarks.harness import Row, Settings, add_arguments, machine, quiet, settings_of, versions

SUBJECTS: dict[str, Any] = {
    "write": bench_write,
    "mini_batches": bench_mini_batches,
    "gae": bench_gae,
    "loss": bench_loss,
    "recurrent": bench_recurrent,
    "history": bench_history,
    "distillation": bench_distillation,
    "bridge": bench_bridge,
    # Last, since our trainer makes the process keep freed memory, which speeds up everybody after it.
    "iteration": bench_iteration,
    "memory": bench_memory,
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"{' '.join(SUBJECTS)}; by default all")
    add_arguments(made)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    made.add_argument("--png", type=Path, metavar="FILE", help="also draw the rows to this file")
    made.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    made.add_argument("--goals", action="store_true", help="a column with what we set out to reach")
    return made


def main(argv: Sequence[str] | None = None) -> list[Row | MemoryRow]:
    """Runs what the command line asks for, prints it, and returns the rows."""
    made = parser()
    args = made.parse_args(argv)
    unknown = [name for name in args.subjects if name not in SUBJECTS]
    if unknown:
        made.error(f"there is no subject {unknown[0]!r}: name one of {', '.join(SUBJECTS)}")
    for path in (args.json, args.png):
        if path is not None and not path.parent.is_dir():
            made.error(f"there is no folder {path.parent} to write {path.name} into")
    settings = settings_of(args, made)
    rows = _run(args.subjects or list(SUBJECTS), settings)
    times = [row for row in rows if isinstance(row, Row)]
    memory = [row for row in rows if isinstance(row, MemoryRow)]
    facts, numbers = machine(settings.device), versions()
    table = report.as_markdown if args.markdown else report.as_text
    blocks = [
        *([table(report.time_cells(times, goals=args.goals))] if times else []),
        *([table(report.memory_cells(memory))] if memory else []),
        "\n".join([*report.cost_per_transition(times), *report.footer(facts, numbers)]),
    ]
    print("\n\n".join(blocks))
    if args.json is not None:
        content = {
            "machine": facts,
            "versions": numbers,
            "clock": settings.clock,
            "rows": [row.as_json() for row in times],
            "memory": [row.as_json() for row in memory],
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if args.png is not None and times:
        report.draw(times, args.png, facts, numbers)
    return rows


def _run(subjects: Sequence[str], settings: Settings) -> list[Row | MemoryRow]:
    rows: list[Row | MemoryRow] = []
    for name in subjects:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        with quiet():
            rows.extend(SUBJECTS[name].run(settings))
    return rows


if __name__ == "__main__":
    main()
