"""What a history must do, written the slow and obvious way: a Python list of steps per environment."""

from __future__ import annotations

import io
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from oracles import tensors
from tensordict import TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_rslstorage import HistoryBuffer, HistorySampler

KEYS = {"observation", ("sensors", "camera"), ("sensors", "height"), "alive", "cell"}


def make_step(number: int, num_envs: int) -> TensorDict:
    """A step ``[N]`` whose every entry tells its number and environment; some values are NaN."""
    n = torch.arange(num_envs)
    k = torch.full_like(n, number)
    observation = torch.stack([k, n, k * num_envs + n], -1).float()
    return TensorDict(
        {
            "observation": torch.where(observation == 1.0, torch.nan, observation),
            "sensors": {
                "camera": torch.stack([k, n, k, n], -1).remainder(251).to(torch.uint8).view(num_envs, 2, 2),
                "height": (k + n / 8).half(),
            },
            "alive": (k + n) % 2 == 0,
            "cell": 1 + k * num_envs + n,  # 0 is what an environment without steps shows
        },
        [num_envs],
    )


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    return a.dtype is b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


class Twin:
    """A `HistoryBuffer` and a list per environment that everything is done to alike."""

    def __init__(self, max_len: int, num_envs: int, sampler: HistorySampler | None = None) -> None:
        self.max_len, self.num_envs = max_len, num_envs
        self.sampler = sampler
        self.buffer = HistoryBuffer(max_len, num_envs, sampler=sampler)
        self.lists: list[list[int]] = [[] for _ in range(num_envs)]
        self.pushes = [0] * num_envs
        self.steps: list[TensorDict] = []

    # -- writing ---------------------------------------------------------------------------------

    def new_step(self) -> TensorDict:
        self.steps.append(make_step(len(self.steps), self.num_envs))
        return self.steps[-1].clone()

    def append(self, mask: Sequence[bool] | None = None) -> None:
        step = self.new_step()
        if mask is None:
            self.buffer.append(step)
        else:
            self.buffer.append(step, torch.tensor(mask))
        for value in tensors(step).values():
            value.zero_()  # as a simulator that uses its tensors again
        self._push(len(self.steps) - 1, mask)

    def extend(self, num_steps: int, masks: Sequence[Sequence[bool]] | None = None) -> None:
        first = len(self.steps)
        steps = [self.new_step() for _ in range(num_steps)]
        block = torch.stack(steps) if steps else make_step(0, self.num_envs).unsqueeze(0)[:0]
        written = None if masks is None else torch.tensor(masks, dtype=torch.bool)
        self.buffer.extend(block, None if written is None else written.view(num_steps, self.num_envs))
        for value in tensors(block).values():
            value.zero_()
        for i in range(num_steps):
            self._push(first + i, None if masks is None else masks[i])

    def _push(self, step: int, mask: Sequence[bool] | None) -> None:
        for n in range(self.num_envs):
            if mask is None or mask[n]:
                self.lists[n] = [*self.lists[n], step][-self.max_len :]
                self.pushes[n] += 1

    def reset(self, envs: Sequence[int], form: str = "list") -> None:
        chosen = set(envs)
        mask = [n in chosen for n in range(self.num_envs)]
        forms = {"list": list(envs), "tensor": torch.tensor(list(envs)), "mask": torch.tensor(mask)}
        self.buffer.reset(forms[form])
        for n in chosen:
            self.lists[n], self.pushes[n] = [], 0

    def reset_all(self) -> None:
        self.buffer.reset()
        self.lists, self.pushes = [[] for _ in range(self.num_envs)], [0] * self.num_envs

    def save_and_load(self) -> None:
        """Goes on with another buffer that was loaded from the file of this one."""
        file = io.BytesIO()
        torch.save(self.buffer.state_dict(), file)
        file.seek(0)
        self.buffer = HistoryBuffer(self.max_len, self.num_envs, sampler=self.sampler)
        self.buffer.load_state_dict(torch.load(file, weights_only=True))

    # -- reading ---------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not any(self.lists)

    def expected(self, ages: Sequence[int]) -> dict[Any, Tensor]:
        """The step of this age of each environment, cell by cell."""
        rows = [
            self.steps[held[-1 - min(age, len(held) - 1)]][n]
            if held
            else make_step(0, self.num_envs)[n].apply(torch.zeros_like)
            for n, (held, age) in enumerate(zip(self.lists, ages, strict=True))
        ]
        return tensors(torch.stack(rows))

    def check_sizes(self) -> None:
        lengths = [len(held) for held in self.lists]
        assert self.buffer.lengths.tolist() == lengths
        assert self.buffer.num_pushes.tolist() == self.pushes
        assert len(self.buffer) == sum(lengths)

    def check_at_age(self, ages: int | Sequence[int]) -> None:
        if self.is_empty:
            return
        uniform = isinstance(ages, int)
        read = self.buffer.at_age(ages if uniform else torch.tensor(ages))
        expected = self.expected([ages] * self.num_envs if uniform else ages)
        assert read.batch_size == (self.num_envs,)
        assert tensors(read).keys() == KEYS
        for key, value in tensors(read).items():
            assert same(value, expected[key]), key

    def check_history(self) -> None:
        if self.is_empty:
            return
        history = self.buffer.history()
        assert history.batch_size == (self.num_envs, self.max_len)
        assert tensors(history).keys() == KEYS
        for place in range(self.max_len):
            expected = self.expected([self.max_len - 1 - place] * self.num_envs)
            for key, value in tensors(history[:, place]).items():
                assert same(value, expected[key]), (place, key)

    def held_cells(self) -> list[int]:
        return [1 + step * self.num_envs + n for n, held in enumerate(self.lists) for step in held]

    def check_reads(self) -> None:
        self.check_sizes()
        for age in range(self.max_len + 1):
            self.check_at_age(age)
        self.check_history()

    def check_update(self, save_before: int | None = None) -> None:
        """One update draws what it should; in between, it may go on in a loaded buffer."""
        held, sampler = self.held_cells(), self.buffer.sampler
        parts = sampler.num_mini_batches
        if len(held) < (parts if sampler.num_samples is None else 1):
            return
        epochs: list[list[int]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.buffer.sampler._empty()
            for epoch in range(sampler.num_epochs):
                batches = []
                for number in range(parts):
                    if save_before == epoch * parts + number:
                        self.save_and_load()
                    batches.append(self._checked(self.buffer.sample()))
                sizes = [len(batch) for batch in batches]
                assert max(sizes) - min(sizes) <= 1
                epochs.append([cell for batch in batches for cell in batch])
        assert self.buffer.sampler.ran_out
        check_epochs(held, epochs, sampler.num_samples or len(held), sampler.redraw)

    def _checked(self, batch: TensorDict) -> list[int]:
        """The cells of a mini-batch, after every entry of it was compared with the step it is of."""
        cells: list[int] = batch["cell"].tolist()
        for i, cell in enumerate(cells):
            step, n = divmod(cell - 1, self.num_envs)
            for key, value in tensors(self.steps[step][n]).items():
                assert same(batch[key][i], value), key
        return cells


def check_epochs(held: list[int], epochs: list[list[int]], num_samples: int, redraw: str) -> None:
    """No held cell is drawn twice more often than another, in an epoch or in the update so far."""
    total: Counter[int] = Counter()
    for epoch in epochs:
        assert len(epoch) == num_samples
        drawn = Counter(epoch)
        assert set(drawn) <= set(held)
        assert _spread(drawn, held) <= 1
        total += drawn
        if redraw == "epoch":
            assert _spread(total, held) <= 1
        else:
            assert epoch == epochs[0]


def _spread(drawn: Counter[int], held: list[int]) -> int:
    times = [drawn[cell] for cell in held]
    return max(times) - min(times)


class Waits(TorchDispatchMode):
    """Counts the operations whose result the host has to wait for."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(self.NAMES):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def check_random_program(seed: int, num_actions: int = 60, *, masks: bool = True) -> None:
    """Random appends, resets, reads and samples of a small history; the twin of the stateful test."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sampler = HistorySampler(2, 3, num_samples=rng.choice([None, 2, 3, 5, 9]))
    twin = Twin(rng.randint(1, 5), rng.randint(1, 4), sampler)

    def some() -> list[bool]:
        return [rng.random() < 0.6 for _ in range(twin.num_envs)]

    for _ in range(num_actions):
        action = rng.random()
        if action < 0.5:
            twin.append(some() if masks and rng.random() < 0.2 else None)
        elif action < 0.65:
            twin.extend(rng.randint(0, 2 * twin.max_len))
        elif action < 0.85:
            chosen = [n for n, is_chosen in enumerate(some()) if is_chosen]
            twin.reset(chosen, rng.choice(["list", "mask"]))
        elif action < 0.88:
            twin.reset_all()
        twin.check_reads()
        twin.check_at_age([rng.randint(0, 7) for _ in range(twin.num_envs)])
        if action > 0.8:
            twin.check_update()
