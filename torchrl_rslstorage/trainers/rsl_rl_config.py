"""RSL-RL's runner configs, of every layout that is around, read without RSL-RL or Isaac Lab.

    layout                     networks                                 found in
    5.x                        actor, critic: …, distribution_cfg: …    rsl_rl 5, Isaac Lab 3, mjlab
    4.x                        actor, critic: …, init_noise_std, …      rsl_rl 4
    3.x and older              policy: actor_hidden_dims, …             Isaac Lab 2, legged_gym

Every field is used, ignored with a reason, or refused by its name. Field names and defaults: rsl_rl 5.5.1
(models, algorithms/ppo.py, runners/on_policy_runner.py), Isaac Lab (isaaclab_rl/rsl_rl/rl_cfg.py), mjlab
(rl/config.py), legged_gym (envs/base/legged_robot_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict.utils import NestedKey
from torchrl.envs import EnvBase

from torchrl_rslstorage.data.leaves import show_all
from torchrl_rslstorage.modules import GaussianActor, MLPActor, MLPCritic, RNNActor, RNNCritic, ValueCritic
from torchrl_rslstorage.modules.heads import StdType
from torchrl_rslstorage.modules.observations import spec_keys
from torchrl_rslstorage.trainers.config import PPOConfig
from torchrl_rslstorage.trainers.config_fields import (
    Fields,
    Notes,
    flag,
    integer,
    number,
    or_none,
    positive,
    text,
)
from torchrl_rslstorage.trainers.config_sources import plain_config
from torchrl_rslstorage.trainers.rsl_rl_extensions import curiosity_of, symmetry_of
from torchrl_rslstorage.trainers.rsl_rl_sections import (
    RND,
    SYMMETRY,
    NetworkConfig,
    carried,
    models,
    observation_sets,
    policy,
    ppo,
)


@dataclass(frozen=True)
class RSLRunnerConfig:
    """What an RSL-RL runner config says, in this package's terms; made by `read`.

    Examples:
        >>> from torchrl_rslstorage import PendulumEnv, RSLRunnerConfig
        >>> config = RSLRunnerConfig.read(
        ...     {
        ...         "num_steps_per_env": 24,
        ...         "save_interval": 50,
        ...         "device": "cuda:0",
        ...         "obs_groups": {"actor": ["observation"], "critic": ["observation"]},
        ...         "actor": {
        ...             "hidden_dims": [64],
        ...             "distribution_cfg": {"class_name": "GaussianDistribution"},
        ...         },
        ...         "critic": {"hidden_dims": [128]},
        ...         "algorithm": {"gamma": 0.98},
        ...     }
        ... )
        >>> config.ppo.gamma, config.critic.hidden_dims, config.ignored
        (0.98, (128,), {'device': 'the device is chosen where environment and networks are made'})
        >>> actor, critic = config.networks(PendulumEnv(num_envs=4))
        >>> critic.mlp[0].out_features
        128
    """

    ppo: PPOConfig
    """Hyper-parameters of PPO."""
    actor: NetworkConfig
    """Shape of the actor."""
    critic: NetworkConfig
    """Shape of the critic."""
    init_std: float
    """Standard deviation of the policy at the start."""
    std_type: StdType
    """Whether the standard deviation is learned, or its logarithm."""
    num_steps_per_env: int
    """T, steps of one window."""
    save_interval: int
    """Iterations between checkpoints."""
    max_iterations: int | None
    """Windows to train on; None where the config leaves it to the script."""
    seed: int | None
    """Seed of the run; None where the config leaves it to the script."""
    experiment_name: str
    """Name of the experiment."""
    observation_groups: dict[str, tuple[str, ...]]
    """The observation groups of "actor" and "critic" (and of others), where the config names them."""
    clip_actions: float | None
    """Bound that the environment's wrapper clips actions to; None for none."""
    rnd: dict[str, Any] | None
    """``rnd_cfg``, its fields checked one by one; `extensions` builds it."""
    symmetry: dict[str, Any] | None
    """``symmetry_cfg``, its fields checked one by one; `extensions` builds it."""
    used: dict[str, object]
    """The fields that were used, by their dotted names, with the values as they were understood."""
    defaults: dict[str, object]
    """The fields that the config leaves out, with the value used instead: the default of rsl_rl 5.5.1."""
    ignored: dict[str, str]
    """The fields that were not used, and why."""

    @classmethod
    def read(cls, source: object) -> RSLRunnerConfig:
        """Reads a runner config.

        Args:
            source: a dict, the path of a YAML file (Isaac Lab's ``agent.yaml``), or a config class or
                instance as of Isaac Lab, mjlab or legged_gym.

        Raises:
            ValueError: a field is unknown, missing, of another type, or asks for what this package does not
                do; the message names it.
            ImportError: a YAML file, and PyYAML is missing.
        """
        values = plain_config(source)
        runner = values.pop("runner", {})
        if not isinstance(runner, dict):
            raise ValueError(f"`runner` must be a section with fields, got {runner!r}.")
        twice = sorted(runner.keys() & values.keys())
        if twice:
            raise ValueError(f"`{twice[0]}` stands both at the top and under `runner`: keep one of them.")
        notes = Notes()
        top = Fields("", {**values, **runner}, notes)
        for name, choice in (
            ("class_name", "OnPolicyRunner"),
            ("runner_class_name", "OnPolicyRunner"),
            ("algorithm_class_name", "PPO"),
        ):
            top.must_be(name, (choice,), "other algorithms and runners have configs of their own")
        normalize = top.take("empirical_normalization", flag, False)
        networks = models(top, normalize) if "actor" in top else policy(top, normalize)
        algorithm = top.section("algorithm") if "algorithm" in top else Fields("algorithm", {}, notes)
        rnd, symmetry = (
            carried(algorithm, name, known) for name, known in (("rnd_cfg", RND), ("symmetry_cfg", SYMMETRY))
        )
        config = cls(
            ppo=ppo(algorithm),
            **networks,
            num_steps_per_env=_required(top, "num_steps_per_env"),
            save_interval=_required(top, "save_interval"),
            max_iterations=top.take("max_iterations", or_none(positive), None),
            seed=top.take("seed", or_none(integer), None),
            experiment_name=top.take("experiment_name", text, ""),
            observation_groups=top.take("obs_groups", observation_sets, {}),
            clip_actions=top.take("clip_actions", or_none(number), None),
            rnd=rnd,
            symmetry=symmetry,
            used=notes.used,
            defaults=notes.defaults,
            ignored=notes.ignored,
        )
        _ignore_the_rest(top)
        top.refuse_unknown()
        return config

    def networks(
        self, env: EnvBase, groups: Mapping[str, Sequence[NestedKey]] | None = None
    ) -> tuple[GaussianActor, ValueCritic]:
        """The actor and the critic that the config describes, sized for an environment.

        Args:
            env: any TorchRL environment of batch size ``[N]``.
            groups: the observation groups of "actor" and "critic" in place of the config's. Where neither
                names a set it is the group of that name, or "policy", as in RSL-RL (rsl_rl 5.5.1,
                utils/utils.py, ``resolve_obs_groups``).

        Raises:
            KeyError, TypeError, ValueError: the environment's observations or actions do not fit.
        """
        named: dict[str, Sequence[NestedKey]] = {**self.observation_groups, **(groups or {})}
        actor_class = RNNActor if self.actor.rnn_type else MLPActor
        critic_class = RNNCritic if self.critic.rnn_type else MLPCritic
        actor = actor_class.for_env(
            env,
            _resolve(named, "actor", env),
            init_std=self.init_std,
            std_type=self.std_type,
            **self.actor.arguments(),
        )
        return actor, critic_class.for_env(env, _resolve(named, "critic", env), **self.critic.arguments())

    def extensions(
        self, env: EnvBase, *, simulator: Any = None, step_dt: float | None = None
    ) -> dict[str, Any]:
        """The curiosity and the symmetry that the config has, as `RSLPPOTrainer` takes them.

        ``RSLPPOTrainer(..., config=config.ppo, **config.extensions(env, step_dt=0.02))``

        Args:
            env: the environment that is trained in.
            simulator: what RSL-RL's ``data_augmentation_func`` is given as ``env``.
            step_dt: seconds of an environment step, which the weight of ``rnd_cfg`` is multiplied by.

        Raises:
            ValueError: a field is missing or out of its range, the function cannot be imported, or the
                config has curiosity and no ``step_dt`` was given.
        """
        made: dict[str, Any] = {}
        if self.symmetry is not None:
            made["symmetry"] = symmetry_of(self.symmetry, simulator)
        if self.rnd is not None:
            if step_dt is None:
                raise ValueError(
                    "`algorithm.rnd_cfg` is set, whose weight counts per second: pass step_dt, the seconds "
                    "of an environment step."
                )
            groups = _resolve(dict(self.observation_groups), "rnd_state", env)
            made["rnd"] = curiosity_of(self.rnd, env, groups, step_dt)
        return made

    def require_nothing_beside_ppo(self) -> None:
        """Refuses a config of which PPO's hyper-parameters are not the whole algorithm.

        Raises:
            ValueError: it has curiosity or symmetry.
        """
        for name, section in (("rnd_cfg", self.rnd), ("symmetry_cfg", self.symmetry)):
            if section is not None:
                raise ValueError(
                    f"`algorithm.{name}` is set, which hyper-parameters of PPO alone cannot honour: train "
                    "from Python, with RSLRunnerConfig.read and its `extensions`, or set it to null."
                )

    def describe(self) -> str:
        """A line for each field: what was used, what was left at its default, what was ignored and why."""
        lines = [f"used     {name} = {value!r}" for name, value in self.used.items()]
        lines += [f"default  {name} = {value!r}" for name, value in self.defaults.items()]
        lines += [f"ignored  {name}: {reason}" for name, reason in self.ignored.items()]
        return "\n".join(lines)


