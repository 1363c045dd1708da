"""The rows as one table, plain or Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_loss import BARE
from benchmarks.bench_memory import MemoryRow
from benchmarks.harness import COMPILED, MEMCPY, OURS, RSL_RL, TORCHRL, Row

TITLES = {
    "write": "one window, row by row",
    "mini_batches": "20 mini-batches, same permutation",
    "mini_batches_reshuffled": "20 mini-batches, new one each epoch",
    "gae": "advantages",
    "gae_recursion": "advantages, recursion alone",
    "loss_forward": "loss forward",
    "update": "one update",
    "iteration": "one iteration",
    "recurrent_mini_batches": "recurrent, 20 mini-batches",
    "recurrent_update": "recurrent, one epoch",
    "history_append": "history, one append",
    "history_at_age": "history, one read by age",
    "history_mini_batches": "history, 20 mini-batches",
    "distillation": "distillation, one pass, MLP",
    "distillation_recurrent": "distillation, one pass, LSTM 256",
    "bridge_write": "rsl-rl-lib on our storage, one window",
    "bridge_mini_batches": "rsl-rl-lib on our storage, 20 mini-batches",
    "bridge_update": "rsl-rl-lib on our storage, one update",
    "bridge_write_recurrent": "rsl-rl-lib on our storage, recurrent, one window",
    "bridge_mini_batches_recurrent": "rsl-rl-lib on our storage, recurrent, 20 mini-batches",
    "bridge_update_recurrent": "rsl-rl-lib on our storage, recurrent, one epoch",
    "memory_mini_batches": "memory beside the window, 20 mini-batches",
    "memory_update": "memory beside the window, one update",
    "memory_growth": "memory growth",
}

Goal = tuple[float | None, float | None, str]
GOALS: dict[tuple[str, str], Goal] = {
    ("mini_batches", "M"): (12, 25, ""),
    ("mini_batches", "L"): (12, 25, ""),
    ("mini_batches", "XS"): (20, 100, ""),
    ("mini_batches_reshuffled", "M"): (3, 6, ""),
    ("mini_batches_reshuffled", "L"): (3.5, 7, ""),
    ("write", "XS"): (1.5, 8, ""),
    ("write", "S"): (1.4, 6, ""),
    ("write", "L"): (1.0, 1.5, "memcpy ≤ 1.35"),
    ("gae_recursion", "L"): (4, 3, "vectorised ≥ 12"),
    ("gae_recursion", "64x1024"): (4, 3, "vectorised ≥ 12"),
    ("gae_recursion", "XS"): (10, 4, ""),
    ("gae_recursion", "S"): (10, 4, ""),
    ("loss_forward", "XS"): (None, 3.5, "bare ≤ 1.3"),
    ("update", "XS"): (3, 5, "eager ≥ 1.3"),
    ("update", "S"): (2, 2.3, "eager ≥ 1.3"),
    ("iteration", "32x16"): (2.2, 4, "eager ≥ 1.3"),
    ("iteration", "24x256"): (1.8, 3, "eager ≥ 1.3"),
    ("iteration", "24x1024"): (1.05, 1.8, ""),
    ("recurrent_mini_batches", "M, 0.5 % done"): (8, 30, ""),
    ("recurrent_mini_batches", "M, 5 % done"): (12, 30, ""),
    ("recurrent_mini_batches", "M, 30 % done"): (12, 30, ""),
    ("recurrent_update", "M, 0.5 % done"): (1, None, ""),
    ("recurrent_update", "M, 5 % done"): (1.4, None, ""),
    ("recurrent_update", "M, 30 % done"): (3, None, ""),
    ("history_append", "10x4096"): (None, 4, "memcpy ≤ 1.5"),
    ("history_append", "30x4096"): (None, 4, "memcpy ≤ 1.5"),
    ("history_append", "100x4096"): (None, 4, "memcpy ≤ 1.5"),
    ("history_mini_batches", "10x4096"): (None, 2.5, ""),
    ("history_mini_batches", "30x4096"): (None, 2.5, ""),
    ("history_mini_batches", "100x4096"): (None, 2.5, ""),
    ("distillation", "L"): (1, None, ""),
    ("distillation_recurrent", "L"): (1, None, ""),
}
"""What we set out to reach: how many times longer rsl-rl-lib and TorchRL take, and the rest in words."""

Cells = list[list[str]]


def time_cells(rows: Sequence[Row], *, goals: bool = False) -> Cells:
    """Header and one line a row. A ratio is how many times longer the other takes than ours."""
    compiled = any(COMPILED in row.timings for row in rows)
    header = ["", "shape", "ours", *(["compiled"] if compiled else []), "rsl-rl-lib", "TorchRL", "memcpy"]
    cells = [
        [
            *header,
            "rsl-rl-lib / ours",
            "TorchRL / ours",
            "ours / memcpy",
            *(["goal"] if goals else []),
            "also",
        ]
    ]
    for row in rows:
        times = [
            row.ms(OURS),
            *([row.ms(COMPILED)] if compiled else []),
            *map(row.ms, (RSL_RL, TORCHRL, MEMCPY)),
        ]
        against = [_both(row, RSL_RL), _both(row, TORCHRL), _times(_inverse(row.ratio(MEMCPY)))]
        goal = [_goal(row)] if goals else []
        label = f"B = {row.shape.mini_batch_size}" if row.subject == "loss_forward" else row.shape.label
        cells.append([TITLES[row.subject], label, *map(_ms, times), *against, *goal, _also(row)])
    return cells


def memory_cells(rows: Sequence[MemoryRow]) -> Cells:
    """Header and one line a memory row, in mebibytes."""
    cells = [["", "shape", "ours", "rsl-rl-lib", "TorchRL", "one copy of what the loss reads", "also"]]
    for row in rows:
        mib = [row.mib.get(name) for name in (OURS, RSL_RL, TORCHRL)]
        cells.append([TITLES[row.subject], row.shape.label, *map(_mib, [*mib, row.bound_mib]), row.note])
    return cells


def cost_per_transition(rows: Sequence[Row]) -> list[str]:
    """How much more a transition costs at XL than at M, for each subject that was measured at both."""
    at = {(row.subject, row.shape.name): row for row in rows}
    lines = []
    for (subject, name), large in at.items():
        small = at.get((subject, "M"))
        ours = large.ms(OURS)
        if name == "XL" and small is not None and ours is not None:
            ratio = ours / large.shape.num_cells / ((small.ms(OURS) or 0.0) / small.shape.num_cells)
            lines.append(f"cost per transition, {large.shape.size} against {small.shape.size}: "
                         f"{TITLES[subject]} {ratio:.2f}x")  # fmt: skip
    return lines


def footer(machine: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """The machine and the versions, without which no figure means anything."""
    place = (
        f"{machine['cpu']} ({machine['cores']} cores, {machine['threads']} thread used), {machine['system']}"
    )
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    return [f"{place}{gpu}", ", ".join(f"{name} {number}" for name, number in versions.items())]


def as_text(cells: Cells) -> str:
    """Columns aligned with spaces."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = []
    for line in cells:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(line[2:-1], widths[2:-1], strict=True)]
        lines.append("  ".join([*left, *right, line[-1]]).rstrip())
    return "\n".join(lines)


