"""What the data path must do, written the slow and obvious way.

Two parts: references (loops over cells, no tricks), and checks. A check is a whole scenario that raises
AssertionError when the package gets it wrong. The tests call checks to show that the package is right;
`test_mutants.py` calls the same checks to show that they notice when it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

import pytest
import torch
from conftest import make_row, make_rows
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_rslstorage import MiniBatchSampler, RolloutBuffer

SIGNALS = ("reward", "done", "terminated", "truncated")
OBSERVATIONS = ("observation", ("sensors", "camera"), ("sensors", "height"))
ROOT_KEYS = {*OBSERVATIONS, "action", "action_log_prob", "state_value", "is_init"}


# -- references --------------------------------------------------------------------------------


class Plan(NamedTuple):
    """A window to be: its sizes, and the cells ``(t, n)`` where episodes end or are cut off."""

    num_steps: int
    num_envs: int
    terminated: frozenset[tuple[int, int]] = frozenset()
    truncated: frozenset[tuple[int, int]] = frozenset()

    def rows(self, window: int = 0) -> list[TensorDict]:
        ends = {"terminated": self.terminated, "truncated": self.truncated}
        return make_rows(self.num_steps, self.num_envs, window=window, **ends)

    def final_cells(self) -> list[tuple[int, int]]:
        """Where the next observation is not the next row: truncated steps, and all of the last row."""
        cells = [(t, n) for t in range(self.num_steps) for n in range(self.num_envs)]
        return [(t, n) for t, n in cells if (t, n) in self.truncated or t == self.num_steps - 1]


@st.composite
def plans(draw: st.DrawFn, max_steps: int = 6, max_envs: int = 5) -> Plan:
    num_steps, num_envs = draw(st.integers(1, max_steps)), draw(st.integers(1, max_envs))
    cells = st.tuples(st.integers(0, num_steps - 1), st.integers(0, num_envs - 1))
    return Plan(num_steps, num_envs, draw(st.frozensets(cells)), draw(st.frozensets(cells)))


def tensors(td: TensorDictBase) -> dict:
    """Every leaf of ``td`` by name."""
    return dict(td.items(include_nested=True, leaves_only=True))


def column(rows: list[TensorDict], key: str | tuple[str, ...]) -> Tensor:
    """The column ``[T, N, *]`` of ``key``."""
    return torch.stack([row.get(key) for row in rows])


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    return a.dtype == b.dtype and torch.equal(a, b)


def balanced_sizes(total: int, parts: int) -> list[int]:
    """``total`` dealt out one by one to ``parts``, largest first."""
    return sorted((len(range(i, total, parts)) for i in range(parts)), reverse=True)


def cells_of(batch: TensorDictBase, plan: Plan) -> list[int]:
    """The cells ``t * N + n`` of a mini-batch, which all of its entries must agree upon."""
    t, n = batch["observation"][:, 0].long(), batch["observation"][:, 1].long()
    expected = torch.stack(plan.rows())[t, n]
    for key, value in tensors(batch).items():
        if key in ROOT_KEYS:
            assert same(value, expected.get(key)), f"{key} belongs to other cells than observation does"
    return (t * plan.num_envs + n).tolist()


def filled(plan: Plan, window: int = 0, **buffer_options) -> RolloutBuffer:
    """A buffer with the window of ``plan``, written row by row."""
    buffer = RolloutBuffer(plan.num_steps, plan.num_envs, **buffer_options)
    fill(buffer, plan, window)
    return buffer


def fill(buffer: RolloutBuffer, plan: Plan, window: int = 0) -> None:
    for row in plan.rows(window):
        buffer.add(row)


# -- checks ------------------------------------------------------------------------------------


def check_window(buffer: RolloutBuffer, plan: Plan, window: int = 0) -> None:
    """Every column holds what every row brought, and there is no other column."""
    rows, stored = plan.rows(window), tensors(buffer.window)
    assert stored.keys() == ROOT_KEYS | {("next", name) for name in SIGNALS}
    for key, value in stored.items():
        assert same(value, column(rows, key)), f"{key} is not what was written"


def check_final_observations(buffer: RolloutBuffer, plan: Plan, window: int = 0) -> None:
    """The table holds exactly the cells without a next row, in order, with what the environment showed."""
    t, n, observation = buffer.final_observations
    rows, cells = plan.rows(window), plan.final_cells()
    assert list(zip(t.tolist(), n.tolist(), strict=True)) == cells
    stored = tensors(observation)
    assert stored.keys() == set(OBSERVATIONS)
    for key, value in stored.items():
        expected = torch.stack([rows[step].get("next").get(key)[env] for step, env in cells])
        assert same(value, expected), f"{key} is not what stood under next"


def check_every_cell_is_seen_once_an_epoch(
    plan: Plan, num_mini_batches: int, num_epochs: int = 1, reshuffle: bool = False, **sampler_options
) -> None:
    """Each epoch visits every cell once, in mini-batches whose sizes differ by at most one."""
    sampler = MiniBatchSampler(num_mini_batches, num_epochs, reshuffle, **sampler_options)
    buffer = filled(plan, sampler=sampler)
    check_update([cells_of(batch, plan) for batch in buffer], plan, sampler)


def check_update(batches: list[list[int]], plan: Plan, sampler: MiniBatchSampler) -> None:
    """The cells of the mini-batches of one whole update are those of its epochs."""
    total, per_epoch = plan.num_steps * plan.num_envs, sampler.num_mini_batches
    total -= total % per_epoch if sampler.drop_remainder else 0
    assert len(batches) == per_epoch * sampler.num_epochs
    for epoch in range(sampler.num_epochs):
        mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(chain(*mine)) == list(range(total)), f"epoch {epoch} is no cover"
        assert [len(batch) for batch in mine] == balanced_sizes(total, per_epoch)
        if not sampler.reshuffle:
            assert mine == batches[:per_epoch], "reshuffle=False keeps the mini-batches of the first epoch"


def write_by_add(buffer: RolloutBuffer, plan: Plan) -> None:
    """Rows from one TensorDict whose memory is overwritten for each step, and wiped at the end."""
    reused = make_row(0, plan.num_envs)
    for row in plan.rows():
        buffer.add(reused.update_(row))
    reused.apply_(torch.Tensor.zero_)


def write_by_halves(buffer: RolloutBuffer, plan: Plan) -> None:
    """Half rows from a simulator whose ``step`` overwrites the very observation that was acted upon."""
    reused = make_row(0, plan.num_envs)
    root, after = reused.exclude("next"), reused.get("next")
    for key in OBSERVATIONS:
        after.set(key, root.get(key))
    for row in plan.rows():
        root.update_(row.exclude("next"))
        buffer.writer.write_root(root)
        after.update_(row.get("next"))
        buffer.writer.write_next(after)
    reused.apply_(torch.Tensor.zero_)


def write_by_extend(buffer: RolloutBuffer, plan: Plan) -> None:
    """Blocks ``[N, 1]`` from one TensorDict whose memory is overwritten for each block."""
    reused = make_row(0, plan.num_envs).unsqueeze(1).clone()
    for row in plan.rows():
        buffer.extend(reused.update_(row.unsqueeze(1)))
    reused.apply_(torch.Tensor.zero_)


WRITES: dict[str, Callable[[RolloutBuffer, Plan], None]] = {
    "add": write_by_add,
    "halves": write_by_halves,
    "extend": write_by_extend,
}


def check_writes_are_copies(write: str, plan: Plan) -> None:
    """A window written from memory that the environment overwrites holds each step's own values."""
    buffer = RolloutBuffer(plan.num_steps, plan.num_envs)
    WRITES[write](buffer, plan)
    check_window(buffer, plan)
    check_final_observations(buffer, plan)


