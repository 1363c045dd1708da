"""Memory that is kept: writable everywhere, in huge pages where Linux has them, and not given back."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
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


FREED = """
import resource, torch
from torchrl_rslstorage import RolloutBuffer, keep_freed_memory
from torchrl_rslstorage.data import memory

def faults(run):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def activations():
    for _ in range(10):
        torch.ones(12_000_000).mul(2)

activations()
given_back = faults(activations)
kept = keep_freed_memory()
activations()
print(kept, given_back, faults(activations))
"""


def run_python(code: str, **env: str) -> list[str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run([sys.executable, "-c", code], env={**plain, **env}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


asks_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="wants glibc")


@asks_glibc
def test_freed_memory_is_kept_once_asked_for() -> None:
    kept, given_back, afterwards = run_python(FREED)
    assert kept == "True"
    assert int(given_back) > 200_000  # 2 x 48 MB in pages of 4 KiB, ten times
    assert int(afterwards) < 50_000  # at most another block or two, in another place


@asks_glibc
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_a_user_who_told_glibc_otherwise_is_heard(name: str) -> None:
    kept, _, afterwards = run_python(FREED, **{name: "1000000"})
    assert kept == "False"
    assert int(afterwards) > 200_000


KEPT_WINDOW = """
import torch
from torchrl_rslstorage import keep_freed_memory
from torchrl_rslstorage.data import memory
keep_freed_memory()
torch.ones(64, 1024, 1024)  # touched in small pages, and free again
room = memory.zeros((8, 1024, 1024), dtype=torch.float32, device="cpu")
address = room.data_ptr() + room.nbytes // 2
inside = False
for line in open("/proc/self/smaps"):
    first, _, rest = line.partition(" ")
    if "-" in first:
        start, end = (int(part, 16) for part in first.split("-"))
        inside = start <= address < end
    elif inside and first in ("AnonHugePages:", "VmFlags:"):
        print(first, rest.split()[0] if first == "AnonHugePages:" else "hg" in rest.split())
"""


@asks_glibc
@asks_linux
def test_windows_get_memory_of_their_own_where_freed_memory_is_kept() -> None:
    found = run_python(KEPT_WINDOW)
    assert found[0] == "AnonHugePages:"
    assert int(found[1]) > 0 or "never" in huge_pages_setting()
    assert found[2:] == ["VmFlags:", "True"]


def huge_pages_setting() -> str:
    text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    return text[text.index("[") + 1 : text.index("]")]


def test_other_systems_say_that_they_give_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert memory.keep_freed_memory() is False


class FakeGlibc:
    """A C library whose ``mallopt`` takes blocks (option -3) up to ``largest``, and notes what it took."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.taken: dict[int, int] = {}

    def mallopt(self, option: int, value: int) -> int:
        if option == -3 and value > self.largest:
            return 0
        self.taken[option] = value
        return 1


def ask(monkeypatch: pytest.MonkeyPatch, glibc: FakeGlibc) -> bool:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: glibc)
    return memory.keep_freed_memory()


def test_a_glibc_that_refuses_large_blocks_is_asked_for_the_largest_it_takes(monkeypatch) -> None:
    glibc = FakeGlibc(largest=32 * 1024 * 1024)
    assert ask(monkeypatch, glibc) is True
    assert glibc.taken == {-3: 32 * 1024 * 1024, -1: 2**31 - 1}


def test_a_glibc_that_refuses_every_block_is_left_as_it_is(monkeypatch) -> None:
    glibc = FakeGlibc(largest=0)
    assert ask(monkeypatch, glibc) is False
    assert glibc.taken == {}
