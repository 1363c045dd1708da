"""RSL-RL runner configs as others ship them: their values, in the layouts they are found in.

Isaac Lab: isaac-sim/IsaacLab, source/isaaclab_tasks/isaaclab_tasks/manager_based/locomotion/velocity/config/
{anymal_c,anymal_d,go1,go2}/agents/rsl_rl_ppo_cfg.py, with the defaults of source/isaaclab_rl/isaaclab_rl/
rsl_rl/rl_cfg.py, read in the versions of 2025 (layout 3.x) and 2026 (layout 5.x).
"""

from __future__ import annotations

import dataclasses
from typing import Any

UNSET = dataclasses.MISSING
ROUGH = {
    "anymal_c": ("anymal_c_rough", 0.005),
    "anymal_d": ("anymal_d_rough", 0.005),
    "go1": ("unitree_go1_rough", 0.01),
    "go2": ("unitree_go2_rough", 0.01),
}
"""Experiment name and entropy coefficient: in all else these four are the same."""
WIDTHS = [512, 256, 128]


def algorithm(entropy_coef: float) -> dict[str, Any]:
    return {
        "class_name": "PPO",
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "learning_rate": 1.0e-3,
        "schedule": "adaptive",
        "gamma": 0.99,
        "lam": 0.95,
        "entropy_coef": entropy_coef,
        "desired_kl": 0.01,
        "max_grad_norm": 1.0,
        "value_loss_coef": 1.0,
        "use_clipped_value_loss": True,
        "clip_param": 0.2,
        "normalize_advantage_per_mini_batch": False,
        "rnd_cfg": None,
        "symmetry_cfg": None,
    }


def runner(robot: str) -> dict[str, Any]:
    experiment_name, entropy_coef = ROUGH[robot]
    return {
        "seed": 42,
        "device": "cuda:0",
        "num_steps_per_env": 24,
        "max_iterations": 1500,
        "empirical_normalization": UNSET,
        "obs_groups": UNSET,
        "clip_actions": None,
        "save_interval": 50,
        "experiment_name": experiment_name,
        "run_name": "",
        "logger": "tensorboard",
        "neptune_project": "isaaclab",
        "wandb_project": "isaaclab",
        "resume": False,
        "load_run": ".*",
        "load_checkpoint": "model_.*.pt",
        "class_name": "OnPolicyRunner",
        "algorithm": algorithm(entropy_coef),
    }


def rough_3x(robot: str) -> dict[str, Any]:
    """Isaac Lab 2.3: one section `policy`."""
    policy = {
        "class_name": "ActorCritic",
        "init_noise_std": 1.0,
        "noise_std_type": "scalar",
        "state_dependent_std": False,
        "actor_obs_normalization": False,
        "critic_obs_normalization": False,
        "actor_hidden_dims": WIDTHS,
        "critic_hidden_dims": WIDTHS,
        "activation": "elu",
    }
    return {**runner(robot), "policy": policy}


def rough_2x(robot: str) -> dict[str, Any]:
    """Isaac Lab 2.0: normalisation is the runner's business."""
    config = rough_3x(robot)
    for name in ("obs_groups", "clip_actions", "class_name"):
        del config[name]
    for name in ("actor_obs_normalization", "critic_obs_normalization", "state_dependent_std"):
        del config["policy"][name]
    return {**config, "empirical_normalization": False}


def rough_4x(robot: str) -> dict[str, Any]:
    """Models whose noise is theirs."""
    model = {"class_name": "MLPModel", "hidden_dims": WIDTHS, "activation": "elu", "obs_normalization": False}
    noise = {"init_noise_std": 1.0, "noise_std_type": "scalar", "state_dependent_std": False}
    actor = {**model, **noise, "stochastic": True}
    critic = {**model, **noise, "stochastic": False, "init_noise_std": UNSET}
    config = {**runner(robot), "actor": actor, "critic": critic, "policy": UNSET}
    config["algorithm"] = {**config["algorithm"], "optimizer": "adam", "share_cnn_encoders": False}
    return config


def rough_5x(robot: str) -> dict[str, Any]:
    """Isaac Lab 3: models with a distribution, beside what is left of 4.x."""
    config = rough_4x(robot)
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    for name, distribution in (("actor", gaussian), ("critic", None)):
        model = {**config[name], "stochastic": UNSET, "init_noise_std": UNSET}
        config[name] = {**model, "distribution_cfg": distribution}
    return config


LAYOUTS = {"2.x": rough_2x, "3.x": rough_3x, "4.x": rough_4x, "5.x": rough_5x}


def as_class(name: str, config: dict[str, Any]) -> type:
    """The config as a class with nested classes, as legged_gym writes them."""
    return type(name, (), {k: as_class(k, v) if isinstance(v, dict) else v for k, v in config.items()})


def as_configclass(config: dict[str, Any]) -> type:
    """The config as a dataclass whose sections are instances, as Isaac Lab's ``configclass`` makes it."""
    made: list[tuple[str, Any, Any]] = []
    for name, value in config.items():
        if isinstance(value, dict):
            made.append((name, Any, dataclasses.field(default_factory=as_configclass(value))))
        elif isinstance(value, list):
            made.append((name, Any, dataclasses.field(default_factory=lambda value=value: list(value))))
        else:
            # A field that is MISSING has a default too: dataclasses know no other way to put it there.
            default = dataclasses.field(default_factory=lambda value=value: value)
            made.append((name, Any, default))

    def to_dict(self):
        raise AssertionError("a method is no field")

    nested = dataclasses.make_dataclass("Nested", [])
    return dataclasses.make_dataclass("Config", made, namespace={"to_dict": to_dict, "ScheduleCfg": nested})


def as_yaml(config: dict[str, Any]) -> str:
    """The config as Isaac Lab's ``agent.yaml`` has it: what is missing is ``{}``, tuples have a tag."""
    import yaml

    def plain(value: Any) -> Any:
        if value is UNSET:
            return {}
        return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

    return yaml.dump(plain(config), default_flow_style=False, sort_keys=False)
