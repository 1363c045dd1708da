"""An RSL-RL `VecEnv` as a TorchRL environment of batch size [N].

RSL-RL's environments (Isaac Lab, mjlab, legged robots) reset what is done within the step that ended it, and
hand out the first observations of the next episode:

    vec_env.step(a)   observations         = s₀ of the next episode where done ─► root of the next step
                      extras["final_obs"]  = s_T of the ended episode          ─► next; NaN if it is not there

Decisions:

- Everything is copied as soon as it is handed out, and before it is handed in: simulators write into the same
  memory in the next step, and some scale the actions where they are.
- The names under which ``extras`` carries final observations differ between projects: `FINAL_NAMES`.
- Nothing asks the device whether anything is done, except on the CPU, where that is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, Composite, Unbounded

from torchrl_rslstorage.data.leaves import dtype_name, leaves, show, show_all
from torchrl_rslstorage.envs.base import BatchedEnv, Leaves

FINAL_NAMES = (
    "final_obs",  # Isaac Lab with compute_final_obs, and Gymnasium since 1.0
    "final_observation",
    "final_observations",
    "terminal_observation",
    "terminal_observations",
    "terminal_obs",
)
"""Where in ``extras`` the observations before the reset are looked for, first come first served."""

_RESERVED = {"action", "reward", "done", "terminated", "truncated", "next", "_reset", "is_init", "collector"}


class VecEnvWrapper(BatchedEnv):
    """Any RSL-RL `VecEnv` (rsl-rl-lib 5, Isaac Lab, mjlab) as a TorchRL environment.

    | key | shape | |
    |---|---|---|
    | one key per observation group | `[N, *]` | dtypes stay |
    | `action` | `[N, num_actions]` float32 | |
    | `reward` | `[N, 1]` float32 | |
    | `done` | `[N, 1]` bool | `terminated` without, `truncated` with ``extras["time_outs"]`` |

    The observation under ``next`` of an ended episode is what ``extras`` gives as its final one
    (`FINAL_NAMES`; Isaac Lab: ``compute_final_obs = True``). Where nothing is given it is NaN, and
    `RolloutGAE` falls back to RSL-RL's rule, which it says once. A group that is not floating-point cannot
    be NaN and is zero: where a critic reads such groups alone, ask for the rule
    (``RolloutGAE(time_out="rsl_rl")``), or give final observations.

    A reset of all environments is ``vec_env.reset()`` where there is one; an environment without goes on with
    the episodes that run. No others than those that the simulator reset can be reset alone.

    Args:
        vec_env: anything with ``num_envs``, ``num_actions``, ``device``, ``get_observations()`` and
            ``step(actions)``; it need not be a subclass of rsl-rl-lib's.
        device: where every tensor is handed out; ``None`` takes the simulator's.
        clip_actions: clip actions to ± this number before the simulator sees them.
        init_at_random_ep_len: spread the first episodes over all phases, as RSL-RL's runner does: sets
            ``vec_env.episode_length_buf`` at the first reset.

    Raises:
        ValueError: observation groups that are no TensorDict or mapping of ``[N, *]`` tensors, or have a name
            that TorchRL uses itself; ``clip_actions`` is not positive.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> class Still:
    ...     num_envs, num_actions, device = 2, 1, "cpu"
    ...
    ...     def get_observations(self):
    ...         return TensorDict({"policy": torch.zeros(2, 3)}, [2])
    ...
    ...     def step(self, actions):
    ...         flags = torch.zeros(2, dtype=torch.bool)
    ...         return self.get_observations(), torch.ones(2), flags, {"time_outs": flags}
    >>> env = VecEnvWrapper(Still())
    >>> env.rollout(4)["policy"].shape
    torch.Size([2, 4, 3])
    """

    can_save_state = False

    def __init__(
        self,
        vec_env: Any,
        *,
        device: torch.device | str | None = None,
        clip_actions: float | None = None,
        init_at_random_ep_len: bool = False,
    ) -> None:
        if clip_actions is not None and not clip_actions > 0:
            raise ValueError(f"`clip_actions` must be positive, or None for no clipping, got {clip_actions}.")
        super().__init__(vec_env.num_envs, device=vec_env.device if device is None else device)
        self.vec_env = vec_env
        self.clip_actions = clip_actions
        self.partial_first_episodes = init_at_random_ep_len
        self.extras: dict[str, Any] = {}
        """What the simulator's last step gave besides, as it gave it: ``extras["log"]`` and others."""
        self.is_closed = False
        self._started = False
        self._reset_itself = torch.zeros(self.num_envs, 1, dtype=torch.bool, device=self.device)

        batch = self.batch_size
        self._observations: Leaves = {}
        self._observations = self._copied(vec_env.get_observations())
        clash = _RESERVED & {key if isinstance(key, str) else key[0] for key in self._observations}
        if clash:
            raise ValueError(
                f"The observation group {show_all(sorted(clash))} is named as TorchRL names its own entries: "
                "rename it in the environment's configuration."
            )
        specs = {
            key: Unbounded(x.shape, dtype=x.dtype, device=self.device)
            for key, x in self._observations.items()
        }
        self.observation_spec = Composite(specs, shape=batch, device=self.device)
        shape = torch.Size([*batch, vec_env.num_actions])
        options: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        if clip_actions is None:
            self.action_spec = Unbounded(shape, **options)
        else:
            self.action_spec = Bounded(-clip_actions, clip_actions, shape, **options)

    @property
    def num_actions(self) -> int:
        """Numbers in one environment's action."""
        return self.vec_env.num_actions

    @property
    def max_episode_length(self) -> int | Tensor:
        """Steps after which the simulator calls a time-out."""
        return self.vec_env.max_episode_length

    @property
    def episode_length_buf(self) -> Tensor:
        """Steps of the running episodes, ``[N]``: the simulator's own, which may be set."""
        return self.vec_env.episode_length_buf

    @episode_length_buf.setter
    def episode_length_buf(self, lengths: Tensor) -> None:
        self.vec_env.episode_length_buf = lengths

    def start(self) -> Leaves:
        """Resets all N environments if the simulator can, and returns their observations."""
        reset = getattr(self.vec_env, "reset", None)
        if callable(reset):
            came = reset()
            # Isaac Lab's also returns extras.
            observations = came[0] if isinstance(came, tuple) else came
        else:
            observations = self.vec_env.get_observations()
        if self.partial_first_episodes and not self._started:
            lengths = self.vec_env.episode_length_buf
            longest = int(torch.as_tensor(self.vec_env.max_episode_length).max())
            self.vec_env.episode_length_buf = torch.randint_like(lengths, high=longest)
        self._started = True
        self._reset_itself = torch.zeros_like(self._reset_itself)
        self._observations = self._copied(observations)
        return self._observations

    def restart(self, mask: Tensor) -> Leaves:
        """The observations of environments that the simulator has reset by now.

        Raises:
            RuntimeError: an environment in ``mask [N, 1]`` was not.
        """
        if bool((mask & ~self._reset_itself).any()):
            raise RuntimeError(
                "An RSL-RL environment resets itself, and others than those that are done cannot be reset "
                "alone: set the length of episodes in the simulator instead of cutting them off outside "
                "(StepCounter), or reset all environments."
            )
        self._reset_itself = self._reset_itself & ~mask
        return self._observations

    def advance(self, action: Tensor) -> Leaves:
        """Steps the simulator, which resets what is done."""
        bound = self.clip_actions
        acted = action.clone() if bound is None else action.clamp(-bound, bound)
        observations, reward, done, extras = self.vec_env.step(acted.to(self.vec_env.device))
        self.extras = extras = {} if extras is None else extras
        done = self._flags("dones", done)
        time_outs = extras.get("time_outs")
        truncated = (
            torch.zeros_like(done) if time_outs is None else self._flags("time_outs", time_outs) & done
        )
        self._reset_itself = done
        self._observations = self._copied(observations)
        return {
            **self._with_finals(self._observations, done, extras),
            "reward": self._column("rewards", reward).to(self.device, torch.float32, copy=True),
            "done": done.clone(),
            "terminated": done & ~truncated,
            "truncated": truncated,
        }

    def after_step(self, next_leaves: Mapping[NestedKey, Tensor]) -> Leaves:
        """The observations to act on now: the simulator has reset what was done."""
        return self._observations

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the simulator, if it can be; a second call does nothing unless ``raise_if_closed``.

        Raises:
            RuntimeError: it is closed already, and ``raise_if_closed``.
        """
        if self.is_closed and raise_if_closed:
            raise RuntimeError("The simulator is already closed.")
        if not self.is_closed:
            self.is_closed = True
            close = getattr(self.vec_env, "close", None)
            if callable(close):
                close()

    def _set_seed(self, seed: int | None) -> None:
        """Seeds the simulator where it has ``seed(seed)``, as Isaac Lab's have."""
        set_seed = getattr(self.vec_env, "seed", None)
        if callable(set_seed):
            set_seed(seed)

    def _with_finals(self, observations: Leaves, done: Tensor, extras: Mapping[str, Any]) -> Leaves:
        """The observations under ``next``: final ones where done, NaN where there are none."""
        if done.device.type == "cpu" and not done.any():
            return dict(observations)
        name = next((name for name in FINAL_NAMES if extras.get(name) is not None), None)
        finals: Mapping[Any, Tensor] = {} if name is None else self._finals(name, extras[name])
        after: Leaves = {}
        for key, value in observations.items():
            final = finals.get(key)
            if final is None:
                final = torch.full_like(value, torch.nan if value.is_floating_point() else 0)
            elif final.shape != value.shape:
                raise ValueError(
                    f"extras[{name!r}] holds {show(key)} of shape {tuple(final.shape)}, expected "
                    f"{tuple(value.shape)}: one row an environment, of which those that are done are read."
                )
            rows = done.view(-1, *[1] * (value.ndim - 1))
            after[key] = torch.where(rows, final.to(self.device, value.dtype), value)
        return after

    def _finals(self, name: str, came: Any) -> Mapping[Any, Tensor]:
        """The final observations by group; a plain tensor is the only group there is."""
        if isinstance(came, Tensor) and len(self._observations) == 1:
            return dict.fromkeys(self._observations, came)
        return _groups(f"extras[{name!r}]", came)

    def _copied(self, observations: Any) -> Leaves:
        """The observation groups in memory of their own."""
        copied: Leaves = {}
        for key, value in _groups("The observations", observations).items():
            if value.shape[:1] != (self.num_envs,):
                raise ValueError(
                    f"The observation group {show(key)} has shape {tuple(value.shape)}, expected "
                    f"[N = {self.num_envs}, ...]."
                )
            copied[key] = value.detach().to(self.device, copy=True)
        for key, first in self._observations.items():
            now = copied.get(key)
            if now is None or now.shape != first.shape or now.dtype is not first.dtype:
                came = "is gone" if now is None else f"is {dtype_name(now.dtype)} {tuple(now.shape)} by now"
                raise ValueError(
                    f"The observation group {show(key)} {came}, but the simulator began with "
                    f"{dtype_name(first.dtype)} {tuple(first.shape)}: it must stay the same in every step."
                )
        return copied

    def _flags(self, name: str, flags: Tensor) -> Tensor:
        """``[N, 1]`` bool of flags of any dtype, in memory of their own."""
        return (self._column(name, flags) != 0).to(self.device)

    def _column(self, name: str, values: Tensor) -> Tensor:
        if values.numel() != self.num_envs:
            raise ValueError(
                f"`{name}` has shape {tuple(values.shape)}, expected ({self.num_envs},) or "
                f"({self.num_envs}, 1): one value an environment."
            )
        return values.detach().reshape(-1, 1)


def _groups(what: str, came: Any) -> Mapping[Any, Tensor]:
    """The tensors of a TensorDict or mapping by name."""
    if isinstance(came, TensorDictBase):
        return leaves(came)
    if isinstance(came, Mapping) and all(isinstance(value, Tensor) for value in came.values()):
        return came
    raise ValueError(
        f"{what} are a {type(came).__name__}, expected a TensorDict of observation groups, as RSL-RL's "
        "VecEnv hands out since version 3."
    )
