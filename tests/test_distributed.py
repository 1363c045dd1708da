"""Several ranks: two processes with half of the environments each are one process with all of them."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import NUM_ENVS, NUM_STEPS, PPO, ppo, start_ranks
from tensordict import TensorDict, pad
from tiny import equal, make_trainer, parameters
from torchrl.checkpoint import CheckpointError

from torchrl_rslstorage import (
    EmpiricalNormalizer,
    KLAdaptiveStepper,
    MLPActor,
    MLPCritic,
    PendulumEnv,
    Ranks,
    RNNActor,
    RNNCritic,
    RSLPPOLoss,
    normalize_advantage,
)
from torchrl_rslstorage.trainers.checkpoints import latest_checkpoint
from torchrl_rslstorage.trainers.learning_rate import adapted_learning_rate

HERE = Path(__file__).resolve().parent
PATIENCE_S = 120


class Both:
    """What the two processes left behind: ``both["single"]`` is rank 0's and rank 1's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, scenario: str) -> tuple[dict[str, Any], dict[str, Any]]:
        first, second = (
            torch.load(self.folder / f"{scenario}-{rank}.pt", weights_only=False) for rank in range(2)
        )
        return first, second


def ends_of(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit status and output of each; none is left running."""
    try:
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Both:
    folder = tmp_path_factory.mktemp("ranks")
    for status, output in ends_of(start_ranks([str(HERE / "rank_processes.py"), str(folder)])):
        assert status == 0, output
        assert "Warning" not in output, output
    return Both(folder)


# -- one process with all environments ---------------------------------------------------------


def union(left: TensorDict, right: TensorDict) -> TensorDict:
    """The mini-batch of both halves; trajectories are padded to the longest."""
    if left.ndim == 1:
        return torch.cat([left, right])
    longest = max(len(left), len(right))
    return torch.cat([pad(half, [0, longest - len(half), 0, 0]) for half in (left, right)], 1)


def assert_steps_of_one_process(both: tuple[dict[str, Any], dict[str, Any]], **loss: Any) -> None:
    """Takes the recorded steps alone, with both halves of each mini-batch, and compares everything."""
    first, second = both
    env = PendulumEnv(NUM_ENVS)
    if any(name.startswith("core") for name in first["start"][0]):
        shape: dict[str, Any] = {"rnn_hidden_dim": 4, "hidden_dims": (8,)}
        actor, critic = RNNActor.for_env(env, **shape), RNNCritic.for_env(env, rnn_type="gru", **shape)
    else:
        shape = {"hidden_dims": (8,), "normalize_observations": True}
        actor, critic = MLPActor.for_env(env, **shape), MLPCritic.for_env(env, **shape)
    networks = (actor.to(first["end"][0].dtype), critic.to(first["end"][0].dtype))
    double = actor.std.dtype is torch.float64
    tolerance = {"rtol": 0, "atol": 1e-9} if double else {"rtol": 1e-6, "atol": 1e-6}
    for network, state in zip(networks, first["start"], strict=True):
        network.load_state_dict(state)
    stepper = KLAdaptiveStepper(*networks, max_grad_norm=1e6, schedule="fixed")
    loss_module, learning_rate, num_adapted = RSLPPOLoss(*networks, **loss), stepper.learning_rate.clone(), 0
    steps = list(zip(first["steps"], second["steps"], strict=True))
    per_window = PPO["num_learning_epochs"] * PPO["num_mini_batches"]
    assert len(steps) == 2 * per_window
    for number, (here, there) in enumerate(steps, 1):
        stepper.learning_rate.copy_(here["learning_rate"])
        metrics = stepper.update(loss_module, union(here["batch"], there["batch"]))
        gradient = torch.cat([p.grad.reshape(-1) for p in stepper.optimizer.parameters])
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(here["gradient"], gradient, **tolerance)
        assert torch.equal(here["gradient"], there["gradient"])
        assert here["learning_rate"] == there["learning_rate"]
        kl = metrics[stepper.metric_names.index("kl")]
        if kl > 1e-6:  # not that of an unchanged policy, in which rounding decides what is exactly zero
            adapted = adapted_learning_rate(learning_rate, kl, stepper.desired_kl)
            assert here["learning_rate"] == adapted
            num_adapted += int(adapted != learning_rate)
        learning_rate = here["learning_rate"]
        if number % per_window == 0:
            window = torch.cat([half["windows"][number // per_window - 1] for half in both], 1)
            for network in networks:
                network.update_normalizer(window)
    assert num_adapted
    torch.testing.assert_close(first["end"], parameters(*networks), **tolerance)


def assert_advantages_of_one_process(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """The advantages of both halves are normalised as one window's."""
    for here, there in zip(both[0]["windows"], both[1]["windows"], strict=True):
        window = torch.cat([here, there], 1)
        raw = window["value_target"] - window["state_value"]
        torch.testing.assert_close(window["advantage"], normalize_advantage(raw), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("scenario", "loss"),
    [("single", {}), ("double", {}), ("per_mini_batch", {"normalize_advantage": True}), ("recurrent", {})],
)
def test_the_steps_of_two_ranks_are_those_of_one_process_with_all_environments(both, scenario, loss):
    assert_steps_of_one_process(both[scenario], **loss)


@pytest.mark.parametrize("scenario", ["double", "recurrent"])
def test_advantages_are_normalised_over_the_windows_of_all_ranks(both, scenario):
    assert_advantages_of_one_process(both[scenario])


@pytest.mark.parametrize("check", [assert_steps_of_one_process])
def test_gradients_that_are_added_up_are_noticed(both, check):
    with pytest.raises(AssertionError):
        check(both["summing"])


@pytest.mark.parametrize("check", [assert_steps_of_one_process, assert_advantages_of_one_process])
def test_statistics_of_each_rank_alone_are_noticed(both, check):
    with pytest.raises(AssertionError):
        check(both["apart"])


@pytest.mark.parametrize(
    "scenario", ["single", "double", "per_mini_batch", "recurrent", "extensions", "amp", "distillation"]
)
def test_ranks_end_with_equal_parameters_and_statistics(both, scenario):
    first, second = both[scenario]
    assert equal(first["end"], second["end"])
    if "before" in first:  # drawn from other seeds, so that they were not equal all along
        assert not equal(first["before"], second["before"])


def test_ranks_collect_different_windows(both):
    first, second = both["single"]
    assert not torch.equal(first["windows"][0]["observation"], second["windows"][0]["observation"])


def test_what_is_logged_is_the_mean_over_ranks(both):
    first, second = both["single"]
    assert first["metrics"] == second["metrics"]
    mean = (first["own_return"] + second["own_return"]) / 2
    assert first["own_return"] != second["own_return"]
    assert first["metrics"]["Train/mean_reward"] == pytest.approx(mean, abs=1e-9)


def test_normalisers_take_in_the_batches_of_all_ranks_as_one(both):
    first, second = both["normaliser"]
    alone = EmpiricalNormalizer(3).double()
    for halves in zip(first["batches"], second["batches"], strict=True):
        alone.update(torch.cat(halves).double())
    for state in (first["state"], second["state"]):
        assert state["count"] == alone.count == 16
        torch.testing.assert_close(state["mean"].double(), alone.mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(state["var"].double(), alone.var, rtol=1e-4, atol=0)  # 1000 ± 1 in float32


def test_unequal_halves_are_refused_on_every_rank(both):
    for result in both["unequal"]:
        assert "`num_envs` is 2 on rank 0 but 3 on rank 1" in result["said"]


# -- checkpoints -------------------------------------------------------------------------------


def test_a_run_of_two_ranks_resumes_to_the_same_numbers_bit_for_bit(both):
    first, second = both["resumed"]
    for result in (first, second):
        assert equal(result["whole"], result["parts"])
        assert result["whole_metrics"] == result["parts_metrics"]
        assert result["frames"] == (4 * NUM_STEPS * NUM_ENVS, 2 * 4 * NUM_STEPS * NUM_ENVS)
    assert equal(first["parts"], second["parts"])


def test_another_number_of_ranks_is_refused_in_one_sentence(both):
    checkpoint = latest_checkpoint(both.folder / "parts")
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match=r"written by 2 rank\(s\).*--nproc-per-node 2"):
        ppo(Ranks()).load_checkpoint(checkpoint)


def test_a_checkpoint_of_one_process_is_refused_by_two_ranks(tmp_path):
    trainer = make_trainer(checkpoint_dir=tmp_path, num_iterations=1)
    trainer.train()
    other = make_trainer(checkpoint_dir=tmp_path, ranks=Ranks(0, 2))
    assert other.latest_checkpoint is not None
    with pytest.raises(CheckpointError, match=r"written by 1 rank\(s\)"):
        other.load_checkpoint(other.latest_checkpoint)


# -- one process alone -------------------------------------------------------------------------


def test_a_process_alone_needs_no_process_group():
    with Ranks.join("cpu") as ranks:
        assert (ranks.rank, ranks.size, ranks.device, ranks.pool) == (0, 1, "cpu", None)
        x = torch.tensor([1.0, 2.0])
        assert ranks.mean_(x) is x and torch.equal(x, torch.tensor([1.0, 2.0]))
        assert ranks.mean_of({"a": 1.0}) == {"a": 1.0}
        assert not torch.distributed.is_initialized()


def test_seeds_differ_between_ranks_and_stay_in_the_range_of_every_generator():
    assert [Ranks(rank, 3).seed(5) for rank in range(3)] == [5, 6, 7]
    assert Ranks(1, 2).seed(2**32 - 1) == 0


@pytest.mark.parametrize(
    ("device", "said"), [("cuda:3", r"local rank 1 computes on 'cuda:1'"), ("cuda", r"no device 'cuda:1'")]
)
def test_a_device_that_is_not_the_ranks_own_is_refused(monkeypatch, device, said):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=said), Ranks.join(device):
        pass


