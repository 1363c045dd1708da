"""Any Gymnasium task as a batch of N environments that TorchRL can step.

Gymnasium's synchronous vector environment resets a finished environment within the step that finished it,
and puts the observation in which the episode really ended into ``info["final_obs"]``:

    vector_env.step(a)   observations  = s₀ of the next episode where done ─► root of the next step
                         final_obs     = s_T of the ended episode          ─► next

Decisions:

- Observations are copied out of Gymnasium's buffer, which it is told not to copy itself. Between a last step
  and the reset within it they are copied once more, for tasks that write into one array for ever.
- float64 becomes float32; every other dtype stays (images are uint8).
- Finished environments are the only ones that Python loops over, beyond Gymnasium's own loop.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, TensorSpec, Unbounded

from torchrl_rslstorage._extras import require_extra
from torchrl_rslstorage.envs.base import BatchedEnv, Leaves

if TYPE_CHECKING:
    import gymnasium

_RESERVED = {"action", "reward", "done", "terminated", "truncated", "next", "_reset", "is_init"}

_GYM_EXTRA = ("mujoco", "imageio")
"""What Gymnasium's MuJoCo tasks import (gymnasium 1.4, envs/mujoco/mujoco_rendering.py)."""


class GymnasiumEnv(BatchedEnv):
    """N copies of a Gymnasium task, stepped one after another in this process.

    | key | shape | |
    |---|---|---|
    | `observation`; for a `Dict` space one key per entry, nested as it is | `[N, *]` | no float64 |
    | `action` | `[N, *]` float32, or `[N]` int64 for `Discrete` | clipped to a `Box`'s bounds |
    | `reward` | `[N, 1]` float32 | |
    | `done`, `terminated`, `truncated` | `[N, 1]` bool | |

    >>> env = GymnasiumEnv("Pendulum-v1", 2, seed=0, max_episode_steps=5)
    >>> rollout = env.rollout(5)
    >>> rollout["next", "truncated"].squeeze(-1).tolist()[0]
    [False, False, False, False, True]

    Args:
        task: a registered Gymnasium id, such as ``"HalfCheetah-v5"``.
        num_envs: N.
        device: where every tensor is handed out; the tasks themselves run on the CPU.
        seed: environment i of the first reset gets ``seed + i``; None leaves it to Gymnasium.
        clip_actions: clip a `Box`'s actions to its bounds before the task sees them, so that no more is
            paid for a large action than the task can carry out.
        **make_kwargs: for ``gymnasium.make``, such as ``max_episode_steps``.

    Raises:
        ImportError: gymnasium is missing, or what the task needs (the extra to install is named).
        ValueError: an unknown task, spaces that TorchRL cannot carry, or ``num_envs`` below 1.
    """

    can_save_state = False
    partial_first_episodes = False

    def __init__(
        self,
        task: str,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        clip_actions: bool = True,
        **make_kwargs: Any,
    ) -> None:
        super().__init__(num_envs, device=device)
        self.clip_actions = clip_actions
        self.task = task
        self.vector_env = _make_vector_env(task, num_envs, make_kwargs)
        self.is_closed = False
        self._seed = seed
        self._observations: Leaves | None = None
        self._self_reset = np.zeros(num_envs, dtype=bool)  # reset within the last step

        space = self.vector_env.single_observation_space
        self._paths = {_key(path): path for path, _ in _leaf_spaces(space)}
        self._check_keys()
        batch = self.batch_size
        self.observation_spec = Composite(
            {_key(path): _observation_spec(leaf, batch, self.device) for path, leaf in _leaf_spaces(space)},
            shape=batch,
            device=self.device,
        )
        self._dtypes = {key: self.observation_spec[key].dtype for key in self._paths}
        self.action_spec = _action_spec(self.vector_env.single_action_space, batch, self.device)

    def start(self) -> Leaves:
        """Resets all N tasks, with the seeds that were set since the last time."""
        arrays, _ = self.vector_env.reset(seed=self._seed)
        self._seed = None
        self._self_reset = np.zeros(self.num_envs, dtype=bool)
        self._observations = self._tensors(arrays)
        return self._observations

    def restart(self, mask: Tensor) -> Leaves:
        """Resets the tasks in ``mask [N, 1]``; those that reset themselves in the last step already did."""
        observations = self._current()
        wanted = mask.numpy(force=True).reshape(-1)
        missing = wanted & ~self._self_reset
        if missing.any():
            arrays, _ = self.vector_env.reset(options={"reset_mask": missing})
            observations = self._tensors(arrays)
        self._self_reset = self._self_reset & ~wanted
        self._observations = observations
        return observations

    def advance(self, action: Tensor) -> Leaves:
        """Steps all N tasks."""
        self._current()
        arrays, reward, terminated, truncated, infos = self.vector_env.step(self._to_numpy(action))
        done = terminated | truncated
        self._self_reset = done
        self._observations = self._tensors(arrays)
        leaves = self._observations
        if done.any():
            leaves = self._tensors(arrays, infos["final_obs"], np.flatnonzero(done))
        return {
            **leaves,
            "reward": self._column(reward, torch.float32),
            "done": self._column(done, torch.bool),
            "terminated": self._column(terminated, torch.bool),
            "truncated": self._column(truncated, torch.bool),
        }

    def after_step(self, next_leaves: Mapping[NestedKey, Tensor]) -> Leaves:
        """The observations to act on: Gymnasium has reset what was done."""
        self._self_reset = np.zeros(self.num_envs, dtype=bool)
        return self._current()

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Closes all tasks; a second call does nothing unless ``raise_if_closed``.

        Raises:
            RuntimeError: it is closed already, and ``raise_if_closed``.
        """
        if self.is_closed and raise_if_closed:
            raise RuntimeError(f"The environment of {self.task!r} is already closed.")
        if not self.is_closed:
            self.is_closed = True
            self.vector_env.close()

    def _set_seed(self, seed: int | None) -> None:
        self._seed = seed

    def _current(self) -> Leaves:
        if self._observations is None:
            raise RuntimeError("The tasks were not started yet: call `reset()` before `step()`.")
        return self._observations

    def _to_numpy(self, action: Tensor) -> np.ndarray:
        """The action as Gymnasium's space wants it, in memory of its own."""
        array = action.numpy(force=True)
        space: Any = self.vector_env.single_action_space
        if hasattr(space, "start"):
            if action.is_floating_point():
                raise ValueError(f"`action` is {action.dtype}, but {self.task!r} takes integers: {space}.")
            return array + space.start
        if self.clip_actions:
            array = np.clip(array, space.low, space.high)
        return array.astype(space.dtype, copy=False)

    def _tensors(
        self, arrays: Any, finals: np.ndarray | None = None, rows: np.ndarray | None = None
    ) -> Leaves:
        """Fresh tensors of Gymnasium's batch, with the ``rows`` of ``finals`` in their place."""
        leaves: Leaves = {}
        for key, path in self._paths.items():
            array = _at(arrays, path)
            if finals is not None and rows is not None:
                array = array.copy()
                array[rows] = [_at(final, path) for final in finals[rows]]
            leaves[key] = torch.from_numpy(array).to(self.device, self._dtypes[key], copy=True)
        return leaves

    def _column(self, array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(self.device, dtype, copy=True).view(-1, 1)

    def _check_keys(self) -> None:
        clash = {path[0] for path in self._paths.values() if path} & _RESERVED
        if clash:
            raise ValueError(
                f"The task {self.task!r} names an observation {sorted(clash)}, as TorchRL names its own "
                "entries: rename it with a `gymnasium.ObservationWrapper`."
            )


def _make_vector_env(task: str, num_envs: int, make_kwargs: Mapping[str, Any]) -> gymnasium.vector.VectorEnv:
    """Gymnasium's synchronous vector environment, which resets a task within its last step."""
    feature = f"the task {task!r}"
    gym: Any = require_extra("gymnasium", "gym", feature=feature)
    try:
        with _mujoco_warnings_once(task, feature):
            return gym.make_vec(
                task,
                num_envs=num_envs,
                vectorization_mode="sync",
                vector_kwargs={"copy": False, "autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
                wrappers=[_final_observation_keeper()],
                **make_kwargs,
            )
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        if ":" in task and isinstance(error, ModuleNotFoundError):  # "module:Task-v0"
            raise _unknown(task, error) from error
        for module in _GYM_EXTRA:
            require_extra(module, "gym", feature=feature)
        raise ImportError(f"{feature} cannot be made: {error}") from error
    except gym.error.Error as error:
        raise _unknown(task, error) from error


def _unknown(task: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()).rstrip(".")
    return ValueError(f"{task!r} is not a Gymnasium task that can be made: {reason}.")


@contextlib.contextmanager
def _mujoco_warnings_once(task: str, feature: str) -> Iterator[None]:
    """Prints what MuJoCo warns of a model once, not N times for N copies of it."""
    import gymnasium

    spec = gymnasium.registry.get(task)
    if spec is None or "mujoco" not in str(spec.entry_point):
        yield
        return
    mujoco: Any = require_extra("mujoco", "gym", feature=feature)
    seen: set[str] = set()

    def warn(message: str) -> None:
        if message not in seen:
            seen.add(message)
            print(f"MuJoCo warns: {message}", file=sys.stderr)

    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(warn)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


@functools.cache
def _final_observation_keeper() -> type:
    """A wrapper that copies the last observation of an episode, before the reset can write over it."""
    import copy

    import gymnasium

    class FinalObservationKeeper(gymnasium.Wrapper):
        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                observation = copy.deepcopy(observation)
            return observation, reward, terminated, truncated, info

    return FinalObservationKeeper


def _leaf_spaces(space: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every array-valued space within ``space``, by its path through `Dict` spaces."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for name, entry in space.spaces.items():
            yield from _leaf_spaces(entry, (*path, name))
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        yield path, space
    else:
        raise ValueError(
            f"The observation space {'.'.join(path)} {space} has no fixed array to it. Served are Box, "
            "Discrete, MultiDiscrete, MultiBinary and Dict of these; "
            "`gymnasium.wrappers.FlattenObservation` turns most others into a Box."
        )


def _key(path: tuple[str, ...]) -> NestedKey:
    if not path:
        return "observation"
    return path[0] if len(path) == 1 else path


def _at(arrays: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        arrays = arrays[name]
    return arrays


def _observation_spec(space: Any, batch: torch.Size, device: torch.device) -> TensorSpec:
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    if dtype == torch.float64:
        dtype = torch.float32
    return Unbounded(torch.Size((*batch, *space.shape)), dtype=dtype, device=device)


def _action_spec(space: Any, batch: torch.Size, device: torch.device) -> TensorSpec:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), shape=batch, dtype=torch.int64, device=device)
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"The action space {space} is not served: it must be a float Box or a Discrete.")
    shape = torch.Size((*batch, *space.shape))
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        return Unbounded(shape, dtype=torch.float32, device=device)
    low, high = (
        torch.as_tensor(bound, dtype=torch.float32, device=device).expand(shape)
        for bound in (space.low, space.high)
    )
    return Bounded(low, high, shape, dtype=torch.float32, device=device)
