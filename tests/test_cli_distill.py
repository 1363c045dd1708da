"""``rslstorage distill``: teacher, student and evaluation, and one sentence for every mistake."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import torchrl_rslstorage
from torchrl_rslstorage import DistillationConfig, RNNActor, load_teacher
from torchrl_rslstorage.cli import main, parse
from torchrl_rslstorage.trainers.checkpoints import latest_checkpoint
from torchrl_rslstorage.trainers.distill_options import DistillOptions, options_of
from torchrl_rslstorage.trainers.options import TrainOptions

pytest.importorskip("tyro", reason="tyro is missing")

from test_cli import PPO, TINY, printed, sentence, strict_json, tree

README = Path(torchrl_rslstorage.__file__).parent.parent / "README.md"
HIDDEN = "pendulum-hidden-velocity"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> Path:
    """A folder with teachers on the full state, MLP and GRU; not to be written to."""
    path = tmp_path_factory.mktemp("teachers")
    for policy in ("mlp", "gru"):
        options = [*TINY, *PPO, "--policy", policy, "--rnn-hidden-dim", "4", "--obs-normalization", "True"]
        main(["train", "pendulum", *options, "--run-dir", str(path / policy)])
    return path


@pytest.fixture(scope="module")
def distilled(teachers, tmp_path_factory) -> Path:
    """A finished distillation; not to be written to."""
    path = tmp_path_factory.mktemp("distilled") / "run"
    options = [*TINY, "--policy", "lstm", "--rnn-hidden-dim", "4", "--gradient-length", "3"]
    main(["distill", HIDDEN, *options, "--teacher", str(teachers / "mlp"), "--run-dir", str(path)])
    return path


@pytest.fixture
def run(distilled, tmp_path) -> Path:
    return Path(shutil.copytree(distilled, tmp_path / "run"))


def readme_commands() -> list[list[str]]:
    """The three commands of the README's section on distillation."""
    section = README.read_text(encoding="utf-8").partition("## Distillation")[2]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    lines = [shlex.split(line, comments=True) for line in block[1].splitlines()]
    assert [line[:2] for line in lines] == [["rslstorage", name] for name in ("train", "distill", "eval")]
    return [line[1:] for line in lines]


