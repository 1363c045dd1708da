"""RolloutGAE: advantages and value targets of a rollout, once per window, in place."""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_rslstorage.data import RolloutBuffer
from torchrl_rslstorage.data.leaves import Key, canonical, dtype_name, show, show_all
from torchrl_rslstorage.modules import RNNCritic
from torchrl_rslstorage.modules.normalizer import Pool
from torchrl_rslstorage.objectives.finite import Bootstraps, check_finite
from torchrl_rslstorage.objectives.padded import is_recurrent
from torchrl_rslstorage.objectives.returns import (
    GAERecursion,
    normalize_advantage,
    require_same_shape,
    rsl_rl_gae_,
)

TimeOut = Literal["final_observation", "rsl_rl"]
"""What follows a truncated step: V of its true final observation, or RSL-RL's stand-in V(s_t)."""


class RolloutGAE:
    """Generalised advantage estimation over a rollout, exact at truncations.

        δ_t = r_t + γ·V(s'_t)·(1 − terminated_t) − V(s_t)
        A_t = δ_t + γλ·(1 − done_t)·A_{t+1}

    ``s'_t`` is what the environment really showed after step t: the next row, or, where the episode was
    cut off by a time limit or the window ends, the final observation kept beside the rollout. Termination
    zeroes the bootstrap; truncation cuts the trace and keeps it. Schulman et al. 2016, arXiv:1506.02438.

    ``time_out="rsl_rl"`` is RSL-RL's rule (rsl_rl 5.5.1, algorithms/ppo.py, ``process_env_step``): at a
    time-out ``r_t += γ·V(s_t)``, then the trace and the bootstrap are cut as at a termination. It is also
    what stands in, announced once, where an environment resets itself and gives no final observation
    (NaN in ``next``).

    Args:
        gamma: discount γ.
        lmbda: trace decay λ.
        value_network: the critic: reads observations, writes the state value. Needed for a
            `RolloutBuffer`; a TensorDict that holds the values of ``next`` needs none.
        time_out: what follows a truncated step.
        normalize: also normalise the advantages over the whole window, ``(A − mean) / (std + 1e-8)``
            with the unbiased std, as RSL-RL does unless it normalises per mini-batch. Value targets are
            those of the raw advantages.
        pool: normalise by the moments of all ranks' advantages (`Ranks.pool`).
        advantage_key, value_target_key, value_key, reward_key, done_key, terminated_key, truncated_key:
            the entries read and written; the last four stand under ``next``.
        log_prob_key: checked for NaN and inf together with the advantages, where it is there.
        check_observations: look at every observation, too, not only at what came of it: a network that
            saturates (tanh) makes finite values of infinite observations. Costs one read of the window.

    Raises:
        ValueError: γ or λ outside [0, 1], an unknown rule; a shape other than ``[T, N, 1]``; values and
            rewards of different dtypes; NaN or inf in the window (the message names key, step and
            environment).
        KeyError: an entry that is read is not there.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import RolloutGAE
        >>> flags = {"done": torch.zeros(2, 1, 1, dtype=torch.bool)}
        >>> flags["terminated"] = flags["done"].clone()
        >>> after = {"reward": torch.ones(2, 1, 1), "state_value": torch.zeros(2, 1, 1), **flags}
        >>> td = TensorDict({"state_value": torch.zeros(2, 1, 1), "next": after}, [2, 1])
        >>> RolloutGAE(gamma=1.0, lmbda=1.0)(td, time_dim=0)["advantage"].flatten()
        tensor([2., 1.])
    """

    def __init__(
        self,
        gamma: float = 0.99,
        lmbda: float = 0.95,
        value_network: TensorDictModuleBase | None = None,
        *,
        time_out: TimeOut = "final_observation",
        normalize: bool = False,
        pool: Pool | None = None,
        advantage_key: NestedKey = "advantage",
        value_target_key: NestedKey = "value_target",
        value_key: NestedKey = "state_value",
        reward_key: NestedKey = "reward",
        done_key: NestedKey = "done",
        terminated_key: NestedKey = "terminated",
        truncated_key: NestedKey = "truncated",
        log_prob_key: NestedKey = "action_log_prob",
        check_observations: bool = False,
    ) -> None:
        for name, number in (("gamma", gamma), ("lmbda", lmbda)):
            if not 0.0 <= number <= 1.0:
                raise ValueError(f"`{name}` must lie in [0, 1], got {number}.")
        if time_out not in get_args(TimeOut):
            raise ValueError(f"`time_out` must be one of {get_args(TimeOut)}, got {time_out!r}.")
        self.gamma = float(gamma)
        self.lmbda = float(lmbda)
        self.value_network = value_network
        self.time_out: TimeOut = time_out
        self.normalize = normalize
        self.pool = pool
        self.advantage_key = advantage_key
        self.value_target_key = value_target_key
        self.value_key = value_key
        self.reward_key = reward_key
        self.done_key = done_key
        self.terminated_key = terminated_key
        self.truncated_key = truncated_key
        self.log_prob_key = log_prob_key
        self.check_observations = check_observations
        self._announced = False
        self._recursion: GAERecursion | None = None

    @torch.no_grad()
    def __call__(
        self, data: RolloutBuffer | TensorDictBase, *, time_dim: int | None = None
    ) -> TensorDictBase:
        """Writes ``advantage`` and ``value_target`` into ``data`` and returns its TensorDict.

        Args:
            data: a full `RolloutBuffer`, or a TensorDict with two batch dimensions and a full ``next``.
            time_dim: which dimension of a TensorDict is time; left out, the one named "time", else 0.
        """
        if isinstance(data, RolloutBuffer):
            return self._of_buffer(data)
        return self._of_tensordict(data, time_dim)

    # -- a RolloutBuffer -------------------------------------------------------------------------

    def _of_buffer(self, buffer: RolloutBuffer) -> TensorDictBase:
        window = buffer.window
        if self.value_network is None:
            raise ValueError(
                "RolloutGAE needs a value_network for a RolloutBuffer: the value of the window's last "
                "observations is not in it. Pass RolloutGAE(..., value_network=critic)."
            )
        storage = buffer.storage
        value = window.get(self.value_key, None)
        if value is None:
            if is_recurrent(self.value_network):
                raise KeyError(
                    f"This window holds no {show(self.value_key)}: a recurrent critic must run while it is "
                    "collected, since values depend on states. Collect with ActorCritic(actor, critic)."
                )
            made = self._evaluate(window.exclude("next").reshape(-1))
            value = storage.derived(self.value_key, dtype=made.dtype)
            value.copy_(made.view_as(value))
        after = window.get("next")
        reward, done = _required(after, self.reward_key), _required(after, self.done_key)
        terminated = _required(after, self.terminated_key)
        truncated = _required(after, self.truncated_key)
        self._check(value, reward, done, terminated, truncated)
        advantage = storage.derived(self.advantage_key, dtype=value.dtype)
        value_target = storage.derived(self.value_target_key, dtype=value.dtype)

        t, n, observation = buffer.final_observations
        cell = t * buffer.num_envs + n
        next_value = self._evaluate(observation).view(-1)
        _require_same_dtype("values of final observations", next_value, value)
        # What counts are truncated steps and the last row of episodes that go on.
        cut = done if self.time_out == "rsl_rl" else terminated
        ended = cut.view(-1).index_select(0, cell)

        def fill(after: Tensor) -> None:
            advantage.copy_(reward)
            if self.time_out == "rsl_rl":
                advantage.add_(value_target.copy_(truncated).mul_(value).mul_(self.gamma))
            after = after.masked_fill(ended, 0.0).mul_(self.gamma)
            advantage.view(-1).index_add_(0, cell, after)
            self._recurse(advantage, value_target, value, done, again=True)

        fill(next_value)
        log_prob = window.get(self.log_prob_key, None)
        if self.check_observations or not _sums_are_finite(advantage, log_prob):
            inputs = observation.select(*self.value_network.in_keys, strict=False)
            # A NaN observation of an episode that goes on is a fault, not a missing final observation.
            stands_in = _no_observation(inputs) & done.view(-1)[cell] & ~ended
            if bool(stands_in.any()):
                self._announce(stands_in)
                fill(torch.where(stands_in, value.view(-1)[cell], next_value))
            bootstraps = Bootstraps(cell, _leaves_under_next(inputs), ~ended & ~stands_in)
            self._search(window, advantage, observation, bootstraps)
        if self.normalize:
            normalize_advantage(advantage, out=advantage, pool=self.pool)
        return window

    def _evaluate(self, observation: TensorDictBase) -> Tensor:
        network = self.value_network
        assert network is not None
        observation = _within_episodes(observation, network)
        missing = [key for key in network.in_keys if key not in observation.keys(True)]
        if missing:
            raise KeyError(
                f"The value network reads {show(missing[0])}, which this window does not hold where it is "
                "needed. A final observation is taken from `next`: environments and collectors must "
                "leave it there (compact_obs=False)."
            )
        # Networks write into what they are given: a copy of the containers.
        value = network(observation.select(*network.in_keys).copy()).get(self.value_key, None)
        if value is None:
            raise KeyError(
                f"The value network writes {show_all(network.out_keys)}, not {show(self.value_key)}: pass "
                "RolloutGAE(..., value_key=...)."
            )
        require_same_shape({show(self.value_key): value}, (*observation.batch_size, 1), "[*, 1]")
        return value

    # -- a plain TensorDict ----------------------------------------------------------------------

    def _of_tensordict(self, td: TensorDictBase, time_dim: int | None) -> TensorDictBase:
        if td.ndim != 2:
            raise ValueError(f"Expected two batch dimensions, got {tuple(td.batch_size)}.")
        if time_dim is None:
            names = td.names or []
            time_dim = names.index("time") if "time" in names else 0
        if time_dim not in (0, 1):
            raise ValueError(f"`time_dim` must be 0 or 1, got {time_dim}.")
        rows = td if time_dim == 0 else td.transpose(0, 1)
        after = _required(rows, "next")
        value, next_value = self._values(rows), self._values(after)
        reward, done = _required(after, self.reward_key), _required(after, self.done_key)
        truncated, terminated = (
            after.get(self.truncated_key, None),
            after.get(self.terminated_key, None),
        )
        if terminated is None:
            terminated = done if truncated is None else done & ~truncated
        if truncated is None:
            truncated = done & ~terminated
        self._check(value, reward, done, terminated, truncated)
        require_same_shape({f"next {show(self.value_key)}": next_value}, value.shape, "[T, N, 1]")
        _require_same_dtype("values of next observations", next_value, value)

        last = torch.zeros_like(done)
        last[-1] = True
        counts = last & ~done if self.time_out == "rsl_rl" else (truncated | last) & ~terminated
        stands_in = counts & done & next_value.isnan()
        bootstrap = torch.where(counts, torch.where(stands_in, value, next_value), torch.zeros_like(value))
        if self.time_out == "rsl_rl":
            bootstrap += value * truncated
        else:
            self._announce(stands_in)
        advantage = (reward + self.gamma * bootstrap).contiguous()
        value_target = torch.empty_like(advantage)
        self._recurse(advantage, value_target, value, done, again=False)
        cell = torch.arange(done.numel(), device=done.device)
        used = (counts & ~stands_in).reshape(-1)
        inputs = _leaves_under_next(self._inputs(after).reshape(-1))
        if self.check_observations or not _sums_are_finite(advantage, rows.get(self.log_prob_key, None)):
            self._search(rows, advantage, after, Bootstraps(cell, inputs, used))
        if self.normalize:
            normalize_advantage(advantage, out=advantage, pool=self.pool)
        if time_dim == 1:
            advantage, value_target = advantage.transpose(0, 1), value_target.transpose(0, 1)
        td.set(self.advantage_key, advantage)
        td.set(self.value_target_key, value_target)
        return td

    def _values(self, td: TensorDictBase) -> Tensor:
        value = td.get(self.value_key, None)
        if value is not None:
            return value
        if self.value_network is None:
            raise KeyError(
                f"There is no {show(self.value_key)} and no value_network to compute it: store the "
                "values, or pass RolloutGAE(..., value_network=critic)."
            )
        return self._evaluate(td.reshape(-1)).view(*td.batch_size, 1)

    def _inputs(self, td: TensorDictBase) -> TensorDictBase:
        """What `_values` reads: the values themselves where they are stored, else observations."""
        network = self.value_network
        if network is None or td.get(self.value_key, None) is not None:
            return td.select(self.value_key)
        return td.select(*network.in_keys)

    # -- both ------------------------------------------------------------------------------------

    def _recurse(
        self, advantage: Tensor, value_target: Tensor, value: Tensor, done: Tensor, *, again: bool
    ) -> None:
        """Runs the recursion that ``time_out`` asks for; ``again`` if the same memory comes back."""
        if self.time_out == "rsl_rl":
            rsl_rl_gae_(advantage, value_target, value, done, gamma=self.gamma, lmbda=self.lmbda)
            return
        recursion = self._recursion
        if recursion is None or not recursion.is_of(advantage, value_target, value):
            recursion = GAERecursion(advantage, value_target, value)
        if again:
            self._recursion = recursion
        recursion(done, gamma=self.gamma, lmbda=self.lmbda)

    def _search(
        self, window: TensorDictBase, advantage: Tensor, after: TensorDictBase, bootstraps: Bootstraps
    ) -> None:
        # What stands both in a row and after it is an observation; policies may write infinities (logits
        # of masked actions), which are none of our business.
        made = [canonical(self.log_prob_key), canonical(self.value_key)]
        critic = () if self.value_network is None else self.value_network.in_keys
        read = [canonical(key) for key in (*after.keys(True, True), *critic)]
        names = [key for key in read if key not in made]
        # In the order of a step: what the networks made of the observations comes before the reward.
        columns = {key: window.get(key, None) for key in [*names, *made, _under_next(self.reward_key)]}
        check_finite({key: x for key, x in columns.items() if isinstance(x, Tensor)}, bootstraps, advantage)

    def _check(
        self, value: Tensor, reward: Tensor, done: Tensor, terminated: Tensor, truncated: Tensor
    ) -> None:
        if (
            value.shape == reward.shape == done.shape == terminated.shape == truncated.shape
            and value.shape[2:] == (1,)
            and value.dtype == reward.dtype
        ):
            return
        tensors = {
            str(canonical(self.value_key)): value,
            str(canonical(self.reward_key)): reward,
            str(canonical(self.done_key)): done,
            str(canonical(self.terminated_key)): terminated,
            str(canonical(self.truncated_key)): truncated,
        }
        require_same_shape(tensors, (*reward.shape[:2], 1), "[T, N, 1]")
        _require_same_dtype("rewards", reward, value)

    def _announce(self, stands_in: Tensor) -> None:
        if self._announced:
            return
        count = int(stands_in.sum())
        if count:
            self._announced = True
            warnings.warn(
                f"{count} truncated step(s) of this window have no final observation (NaN in `next`): the "
                "environment resets itself and does not give it. RSL-RL's rule V(s_t) stands in for "
                "V(final observation). Give final observations for an exact bootstrap; said once.",
                UserWarning,
                stacklevel=4,
            )