def _ignore_the_rest(top: Fields) -> None:
    top.ignore("device", reason="the device is chosen where environment and networks are made")
    top.ignore(
        *("run_name", "logger", "neptune_project", "wandb_project", "wandb_tags", "upload_model"),
        reason="logging is set up where the trainer is made",
    )
    top.ignore(
        *("resume", "load_run", "load_checkpoint", "checkpoint", "resume_path"),
        reason="checkpoints are loaded with load_rsl_rl_checkpoint",
    )
    top.ignore("check_for_nan", reason="windows are always checked")
    top.ignore("multi_gpu", reason="RSL-RL's runner writes it, nobody configures it")
    top.ignore("torch_compile_mode", reason="the trainer compiles with compile=True")


def _required(top: Fields, name: str) -> int:
    if name not in top:
        raise ValueError(f"`{name}` is missing, which every RSL-RL runner config has.")
    return top.take(name, positive, 1)


def _resolve(named: Mapping[str, Sequence[NestedKey]], name: str, env: EnvBase) -> Sequence[NestedKey]:
    there = spec_keys(env.observation_spec)
    if name in named:
        return named[name]
    for group in (name, "policy"):
        if group in there:
            return [group]
    raise KeyError(
        f"The config names no observation groups for {name!r}, and the environment has neither {name!r} nor "
        f"'policy', but {show_all(there)}: pass groups={{{name!r}: [...]}}."
    )
