"""The training loop: optimisation step, trainer, run folder, and RSL-RL's configs for it."""

from torchrl_rslstorage.trainers.config import PPOConfig
from torchrl_rslstorage.trainers.ppo_trainer import RSLPPOTrainer
from torchrl_rslstorage.trainers.rsl_rl_config import RSLRunnerConfig
from torchrl_rslstorage.trainers.rsl_rl_sections import NetworkConfig
from torchrl_rslstorage.trainers.run_folder import RunFolder, RunFolderError
from torchrl_rslstorage.trainers.stepper import KLAdaptiveStepper

__all__ = [
    "KLAdaptiveStepper",
    "NetworkConfig",
    "PPOConfig",
    "RSLPPOTrainer",
    "RSLRunnerConfig",
    "RunFolder",
    "RunFolderError",
]
