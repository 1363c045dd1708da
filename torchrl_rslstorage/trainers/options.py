"""The options of a training run, as the command line and ``config.json`` have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from torchrl_rslstorage.modules.heads import Activation, StdType
from torchrl_rslstorage.trainers.config import AMPConfig, PPOConfig
from torchrl_rslstorage.trainers.rsl_rl_config import RSLRunnerConfig
from torchrl_rslstorage.trainers.run_folder import RunFolderError

if TYPE_CHECKING:
    Task = str
else:
    try:
        from tyro.conf import Positional

        Task = Positional[str]
    except ImportError:  # without the extra "cli" there is no command line to parse
        Task = str


@dataclass
class TaskDefaults:
    """What a task brings where an option is left out."""

    num_envs: int
    num_steps_per_env: int
    max_iterations: int
    hidden_dims: tuple[int, ...]
    rnn_hidden_dim: int
    obs_normalization: bool
    init_std: float


PENDULUM = TaskDefaults(256, 24, 110, (64, 64), 64, False, 1.0)
"""The embedded task: 676 thousand transitions, half a minute of training on two cores."""
HIDDEN_VELOCITY = dataclasses.replace(PENDULUM, max_iterations=250)
"""The embedded task that takes memory: 1.5 million transitions, two minutes with an LSTM."""
POINT_MASS = dataclasses.replace(PENDULUM, max_iterations=100, init_std=0.3)
"""The embedded task of motions: 614 thousand transitions."""
GYMNASIUM = TaskDefaults(64, 32, 489, (256, 128), 256, True, 0.5)
"""Any Gymnasium id: one million transitions. MuJoCo's actions lie in [−1, 1], which RSL-RL's std of 1 spends
a third of its samples outside of; with half of it HalfCheetah learned twice as much (README, Learning)."""

Options = TypeVar("Options", bound="RunOptions")

_AT_LEAST_ONE = (
    "num_envs",
    "num_steps_per_env",
    "max_iterations",
    "save_interval",
    "num_threads",
    "rnn_hidden_dim",
    "rnn_num_layers",
)


@dataclass
class RunOptions:
    """What every kind of run can be told; names and defaults are RSL-RL's where RSL-RL has them."""

    task_defaults: ClassVar[Mapping[str, TaskDefaults]] = {
        "pendulum": PENDULUM,
        "pendulum-hidden-velocity": HIDDEN_VELOCITY,
        "point-mass": POINT_MASS,
    }
    other_defaults: ClassVar[TaskDefaults] = GYMNASIUM
    algorithms: ClassVar[Mapping[str, type]] = {}
    """The options that are a config of their own, which has a ``check``, by name."""

    task: Task = "pendulum"
    """"pendulum", "pendulum-hidden-velocity" or "point-mass" (embedded), or any Gymnasium id."""
    seed: int = 0
    """Seeds networks, environments and mini-batches; under torchrun process r has seed + r."""
    run_dir: Path | None = None
    """Folder of this run; by default runs/TASK-DATE-TIME."""
    num_envs: int | None = None
    """Parallel environments (pendulum 256, Gymnasium 64); under torchrun those of each process."""
    num_steps_per_env: int | None = None
    """Steps of one window (pendulum 24, Gymnasium 32)."""
    max_iterations: int | None = None
    """Windows to train on (pendulum 110, without its velocity 250; Gymnasium 489, a million transitions)."""
    policy: Literal["mlp", "lstm", "gru"] = "mlp"
    """Networks without memory, or with an RNN before the hidden layers."""
    rnn_hidden_dim: int | None = None
    """Width of the RNN of an lstm or gru policy (pendulum 64, Gymnasium 256)."""
    rnn_num_layers: int = 1
    """Layers of that RNN."""
    hidden_dims: tuple[int, ...] | None = None
    """Hidden layers of actor and critic (pendulum 64 64, Gymnasium 256 128)."""
    activation: Activation = "elu"
    """Activation of the hidden layers."""
    obs_normalization: bool | None = None
    """Normalise observations by their running moments (pendulum no, Gymnasium yes)."""
    clip_actions: bool = True
    """Clip actions to a Gymnasium task's bounds before the task sees them."""
    init_std: float | None = None
    """Standard deviation of the policy at the start (pendulum 1, Gymnasium 0.5)."""
    std_type: StdType = "scalar"
    """Learn the standard deviation, or its logarithm."""
    device: str = "cpu"
    """Where everything runs: cpu, cuda, cuda:1, …; under torchrun cpu, or cuda for a GPU each."""
    num_threads: int = 1
    """CPU threads of torch: for small networks one is fastest, and on a busy machine by far."""
    logger: Literal["csv", "tensorboard"] = "csv"
    """Scalars always go to CSV files; "tensorboard" writes event files as well."""
    save_interval: int = 50
    """Iterations between checkpoints."""
    progress_bar: bool = True
    """Show a progress bar."""

    def resolved(self: Options) -> Options:
        """These options with the task's own values for what was left out.

        Raises:
            ValueError: a number is out of its range.
        """
        defaults = self.task_defaults.get(self.task, self.other_defaults)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for f in fields(defaults):
            if values[f.name] is None:
                values[f.name] = getattr(defaults, f.name)
        for name in _AT_LEAST_ONE:
            if values[name] < 1:
                raise ValueError(f"`{name}` must be at least 1, got {values[name]}.")
        check_seed(self.seed)
        for name in self.algorithms:
            values[name].check()
        values["hidden_dims"] = tuple(values["hidden_dims"])
        return type(self)(**values)

    def as_config(self) -> dict[str, Any]:
        """Everything, as ``config.json`` keeps it; ``run_dir`` is the folder itself and left out."""
        config = asdict(self)
        del config["run_dir"]
        return config

    @classmethod
    def from_config(cls: type[Options], config: Mapping[str, Any], run_dir: Path) -> Options:
        """Reads back what `as_config` wrote.

        Raises:
            RunFolderError: an entry is unknown or missing: another program or version wrote it.
        """
        try:
            algorithms = {name: kind(**config[name]) for name, kind in cls.algorithms.items()}
            return cls(**{**config, **algorithms, "run_dir": run_dir}).resolved()
        except (TypeError, KeyError, ValueError) as error:
            raise RunFolderError(
                f"{run_dir / 'config.json'} is not a config of this version: {error}."
            ) from error


