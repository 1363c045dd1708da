"""AMPTrainer: PPO whose reward comes, wholly or in part, from a discriminator of motions.

What one iteration has beside `RSLPPOTrainer`'s:

    every step of the window as a pair of states          into the policy's history
    as many pairs of the demonstrations                   into theirs
    style reward of the window's pairs                    lerped into its rewards, before advantages
    each mini-batch of PPO comes with one of either       a step of the discriminator
    the discriminator's normaliser takes in both, raw     after the update
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_rslstorage.data import HistoryBuffer, HistorySampler, transition_pairs, zip_mini_batches
from torchrl_rslstorage.data.leaves import canonical, dtype_name, leaves, show_all
from torchrl_rslstorage.modules import AMPDiscriminator
from torchrl_rslstorage.objectives import AMPLoss, StyleReward, lerp_rewards
from torchrl_rslstorage.objectives.amp import total_loss
from torchrl_rslstorage.trainers.config import AMPConfig
from torchrl_rslstorage.trainers.flat_adam import FlatAdam
from torchrl_rslstorage.trainers.ppo_trainer import RSLPPOTrainer


class Demonstrations(Protocol):
    """Draws pairs of consecutive states from demonstrations, with torch's default generator."""

    def __call__(self, num: int) -> TensorDictBase:
        """Pairs ``[num]`` with the discriminator's keys, also under ``next``, one step apart."""
        ...


