"""Two processes that learn together on this machine, started as ``torchrun`` does it, and what they do.

Run as a script, it is one of them: it goes through `SCENARIOS` and leaves what each returned in a folder. One
pair of processes serves the whole test file, since their imports take longer than all that they do.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny import make_trainer, parameters
from torch import Tensor
from torchrl.envs import DTypeCastTransform, EnvBase, TransformedEnv

from torchrl_rslstorage import (
    ActorCritic,
    AMPConfig,
    AMPDiscriminator,
    AMPTrainer,
    DistillationConfig,
    DistillationTrainer,
    EmpiricalNormalizer,
    Mirror,
    MLPActor,
    MotionDataset,
    PendulumEnv,
    PointMassEnv,
    PPOConfig,
    RandomNetworkDistillation,
    Ranks,
    RNNActor,
    RNNCritic,
    RolloutBuffer,
    RolloutCollector,
    RSLPPOTrainer,
    StudentTeacher,
    Symmetry,
    circle_motion,
)

Scenario = Callable[[Ranks, Path], dict[str, Any]]

NUM_STEPS, NUM_ENVS = 6, 4
PPO: dict[str, Any] = {"num_learning_epochs": 2, "num_mini_batches": 2, "max_grad_norm": 1e6}
"""Nothing is clipped: it would hide gradients that were added up instead of averaged."""


def start_ranks(command: Sequence[str], size: int = 2) -> list[subprocess.Popen[str]]:
    """Starts ``size`` processes with the environment variables of ``torchrun``, without a network."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tests = Path(__file__).resolve().parent
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


# -- what is recorded --------------------------------------------------------------------------


def record(trainer: RSLPPOTrainer) -> dict[str, Any]:
    """Trains; returns all that one process needs to take the same steps with both halves."""
    stepper = trainer.stepper
    steps: list[dict[str, Any]] = []
    windows: list[Any] = []
    start: list[dict[str, Tensor]] = []
    update = stepper.update

    def recording(loss: Any, mini_batch: Any) -> Tensor:
        if not start:
            start.extend(
                {name: value.clone() for name, value in network.state_dict().items()}
                for network in (trainer.actor, trainer.critic)
            )
        if len(steps) % trainer.optim_steps_per_batch == 0:
            windows.append(trainer.buffer.window.clone())
        batch = mini_batch.clone()
        metrics = update(loss, mini_batch)
        gradient = torch.cat([p.grad.reshape(-1) for p in stepper.optimizer.parameters])
        rate = stepper.learning_rate.clone()
        steps.append({"batch": batch, "gradient": gradient, "learning_rate": rate})
        return metrics

    stepper.update = recording
    trainer.train()
    return {
        "start": start,
        "steps": steps,
        "windows": windows,
        "end": parameters(trainer.actor, trainer.critic),
        "metrics": trainer.metrics,
        "own_return": trainer.collector.statistics.summary().mean_return,
    }


def pendulums(ranks: Ranks) -> EnvBase:
    env = PendulumEnv(NUM_ENVS, seed=ranks.seed(0), max_episode_steps=5)
    if torch.get_default_dtype() is torch.float64:
        return TransformedEnv(env, DTypeCastTransform(torch.float32, torch.float64))
    return env


def ppo(ranks: Ranks, *, num_iterations: int = 2, **kwargs: Any) -> RSLPPOTrainer:
    kwargs = {"config": PPOConfig(**PPO), "normalize_observations": True, **kwargs}
    return make_trainer(
        pendulums(ranks),
        num_steps=NUM_STEPS,
        num_iterations=num_iterations,
        seed=ranks.seed(10),  # other networks on either rank: they must become those of rank 0
        ranks=ranks,
        **kwargs,
    )


# -- scenarios ---------------------------------------------------------------------------------


def float64(scenario: Scenario) -> Scenario:
    """The same in float64, in which rounding does not hide a fault."""

    @functools.wraps(scenario)
    def run(ranks: Ranks, folder: Path) -> dict[str, Any]:
        torch.set_default_dtype(torch.float64)
        try:
            return scenario(ranks, folder)
        finally:
            torch.set_default_dtype(torch.float32)

    return run


