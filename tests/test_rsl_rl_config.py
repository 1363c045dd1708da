"""RSL-RL's runner configs: those that others ship load, and what cannot be honoured is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import sys
from typing import Any

import numpy as np
import pytest
import torch
from oracles_objectives import Problem
from rsl_rl.models import MLPModel, RNNModel
from rsl_rl.utils import resolve_nn_activation
from rsl_rl_configs import LAYOUTS, ROUGH, UNSET, as_class, as_configclass, as_yaml, rough_3x, rough_5x
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_rslstorage import (
    ActorCritic,
    MLPActor,
    MLPCritic,
    NetworkConfig,
    PendulumEnv,
    PPOConfig,
    RNNActor,
    RNNCritic,
    RolloutBuffer,
    RolloutCollector,
    RSLPPOTrainer,
    RSLRunnerConfig,
    intrinsic_weight,
)
from torchrl_rslstorage.trainers.rsl_rl_sections import _ACTIVATIONS

every_robot = pytest.mark.parametrize("robot", ROUGH)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def change(config: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """A copy of the config with one field set, or removed where ``value`` is UNSET."""
    config = copy.deepcopy(config)
    *sections, field = dotted.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[field] = value
    return config


class Groups(EnvBase):
    """An environment that is nothing but its specs."""

    def __init__(self, widths: dict[str, int], num_envs: int = 4, actions: int = 2) -> None:
        super().__init__(batch_size=[num_envs])
        groups = {name: Unbounded((num_envs, width)) for name, width in widths.items()}
        self.observation_spec = Composite(groups, shape=[num_envs])
        self.action_spec = Unbounded((num_envs, actions))
        self.reward_spec = Unbounded((num_envs, 1))

    def _reset(self, tensordict=None, **_):
        raise NotImplementedError

    def _step(self, tensordict):
        raise NotImplementedError

    def _set_seed(self, seed):
        raise NotImplementedError


# -- configs that others ship --------------------------------------------------------------------


@every_layout
@every_robot
def test_the_rough_terrain_configs_of_isaac_lab_load_in_every_layout(robot, layout):
    config = RSLRunnerConfig.read(LAYOUTS[layout](robot))
    experiment_name, entropy_coef = ROUGH[robot]
    assert config.ppo == PPOConfig(entropy_coef=entropy_coef)  # the rest of it are RSL-RL's defaults
    assert config.actor == config.critic == NetworkConfig(hidden_dims=(512, 256, 128))
    assert (config.init_std, config.std_type) == (1.0, "scalar")
    assert (config.num_steps_per_env, config.max_iterations, config.save_interval) == (24, 1500, 50)
    assert (config.seed, config.experiment_name, config.clip_actions) == (42, experiment_name, None)
    assert config.observation_groups == {} and config.rnd is None and config.symmetry is None
    assert config.used["algorithm.entropy_coef"] == entropy_coef
    assert {"device", "logger", "resume", "algorithm.rnd_cfg"} <= config.ignored.keys()
    assert PPOConfig.from_rsl_rl(LAYOUTS[layout](robot)) == config.ppo


@every_layout
def test_config_classes_instances_and_exported_files_say_what_the_dict_says(layout, tmp_path):
    pytest.importorskip("yaml", reason="PyYAML is missing")
    source = LAYOUTS[layout]("go1")
    expected = RSLRunnerConfig.read(source)
    (tmp_path / "agent.yaml").write_text(as_yaml(source))
    configclass = as_configclass(source)
    for other in (as_class("Cfg", source), configclass, configclass(), tmp_path / "agent.yaml"):
        assert RSLRunnerConfig.read(other) == expected
    assert RSLRunnerConfig.read(str(tmp_path / "agent.yaml")) == expected


def test_the_config_that_legged_gym_derives_all_others_from_loads():
    # leggedrobotics/legged_gym, legged_gym/envs/base/legged_robot_config.py, LeggedRobotCfgPPO
    ppo = {k: v for k, v in rough_3x("go1")["algorithm"].items() if not k.endswith("_cfg")}
    policy = {"init_noise_std": 1.0, "actor_hidden_dims": [512, 256, 128], "activation": "elu"}
    runner = {
        "policy_class_name": "ActorCritic",
        "algorithm_class_name": "PPO",
        "num_steps_per_env": 24,
        "max_iterations": 1500,
        "save_interval": 50,
        "experiment_name": "test",
        "run_name": "",
        "resume": False,
        "load_run": -1,
        "checkpoint": -1,
        "resume_path": None,
    }
    source = {"seed": 1, "runner_class_name": "OnPolicyRunner", "policy": policy, "runner": runner}
    config = RSLRunnerConfig.read(as_class("LeggedRobotCfgPPO", {**source, "algorithm": ppo}))
    assert (config.seed, config.max_iterations, config.experiment_name) == (1, 1500, "test")
    assert config.actor.hidden_dims == (512, 256, 128) and config.critic.hidden_dims == (256, 256, 256)
    assert config.defaults["policy.critic_hidden_dims"] == (256, 256, 256)
    recurrent = change(source, "runner.policy_class_name", "ActorCriticRecurrent")
    recurrent = change(recurrent, "policy.rnn_hidden_size", 512)  # its name before rsl_rl 3
    assert RSLRunnerConfig.read(recurrent).actor.arguments()["rnn_hidden_dim"] == 512


def test_the_smallest_config_of_rsl_rls_guide_loads_and_says_which_defaults_it_got():
    # leggedrobotics/rsl_rl, docs/guide/configuration.rst, "Example Configuration"
    source = {
        "runner": {
            "num_steps_per_env": 24,
            "obs_groups": {"actor": ["policy"], "critic": ["policy", "privileged"]},
            "save_interval": 100,
            "algorithm": {"class_name": "PPO"},
            "actor": {"class_name": "MLPModel", "distribution_cfg": {"class_name": "GaussianDistribution"}},
            "critic": {"class_name": "MLPModel"},
        }
    }
    config = RSLRunnerConfig.read(source)
    assert config.ppo == PPOConfig() and config.actor == NetworkConfig()
    assert config.observation_groups == {"actor": ("policy",), "critic": ("policy", "privileged")}
    assert config.max_iterations is None and config.seed is None
    assert config.defaults["algorithm.clip_param"] == 0.2 and "algorithm.clip_param" not in config.used
    lines = config.describe().splitlines()
    assert "used     num_steps_per_env = 24" in lines and "default  actor.activation = 'elu'" in lines


def test_the_config_that_mjlab_writes_loads(tmp_path):
    pytest.importorskip("yaml", reason="PyYAML is missing")
    # mujocolab/mjlab: tuples with Python's tag, RNN fields of networks without one, fields of its own
    source = rough_5x("go1")
    source["obs_groups"] = {"actor": ("actor",), "critic": ("critic",)}
    source |= {"wandb_tags": (), "upload_model": True}
    for name in ("actor", "critic"):
        source[name] = {**source[name], "hidden_dims": (128, 64), "cnn_cfg": None, "rnn_type": None}
        source[name]["rnn_hidden_dim"] = 256
    (tmp_path / "agent.yaml").write_text(as_yaml(source))
    assert "!!python/tuple" in (tmp_path / "agent.yaml").read_text()
    config = RSLRunnerConfig.read(tmp_path / "agent.yaml")
    assert config.actor == config.critic == NetworkConfig(hidden_dims=(128, 64))
    assert config.observation_groups == {"actor": ("actor",), "critic": ("critic",)}
    assert config.ignored["actor.rnn_hidden_dim"].startswith("the class named")


# -- what a field means --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["2.x", "3.x"])
def test_the_runners_empirical_normalization_is_that_of_both_networks_unless_they_say_otherwise(layout):
    source = change(LAYOUTS[layout]("go1"), "empirical_normalization", True)
    config = RSLRunnerConfig.read(source)
    theirs = layout == "2.x"  # 3.x names it per network
    assert config.actor.normalize_observations == config.critic.normalize_observations == theirs
    config = RSLRunnerConfig.read(change(source, "policy.critic_obs_normalization", True))
    assert (config.actor.normalize_observations, config.critic.normalize_observations) == (theirs, True)


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path):
    pytest.importorskip("yaml", reason="PyYAML is missing")
    text = as_yaml(rough_5x("go1")).replace("learning_rate: 0.001", "learning_rate: 3e-4")
    (tmp_path / "agent.yaml").write_text(text)
    assert PPOConfig.from_rsl_rl(tmp_path / "agent.yaml").learning_rate == 3e-4


def test_without_a_target_for_the_kl_the_learning_rate_is_kept():
    config = RSLRunnerConfig.read(change(rough_5x("go1"), "algorithm.desired_kl", None))
    assert config.ppo.schedule == "fixed"


def test_the_actors_observation_set_was_called_policy_before_rsl_rl_4():
    groups = {"policy": ["policy"], "critic": ["policy", "critic"]}
    config = RSLRunnerConfig.read(change(rough_3x("go1"), "obs_groups", groups))
    assert config.observation_groups == {"actor": ("policy",), "critic": ("policy", "critic")}


def test_curiosity_and_symmetry_are_handed_on_but_are_no_hyper_parameters_of_ppo():
    def mirror(env, obs, actions):
        raise NotImplementedError

    symmetry = {"use_data_augmentation": True, "data_augmentation_func": functools.partial(mirror, None)}
    source = change(rough_5x("go1"), "algorithm.symmetry_cfg", symmetry)
    config = RSLRunnerConfig.read(source)
    assert config.symmetry == symmetry and config.rnd is None
    assert RSLRunnerConfig.read(as_configclass(source)).symmetry == symmetry
    with pytest.raises(ValueError, match=r"`algorithm\.symmetry_cfg` is set"):
        PPOConfig.from_rsl_rl(source)
    schedule = {"mode": "linear", "final_value": 0.0, "initial_step": 0, "final_step": 10}
    rnd = {"weight": 0.1, "num_outputs": 2, "weight_schedule": schedule}
    source = change(rough_5x("go1"), "algorithm.rnd_cfg", rnd)
    assert RSLRunnerConfig.read(source).rnd == rnd
    with pytest.raises(ValueError, match=r"`algorithm\.rnd_cfg` is set"):
        PPOConfig.from_rsl_rl(source)
    with pytest.raises(
        ValueError, match=r"`algorithm\.rnd_cfg\.weights`.*Did you mean `algorithm\.rnd_cfg\.weight`"
    ):
        RSLRunnerConfig.read(change(source, "algorithm.rnd_cfg", {**rnd, "weights": 1}))


def negated(env, obs, actions):
    """RSL-RL's form of a mirror: everything changes its sign; ``env`` is the simulator."""
    assert env == "simulator"
    both = None if obs is None else torch.cat([obs, obs.apply(torch.neg)])
    return both, None if actions is None else torch.cat([actions, -actions])


