"""A TorchRL environment as an RSL-RL `VecEnv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv

from torchrl_rslstorage._compat import reset_after_step, resets_natively
from torchrl_rslstorage.data.leaves import canonical, leaves, show, show_all
from torchrl_rslstorage.data.rows import complete_done


class TorchRLVecEnv:
    """Any TorchRL environment of batch size [N] for RSL-RL's runners, by the interface of rsl-rl-lib 5.5.1.

    Each entry of the observation spec becomes an observation group of its name (``("a", "b")`` becomes
    ``"a.b"``), which the runner's ``obs_groups`` refers to: ``{"actor": ["observation"], "critic":
    ["observation"]}``. Rewards and flags are ``[N]``. ``extras`` holds

    | key | |
    |---|---|
    | `time_outs` | `[N]` bool: truncated and not terminated |
    | `final_obs` | the observation groups `[N]` before what is done was reset, which RSL-RL's rule ignores |
    | `log` | what ``log_keys`` name, as ``"/key"`` |

    Args:
        env: batch size ``[N]``, actions ``[N, A]`` of floats.
        max_episode_length: steps after which an episode is cut off here, if the environment has not done so
            before; ``None`` asks the environment (``max_episode_steps``), and lets it do it alone if it has
            not got the name. RSL-RL's ``init_at_random_ep_len`` sets ``episode_length_buf``, and with it the
            time of the first cut.
        step_dt: seconds of a step, by which RSL-RL scales the weight of its curiosity (RND).
        log_keys: entries under ``next`` to log, averaged over the environments by RSL-RL.
        cfg: what RSL-RL's loggers save as the environment's configuration.

    Raises:
        ValueError: the batch size is not ``[N]``, actions are no vectors of floats, two groups get one name,
            or ``max_episode_length`` is below one or of an environment that resets itself.

    >>> from torchrl_rslstorage import PendulumEnv
    >>> env = TorchRLVecEnv(PendulumEnv(4, seed=0))
    >>> observations, rewards, dones, extras = env.step(torch.zeros(4, env.num_actions))
    >>> observations["observation"].shape, rewards.shape, sorted(extras)
    (torch.Size([4, 3]), torch.Size([4]), ['final_obs', 'log', 'time_outs'])
    """

    def __init__(
        self,
        env: EnvBase,
        *,
        max_episode_length: int | None = None,
        step_dt: float = 1.0,
        log_keys: Sequence[NestedKey] = (),
        cfg: Any = None,
    ) -> None:
        if len(env.batch_size) != 1:
            raise ValueError(
                f"The environment has batch size {tuple(env.batch_size)}, expected [N]: batch single ones "
                "with torchrl.envs.SerialEnv or ParallelEnv."
            )
        shape, dtype = env.action_spec.shape, env.action_spec.dtype
        if len(shape) != 2 or dtype is None or not dtype.is_floating_point:
            raise ValueError(
                f"RSL-RL's actions are vectors of floats, [N, A], but this environment takes {dtype} "
                f"{tuple(shape)}."
            )
        self._cuts_off = not resets_natively(env)
        if max_episode_length is not None and not (self._cuts_off and max_episode_length >= 1):
            raise ValueError(
                f"`max_episode_length` must be at least 1, got {max_episode_length}."
                if self._cuts_off
                else "This environment resets itself: `max_episode_length` cannot cut its episodes off."
            )
        self.env = env
        self.num_envs: int = env.batch_size[0]
        self.num_actions: int = shape[-1]
        self.device: torch.device = env.device or torch.device("cpu")
        self.cfg = {} if cfg is None else cfg
        self.step_dt = step_dt
        # SerialEnv and ParallelEnv answer for each of theirs, in a list.
        apart = isinstance(env, SerialEnv | ParallelEnv)
        known = None if apart else getattr(env, "max_episode_steps", None)
        self._max_episode_length: int | None = known if max_episode_length is None else max_episode_length
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        """Steps of the running episodes, ``[N]``; the runner may set them."""
        self._groups = {_group_name(key): key for key in env.observation_spec.keys(True, True)}
        if len(self._groups) != len(list(env.observation_spec.keys(True, True))):
            raise ValueError(f"Two observations would both become a group of {sorted(self._groups)}.")
        self._log_keys = {f"/{_group_name(key)}": key for key in log_keys}
        self._root: TensorDictBase | None = None

    @property
    def max_episode_length(self) -> int:
        """Steps of the longest episode.

        Raises:
            AttributeError: it is not known.
        """
        if self._max_episode_length is None:
            raise AttributeError(
                "The length of this environment's episodes is not known, which init_at_random_ep_len needs: "
                "pass TorchRLVecEnv(..., max_episode_length=...)."
            )
        return self._max_episode_length

    @property
    def unwrapped(self) -> TorchRLVecEnv:
        """This object, which RSL-RL asks for ``step_dt``; the TorchRL environment is ``env``."""
        return self

    def get_observations(self) -> TensorDict:
        """The observation groups ``[N]`` to act on; starts the environments if nobody has."""
        if self._root is None:
            self.reset()
        assert self._root is not None
        return self._observations(self._root)

    def reset(self) -> tuple[TensorDict, dict[str, Any]]:
        """Starts new episodes everywhere; returns their observations, and extras, which are empty."""
        self._root = self.env.reset()
        self.episode_length_buf = torch.zeros_like(self.episode_length_buf)
        return self._observations(self._root), {}

    @torch.no_grad()
    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Takes one step and resets what is done.

        Args:
            actions: ``[N, A]``.

        Returns:
            Observation groups ``[N]``, rewards ``[N]``, dones ``[N]`` bool, and extras.

        Raises:
            KeyError: one of ``log_keys`` is not there.
        """
        if self._root is None:
            self.reset()
        assert self._root is not None
        root = self._root.set("action", actions.to(self.device))
        self.episode_length_buf = self.episode_length_buf + 1
        following: TensorDictBase | None = None
        if self._cuts_off:
            stepped = self.env.step(root)
        else:
            stepped, following = self.env.step_and_maybe_reset(root)
        after = self._completed(stepped)
        # Copied before a reset, since simulators write into the same memory.
        final, log = self._observations(after), self._log(after)
        reward, done, truncated = self._signals(after)
        if following is None:
            following = reset_after_step(self.env, stepped)
        self._root = following
        self.episode_length_buf = self.episode_length_buf.masked_fill(done, 0)
        extras = {"time_outs": truncated, "final_obs": final, "log": log}
        return self._observations(following), reward, done, extras

    def seed(self, seed: int = -1) -> int:
        """Seeds the environment; -1 lets it draw one."""
        self.env.set_seed(None if seed < 0 else seed)
        return seed

    def close(self) -> None:
        """Closes the environment."""
        if not self.env.is_closed:
            self.env.close()

    def _completed(self, stepped: TensorDictBase) -> TensorDictBase:
        """``next`` with all three flags, in which episodes that are long enough are cut off."""
        after = stepped.get("next")
        flags = complete_done({key: after.get(key) for key in _FLAGS if key in after.keys()})
        terminated, truncated = flags["terminated"], flags["truncated"]
        if self._cuts_off and self._max_episode_length is not None:
            truncated = truncated | (self.episode_length_buf >= self._max_episode_length).view(-1, 1)
            after.set("truncated", truncated)
            after.set("done", terminated | truncated)
        else:
            after.set("truncated", truncated)
        after.set("terminated", terminated)
        return after

    def _signals(self, after: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Reward, done, and truncated without being terminated, ``[N]`` each."""
        reward, done, terminated, truncated = (
            after.get(key).view(-1) for key in ("reward", "done", "terminated", "truncated")
        )
        return reward.clone(), done.clone(), truncated & ~terminated

    def _observations(self, td: TensorDictBase) -> TensorDict:
        groups = {name: td.get(key).clone() for name, key in self._groups.items()}
        return TensorDict(groups, [self.num_envs], device=self.device)

    def _log(self, after: TensorDictBase) -> dict[str, Tensor]:
        for key in self._log_keys.values():
            if after.get(key, None) is None:
                known = show_all(sorted(leaves(after), key=str))
                raise KeyError(f"`log_keys` names {show(key)}, which a step does not bring: it has {known}.")
        return {name: after.get(key).clone() for name, key in self._log_keys.items()}


_FLAGS = ("done", "terminated", "truncated")


def _group_name(key: NestedKey) -> str:
    name = canonical(key)
    return name if isinstance(name, str) else ".".join(name)
