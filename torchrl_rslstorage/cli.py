"""RSL-RL's PPO on TorchRL components.

``rslstorage bench --help`` tells of the benchmarks, which run from a checkout.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from torchrl.checkpoint import CheckpointError

from torchrl_rslstorage._extras import require_extra
from torchrl_rslstorage._files import finite
from torchrl_rslstorage.modules import MLPActor, PolicyStep, RNNActor, export_policy
from torchrl_rslstorage.rsl_rl import save_rsl_rl_checkpoint
from torchrl_rslstorage.trainers.distill_options import DistillOptions
from torchrl_rslstorage.trainers.distributed import RanksError
from torchrl_rslstorage.trainers.options import TrainOptions
from torchrl_rslstorage.trainers.rsl_rl_config import RSLRunnerConfig
from torchrl_rslstorage.trainers.run_folder import RunFolderError
from torchrl_rslstorage.trainers.runs import evaluate_run, load_run, resume_run, start_run

_USER_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    ImportError,
    MemoryError,
    OSError,
    RunFolderError,
    CheckpointError,
    RanksError,
)


@dataclass
class ResumeOptions:
    """Go on with a run that was stopped."""

    run: Path
    """The run's folder."""
    max_iterations: int | None = None
    """Train up to this many iterations in all; by default what the run was started with."""


@dataclass
class EvalOptions:
    """Play episodes with what a run has learned."""

    checkpoint: Path
    """A run's folder (its newest checkpoint), or one checkpoint."""
    num_episodes: int = 100
    """Episodes to play."""
    num_envs: int | None = None
    """Environments side by side; by default as in training."""
    stochastic: bool = False
    """Sample actions instead of taking the mean."""
    seed: int = 0
    """Of environments and samples."""


@dataclass
class TrainCommand(TrainOptions):
    """`TrainOptions`, and where their defaults come from."""

    rsl_rl_config: Path | None = None
    """RSL-RL runner config (Isaac Lab's agent.yaml) whose values are the defaults; options beside it win."""

    def options(self) -> TrainOptions:
        """What is trained with."""
        return TrainOptions(**{f.name: getattr(self, f.name) for f in fields(TrainOptions)})


@dataclass
class ExportOptions:
    """Write the policy that a run has learned to one file."""

    run: Path
    """A run's folder (its newest checkpoint), or one checkpoint."""
    output: Path | None = None
    """The file; its ending says how it is written: .onnx (ONNX), .pt2 (torch.export) or .pt (TorchScript). By
    default policy.onnx, or model_ITERATION.pt with --rsl-rl."""
    rsl_rl: bool = False
    """Write an RSL-RL checkpoint to go on training there, whatever the ending."""


Command = TrainOptions | DistillOptions | ResumeOptions | EvalOptions | ExportOptions


def parse(args: Sequence[str] | None = None) -> Command:
    """Reads the command line.

    Raises:
        ImportError: tyro is missing.
        ValueError: ``--rsl-rl-config`` names a config that cannot be honoured.
        SystemExit: the command line is not valid, or asked for help.
    """
    tyro: Any = require_extra("tyro", "cli", feature="the command line")
    subcommand, by_place = tyro.conf.subcommand, tyro.conf.PositionalRequiredArgs
    teach = "Teach a student what a run has learned."
    args = sys.argv[1:] if args is None else args
    defaults = _train_defaults(args)
    commands = (
        Annotated[TrainCommand, subcommand("train", default=defaults, description="Train a policy with PPO.")]
        | Annotated[DistillOptions, subcommand("distill", description=teach)]
        | Annotated[ResumeOptions, subcommand("resume", description=ResumeOptions.__doc__), by_place]
        | Annotated[EvalOptions, subcommand("eval", description=EvalOptions.__doc__), by_place]
        | Annotated[ExportOptions, subcommand("export", description=ExportOptions.__doc__), by_place]
    )
    config = (tyro.conf.OmitArgPrefixes,)
    options = tyro.cli(commands, args=args, prog="rslstorage", description=__doc__, config=config)
    return options.options() if isinstance(options, TrainCommand) else options


def _train_defaults(args: Sequence[str]) -> TrainCommand:
    """The defaults of ``train``: those of an RSL-RL config, where the command line names one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--rsl-rl-config", "--rsl_rl_config", type=Path)
    try:
        named: Path | None = parser.parse_known_args(args)[0].rsl_rl_config
    except argparse.ArgumentError:  # the file is missing behind it: tyro says so
        named = None
    if named is None:
        return TrainCommand()
    config = RSLRunnerConfig.read(named)
    values = TrainOptions.from_rsl_rl(config)
    print(config.describe())
    return TrainCommand(**{f.name: getattr(values, f.name) for f in fields(TrainOptions)})


def export(options: ExportOptions) -> dict[str, Any]:
    """Writes a run's policy to a file; returns what was written."""
    learned = load_run(options.run)
    usual = f"model_{learned.iterations}.pt" if options.rsl_rl else "policy.onnx"
    output = options.output or Path(usual)
    result: dict[str, Any] = {"checkpoint": str(learned.checkpoint), "output": str(output)}
    if options.rsl_rl:
        if learned.critic is None:
            raise ValueError(
                f"{options.run} is a distillation: it has no critic, which RSL-RL's PPO loads. "
                "Export its policy as .onnx, .pt2 or .pt."
            )
        save_rsl_rl_checkpoint(
            output, learned.actor, learned.critic, learned.stepper, iteration=learned.iterations
        )
        return {**result, "iteration": learned.iterations}
    assert isinstance(learned.actor, MLPActor | RNNActor)
    export_policy(learned.actor, output)
    step = PolicyStep(learned.actor)
    names = {"inputs": step.input_names, "outputs": step.output_names}
    return {**result, **names, "obs": learned.actor.observation_keys}


def run(options: Command) -> dict[str, Any]:
    """Does what the command line asked for; returns what is printed at the end."""
    if isinstance(options, ExportOptions):
        return export(options)
    if isinstance(options, ResumeOptions):
        return resume_run(options.run, options.max_iterations)
    if isinstance(options, EvalOptions):
        return evaluate_run(
            options.checkpoint,
            num_episodes=options.num_episodes,
            num_envs=options.num_envs,
            stochastic=options.stochastic,
            seed=options.seed,
        )
    return start_run(options)


def bench(args: Sequence[str]) -> None:
    """Runs the benchmarks that stand beside the package in a checkout.

    Raises:
        FileNotFoundError: the package was installed without them.
    """
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "__main__.py"
    if not script.is_file():
        raise FileNotFoundError(
            "the benchmarks are not part of the installed package: run `rslstorage bench` from a checkout, "
            "installed with `pip install -e '.[test]'`."
        )
    runpy.run_path(str(script))["main"](args)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point; a user's mistake ends in one sentence and exit status 1."""
    args = sys.argv[1:] if args is None else args
    try:
        if args and args[0] == "bench":
            bench(args[1:])
            return
        result = run(parse(args))
    except KeyboardInterrupt:
        sys.exit("\nStopped. `rslstorage resume RUN` goes on from the newest checkpoint.")
    except _USER_ERRORS as error:
        # A KeyError prints its message quoted.
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        sys.exit("rslstorage: " + " ".join(str(message).split()))
    if result:  # of several ranks, one tells
        print(json.dumps(finite(result), indent=2))
