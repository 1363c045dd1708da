"""HistoryBuffer: the newest steps of each environment, read by age, wired as a TorchRL replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler

from torchrl_rslstorage.data.history_sampler import HistorySampler
from torchrl_rslstorage.data.history_storage import HistoryStorage
from torchrl_rslstorage.data.history_writer import HistoryWriter
from torchrl_rslstorage.data.update_buffer import UpdateBuffer


class HistoryBuffer(UpdateBuffer):
    """The newest ``max_len`` steps of each of N environments: a ring, read last in, first out.

        appended  s₀ s₁ s₂ s₃ s₄, max_len = 4        after a reset and s₅

        age        0  1  2  3  4 …                   0  1  2 …
        at_age    s₄ s₃ s₂ s₁ s₁                     s₅ s₅ s₅     clamped to the oldest held
        history   s₁ s₂ s₃ s₄                        s₅ s₅ s₅ s₅  oldest to newest

    It is RSL-RL's ``CircularBuffer`` (AMP branch, storage/circular_buffer.py), whose first append after a
    reset fills every slot of that environment; here reading clamps instead, which copies nothing and waits
    for nothing. Any TensorDict ``[N]`` goes in, nested, of any ranks and dtypes; the first one makes the
    columns. Reads copy, and change nothing.

    An environment that was reset and not appended to since reads as zeros, and is never sampled. Reading
    raises if nothing at all was appended since the buffer was made, emptied or wholly reset. Transforms act
    on what is appended and on mini-batches; `at_age` and `history` show what is stored.

    State: empty, or holding steps. Every append or reset ends a running update of the sampler.

    Args:
        max_len: steps kept of each environment.
        num_envs: N, environments.
        sampler: what a mini-batch is; `HistorySampler(1)` if left out.
        device: where the history lives; the CPU if left out.

    Raises:
        ValueError: a size below one.
        TypeError: the sampler is not a `HistorySampler`. TorchRL's draw whatever stands in the ring, that of
            environments that were reset included.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import HistoryBuffer
        >>> history = HistoryBuffer(max_len=4, num_envs=2)
        >>> for step in range(5):
        ...     history.append(TensorDict({"x": torch.full((2,), step)}, [2]))
        >>> history.reset([1])
        >>> history.append(TensorDict({"x": torch.full((2,), 5)}, [2]))
        >>> history.at_age(1)["x"]
        tensor([4, 5])
        >>> history.history()["x"]
        tensor([[2, 3, 4, 5],
                [5, 5, 5, 5]])
        >>> history.lengths
        tensor([4, 1])
    """

    def __init__(
        self,
        max_len: int,
        num_envs: int,
        *,
        sampler: HistorySampler | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            storage=HistoryStorage(max_len, num_envs, device="cpu" if device is None else device),
            writer=HistoryWriter(),
            sampler=_for_histories(HistorySampler() if sampler is None else sampler),
            collate_fn=_as_it_is,
        )

    # -- parts and sizes -------------------------------------------------------------------------

    @property
    def storage(self) -> HistoryStorage:
        """The ring ``[max_len, N]``."""
        return self._storage

    @property
    def writer(self) -> HistoryWriter:
        """What writes its steps."""
        return self._writer

    @property
    def max_len(self) -> int:
        """Steps kept of each environment."""
        return self._storage.max_len

    @property
    def num_envs(self) -> int:
        """N, environments."""
        return self._storage.num_envs

    @property
    def lengths(self) -> Tensor:
        """``[N]`` int64: steps that each environment holds. ``len(buffer)`` is their sum, on the host."""
        return self._storage.ring.lengths

    @property
    def num_pushes(self) -> Tensor:
        """``[N]`` int64: steps appended to each environment since its last reset, also those overwritten."""
        return self._storage.ring.num_pushes

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Reads by another sampler, which gets the buffer's generator; returns the one before.

        Raises:
            TypeError: it is not a `HistorySampler`.
        """
        return super().set_sampler(_for_histories(sampler))

    # -- writing ---------------------------------------------------------------------------------

    def append(self, step: TensorDictBase, mask: Tensor | None = None) -> None:
        """Copies one step of all environments, or of some, without waiting for the device.

        Args:
            step: batch size ``[N]``; everything in it is kept.
            mask: bool ``[N]``; the other environments keep their history as it is.

        Raises:
            KeyError, ValueError: batch size, keys, shapes or dtypes are not those of the first step.
        """
        self._writer.append(self._inverse(step), mask)

    def add(self, data: TensorDictBase) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - no index
        """TorchRL's name of `append`."""
        self.append(data)

    def extend(  # pyright: ignore[reportIncompatibleMethodOverride] - TorchRL types data as a Sequence
        self, steps: TensorDictBase, mask: Tensor | None = None
    ) -> None:
        """Appends the steps ``[T', N]`` one after another; of more than ``max_len`` the newest remain.

        Args:
            steps: batch size ``[T', N]``, time first; a collector's ``[N, T']`` has to be transposed.
            mask: bool ``[T', N]``, or ``[N]`` for all steps alike.

        Raises:
            KeyError, ValueError: as `append`; or time is not the first dimension.
        """
        self._writer.extend(self._inverse(steps), mask)

    def reset(self, envs: Sequence[int] | Tensor | int | None = None) -> None:
        """Empties the histories of some environments, or of all; the next append back-fills them.

        Args:
            envs: integers ``[K]`` or a bool mask ``[N]``; ``None`` for all.

        Raises:
            ValueError: there is no such environment. Numbers on another device than the CPU are not checked.
        """
        self._writer.reset(envs)

    def empty(self, empty_write_count: bool = False) -> None:
        """`reset` of all environments.

        Args:
            empty_write_count: also set ``write_count`` back to zero.
        """
        self._empty_parts(empty_write_count)

    def _inverse(self, data: TensorDictBase) -> TensorDictBase:
        if not isinstance(data, TensorDictBase):
            raise TypeError(f"A history is written from TensorDicts, got {type(data).__name__}.")
        return self._transform.inv(data) if self._has_transform() else data

    # -- reading ---------------------------------------------------------------------------------

    def at_age(self, age: int | Tensor) -> TensorDict:
        """The step of each environment that was appended ``age`` appends before its newest one.

        Args:
            age: 0 is the newest. One number for all, or integers ``[N]``. Ages past the oldest step held give
                that one; negative ones in a tensor, which cannot be looked at without waiting, the newest.

        Returns:
            ``[N]``, a copy; zeros where an environment holds nothing.

        Raises:
            RuntimeError: nothing was appended.
            ValueError: a negative number, or a tensor that is not integers ``[N]``.
        """
        self._storage.require_steps()
        return self._storage.at_cells(self._storage.ring.cells(self._checked_age(age)))

    def _checked_age(self, age: int | Tensor) -> int | Tensor:
        if isinstance(age, Tensor):
            integers = not (age.is_floating_point() or age.is_complex() or age.dtype is torch.bool)
            if age.shape != (self.num_envs,) or not integers:
                raise ValueError(
                    f"`age` is {str(age.dtype).removeprefix('torch.')} {tuple(age.shape)}, expected one "
                    f"integer, or integers [N = {self.num_envs}]."
                )
            return age.to(device=self._storage.device, dtype=torch.int64).clamp(min=0)
        if isinstance(age, bool) or not isinstance(age, int) or age < 0:
            raise ValueError(f"`age` must be an integer of at least 0, the newest, got {age!r}.")
        return min(age, self.max_len)

    def history(self) -> TensorDict:
        """``[N, max_len]``, oldest to newest; what is missing shows the oldest step held.

        Returns:
            A copy; zeros where an environment holds nothing.

        Raises:
            RuntimeError: nothing was appended.
        """
        return self._storage.history()


def _for_histories(sampler: Sampler) -> HistorySampler:
    if not isinstance(sampler, HistorySampler):
        raise TypeError(
            f"A history is sampled by a HistorySampler, not by {type(sampler).__name__}, which does not know "
            "what each environment holds."
        )
    return sampler


def _as_it_is(data: Any) -> Any:
    return data
