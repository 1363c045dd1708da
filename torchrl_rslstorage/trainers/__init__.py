"""The training loop: optimisation step, trainers, run folder."""

from torchrl_rslstorage.trainers.amp_trainer import AMPTrainer
from torchrl_rslstorage.trainers.config import AMPConfig, PPOConfig
from torchrl_rslstorage.trainers.ppo_trainer import RSLPPOTrainer
from torchrl_rslstorage.trainers.run_folder import RunFolder, RunFolderError
from torchrl_rslstorage.trainers.stepper import KLAdaptiveStepper

__all__ = [
    "AMPConfig",
    "AMPTrainer",
    "KLAdaptiveStepper",
    "PPOConfig",
    "RSLPPOTrainer",
    "RunFolder",
    "RunFolderError",
]