def with_extensions(function: Any) -> dict[str, Any]:
    symmetry = {"use_mirror_loss": True, "mirror_loss_coeff": 0.5, "data_augmentation_func": function}
    rnd = {"weight": 10.0, "num_outputs": 2, "predictor_hidden_dims": [8], "target_hidden_dims": [-1]}
    rnd |= {"activation": "swish", "reward_normalization": True}
    source = change(rough_5x("go1"), "algorithm.symmetry_cfg", symmetry)
    source = change(source, "algorithm.rnd_cfg", rnd)
    groups = {"actor": ["observation"], "critic": ["observation"], "rnd_state": ["observation"]}
    return change(source, "obs_groups", groups)


@pytest.mark.parametrize("function", [negated, f"{__name__}:negated", f"{__name__}.negated"])
def test_curiosity_and_symmetry_of_a_config_train(function):
    config = RSLRunnerConfig.read(with_extensions(function))
    env = PendulumEnv(4, seed=0)
    extensions = config.extensions(env, simulator="simulator", step_dt=0.02)
    rnd, symmetry = extensions["rnd"], extensions["symmetry"]
    assert rnd.weight == pytest.approx(0.2) and rnd.reward_normalizer is not None
    assert [layer.out_features for layer in rnd.target if hasattr(layer, "out_features")] == [3, 2]
    assert isinstance(rnd.predictor[1], torch.nn.SiLU)
    assert symmetry.use_mirror_loss and not symmetry.use_data_augmentation
    actor, critic = config.networks(env)
    collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=RolloutBuffer(4, 4))
    trainer = RSLPPOTrainer(
        collector, actor, critic, total_frames=16, config=config.ppo, progress_bar=False, **extensions
    )
    trainer.train()
    assert trainer.metrics["Loss/symmetry"] > 0 and trainer.metrics["Rnd/weight"] == pytest.approx(0.2)