def as_markdown(cells: Cells) -> str:
    """A GitHub table."""
    rule = ["---", "---", *["---:"] * (len(cells[0]) - 3), "---"]
    return "\n".join(f"| {' | '.join(line)} |" for line in [cells[0], rule, *cells[1:]])


def _ms(value: float | None) -> str:
    return "" if value is None else f"{_digits(value)} ms"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} MiB"


def _times(value: float | None) -> str:
    return "" if value is None else f"{_digits(value)}x"


def _digits(value: float) -> str:
    decimals = 3 if value < 0.1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def _inverse(value: float | None) -> float | None:
    return None if value is None else 1 / value


def _both(row: Row, name: str) -> str:
    """The ratio to our eager figure, and the one to the compiled figure behind it."""
    eager, compiled = row.ratio(name), row.ratio(name, to=COMPILED)
    return _times(eager) if compiled is None else f"{_times(eager)}, compiled {_times(compiled)}"


def _also(row: Row) -> str:
    shown = {OURS, COMPILED, RSL_RL, TORCHRL, MEMCPY}
    others = [f"{_word(name)} {_ms(row.ms(name))}" for name in row.timings if name not in shown]
    return "; ".join([*others, *([row.note] if row.note else [])])


def _word(name: str) -> str:
    words = {"ours": "ours,", "torchrl": "TorchRL", BARE: "the bare formula"}
    if name in words:
        return words[name]
    first, _, rest = name.partition("_")
    return f"{words.get(first, first)} {rest.replace('_', ' ')}".strip()


