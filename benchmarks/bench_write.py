"""One window written row by row, then emptied.

Each side gets the same steps, one at a time, in its own form: ours with reward, done flags and the next
observation, of which truncated steps and the last row are kept; rsl-rl-lib a filled ``Transition``, which has
neither next observations nor truncation flags; TorchRL the whole step with its ``next``, through
``ReplayBuffer.add`` into a ``LazyTensorStorage`` of two dimensions. The memcpy bound is one copy of the bytes
that our window holds afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from benchmarks.contenders import make_rollout, rows_of, rsl_rl_storage, rsl_rl_transitions
from benchmarks.harness import (
    OURS,
    RSL_RL,
    TORCHRL,
    Contender,
    Row,
    Settings,
    Shape,
    measure,
    memcpy,
)
from torchrl_rslstorage import RolloutBuffer

SUBJECT = "write"
SHAPES = ("XS", "S", "M", "L", "XL")


def contenders(shape: Shape, settings: Settings) -> list[Contender]:
    rollout = make_rollout(shape, settings.device)
    rows = rows_of(rollout)
    buffer = RolloutBuffer(shape.num_steps, shape.num_envs, device=settings.device)

    def ours() -> None:
        for row in rows:
            buffer.add(row)
        buffer.empty()

    ours()
    found = [Contender(OURS, ours), memcpy(buffer.nbytes(rows[0]) - _derived_nbytes(shape), settings.device)]
    return found if shape.ours_alone else [*found, *_others(shape, rollout, settings)]


def _others(shape: Shape, rollout: TensorDict, settings: Settings) -> list[Contender]:
    transitions = rsl_rl_transitions(shape, rollout)
    storage = rsl_rl_storage(shape, rollout, full=False)

    def rsl_rl() -> None:
        for transition in transitions:
            storage.add_transition(transition)
        storage.clear()

    rows = rows_of(rollout)
    replay = ReplayBuffer(storage=LazyTensorStorage(shape.num_cells, device=settings.device, ndim=2))

    def torchrl() -> None:
        for row in rows:
            replay.add(row)
        replay.empty()

    return [Contender(RSL_RL, rsl_rl), Contender(TORCHRL, torchrl)]


def _derived_nbytes(shape: Shape) -> int:
    return 2 * 4 * shape.num_cells  # advantage and value target, which writing does not touch


def run(settings: Settings) -> Iterator[Row]:
    for shape in settings.chosen(SHAPES):
        yield Row(SUBJECT, shape, measure(contenders(shape, settings), settings))


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    main(["write", *sys.argv[1:]])
