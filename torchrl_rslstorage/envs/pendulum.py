"""A batch of pendulums to swing up, in torch: Gymnasium's Pendulum-v1, N at a time.

The angle θ is 0 upright and grows anticlockwise; the torque u is clipped to [−2, 2] N·m:

    θ̇' = clip(θ̇ + (3g/2l · sin θ + 3/ml² · u) · dt, −8, 8)        g = 10, m = l = 1, dt = 0.05
    θ'  = θ + θ̇' · dt
    r   = −(wrap(θ)² + 0.1 · θ̇² + 0.001 · u²)                      wrap(θ) in [−π, π)

Decisions:

- The state is float64 and the torque's own products are float32, as in Gymnasium (numpy keeps a float32
  action float32), so that the two agree to the last bits; what is handed out is float32.
- An episode is cut after ``max_episode_steps`` and never terminates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torchrl.data import Bounded, Composite

from torchrl_rslstorage.envs.base import Leaves
from torchrl_rslstorage.envs.embedded import EmbeddedEnv

# gymnasium 1.4, envs/classic_control/pendulum.py
_MAX_TORQUE = 2.0
_MAX_SPEED = 8.0
_DT = 0.05
_GRAVITY = 15.0  # 3g / 2l
_TORQUE = 3.0  # 3 / ml²
_START_ANGLE = math.pi  # θ starts uniformly within ±π, θ̇ within ±1


class PendulumState(NamedTuple):
    """Where N pendulums are. Each field is ``[N, 1]``."""

    theta: Tensor
    """Angle from upright in radians, float64, not wrapped."""

    theta_dot: Tensor
    """Angular velocity in rad/s, float64."""

    step_count: Tensor
    """Steps taken in this episode, int64."""


class PendulumEnv(EmbeddedEnv):
    """N pendulums with Gymnasium Pendulum-v1's dynamics, torque limit, reward and starts.

    | key | shape | |
    |---|---|---|
    | `observation` | `[N, 3]` float32 | cos θ, sin θ, θ̇; without θ̇ `[N, 2]` |
    | `teacher_observation` | `[N, 3]` float32 | cos θ, sin θ, θ̇, if it is asked for |
    | `action` | `[N, 1]` float32 | torque; what exceeds ±2 is clipped inside |
    | `reward` | `[N, 1]` float32 | in [−16.3, 0] |
    | `done`, `terminated`, `truncated` | `[N, 1]` bool | `terminated` is never set |

    >>> env = PendulumEnv(4, seed=0)
    >>> rollout = env.rollout(3)
    >>> rollout["next", "reward"].shape
    torch.Size([4, 3, 1])

    Args:
        num_envs: N.
        max_episode_steps: the length of an episode, after which it is truncated.
        init_at_random_ep_len: spread the first episodes over all of their phases (`EmbeddedEnv`): a window
            would otherwise hold only swing-ups, or only balancing.
        hide_velocity: leave θ̇ out of the observation. One observation does not tell then which way a
            pendulum swings: a policy needs memory to swing it up and hold it.
        show_teacher: add ``teacher_observation``, which always has θ̇, for a teacher to read.
        device: where the state and every tensor live.
        seed: of the environment's own generator; None draws one.

    Raises:
        ValueError: ``num_envs`` or ``max_episode_steps`` is not a positive integer.
    """

    state_type = PendulumState
    state: PendulumState | None

    def __init__(
        self,
        num_envs: int = 256,
        *,
        max_episode_steps: int = 200,
        init_at_random_ep_len: bool = True,
        hide_velocity: bool = False,
        show_teacher: bool = False,
        device: torch.device | str = "cpu",
        seed: int | None = None,
    ) -> None:
        super().__init__(
            num_envs,
            max_episode_steps=max_episode_steps,
            init_at_random_ep_len=init_at_random_ep_len,
            device=device,
        )
        self.hide_velocity = hide_velocity
        self.show_teacher = show_teacher

        limits = torch.tensor([1.0, 1.0, _MAX_SPEED], device=self.device).expand(num_envs, 3)
        shown = {"observation": limits[:, :2] if hide_velocity else limits}
        if show_teacher:
            shown["teacher_observation"] = limits
        self.observation_spec = Composite(
            {
                key: Bounded(-limit, limit, limit.shape, dtype=torch.float32, device=self.device)
                for key, limit in shown.items()
            },
            shape=self.batch_size,
            device=self.device,
        )
        self.action_spec = Bounded(
            -_MAX_TORQUE,
            _MAX_TORQUE,
            torch.Size([num_envs, 1]),
            dtype=torch.float32,
            device=self.device,
        )
        self.set_seed(seed)

    def advance(self, action: Tensor) -> Leaves:
        """Applies the torque ``action [N, 1]`` for one time step."""
        theta, theta_dot, step_count = self._current()
        torque = action.clamp(-_MAX_TORQUE, _MAX_TORQUE)
        angle = (theta + math.pi).remainder_(2 * math.pi).sub_(math.pi)
        cost = angle.square_().addcmul_(theta_dot, theta_dot, value=0.1).float()
        cost.addcmul_(torque, torque, value=0.001)

        acceleration = (_TORQUE * torque).add(theta.sin(), alpha=_GRAVITY)
        theta_dot = theta_dot.add(acceleration, alpha=_DT).clamp_(-_MAX_SPEED, _MAX_SPEED)
        theta = theta.add(theta_dot, alpha=_DT)
        step_count = step_count + 1
        truncated = step_count >= self.max_episode_steps

        self.state = PendulumState(theta, theta_dot, step_count)
        return {
            **self._observe(self.state),
            "reward": cost.neg_(),
            "done": truncated.clone(),
            "terminated": torch.zeros_like(truncated),
            "truncated": truncated,
        }

    def _draw(self) -> tuple[Tensor, Tensor]:
        """N starting angles and velocities, each ``[N, 1]``."""
        unit = torch.empty(2, self.num_envs, 1, dtype=torch.float64, device=self.device)
        theta, theta_dot = unit.uniform_(-1.0, 1.0, generator=self._generator).unbind()
        return theta * _START_ANGLE, theta_dot

    def _observe(self, state: PendulumState) -> Leaves:
        """``[N, 3]`` float32 of the columns cos θ, sin θ and θ̇; ``[N, 2]`` where the last is hidden."""
        theta, theta_dot, _ = state
        whole = torch.cat((theta.cos(), theta.sin(), theta_dot), -1).float()
        shown: Leaves = {"observation": whole[:, :2].contiguous() if self.hide_velocity else whole}
        if self.show_teacher:
            shown["teacher_observation"] = whole
        return shown
