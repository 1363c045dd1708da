"""Measuring several contenders fairly, in one process.

Decisions:

- All contenders of a row run in turns: round 1 A B C, round 2 B C A, … A machine that slows down for a second
  slows all of them down, and nobody always follows the one that empties the caches.
- One thread. With several, small operations are timed by the scheduler.
- A sample is several runs in a row where one run is short (`_MIN_SAMPLE_SECONDS`). Medians and quartiles are
  taken over samples.
- Garbage is collected between samples, outside of the clock, and what set-up made is frozen: nobody pays for
  what another left behind.
- On CUDA the clock starts and stops after a synchronisation.
- The memcpy bound copies the same number of bytes between two buffers that were touched before, in the
  same rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

OURS, RSL_RL, TORCHRL, MEMCPY = "ours", "rsl_rl_lib", "torchrl", "memcpy"
COMPILED = "ours_compiled"

NUM_MINI_BATCHES = 4
NUM_EPOCHS = 5
"""rsl_rl 5.5.1, algorithms/ppo.py, the defaults."""

MIN_ROUNDS = 5
_MIN_SAMPLE_SECONDS = 0.002
_OURS_ALONE_ABOVE = 500_000
"""Transitions above which the others are left out: such shapes are for our cost per transition."""


# -- shapes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A rollout: T steps x N environments, the observation groups of actor and critic, the networks."""

    name: str
    num_steps: int
    num_envs: int
    groups: dict[str, int] = field(hash=False)
    num_actions: int
    hidden_dims: tuple[int, ...]

    @property
    def num_cells(self) -> int:
        return self.num_steps * self.num_envs

    @property
    def mini_batch_size(self) -> int:
        return self.num_cells // NUM_MINI_BATCHES

    @property
    def size(self) -> str:
        return f"{self.num_steps} x {self.num_envs}"

    @property
    def label(self) -> str:
        plain = self.name == f"{self.num_steps}x{self.num_envs}"
        return self.size if plain else f"{self.name} ({self.size})"

    @property
    def critic_group(self) -> str:
        return "critic" if "critic" in self.groups else "policy"

    @property
    def ours_alone(self) -> bool:
        return self.num_cells > _OURS_ALONE_ABOVE


_NAMED = {"XS": (16, 16), "S": (64, 256), "M": (24, 1024), "L": (24, 4096), "XL": (24, 65536)}

_GYM_LIKE = ({"policy": 17}, 6)
_LEGGED = ({"policy": 48, "critic": 235}, 12)  # RSL-RL's rough-terrain ANYmal: height scan for the critic


def parse_shape(text: str, hidden_dims: Sequence[int] | None = None) -> Shape:
    """A shape by name (XS, S, M, L, XL) or as steps x environments ("64x1024").

    Up to 256 environments look like Gymnasium's tasks, more like legged robots; networks grow with them.
    """
    steps_envs = _NAMED.get(text.upper())
    name = text.upper() if steps_envs else text
    if steps_envs is None:
        numbers = text.lower().split("x")
        if len(numbers) != 2 or not all(number.isdigit() and int(number) > 0 for number in numbers):
            raise argparse.ArgumentTypeError(
                f"there is no shape {text!r}: name one of {', '.join(_NAMED)}, or STEPSxENVS such as 64x1024"
            )
        steps_envs = (int(numbers[0]), int(numbers[1]))
    steps, envs = steps_envs
    if steps * envs < NUM_MINI_BATCHES:
        raise argparse.ArgumentTypeError(f"{text} is too small for {NUM_MINI_BATCHES} mini-batches")
    groups, num_actions = _GYM_LIKE if envs <= 256 else _LEGGED
    if hidden_dims is None:
        hidden_dims = (64, 64) if envs <= 256 else (256, 128, 64) if envs <= 1024 else (512, 256, 128)
    return Shape(name, steps, envs, groups, num_actions, tuple(hidden_dims))


# -- settings ----------------------------------------------------------------------------------------


@dataclass
class Settings:
    """What the command line decides."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shapes: list[str] | None = None
    rounds: int | None = None
    seconds: float = 5.0
    compile: bool = False
    clock: str = "wall"
    hidden_dims: list[int] | None = None
    iterations: int = 1000

    def chosen(self, defaults: Sequence[str]) -> list[Shape]:
        """The shapes asked for, else a subject's own, without those that do not fit into memory."""
        shapes = [parse_shape(name, self.hidden_dims) for name in self.shapes or defaults]
        fitting = [shape for shape in shapes if _fits(shape, self.device)]
        for shape in shapes:
            if shape not in fitting:
                print(f"{shape.label} is left out: it needs more memory than there is", file=sys.stderr)
        return fitting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every subject takes."""
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--shape",
        nargs="+",
        metavar="SHAPE",
        help="XS S M L XL, or STEPSxENVS; by default each subject's own",
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds of each row; by default as many as --seconds allows"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=5.0,
        help=f"time for each row, at least {MIN_ROUNDS} rounds (default 5)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also measure our updates through torch.compile, beside the eager ones",
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu counts this thread's time only, which other processes on the machine disturb less",
    )
    parser.add_argument(
        "--hidden", type=int, nargs="+", metavar="WIDTH", help="hidden layers of all networks"
    )
    parser.add_argument("--iterations", type=int, default=1000, help="of the search for memory growth")


def settings_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Settings:
    """Checks the arguments and prepares the process: one thread."""
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if args.device.type == "cuda" and args.clock == "cpu":
        parser.error("--clock cpu cannot see what happens on a CUDA device")
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds must be at least 1")
    for text in args.shape or ():
        try:
            parse_shape(text)
        except argparse.ArgumentTypeError as error:
            parser.error(f"--shape: {error}")
    torch.set_num_threads(1)
    return Settings(
        device=args.device,
        shapes=args.shape,
        rounds=args.rounds,
        seconds=args.seconds,
        compile=args.compile,
        clock=args.clock,
        hidden_dims=args.hidden,
        iterations=args.iterations,
    )


# -- measuring ---------------------------------------------------------------------------------------


@dataclass
class Contender:
    """Something to time: ``run``, each time after an untimed ``prepare``."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