def test_the_three_commands_of_the_readme_train_distil_and_evaluate(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, distill, evaluate = readme_commands()
    printed(capsys, *train, *TINY, *PPO)
    told = printed(capsys, *distill, *TINY)
    assert told["task"] == HIDDEN and told["iterations"] == 3
    result = printed(capsys, *evaluate, "--num-episodes", 4)
    assert result["num_episodes"] == 4 and -2000 < result["mean_return"] < -100
    config = strict_json(Path(told["run"], "config.json").read_text())
    assert config["policy"] in ("lstm", "gru") and config["teacher_config"]["task"] == "pendulum"


def test_a_distillation_leaves_what_every_run_leaves(distilled):
    assert sorted(p.name for p in distilled.iterdir()) == [
        *("checkpoints", "config.json", "learning_curve.png", "logs", "summary.json")
    ]
    lines = (distilled / "logs" / "scalars" / "Loss" / "behavior.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["32", "64", "96"]
    assert strict_json((distilled / "summary.json").read_text())["frames"] == 96


@pytest.mark.parametrize("teacher", ["mlp", "gru"])
@pytest.mark.parametrize("policy", ["mlp", "gru", "lstm"])
def test_every_student_learns_from_every_teacher_and_goes_on(teachers, tmp_path, capsys, teacher, policy):
    options = ["--policy", policy, "--rnn-hidden-dim", 4, "--run-dir", tmp_path / "run"]
    printed(capsys, "distill", HIDDEN, *TINY, "--teacher", teachers / teacher, *options)
    assert printed(capsys, "resume", tmp_path / "run", "--max-iterations", 5)["iterations"] == 5
    assert printed(capsys, "eval", tmp_path / "run", "--num-episodes", 2)["num_episodes"] == 2


@pytest.mark.parametrize("acting", ["student", "dagger"])
def test_a_distillation_that_was_stopped_ends_as_one_that_was_not(teachers, tmp_path, capsys, acting):
    def distil(name: str, iterations: int) -> Path:
        options = [*TINY, "--teacher", teachers / "gru", "--policy", "gru", "--rnn-hidden-dim", 4]
        options += ["--acting", acting, "--max-iterations", iterations, "--obs-normalization", "True"]
        printed(capsys, "distill", HIDDEN, *options, "--run-dir", tmp_path / name)
        return tmp_path / name

    whole, parts = distil("whole", 6), distil("parts", 6)
    for path in sorted((parts / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)  # as if it was killed after the first
    printed(capsys, "resume", parts)
    for name in ("Loss/behavior", "Train/mean_step_reward"):
        files = [run / "logs" / "scalars" / f"{name}.csv" for run in (whole, parts)]
        assert files[0].read_text() == files[1].read_text()
    for part in ("actor", "teacher", "stepper"):
        states = []
        for run in (whole, parts):
            latest = latest_checkpoint(run / "checkpoints")
            assert latest is not None
            (file,) = latest.glob(f"components/*-{part}/state.pt")
            states.append(torch.load(file, weights_only=True))
        assert str(states[0]) == str(states[1])


def test_a_run_goes_on_when_its_teachers_run_is_gone(teachers, tmp_path, capsys):
    shutil.copytree(teachers / "mlp", tmp_path / "teacher")
    options = ["--teacher", tmp_path / "teacher", "--run-dir", tmp_path / "run"]
    printed(capsys, "distill", HIDDEN, *TINY, *options)
    shutil.rmtree(tmp_path / "teacher")
    assert printed(capsys, "resume", tmp_path / "run", "--max-iterations", 4)["iterations"] == 4
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").mkdir()
    said = sentence(capsys, "resume", tmp_path / "run")
    assert f"{tmp_path / 'teacher'} does not exist" in said


def test_one_checkpoint_can_teach_and_a_student_can_in_its_turn(teachers, distilled, tmp_path, capsys):
    checkpoint = teachers / "mlp" / "checkpoints" / "checkpoint-000000000064"
    older, newer = load_teacher(checkpoint), load_teacher(teachers / "mlp")
    assert not torch.equal(older.mlp[0].weight, newer.mlp[0].weight)
    options = [*TINY, "--run-dir", tmp_path / "run"]
    printed(capsys, "distill", HIDDEN, *options, "--teacher", distilled)
    teacher = load_teacher(tmp_path / "run")
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())


def test_a_loaded_teacher_has_its_weights_and_its_normaliser(teachers):
    teacher = load_teacher(teachers / "gru")
    assert isinstance(teacher, RNNActor) and not teacher.training
    latest = latest_checkpoint(teachers / "gru" / "checkpoints")
    assert latest is not None
    (file,) = latest.glob("components/*-actor/state.pt")
    saved = torch.load(file, weights_only=True)
    assert saved.keys() == teacher.state_dict().keys()
    assert all(torch.equal(saved[key], value) for key, value in teacher.state_dict().items())
    assert saved["normalizer.count"] == 96


def test_distilling_leaves_the_teachers_run_as_it_was(teachers, tmp_path, capsys):
    before = tree(teachers)
    printed(capsys, "distill", HIDDEN, *TINY, "--teacher", teachers / "mlp", "--run-dir", tmp_path / "run")
    assert tree(teachers) == before


def test_every_default_of_the_algorithm_is_rsl_rls_and_every_option_can_be_said():
    options = parse(["distill", HIDDEN, "--teacher", "a"])
    assert options == DistillOptions(HIDDEN, teacher=Path("a"))
    assert isinstance(options, DistillOptions) and options.distillation == DistillationConfig()
    line = "distill x --teacher a --gradient-length 4 --loss-type huber --max-grad-norm 0.5 --acting dagger "
    line += "--teacher-anneal 0.2 --num-learning-epochs 3 --learning-rate 0.1"
    said = parse(line.split())
    assert isinstance(said, DistillOptions)
    assert said.distillation == DistillationConfig(3, 4, 0.1, 0.5, "huber", "dagger", 0.2)


def test_options_survive_the_way_through_config_json(tmp_path):
    options = DistillOptions("x", seed=3, hidden_dims=(4, 5), run_dir=tmp_path, teacher=Path("t")).resolved()
    config = json.loads(json.dumps(options.as_config(), default=str))
    assert options_of({**config, "teacher_config": {}}, tmp_path) == options
    train = TrainOptions("x").resolved()
    assert type(options_of(train.as_config(), tmp_path)) is TrainOptions


# -- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--gradient-length 0", "`gradient_length` must be at least 1, got 0."),
        ("--num-learning-epochs -1", "`num_learning_epochs` must be at least 1, got -1."),
        ("--max-grad-norm 0", "`max_grad_norm` must be positive, got 0.0."),
        ("--teacher-anneal 2", "`teacher_anneal` must be above 0 and at most 1, got 2.0."),
        ("--num-envs 0", "`num_envs` must be at least 1, got 0."),
    ],
)
def test_an_option_out_of_range_is_named_before_anything_is_written(teachers, args, said, tmp_path, capsys):
    path = tmp_path / "run"
    options = [*TINY, *args.split(), "--teacher", teachers / "mlp", "--run-dir", path]
    assert said in sentence(capsys, "distill", HIDDEN, *options)
    assert not path.exists()


