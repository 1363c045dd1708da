"""rsl-rl-lib's own PPO on a Gymnasium task: the other side of the learning comparison.

    python benchmarks/train_rsl_rl.py --task HalfCheetah-v5 --steps 1000000 --seed 0 --json rsl_rl.json

Everything that learns is rsl-rl-lib's (its runner, PPO, models and storage, with logging off). Around it:

- The same synchronous Gymnasium vector environment as `GymnasiumEnv`, with same-step autoreset and actions
  clipped to the box. RSL-RL has no place for a final observation: at a time-out its PPO bootstraps from
  the value of the state before, which is what `time_outs` asks for.
- The hyper-parameters of the comparison, in `config` below.
- Episodes are counted here, in float64; RSL-RL's logger would drop them together with its log folder.

Whole iterations are run, so that ``--steps`` is reached or passed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import deque
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict


class GymnasiumVecEnv(VecEnv):
    """Gymnasium's synchronous vector environment by RSL-RL's interface, with one group, "policy"."""

    def __init__(self, task: str, num_envs: int, *, seed: int) -> None:
        self.vector_env = gymnasium.make_vec(
            task,
            num_envs=num_envs,
            vectorization_mode="sync",
            vector_kwargs={"copy": False, "autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
        )
        space: Any = self.vector_env.single_action_space
        self.low, self.high = space.low, space.high
        self.num_envs = num_envs
        self.num_actions = math.prod(space.shape)
        spec = self.vector_env.get_attr("spec")[0]
        self.max_episode_length = spec.max_episode_steps or 0
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        self.device = "cpu"
        self.cfg = {"task": task}

        self.last_episodes: deque[tuple[float, int]] = deque(maxlen=100)  # (return, length)
        self.num_episodes = 0
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, dtype=np.int64)
        self._observations, _ = self.vector_env.reset(seed=seed)

    def get_observations(self) -> TensorDict:
        # a copy: Gymnasium writes the next step into the same array
        policy = torch.from_numpy(self._observations).to(torch.float32, copy=True)
        return TensorDict({"policy": policy}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict]:
        clipped = np.clip(actions.numpy(), self.low, self.high)
        self._observations, reward, terminated, truncated, _ = self.vector_env.step(clipped)
        done = terminated | truncated
        self._count(reward, done)
        extras = {"time_outs": torch.from_numpy(truncated & ~terminated)}
        rewards = torch.from_numpy(reward).float()
        return self.get_observations(), rewards, torch.from_numpy(done), extras

    def _count(self, reward: np.ndarray, done: np.ndarray) -> None:
        self._return += reward
        self._length += 1
        if done.any():
            self.last_episodes.extend(
                zip(self._return[done].tolist(), self._length[done].tolist(), strict=True)
            )
            self.num_episodes += int(done.sum())
            self._return[done] = 0.0
            self._length[done] = 0


def config(num_steps: int, init_std: float = 1.0) -> dict[str, Any]:
    """The hyper-parameters of the comparison, by RSL-RL's names."""
    network = {
        "class_name": "MLPModel",
        "hidden_dims": [256, 128],
        "activation": "elu",
        "obs_normalization": True,
    }
    gaussian = {"class_name": "GaussianDistribution", "init_std": init_std, "std_type": "scalar"}
    return {
        "num_steps_per_env": num_steps,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**network, "distribution_cfg": gaussian},
        "critic": network,
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": 5,
            "num_mini_batches": 4,
            "schedule": "adaptive",
            "desired_kl": 0.01,
            "learning_rate": 1e-3,
            "clip_param": 0.2,
            "value_loss_coef": 1.0,
            "use_clipped_value_loss": True,
            "gamma": 0.99,
            "lam": 0.95,
            "entropy_coef": 0.0,
            "max_grad_norm": 1.0,
        },
    }


def train(
    task: str, steps: int, seed: int, num_envs: int, num_steps: int, init_std: float = 1.0
) -> dict[str, Any]:
    """Trains once and returns what the comparison reports."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    env = GymnasiumVecEnv(task, num_envs, seed=seed)
    runner = OnPolicyRunner(env, config(num_steps, init_std), log_dir=None, device="cpu")
    iterations = math.ceil(steps / (num_envs * num_steps))
    start = time.perf_counter()
    runner.learn(iterations)
    seconds = time.perf_counter() - start
    frames = iterations * num_envs * num_steps
    returns, lengths = zip(*env.last_episodes, strict=True) if env.last_episodes else ((), ())
    env.vector_env.close()
    return {
        "trainer": "rsl-rl-lib",
        "task": task,
        "seed": seed,
        "num_envs": num_envs,
        "num_steps": num_steps,
        "init_std": init_std,
        "threads": torch.get_num_threads(),
        "frames": frames,
        "episodes": env.num_episodes,
        "mean_return_last_100": float(np.mean(returns)) if returns else None,
        "mean_length_last_100": float(np.mean(lengths)) if lengths else None,
        "learn_seconds": seconds,
        "frames_per_second": frames / seconds,
        "versions": {name: version(name) for name in ("rsl-rl-lib", "torch", "gymnasium", "mujoco")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="HalfCheetah-v5", help="a Gymnasium id with a Box action space")
    parser.add_argument("--steps", type=int, default=1_000_000, help="transitions to train for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=32, help="steps of one rollout")
    parser.add_argument("--init-std", type=float, default=1.0, help="of the policy; 1 is RSL-RL's default")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trained = train(args.task, args.steps, args.seed, args.num_envs, args.num_steps, args.init_std)
    result = json.dumps(trained, indent=2)
    print(result)
    if args.json is not None:
        args.json.write_text(result + "\n")


if __name__ == "__main__":
    main()