def test_a_config_without_extensions_has_none():
    assert RSLRunnerConfig.read(rough_5x("go1")).extensions(PendulumEnv(4)) == {}


@pytest.mark.parametrize(
    ("function", "step_dt", "message"),
    [
        ("no_such_module:mirror", 0.02, "'no_such_module:mirror', which cannot be imported"),
        ("torch:no_such_function", 0.02, "'torch:no_such_function', which cannot be imported"),
        ("torch:pi", 0.02, "which is a float and no function"),
        (None, 0.02, "must be a function, or the name of one"),
        (negated, None, "pass step_dt"),
    ],
)
def test_extensions_that_cannot_be_built_are_refused_by_name(function, step_dt, message):
    config = RSLRunnerConfig.read(with_extensions(function))
    with pytest.raises(ValueError, match=message):
        config.extensions(PendulumEnv(4), step_dt=step_dt)


def test_a_curiosity_without_sizes_or_with_an_unknown_activation_is_refused_by_name():
    source = with_extensions(negated)
    for field, value, message in (
        ("num_outputs", UNSET, r"`algorithm\.rnd_cfg\.num_outputs` is missing"),
        ("activation", "step", r"`algorithm\.rnd_cfg\.activation` must be one of .* got 'step'"),
    ):
        changed = change(source, f"algorithm.rnd_cfg.{field}", value)
        if value is UNSET:
            del changed["algorithm"]["rnd_cfg"][field]
        with pytest.raises(ValueError, match=message):
            RSLRunnerConfig.read(changed).extensions(PendulumEnv(4), step_dt=0.02)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rnd_cfg.weight", "much", "must be a number"),
        ("rnd_cfg.weight", None, "must be a number"),
        ("rnd_cfg.weight", float("nan"), "must be a number"),
        ("rnd_cfg.weight", float("inf"), "`weight` must be finite"),
        ("rnd_cfg.learning_rate", None, "must be a number"),
        ("rnd_cfg.learning_rate", "inf", "`learning_rate` must be positive"),
        ("rnd_cfg.num_outputs", 2.5, "must be a whole number"),
        ("rnd_cfg.predictor_hidden_dims", 8, "must be a list of widths"),
        ("rnd_cfg.target_hidden_dims", [-2], "must be at least 1"),
        ("rnd_cfg.activation", None, "must be text"),
        ("rnd_cfg.state_normalization", "no", "must be true or false"),
        ("rnd_cfg.reward_normalization", 1, "must be true or false"),
        ("rnd_cfg.weight_schedule", "linear", "must be a section"),
        ("rnd_cfg.weight_schedule", {"mode": "step", "final_step": "late"}, "must be a number"),
        ("symmetry_cfg.use_data_augmentation", "no", "must be true or false"),
        ("symmetry_cfg.use_mirror_loss", 1, "must be true or false"),
        ("symmetry_cfg.mirror_loss_coeff", None, "must be a number"),
        ("symmetry_cfg.mirror_loss_coeff", "inf", "`mirror_loss_coeff` must be zero or more"),
        ("symmetry_cfg.data_augmentation_func", 3, "must be a function, or the name of one"),
    ],
)
def test_fields_of_extensions_that_are_of_another_type_are_refused_by_name(field, value, message):
    source = change(with_extensions(negated), f"algorithm.{field}", value)
    with pytest.raises(ValueError, match=message) as caught:
        RSLRunnerConfig.read(source).extensions(PendulumEnv(4), step_dt=0.02)
    assert field.rpartition(".")[2] in str(caught.value)