@dataclass
class Timing:
    """Milliseconds of one run: median and quartiles over the rounds."""

    median: float
    q1: float
    q3: float
    rounds: int


@dataclass
class Row:
    """What one subject took at one shape, by contender."""

    subject: str
    shape: Shape
    timings: dict[str, Timing]
    note: str = ""

    def ms(self, name: str) -> float | None:
        """A contender's median, or nothing if it did not take part."""
        timing = self.timings.get(name)
        return None if timing is None else timing.median

    def ratio(self, name: str, *, to: str = OURS) -> float | None:
        """How many times longer ``name`` took than ``to``."""
        theirs, ours = self.ms(name), self.ms(to)
        return None if theirs is None or ours is None else theirs / ours

    def as_json(self) -> dict[str, Any]:
        """The row for ``--json``: milliseconds, ``null`` for who did not take part."""
        main = (OURS, RSL_RL, TORCHRL, MEMCPY)
        return {
            "subject": self.subject,
            "shape": self.shape.name,
            "num_steps": self.shape.num_steps,
            "num_envs": self.shape.num_envs,
            "hidden_dims": list(self.shape.hidden_dims),
            **{f"{name}_ms": self.ms(name) for name in main},
            "other_ms": {name: timing.median for name, timing in self.timings.items() if name not in main},
            "quartiles_ms": {name: [timing.q1, timing.q3] for name, timing in self.timings.items()},
            "rounds": next(iter(self.timings.values())).rounds,
            "note": self.note,
        }


def measure(contenders: Sequence[Contender], settings: Settings) -> dict[str, Timing]:
    """Times all contenders in interleaved rounds."""
    run = _Stopwatch(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        repeats: list[int] = []
        for contender in contenders:
            seconds = [run(contender, 1) for _ in range(3)]  # the first one compiles and allocates
            repeats.append(max(1, min(200, round(_MIN_SAMPLE_SECONDS / max(seconds[-1], 1e-6)))))
        samples: list[list[float]] = [[] for _ in contenders]
        order = list(range(len(contenders)))
        gc.collect()
        gc.freeze()
        deadline = time.monotonic() + settings.seconds
        try:
            while not _enough(len(samples[0]), deadline, settings):
                for number in order:
                    gc.collect()
                    samples[number].append(run(contenders[number], repeats[number]))
                order = [*order[1:], order[0]]
        finally:
            gc.unfreeze()
    return {c.name: _timing(seconds) for c, seconds in zip(contenders, samples, strict=True)}


def _enough(rounds: int, deadline: float, settings: Settings) -> bool:
    if settings.rounds is not None:
        return rounds >= settings.rounds
    return rounds >= MIN_ROUNDS and time.monotonic() > deadline


class _Stopwatch:
    """Seconds of one run, averaged over ``repeats`` of them."""

    def __init__(self, settings: Settings) -> None:
        self._on_cuda = settings.device.type == "cuda"
        self._clock = time.thread_time if settings.clock == "cpu" else time.perf_counter

    def __call__(self, contender: Contender, repeats: int) -> float:
        run, prepare, clock = contender.run, contender.prepare, self._clock
        if prepare is None:
            self._synchronize()
            start = clock()
            for _ in range(repeats):
                run()
            self._synchronize()
            return (clock() - start) / repeats
        total = 0.0
        for _ in range(repeats):
            prepare()
            self._synchronize()
            start = clock()
            run()
            self._synchronize()
            total += clock() - start
        return total / repeats

    def _synchronize(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()


def _timing(seconds: Sequence[float]) -> Timing:
    ms = [1e3 * s for s in seconds]
    q1, _, q3 = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else (ms[0],) * 3
    return Timing(statistics.median(ms), q1, q3, len(ms))


def memcpy(num_bytes: int, device: torch.device, *, times: int = 1, name: str = MEMCPY) -> Contender:
    """Copies ``num_bytes`` between two preallocated buffers, ``times`` times."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def run() -> None:
        for _ in range(times):
            target.copy_(source)

    return Contender(name, run)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# -- the machine -------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    info: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.type,
    }
    if device.type == "cuda":
        info["gpu"] = torch.cuda.get_device_name(device)
    return info


def versions() -> dict[str, str]:
    """Of all that takes part."""
    names = ("torchrl-rslstorage", "rsl-rl-lib", "torchrl", "tensordict", "torch")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _fits(shape: Shape, device: torch.device) -> bool:
    """Whether three copies of the rollout can be had: its source, the window, the shuffled copy."""
    numbers = sum(shape.groups.values()) + 3 * shape.num_actions + 8
    return 3 * 4 * numbers * shape.num_cells < _available_memory(device)


def _available_memory(device: torch.device) -> float:
    """Bytes that can still be had, infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024.0
    return float("inf")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No prints (RSL-RL's of its models) and no warnings (TorchRL's of its future)."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
