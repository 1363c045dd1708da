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
- State is float64 and replaced, never written to; what is handed out is float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, Composite, Unbounded

from torchrl_rslstorage.envs.base import BatchedEnv, Leaves
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


class PointMassEnv(BatchedEnv):
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
            ``[0, max_episode_steps)``, as `PendulumEnv` does.
        device: where the state and every tensor live.
        seed: of the environment's own generator; None draws one.

    Raises:
        ValueError: ``num_envs`` or ``max_episode_steps`` is not a positive integer.
    """

    can_save_state = True

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
        if max_episode_steps < 1:
            raise ValueError(f"`max_episode_steps` must be at least 1, got {max_episode_steps}.")
        super().__init__(num_envs, device=device)
        self.max_episode_steps = max_episode_steps
        self.partial_first_episodes = init_at_random_ep_len
        self.state: PointMassState | None = None
        self._first_reset_done = False
        self._generator = torch.Generator(self.device)
        self.observation_spec = Composite(
            observation=Unbounded(torch.Size([num_envs, 4]), dtype=torch.float32, device=self.device),
            shape=self.batch_size,
            device=self.device,
        )
        self.action_spec = Bounded(
            -1.0, 1.0, torch.Size([num_envs, 2]), dtype=torch.float32, device=self.device
        )
        self.set_seed(seed)

    def start(self) -> Leaves:
        """Draws all N point masses anew; their step counters are spread out the first time."""
        shape = (self.num_envs, 1)
        if self.partial_first_episodes and not self._first_reset_done:
            step_count = torch.randint(
                self.max_episode_steps, shape, device=self.device, generator=self._generator
            )
        else:
            step_count = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._first_reset_done = True
        self.state = PointMassState(*self._draw(), step_count)
        return {"observation": self._observe(self.state)}

    def restart(self, mask: Tensor) -> Leaves:
        """Draws the point masses in ``mask [N, 1]`` anew, their step counters at 0."""
        old = self._current()
        position, velocity = self._draw()
        self.state = PointMassState(
            torch.where(mask, position, old.position),
            torch.where(mask, velocity, old.velocity),
            old.step_count.masked_fill(mask, 0),
        )
        return {"observation": self._observe(self.state)}

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
            "observation": self._observe(self.state),
            "reward": -position.square().sum(-1, keepdim=True).float(),
            "done": terminated | truncated,
            "terminated": terminated,
            "truncated": truncated,
        }

    def after_step(self, next_leaves: Mapping[NestedKey, Tensor]) -> Leaves:
        """Draws the point masses that are done anew; on the CPU only in steps that end an episode."""
        done = next_leaves["done"]
        if done.device.type == "cpu" and not done.any():
            return {"observation": next_leaves["observation"]}
        return self.restart(done)

    def get_extra_state(self) -> dict[str, Any]:
        """All that the next step depends on, as ``state_dict`` carries it under ``_extra_state``."""
        return {
            "state": None if self.state is None else self.state._asdict(),
            "generator": self._generator.get_state(),
            "first_reset_done": self._first_reset_done,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `get_extra_state` returned, to the bit.

        Raises:
            ValueError: the state is that of another number of point masses; nothing is changed then.
        """
        loaded = state["state"]
        if loaded is not None:
            found = len(loaded["position"])
            if found != self.num_envs:
                raise ValueError(
                    f"The saved state is one of {found} point masses, but this environment holds "
                    f"{self.num_envs}: build it with `num_envs={found}`."
                )
            loaded = PointMassState(**{k: v.to(self.device, copy=True) for k, v in loaded.items()})
        self._generator.set_state(state["generator"].cpu())
        self.state = loaded
        self._first_reset_done = bool(state["first_reset_done"])

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def _draw(self) -> tuple[Tensor, Tensor]:
        """N starting positions and velocities, each ``[N, 2]``."""
        unit = torch.empty(2, self.num_envs, 2, dtype=torch.float64, device=self.device)
        position, velocity = unit.uniform_(-1.0, 1.0, generator=self._generator).unbind()
        return position * _START_POSITION, velocity * _START_SPEED

    def _current(self) -> PointMassState:
        if self.state is None:
            raise RuntimeError("The point masses were not started yet: call `reset()` before `step()`.")
        return self.state

    @staticmethod
    def _observe(state: PointMassState) -> Tensor:
        return torch.cat([state.position, state.velocity], -1).float()


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
    if not fps > 0:
        raise ValueError(f"`fps` must be positive, got {fps}.")
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