def test_numbers_that_yaml_reads_as_text_are_numbers_in_extensions_as_well():
    schedule = {"mode": "linear", "initial_step": "1e1", "final_step": "2e1", "final_value": "0"}
    source = with_extensions(negated)
    for field, value in (
        ("rnd_cfg.weight", "1e1"),
        ("rnd_cfg.learning_rate", "1e-4"),
        ("rnd_cfg.weight_schedule", schedule),
        ("rnd_cfg.activation", "Swish"),
        ("symmetry_cfg.mirror_loss_coeff", "5e-1"),
    ):
        source = change(source, f"algorithm.{field}", value)
    made = RSLRunnerConfig.read(source).extensions(PendulumEnv(4), step_dt=0.02)
    rnd = made["rnd"]
    assert rnd.weight == pytest.approx(0.2) and rnd.learning_rate == 1e-4
    assert intrinsic_weight(15, rnd.weight, rnd.weight_schedule) == pytest.approx(0.1)
    assert made["symmetry"].mirror_loss_coeff == 0.5


def test_a_number_that_is_none_is_refused_wherever_it_stands():
    for field in ("actor.distribution_cfg.init_std", "clip_actions", "algorithm.max_grad_norm"):
        with pytest.raises(ValueError, match=f"`{field}` is nan: it must be a number"):
            RSLRunnerConfig.read(change(rough_5x("go1"), field, float("nan")))


