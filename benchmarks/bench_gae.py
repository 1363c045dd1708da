"""Advantages and value targets of one window, without the critic.

*Advantages*, from a full window to normalised advantages in it: `RolloutGAE`, rsl-rl-lib's
``PPO.compute_returns``, TorchRL's ``GAE``. Every side gets its critic's answers ready-made: ours through a
value network that returns them, rsl-rl-lib through a critic that does, TorchRL as entries of its batch.
All normalise over the window. Ours includes the final observations and the look for NaN; with the
check of every observation that `RSLPPOTrainer` asks for it is also measured ("checked").

*Recursion*, the same without what surrounds it: our `GAERecursion`; ``compute_returns`` told not to
normalise; TorchRL's function.

TorchRL's default is its loop; its vectorised form stands beside it. The memcpy bound copies two columns
``[T, N, 1]``, which is less than any of them reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives.value import GAE
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    vec_generalized_advantage_estimate,
)

from benchmarks.contenders import (
    GAMMA,
    LMBDA,
    make_rollout,
    our_buffer,
    rsl_rl_networks,
    rsl_rl_ppo,
    rsl_rl_storage,
    torchrl_batch,
)
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
from torchrl_rslstorage import RolloutGAE
from torchrl_rslstorage.objectives.returns import GAERecursion

SUBJECTS = ("gae", "gae_recursion")
VECTORIZED = "torchrl_vectorized"
SHAPES = ("XS", "S", "64x1024", "M", "L", "XL")


class _ReadyValues(TensorDictModuleBase):
    """A critic of ours that has its answers already."""

    def __init__(self, key: str, values: Tensor) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [key], ["state_value"]
        self.values = values

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("state_value", self.values)


class _ReadyCritic:
    """A critic of rsl-rl-lib's that has its answers already."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __call__(self, obs: TensorDict) -> Tensor:
        return self.values

    def get_hidden_state(self) -> None:
        return None

    def reset(self, dones: Any = None, hidden_state: Any = None) -> None:
        pass


def contenders(shape: Shape, settings: Settings) -> list[Contender]:
    rollout = make_rollout(shape, settings.device)
    buffer = our_buffer(shape, rollout, keys=["action"])
    num_finals = len(buffer.final_observations.t)
    ready = _ReadyValues(shape.critic_group, torch.randn(num_finals, 1, device=settings.device))
    ours = RolloutGAE(GAMMA, LMBDA, ready, normalize=True)
    checked = RolloutGAE(GAMMA, LMBDA, ready, normalize=True, check_observations=True)
    found = [
        Contender(OURS, lambda: ours(buffer)),
        Contender("ours_checked", lambda: checked(buffer)),
        memcpy(2 * 4 * shape.num_cells, settings.device),
    ]
    return found if shape.ours_alone else [*found, *_others(shape, rollout)]


def _others(shape: Shape, rollout: TensorDict) -> list[Contender]:
    batch = _torchrl_batch(rollout)
    loop = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=None, average_gae=True)
    vectorized = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=None, average_gae=True, vectorized=True)

    def torchrl(gae: GAE) -> None:
        with torch.no_grad():
            gae(batch)

    return [
        Contender(RSL_RL, _compute_returns(shape, rollout, normalize=True)),
        Contender(TORCHRL, lambda: torchrl(loop)),
        Contender(VECTORIZED, lambda: torchrl(vectorized)),
    ]


def recursion_contenders(shape: Shape, settings: Settings) -> list[Contender]:
    rollout = make_rollout(shape, settings.device)
    value, reward, done = rollout["state_value"], rollout["next", "reward"], rollout["next", "done"]
    advantage, value_target = torch.empty_like(value), torch.empty_like(value)
    recursion = GAERecursion(advantage, value_target, value)
    last = torch.randn(shape.num_envs, 1, device=settings.device).mul_(GAMMA)

    def ours() -> None:
        advantage.copy_(reward)
        advantage[-1].add_(last)
        recursion(done, gamma=GAMMA, lmbda=LMBDA)

    found = [Contender(OURS, ours), memcpy(2 * 4 * shape.num_cells, settings.device)]
    if shape.ours_alone:
        return found
    batch = _torchrl_batch(rollout)
    after = batch["next"]
    given = (
        batch["state_value"],
        after["state_value"],
        after["reward"],
        after["done"],
        after["terminated"],
    )
    return [
        *found,
        Contender(RSL_RL, _compute_returns(shape, rollout, normalize=False)),
        Contender(TORCHRL, lambda: generalized_advantage_estimate(GAMMA, LMBDA, *given)),
        Contender(VECTORIZED, lambda: vec_generalized_advantage_estimate(GAMMA, LMBDA, *given)),
    ]


def _compute_returns(shape: Shape, rollout: TensorDict, *, normalize: bool) -> Callable[[], None]:
    last = rollout[-1]["next"].select(*shape.groups)
    ppo = rsl_rl_ppo(*rsl_rl_networks(shape, last), rsl_rl_storage(shape, rollout))
    values = torch.randn(shape.num_envs, 1, device=rollout.device)
    ppo.critic = _ReadyCritic(values)  # type: ignore[assignment] - all that compute_returns asks of it
    ppo.normalize_advantage_per_mini_batch = not normalize

    def run() -> None:
        with torch.inference_mode():  # as OnPolicyRunner.learn calls it
            ppo.compute_returns(last)

    return run


def _torchrl_batch(rollout: TensorDict) -> TensorDict:
    batch = torchrl_batch(rollout)
    for key in ("state_value", ("next", "state_value")):
        batch[key] = torch.randn(*batch.shape, 1, device=rollout.device)
    return batch


def run(settings: Settings) -> Iterator[Row]:
    for subject, make in zip(SUBJECTS, (contenders, recursion_contenders), strict=True):
        for shape in settings.chosen(SHAPES):
            yield Row(subject, shape, measure(make(shape, settings), settings))


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    main(["gae", *sys.argv[1:]])
