"""A batch of driven point masses in the plane, in torch: the embedded task of adversarial motion priors.

A mass of 1 kg at x, with velocity v, is pushed for a time step dt by a constant force u, of at most F in
either direction:

    x' = x + v·dt + ½·u·dt²
    v' = v + u·dt                                        dt = 0.05 s, F = 5 N
    r  = −‖x‖²                                           the task: rest at the origin

Decisions:

- The motion to be learned, `circle_motion`, has nothing to do with the task: a policy that follows it has
  learned it from demonstrations alone.
- An episode is cut after ``max_episode_steps``, and *terminates* where a mass leaves the arena, so that
  both kinds of ending occur.
- State is float64; what is handed out is float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Bounded, Composite, Unbounded

from torchrl_rslstorage.envs.base import Leaves
from torchrl_rslstorage.envs.embedded import EmbeddedEnv
from torchrl_rslstorage.motions import MotionClip

_DT = 0.05
_MAX_FORCE = 5.0
_ARENA = 3.0
_START_POSITION = 1.5
_START_SPEED = 2.0
_RADIUS = 1.0
_PERIOD = 4.0


class PointMassState(NamedTuple):
    """Where N point masses are."""

    position: Tensor
    """Metres from the origin, ``[N, 2]`` float64."""

    velocity: Tensor
    """Metres per second, ``[N, 2]`` float64."""

    step_count: Tensor
    """Steps taken in this episode, ``[N, 1]`` int64."""


class PointMassEnv(EmbeddedEnv):
    """N point masses in a plane, pushed by two forces each.

    | key | shape | |
    |---|---|---|
    | `observation` | `[N, 4]` float32 | position, velocity |
    | `action` | `[N, 2]` float32 | force in units of 5 N; what exceeds ±1 is clipped inside |
    | `reward` | `[N, 1]` float32 | −‖x‖², in [−18, 0] |
    | `done`, `terminated`, `truncated` | `[N, 1]` bool | `terminated` where ‖x‖∞ > 3 m |

    >>> env = PointMassEnv(4, seed=0)
    >>> env.rollout(3)["next", "reward"].shape
    torch.Size([4, 3, 1])

    Args:
        num_envs: N.
        max_episode_steps: the length of an episode, after which it is truncated.
        init_at_random_ep_len: start the step counters of the first full reset uniformly in
            ``[0, max_episode_steps)`` (`EmbeddedEnv`).
        device: where the state and every tensor live.
        seed: of the environment's own generator; None draws one.

    Raises:
        ValueError: ``num_envs`` or ``max_episode_steps`` is not a positive integer.
    """

    state_type = PointMassState
    state: PointMassState | None

    dt = _DT
    """Seconds of one step."""

    motion_fields = ("joint_pos", "joint_vel")
    """The fields of a motion clip that make up a state, in the order of ``observation``."""

    def __init__(
        self,
        num_envs: int = 256,
        *,
        max_episode_steps: int = 200,
        init_at_random_ep_len: bool = True,
        device: torch.device | str = "cpu",
        seed: int | None = None,
    ) -> None:
        super().__init__(
            num_envs,
            max_episode_steps=max_episode_steps,
            init_at_random_ep_len=init_at_random_ep_len,
            device=device,
        )
        self.observation_spec = Composite(
            observation=Unbounded(torch.Size([num_envs, 4]), dtype=torch.float32, device=self.device),
            shape=self.batch_size,
            device=self.device,
        )
        self.action_spec = Bounded(
            -1.0, 1.0, torch.Size([num_envs, 2]), dtype=torch.float32, device=self.device
        )
        self.set_seed(seed)

    def advance(self, action: Tensor) -> Leaves:
        """Applies the force ``action [N, 2]`` for one time step."""
        position, velocity, step_count = self._current()
        force = action.clamp(-1.0, 1.0).double() * _MAX_FORCE
        position = position + velocity * _DT + force * (0.5 * _DT**2)
        velocity = velocity + force * _DT
        step_count = step_count + 1
        self.state = PointMassState(position, velocity, step_count)
        terminated = (position.abs() > _ARENA).any(-1, keepdim=True)
        truncated = (step_count >= self.max_episode_steps) & ~terminated
        return {
            **self._observe(self.state),
            "reward": -position.square().sum(-1, keepdim=True).float(),
            "done": terminated | truncated,
            "terminated": terminated,
            "truncated": truncated,
        }

    def _draw(self) -> tuple[Tensor, Tensor]:
        """N starting positions and velocities, each ``[N, 2]``."""
        unit = torch.empty(2, self.num_envs, 2, dtype=torch.float64, device=self.device)
        position, velocity = unit.uniform_(-1.0, 1.0, generator=self._generator).unbind()
        return position * _START_POSITION, velocity * _START_SPEED

    def _observe(self, state: PointMassState) -> Leaves:
        return {"observation": torch.cat([state.position, state.velocity], -1).float()}


def circle_motion(*, fps: float = 50.0, num_cycles: int = 2) -> MotionClip:
    """A motion for `PointMassEnv` with exact velocities: anticlockwise on a circle of 1 m, 4 s a cycle.

        x = (cos ωt, sin ωt),  v = ω·(−sin ωt, cos ωt),  ω = 2π / 4 s

    Args:
        fps: frames a second.
        num_cycles: cycles in the clip; the last frame is the first one again.

    Returns:
        A clip with ``joint_pos`` and ``joint_vel``, each ``[F, 2]`` float64.

    Raises:
        ValueError: ``fps`` is not positive or there is no cycle.

    Examples:
        >>> from torchrl_rslstorage import circle_motion
        >>> circle_motion(fps=50).frames["joint_pos"].shape
        torch.Size([401, 2])
    """
    if not 0 < fps < math.inf:
        raise ValueError(f"`fps` must be positive, and finite, got {fps}.")
    if num_cycles < 1:
        raise ValueError(f"`num_cycles` must be at least 1, got {num_cycles}.")
    frames = round(num_cycles * _PERIOD * fps) + 1
    omega = 2 * math.pi / _PERIOD
    angle = torch.arange(frames, dtype=torch.float64) / fps * omega
    cos, sin = angle.cos(), angle.sin()
    fields = {
        "joint_pos": _RADIUS * torch.stack([cos, sin], -1),
        "joint_vel": _RADIUS * omega * torch.stack([-sin, cos], -1),
    }
    return MotionClip(TensorDict(cast("Any", fields), [frames]), fps=fps, name="circle")