def _sums_are_finite(advantage: Tensor, log_prob: Tensor | None) -> bool:
    """Whether neither the advantages nor the log-probabilities hold NaN or inf; one host synchronisation.

    A fault in a reward or a value reaches the advantages, one in what the policy read the
    log-probabilities. Finite values whose sum overflows are looked at more closely, which finds nothing.
    """
    total = advantage.sum()
    if isinstance(log_prob, Tensor):
        total = total + log_prob.sum()
    return bool(total.isfinite())


def _no_observation(observation: TensorDictBase) -> Tensor:
    """``[K]`` bool: cells of which some floating-point observation holds NaN."""
    missing = torch.zeros(len(observation), dtype=torch.bool, device=observation.device)
    for value in observation.values(True, True):
        if value.is_floating_point():
            missing |= value.flatten(1).isnan().any(1) if value.ndim > 1 else value.isnan()
    return missing


def _within_episodes(observation: TensorDictBase, network: TensorDictModuleBase) -> TensorDictBase:
    """``observation`` for a network that asks whether episodes start: none does with what it ends with."""
    flag = network.core.is_init_key if isinstance(network, RNNCritic) else "is_init"
    if flag not in network.in_keys or observation.get(flag, None) is not None:
        return observation
    none = torch.zeros(*observation.batch_size, 1, dtype=torch.bool, device=observation.device)
    return observation.copy().set(flag, none)


def _under_next(key: NestedKey) -> Key:
    return canonical(("next", key) if isinstance(key, str) else ("next", *key))


def _leaves_under_next(td: TensorDictBase) -> dict[Key, Tensor]:
    return {_under_next(key): value for key, value in td.items(True, True)}


def _required(td: TensorDictBase, key: NestedKey) -> Any:
    value = td.get(key, None)
    if value is None:
        raise KeyError(
            f"RolloutGAE reads {show(key)}, which is not there. It found {show_all(td.keys(True, True))}."
        )
    return value


def _require_same_dtype(what: str, tensor: Tensor, value: Tensor) -> None:
    if tensor.dtype != value.dtype:
        raise ValueError(
            f"The {what} are {dtype_name(tensor.dtype)} but the state values {dtype_name(value.dtype)}: cast "
            "one of them (torchrl.envs.DoubleToFloat casts an environment)."
        )