def single(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return record(ppo(ranks))


@float64
def double(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return record(ppo(ranks))


@float64
def per_mini_batch(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return record(ppo(ranks, config=PPOConfig(**PPO, normalize_advantage_per_mini_batch=True)))


@float64
def recurrent(ranks: Ranks, folder: Path) -> dict[str, Any]:
    env = pendulums(ranks)
    torch.manual_seed(ranks.seed(10))
    shape = {"rnn_hidden_dim": 4, "hidden_dims": (8,)}
    policy = ActorCritic(RNNActor.for_env(env, **shape), RNNCritic.for_env(env, rnn_type="gru", **shape))
    collector = RolloutCollector(env, policy, replay_buffer=RolloutBuffer(NUM_STEPS, NUM_ENVS))
    trainer = RSLPPOTrainer(
        collector,
        policy.actor,
        policy.critic,
        total_frames=2 * NUM_STEPS * NUM_ENVS,
        config=PPOConfig(**PPO),
        progress_bar=False,
        ranks=ranks,
    )
    return record(trainer)


@dataclasses.dataclass(frozen=True)
class Summing(Ranks):
    """A fault: gradients are added up."""

    def mean_(self, tensor: Tensor) -> Tensor:
        return super().mean_(tensor).mul_(self.size)


@dataclasses.dataclass(frozen=True)
class Apart(Ranks):
    """A fault: every rank has statistics of its own, as RSL-RL's have."""

    @property
    def pool(self) -> None:
        return None


@float64
def summing(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return record(ppo(Summing(**dataclasses.asdict(ranks))))


@float64
def apart(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return record(ppo(Apart(**dataclasses.asdict(ranks))))


def extensions(ranks: Ranks, folder: Path) -> dict[str, Any]:
    mirrors = {"observation": Mirror([0, 1, 2], signs=[1, -1, -1]), "action": Mirror([0], signs=[-1])}
    rnd = RandomNetworkDistillation(
        ["observation"],
        3,
        weight=0.1,
        target_hidden_dims=(8,),
        state_normalization=True,
        reward_normalization=True,
    )
    symmetry = Symmetry(mirrors, use_data_augmentation=True, use_mirror_loss=True)
    trainer = ppo(ranks, rnd=rnd, symmetry=symmetry)
    before = parameters(rnd.predictor)
    trainer.train()
    assert rnd.normalizer is not None and rnd.reward_normalizer is not None
    shared = (rnd.predictor, rnd.target, rnd.normalizer, rnd.reward_normalizer.moments)
    return {"before": before, "end": parameters(trainer.actor, trainer.critic, *shared)}


def amp(ranks: Ranks, folder: Path) -> dict[str, Any]:
    env = PointMassEnv(NUM_ENVS, seed=ranks.seed(0), max_episode_steps=5)
    torch.manual_seed(ranks.seed(0))
    actor, critic = MLPActor.for_env(env, hidden_dims=(8,)), RNNCritic.for_env(env, rnn_hidden_dim=4)
    collector = RolloutCollector(
        env, ActorCritic(actor, critic), replay_buffer=RolloutBuffer(NUM_STEPS, NUM_ENVS)
    )
    motions = MotionDataset(circle_motion())
    trainer = AMPTrainer(
        collector,
        actor,
        critic,
        AMPDiscriminator(["observation"], in_features=4, hidden_dims=(8,)),
        lambda num: motions.pairs(num, env.dt, env.motion_fields),
        dt=env.dt,
        amp=AMPConfig(objective="wgan"),
        config=PPOConfig(**PPO),
        total_frames=2 * NUM_STEPS * NUM_ENVS,
        progress_bar=False,
        ranks=ranks,
    )
    before = parameters(trainer.discriminator.trunk)
    trainer.train()
    return {
        "before": before,
        "end": parameters(actor, critic, trainer.discriminator, trainer.style_reward),
    }


def distillation(ranks: Ranks, folder: Path) -> dict[str, Any]:
    seed = ranks.seed(0)
    env = PendulumEnv(NUM_ENVS, seed=seed, max_episode_steps=5, hide_velocity=True, show_teacher=True)
    torch.manual_seed(seed)
    student = RNNActor.for_env(env, rnn_hidden_dim=4, hidden_dims=(8,), normalize_observations=True)
    policy = StudentTeacher.for_env(env, student, MLPActor(["observation"], 3, 1, hidden_dims=(8,)))
    trainer = DistillationTrainer(
        RolloutCollector(env, policy, replay_buffer=RolloutBuffer(NUM_STEPS, NUM_ENVS)),
        policy,
        config=DistillationConfig(gradient_length=4),
        total_frames=2 * NUM_STEPS * NUM_ENVS,
        progress_bar=False,
        ranks=ranks,
    )
    before = parameters(student.mlp)
    trainer.train()
    return {"before": before, "end": parameters(student, policy.teacher)}


def normaliser(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Batches of all sizes, some of them of one rank alone and one of nobody."""
    torch.manual_seed(ranks.rank)
    pooled = EmpiricalNormalizer(3)
    ranks.share(pooled)
    pooled.update(torch.empty(0, 3))
    sizes = [(5, 2), (0, 4), (3, 0), (0, 0), (1, 1)]
    batches = [1000.0 + torch.randn(both[ranks.rank], 3) for both in sizes]
    for batch in batches:
        pooled.update(batch)
    return {"batches": batches, "state": dict(pooled.state_dict())}


def unequal(ranks: Ranks, folder: Path) -> dict[str, Any]:
    trainer = make_trainer(PendulumEnv(2 + ranks.rank, seed=0), ranks=ranks)
    try:
        trainer.train()
    except ValueError as error:
        return {"said": str(error)}
    return {"said": "nothing"}


def resumed(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """One run at a stretch, and one that is stopped in the middle and goes on in another trainer."""

    def trained(num_iterations: int, where: str, load: bool = False) -> RSLPPOTrainer:
        checkpoints = folder / where
        trainer = ppo(ranks, num_iterations=num_iterations, checkpoint_dir=checkpoints, save_interval=2)
        if load:
            torch.manual_seed(99)
            assert trainer.latest_checkpoint is not None
            trainer.load_checkpoint(trainer.latest_checkpoint)
        trainer.train()
        return trainer

    # In this order: every training overwrites the global generator.
    whole = trained(4, "whole")
    trained(2, "parts")
    parts = trained(4, "parts", load=True)
    timeless = {name: x for name, x in parts.metrics.items() if not name.startswith("Perf/")}
    return {
        "whole": parameters(whole.actor, whole.critic),
        "parts": parameters(parts.actor, parts.critic),
        "whole_metrics": {name: whole.metrics[name] for name in timeless},
        "parts_metrics": timeless,
        "frames": (parts.collected_frames, parts.frames),
    }


SCENARIOS: list[Scenario] = [
    single,
    double,
    per_mini_batch,
    recurrent,
    summing,
    apart,
    extensions,
    amp,
    distillation,
    normaliser,
    unequal,
    resumed,
]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with Ranks.join("cpu") as ranks:
        for scenario in SCENARIOS:
            result = scenario(ranks, folder)
            torch.save(result, folder / f"{scenario.__name__}-{ranks.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
