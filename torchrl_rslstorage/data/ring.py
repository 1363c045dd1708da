"""Where each environment's steps stand in a ring of ``[max_len, N]`` rows: index maths, no data.

    max_len = 4, N = 3, steps s₀ to s₅; environment 1 was reset before s₅, environment 2 missed s₂

    row 0   s₄ s₄ s₅        start   appends that do not count: before the reset, and missed   0  5  1
    row 1   s₅ s₅ s₁        lag     appends that were missed                                  0  0  1
    row 2   s₂ s₂ s₃        length  count − start, at most max_len                            4  1  4
    row 3   s₃ s₃ s₄        newest  row (count − 1 − lag) mod max_len                         1  1  0

``count = 6`` appends is a number on the host. As long as nobody misses an append there is no ``lag``, every
append is one whole row, and neither tensor is touched by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Ring:
    """The cursors of all environments; a cell is ``row·N + n``, and two more cells stand for none.

    Args:
        max_len: rows.
        num_envs: N, environments.
        device: where the cursors live.
    """

    def __init__(self, max_len: int, num_envs: int, device: torch.device | str) -> None:
        self.max_len = max_len
        self.num_envs = num_envs
        self.nowhere = max_len * num_envs
        self.scratch = self.nowhere + 1
        self.count = 0
        # Memory made in inference mode could never again be written outside of it.
        with torch.inference_mode(False):
            self._start = torch.zeros(num_envs, dtype=torch.int64, device=device)
            self._envs = torch.arange(num_envs, device=device)
        self._lag: Tensor | None = None

    # -- where to write --------------------------------------------------------------------------

    @property
    def is_aligned(self) -> bool:
        """Whether every environment's next step goes into the same row."""
        return self._lag is None

    @property
    def row(self) -> int:
        """The row that the next step of aligned environments goes into."""
        return self.count % self.max_len

    def next_cells(self, mask: Tensor | None) -> Tensor:
        """The cell ``[N]`` of each environment's next step; the scratch cell where ``mask`` says no."""
        rows = torch.remainder(self.count - self._lags(), self.max_len)
        cells = rows.mul_(self.num_envs).add_(self._envs)
        return cells if mask is None else cells.masked_fill_(~mask, self.scratch)

    def advance(self, mask: Tensor | None = None, *, steps: int = 1) -> None:
        """Counts ``steps`` appends, which the environments outside of ``mask`` miss."""
        self.count += steps
        if mask is not None:
            missed = (~mask).to(torch.int64).mul_(steps)
            self._start += missed
            self._lags().add_(missed)

    def _lags(self) -> Tensor:
        if self._lag is None:
            with torch.inference_mode(False):
                self._lag = torch.zeros_like(self._start)
        return self._lag

    def reset(self, envs: Tensor | None = None) -> None:
        """Empties the environments of a bool mask ``[N]`` or of int64 numbers; ``None``: all, from row 0."""
        if envs is None:
            self.count, self._lag = 0, None
            self._start.zero_()
        elif envs.dtype is torch.bool:
            self._start.masked_fill_(envs, self.count)
        else:
            self._start.index_fill_(0, envs, self.count)

    # -- where to read ---------------------------------------------------------------------------

    @property
    def num_pushes(self) -> Tensor:
        """``[N]`` int64: steps written to each environment since its last reset."""
        return self.count - self._start

    @property
    def lengths(self) -> Tensor:
        """``[N]`` int64: steps that each environment holds."""
        return self.num_pushes.clamp_(max=self.max_len)

    def cells(self, ages: Tensor | int) -> Tensor:
        """The cells of the steps of these ages, 0 the newest, clamped to the oldest one held.

        Args:
            ages: one number, or int64 ``[..., N]``.

        Returns:
            int64 ``[..., N]``; ``nowhere`` where an environment holds nothing.
        """
        lengths = self.lengths
        oldest = lengths - 1
        ages = oldest.clamp_(max=ages) if isinstance(ages, int) else torch.minimum(ages, oldest)
        newest = self.count - 1 if self._lag is None else self.count - 1 - self._lag
        rows = torch.remainder(newest - ages, self.max_len)
        return torch.where(lengths > 0, rows.mul_(self.num_envs).add_(self._envs), self.nowhere)

    def cells_held(self, num_held: int) -> Tensor:
        """The cells of all steps that are held, each once.

        Args:
            num_held: the sum of `lengths`, on the host.

        Returns:
            int64 ``[num_held]``.
        """
        cells = torch.arange(num_held, device=self._start.device)
        if num_held == self.nowhere or (self._lag is None and num_held == self.count * self.num_envs):
            return cells  # every row, or the first ones of all environments
        lengths = self.lengths
        coming = self.count if self._lag is None else self.count - self._lag
        # What an environment holds is consecutive here, the oldest first.
        first = coming - lengths.cumsum(0)
        first, envs = (torch.repeat_interleave(x, lengths, output_size=num_held) for x in (first, self._envs))
        return torch.remainder(cells.add_(first), self.max_len).mul_(self.num_envs).add_(envs)

    # -- saving ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The cursors, cloned."""
        lag = None if self._lag is None else self._lag.clone()
        return {"count": self.count, "start": self._start.clone(), "lag": lag}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave."""
        self.count = int(state["count"])
        self._start.copy_(state["start"])
        self._lag = None
        if state["lag"] is not None:
            self._lags().copy_(state["lag"])


def as_environments(envs: Sequence[int] | Tensor | int, num_envs: int, device: torch.device | str) -> Tensor:
    """Environments as a caller names them: a bool mask ``[N]``, or int64 numbers ``[K]``, on ``device``.

    Numbers that are on the host are checked; those on another device are not, which would wait for it.

    Raises:
        ValueError: neither a mask of N entries nor numbers in ``[0, N)``.
    """
    named = torch.as_tensor(envs)
    if named.dtype is torch.bool:
        if named.shape != (num_envs,):
            raise ValueError(
                f"A mask of environments has shape {tuple(named.shape)}, expected [N = {num_envs}]."
            )
        return named.to(device)
    if named.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    if named.dtype is torch.uint8:
        raise ValueError(
            "Environments came as uint8, which may mean a mask or numbers: pass envs.bool() or envs.long()."
        )
    if named.is_floating_point() or named.is_complex() or named.ndim > 1:
        raise ValueError(
            f"Environments are named by a bool mask [N = {num_envs}] or by integers [K], got "
            f"{str(named.dtype).removeprefix('torch.')} {tuple(named.shape)}."
        )
    if named.device.type == "cpu" and not ((named >= 0) & (named < num_envs)).all():
        raise ValueError(
            f"There are environments 0 to {num_envs - 1}, got {named.min().item()} to {named.max().item()}."
        )
    return named.reshape(-1).to(device=device, dtype=torch.int64)
