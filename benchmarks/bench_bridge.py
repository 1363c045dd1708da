"""rsl-rl-lib's own PPO on our RolloutStorage and on its own: a window written, mini-batches, one update.

The two sides differ in the storage alone, and end in the same parameters, bit for bit. An update is
``compute_returns`` and ``update`` of rsl-rl-lib's PPO, 5 epochs of 4 mini-batches. Recurrent, with an LSTM of
64 and a head of 64 for actor and critic and 5 % of steps done, it is a single epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from rsl_rl.storage import RolloutStorage as RslRlStorage
from tensordict import TensorDict

from benchmarks.bench_recurrent import at_rate, recurrent_rollout, rsl_rl_networks_of
from benchmarks.contenders import keeper, make_rollout, rsl_rl_networks, rsl_rl_ppo, rsl_rl_transitions
from benchmarks.harness import (
    NUM_EPOCHS,
    NUM_MINI_BATCHES,
    OURS,
    RSL_RL,
    Contender,
    Row,
    Settings,
    Shape,
    measure,
)
from torchrl_rslstorage import RolloutStorage

SUBJECTS = ("bridge_write", "bridge_mini_batches", "bridge_update")
RECURRENT_SUBJECTS = tuple(f"{name}_recurrent" for name in SUBJECTS)
SHAPES = ("XS", "S", "M")
RECURRENT_SHAPES = ("M",)
SIDES = {OURS: RolloutStorage, RSL_RL: RslRlStorage}
DONE_RATE, HIDDEN = 0.05, 64


class Side:
    """A storage of one of the two classes, and what goes into it."""

    def __init__(self, cls: Any, shape: Shape, rollout: TensorDict, *, recurrent: bool) -> None:
        observations = rollout[0].select(*shape.groups)
        device = str(rollout.device)
        self.recurrent = recurrent
        self.storage: Any = cls(
            "rl", shape.num_envs, shape.num_steps, observations, [shape.num_actions], device
        )
        self.transitions = rsl_rl_transitions(shape, rollout)
        for t, transition in enumerate(self.transitions if recurrent else ()):
            transition.hidden_states = tuple(
                tuple(rollout[name, part][t].transpose(0, 1).contiguous() for part in ("h", "c"))
                for name in ("actor_state", "critic_state")
            )
        self.write()

    def write(self) -> None:
        """One window, step by step."""
        self.storage.clear()
        for transition in self.transitions:
            self.storage.add_transition(transition)

    def take(self) -> None:
        """The mini-batches of one update."""
        name = "recurrent_mini_batch_generator" if self.recurrent else "mini_batch_generator"
        for _ in getattr(self.storage, name)(NUM_MINI_BATCHES, NUM_EPOCHS):
            pass


def sides(shape: Shape, rollout: TensorDict, *, recurrent: bool) -> dict[str, Side]:
    return {name: Side(cls, shape, rollout, recurrent=recurrent) for name, cls in SIDES.items()}


def update_contenders(shape: Shape, rollout: TensorDict, both: dict[str, Side]) -> list[Contender]:
    found = []
    last = rollout[-1]["next"].select(*shape.groups).clone()
    for name, side in both.items():
        torch.manual_seed(0)
        if side.recurrent:
            networks: tuple[Any, Any] = rsl_rl_networks_of(shape, rollout, HIDDEN)
        else:
            networks = rsl_rl_networks(shape, rollout[0].select(*shape.groups))
        ppo = rsl_rl_ppo(*networks, side.storage)
        if side.recurrent:
            ppo.num_learning_epochs = 1

        def run(ppo: Any = ppo) -> dict[str, float]:
            with torch.inference_mode():
                ppo.compute_returns(last)
            return ppo.update()

        found.append(Contender(name, run, keeper(*networks)))
    return found


def rows(shape: Shape, settings: Settings, *, recurrent: bool) -> Iterator[Row]:
    if recurrent:
        rollout = recurrent_rollout(shape, DONE_RATE, settings.device, HIDDEN)
    else:
        rollout = make_rollout(shape, settings.device)
    both = sides(shape, rollout, recurrent=recurrent)
    write, take, update = RECURRENT_SUBJECTS if recurrent else SUBJECTS
    yield Row(write, shape, measure([Contender(n, s.write) for n, s in both.items()], settings))
    yield Row(take, shape, measure([Contender(n, s.take) for n, s in both.items()], settings))
    yield Row(update, shape, measure(update_contenders(shape, rollout, both), settings))


def run(settings: Settings) -> Iterator[Row]:
    for shape in settings.chosen(SHAPES):
        if not shape.ours_alone:
            yield from rows(shape, settings, recurrent=False)
    for plain in settings.chosen(RECURRENT_SHAPES):
        if not plain.ours_alone:
            shape = dataclasses.replace(at_rate(plain, DONE_RATE), hidden_dims=(HIDDEN,))
            yield from rows(shape, settings, recurrent=True)


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    main(["bridge", *sys.argv[1:]])
