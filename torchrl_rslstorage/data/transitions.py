"""Pairs of states, before and after each step of a window, that never reach across a reset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_rslstorage.data.leaves import Key, canonical, nest, show, show_all
from torchrl_rslstorage.data.rollout_buffer import RolloutBuffer
from torchrl_rslstorage.data.rows import under_next


def transition_pairs(buffer: RolloutBuffer, keys: Sequence[NestedKey]) -> TensorDict:
    """Every step of a full window as (s_t, s_{t+1}), ``[T, N]``, and which of them are whole.

        row          0        1        2 = T - 1
        state       s₀       s₁†      s₀'            † the episode ends here, the next row is another one's
        next        s₁       s₂       s₁'
                  row 1    final   last row's final

    The next state is the next row; where an episode ended, and in the last row, it is the final observation.
    Buffers keep those of terminated steps only if told to:
    ``buffer.storage.keep_final_observations("done")`` before the first row.

    Args:
        buffer: a full window.
        keys: the entries that make up a state; leaves at the root of the window.

    Returns:
        ``[T, N]`` with each key, the same under ``next``, and ``valid`` bool: False where the step after is
        not known (no final observation, or NaN in it; an episode restarted from outside). What stands under
        ``next`` there must not be used.

    Raises:
        RuntimeError: the window is not full.
        KeyError: the window has no such entry.
        ValueError: no keys.

    Examples:
        >>> from torchrl_rslstorage import ActorCritic, MLPActor, MLPCritic, PendulumEnv
        >>> from torchrl_rslstorage import RolloutBuffer, RolloutCollector, transition_pairs
        >>> env = PendulumEnv(num_envs=4, seed=0)
        >>> policy = ActorCritic(MLPActor.for_env(env), MLPCritic.for_env(env))
        >>> buffer = RolloutBuffer(num_steps=8, num_envs=4)
        >>> RolloutCollector(env, policy, replay_buffer=buffer).rollout()
        >>> pairs = transition_pairs(buffer, ["observation"])
        >>> pairs["next", "observation"].shape, bool(pairs["valid"].all())
        (torch.Size([8, 4, 3]), True)
    """
    window = buffer.window
    names = [canonical(key) for key in ([keys] if isinstance(keys, str) else keys)]
    if not names:
        raise ValueError("`keys` must name at least one entry of the window.")
    columns = {name: _column(window, name) for name in names}
    done = cast("Tensor", window.get(("next", "done"))).squeeze(-1)

    # The row after, in the next one; the last row has none until the table gives it.
    valid = torch.zeros_like(done)
    valid[:-1] = ~done[:-1]
    is_init = window.get("is_init", None)
    if is_init is not None:
        valid[:-1] &= ~is_init[1:].squeeze(-1)
    after = {name: torch.cat([column[1:], column[-1:]]) for name, column in columns.items()}

    t, n, observation = buffer.final_observations
    finals = {name: observation.get(name, None) for name in names}
    if all(final is not None for final in finals.values()):
        cell = t * buffer.num_envs + n
        known = torch.ones_like(cell, dtype=torch.bool)
        for name, final in finals.items():
            after[name].flatten(0, 1).index_copy_(0, cell, final)
            if final.is_floating_point():
                known &= ~final.reshape(len(final), -1).isnan().any(1)
        valid.view(-1).index_copy_(0, cell, known)
    pairs: dict[Key, Tensor] = {**columns, **{under_next(name): value for name, value in after.items()}}
    return TensorDict(nest({**pairs, "valid": valid}), window.batch_size, device=window.device)


def _column(window: TensorDictBase, name: Key) -> Tensor:
    column = window.get(name, None)
    if not isinstance(column, Tensor) or name[0] == "next":
        here = [canonical(key) for key in window.keys(True, True)]
        raise KeyError(
            f"There is no entry {show(name)} in this window. It holds "
            f"{show_all(key for key in here if key[0] != 'next')}."
        )
    return column
