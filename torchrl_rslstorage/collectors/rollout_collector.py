"""RolloutCollector: steps environments and writes each row straight into the rollout buffer."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import BaseCollector
from torchrl.envs import (
    EnvBase,
    ExplorationType,
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
    set_exploration_type,
)

from torchrl_rslstorage._compat import resets_after_step, root_after_step
from torchrl_rslstorage.collectors.statistics import EpisodeStatistics
from torchrl_rslstorage.data import RolloutBuffer
from torchrl_rslstorage.data.leaves import Key, canonical, leaves, nest
from torchrl_rslstorage.data.rows import Row, root_leaves
from torchrl_rslstorage.envs import BatchedEnv
from torchrl_rslstorage.modules import ActorCritic, MLPActor, MLPCritic


class RolloutCollector(BaseCollector):
    """Fills a `RolloutBuffer`, one window an iteration, and yields ``None`` when it is full.

    A row is copied in two halves, the root *before* ``env.step`` and ``next`` before environments that are
    done are reset, so that simulators which overwrite their tensors in place (mjlab, Isaac Lab) cannot
    corrupt it; nothing is kept but the window itself. (An environment with a ``step_and_maybe_reset`` of its
    own steps and resets at once: it must leave what it handed out alone until the next step.) Runs under
    ``no_grad`` and acts by sampling. Episode returns and lengths are counted on the device.

    Whoever iterates empties the buffer between two windows (`RSLPPOTrainer` does).

    Args:
        env: batch size ``[N]``.
        policy: TensorDict in, TensorDict out: writes the action and whatever the window shall hold
            (`ActorCritic`).
        replay_buffer: where rows go; its N is the environment's.
        total_frames: transitions after which iteration ends; -1 never.
        skip_first_episode: leave every environment's first episode out of the statistics. ``None`` asks the
            environment (``partial_first_episodes``).
        episode_window: how many ended episodes the statistics average over.
        exploration_type: how TorchRL's policies act.

    Raises:
        ValueError: the environment's batch size is not ``[N]``, or the buffer has transforms.
        OverflowError: the window was not emptied since the last iteration.

    Examples:
        >>> from torchrl_rslstorage import ActorCritic, MLPActor, MLPCritic, PendulumEnv
        >>> from torchrl_rslstorage import RolloutBuffer, RolloutCollector
        >>> env = PendulumEnv(num_envs=4, seed=0)
        >>> policy = ActorCritic(MLPActor.for_env(env), MLPCritic.for_env(env))
        >>> buffer = RolloutBuffer(num_steps=8, num_envs=4)
        >>> collector = RolloutCollector(env, policy, replay_buffer=buffer, total_frames=32)
        >>> for _ in collector:
        ...     print(buffer.window["action"].shape)
        torch.Size([8, 4, 1])
    """

    init_random_frames = 0

    def __init__(
        self,
        env: EnvBase,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        replay_buffer: RolloutBuffer,
        total_frames: int = -1,
        skip_first_episode: bool | None = None,
        episode_window: int = 100,
        exploration_type: ExplorationType | str = ExplorationType.RANDOM,
    ) -> None:
        super().__init__()
        num_envs = replay_buffer.num_envs
        if tuple(env.batch_size) != (num_envs,):
            raise ValueError(
                f"The environment has batch size {tuple(env.batch_size)} but the buffer holds N = {num_envs} "
                f"environments: both must be ({num_envs},). Batch single environments with "
                "torchrl.envs.SerialEnv or ParallelEnv."
            )
        if replay_buffer.has_transform:
            raise ValueError(
                "RolloutCollector writes rows in two halves, which a buffer's transforms cannot follow: "
                "append them to the environment (TransformedEnv), or use TorchRL's Collector."
            )
        if skip_first_episode is None:
            skip_first_episode = _says(base_env(env), "partial_first_episodes")
        self.env = env
        self.policy = policy
        self.replay_buffer = replay_buffer
        self.total_frames = total_frames
        self.requested_frames_per_batch = replay_buffer.num_steps * num_envs
        self.exploration_type = exploration_type
        self.statistics = EpisodeStatistics(
            num_envs, episode_window, device=env.device, skip_first=skip_first_episode
        )
        self.num_frames = 0
        self._carrier: TensorDictBase | None = None
        self._states = states_carried_by_us(env, policy)

    @torch.no_grad()
    def rollout(self) -> None:
        """Fills the window from its present row to its end.

        Raises:
            OverflowError: it is full already.
        """
        buffer, policy, writer = self.replay_buffer, self.policy, self.replay_buffer.writer
        if buffer.is_full:
            raise OverflowError(
                f"The window is full ({buffer.num_steps} rows): take its mini-batches, then call "
                "buffer.empty(), before the next one is collected."
            )
        ours = self.env if isinstance(self.env, BatchedEnv) and self.env.is_lean else None
        apart = resets_after_step(self.env)
        with set_exploration_type(self.exploration_type):
            if ours is not None and _reads_rows(policy):
                self._roll_rows(ours, cast("ActorCritic", policy))
                return
            carrier = self._start()
            for _ in range(buffer.num_steps - buffer.num_rows):
                carrier = policy(carrier)
                if self._states:
                    self._give_first_states(carrier)
                writer.write_root(carrier)
                if ours is not None:
                    carrier = self._step_leaves(ours, carrier)
                elif apart:
                    carrier = self._step_then_reset(carrier)
                else:
                    carrier = self._step(carrier)
                self._carrier = carrier
                self.num_frames += buffer.num_envs

    def _roll_rows(self, env: BatchedEnv, policy: ActorCritic) -> None:
        """`rollout` of our own environments by our own MLPs, with no TensorDict in a step."""
        buffer, writer = self.replay_buffer, self.replay_buffer.writer
        carrier = self._start()
        row = Row(root_leaves(carrier), buffer.num_envs)
        try:
            for _ in range(buffer.num_steps - buffer.num_rows):
                policy(cast("TensorDictBase", row))
                writer.write_root_leaves(row)
                after, observations = env.step_leaves(row.get("action"))
                writer.write_next_leaves(cast("dict[Key, Tensor]", after))
                self.statistics.update(after["reward"], after["done"])
                for key, value in observations.items():
                    row.set(key, value)
                row["is_init"] = after["done"]
                self.num_frames += buffer.num_envs
        finally:
            for key, value in row.items():
                carrier.set(key, value)

    def _step(self, carrier: TensorDictBase) -> TensorDictBase:
        made = take_states(carrier, self._states)
        stepped, following = self.env.step_and_maybe_reset(carrier)
        return carry_on(made, self._write_next(stepped, made), following)

    def _step_then_reset(self, carrier: TensorDictBase) -> TensorDictBase:
        """`_step` in two: what the step handed out is copied before a reset can overwrite it."""
        made = take_states(carrier, self._states)
        stepped, following = root_after_step(self.env, self.env.step(carrier))
        done = self._write_next(stepped, made)
        return carry_on(made, done, self.env.maybe_reset(following))

    def _write_next(self, stepped: TensorDictBase, made: Mapping[Key, Tensor]) -> Tensor:
        """Closes the row; returns done flags that no reset will overwrite."""
        after = stepped.get("next")
        writer = self.replay_buffer.writer
        if made:
            writer.write_next_leaves({**made, **leaves(after)})
        else:
            writer.write_next(after)
        done = after.get("done").clone()
        self.statistics.update(after.get("reward"), done)
        return done

    def _step_leaves(self, env: BatchedEnv, carrier: TensorDictBase) -> TensorDictBase:
        """`_step` for our own environments: three TensorDicts a step fewer."""
        after, observations = env.step_leaves(carrier.get("action"))
        made = take_states(carrier, self._states)
        stepped = cast("dict[Key, Tensor]", after)
        if "next" in carrier.keys():
            stepped = {**leaves(cast("TensorDictBase", carrier.pop("next"))), **stepped}
        self.replay_buffer.writer.write_next_leaves({**made, **stepped} if made else stepped)
        done = after["done"]
        self.statistics.update(after["reward"], done)
        for key, value in observations.items():
            carrier.set(key, value)
        return carry_on(made, done, carrier)

    def _give_first_states(self, carrier: TensorDictBase) -> None:
        """Puts zeros where a policy that does not write its first states itself started from nothing."""
        left = carrier.get("next", None)
        if left is None:
            return
        for key in self._states:
            made = left.get(key, None)
            if made is not None and carrier.get(key, None) is None:
                carrier.set(key, torch.zeros_like(made))

    def _start(self) -> TensorDictBase:
        if self._carrier is None:
            carrier = self.env.reset()
            carrier.set("is_init", torch.ones_like(carrier.get("done")))
            self._carrier = carrier
        return self._carrier

    def iterator(self) -> Iterator[Any]:
        """Yields ``None`` for each filled window."""
        while self.total_frames < 0 or self.num_frames < self.total_frames:
            self.rollout()
            yield None

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the buffer, as TorchRL's trainer asks for it."""
        return getattr(self.replay_buffer, attr)

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the policy that acts is the one that learns.

        Raises:
            ValueError: weights were passed.
        """
        if args or any(value is not None for value in kwargs.values()):
            raise ValueError(
                "RolloutCollector acts with the very policy it was given; there are no weights to send. "
                "Load them into the policy itself."
            )

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the environment; returns the seed that follows."""
        following = self.env.set_seed(seed, static_seed=static_seed)
        return seed if following is None else following

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Closes the environment."""
        if close_env and not self.env.is_closed:
            self.env.close(raise_if_closed=raise_on_error)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Frames, statistics, transforms; where the environment can save its state, it and the next root."""
        state: OrderedDict[str, Any] = OrderedDict(
            num_frames=self.num_frames, statistics=self.statistics.state_dict()
        )
        base = base_env(self.env)
        if base is not self.env:
            state["transforms"] = copy.deepcopy(self.env.state_dict())
        if self._carrier is not None and _says(base, "can_save_state"):
            state["env"] = copy.deepcopy(base.state_dict())
            state["carrier"] = {key: value.clone() for key, value in leaves(self._carrier).items()}
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Takes back what `state_dict` gave.

        An environment that cannot save its state starts new episodes, and a warning says so.
        """
        self.statistics.load_state_dict(state_dict["statistics"])
        self.num_frames = state_dict["num_frames"]
        base = base_env(self.env)
        if "transforms" in state_dict:
            self.env.load_state_dict(state_dict["transforms"])
        if "env" in state_dict:
            base.load_state_dict(state_dict["env"])
            self._carrier = TensorDict(
                nest(state_dict["carrier"]), self.env.batch_size, device=self.env.device
            )
            return
        self._carrier = None
        if self.num_frames:
            self.statistics.restart_episodes()
            warnings.warn(
                f"{type(base).__name__} cannot save its state: environments start new episodes here, so the "
                "numbers that follow differ from those of a run that was never interrupted.",
                UserWarning,
                stacklevel=2,
            )


def _reads_rows(policy: Any) -> bool:
    """Whether the policy is made of this package's MLPs as they are: what was added may ask for more."""
    if type(policy) is not ActorCritic or type(policy.actor) is not MLPActor:
        return False
    modules = (policy, policy.actor, policy.critic)
    added = any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules)
    return type(policy.critic) is MLPCritic and not added


