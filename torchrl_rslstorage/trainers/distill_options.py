"""The options of a distillation, as the command line and ``config.json`` have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_rslstorage.trainers.distillation_config import DistillationConfig
from torchrl_rslstorage.trainers.options import GYMNASIUM, PENDULUM, RunOptions, TrainOptions

TEACHER_CONFIG = "teacher_config"
"""Entry of ``config.json``: the config of the teacher's run, which a resumed run builds it from."""

_STD = 0.1
"""A student explores little: what it has to reach it is told."""
_PENDULUM = dataclasses.replace(PENDULUM, num_envs=64, max_iterations=800, init_std=_STD)
_GYMNASIUM = dataclasses.replace(GYMNASIUM, max_iterations=300, init_std=_STD)


@dataclass
class DistillOptions(RunOptions):
    """Options of ``rslstorage distill``."""

    task_defaults = {  # noqa: RUF012 - a ClassVar of the base
        "pendulum": _PENDULUM,
        "pendulum-hidden-velocity": _PENDULUM,
    }
    other_defaults = _GYMNASIUM
    algorithms = {"distillation": DistillationConfig}  # noqa: RUF012 - a ClassVar of the base

    teacher: Path = field(kw_only=True)
    """The teacher's run folder (its newest checkpoint), or one of its checkpoints."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """The algorithm."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], run_dir: Path) -> DistillOptions:
        """Reads back what `as_config` wrote, and what stands beside it of the teacher.

        Raises:
            RunFolderError: an entry is unknown or missing: another program or version wrote it.
        """
        mine = {key: value for key, value in config.items() if key != TEACHER_CONFIG}
        options = super().from_config(mine, run_dir)
        return dataclasses.replace(options, teacher=Path(options.teacher))


def options_of(config: Mapping[str, Any], run_dir: Path) -> TrainOptions | DistillOptions:
    """The options of a run, of whichever kind its ``config.json`` is.

    Raises:
        RunFolderError: it is none of ours.
    """
    kind = DistillOptions if "distillation" in config else TrainOptions
    return kind.from_config(config, run_dir)