def test_ranks_train_without_compilation_and_say_so():
    env = PendulumEnv(2)
    actor, critic = MLPActor.for_env(env), MLPCritic.for_env(env)
    with pytest.warns(UserWarning, match="in which ranks cannot meet"):
        KLAdaptiveStepper(actor, critic, compile=True, ranks=Ranks(0, 2))


# -- runs --------------------------------------------------------------------------------------

TRAIN = ["-m", "torchrl_rslstorage", "train", "pendulum", "--num-envs", "4", "--num-steps-per-env", "8"]
TRAIN += ["--hidden-dims", "8"]


def wait_until_it_trains(run: Path, process: subprocess.Popen[str]) -> None:
    file = run / "logs" / "scalars" / "Train" / "mean_step_reward.csv"
    deadline = time.monotonic() + PATIENCE_S
    while not (file.is_file() and file.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{file} was never written"
        time.sleep(0.05)


def test_a_killed_rank_ends_the_run_with_an_error(tmp_path):
    pytest.importorskip("tyro", reason="tyro is missing")
    run = tmp_path / "run"
    processes = start_ranks([*TRAIN, "--max-iterations", "1000000", "--run-dir", str(run)])
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        wait_until_it_trains(run, processes[0])
        processes[1].send_signal(signal.SIGKILL)
        start = time.monotonic()
        (status, output), (killed, _) = ends_of(processes)
    assert time.monotonic() - start < 30
    assert killed == -signal.SIGKILL and status == 1
    last = output.strip().splitlines()[-1]
    assert last.startswith("rslstorage: Rank 0 of 2 cannot reach the others"), output
    assert "Traceback" not in output


@pytest.mark.slow
def test_torchrun_trains_and_resumes_on_the_command_line(tmp_path):
    pytest.importorskip("tyro", reason="tyro is missing")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]

    def done(*args: str) -> str:
        finished = subprocess.run([*torchrun, *args], capture_output=True, text=True, cwd=HERE.parent)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    save = ["--save-interval", "2"]
    done(*TRAIN, *save, "--max-iterations", "4", "--run-dir", str(tmp_path / "whole"))
    done(*TRAIN, *save, "--max-iterations", "2", "--run-dir", str(tmp_path / "parts"))
    out = done("-m", "torchrl_rslstorage", "resume", str(tmp_path / "parts"), "--max-iterations", "4")
    assert out.count('"run"') == 1  # one rank tells
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    assert json.loads((parts / "summary.json").read_text())["frames"] == 2 * 4 * 8 * 4
    scalars = [file.relative_to(whole) for file in whole.glob("logs/scalars/*/*.csv")]
    assert len(scalars) > 5
    for name in scalars:
        if name.parent.name != "Perf":
            assert (whole / name).read_text() == (parts / name).read_text(), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pgrep") is None, reason="pgrep is missing")
def test_torchrun_ends_when_one_of_its_ranks_is_killed(tmp_path):
    pytest.importorskip("tyro", reason="tyro is missing")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [*TRAIN, "--max-iterations", "1000000", "--run-dir", str(run)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=HERE.parent, **pipes) as torchrun:
        try:
            wait_until_it_trains(run, torchrun)
            listed = subprocess.run(["pgrep", "-P", str(torchrun.pid)], capture_output=True, text=True)
            subprocess.run(["kill", "-KILL", listed.stdout.split()[-1]], check=True)
            start = time.monotonic()
            torchrun.communicate(timeout=PATIENCE_S)
        finally:
            torchrun.kill()
    assert torchrun.returncode != 0
    assert time.monotonic() - start < 60