def _goal(row: Row) -> str:
    goal = GOALS.get((row.subject, row.shape.name))
    if goal is None:
        return ""
    rsl_rl, torchrl, more = goal
    parts = [f"≥ {number:g}x" if number else "" for number in (rsl_rl, torchrl)]
    return ", ".join(part for part in [*parts, more] if part)


# -- the picture -------------------------------------------------------------------------------------

_COLOURS = {RSL_RL: "#d95f02", TORCHRL: "#7570b3"}
_NAMES = {RSL_RL: "rsl-rl-lib", TORCHRL: "TorchRL's defaults"}


def draw(rows: Sequence[Row], path: Path, machine: dict[str, Any], versions: dict[str, str]) -> None:
    """Bars of how many times longer than ours each takes, on a logarithmic scale.

    Where a row was also compiled, bars are relative to the compiled figure and a tick marks the eager one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.ratio(RSL_RL) is not None]
    figure = Figure(figsize=(11, 1.9 + 0.55 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        base = COMPILED if COMPILED in row.timings else OURS
        for offset, name in ((-0.2, RSL_RL), (0.2, TORCHRL)):
            ratio = row.ratio(name, to=base)
            if ratio is None:
                continue
            axes.barh(
                place + offset, ratio - 1, left=1, height=0.36, color=_COLOURS[name], label=_NAMES[name]
            )
            axes.annotate(
                f"{_digits(ratio)}x ({_ms(row.ms(name))})",
                (max(ratio, 1.0), place + offset),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
            eager = row.ratio(name)
            if base == COMPILED and eager is not None:
                axes.plot(
                    [eager] * 2, [place + offset - 0.18, place + offset + 0.18], color="white", linewidth=2
                )
    axes.axvline(1, color="black", linewidth=1.5)
    axes.set_xscale("log")
    highest = max((row.ratio(name, to=_base(row)) or 1.0 for row in rows for name in _NAMES), default=1.0)
    lowest = min((row.ratio(name, to=_base(row)) or 1.0 for row in rows for name in _NAMES), default=1.0)
    axes.set_xlim(min(0.8, lowest * 0.8), highest * 4)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    axes.set_xlabel("time relative to ours (black line = 1x); longer bars are slower")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", zorder=0)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    by_name = dict(zip(labels, handles, strict=True))
    shown = [name for name in _NAMES.values() if name in by_name]
    axes.legend([by_name[name] for name in shown], shown, loc="lower right", frameon=False)
    white = (
        "\nwhite tick: against ours without torch.compile" if any(COMPILED in r.timings for r in rows) else ""
    )
    figure.suptitle("torchrl_rslstorage beside rsl-rl-lib and TorchRL, one thread" + white, fontsize=11)
    figure.text(0.01, 0.005, "\n".join(footer(machine, versions)), fontsize=7, color="#555555", va="bottom")
    figure.get_layout_engine().set(
        rect=(0, 0.35 / figure.get_figheight(), 1, 1 - 0.35 / figure.get_figheight())
    )
    figure.savefig(path)


def _base(row: Row) -> str:
    return COMPILED if COMPILED in row.timings else OURS


def _label(row: Row) -> str:
    shape = f"B = {row.shape.mini_batch_size}" if row.subject == "loss_forward" else row.shape.label
    kind = ", compiled" if COMPILED in row.timings else ""
    return f"{TITLES[row.subject]}, {shape}\nours{kind} {_ms(row.ms(_base(row)))}"