def check_nothing_of_the_old_window_is_left(plan: Plan) -> None:
    """After ``empty()`` no reading path shows the old window: not empty, not half way, not full again."""
    buffer = filled(plan, window=1, sampler=MiniBatchSampler(2, 3))
    for key in ("advantage", "value_target", ("returns", "raw")):
        buffer.storage.derived(key).fill_(1.0)
    for key in ("mine", ("next", "mine")):  # what users and stock value estimators set in the window
        buffer.window[key] = torch.full((plan.num_steps, plan.num_envs, 1), 1.0)
    iteration = iter(buffer)
    next(iteration)
    buffer.empty()

    assert buffer.num_rows == len(buffer) == 0
    assert not buffer.is_full
    assert buffer[:].batch_size.numel() == 0
    assert len(buffer.final_observations.t) == 0
    check_cannot_be_read(buffer)
    with pytest.raises(RuntimeError, match="cut off"):
        next(iteration)

    for count, row in enumerate(plan.rows(window=2), start=1):
        check_cannot_be_read(buffer)
        buffer.add(row)
        assert windows_of(buffer[:]["observation"]) == {2}
        assert buffer[:].batch_size.numel() == count * plan.num_envs
        assert windows_of(buffer.final_observations.observation.get("observation", torch.zeros(0, 4))) <= {2}

    check_window(buffer, plan, window=2)  # which knows of no derived column
    check_final_observations(buffer, plan, window=2)
    batches = list(buffer)
    assert len(batches) == 6
    for batch in [*batches, buffer.sample()]:
        assert windows_of(batch["observation"]) == {2}
        assert set(tensors(batch)) == ROOT_KEYS - {"is_init"}
        assert batch.get("advantage", None) is None
    for number in (2.0, 3.0):
        buffer.storage.derived("advantage").fill_(number)
        buffer.window["mine"] = torch.full((plan.num_steps, plan.num_envs, 1), number)
        for batch in buffer:
            assert (batch["advantage"] == number).all()
            assert (batch["mine"] == number).all(), "mini-batches hold an older column of the same name"


def check_cannot_be_read(buffer: RolloutBuffer) -> None:
    """Every path that reads a whole window refuses."""
    reads: Iterable[Callable[[], object]] = (
        buffer.sample,
        lambda: next(iter(buffer)),
        lambda: buffer.window,
        buffer.storage.root_columns,
        lambda: buffer.storage.shuffled(torch.tensor([0]), None),
    )
    for read in reads:
        try:
            read()
        except RuntimeError as error:
            assert f"{buffer.num_rows} of {buffer.num_steps} rows" in str(error)
        else:
            raise AssertionError("a window that is not full was read")


def windows_of(observation: Tensor) -> set[int]:
    """The windows that the cells of ``observation`` come from."""
    return {int(window) for window in observation[..., 2].flatten()}