class AMPTrainer(RSLPPOTrainer):
    """Trains a policy to move like demonstrations, beside a task or without one (Peng et al. 2021).

    The style reward of a window is that of the discriminator as it stood when the window was collected.
    A step after which the state is not known (an episode's end without a final observation) earns none, and
    the discriminator never sees it, nor any pair that reaches across a reset.

    Args:
        collector, actor, critic: as `RSLPPOTrainer` takes them; the collector's buffer must be new.
        discriminator: scores pairs of the window's entries that it names.
        demonstrations: draws ``num`` pairs, one environment step apart: `MotionDataset.pairs`.
        dt: seconds of one environment step, by which the style reward is multiplied.
        amp: hyper-parameters of the style; its network's own are not read.
        ppo_options: what `RSLPPOTrainer` takes beside, ``total_frames`` among them.

    Raises:
        RuntimeError: rows of the collector's buffer have been written already; or, in training, no step's
            state after it is known.
        ValueError: a number is out of its range; in training, demonstrations that are not finite or not as
            many as were asked for, or rewards that are integers.
        KeyError: a demonstration or a window lacks an entry that the discriminator reads.
        TypeError: ``demonstrations`` is no function, or does not return a TensorDict.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import ActorCritic, AMPDiscriminator, AMPTrainer, MLPActor, MLPCritic
        >>> from torchrl_rslstorage import MotionDataset, PointMassEnv, RolloutBuffer, RolloutCollector
        >>> from torchrl_rslstorage import circle_motion
        >>> env = PointMassEnv(num_envs=16, seed=0)
        >>> actor, critic = MLPActor.for_env(env), MLPCritic.for_env(env)
        >>> policy, buffer = ActorCritic(actor, critic), RolloutBuffer(num_steps=8, num_envs=16)
        >>> collector = RolloutCollector(env, policy, replay_buffer=buffer)
        >>> motions = MotionDataset(circle_motion())
        >>> trainer = AMPTrainer(
        ...     collector,
        ...     actor,
        ...     critic,
        ...     AMPDiscriminator(["observation"], in_features=4),
        ...     lambda num: motions.pairs(num, dt=env.dt, keys=env.motion_fields),
        ...     dt=env.dt,
        ...     total_frames=256,
        ...     progress_bar=False,
        ... )
        >>> trainer.train()
        >>> "AMP/demonstration_accuracy" in trainer.metrics
        True
    """

    def __init__(
        self,
        collector: Any,
        actor: TensorDictModuleBase,
        critic: TensorDictModuleBase,
        discriminator: AMPDiscriminator,
        demonstrations: Demonstrations,
        *,
        dt: float,
        amp: AMPConfig | None = None,
        **ppo_options: Any,
    ) -> None:
        amp = AMPConfig() if amp is None else amp
        amp.check()
        if not callable(demonstrations):
            raise TypeError(
                f"`demonstrations` is a {type(demonstrations).__name__}, expected a function that draws as "
                "many pairs as it is told: lambda num: motions.pairs(num, dt=env.dt, keys=[...])."
            )
        super().__init__(collector, actor, critic, **ppo_options)
        buffer = self.buffer
        buffer.storage.keep_final_observations("done")
        self.amp = amp
        self.discriminator = discriminator
        self.demonstrations = demonstrations
        self.style_reward = StyleReward(discriminator, amp.objective, scale=amp.style_reward_scale, dt=dt).to(
            buffer.storage.device
        )
        self.amp_loss = AMPLoss(
            discriminator,
            objective=amp.objective,
            gradient_penalty_coeff=amp.gradient_penalty_coef,
            logit_coeff=amp.logit_regularization_coef,
            weight_coeff=amp.weight_regularization_coef,
        )
        learning_rate = torch.tensor(
            amp.discriminator_learning_rate, dtype=torch.float64, device=buffer.storage.device
        )
        self.discriminator_optimizer = FlatAdam([list(discriminator.parameters())], lr=learning_rate)
        self.policy_sampler, self.demonstration_sampler = self._sampler_beside(), self._sampler_beside()
        self.policy_history = self._history(amp.history_length, self.policy_sampler)
        self.demonstration_history = self._history(buffer.num_steps, self.demonstration_sampler)
        self._sums: Tensor | None = None
        self._rewards: Tensor | None = None
        self._new: tuple[TensorDictBase, TensorDictBase] | None = None

    def _sampler_beside(self) -> HistorySampler:
        """A sampler with as many mini-batches as PPO has."""
        return HistorySampler(self.config.num_mini_batches, self.config.num_learning_epochs)

    def _history(self, length: int, sampler: HistorySampler) -> HistoryBuffer:
        device = self.buffer.storage.device
        return HistoryBuffer(length, self.buffer.num_envs, sampler=sampler, device=device)

    # -- one iteration ---------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._take_in_the_window()
        super()._prepare()

    @torch.no_grad()
    def _take_in_the_window(self) -> None:
        """Fills both histories, and lerps the style reward into the window's rewards."""
        buffer = self.buffer
        reward = buffer.window.get(("next", "reward"))
        if not reward.is_floating_point():
            raise ValueError(
                f"The rewards are {dtype_name(reward.dtype)}, into which no style reward can be mixed: cast "
                "the environment's to a floating-point dtype."
            )
        pairs = transition_pairs(buffer, self.discriminator.observation_keys)
        style = self.style_reward(pairs)
        valid = pairs.get("valid")
        pairs = pairs.select(*self.discriminator.in_keys)
        demonstrated = self._demonstrated(pairs)
        shown = leaves(demonstrated)
        whole, *finite = torch.stack(
            [valid.all(), *(value.isfinite().all() for value in shown.values())]
        ).tolist()
        if not all(finite):
            faulty = [key for key, is_finite in zip(shown, finite, strict=True) if not is_finite]
            raise ValueError(f"The demonstrations hold values that are not finite: {show_all(faulty)}.")
        self.policy_history.extend(pairs, mask=None if whole else valid)
        self.demonstration_history.extend(demonstrated)
        self._new = (pairs, demonstrated)
        self._rewards = torch.stack([style.mean(), reward.mean()])
        reward.copy_(lerp_rewards(style.to(reward.dtype), reward, self.amp.task_style_lerp))

    def _demonstrated(self, pairs: TensorDictBase) -> TensorDictBase:
        """As many demonstrations as there are ``pairs`` in a window, on their device and in their dtypes."""
        num, keys = pairs.numel(), self.discriminator.in_keys
        drawn: Any = self.demonstrations(num)
        if not isinstance(drawn, TensorDictBase):
            raise TypeError(
                f"`demonstrations` returned a {type(drawn).__name__}, expected a TensorDict of {num} pairs."
            )
        here = leaves(drawn)
        missing = [key for key in map(canonical, keys) if key not in here]
        if missing:
            raise KeyError(
                f"The demonstrations lack {show_all(missing)}, which the discriminator reads. They hold "
                f"{show_all(here)}."
            )
        if drawn.numel() != num:
            raise ValueError(
                f"`demonstrations` was asked for {num} pairs and returned {tuple(drawn.batch_size)}."
            )
        drawn = drawn.select(*keys).to(pairs.device).reshape(pairs.batch_size)
        return drawn.apply(lambda value, like: value.to(like.dtype), pairs)

    def _rollout_batches(self) -> Iterator[TensorDictBase]:
        window, held = self.buffer.num_steps * self.buffer.num_envs, len(self.policy_history)
        if not held:
            raise RuntimeError(
                "After no step so far is it known which state followed, so there is nothing to show to the "
                "discriminator: every one ended an episode or the window, and the environment gives no final "
                "observation (there was none, or NaN). Have it give them, or collect longer windows."
            )
        # The first windows hold fewer whole pairs than transitions; no mini-batch is without one.
        self.policy_sampler.num_samples = max(min(window, held), self.config.num_mini_batches)
        self.demonstration_sampler.num_samples = window
        self._sums = None
        triples = zip_mini_batches(
            rollout=self.buffer,
            policy_history=self.policy_history,
            demonstration_history=self.demonstration_history,
        )
        for rollout, policy, demonstration in triples:
            self._teach(policy, demonstration)
            yield rollout

    def _teach(self, policy: TensorDictBase, demonstration: TensorDictBase) -> None:
        """One step of the discriminator."""
        terms = self.amp_loss.terms(policy, demonstration)
        self.discriminator_optimizer.zero_grad()
        total_loss(terms).backward()
        self.discriminator_optimizer.average_gradients(self.ranks)
        self.discriminator_optimizer.clip_grad_norm_(self.amp.discriminator_max_grad_norm)
        self.discriminator_optimizer.step()
        metrics = torch.stack(list(terms.values())).detach()
        self._sums = metrics if self._sums is None else self._sums + metrics

    @torch.no_grad()
    def _end_iteration(self) -> None:
        assert self._new is not None
        for states in self._new:
            self.discriminator.update_normalizer(states)
        super()._end_iteration()

    def _fetch_metrics(self, window: TensorDictBase) -> dict[str, float]:
        metrics = super()._fetch_metrics(window)
        assert self._sums is not None and self._rewards is not None
        steps = self.config.num_mini_batches * self.config.num_learning_epochs
        fetched = torch.cat([self._sums / steps, self._rewards]).tolist()
        names = [*self.amp_loss.out_keys, "style_reward", "task_reward"]
        for name, value in zip(names, fetched, strict=True):
            name = str(name)
            if name == "loss_discriminator":
                metrics["Loss/discriminator"] = value
            elif not name.startswith("loss_"):
                metrics[f"AMP/{name}"] = value
        return metrics

    # -- ranks and checkpoints -------------------------------------------------------------------

    def _shared(self) -> list[Any]:
        return [*super()._shared(), self.discriminator, self.style_reward]

    def _apart(self) -> list[str]:
        return [*super()._apart(), "policy_history"]

    def checkpoint_components(self) -> dict[str, Any]:
        """What a checkpoint holds: PPO's parts, the discriminator's, and the policy's history.

        The demonstrations' history is drawn anew in every iteration.
        """
        return {
            **super().checkpoint_components(),
            "discriminator": self.discriminator,
            "discriminator_optimizer": self.discriminator_optimizer,
            "style_reward": self.style_reward,
            "policy_history": self.policy_history,
        }