def base_env(env: EnvBase) -> EnvBase:
    """The environment below all of TorchRL's transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def states_carried_by_us(env: EnvBase, policy: Any) -> set[Key]:
    """What the policy reads and the environment knows nothing of: recurrent states, if it writes them at all.

    TorchRL 0.14 carries on only what stands in the environment's specs (a ``TensorDictPrimer`` puts it there)
    and drops the rest without a word: a policy would start from its first state in every step.
    """
    specs = (env.full_state_spec, env.observation_spec)
    known = {canonical(key) for spec in specs for key in spec.keys(True, True)}
    return {canonical(key) for key in getattr(policy, "in_keys", ())} - known


def take_states(carrier: TensorDictBase, states: set[Key]) -> dict[Key, Tensor]:
    """Takes what the policy left under ``next`` of its states off ``carrier``; environments never see it."""
    if "next" not in carrier.keys():
        return {}
    left = cast("TensorDictBase", carrier.get("next"))
    made = {key: value for key, value in leaves(left).items() if key in states}
    if made:
        rest = left.exclude(*made)
        if rest.is_empty():
            del carrier["next"]
        else:
            carrier.set("next", rest)
    return made


def carry_on(made: Mapping[Key, Tensor], done: Tensor, following: TensorDictBase) -> TensorDictBase:
    """Puts a policy's states, zero where an episode starts, and ``is_init`` at the root of the next step."""
    for key, value in made.items():
        following.set(key, value.masked_fill(done.view(-1, *[1] * (value.ndim - 1)), 0))
    return following.set("is_init", done)


def _says(env: EnvBase, name: str) -> bool:
    """Whether the environment says so of itself (`BatchedEnv` has the names)."""
    # SerialEnv and ParallelEnv pass on what they do not have: a list, one answer for each of theirs.
    return not isinstance(env, SerialEnv | ParallelEnv) and bool(getattr(env, name, False))
