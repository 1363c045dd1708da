"""The command line: what a run leaves on disk, and one sentence for every mistake."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchrl_rslstorage import PPOConfig, RunFolderError
from torchrl_rslstorage.cli import EvalOptions, ResumeOptions, main, parse
from torchrl_rslstorage.trainers import run_folder
from torchrl_rslstorage.trainers.options import GYMNASIUM, PENDULUM, TrainOptions

pytest.importorskip("tyro", reason="tyro is missing")

try:
    import gymnasium
    import numpy as np
except ImportError:
    gymnasium = None
needs_gymnasium = pytest.mark.skipif(gymnasium is None, reason="gymnasium is missing")

TINY = [*("--num-envs", "4"), *("--num-steps-per-env", "8"), *("--max-iterations", "3")]
TINY += [*("--hidden-dims", "8"), *("--save-interval", "2")]
PPO = [*("--num-learning-epochs", "2"), *("--num-mini-batches", "2")]


def tree(path: Path) -> dict[str, bytes | None]:
    """Everything under ``path``: the bytes of a file, None for a folder."""
    entries = sorted(path.rglob("*"))
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in entries}


def strict_json(text: str) -> dict:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def printed(capsys, *args) -> dict:
    """Runs a command to its end and returns the JSON that it prints last."""
    main([str(arg) for arg in args])
    out = capsys.readouterr().out
    return strict_json(out[out.index("{\n") :])


def sentence(capsys, *args, status: int = 1) -> str:
    """Runs a command that fails, and returns what it says: one sentence on one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    code = caught.value.code
    if isinstance(code, str):  # Python prints it and leaves with status 1
        print(code, file=sys.stderr)
        code = 1
    said = capsys.readouterr()
    assert code == status, said.err
    assert "Traceback" not in said.err and "{" not in said.out
    lines = said.err.strip().splitlines()
    if status == 1:
        assert len(lines) == 1 and lines[0].startswith("rslstorage: "), said.err
        assert lines[0].count("rslstorage: ") == 1 and lines[0].rstrip()[-1] != ":"
    return " ".join(" ".join(lines).replace("│", " ").split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A finished tiny run; not to be written to."""
    path = tmp_path_factory.mktemp("trained") / "run"
    main(["train", "pendulum", *TINY, *PPO, "--run-dir", str(path)])
    return path


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


# -- what a run leaves ---------------------------------------------------------------------------


def test_a_run_leaves_config_scalars_picture_checkpoints_and_summary(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "runs" / "one"
    result = printed(capsys, "train", "pendulum", *TINY, *PPO, "--seed", 2, "--run-dir", path)
    assert result["run"] == str(path)
    assert result["frames"] == 96 and result["iterations"] == 3 and result["seed"] == 2
    assert result["task"] == "pendulum" and result["wall_seconds"] > 0
    assert {"mean_return", "mean_length", "num_episodes"} <= result.keys()
    assert {"python", "torch", "tensordict", "torchrl", "torchrl_rslstorage"} <= result["versions"].keys()
    assert strict_json((path / "summary.json").read_text()) == {k: v for k, v in result.items() if k != "run"}
    config = strict_json((path / "config.json").read_text())
    assert config["task"] == "pendulum" and config["num_envs"] == 4 and config["ppo"]["gamma"] == 0.99
    assert (path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(p.name for p in (path / "checkpoints").iterdir())
    assert names == ["checkpoint-000000000064", "checkpoint-000000000096"]
    lines = (path / "logs" / "scalars" / "Loss" / "value.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["32", "64", "96"]
    assert sorted(p.name for p in path.iterdir()) == [
        *("checkpoints", "config.json", "learning_curve.png", "logs", "summary.json")
    ]


def test_without_a_folder_named_runs_gather_under_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = [printed(capsys, "train", *TINY, *PPO) for _ in range(2)]
    folders = sorted((tmp_path / "runs").iterdir())
    assert sorted(Path(result["run"]).name for result in results) == [folder.name for folder in folders]
    assert len(folders) == 2 and all(folder.name.startswith("pendulum-") for folder in folders)


def test_progress_is_told_in_lines_where_no_bar_can_be_shown(tmp_path, capsys):
    main(["train", *TINY, *PPO, "--run-dir", str(tmp_path / "run")])
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"Training pendulum in {tmp_path / 'run'}."
    assert [line.split()[:2] for line in out[1:4]] == [["32", "frames"], ["64", "frames"], ["96", "frames"]]


def test_tensorboard_gets_every_scalar_of_every_iteration(tmp_path, capsys):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    path = tmp_path / "run"
    printed(capsys, "train", *TINY, *PPO, "--logger", "tensorboard", "--run-dir", path)
    events = accumulator.EventAccumulator(str(path / "tensorboard")).Reload()
    scalars = path / "logs" / "scalars"
    names = {str(file.relative_to(scalars))[:-4] for file in scalars.rglob("*.csv")}
    assert set(events.Tags()["scalars"]) == names and len(names) == 14
    assert [event.step for event in events.Scalars("Loss/value")] == [32, 64, 96]


def test_resume_trains_a_run_on_and_tells_the_same_summary_as_is_on_disk(run, capsys):
    result = printed(capsys, "resume", run, "--max-iterations", 5)
    assert result["frames"] == 160 and result["iterations"] == 5
    assert strict_json((run / "summary.json").read_text())["frames"] == 160
    assert printed(capsys, "resume", run, "--max-iterations", 5)["frames"] == 160


def test_eval_plays_whole_episodes_of_a_run_or_of_one_checkpoint_and_writes_nothing(trained, capsys):
    before = tree(trained)
    newest = printed(capsys, "eval", trained, "--num-episodes", 5, "--num-envs", 3)
    assert newest["checkpoint"].endswith("checkpoint-000000000096")
    assert newest["num_episodes"] == 6  # two of each environment
    assert newest["mean_length"] == 200 and -2000 < newest["mean_return"] < -100
    path = trained / "checkpoints" / "checkpoint-000000000064"
    older = printed(capsys, "eval", path, "--num-episodes", 6, "--num-envs", 3)
    assert older["checkpoint"] == str(path) and older["mean_return"] != newest["mean_return"]
    assert tree(trained) == before


def test_eval_is_reproducible_and_acts_by_the_mean_unless_told_otherwise(trained, capsys):
    args = ["eval", trained, "--num-episodes", 2]
    mean, again, sampled, other = (
        printed(capsys, *args, *more) for more in ([], [], ["--stochastic"], ["--seed", 1])
    )
    assert mean == again
    assert sampled["mean_return"] != mean["mean_return"] != other["mean_return"]


def test_help_lists_the_commands_and_their_options(capsys):
    for args, expected in (
        (["--help"], ["train", "distill", "resume", "eval"]),
        (["train", "--help"], ["--num-envs", "--gamma", "--num-mini-batches", "--obs-normalization", "0.99"]),
        (["resume", "--help"], ["PATH", "--max-iterations"]),
        (["eval", "--help"], ["PATH", "--num-episodes", "--stochastic"]),
    ):
        with pytest.raises(SystemExit) as caught:
            main(args)
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert all(text in out for text in expected), out


def test_it_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "torchrl_rslstorage", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Train a policy with PPO." in done.stdout and "Traceback" not in done.stderr


# -- options -------------------------------------------------------------------------------------


def test_every_default_is_rsl_rls_and_every_option_can_be_said():
    options = parse(["train"])
    assert options == TrainOptions() and options.task == "pendulum" and options.ppo == PPOConfig()
    line = "train Ant-v5 --hidden-dims 4 5 --num-envs 3 --gamma 0.5 --time-out rsl_rl --schedule fixed "
    line += "--reshuffle --std-type log --obs-normalization False --no-progress-bar"
    said = parse(line.split())
    ppo = PPOConfig(gamma=0.5, time_out="rsl_rl", schedule="fixed", reshuffle=True)
    assert said == TrainOptions(
        "Ant-v5",
        hidden_dims=(4, 5),
        num_envs=3,
        std_type="log",
        obs_normalization=False,
        progress_bar=False,
        ppo=ppo,
    )
    assert parse(["resume", "a"]) == ResumeOptions(Path("a"))
    assert parse(["eval", "a", "--num-episodes", "3"]) == EvalOptions(Path("a"), num_episodes=3)


@pytest.mark.parametrize(("task", "defaults"), [("pendulum", PENDULUM), ("HalfCheetah-v5", GYMNASIUM)])
def test_what_is_left_out_comes_from_the_task_and_what_is_said_stays(task, defaults):
    resolved = TrainOptions(task).resolved()
    for field in dataclasses.fields(defaults):
        assert getattr(resolved, field.name) == getattr(defaults, field.name)
    said = TrainOptions(task, num_envs=7, obs_normalization=not defaults.obs_normalization).resolved()
    assert said.num_envs == 7 and said.obs_normalization is not defaults.obs_normalization
    assert said.num_steps_per_env == defaults.num_steps_per_env


def test_options_survive_the_way_through_config_json(tmp_path):
    options = TrainOptions("x", seed=3, hidden_dims=(4, 5), run_dir=tmp_path, ppo=PPOConfig(gamma=0.1))
    options = options.resolved()
    config = json.loads(json.dumps(options.as_config()))
    assert "run_dir" not in config
    assert TrainOptions.from_config(config, tmp_path) == options


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"ppo": {"unknown": 1}},
        {"ppo": None},
        {"num_envs": "many"},
        {"num_envs": 0},
        {"ppo": {"gamma": 7}},
        {"hidden_dims": 3},
        {"seed": None},
    ],
    ids=str,
)
def test_a_config_of_another_program_is_refused_by_name(run, change, capsys):
    file = run / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(RunFolderError, match=r"config\.json is not a config of this version"):
        TrainOptions.from_config(json.loads(file.read_text()), run)
    assert "is not a config of this version" in sentence(capsys, "eval", run)


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--gamma 3", "`gamma` must be between 0 and 1, got 3.0."),
        ("--lam -1", "`lam` must be between 0 and 1, got -1.0."),
        ("--learning-rate 0", "`learning_rate` must be positive, got 0.0."),
        ("--num-mini-batches 0", "`num_mini_batches` must be at least 1, got 0."),
        ("--num-mini-batches 33", "`num_mini_batches` is 33, but a window holds 32 transitions"),
        ("--num-envs 0", "`num_envs` must be at least 1, got 0."),
        ("--num-steps-per-env 0", "`num_steps_per_env` must be at least 1, got 0."),
        ("--max-iterations -1", "`max_iterations` must be at least 1, got -1."),
        ("--save-interval 0", "`save_interval` must be at least 1, got 0."),
        ("--num-threads 0", "`num_threads` must be at least 1, got 0."),
        ("--seed -1", "`seed` must be between 0 and 4294967295, got -1."),
        (f"--seed {2**64}", "`seed` must be between 0 and 4294967295"),
        ("--hidden-dims 0", "`hidden_dims` must be positive widths, got (0,)."),
        ("--hidden-dims", "`hidden_dims` must be positive widths, got ()."),
        ("--init-std 0", "`init_std` must be positive, got 0.0."),
        ("--device nonsense", "There is no device 'nonsense' here:"),
        ("--device cuda:99", "There is no device 'cuda:99' here:"),
    ],
)
def test_an_option_out_of_range_is_named_before_anything_is_written(args, said, tmp_path, capsys):
    assert said in sentence(capsys, "train", *TINY, *args.split(), "--run-dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("fly", "fly"),
        ("train --num-envs many", "--num-envs"),
        ("train --no-such-option 3", "--no-such-option"),
        ("train --activation sinus", "--activation"),
        ("train --schedule linear", "--schedule"),
        ("train --logger paper", "--logger"),
        ("eval", "PATH"),
        ("", "{train, distill, resume, eval, export}"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_is_named_and_ends_with_status_2(args, said, capsys):
    assert said in sentence(capsys, *args.split(), status=2)


@needs_gymnasium
def test_a_task_that_cannot_be_trained_is_named_before_anything_is_written(tmp_path, capsys):
    for task, said in (
        ("Nope-v0", "'Nope-v0' is not a Gymnasium task that can be made"),
        ("no_such_module:Nope-v0", "no_such_module"),
        ("CartPole-v1", "action space is Categorical of int64"),
        ("rslstorage-cli/Image-v0", "'observation' has shape (4, 4) per environment; an MLP reads vectors"),
    ):
        assert said in sentence(capsys, "train", task, *TINY, "--run-dir", tmp_path / "run")
        assert not (tmp_path / "run").exists()


EXTRAS = [
    ("tyro", ["train"], "cli", "the command line"),
    ("matplotlib", ["train"], "cli", "the learning curve"),
    ("gymnasium", ["train", "Pendulum-v1"], "gym", "the task 'Pendulum-v1'"),
    ("tensorboard", ["train", "--logger", "tensorboard"], "log", "the TensorBoard logger"),
]


@pytest.mark.parametrize(("module", "args", "extra", "feature"), EXTRAS, ids=[row[0] for row in EXTRAS])
def test_a_missing_extra_is_named_before_anything_is_written(
    module, args, extra, feature, tmp_path, capsys, monkeypatch
):
    class Absent:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == module:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    said = sentence(capsys, *args, *TINY, "--run-dir", tmp_path / "run")
    assert said == f"rslstorage: {feature} needs {module}: pip install torchrl-rslstorage[{extra}]"
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_the_same_folder_is_refused_and_changes_nothing(run, capsys):
    before = tree(run)
    assert "already holds a run's files" in sentence(capsys, "train", *TINY, "--run-dir", run)
    assert tree(run) == before


def test_a_file_in_the_way_of_the_run_folder_is_named_and_kept(tmp_path, capsys):
    file = tmp_path / "note"
    file.write_text("mine")
    assert f"{file} is a file" in sentence(capsys, "train", *TINY, "--run-dir", file)
    assert str(file) in sentence(capsys, "train", *TINY, "--run-dir", file / "run")
    assert tree(tmp_path) == {"note": b"mine"}


def test_a_disk_that_fills_up_while_a_checkpoint_is_written_is_one_sentence(run, capsys, monkeypatch):
    def full(state, file):
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(torch, "save", full)
    before = tree(run / "checkpoints")
    said = sentence(capsys, "resume", run, "--max-iterations", 5)
    assert "No space left on device" in said
    assert tree(run / "checkpoints") == before
    monkeypatch.undo()
    assert printed(capsys, "resume", run, "--max-iterations", 5)["frames"] == 160


def test_a_picture_or_summary_that_cannot_be_written_is_one_sentence(run, capsys, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(run_folder, "atomic_write_bytes", full)
    assert "No space left on device" in sentence(capsys, "resume", run)


@pytest.mark.parametrize("command", ["eval", "resume"])
def test_a_place_that_holds_no_run_is_refused(command, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("hello")
    for name in ("missing", "empty", "file"):
        said = sentence(capsys, command, tmp_path / name)
        assert name in said and ("run folder" in said or "does not exist" in said)
    assert tree(tmp_path) == {"empty": None, "file": b"hello"}


@pytest.mark.parametrize("command", ["eval", "resume"])
def test_a_broken_config_is_refused(command, run, capsys):
    (run / "config.json").write_text("{")
    assert "config.json is broken" in sentence(capsys, command, run)


def test_eval_of_a_run_without_a_checkpoint_says_to_train_on(run, capsys):
    shutil.rmtree(run / "checkpoints" / "checkpoint-000000000064")
    shutil.rmtree(run / "checkpoints" / "checkpoint-000000000096")
    assert f"has no checkpoint yet: let it train on (rslstorage resume {run})" in sentence(
        capsys, "eval", run
    )


@pytest.mark.parametrize("command", ["eval", "resume"])
def test_a_broken_checkpoint_is_refused_and_changes_nothing(command, run, capsys):
    newest = run / "checkpoints" / "checkpoint-000000000096"
    (file,) = newest.glob("components/*-actor/state.pt")
    os.truncate(file, 100)
    before = tree(run)
    assert "component 'actor'" in sentence(capsys, command, run)
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "manifest.json").write_text("garbage")
    before = tree(run)
    assert "No checkpoint in" in sentence(capsys, command, run)
    assert tree(run) == before
    if command == "eval":
        assert "is not a checkpoint of this package" in sentence(capsys, "eval", newest)
        assert "is not a checkpoint of this package" in sentence(capsys, "eval", run / "logs" / "scalars")


def test_the_checkpoint_of_other_networks_is_refused(run, capsys):
    file = run / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_dims": [16]}))
    for command in ("eval", "resume"):
        assert "component 'actor': it does not fit: size mismatch" in sentence(capsys, command, run)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--num-episodes 0", "`num_episodes` must be at least 1, got 0."),
        ("--num-envs 0", "`num_envs` must be at least 1, got 0."),
        ("--num-envs -3", "`num_envs` must be at least 1, got -3."),
        ("--seed -1", "`seed` must be between 0 and 4294967295, got -1."),
    ],
)
def test_eval_options_out_of_range_are_named(args, said, trained, capsys):
    assert said in sentence(capsys, "eval", trained, *args.split())


def test_a_run_of_a_device_that_is_not_here_is_refused_by_eval_and_resume(run, capsys):
    file = run / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "device": "cuda:99"}))
    for command in ("eval", "resume"):
        assert "There is no device 'cuda:99' here" in sentence(capsys, command, run)


@pytest.mark.parametrize("error", [ValueError, KeyError, OSError, RunFolderError])
def test_a_message_of_several_lines_is_told_in_one_and_unquoted(error, run, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise error("it's\n\tbroken")

    monkeypatch.setattr("torchrl_rslstorage.cli.resume_run", fail)
    assert sentence(capsys, "resume", run) == "rslstorage: it's broken"


def test_a_run_that_is_stopped_by_hand_says_how_to_go_on(run, capsys, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchrl_rslstorage.cli.resume_run", stop)
    with pytest.raises(SystemExit) as caught:
        main(["resume", str(run)])
    assert "rslstorage resume RUN" in str(caught.value.code)


# -- tasks that misbehave ------------------------------------------------------------------------

if gymnasium is not None:

    class Task(gymnasium.Env):
        """Three numbers that only say how many steps were taken; reward 1."""

        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float64)

        def __init__(self) -> None:
            self.steps, self.closed = 0, False

        def observation(self):
            return np.full(3, self.steps / 10, np.float64)

        def reward(self):
            return 1.0

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation(), {}

        def step(self, action):
            self.steps += 1
            return self.observation(), self.reward(), False, self.steps % 7 == 0, {}

    class NaNObservation(Task):
        def observation(self):
            return np.array([0.0, math.nan if self.steps == 12 else 1.0, 0.0])

    class NaNReward(Task):
        def reward(self):
            return math.nan if self.steps == 12 else 1.0

    class InfReward(Task):
        def reward(self):
            return -math.inf if self.steps == 12 else 1.0

    class Image(Task):
        observation_space = gymnasium.spaces.Box(0, 1, (4, 4), np.float32)

    for entry in (Task, NaNObservation, NaNReward, InfReward, Image):
        gymnasium.register(f"rslstorage-cli/{entry.__name__}-v0", entry_point=entry, disable_env_checker=True)


@needs_gymnasium
def test_a_float64_task_is_cast_and_trained(tmp_path, capsys):
    path = tmp_path / "run"
    result = printed(capsys, "train", "rslstorage-cli/Task-v0", *TINY, *PPO, "--run-dir", path)
    assert result["mean_return"] == 7.0 and result["mean_length"] == 7.0
    assert printed(capsys, "eval", path, "--num-episodes", 4)["mean_return"] == 7.0
    with pytest.warns(UserWarning, match="GymnasiumEnv cannot save its state"):
        assert printed(capsys, "resume", path, "--max-iterations", 4)["frames"] == 128


@needs_gymnasium
@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("NaNObservation", "'observation' is nan at step 4 of environment 0"),
        ("NaNReward", "('next', 'reward') is nan at step 3 of environment 0"),
        ("InfReward", "('next', 'reward') is -inf at step 3 of environment 0"),
    ],
)
def test_a_fault_of_the_task_is_named_and_the_checkpoint_before_it_stays_whole(task, said, tmp_path, capsys):
    path = tmp_path / "run"
    args = [f"rslstorage-cli/{task}-v0", *TINY, *PPO, "--save-interval", 1, "--run-dir", path]
    assert said in sentence(capsys, "train", *args)
    assert [p.name for p in (path / "checkpoints").iterdir()] == ["checkpoint-000000000032"]
    if task != "NaNObservation":
        assert printed(capsys, "eval", path, "--num-episodes", 2, "--num-envs", 2)["mean_length"] == 7
