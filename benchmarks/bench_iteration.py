"""One whole iteration: collect a window, update the networks.

All three train on the package's pendulums, each through its own normal interface: `RSLPPOTrainer` over a
`RolloutCollector`; rsl-rl-lib's ``OnPolicyRunner.learn(1)`` over a thin ``VecEnv`` around the same
dynamics; TorchRL's ``Collector`` and the loop of its PPO example. Logging is off everywhere; ours still
counts episodes and fetches its metrics, which rsl-rl-lib only does when it logs.

Our trainer makes the process keep freed memory (`keep_freed_memory`), from which the others gain as much. In
an environment with ``GLIBC_TUNABLES=`` it does not, and all sides run as in any process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor
from torchrl.collectors import Collector

from benchmarks.bench_loss import CAN_COMPILE, NO_COMPILE
from benchmarks.contenders import (
    CLIP,
    ENTROPY_COEFF,
    GAMMA,
    LEARNING_RATE,
    LMBDA,
    TorchRLUpdate,
    torchrl_networks,
)
from benchmarks.harness import (
    COMPILED,
    NUM_EPOCHS,
    NUM_MINI_BATCHES,
    OURS,
    RSL_RL,
    TORCHRL,
    Contender,
    Row,
    Settings,
    Shape,
    measure,
    quiet,
)
from torchrl_rslstorage import (
    ActorCritic,
    MLPActor,
    MLPCritic,
    PendulumEnv,
    PPOConfig,
    RolloutBuffer,
    RolloutCollector,
    RSLPPOTrainer,
)

SUBJECT = "iteration"
SHAPES = ("32x16", "24x256", "24x1024")


class PendulumVecEnv(VecEnv):
    """The same pendulums by RSL-RL's interface, as lean as its interface allows."""

    def __init__(self, num_envs: int, device: torch.device, seed: int = 0) -> None:
        self._pendulums = PendulumEnv(num_envs, device=device, seed=seed)
        self._observation = self._pendulums.start()["observation"]
        self.num_envs = num_envs
        self.num_actions = 1
        self.max_episode_length = self._pendulums.max_episode_steps
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long, device=device)
        self.device = device
        self.cfg: dict[str, Any] = {}

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self._observation}, [self.num_envs], device=self.device)

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict]:
        after = self._pendulums.advance(actions)
        self._observation = self._pendulums.after_step(after)["observation"]
        time_outs = after["truncated"].squeeze(-1)
        return (
            self.get_observations(),
            after["reward"].squeeze(-1),
            after["done"].squeeze(-1),
            {"time_outs": time_outs},
        )


class OurIteration:
    """`RSLPPOTrainer.train` for one window more, each time it is called."""

    def __init__(self, shape: Shape, device: torch.device, **options: Any) -> None:
        env = PendulumEnv(shape.num_envs, device=device, seed=0)
        hidden: dict[str, Any] = {"hidden_dims": shape.hidden_dims}
        actor = MLPActor.for_env(env, **hidden).to(device)
        critic = MLPCritic.for_env(env, **hidden).to(device)
        buffer = RolloutBuffer(shape.num_steps, shape.num_envs, device=device)
        collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer)
        # `train` ends by closing the environment, and here it is called again.
        collector.shutdown = lambda *args, **kwargs: None  # type: ignore[method-assign]
        config = PPOConfig(learning_rate=LEARNING_RATE, clip_param=CLIP, entropy_coef=ENTROPY_COEFF)
        self.trainer = RSLPPOTrainer(
            collector, actor, critic, total_frames=1, config=config, progress_bar=False, **options
        )
        self.frames = shape.num_cells

    def __call__(self) -> None:
        self.trainer.total_frames = self.trainer.collected_frames + self.frames
        self.trainer.train()


def rsl_rl_runner(shape: Shape, device: torch.device) -> OnPolicyRunner:
    network = {"class_name": "MLPModel", "hidden_dims": list(shape.hidden_dims), "activation": "elu"}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    config = {
        "num_steps_per_env": shape.num_steps,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**network, "distribution_cfg": gaussian},
        "critic": network,
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": NUM_EPOCHS,
            "num_mini_batches": NUM_MINI_BATCHES,
            "clip_param": CLIP,
            "gamma": GAMMA,
            "lam": LMBDA,
            "entropy_coef": ENTROPY_COEFF,
            "learning_rate": LEARNING_RATE,
        },
    }
    with quiet():
        return OnPolicyRunner(
            PendulumVecEnv(shape.num_envs, device), config, log_dir=None, device=str(device)
        )


class TorchRLIteration:
    """The next batch of TorchRL's collector, and the update of its PPO example."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        actor, critic = torchrl_networks(shape, device, actor_key="observation", critic_key="observation")
        self.update = TorchRLUpdate(shape, device, actor, critic)
        with quiet():
            collector = Collector(
                PendulumEnv(shape.num_envs, device=device, seed=0),
                actor,
                frames_per_batch=shape.num_cells,
                total_frames=-1,
                device=device,
                auto_register_policy_transforms=False,
            )
        self.batches = iter(collector)

    def __call__(self) -> None:
        self.update(next(self.batches))


def contenders(shape: Shape, settings: Settings) -> list[Contender]:
    torch.manual_seed(0)
    runner = rsl_rl_runner(shape, settings.device)
    found = [
        Contender(OURS, OurIteration(shape, settings.device)),
        Contender(RSL_RL, lambda: runner.learn(1)),
        Contender(TORCHRL, TorchRLIteration(shape, settings.device)),
    ]
    if settings.compile and CAN_COMPILE:
        found.insert(1, Contender(COMPILED, OurIteration(shape, settings.device, compile=True)))
    return found


def pendulum(shape: Shape) -> Shape:
    """The shape with the pendulum's observations and actions."""
    return dataclasses.replace(shape, groups={"policy": 3}, num_actions=1)


def run(settings: Settings) -> Iterator[Row]:
    note = NO_COMPILE if settings.compile and not CAN_COMPILE else ""
    for shape in map(pendulum, settings.chosen(SHAPES)):
        if not shape.ours_alone:
            yield Row(SUBJECT, shape, measure(contenders(shape, settings), settings), note)


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    main(["iteration", *sys.argv[1:]])