def test_where_there_is_no_distribution_the_fields_before_it_are_read():
    source = change(LAYOUTS["4.x"]("go1"), "actor.distribution_cfg", None)
    config = RSLRunnerConfig.read(change(source, "actor.init_noise_std", 0.3))
    assert config.init_std == 0.3 and "actor.distribution_cfg" in config.ignored


# -- networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _ACTIVATIONS)
def test_every_activation_of_rsl_rl_is_the_same_function_here(name):
    config = RSLRunnerConfig.read(change(rough_5x("go1"), "actor.activation", name))
    actor, _ = config.networks(Groups({"policy": 3}))
    x = torch.linspace(-4, 4, 101)
    assert torch.equal(actor.mlp[1](x.clone()), resolve_nn_activation(name)(x))  # ours may write into it


@pytest.mark.parametrize("rnn_type", [None, "lstm", "gru"])
def test_networks_have_the_shapes_of_those_that_rsl_rl_builds(rnn_type):
    source = rough_5x("go1")
    source["obs_groups"] = {"actor": ["observation"], "critic": ["observation", "privileged"]}
    for name in ("actor", "critic"):
        source[name] |= {"hidden_dims": [12, 7], "obs_normalization": True}
        if rnn_type:
            source[name] |= {"class_name": "RNNModel", "rnn_type": rnn_type, "rnn_hidden_dim": 5}
            source[name] |= {"rnn_num_layers": 2}
    source["actor"]["distribution_cfg"] |= {"init_std": 0.25, "std_type": "log"}
    actor, critic = RSLRunnerConfig.read(source).networks(Groups(Problem.WIDTHS))
    assert isinstance(actor, RNNActor if rnn_type else MLPActor)
    assert isinstance(critic, RNNCritic if rnn_type else MLPCritic)
    model = RNNModel if rnn_type else MLPModel
    rnn = {"rnn_type": rnn_type, "rnn_hidden_dim": 5, "rnn_num_layers": 2} if rnn_type else {}
    network = {"hidden_dims": [12, 7], "obs_normalization": True, **rnn}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 0.25, "std_type": "log"}
    observations, groups = Problem(1, 4).observe(), source["obs_groups"]
    theirs = (
        model(observations, groups, "actor", 2, distribution_cfg=gaussian, **network),
        model(observations, groups, "critic", 1, **network),
    )
    for ours, rsl_rl in zip((actor, critic), theirs, strict=True):
        shapes = [[tuple(p.shape) for p in module.parameters()] for module in (ours, rsl_rl)]
        assert shapes[0] == shapes[1]
    assert torch.allclose(actor.std, torch.full((2,), 0.25))


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_config_with_unlike_networks_trains(recurrent):
    source = change(rough_5x("go1"), "critic.hidden_dims", [32])
    source = change(source, "actor.hidden_dims", [16])
    source["obs_groups"] = {"actor": ["observation"], "critic": ["observation"]}
    if recurrent:
        source["actor"] |= {"class_name": "RNNModel", "rnn_type": "gru", "rnn_hidden_dim": 8}
    config = RSLRunnerConfig.read(source)
    env = PendulumEnv(8)
    actor, critic = config.networks(env)
    buffer = RolloutBuffer(config.num_steps_per_env, 8)
    collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer)
    frames = config.num_steps_per_env * 8
    trainer = RSLPPOTrainer(
        collector, actor, critic, total_frames=frames, config=config.ppo, progress_bar=False
    )
    before = [p.detach().clone() for p in (*actor.parameters(), *critic.parameters())]
    trainer.train()
    assert trainer.num_iterations == 1
    after = (*actor.parameters(), *critic.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_groups_that_the_config_does_not_name_are_found_as_rsl_rl_finds_them():
    config = RSLRunnerConfig.read(rough_5x("go1"))
    _, critic = config.networks(Groups({"policy": 3, "critic": 5}))
    assert critic.observation_keys == ["critic"]
    actor, critic = config.networks(Groups({"policy": 3}))
    assert actor.observation_keys == critic.observation_keys == ["policy"]
    with pytest.raises(KeyError, match=r"no observation groups for 'actor'.*'observation'.*groups="):
        config.networks(PendulumEnv(4))
    observation = ["observation"]
    actor, critic = config.networks(PendulumEnv(4), {"actor": observation, "critic": observation})
    assert actor.observation_keys == critic.observation_keys == observation


# -- what is refused -----------------------------------------------------------------------------


@every_layout
def test_a_field_that_is_not_known_is_refused_by_its_name_wherever_it_stands(layout):
    source = LAYOUTS[layout]("anymal_c")
    sections = ["", *(f"{name}." for name in ("policy", "actor", "critic", "algorithm") if name in source)]
    sections = [name for name in sections if source.get(name[:-1]) is not UNSET]
    if layout == "5.x":
        sections.append("actor.distribution_cfg.")
    for section in sections:
        for value in (1, None, {}, {"a": 1}):
            changed = change(source, f"{section}gravity", value)
            if value == {}:  # nobody has set it
                RSLRunnerConfig.read(changed)
                continue
            with pytest.raises(ValueError, match=rf"no field `{section}gravity`".replace(".", r"\.")):
                RSLRunnerConfig.read(changed)
            with pytest.raises(ValueError, match=rf"no field `{section}gravity`".replace(".", r"\.")):
                PPOConfig.from_rsl_rl(as_configclass(changed))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("class_name", "DistillationRunner", "'DistillationRunner', but only 'OnPolicyRunner'"),
        ("algorithm.class_name", "my.module:AMPPPO", "'AMPPPO', but only 'PPO'"),
        ("algorithm.optimizer", "sgd", "only 'adam'"),
        ("algorithm.use_mixed_precision", True, "mixed precision is not supported"),
        ("algorithm.share_cnn_encoders", True, "no CNN"),
        ("algorithm.schedule", "linear", r"\['adaptive', 'fixed'\]"),
        ("algorithm.gamma", 1.5, "between 0 and 1"),
        ("algorithm.learning_rate", "fast", "must be a number"),
        ("algorithm.learning_rate", True, "must be a number"),
        ("algorithm.num_mini_batches", 4.5, "whole number"),
        ("algorithm.num_mini_batches", 0, "at least 1"),
        ("algorithm.use_clipped_value_loss", 1, "true or false"),
        ("algorithm", 3, "`algorithm` must be a section"),
        ("algorithm.rnd_cfg", "yes", "`algorithm.rnd_cfg` must be a section"),
        ("actor.class_name", "CNNModel", "'MLPModel' or 'RNNModel'"),
        ("actor.cnn_cfg", {"policy": {"kernel_size": 3}}, "no CNN"),
        ("actor.activation", "sine", "must be one of"),
        ("actor.hidden_dims", [-1], "-1 .as wide as the input. is not supported"),
        ("actor.hidden_dims", [], "list of widths"),
        ("actor.hidden_dims", 64, "list of widths"),
        ("actor.distribution_cfg.class_name", "BetaDistribution", "only 'GaussianDistribution'"),
        ("actor.distribution_cfg.learn_std", False, "learned std"),
        ("actor.distribution_cfg.std_range", [0.05, 0.5], "clamped to this range"),
        ("actor.distribution_cfg.std_type", "sqrt", r"one of \['log', 'scalar'\]"),
        ("actor.distribution_cfg", None, "`actor.distribution_cfg` is missing"),
        ("actor.distribution_cfg", "normal", "`actor.distribution_cfg` must be a section"),
        ("critic.distribution_cfg", {"class_name": "GaussianDistribution"}, "critic is not stochastic"),
        ("critic", UNSET, "`critic` is missing"),
        ("actor", UNSET, "neither `actor` and `critic` nor `policy`"),
        ("num_steps_per_env", UNSET, "`num_steps_per_env` is missing"),
        ("save_interval", UNSET, "`save_interval` is missing"),
        ("experiment_name", 3, "must be text"),
        ("obs_groups", {"actor": []}, "at least one group"),
        ("obs_groups", {"actor": "policy"}, "at least one group"),
        ("obs_groups", ["policy"], "map observation sets"),
        ("runner", {"seed": 1}, "`seed` stands both at the top and under `runner`"),
        ("runner", 1, "`runner` must be a section"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_field_and_the_reason(field, value, said):
    with pytest.raises(ValueError, match=said) as caught:
        RSLRunnerConfig.read(change(rough_5x("go2"), field, value))
    if value is not UNSET and "runner" not in field:
        assert f"`{field}`" in str(caught.value) or f"`{field.rpartition('.')[2]}`" in str(caught.value)


def test_layouts_before_5_refuse_what_cannot_be_honoured_as_well():
    with pytest.raises(ValueError, match=r"`policy.state_dependent_std` is True"):
        RSLRunnerConfig.read(change(rough_3x("go1"), "policy.state_dependent_std", True))
    with pytest.raises(ValueError, match=r"`policy.class_name` is 'StudentTeacher'"):
        RSLRunnerConfig.read(change(rough_3x("go1"), "policy.class_name", "StudentTeacher"))
    with pytest.raises(ValueError, match=r"`actor.stochastic` is False"):
        RSLRunnerConfig.read(change(LAYOUTS["4.x"]("go1"), "actor.stochastic", False))
    with pytest.raises(ValueError, match=r"`actor.distribution_cfg` is missing"):
        RSLRunnerConfig.read(change(LAYOUTS["4.x"]("go1"), "actor.init_noise_std", UNSET))


@pytest.mark.parametrize("source", [None, 3, [], ["a"], print])
def test_what_is_no_config_is_refused(source):
    with pytest.raises(ValueError, match="A config is a dict, the path of a YAML file, or a config class"):
        RSLRunnerConfig.read(source)


def test_files_that_are_missing_broken_or_dangerous_are_refused(tmp_path):
    pytest.importorskip("yaml", reason="PyYAML is missing")
    with pytest.raises(ValueError, match="There is no config"):
        RSLRunnerConfig.read(tmp_path / "none.yaml")
    harm = tmp_path / "harm"
    for text, said in (
        ("a: [1, ", "is not a YAML file"),
        ("- 1", "holds list and not a mapping"),
        (f"seed: !!python/object/apply:os.mkdir ['{harm}']", "more than plain values and was not read"),
        ("seed: !!python/name:os.system ''", "more than plain values and was not read"),
    ):
        (tmp_path / "agent.yaml").write_text(text)
        with pytest.raises(ValueError, match=said) as caught:
            RSLRunnerConfig.read(tmp_path / "agent.yaml")
        assert "\n" not in str(caught.value)
    assert not harm.exists()
    with pytest.raises(ValueError, match=rf"The config {tmp_path} cannot be read: Is a directory"):
        RSLRunnerConfig.read(tmp_path)
    (tmp_path / "agent.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a YAML file"):
        RSLRunnerConfig.read(tmp_path / "agent.yaml")


def test_a_config_that_holds_itself_is_refused(tmp_path):
    pytest.importorskip("yaml", reason="PyYAML is missing")
    (tmp_path / "agent.yaml").write_text("runner: &all\n  runner: *all\n")
    with pytest.raises(ValueError, match="The config holds itself"):
        RSLRunnerConfig.read(tmp_path / "agent.yaml")


def test_values_that_are_no_section_are_refused_by_their_field(tmp_path):
    with pytest.raises(ValueError, match=r"`seed` is datetime.date\(2001, 1, 1\): it must be a whole number"):
        RSLRunnerConfig.read(change(rough_5x("go1"), "seed", datetime.date(2001, 1, 1)))


def test_numbers_of_numpy_are_numbers():
    source = change(rough_5x("go1"), "algorithm.learning_rate", np.float32(0.5))
    source = change(source, "num_steps_per_env", np.int64(7))
    config = RSLRunnerConfig.read(source)
    assert config.ppo.learning_rate == 0.5 and type(config.ppo.learning_rate) is float
    assert config.num_steps_per_env == 7 and type(config.num_steps_per_env) is int


def test_a_config_class_with_slots_is_read_as_any_other():
    @dataclasses.dataclass(slots=True)
    class Algorithm:
        gamma: float = 0.5

    assert RSLRunnerConfig.read(change(rough_5x("go1"), "algorithm", Algorithm())).ppo.gamma == 0.5


def test_without_pyyaml_a_file_asks_for_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"pip install torchrl-rslstorage\[yaml\]"):
        RSLRunnerConfig.read(tmp_path / "agent.yaml")


def test_reading_changes_nothing_in_the_source():
    source = rough_5x("go1")
    before = repr(source)
    RSLRunnerConfig.read(source)
    assert repr(source) == before


def test_a_copied_config_is_read_like_its_original():
    assert RSLRunnerConfig.read(copy.deepcopy(rough_3x("go1"))) == RSLRunnerConfig.read(rough_3x("go1"))
