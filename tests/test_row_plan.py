"""The short way into the window: any row that is not built like the last is read leaf by leaf, or refused."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_rslstorage import RolloutBuffer
from torchrl_rslstorage.data.row_plan import RowPlan

N = 3


def row(number: int, **changes: object) -> TensorDict:
    """Every number of row ``number`` tells the row and where it stands."""

    def numbers(offset: int, *shape: int) -> Tensor:
        return torch.full((N, *shape), 100.0 * number + offset)

    flags = {name: torch.zeros(N, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    after = {
        "observation": numbers(1, 4),
        "reward": numbers(2, 1),
        "sensors": {"height": numbers(3)},
        **flags,
    }
    root = {"observation": numbers(4, 4), "action": numbers(5, 2), "sensors": {"height": numbers(6)}}
    root["next"] = after
    root.update(changes)
    return TensorDict(root, [N])


def buffer_with_a_plan() -> RolloutBuffer:
    buffer = RolloutBuffer(4, N)
    buffer.add(row(0))
    assert buffer.storage._row_plan is not None
    return buffer


def check(buffer: RolloutBuffer, t: int, expected: TensorDictBase) -> None:
    stored = buffer.storage.columns[t]
    for key in ("observation", "action", ("sensors", "height"), ("next", "reward"), ("next", "truncated")):
        assert torch.equal(stored[key], expected[key]), key


def test_rows_built_alike_go_the_short_way_and_are_stored_the_same(monkeypatch):
    buffer = buffer_with_a_plan()
    monkeypatch.setattr(buffer.storage, "_write_leaves", None)  # the long way is not open
    for number in (1, 2, 3):
        buffer.add(row(number))
        check(buffer, number, row(number))
    assert torch.equal(buffer.final_observations.observation["observation"], row(3)["next", "observation"])
    assert torch.equal(
        buffer.final_observations.observation["sensors", "height"], row(3)["next", "sensors", "height"]
    )


def in_another_order(number: int) -> TensorDictBase:
    td = row(number)
    return TensorDict({key: td[key] for key in reversed(list(td.keys()))}, [N])


def without_truncated(number: int) -> TensorDictBase:
    return row(number).exclude(("next", "truncated"))


def as_a_lazy_stack(number: int) -> TensorDictBase:
    return lazy_stack(list(row(number).unbind(0)))


def with_more_under_next(number: int) -> TensorDictBase:
    td = row(number)
    td["next", "done"] = td["next", "done"].clone()
    td["collector"] = {"traj_ids": torch.zeros(N)}
    return td


@pytest.mark.parametrize(
    "build", [in_another_order, without_truncated, as_a_lazy_stack, with_more_under_next]
)
def test_rows_built_in_another_way_are_read_leaf_by_leaf(build):
    buffer = buffer_with_a_plan()
    buffer.add(build(1))
    check(buffer, 1, row(1))
    buffer.add(row(2))
    check(buffer, 2, row(2))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"action": torch.zeros(N, 2, dtype=torch.float64)}, ValueError, "'action' in row 1 .* float64"),
        ({"action": torch.zeros(N, 1)}, ValueError, "'action' in row 1"),  # would broadcast
        ({"sensors": {"depth": torch.zeros(N)}}, KeyError, "lacks .*'height'.* unknown .*'depth'"),
        ({"sensors": torch.zeros(N)}, KeyError, "lacks .*'height'"),
        ({"observation": {"height": torch.zeros(N, 4)}}, KeyError, "lacks 'observation'"),
    ],
)
def test_rows_that_are_wrong_are_refused_as_ever(change, error, message):
    buffer = buffer_with_a_plan()
    with pytest.raises(error, match=message):
        buffer.add(row(1, **change))
    assert buffer.num_rows == 1
    buffer.add(row(1))
    check(buffer, 1, row(1))


def test_a_group_in_place_of_a_tensor_is_not_taken_for_one():
    plan = RowPlan(row(0), ["observation", "action"])
    assert plan.read(row(1)) is not None
    assert plan.read(row(1, action=TensorDict({"x": torch.zeros(N, 2)}, [N, 2]))) is None


def test_sources_that_require_grad_leave_no_graph_behind():
    buffer = buffer_with_a_plan()
    with torch.enable_grad():
        buffer.add(row(1, action=torch.ones(N, 2, requires_grad=True)))
        assert torch.is_grad_enabled()
    assert not buffer.storage.columns["action"].requires_grad
    with torch.no_grad():
        buffer.add(row(2))
        assert not torch.is_grad_enabled()