def test_a_teacher_must_be_named(capsys):
    assert "--teacher" in sentence(capsys, "distill", HIDDEN, status=2)


def test_a_teacher_that_is_none_is_named_before_anything_is_written(teachers, tmp_path, capsys):
    def said(teacher: Path, task: str = HIDDEN) -> str:
        path = tmp_path / "run"
        out = sentence(capsys, "distill", task, *TINY, "--teacher", teacher, "--run-dir", path)
        assert not path.exists()
        return out

    assert "missing does not exist" in said(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "is neither a run folder nor a checkpoint inside one" in said(tmp_path / "empty")
    bare = Path(shutil.copytree(teachers / "mlp", tmp_path / "bare"))
    shutil.rmtree(bare / "checkpoints")
    (bare / "checkpoints").mkdir()
    assert "bare has no checkpoint yet: let it train on" in said(bare)
    headless = Path(shutil.copytree(teachers / "mlp", tmp_path / "headless"))
    for checkpoint in (headless / "checkpoints").iterdir():
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        del manifest["components"]["actor"]
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        (component,) = checkpoint.glob("components/*-actor")
        shutil.rmtree(component)
    assert "holds no actor: a teacher comes from a checkpoint of rslstorage train" in said(headless)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (
            "MountainCarContinuous-v0",
            "reads 'observation', 3 numbers in all, but this environment shows 'observation' of (2,)",
        ),
        ("rslstorage-distill/TwoTorques-v0", "The student acts with 2 numbers, the teacher with 1"),
    ],
)
def test_a_teacher_that_does_not_fit_the_task_is_named_before_anything_is_written(
    teachers, tmp_path, capsys, task, said
):
    gymnasium = pytest.importorskip("gymnasium")
    two = gymnasium.spaces.Box(-1, 1, (2,))
    seen = gymnasium.spaces.Box(-1, 1, (3,))

    class TwoTorques(gymnasium.Env):
        observation_space, action_space = seen, two

    if "rslstorage-distill/TwoTorques-v0" not in gymnasium.registry:
        gymnasium.register("rslstorage-distill/TwoTorques-v0", TwoTorques, max_episode_steps=5)
    options = [*TINY, "--teacher", teachers / "mlp", "--run-dir", tmp_path / "run"]
    assert said in sentence(capsys, "distill", task, *options)
    assert not (tmp_path / "run").exists()
