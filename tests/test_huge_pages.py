"""Memory that is kept: writable everywhere, and asked for in huge pages where Linux has them."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_rslstorage import HistoryBuffer, RolloutBuffer
from torchrl_rslstorage.data import memory

SMAPS = Path("/proc/self/smaps")
BIG = (2048, 1024)  # 8 MiB of float32

asks_linux = pytest.mark.skipif(
    not SMAPS.exists()
    or not Path("/sys/kernel/mm/transparent_hugepage").exists()
    or not hasattr(ctypes.CDLL(None), "madvise"),
    reason="wants Linux with transparent huge pages",
)


def asked_for_huge_pages(tensor: torch.Tensor) -> bool:
    """What the kernel noted about the middle of the tensor's memory: the flag "hg" is MADV_HUGEPAGE."""
    address = tensor.data_ptr() + tensor.untyped_storage().nbytes() // 2
    inside = False
    for line in SMAPS.read_text().splitlines():
        bounds = line.split(" ", 1)[0].split("-")
        if len(bounds) == 2 and all(set(bound) <= set("0123456789abcdef") for bound in bounds):
            inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the tensor's memory is not in the map of this process")


@asks_linux
@pytest.mark.parametrize("make", [memory.empty, memory.zeros])
def test_large_memory_is_asked_for_in_huge_pages(make) -> None:
    assert asked_for_huge_pages(make(BIG, dtype=torch.float32, device="cpu"))


@asks_linux
def test_columns_shuffled_copies_and_histories_are_asked_for_in_huge_pages() -> None:
    flags = {"reward": torch.ones(1024, 1), "done": torch.zeros(1024, 1, dtype=torch.bool)}
    row = TensorDict({"observation": torch.ones(1024, 1024), "next": flags}, [1024])
    buffer = RolloutBuffer(2, 1024)
    for _ in range(2):
        buffer.add(row)
    assert asked_for_huge_pages(buffer.window["observation"])
    assert asked_for_huge_pages(next(iter(buffer))["observation"])
    history = HistoryBuffer(2, 1024)
    history.append(row.select("observation"))
    assert asked_for_huge_pages(history.storage.columns["observation"])


@pytest.mark.parametrize("system", ["without the constant", "without the function"])
def test_other_systems_get_plain_memory(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    if system == "without the constant":
        monkeypatch.setattr(memory, "_MADV_HUGEPAGE", None)
        monkeypatch.setattr(ctypes, "CDLL", None)  # asking all the same would fail
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    room = memory.zeros(BIG, dtype=torch.float32, device="cpu")
    assert room.shape == BIG
    assert not room.any()


@pytest.mark.parametrize("shape", [(3, 2), BIG, (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.float64])
def test_memory_made_in_inference_mode_can_be_written_outside_of_it(shape, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        room = memory.zeros(shape, dtype=dtype, device="cpu")
    assert not room.is_inference()
    assert room.shape == shape
    assert room.dtype == dtype
    assert not room.any()
    room.fill_(1)
    assert room.all()


def test_rows_like_others_keep_their_kind() -> None:
    like = torch.zeros(4, 3, 2, dtype=torch.float64)
    assert memory.empty_rows(like, 7).shape == (7, 3, 2)
    assert memory.empty_rows(like, 7).dtype == torch.float64


def test_more_than_there_is_raises() -> None:
    with pytest.raises((RuntimeError, MemoryError)):
        memory.empty((sys.maxsize // 8,), dtype=torch.float32, device="cpu")
