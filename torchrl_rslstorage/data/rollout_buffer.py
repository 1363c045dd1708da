"""RolloutBuffer: storage, writer and sampler of one on-policy window, wired as a TorchRL replay buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data.replay_buffers import Sampler

from torchrl_rslstorage._compat import ReplayBufferBase
from torchrl_rslstorage.data.final_observations import FinalObservations
from torchrl_rslstorage.data.samplers import MiniBatchSampler, RolloutSampler
from torchrl_rslstorage.data.storages import RolloutTensorStorage
from torchrl_rslstorage.data.update_buffer import UpdateBuffer
from torchrl_rslstorage.data.writers import RolloutWriter


class RolloutBuffer(UpdateBuffer):
    """One rollout window ``[T, N]``: filled once, read as whole updates, emptied for the next.

    State: empty → filling → full → (``empty()``) → empty. Reading needs a full window, writing one that
    is not. ``Collector(env, policy, replay_buffer=buffer)`` works as it is.

    Args:
        num_steps: T, steps of the window.
        num_envs: N, environments.
        sampler: what a mini-batch is; `MiniBatchSampler(1)` if left out. A stock TorchRL sampler works
            through ``sample(batch_size)``.
        device: where the window lives.
        state_keys: recurrent states, or groups of them (`RNNActor.state_keys`), that are kept only where a
            trajectory starts, which is all that `TrajectorySampler` reads: 1/T of the memory, and a
            little more where episodes end. They are no columns of ``window`` then.
        example: one row ``[N]`` with its ``next``; the window is then allocated at once instead of by
            the first row written.
        transform: TorchRL transforms: their inverse on what is written, themselves on a shallow copy of
            each mini-batch.
        generator: the sampler's own random generator; ``None`` uses torch's global one.

    Raises:
        ValueError: a size below one.
        MemoryError: the window of ``example`` does not fit; the message says what it takes.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import MiniBatchSampler, RolloutBuffer
        >>> buffer = RolloutBuffer(2, 3, sampler=MiniBatchSampler(num_mini_batches=2, num_epochs=2))
        >>> flags = {"reward": torch.ones(3, 1), "done": torch.zeros(3, 1, dtype=torch.bool)}
        >>> for step in range(2):
        ...     row = TensorDict({"observation": torch.zeros(3, 4), "next": flags}, [3])
        ...     _ = buffer.add(row)
        >>> [tuple(batch.batch_size) for batch in buffer]
        [(3,), (3,), (3,), (3,)]
        >>> buffer.empty()
        >>> buffer.write_count
        6
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        *,
        sampler: Sampler | None = None,
        device: torch.device | str = "cpu",
        state_keys: Sequence[NestedKey] = (),
        example: TensorDictBase | None = None,
        transform: Any = None,
        generator: torch.Generator | None = None,
    ) -> None:
        storage = RolloutTensorStorage(num_steps, num_envs, device=device, state_keys=state_keys)
        if example is not None:
            storage.allocate(_batched(example, num_envs))
        super().__init__(
            storage=storage,
            writer=RolloutWriter(),
            sampler=MiniBatchSampler() if sampler is None else sampler,
            collate_fn=_as_it_is,
            transform=transform,
            generator=generator,
        )

    # -- parts and sizes -------------------------------------------------------------------------

    @property
    def storage(self) -> RolloutTensorStorage:
        """The ``[T, N]`` rollout."""
        return self._storage

    @property
    def writer(self) -> RolloutWriter:
        """What writes its rows, whole or in halves."""
        return self._writer

    @property
    def num_steps(self) -> int:
        """T, steps of the window."""
        return self._storage.num_steps

    @property
    def num_envs(self) -> int:
        """N, environments."""
        return self._storage.num_envs

    @property
    def num_rows(self) -> int:
        """Rows written into the present window."""
        return self._writer.num_rows

    @property
    def is_full(self) -> bool:
        """Whether the window can be read."""
        return self._storage.is_full

    @property
    def window(self) -> TensorDictBase:
        """The full window ``[T, N]``, as views of the storage.

        Raises:
            RuntimeError: it is not full.
        """
        return self._storage.window()

    @property
    def final_observations(self) -> FinalObservations:
        """The observations of truncated steps and of the last row, which no row holds."""
        return self._storage.final_observations

    def nbytes(self, example: TensorDictBase | None = None) -> int:
        """Bytes that one window takes: columns, advantage, value target, last row's observations.

        The shuffled copy that `MiniBatchSampler` reads from comes on top: at most once the root columns.

        Args:
            example: one row ``[N]`` with its ``next``, of which shapes and dtypes are read. May be left
                out once the window is allocated.

        Raises:
            RuntimeError: neither an example nor an allocated window is there.
        """
        return self._storage.window_nbytes(None if example is None else _batched(example, self.num_envs))

    # -- writing ---------------------------------------------------------------------------------

    def add(self, data: TensorDictBase) -> int:
        """Copies one time step ``[N]`` with its ``next`` into the window; returns its row.

        Raises:
            OverflowError: the window is full.
            KeyError, ValueError: keys, shapes or dtypes are not those of the first row.
        """
        _require_tensordict(data)
        if self._has_transform():
            data = self._transform.inv(data)
        return self._writer.add(_batched(data, self.num_envs))

    def extend(  # pyright: ignore[reportIncompatibleMethodOverride] - TorchRL types data as a Sequence
        self,
        data: TensorDictBase,
        *,
        time_dim: int = 1,
        update_priority: bool | None = None,
    ) -> torch.Tensor:
        """Copies several time steps; returns their rows ``[T']``.

        Args:
            data: a collector's ``[N, T']``, or ``[T', N]`` with ``time_dim=0``; ``[T']`` if there is one
                environment.
            time_dim: which of the two dimensions is time.
            update_priority: part of TorchRL's signature; there are no priorities.

        Raises:
            OverflowError: they do not fit; nothing is written.
            ValueError: the batch size is not that of this buffer, or its dimension names say that time
                is the other dimension.
        """
        _require_tensordict(data)
        if update_priority is not None:
            raise NotImplementedError("A rollout has no priorities: leave update_priority out.")
        if time_dim not in (0, 1):
            raise ValueError(f"`time_dim` must be 0 ([T', N]) or 1 ([N, T']), got {time_dim!r}.")
        if self._has_transform():
            data = self._transform.inv(data)
        if data.ndim == 1 and self.num_envs == 1:
            data = data.unsqueeze(1 - time_dim)
        if data.ndim != 2 or data.shape[1 - time_dim] != self.num_envs:
            form = "[N, T']" if time_dim else "[T', N]"
            raise ValueError(
                f"Expected {form} with N = {self.num_envs} environments, got batch size "
                f"{tuple(data.batch_size)}. Pass time_dim={1 - time_dim} if time is the other dimension."
            )
        names = data.names
        if names is not None and "time" in names and names.index("time") != time_dim:
            raise ValueError(
                f"The data's dimension {names.index('time')} is named 'time', but time_dim={time_dim}."
            )
        rows = self._writer.extend(data.transpose(0, 1) if time_dim else data)
        return torch.arange(rows.start, rows.stop)

    def empty(self, empty_write_count: bool = False) -> None:
        """Starts the next window; nothing of the old one can be read any more.

        Args:
            empty_write_count: also set ``write_count``, the transitions of all windows, back to zero.
        """
        self._empty_parts(empty_write_count)

    # -- reading ---------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """The next mini-batch of the running update; begins a fresh update if none is running.

        Args:
            batch_size: only for a stock TorchRL sampler; the samplers of this package know their sizes.
            return_info: also return the sampler's info, an empty dictionary.

        Raises:
            RuntimeError: the window is not full.
            ValueError: a batch size was given to a sampler that makes its own.
        """
        if not isinstance(self._sampler, RolloutSampler):
            self._storage.window()
            return ReplayBufferBase.sample(self, batch_size, return_info=return_info)
        return super().sample(batch_size, return_info)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """One fresh, whole update, also after an earlier one was left before its end."""
        if not isinstance(self._sampler, RolloutSampler):
            return ReplayBufferBase.__iter__(self)
        return super().__iter__()


def _require_tensordict(data: Any) -> None:
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"A rollout is written from TensorDicts, got {type(data).__name__}.")


def _batched(row: TensorDictBase, num_envs: int) -> TensorDictBase:
    """A row ``[N]``; an environment without a batch dimension is the one of a single-environment buffer."""
    return row.unsqueeze(0) if num_envs == 1 and row.ndim == 0 else row


def _as_it_is(data: Any) -> Any:
    return data
