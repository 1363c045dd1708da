"""The command line, for people who come from RSL-RL: its configs, its checkpoints, policies for robots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rsl_rl.models import MLPModel
from rsl_rl_configs import as_yaml, rough_5x
from tensordict import TensorDict

pytest.importorskip("tyro", reason="tyro is missing")
pytest.importorskip("yaml", reason="PyYAML is missing")
from test_cli import PPO, TINY, printed, sentence, strict_json, tree

from torchrl_rslstorage import MLPActor, PPOConfig, load_rsl_rl_checkpoint
from torchrl_rslstorage.cli import main, parse

SMALL = {"num_steps_per_env": 8, "max_iterations": 2, "save_interval": 2, "seed": 3}


def write_config(path: Path, **changes) -> Path:
    """A small run of the Go1's config."""
    config = {**rough_5x("go1"), **SMALL}
    for name in ("actor", "critic"):
        config[name] = {**config[name], "hidden_dims": [16, 8], "activation": "lrelu"}
    path.write_text(as_yaml({**config, **changes}))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A finished tiny run; not to be written to."""
    path = tmp_path_factory.mktemp("trained") / "run"
    main(["train", "pendulum", *TINY, *PPO, "--run-dir", str(path)])
    return path


def test_a_config_of_rsl_rl_gives_the_defaults_and_options_beside_it_win(tmp_path, capsys):
    file = write_config(tmp_path / "agent.yaml")
    options = parse(["train", "--rsl-rl-config", str(file), "--gamma", "0.9", "--max-iterations", "7"])
    assert (options.num_steps_per_env, options.max_iterations, options.seed) == (8, 7, 3)
    assert (options.hidden_dims, options.activation, options.policy) == ((16, 8), "leaky_relu", "mlp")
    assert options.ppo == PPOConfig(gamma=0.9, entropy_coef=0.01) and options.obs_normalization is False
    assert options.task == "pendulum" and options.num_envs is None
    assert type(parse(["train", f"--rsl_rl_config={file}"])) is type(parse(["train"]))
    said = capsys.readouterr().out
    assert "used     actor.hidden_dims = (16, 8)" in said and "ignored  device: the device is chosen" in said


def test_a_run_from_a_config_of_rsl_rl_is_resumed_without_it(tmp_path, capsys):
    file = write_config(tmp_path / "agent.yaml")
    run = tmp_path / "run"
    args = ["--rsl-rl-config", file, "--num-envs", 4, "--num-mini-batches", 2, "--run-dir", run]
    assert printed(capsys, "train", "pendulum", *args)["frames"] == 64
    file.unlink()
    config = strict_json((run / "config.json").read_text())
    assert config["seed"] == 3 and config["activation"] == "leaky_relu" and "rsl_rl_config" not in config
    assert printed(capsys, "resume", run, "--max-iterations", 3)["frames"] == 96


def test_a_recurrent_config_trains_recurrent_networks(tmp_path):
    model = {"class_name": "RNNModel", "rnn_type": "gru", "rnn_hidden_dim": 6, "hidden_dims": [8]}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 0.5, "std_type": "log"}
    file = write_config(
        tmp_path / "agent.yaml", actor={**model, "distribution_cfg": gaussian}, critic=model, seed=None
    )
    options = parse(["train", "--rsl-rl-config", str(file)])
    assert (options.policy, options.rnn_hidden_dim, options.hidden_dims) == ("gru", 6, (8,))
    assert (options.init_std, options.std_type, options.seed) == (0.5, "log", 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gravity": 9.81}, "RSL-RL configs have no field `gravity` that is known here."),
        ({"critic": {"hidden_dims": [32]}}, "The networks of actor and critic differ"),
        ({"obs_groups": {"actor": ["a"], "critic": ["b"]}}, "The obs_groups of actor and critic differ"),
        ({"clip_actions": 1.0}, "`clip_actions` is 1.0, but tasks here clip to their own bounds"),
        ({"algorithm": {"rnd_cfg": {"weight": 1.0}}}, "`algorithm.rnd_cfg` is set"),
    ],
)
def test_a_config_that_the_command_line_cannot_honour_is_refused_in_a_sentence(
    changes, said, tmp_path, capsys
):
    file = write_config(tmp_path / "agent.yaml", **changes)
    assert said in sentence(capsys, "train", "--rsl-rl-config", file, "--run-dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_config_that_is_not_there_is_named(tmp_path, capsys):
    assert "There is no config" in sentence(capsys, "train", "--rsl-rl-config", tmp_path / "agent.yaml")
    sentence(capsys, "train", "--rsl-rl-config", status=2)


def test_a_run_is_exported_as_a_policy_for_robots(trained, tmp_path, capsys):
    before = tree(trained)
    file = tmp_path / "policy.pt2"
    result = printed(capsys, "export", trained, "--output", file)
    assert result["checkpoint"].endswith("checkpoint-000000000096") and result["output"] == str(file)
    assert (result["inputs"], result["outputs"]) == (["obs"], ["actions"])
    assert result["obs"] == ["observation"]
    policy = torch.export.load(file).module()
    checkpoint = trained / "checkpoints" / "checkpoint-000000000064"
    printed(capsys, "export", checkpoint, "--output", tmp_path / "older.pt2")
    older = torch.export.load(tmp_path / "older.pt2").module()
    x = torch.randn(5, 3)
    assert not torch.equal(policy(x), older(x))
    assert tree(trained) == before


def test_a_run_goes_on_in_rsl_rl(trained, tmp_path, capsys):
    file = tmp_path / "model_3.pt"
    assert printed(capsys, "export", trained, "--output", file, "--rsl-rl")["iteration"] == 3
    observations = TensorDict({"observation": torch.randn(5, 3)}, [5])
    gaussian = {"class_name": "GaussianDistribution"}
    model = MLPModel(
        observations,
        {"actor": ["observation"]},
        "actor",
        1,
        hidden_dims=[8],
        activation="elu",
        distribution_cfg=gaussian,
    )
    saved = torch.load(file)
    model.load_state_dict(saved["actor_state_dict"])
    assert saved["optimizer_state_dict"]["state"][0]["step"] == 3 * 2 * 2  # iterations, epochs, mini-batches
    actor = MLPActor(["observation"], 3, 1, hidden_dims=(8,))
    assert load_rsl_rl_checkpoint(file, actor).iteration == 3
    assert torch.equal(model(observations), actor.get_dist(observations).mean)


def test_an_export_for_rsl_rl_is_named_as_rsl_rl_names_it(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert printed(capsys, "export", trained, "--rsl-rl")["output"] == "model_3.pt"
    assert [file.name for file in tmp_path.iterdir()] == ["model_3.pt"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--output", "policy.tflite"], "A policy is exported to .onnx, .pt, .pt2, got 'policy.tflite'"),
        (
            ["--output", "no/such/folder/policy.pt2"],
            "no folder no/such/folder for policy.pt2: make it",
        ),
        (
            ["--output", "no/such/folder/model.pt", "--rsl-rl"],
            "no folder no/such/folder for model.pt",
        ),
        (["--output", ".", "--rsl-rl"], ". is a folder: name a file"),
    ],
)
def test_an_export_that_cannot_be_is_one_sentence(args, said, trained, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in sentence(capsys, "export", trained, *args)
    assert "does not exist" in sentence(capsys, "export", tmp_path / "none")
    assert not list(tmp_path.iterdir())
