"""The checks of this suite notice when the package is wrong.

Each mutant is a fault that a rollout storage can have without any shape or dtype giving it away (RSL-RL's
own suite, for one, stays green when the generator visits environment 0 only). Here it is planted, and the
checks that the other tests rely on must turn red.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import (
    WRITES,
    Plan,
    check_every_cell_is_seen_once_an_epoch,
    check_final_observations,
    check_nothing_of_the_old_window_is_left,
    check_window,
    check_writes_are_copies,
    filled,
)

from torchrl_rslstorage import MiniBatchSampler, RolloutBuffer, RolloutTensorStorage, RolloutWriter
from torchrl_rslstorage.data import batch_views, columns, writers
from torchrl_rslstorage.data.final_observations import CellTable
from torchrl_rslstorage.data.row_plan import RowPlan

PLAN = Plan(4, 3, terminated=frozenset({(0, 1), (3, 0)}), truncated=frozenset({(1, 0), (1, 2), (3, 2)}))

Check = Callable[[], None]


def cover(**sampler_options) -> Check:
    return lambda: check_every_cell_is_seen_once_an_epoch(PLAN, 5, num_epochs=2, **sampler_options)


def stored_by_rows() -> None:
    buffer = filled(PLAN)
    check_window(buffer, PLAN)
    check_final_observations(buffer, PLAN)


def stored_by_block() -> None:
    buffer = RolloutBuffer(PLAN.num_steps, PLAN.num_envs)
    buffer.extend(torch.stack(PLAN.rows(), 1))
    check_window(buffer, PLAN)
    check_final_observations(buffer, PLAN)


def copies(write: str) -> Check:
    return lambda: check_writes_are_copies(write, PLAN)


def emptied() -> None:
    check_nothing_of_the_old_window_is_left(PLAN)


# -- mutants -----------------------------------------------------------------------------------

original = {
    "shuffled": RolloutTensorStorage.shuffled,
    "shuffle": MiniBatchSampler._shuffle,
    "balanced": batch_views.balanced,
    "mini_batch": MiniBatchSampler.mini_batch,
    "rows_of": writers.rows_of,
    "write_root": RolloutTensorStorage.write_root,
    "write_next": RolloutTensorStorage.write_next,
    "copy_row": columns.HalfColumns.copy_row,
    "read": RowPlan.read,
    "record": CellTable.record,
    "computed": RolloutTensorStorage._computed,
    "storage_empty": RolloutTensorStorage._empty,
    "sampler_empty": MiniBatchSampler._empty,
}


def environment_0_only(patch):
    def shuffled(self, cells, keys):
        return original["shuffled"](self, cells // self.num_envs * self.num_envs, keys)

    patch.setattr(RolloutTensorStorage, "shuffled", shuffled)


def last_row_not_sampled(patch):
    def shuffled(self, cells, keys):
        return original["shuffled"](self, cells % (self.max_size - self.num_envs), keys)

    patch.setattr(RolloutTensorStorage, "shuffled", shuffled)


def remainder_dropped(patch):
    patch.setattr(
        batch_views, "balanced", lambda total, parts: original["balanced"](total - total % parts, parts)
    )


def remainder_in_the_last_mini_batch(patch):
    def bounds(total, parts):
        edges = [i * (total // parts) for i in range(parts)]
        return list(zip(edges, [*edges[1:], total], strict=True))

    patch.setattr(batch_views, "balanced", bounds)


def drawn_with_replacement(patch):
    def shuffle(self, num_cells, device):
        original["shuffle"](self, num_cells, device)
        self._draw = torch.randint(len(self._draw), self._draw.shape)

    patch.setattr(MiniBatchSampler, "_shuffle", shuffle)


def keys_shuffled_apart(patch):
    def shuffled(self, cells, keys):
        return original["shuffled"](self, cells, keys) | {
            "action": original["shuffled"](self, cells.flip(0), ["action"])["action"].clone()
        }

    patch.setattr(RolloutTensorStorage, "shuffled", shuffled)


def second_epoch_skips_its_first_mini_batch(patch):
    def mini_batch(self, storage, position):
        return original["mini_batch"](self, storage, position + (position == self.num_mini_batches))

    patch.setattr(MiniBatchSampler, "mini_batch", mini_batch)


def last_row_of_a_block_dropped(patch):
    # The rows still add up, so that the window looks full: the last one is the one before it.
    def rows_of(data):
        rows = original["rows_of"](data)
        return (*rows[:-1], rows[-2])

    patch.setattr(writers, "rows_of", rows_of)


def last_row_not_copied(patch):
    def write_root(self, t, row):
        if t < self.num_steps - 1:
            original["write_root"](self, t, row)

    patch.setattr(RolloutTensorStorage, "write_root", write_root)
    patch.setattr(RowPlan, "read", lambda self, row: None)


def last_row_written_over_the_first(patch):
    def write_next(self, t, after):
        original["write_next"](self, t % (self.num_steps - 1), after)

    patch.setattr(RolloutTensorStorage, "write_next", write_next)
    patch.setattr(RowPlan, "read", lambda self, row: None)


def rows_read_where_the_first_one_stood(patch):
    def read(self, row):
        return self.__dict__.setdefault("first", original["read"](self, row))

    patch.setattr(RowPlan, "read", read)


def final_observations_of_the_last_row_dropped(patch):
    def record(self, t, truncated, observations):
        if truncated is not None:
            original["record"](self, t, truncated, observations)

    patch.setattr(CellTable, "record", record)


def final_observations_of_every_step(patch):
    def record(self, t, truncated, observations):
        original["record"](self, t, None if truncated is None else torch.ones_like(truncated), observations)

    patch.setattr(CellTable, "record", record)


def final_observations_of_other_environments(patch):
    def record(self, t, truncated, observations):
        shifted = {key: value.roll(1, 0) for key, value in observations.items()}
        original["record"](self, t, truncated, shifted)

    patch.setattr(CellTable, "record", record)


def rows_kept_by_reference(patch):
    # What a list of references shows in the end: whatever the sources hold by then.
    def copy_row(self, t, row):
        kept = self.__dict__.setdefault("kept", {})
        kept[t] = dict(row)
        for step, earlier in kept.items():
            original["copy_row"](self, step, earlier)

    patch.setattr(columns.HalfColumns, "copy_row", copy_row)
    patch.setattr(RowPlan, "read", lambda self, row: None)


def final_observations_kept_by_reference(patch):
    def record(self, t, truncated, observations):
        whole = truncated is None
        cells = torch.arange(self._num_envs) if whole else truncated.squeeze(-1).nonzero().squeeze(-1)
        if len(cells) == self._num_envs:
            self._chunks.append((torch.full_like(cells, t), cells, observations))
        else:
            original["record"](self, t, truncated, observations)

    patch.setattr(CellTable, "record", record)


def rows_survive_empty(patch):
    def empty(self):
        rows = self.num_rows
        original["storage_empty"](self)
        self.set_num_rows(rows)

    patch.setattr(RolloutTensorStorage, "_empty", empty)


def row_count_of_stock_storage_survives_empty(patch):
    def empty(self):
        rows = self.num_rows
        original["storage_empty"](self)
        self.set_num_rows(rows)
        self.num_rows = 0

    patch.setattr(RolloutTensorStorage, "_empty", empty)


def final_observations_survive_empty(patch):
    def empty(self):
        chunks = self._final._chunks
        original["storage_empty"](self)
        self._final._chunks = chunks

    patch.setattr(RolloutTensorStorage, "_empty", empty)


def derived_columns_survive_empty(patch):
    def empty(self):
        computed = self._computed()
        original["storage_empty"](self)
        for name, column in computed.items():
            self.columns.set(name, column)

    patch.setattr(RolloutTensorStorage, "_empty", empty)


def running_update_survives_empty(patch):
    patch.setattr(MiniBatchSampler, "_empty", lambda self: None)


def shuffled_copy_survives_empty(patch):
    def mini_batch(self, storage, position):
        first = self.__dict__.setdefault("first", [original["mini_batch"](self, storage, 0).clone()])
        return first[0]

    patch.setattr(MiniBatchSampler, "mini_batch", mini_batch)


def cursor_survives_empty(patch):
    patch.setattr(RolloutWriter, "_empty", lambda self, empty_write_count=True: None)


def columns_set_by_users_survive_empty(patch):
    def computed(self):
        return {key: value for key, value in original["computed"](self).items() if "mine" not in key}

    patch.setattr(RolloutTensorStorage, "_computed", computed)


def columns_are_known_by_name_only(patch):
    patch.setattr(columns, "same_tensors", lambda a, b: a.keys() == b.keys())


def window_is_readable_before_it_is_full(patch):
    patch.setattr(RolloutTensorStorage, "window", lambda self: self.columns)


MUTANTS: list[tuple[Callable, Check]] = [
    (environment_0_only, cover()),
    (environment_0_only, cover(reshuffle=True)),
    (environment_0_only, cover(drop_remainder=True)),
    (last_row_not_sampled, cover()),
    (last_row_not_sampled, cover(reshuffle=True)),
    (remainder_dropped, cover()),
    (remainder_in_the_last_mini_batch, cover()),
    (drawn_with_replacement, cover()),
    (drawn_with_replacement, cover(reshuffle=True)),
    (keys_shuffled_apart, cover()),
    (second_epoch_skips_its_first_mini_batch, cover()),
    (last_row_of_a_block_dropped, stored_by_block),
    (last_row_not_copied, stored_by_rows),
    (last_row_not_copied, stored_by_block),
    (last_row_written_over_the_first, stored_by_rows),
    (rows_read_where_the_first_one_stood, stored_by_rows),
    (rows_read_where_the_first_one_stood, stored_by_block),
    (final_observations_of_the_last_row_dropped, stored_by_rows),
    (final_observations_of_every_step, stored_by_rows),
    (final_observations_of_other_environments, stored_by_rows),
    *[(rows_kept_by_reference, copies(write)) for write in WRITES],
    *[(final_observations_kept_by_reference, copies(write)) for write in WRITES],
    (rows_survive_empty, emptied),
    (row_count_of_stock_storage_survives_empty, emptied),
    (final_observations_survive_empty, emptied),
    (derived_columns_survive_empty, emptied),
    (columns_set_by_users_survive_empty, emptied),
    (columns_are_known_by_name_only, emptied),
    (running_update_survives_empty, emptied),
    (shuffled_copy_survives_empty, emptied),
    (window_is_readable_before_it_is_full, emptied),
]


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=lambda it: getattr(it, "__name__", ""))
def test_a_mutant_turns_the_check_red(mutant, check, monkeypatch):
    check()
    mutant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()


def test_a_cursor_that_survives_empty_leaves_no_room_for_the_next_window(monkeypatch):
    cursor_survives_empty(monkeypatch)
    with pytest.raises((AssertionError, OverflowError)):
        emptied()
