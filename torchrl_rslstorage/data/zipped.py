"""Several buffers read side by side, one mini-batch of each at a time."""

from __future__ import annotations

from collections.abc import Iterator

from tensordict import TensorDictBase

from torchrl_rslstorage.data.update_buffer import UpdateBuffer


def zip_mini_batches(*buffers: UpdateBuffer, **named: UpdateBuffer) -> Iterator[tuple[TensorDictBase, ...]]:
    """One fresh update of each buffer, in step: every tuple has the next mini-batch of each.

    RSL-RL zips its generators, and so stops where the shortest does. Here all are checked before the first
    mini-batch, so that mini-batch number i of epoch e of one stands beside that of the others.

    Args:
        buffers: a `RolloutBuffer` or `HistoryBuffer` each, at least two.
        named: more of them, after the others; their names appear in errors.

    Raises:
        ValueError: epochs or mini-batches are not the same number for all; or fewer than two buffers, or the
            same one twice.
        TypeError: a buffer's sampler has no ``num_epochs`` and ``num_mini_batches``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import HistoryBuffer, HistorySampler, zip_mini_batches
        >>> policy, demo = (HistoryBuffer(4, 2, sampler=HistorySampler(2, num_epochs=3)) for _ in range(2))
        >>> for history in (policy, demo):
        ...     history.extend(TensorDict({"x": torch.randn(4, 2)}, [4, 2]))
        >>> [(len(a), len(b)) for a, b in zip_mini_batches(policy=policy, demo=demo)]
        [(4, 4), (4, 4), (4, 4), (4, 4), (4, 4), (4, 4)]
    """
    every = {**{f"buffer {place}": buffer for place, buffer in enumerate(buffers)}, **named}
    if len(every) < 2:
        raise ValueError(f"At least two buffers are read side by side, got {len(every)}.")
    counts = {name: _counts(name, buffer) for name, buffer in every.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {epochs} x {parts}" for name, (epochs, parts) in counts.items())
        raise ValueError(
            f"Epochs x mini-batches differ: {told}. Give all samplers the same num_epochs and "
            "num_mini_batches; none is cut to the shortest."
        )
    if len({id(buffer.sampler) for buffer in every.values()}) < len(every):
        raise ValueError("A buffer or sampler comes twice, but is in one place of its update at a time.")
    return zip(*(iter(buffer) for buffer in every.values()), strict=True)


def _counts(name: str, buffer: UpdateBuffer) -> tuple[int, int]:
    sampler = getattr(buffer, "sampler", None)
    try:
        return sampler.num_epochs, sampler.num_mini_batches  # pyright: ignore[reportOptionalMemberAccess]
    except AttributeError as error:
        raise TypeError(
            f"{name} is a {type(buffer).__name__} with the sampler {type(sampler).__name__}, which has no "
            "num_epochs and num_mini_batches: pass buffers of this package."
        ) from error
