"""Steps of a policy that only plays: nothing is stored, nothing learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type

from torchrl_rslstorage.collectors.rollout_collector import carry_on, states_carried_by_us, take_states


def play(env: EnvBase, actor: Any, *, stochastic: bool = False) -> Iterator[TensorDictBase]:
    """Every step from a full reset on, without end: roots with their ``next``, ``[N]``; states are carried.

    Args:
        env: batch size ``[N]``.
        actor: the policy; in eval mode, if it has a normaliser that shall not move.
        stochastic: sample actions instead of taking the mean.
    """
    kind = ExplorationType.RANDOM if stochastic else ExplorationType.DETERMINISTIC
    carrier, states = env.reset(), states_carried_by_us(env, actor)
    carrier.set("is_init", torch.ones_like(carrier.get("done")))
    while True:
        with torch.no_grad(), set_exploration_type(kind):
            carrier = actor(carrier)
            made = take_states(carrier, states)
            stepped, carrier = env.step_and_maybe_reset(carrier)
            carrier = carry_on(made, stepped.get(("next", "done")), carrier)
        yield stepped
