"""The 20 mini-batches of one update (5 epochs x 4), made and thrown away.

Two rows come out of one measurement, since the sides differ in what they do: rsl-rl-lib draws one permutation
for all epochs and has no other way; TorchRL draws a new one for each epoch and has no other way; ours does
either. So the figures of both stand in both rows, and the first is never shown without the second.

TorchRL's buffer is filled before the clock starts, although its example fills it anew in each epoch. What
it draws is the collector's batch with ``next`` and all that GAE added. The memcpy bound is one copy of the
entries that the loss reads, or one an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict

from benchmarks.contenders import (
    make_rollout,
    our_buffer,
    our_loss,
    our_networks,
    rsl_rl_storage,
    torchrl_batch,
    torchrl_buffer,
)
from benchmarks.harness import (
    MEMCPY,
    NUM_EPOCHS,
    NUM_MINI_BATCHES,
    OURS,
    RSL_RL,
    TORCHRL,
    Contender,
    Row,
    Settings,
    Shape,
    measure,
    memcpy,
    nbytes,
)
from torchrl_rslstorage import RolloutBuffer

SUBJECTS = ("mini_batches", "mini_batches_reshuffled")
SHAPES = ("XS", "S", "M", "L", "XL")
_RESHUFFLED = "ours_reshuffled"
_MEMCPY_EACH_EPOCH = "memcpy_each_epoch"


def contenders(shape: Shape, settings: Settings) -> list[Contender]:
    rollout = make_rollout(shape, settings.device)
    same = _our_full_buffer(shape, rollout, reshuffle=False)
    fresh = _our_full_buffer(shape, rollout, reshuffle=True)

    def ours() -> None:
        for _ in same:
            pass

    def ours_reshuffled() -> None:
        for _ in fresh:
            pass

    num_bytes = nbytes(value for value in next(iter(same)).values()) * NUM_MINI_BATCHES
    found = [
        Contender(OURS, ours),
        Contender(_RESHUFFLED, ours_reshuffled),
        memcpy(num_bytes, settings.device),
        memcpy(num_bytes, settings.device, times=NUM_EPOCHS, name=_MEMCPY_EACH_EPOCH),
    ]
    return found if shape.ours_alone else [*found, *_others(shape, rollout, settings)]


def _our_full_buffer(shape: Shape, rollout: TensorDict, *, reshuffle: bool) -> RolloutBuffer:
    keys = our_loss(*our_networks(shape, torch.device("cpu"))).in_keys
    buffer = our_buffer(shape, rollout, keys=keys, reshuffle=reshuffle)
    for key in ("advantage", "value_target"):
        buffer.storage.derived(key).normal_()
    return buffer


def _others(shape: Shape, rollout: TensorDict, settings: Settings) -> list[Contender]:
    storage = rsl_rl_storage(shape, rollout)

    def rsl_rl() -> None:
        for _ in storage.mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS):
            pass

    batch = torchrl_batch(rollout)
    for key in ("advantage", "value_target", "state_value", ("next", "state_value")):
        batch[key] = torch.randn(*batch.shape, 1, device=settings.device)
    replay = torchrl_buffer(shape, settings.device)
    replay.extend(batch.reshape(-1))

    def torchrl() -> None:
        for _ in range(NUM_EPOCHS):
            for _ in replay:
                pass

    return [Contender(RSL_RL, rsl_rl), Contender(TORCHRL, torchrl)]


def run(settings: Settings) -> Iterator[Row]:
    for shape in settings.chosen(SHAPES):
        timings = measure(contenders(shape, settings), settings)
        reshuffled, each_epoch = timings.pop(_RESHUFFLED), timings.pop(_MEMCPY_EACH_EPOCH)
        notes = ("TorchRL draws a new permutation each epoch", "rsl-rl-lib keeps one permutation")
        same, fresh = ("", "") if shape.ours_alone else notes
        yield Row(SUBJECTS[0], shape, timings, same)
        yield Row(SUBJECTS[1], shape, {**timings, OURS: reshuffled, MEMCPY: each_epoch}, fresh)


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    main(["mini_batches", *sys.argv[1:]])
