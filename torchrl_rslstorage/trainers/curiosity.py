"""Curiosity in training: intrinsic rewards for a window, and the predictor's own optimiser.

One iteration, beside what `RSLPPOTrainer` does:

    reward ← reward + weight · novelty(next observation)       before the advantages
    predictor: RNDLoss, Adam                                   in every mini-batch
    state normaliser takes in the window                       after the update
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.objectives import RNDLoss

from torchrl_rslstorage.collectors import EpisodeStatistics
from torchrl_rslstorage.data import RolloutBuffer
from torchrl_rslstorage.modules import RandomNetworkDistillation
from torchrl_rslstorage.objectives.padded import read_padded
from torchrl_rslstorage.trainers.distributed import Ranks, alone_or
from torchrl_rslstorage.trainers.flat_adam import FlatAdam

_STATE = "rnd_state"


class Curiosity:
    """Rewards a window for what is new in it, and learns what is not any more.

    The numbers are RSL-RL's (rsl_rl 5.5.1, algorithms/ppo.py, ``process_env_step`` and ``PPO.update``).
    TorchRL's ``RNDLoss`` with all of the mini-batch, normalised as RSL-RL does it, has RSL-RL's numbers. It
    reads observations in float32.

    The novelty is that of the *next* observation: the next row, or where an episode was cut off, and in the
    window's last row, the true final observation. After a termination, which ends with an observation that no
    row keeps, it is that of the episode which starts (in the last row, which nothing follows, that of the
    observation acted on); RSL-RL has the former after every end.

    Args:
        rnd: networks, normalisers and weight.
        num_envs: N.
        skip_first_episode: leave every environment's first episode out of ``Rnd/mean_intrinsic_reward``.
        ranks: processes that learn together; the predictor learns from the mean of their gradients.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import RandomNetworkDistillation
        >>> from torchrl_rslstorage.trainers.curiosity import Curiosity
        >>> rnd = RandomNetworkDistillation(["observation"], 3, weight=0.1, target_hidden_dims=(32,))
        >>> curiosity = Curiosity(rnd, num_envs=4)
        >>> seen = TensorDict({"observation": torch.randn(64, 3)}, [64])
        >>> before = rnd.novelty(seen).mean()
        >>> for _ in range(100):
        ...     curiosity.update(seen)
        >>> bool(rnd.novelty(seen).mean() < before)
        True
    """

    def __init__(
        self,
        rnd: RandomNetworkDistillation,
        num_envs: int,
        *,
        skip_first_episode: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.rnd = rnd
        self.ranks = alone_or(ranks)
        device = next(rnd.predictor.parameters()).device
        self.loss = RNDLoss(
            rnd.predictor,
            rnd.target,
            obs_rms=rnd,  # pyright: ignore[reportArgumentType] - all that is asked of it is `normalize`
            obs_clip=float("inf"),
            update_fraction=1.0,
        )
        self.loss.set_keys(observation=_STATE)
        learning_rate = torch.tensor(rnd.learning_rate, dtype=torch.float64, device=device)
        self.optimizer = FlatAdam([list(rnd.predictor.parameters())], lr=learning_rate)
        self.statistics = EpisodeStatistics(num_envs, device=device, skip_first=skip_first_episode)
        self.num_steps = 0
        self.weight = rnd.weight
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._num_losses = 0

    @classmethod
    def beside(
        cls, collector: Any, rnd: RandomNetworkDistillation, num_envs: int, ranks: Ranks | None = None
    ) -> Curiosity:
        """One whose statistics count the episodes that a collector's do.

        Args:
            collector: `RolloutCollector`, or one without statistics.
            rnd: networks, normalisers and weight.
            num_envs: N.
            ranks: processes that learn together.
        """
        statistics = getattr(collector, "statistics", None)
        skips = statistics is not None and statistics.skips_first
        return cls(rnd, num_envs, skip_first_episode=skips, ranks=ranks)

    @torch.no_grad()
    def reward(self, buffer: RolloutBuffer) -> Tensor:
        """Adds the intrinsic rewards to those of a full window; returns them, ``[T, N, 1]``."""
        window = buffer.window
        intrinsic, self.weight = self.rnd.intrinsic_rewards(self._novelty_of_next(buffer), self.num_steps + 1)
        self.num_steps += len(intrinsic)
        window.get(("next", "reward")).add_(intrinsic)
        done = window.get(("next", "done"))
        for t in range(len(intrinsic)):
            self.statistics.update(intrinsic[t], done[t])
        return intrinsic

    def _novelty_of_next(self, buffer: RolloutBuffer) -> Tensor:
        novelty = self.rnd.novelty(buffer.window)
        t, n, observation = buffer.final_observations
        cell = t * buffer.num_envs + n
        final = self.rnd.novelty(observation)
        after = torch.cat([novelty[1:], novelty[-1:]])
        flat = after.view(-1)
        # An environment that resets itself may leave NaN there: the row that follows stands in, if there is.
        flat[cell] = torch.where(final.isnan(), flat[cell].unsqueeze(-1), final).squeeze(-1)
        # A fault of the environment's is found, and named, where advantages are computed: not as a reward's.
        return after.nan_to_num(nan=0.0, posinf=0.0)

    def update(self, mini_batch: TensorDictBase) -> None:
        """One step of the predictor on a mini-batch ``[B]``, or on the valid cells of ``[L, B]``."""
        state = self.rnd.raw(mini_batch)
        if mini_batch.ndim == 2 and mini_batch.get("mask", None) is not None:
            state = read_padded(mini_batch).layout.take(state)
        loss = self.loss(TensorDict({_STATE: state}, state.shape[:-1]))["loss_predictor"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.average_gradients(self.ranks)
        self.optimizer.step()
        self._loss_sum += loss.detach()
        self._num_losses += 1

    def metrics(self, extrinsic: float | None) -> dict[str, float]:
        """What is logged of one iteration, with RSL-RL's names; the loss is counted anew after it.

        Args:
            extrinsic: mean return of the task's own rewards, where it is known.
        """
        loss = float(self._loss_sum) / max(self._num_losses, 1)
        self._loss_sum.zero_()
        self._num_losses = 0
        intrinsic = self.statistics.summary().mean_return
        metrics = {"Loss/rnd": loss, "Rnd/weight": self.weight, "Rnd/mean_intrinsic_reward": intrinsic}
        if extrinsic is not None:
            metrics["Rnd/mean_extrinsic_reward"] = extrinsic
            metrics["Train/mean_reward"] = extrinsic + intrinsic
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Networks, normalisers, optimiser, statistics and the count of steps."""
        return {
            "rnd": self.rnd.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "statistics": self.statistics.state_dict(),
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.rnd.load_state_dict(state_dict["rnd"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.statistics.load_state_dict(state_dict["statistics"])
        self.num_steps = state_dict["num_steps"]
