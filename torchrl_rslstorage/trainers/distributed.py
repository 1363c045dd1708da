"""Ranks: several processes that learn one policy, each with environments of its own (RSL-RL's multi-GPU).

    rank 0                    rank 1
    collects its window       collects its window        nothing is exchanged
    ╰───── moments of all advantages ────╯               once a window, if they are normalised over it
    gradient of its half      gradient of its half
    ╰──── mean of gradients and KL ──────╯               one all-reduce an optimisation step
    the same step             the same step
    ╰──── moments of all observations ───╯               once a window and normaliser

Decisions:

- What one process with all environments would compute is computed: statistics are those of all ranks' rows,
  exactly, as the mean of gradients is where all have as many. RSL-RL (5.5.1) normalises advantages by each
  rank's own statistics, and its ranks' observation normalisers drift apart after the start.
- The KL travels in the gradients' buffer, and every rank adapts its own learning rate by the same rule from
  the same number; RSL-RL reduces it in a call of its own and broadcasts what rank 0 made of it.
- Rank r has the seed ``seed + r``, as in Isaac Lab; rank 0's parameters are everybody's at the start.
- Pieces on the CPU (metrics, checkpoints) always go by gloo, those on CUDA by NCCL.
- A rank that ends takes the others with it: what they wait for fails at once (gloo), or `torchrun` ends them;
  one that is stuck is given up after ten minutes, which is torch's own time for NCCL.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrl_rslstorage.modules import EmpiricalNormalizer
from torchrl_rslstorage.modules.normalizer import Pool
from torchrl_rslstorage.trainers.checkpoints import RANK

_PATIENCE = timedelta(minutes=10)
_NUM_SEEDS = 2**32  # what NumPy's generators take


class RanksError(RuntimeError):
    """The other ranks cannot be reached: one has ended, or answers no more. The message is one sentence.

    >>> from torchrl_rslstorage import RanksError
    >>> issubclass(RanksError, RuntimeError)
    True
    """


@dataclass(frozen=True)
class Ranks:
    """The processes that learn together, as one of them sees them; alone, everything here is the identity.

    Args:
        rank: which of them this is.
        size: how many there are, K.
        device: where this one keeps its tensors.

    Examples:
        A script for ``torchrun --nproc-per-node 2 script.py``, which also runs without it:

        >>> from torchrl_rslstorage import ActorCritic, MLPActor, MLPCritic, PendulumEnv, Ranks
        >>> from torchrl_rslstorage import RolloutBuffer, RolloutCollector, RSLPPOTrainer
        >>> with Ranks.join("cpu") as ranks:  # "cuda" is cuda:LOCAL_RANK
        ...     env = PendulumEnv(num_envs=16, seed=ranks.seed(0), device=ranks.device)
        ...     actor, critic = MLPActor.for_env(env), MLPCritic.for_env(env)
        ...     buffer = RolloutBuffer(num_steps=8, num_envs=16, device=ranks.device)
        ...     collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer)
        ...     trainer = RSLPPOTrainer(
        ...         collector, actor, critic, total_frames=256, progress_bar=False, ranks=ranks
        ...     )
        ...     trainer.train()
        >>> ranks.rank, ranks.size
        (0, 1)
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @classmethod
    @contextmanager
    def join(cls, device: str = "cpu") -> Iterator[Ranks]:
        """Meets the other processes that ``torchrun`` started, and leaves them in the end.

        Without ``torchrun``, or where it started one process, there is nobody to meet.

        Args:
            device: "cpu" (gloo), or "cuda" (NCCL): each process takes the device of its local rank.

        Raises:
            ValueError: the device is not that of the local rank, or is not there; a variable of
                ``torchrun`` is missing.
            RanksError: the others did not come.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            yield cls(device=device)
            return
        rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        ranks = cls(rank, size, _device_of(device, local_rank))
        backend = "gloo"
        if device.startswith("cuda"):
            torch.cuda.set_device(local_rank)
            backend = "cpu:gloo,cuda:nccl"
        with ranks._together():
            dist.init_process_group(backend, timeout=_PATIENCE)
        try:
            yield ranks
        finally:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes logs and checkpoints."""
        return self.rank == 0

    @property
    def pool(self) -> Pool | None:
        """`moments`, for whatever pools its statistics; ``None`` alone."""
        return None if self.size == 1 else self.moments

    def seed(self, seed: int) -> int:
        """This rank's own seed, ``seed + rank``."""
        return (seed + self.rank) % _NUM_SEEDS

    # -- learning --------------------------------------------------------------------------------

    def mean_(self, tensor: Tensor) -> Tensor:
        """``tensor`` with the mean over ranks in its place."""
        if self.size > 1:
            with self._together():
                dist.all_reduce(tensor)
            tensor.div_(self.size)
        return tensor

    @torch.no_grad()
    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Number, mean and (biased) variance of the rows of all ranks, merged exactly, in float64.

            n = Σ n_k,   m = Σ n_k·m_k / n,   v = Σ n_k·(v_k + (m_k − m)²) / n

        Chan et al. 1979. Where no rank has a row, all three are zero.

        Args:
            x: this rank's rows ``[M, F]``; M differs from rank to rank, and may be zero.

        Returns:
            ``n`` 0-dim int64, ``m`` and ``v`` ``[F]`` in the dtype of ``x``.
        """
        num_rows, width = x.shape
        own = x.new_zeros(1 + 2 * width, dtype=torch.float64)
        if num_rows:
            own[0] = num_rows
            own[1:] = torch.cat([x.mean(0), x.var(0, correction=0)])
        count, mean, var = self._gathered(own).split([1, width, width], -1)
        total = count.sum()
        weight = count / total.clamp(min=1)
        m = (weight * mean).sum(0)
        v = (weight * (var + (mean - m).square())).sum(0)
        return total.long(), m.to(x.dtype), v.to(x.dtype)

    def share(self, module: nn.Module) -> None:
        """Gives ``module`` rank 0's parameters and buffers, and makes its normalisers pool their moments."""
        if self.size == 1:
            return
        with self._together():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        for part in module.modules():
            if isinstance(part, EmpiricalNormalizer):
                part.pool = self.pool

    # -- around it -------------------------------------------------------------------------------

    def mean_of(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Each number's mean over the ranks on which it is not NaN."""
        if self.size == 1:
            return dict(numbers)
        own = torch.tensor(list(numbers.values()), dtype=torch.float64)
        return dict(zip(numbers, self._gathered(own).nanmean(0).tolist(), strict=True))

    def gather(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Everybody's ``state`` (tensors and plain values), on rank 0 and the CPU; nothing on the others."""
        file = io.BytesIO()
        torch.save(dict(state), file)
        found: list[Any] | None = [None] * self.size if self.is_first else None
        with self._together():
            dist.gather_object(file.getvalue(), found, dst=0)
        return [torch.load(io.BytesIO(data), map_location="cpu", weights_only=True) for data in found or ()]

    def require_same(self, settings: Mapping[str, Any]) -> None:
        """Refuses to learn where ranks would wait for each other, or weigh unequal shares alike.

        Raises:
            ValueError: a setting differs between ranks.
        """
        if self.size == 1:
            return
        found: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(found, dict(settings))
        for name, value in found[0].items():
            for rank, other in enumerate(found):
                if other.get(name) != value:
                    raise ValueError(
                        f"`{name}` is {value} on rank 0 but {other.get(name)} on rank {rank}: all ranks must "
                        "train with the same."
                    )

    def wait(self) -> None:
        """Returns when all ranks have come as far as this."""
        self.mean_(torch.zeros(1))

    def _gathered(self, own: Tensor) -> Tensor:
        """Everybody's ``own`` ``[F]``, in the order of ranks, ``[K, F]``."""
        everybody = own.new_empty(self.size, len(own))
        with self._together():
            dist.all_gather(list(everybody), own)
        return everybody

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's own; torch.distributed's are of this kind, too
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
            raise RanksError(
                f"Rank {self.rank} of {self.size} cannot reach the others: one has ended, which says why "
                f"itself, or answers no more ({reason})."
            ) from error


def alone_or(ranks: Ranks | None) -> Ranks:
    """``ranks``, or those of a process that learns alone."""
    return Ranks() if ranks is None else ranks


def component_names(names: Iterable[str], apart: Iterable[str], rank: int) -> dict[str, str]:
    """What a checkpoint calls a rank's components: those that ranks have ``apart`` bear its number.

    >>> component_names(["actor", "rng"], ["rng"], rank=1)
    {'actor': 'actor', 'rng': 'rng_rank1'}
    """
    kept_apart = set(apart) if rank else ()
    return {name: f"{name}{RANK}{rank}" if name in kept_apart else name for name in names}


def _device_of(device: str, local_rank: int) -> str:
    if not device.startswith("cuda"):
        return device
    own = f"cuda:{local_rank}"
    if device not in ("cuda", own):
        raise ValueError(
            f"`device` is {device!r}, but the process of local rank {local_rank} computes on {own!r}: pass "
            "'cuda', and choose GPUs by CUDA_VISIBLE_DEVICES."
        )
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"There is no device {own!r} here, only {torch.cuda.device_count()} of CUDA: start no more "
            "processes than that on this machine (--nproc-per-node)."
        )
    return own
