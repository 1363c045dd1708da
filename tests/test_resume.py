"""A run that is stopped at any moment and resumed gives the numbers of the run that was never stopped."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.checkpoint import Checkpoint
from torchrl.record.loggers.csv import CSVExperiment

from torchrl_rslstorage import KLAdaptiveStepper, PendulumEnv, PPOConfig, RunFolder
from torchrl_rslstorage.trainers.checkpoints import latest_checkpoint
from torchrl_rslstorage.trainers.options import TrainOptions
from torchrl_rslstorage.trainers.runs import resume_run, start_run

OPTIONS: dict[str, Any] = {
    "num_envs": 16,
    "num_steps_per_env": 8,
    "max_iterations": 12,
    "save_interval": 3,
    "hidden_dims": (8,),
    "obs_normalization": True,
    "seed": 3,
}


def quiet(message: str) -> None:
    """Reports to nobody."""


def train(path: Path, **options: Any) -> dict[str, Any]:
    ppo = PPOConfig(num_learning_epochs=2, num_mini_batches=3)
    return start_run(TrainOptions(run_dir=path, ppo=ppo, **{**OPTIONS, **options}), quiet)


class Outcome:
    """What a finished run leaves behind, without the times that it took."""

    def __init__(self, path: Path) -> None:
        folder = RunFolder.open(path)
        summary = json.loads((path / "summary.json").read_text())
        self.summary = {key: value for key, value in summary.items() if key != "wall_seconds"}
        files = sorted(folder.scalars.rglob("*.csv"))
        rows = {str(file.relative_to(folder.scalars)): file.read_text() for file in files}
        self.rows = {name: text for name, text in rows.items() if not name.startswith("Perf/")}
        self.perf_lines = {len(text.splitlines()) for name, text in rows.items() if name.startswith("Perf/")}
        checkpoint = latest_checkpoint(folder.checkpoints)
        assert checkpoint is not None
        self.states = {
            file.parent.name: torch.load(file, weights_only=True)
            for file in sorted(checkpoint.glob("components/*/state.pt"))
        }
        self.states["0006-trainer"].pop("seconds")
        # A run that is stopped while it removes an old one keeps one more than asked for.
        self.newest = checkpoint.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and not self.differences(other)

    def differences(self, other: Outcome) -> list[str]:
        return list(_different(vars(self), vars(other), "run"))


def _different(left: Any, right: Any, name: str) -> Iterator[str]:
    if isinstance(left, torch.Tensor):
        # NaN stands in the slots of episodes that have not ended yet.
        same = left.dtype == right.dtype and left.shape == right.shape
        if not same or not torch.equal(torch.nan_to_num(left, 0.125), torch.nan_to_num(right, 0.125)):
            yield name
    elif isinstance(left, dict):
        if left.keys() != right.keys():
            yield name
        for key in left.keys() & right.keys():
            yield from _different(left[key], right[key], f"{name}.{key}")
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            yield name
        for i, (a, b) in enumerate(zip(left, right, strict=False)):
            yield from _different(a, b, f"{name}.{i}")
    elif left != right:
        yield name


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Episodes of 20 steps, so that many end in a run; no picture, which takes longer than the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PendulumEnv.__init__.__kwdefaults__, "max_episode_steps", 20)
        patch.setattr(RunFolder, "plot_learning_curve", lambda self, title: None)
        yield


@pytest.fixture(autouse=True)
def quickly(request):
    with contextlib.nullcontext() if "slow" in request.keywords else quick():
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Outcome:
    """The run that was never stopped."""
    path = tmp_path_factory.mktemp("whole") / "run"
    with quick():
        train(path)
    outcome = Outcome(path)
    assert outcome.summary["num_episodes"] > 40
    return outcome


class Stopped(BaseException):
    """Not an Exception, so that nothing in the way mends what a kill would leave as it is."""


@contextlib.contextmanager
def stopping(at: int | None) -> Iterator[list[str]]:
    """Stops at the event number ``at``, and yields the events as they come.

    An event is an environment step, an optimisation step, a line of a log, a component of a checkpoint,
    a file renamed or a folder removed. A line and a component are half written when they stop.
    """
    events: list[str] = []

    def watch(owner: Any, name: str, before: Callable[..., None] | None = None) -> None:
        original = getattr(owner, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            if len(events) - 1 == at:
                if before is not None:
                    before(*args, **kwargs)
                raise Stopped(name)
            return original(*args, **kwargs)

        patch.setattr(owner, name, replacement)

    def half_a_line(experiment: CSVExperiment, name: str, value: float, global_step: int) -> None:
        file = Path(experiment.log_dir) / "scalars" / f"{name}.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as handle:
            handle.write(f"{global_step},{str(value)[:2]}")

    def half_a_component(state: Any, file: Path) -> None:
        Path(file).write_bytes(b"PK\x03\x04 half a file")

    with pytest.MonkeyPatch.context() as patch:
        watch(PendulumEnv, "advance")
        watch(KLAdaptiveStepper, "update")
        watch(CSVExperiment, "add_scalar", half_a_line)
        watch(torch, "save", half_a_component)
        watch(os, "replace")
        watch(shutil, "rmtree")
        yield events


def run_to_the_end(path: Path, stops: list[int | None]) -> list[str]:
    """Starts a run, stops it at each of the events, resumes it in between; returns where it stopped."""
    stopped = []
    for at in [*stops, None]:
        new = not (path / "config.json").exists()
        if new:
            shutil.rmtree(path, ignore_errors=True)
        try:
            with stopping(at):
                train(path) if new else resume_run(path, report=quiet)
            break
        except Stopped as stop:
            stopped.append(str(stop))
            folder = path / "checkpoints"
            for checkpoint in folder.glob("checkpoint-*"):
                assert Checkpoint.is_checkpoint(checkpoint)
                for file in checkpoint.rglob("*.pt"):
                    torch.load(file, weights_only=True)
    return stopped


@pytest.fixture(scope="module")
def events(tmp_path_factory) -> list[str]:
    """Everything at which an uninterrupted run can be stopped."""
    with quick(), stopping(None) as events:
        train(tmp_path_factory.mktemp("events") / "run")
    return events


def test_two_uninterrupted_runs_are_equal_and_another_seed_is_not(uninterrupted, tmp_path):
    train(tmp_path / "again")
    assert Outcome(tmp_path / "again").differences(uninterrupted) == []
    train(tmp_path / "other", seed=4)
    different = Outcome(tmp_path / "other").differences(uninterrupted)
    assert "run.summary.mean_return" in different and "run.rows.Loss/value.csv" in different
    assert len(different) > 20


def test_a_run_can_be_stopped_everywhere(events):
    assert events.count("advance") == 12 * 8
    assert events.count("update") == 12 * 6
    assert events.count("save") == 4 * 7
    assert {"add_scalar", "replace", "rmtree"} <= set(events)


@pytest.mark.parametrize("kind", ["advance", "update", "add_scalar", "save", "replace", "rmtree"])
def test_a_run_stopped_at_one_random_event_of_each_kind_resumes_to_the_same_numbers(
    kind, events, uninterrupted, tmp_path
):
    at = random.Random(kind).choice([i for i, name in enumerate(events) if name == kind])
    assert run_to_the_end(tmp_path / "run", [at]) == [kind]
    assert Outcome(tmp_path / "run").differences(uninterrupted) == [], f"stopped at event {at}"


def test_a_run_stopped_before_its_first_checkpoint_starts_over_and_ends_the_same(
    events, uninterrupted, tmp_path
):
    first = events.index("save")
    at = random.Random(0).randrange(first - 40, first)
    assert len(run_to_the_end(tmp_path / "run", [at])) == 1
    assert Outcome(tmp_path / "run").differences(uninterrupted) == []


def test_a_run_stopped_again_and_again_resumes_to_the_same_numbers(events, uninterrupted, tmp_path):
    rng = random.Random(1)
    stops: list[int | None] = [rng.randrange(20, len(events) * 3 // 4) for _ in range(12)]
    stopped = run_to_the_end(tmp_path / "run", stops)
    assert len(stopped) >= 4
    assert Outcome(tmp_path / "run").differences(uninterrupted) == []


def test_what_a_stopped_checkpoint_leaves_behind_is_removed_by_the_resume(events, tmp_path):
    at = [i for i, name in enumerate(events) if name == "save"][10]
    folder = tmp_path / "run" / "checkpoints"
    with pytest.raises(Stopped), stopping(at):
        train(tmp_path / "run")
    (folder / ".checkpoint-000000000999.stage-0").mkdir()  # a kill, unlike an exception, leaves these
    (folder / ".checkpoint-000000000001.delete-0" / "components").mkdir(parents=True)
    resume_run(tmp_path / "run", report=quiet)
    assert all(path.name.startswith("checkpoint-") for path in folder.iterdir())


def test_resuming_a_finished_run_changes_no_number(uninterrupted, tmp_path):
    train(tmp_path / "run")
    before = Outcome(tmp_path / "run")
    resume_run(tmp_path / "run", report=quiet)
    assert Outcome(tmp_path / "run").differences(before) == []


def test_a_finished_run_can_be_trained_on_as_if_it_had_been_meant_to_be_longer(uninterrupted, tmp_path):
    train(tmp_path / "run", max_iterations=6)
    resume_run(tmp_path / "run", max_iterations=12, report=quiet)
    assert Outcome(tmp_path / "run").differences(uninterrupted) == []


def test_a_resume_tells_where_it_goes_on(tmp_path):
    told: list[str] = []
    train(tmp_path / "run", max_iterations=3)
    resume_run(tmp_path / "run", max_iterations=4, report=told.append)
    assert told[0] == f"Resuming at 384 frames: pendulum in {tmp_path / 'run'}."


def test_an_environment_that_cannot_save_its_state_is_reset_with_a_warning_and_trained_on(tmp_path):
    pytest.importorskip("gymnasium")
    options = {"num_envs": 2, "num_steps_per_env": 8, "max_iterations": 3}
    ppo = PPOConfig(num_learning_epochs=1, num_mini_batches=2)
    run = TrainOptions("Pendulum-v1", run_dir=tmp_path / "run", hidden_dims=(8,), ppo=ppo, **options)
    start_run(run, quiet)
    with pytest.warns(UserWarning, match="GymnasiumEnv cannot save its state: environments start new"):
        summary = resume_run(tmp_path / "run", max_iterations=5, report=quiet)
    assert summary["frames"] == 80 and summary["iterations"] == 5
    rows = RunFolder.open(tmp_path / "run").read_scalar("Loss/value")
    assert [step for step, _ in rows] == [16, 32, 48, 64, 80]


# -- real kills ----------------------------------------------------------------------------------


def command(*args: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "torchrl_rslstorage", *args],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_real_kills_leave_the_numbers_of_the_run_that_was_never_killed(tmp_path):
    options = ["--num-envs", "64", "--num-steps-per-env", "16", "--hidden-dims", "32", "32"]
    options += ["--obs-normalization", "True", "--save-interval", "2", "--seed", "5"]
    options += ["--max-iterations", "400", "--no-progress-bar"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    output, _ = command("train", "pendulum", *options, "--run-dir", str(whole)).communicate()
    assert (whole / "summary.json").exists(), output
    seconds = json.loads((whole / "summary.json").read_text())["wall_seconds"]

    rng, kills, frames = random.Random(0), 0, []
    while kills < 20:
        new = not (killed / "config.json").exists()
        if new:
            shutil.rmtree(killed, ignore_errors=True)
        args = ["train", "pendulum", *options, "--run-dir"] if new else ["resume"]
        process = command(*args, str(killed))
        assert process.stdout is not None
        first = process.stdout.readline()  # "Training …" or "Resuming …": from here on it is at work
        assert first.startswith(("Training", "Resuming")), first + process.stdout.read()
        time.sleep(rng.uniform(0, seconds / 18))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        kills += 1
        found = sorted((killed / "checkpoints").glob("checkpoint-*"))
        frames.append(int(found[-1].name[11:]) if found else 0)
        for checkpoint in found:
            manifest = Checkpoint.manifest(checkpoint)
            assert len(manifest["components"]) == 7
            for file in checkpoint.rglob("*.pt"):
                torch.load(file, weights_only=True)
    assert frames == sorted(frames)
    output, _ = command("resume", str(killed)).communicate()
    assert (killed / "summary.json").exists(), output
    assert len(set(frames)) > 5, f"most kills came before anything was saved: {frames}"
    assert frames[-1] < 400 * 64 * 16, "the run was over before the last kill"
    assert Outcome(killed).differences(Outcome(whole)) == []
