"""Rows that stand in order: every kernel gives what advanced indexing does, to the last bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchrl_rslstorage.data import gathering
from torchrl_rslstorage.data.gathering import gather_rows

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
FEATURES = [(), (1,), (1, 1), (0,), (3,), (2, 2), (127,), (128,), (2, 64), (235,), (512,), (513,), (1200,)]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Every bit pattern, NaN with a payload among them, which a detour over arithmetic would not keep."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    size = (*shape[:-1], shape[-1] * dtype.itemsize) if shape else (dtype.itemsize,)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


def bits(x: Tensor) -> list[int]:
    return x.contiguous().view(-1).view(torch.uint8).tolist()


@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.sampled_from(FEATURES),
    st.sampled_from(DTYPES),
    st.sampled_from(["new", "out", "out with gaps", "source with gaps"]),
    st.integers(0, 2**31 - 1),
)
def test_they_are_the_rows_of_advanced_indexing(rows, numbers, features, dtype, kind, seed):
    index = torch.tensor(numbers) % rows
    x = random_bits((rows, *features), dtype, seed)
    if kind == "source with gaps":
        x = torch.stack([x, x], 1)[:, 0]
    out = None
    if kind.startswith("out"):
        out = torch.zeros(len(index), 2, *features, dtype=dtype)[:, 0]
        out = out if kind == "out with gaps" else out.contiguous()
    found = gather_rows(x, index, out=out)
    assert found.shape == (len(index), *features)
    assert bits(found) == bits(x[index])
    if out is not None:
        assert bits(out) == bits(found)


@pytest.mark.parametrize("width", [128, 256, 512])
@pytest.mark.parametrize("has_vectors", [True, False])
def test_a_torch_that_was_built_without_vectors_gives_the_same(monkeypatch, width, has_vectors):
    monkeypatch.setattr(gathering, "_HAS_VECTORS", has_vectors)
    x = random_bits((7, width), torch.float32, 1)
    index = torch.tensor([3, 3, 0, 6, 5])
    assert bits(gather_rows(x, index)) == bits(x[index])


@pytest.mark.parametrize("width", [1, 3, 235])
@pytest.mark.parametrize("number", [-1, 7])
def test_a_row_that_is_not_there_is_refused(width, number):
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        gather_rows(torch.zeros(7, width), torch.tensor([number]))


@pytest.mark.parametrize("width", [1, 3, 235])
def test_gradients_flow_back(width):
    x = torch.randn(4, width, dtype=torch.float64, requires_grad=True)
    gather_rows(x, torch.tensor([1, 1, 3])).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]
