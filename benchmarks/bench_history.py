"""A history of steps 390 numbers wide: one append, one read by age, and one update's discriminator batches.

A shape is max_len x environments. TorchRL's side is a ring, ``LazyTensorStorage`` of two dimensions with
``ReplayBuffer.add`` and ``RandomSampler``; it knows neither resets nor ages, so that reading by age is its
storage indexed by rows that were worked out beforehand. ``torchrl_extend`` hands it the step as ``[N, 1]``.
rsl-rl-lib 5.5.1 has no history.

*Append*: the memcpy bound copies one row into the next of as many rows, so that it meets the same memory.

*Mini-batches*: 5 epochs x 4, of as many cells an epoch as a window of 24 steps has transitions, or as the
history holds. Ours draws anew for each epoch; ``ours_one_draw`` once for all of them; ``ours_partly_reset``
anew, after a third of the environments were reset and half of ``max_len`` was appended. TorchRL's ring draws
with replacement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers import RandomSampler

from benchmarks.harness import (
    MEMCPY,
    NUM_EPOCHS,
    NUM_MINI_BATCHES,
    OURS,
    TORCHRL,
    Contender,
    Row,
    Settings,
    Shape,
    measure,
    memcpy,
    nbytes,
)
from torchrl_rslstorage import HistoryBuffer, HistorySampler

SUBJECTS = ("history_append", "history_at_age", "history_mini_batches")
SHAPES = ("10x4096", "30x4096", "100x4096")
WIDTH = 390
WINDOW = 24
"""Steps of a rollout: an epoch has as many discriminator samples as PPO's has transitions."""


def num_samples(shape: Shape) -> int:
    return min(WINDOW, shape.num_steps) * shape.num_envs


def make_step(shape: Shape, settings: Settings) -> TensorDict:
    observation = torch.randn(shape.num_envs, WIDTH, device=settings.device)
    return TensorDict({"policy": observation}, [shape.num_envs], device=settings.device)


def our_history(shape: Shape, settings: Settings, step: TensorDict, **options: Any) -> HistoryBuffer:
    """A full history."""
    sampler = HistorySampler(NUM_MINI_BATCHES, NUM_EPOCHS, num_samples(shape), **options)
    buffer = HistoryBuffer(shape.num_steps, shape.num_envs, sampler=sampler, device=settings.device)
    for _ in range(shape.num_steps):
        buffer.append(step)
    return buffer


def reset_part(buffer: HistoryBuffer, step: TensorDict) -> None:
    buffer.reset(torch.arange(0, buffer.num_envs, 3))
    for _ in range(buffer.max_len // 2):
        buffer.append(step)


def torchrl_ring(shape: Shape, settings: Settings, step: TensorDict) -> ReplayBuffer:
    """A full ring."""
    ring = ReplayBuffer(
        storage=LazyTensorStorage(shape.num_cells, device=settings.device, ndim=2),
        sampler=RandomSampler(),
        batch_size=max(1, num_samples(shape) // NUM_MINI_BATCHES),
    )
    for _ in range(shape.num_steps):
        ring.add(step)
    return ring


def appends(shape: Shape, settings: Settings) -> list[Contender]:
    step = make_step(shape, settings)
    ours, theirs = our_history(shape, settings, step), torchrl_ring(shape, settings, step)
    column = step.unsqueeze(1)
    source = step["policy"]
    rows = torch.zeros(shape.num_steps, *source.shape, device=settings.device).unbind(0)
    turn = 0

    def copy() -> None:
        nonlocal turn
        turn = (turn + 1) % len(rows)
        rows[turn].copy_(source)

    return [
        Contender(OURS, lambda: ours.append(step)),
        Contender(TORCHRL, lambda: theirs.add(step)),
        Contender("torchrl_extend", lambda: theirs.extend(column)),
        Contender(MEMCPY, copy),
    ]


def reads(shape: Shape, settings: Settings) -> list[Contender]:
    step = make_step(shape, settings)
    ours, theirs = our_history(shape, settings, step), torchrl_ring(shape, settings, step)
    envs = torch.arange(shape.num_envs, device=settings.device)
    ages = envs % shape.num_steps
    rows = shape.num_steps - 1 - ages
    return [
        Contender(OURS, lambda: ours.at_age(ages)),
        Contender("ours_one_age", lambda: ours.at_age(shape.num_steps // 2)),
        Contender(TORCHRL, lambda: theirs.storage.get((rows, envs))),
        memcpy(nbytes([step["policy"]]), settings.device),
    ]


def updates(shape: Shape, settings: Settings) -> list[Contender]:
    step = make_step(shape, settings)
    ours, partly = our_history(shape, settings, step), our_history(shape, settings, step)
    once = our_history(shape, settings, step, redraw="update")
    reset_part(partly, step)
    ring = torchrl_ring(shape, settings, step)

    def read(buffer: HistoryBuffer) -> None:
        for _ in buffer:
            pass

    def torchrl() -> None:
        for _ in range(NUM_EPOCHS * NUM_MINI_BATCHES):
            ring.sample()

    return [
        Contender(OURS, lambda: read(ours)),
        Contender("ours_partly_reset", lambda: read(partly)),
        Contender("ours_one_draw", lambda: read(once)),
        Contender(TORCHRL, torchrl),
        memcpy(4 * WIDTH * num_samples(shape), settings.device, times=NUM_EPOCHS),
    ]


def run(settings: Settings) -> Iterator[Row]:
    for chosen in settings.chosen(SHAPES):
        shape = dataclasses.replace(chosen, groups={"policy": WIDTH})
        for subject, contenders in zip(SUBJECTS, (appends, reads, updates), strict=True):
            yield Row(subject, shape, measure(contenders(shape, settings), settings))


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    main(["history", *sys.argv[1:]])
