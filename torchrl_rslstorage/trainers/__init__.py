"""The training loop: optimisation step, trainers, run folder."""

from torchrl_rslstorage.trainers.amp_trainer import AMPTrainer
from torchrl_rslstorage.trainers.config import AMPConfig, PPOConfig
from torchrl_rslstorage.trainers.distill_run import load_teacher
from torchrl_rslstorage.trainers.distillation_config import DistillationConfig
from torchrl_rslstorage.trainers.distillation_stepper import DistillationStepper
from torchrl_rslstorage.trainers.distillation_trainer import DistillationTrainer
from torchrl_rslstorage.trainers.distributed import Ranks, RanksError
from torchrl_rslstorage.trainers.ppo_trainer import RSLPPOTrainer
from torchrl_rslstorage.trainers.rsl_rl_config import RSLRunnerConfig
from torchrl_rslstorage.trainers.rsl_rl_sections import NetworkConfig
from torchrl_rslstorage.trainers.run_folder import RunFolder, RunFolderError
from torchrl_rslstorage.trainers.stepper import KLAdaptiveStepper

__all__ = [
    "AMPConfig",
    "AMPTrainer",
    "DistillationConfig",
    "DistillationStepper",
    "DistillationTrainer",
    "KLAdaptiveStepper",
    "NetworkConfig",
    "PPOConfig",
    "RSLPPOTrainer",
    "RSLRunnerConfig",
    "Ranks",
    "RanksError",
    "RunFolder",
    "RunFolderError",
    "load_teacher",
]
