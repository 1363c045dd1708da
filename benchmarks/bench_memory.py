"""Memory of an update beyond the rollout, and whether iterations make it grow.

*Mini-batches*: what handing out all 20 of them takes at its peak, beside the rollout. Ours is one copy of
the entries that the loss reads (the permutation included), whatever the number of epochs. *Update*: the
same with the networks' activations and gradients, which all sides need. TorchRL's replay buffer counts: it
is a copy of the rollout. *Growth*: resident memory after many whole iterations, against that after a tenth
of them.

Peaks are counted by torch's allocators: on a CPU by the profiler, allocation by allocation; on CUDA by its
statistics.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.bench_iteration import OurIteration, pendulum
from benchmarks.contenders import Updates
from benchmarks.harness import (
    NUM_EPOCHS,
    NUM_MINI_BATCHES,
    OURS,
    RSL_RL,
    TORCHRL,
    Settings,
    Shape,
    nbytes,
    parse_shape,
    quiet,
)

SHAPES = ("S", "M")
GROWTH_SHAPE = "XS"
_MIB = 2.0**20


@dataclass
class MemoryRow:
    """Mebibytes by contender."""

    subject: str
    shape: Shape
    mib: dict[str, float]
    bound_mib: float | None
    """One copy of what the loss reads."""
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "shape": self.shape.name,
            **{f"{name}_mib": mib for name, mib in self.mib.items()},
            "bound_mib": self.bound_mib,
            "note": self.note,
        }


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that ``run`` held at any moment, beyond what was held before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events: list[Any] = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def mini_batches_row(shape: Shape, device: torch.device) -> MemoryRow:
    sides = Updates(shape, device)
    sides.ours.gae(sides.ours.buffer)
    sides.torchrl.gae(sides.batch)
    storage, replay = sides.rsl_rl.ppo.storage, sides.torchrl.buffer

    def torchrl() -> None:
        replay.extend(sides.batch.reshape(-1))
        for _ in range(NUM_EPOCHS):
            _drain(replay)

    runs: dict[str, Callable[[], object]] = {
        OURS: lambda: _drain(sides.ours.buffer),
        RSL_RL: lambda: _drain(storage.mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS)),
        TORCHRL: torchrl,
    }
    mib = {name: peak_bytes(run, device) / _MIB for name, run in runs.items()}
    return MemoryRow("memory_mini_batches", shape, mib, _one_copy_mib(sides))


def update_row(shape: Shape, device: torch.device) -> MemoryRow:
    sides = Updates(shape, device)
    runs: dict[str, Callable[[], object]] = {
        OURS: sides.ours,
        RSL_RL: sides.rsl_rl,
        TORCHRL: lambda: sides.torchrl(sides.batch),
    }
    mib = {name: peak_bytes(run, device) / _MIB for name, run in runs.items()}
    return MemoryRow("memory_update", shape, mib, _one_copy_mib(sides))


def growth_row(shape: Shape, device: torch.device, iterations: int) -> MemoryRow:
    """Growth of the process's memory over ``iterations`` whole iterations of ours."""
    iteration = OurIteration(pendulum(shape), device)
    for _ in range(max(1, iterations // 10)):
        iteration()
    before = _resident_bytes(device)
    for _ in range(iterations):
        iteration()
    grown = (_resident_bytes(device) - before) / _MIB
    return MemoryRow("memory_growth", pendulum(shape), {OURS: grown}, None, f"over {iterations} iterations")


def _drain(mini_batches: Iterable[object]) -> None:
    for _ in mini_batches:
        pass


def _one_copy_mib(sides: Updates) -> float:
    ours = sides.ours
    ours.gae(ours.buffer)
    window = ours.buffer.window
    return nbytes(window[key] for key in ours.loss.in_keys) / _MIB


def _resident_bytes(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(settings: Settings) -> Iterator[MemoryRow]:
    for shape in settings.chosen(SHAPES):
        if not shape.ours_alone:
            with quiet():
                rows = [mini_batches_row(shape, settings.device), update_row(shape, settings.device)]
            yield from rows
    with quiet():
        growth = growth_row(parse_shape(GROWTH_SHAPE), settings.device, settings.iterations)
    yield growth


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    main(["memory", *sys.argv[1:]])
