"""Copying rows: the same numbers as torch's index_select, by whichever of the two ways."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from torchrl_rslstorage import RolloutBuffer
from torchrl_rslstorage.data import gathering
from torchrl_rslstorage.data.gathering import RowCopies

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.complex64,
]


def some(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@given(
    num_rows=st.integers(1, 20),
    num_chosen=st.integers(0, 30),
    features=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    threads=st.sampled_from([1, 8]),
    grain=st.sampled_from([0, 32768]),
    seed=st.integers(0, 99),
)
def test_rows_are_those_of_index_select(
    num_rows, num_chosen, features, dtype, strided, threads, grain, seed
) -> None:
    source = some([num_rows, *features, 2 if strided else 1], dtype, seed)[..., 0]
    rows = torch.randint(0, num_rows, (num_chosen,), generator=torch.Generator().manual_seed(seed))
    room = some([num_chosen, *features], dtype, seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        patch.setattr(gathering, "_TORCH_GRAIN", grain)
        RowCopies([source], [room]).run(rows)
    assert torch.equal(room, source.index_select(0, rows))


def test_several_tensors_are_copied_by_the_same_rows() -> None:
    sources = [torch.arange(5), torch.arange(10.0).view(5, 2), torch.arange(5).view(5, 1) > 2]
    rooms = [source.new_empty(3, *source.shape[1:]) for source in sources]
    rows = torch.tensor([4, 0, 0])
    RowCopies(sources, rooms).run(rows)
    for source, room in zip(sources, rooms, strict=True):
        assert torch.equal(room, source[rows])


def test_what_is_copied_is_what_the_source_holds_now() -> None:
    source, room = torch.zeros(3, 2), torch.empty(2, 2)
    copies = RowCopies([source], [room])
    source.fill_(7)
    copies.run(torch.tensor([1, 2]))
    assert torch.equal(room, torch.full((2, 2), 7.0))


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("wrong", [3, -1, 2**40])
def test_a_row_that_is_none_is_refused_and_nothing_copied(monkeypatch, wrong: int, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    room = torch.full((2,), -5.0)
    with pytest.raises(IndexError, match=f"{wrong}.*rows 0 to 2"):
        RowCopies([torch.zeros(3)], [room]).run(torch.tensor([1, wrong]))
    assert room.tolist() == [-5.0, -5.0]


def test_no_tensors_and_no_rows_are_fine() -> None:
    RowCopies([], []).run(torch.tensor([1]))
    RowCopies([torch.zeros(3, 2)], [torch.empty(0, 2)]).run(torch.tensor([], dtype=torch.int64))


def test_a_graph_that_was_kept_notices_that_its_rows_were_overwritten() -> None:
    source, room = torch.arange(6.0).view(3, 2), torch.empty(2, 2)
    copies = RowCopies([source], [room])
    copies.run(torch.tensor([0, 1]))
    weight = torch.ones(2, 2, requires_grad=True)
    loss = (weight * room).sum()
    copies.run(torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_source_that_requires_gradients_is_copied_without_them() -> None:
    source, room = torch.ones(3, 2, requires_grad=True), torch.zeros(1, 2)
    RowCopies([source], [room]).run(torch.tensor([2]))
    assert torch.equal(room, torch.ones(1, 2))
    assert not room.requires_grad


@pytest.mark.parametrize("moved", ["source", "room"])
def test_memory_that_is_shared_with_other_processes_is_followed(moved: str) -> None:
    source, room = torch.zeros(3, 2), torch.zeros(2, 2)
    copies = RowCopies([source], [room])
    (source if moved == "source" else room).share_memory_()
    source.fill_(7)
    copies.run(torch.tensor([1, 2]))
    assert torch.equal(room, torch.full((2, 2), 7.0))


@pytest.mark.parametrize("moved", ["mini-batch", "column"])
def test_mini_batches_are_of_the_present_window_after_tensors_were_shared(moved: str) -> None:
    buffer = RolloutBuffer(2, 3)

    def mini_batch(number: float) -> TensorDictBase:
        buffer.empty()
        flags = {"reward": torch.ones(3, 1), "done": torch.zeros(3, 1, dtype=torch.bool)}
        for _ in range(2):
            buffer.add(TensorDict({"observation": torch.full((3, 4), number), "next": flags}, [3]))
        return next(iter(buffer))

    first = mini_batch(1.0)
    (first if moved == "mini-batch" else buffer.window)["observation"].share_memory_()
    assert mini_batch(2.0)["observation"].unique().tolist() == [2.0]