@dataclass
class StyleOptions(AMPConfig):
    """`AMPConfig` with two numbers that tasks bring where they are left out.

    Slopes are counted per standard deviation of a state. Where states have four numbers, the policy's and the
    demonstrations' are a few of those apart, and a robot's of a hundred numbers ten times as far: the
    penalty that suits the one flattens the other's discriminator. Only wgan, whose scores have no bounds, is
    held by nothing else.
    """

    gradient_penalty_coef: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride] - until resolved
    """Weight of the squared slope on demonstrations (point-mass 0.2 but for wgan, others 10)."""
    discriminator_learning_rate: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learning rate of the discriminator's Adam, which does not adapt (point-mass 3e-4, others 1e-4)."""

    def of_task(self, task: str) -> StyleOptions:
        """These options with the task's values for what was left out."""
        own = _STYLES.get((task, self.objective), AMPConfig())
        return dataclasses.replace(
            self, **{f.name: getattr(own, f.name) for f in fields(self) if getattr(self, f.name) is None}
        )

    def differences(self, *others: StyleOptions) -> list[str]:
        """The options whose values are those of none of the ``others``."""
        return [
            f.name
            for f in fields(self)
            if all(getattr(self, f.name) != getattr(other, f.name) for other in others)
        ]

    def check(self) -> None:
        """Refuses what cannot be trained with.

        Raises:
            ValueError: a value is outside its range; the message names it.
        """
        AMPConfig.check(self.of_task(""))


_POINT_MASS_STYLE = AMPConfig(gradient_penalty_coef=0.2, discriminator_learning_rate=3e-4)
_STYLES = {("point-mass", objective): _POINT_MASS_STYLE for objective in ("lsgan", "bce")}


@dataclass
class TrainOptions(RunOptions):
    """Options of ``rslstorage train``."""

    algorithms = {"ppo": PPOConfig, "style": StyleOptions}  # noqa: RUF012 - a ClassVar of the base

    amp: str | None = None
    """Learn to move like a motion (a .npz or DeepMimic file, a folder or a pattern; "circle" is embedded)."""
    compile: bool = False
    """Compile the optimisation step: the first one takes half a minute, the others a fraction."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """The algorithm."""
    style: StyleOptions = field(default_factory=StyleOptions)
    """What ``--amp`` trains with."""

    @classmethod
    def from_rsl_rl(cls, config: RSLRunnerConfig) -> TrainOptions:
        """The options that an RSL-RL runner config amounts to; the task and its environments stay ours.

        Raises:
            ValueError: the config asks for what the command line has no options for; the message says what.
        """
        config.require_nothing_beside_ppo()
        groups = config.observation_groups
        pairs = {
            "networks": (config.actor, config.critic),
            "obs_groups": (groups.get("actor"), groups.get("critic")),
        }
        for name, (actors, critics) in pairs.items():
            if actors != critics:
                raise ValueError(
                    f"The {name} of actor and critic differ, for which the command line has no options: "
                    "train from Python, with RSLRunnerConfig.networks."
                )
        if config.clip_actions is not None:
            raise ValueError(
                f"`clip_actions` is {config.clip_actions}, but tasks here clip to their own bounds: set it "
                "to null."
            )
        network = config.actor
        given: dict[str, Any] = {
            name: value
            for name, value in (("seed", config.seed), ("max_iterations", config.max_iterations))
            if value is not None
        }
        return cls(
            **given,
            num_steps_per_env=config.num_steps_per_env,
            save_interval=config.save_interval,
            policy=network.rnn_type or "mlp",
            rnn_hidden_dim=network.rnn_hidden_dim,
            rnn_num_layers=network.rnn_num_layers,
            hidden_dims=network.hidden_dims,
            activation=network.activation,
            obs_normalization=network.normalize_observations,
            init_std=config.init_std,
            std_type=config.std_type,
            ppo=config.ppo,
        )

    def resolved(self) -> TrainOptions:
        """These options with the task's own values for what was left out.

        Raises:
            ValueError: a number is out of its range, or a style is described and no motion named.
        """
        options = super().resolved()
        if self.amp is None:
            idle = self.style.differences(StyleOptions(), StyleOptions().of_task(self.task))
            if idle:
                raise ValueError(
                    f"There is no motion to be learned, for which {', '.join(f'`{name}`' for name in idle)} "
                    "would be: name one with --amp."
                )
        return dataclasses.replace(options, style=options.style.of_task(self.task))


def check_seed(seed: int) -> None:
    """Refuses a seed that one of the generators cannot take.

    Raises:
        ValueError: it is negative, or needs more than 32 bits (what NumPy's generators take).
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"`seed` must be between 0 and {2**32 - 1}, got {seed}.")
