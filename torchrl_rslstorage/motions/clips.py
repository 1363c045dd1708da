"""One motion: frames, the times at which they stand, and which of their columns are quaternions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_rslstorage.data.leaves import Key, canonical, dtype_name, leaves, nest, show, show_all
from torchrl_rslstorage.motions.quaternions import columns, continuous, put, take
from torchrl_rslstorage.motions.velocities import joint_velocity

# What the usual fields look like behind F, by their name; -1 is B, which they share.
SHAPES: dict[Key, tuple[int, ...]] = {
    "root_pos": (3,),
    "root_quat": (4,),
    "body_pos": (-1, 3),
    "body_quat": (-1, 4),
    "body_lin_vel": (-1, 3),
    "body_ang_vel": (-1, 3),
}


class MotionClip:
    """F frames of one motion, checked, with unit quaternions and with joint velocities.

    Quaternions are ``wxyz``. They are normalised, and of q and −q, which are the same rotation, that one is
    kept which is closer to the frame before (w ≥ 0 in the first frame): a clip never jumps where its body
    does not. Positions, heading and the upward axis stay as they are given.

    Where ``joint_vel`` is missing it is derived from ``joint_pos``: the mean of the rates of the two
    neighbouring intervals, each weighed by the other's duration, and the only interval's in the first and in
    the last frame.

    Args:
        frames: ``[F]``, at least two frames of floating-point fields ``[F, *]``, copied. ``joint_pos [F, W]``
            must be there. ``joint_vel [F, D]``, ``root_pos [F, 3]``, ``root_quat [F, 4]``,
            ``body_pos [F, B, 3]``, ``body_quat [F, B, 4]``, ``body_lin_vel [F, B, 3]`` and
            ``body_ang_vel [F, B, 3]`` are held to these shapes; any other field is welcome.
        fps: frames a second; or else:
        times: ``[F]`` seconds, increasing. Kept relative to the first.
        name: what errors call the clip; for clips that were read, the file.
        weight: how often the clip is drawn, relative to others.
        quaternions: for each field that holds quaternions, the columns of its last dimension in which they
            start. ``None`` takes the fields whose name ends in ``quat``, from the first column to the last.
        joint_names: one for each joint of ``joint_pos``, in its order.
        body_names: one for each body, B.

    Attributes:
        frames: ``[F]``, locked.
        times: ``[F]`` float64 seconds, the first 0.
        name: as given.
        weight: as given.
        quaternions: as given or found, by field.
        joint_names: as given.
        body_names: as given.

    Raises:
        ValueError: fewer than two frames; times that do not increase; a field that is not finite, is not
            floating-point, or is not as wide as its name or its names say; a quaternion of length zero; no
            ``joint_pos``. The message names clip, field and frame.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import MotionClip
        >>> angle = torch.tensor([[0.0], [0.1], [0.2]])
        >>> clip = MotionClip(TensorDict({"joint_pos": angle}, [3]), fps=10, name="swing")
        >>> clip, [round(v, 4) for v in clip.frames["joint_vel"].flatten().tolist()]
        (MotionClip('swing', 3 frames, 0.2 s), [1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        frames: TensorDictBase,
        *,
        fps: float | None = None,
        times: Tensor | None = None,
        name: str = "clip",
        weight: float = 1.0,
        quaternions: Mapping[Any, Sequence[int]] | None = None,
        joint_names: Sequence[str] = (),
        body_names: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.weight = positive(weight, f"{name}: `weight`")
        self.joint_names = tuple(joint_names)
        self.body_names = tuple(body_names)
        if frames.ndim != 1 or len(frames) < 2:
            raise ValueError(
                f"{name}: the frames have batch size {list(frames.batch_size)}, expected [F] with at least "
                "two frames: nothing can be interpolated in fewer."
            )
        fields = leaves(frames)
        if "joint_pos" not in fields:
            raise ValueError(f"{name}: there is no 'joint_pos', only {show_all(fields)}. A clip needs it.")
        for key, value in fields.items():
            self._check_values(key, value)
        self._check_shapes(fields)
        self.times = self._times(fps, times, len(frames), fields["joint_pos"].device)
        if quaternions is None:
            quaternions = {
                key: range(0, value.shape[-1], 4)
                for key, value in fields.items()
                if (key if isinstance(key, str) else key[-1]).endswith("quat")
            }
        self.quaternions = {canonical(key): tuple(sorted(start)) for key, start in quaternions.items()}
        for key, start in self.quaternions.items():
            fields[key] = self._unit(key, fields, start)
        self._check_joints(fields)
        self.frames = TensorDict(nest(fields), [len(frames)]).clone().lock_()

    @property
    def duration(self) -> float:
        """Seconds from the first frame to the last."""
        return self.times[-1].item()

    def __len__(self) -> int:
        return len(self.times)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} frames, {self.duration:.4g} s)"

    def _check_values(self, key: Key, value: Tensor) -> None:
        if not value.is_floating_point() or value.ndim < 2:
            raise ValueError(
                f"{self.name}: {show(key)} is {dtype_name(value.dtype)} {tuple(value.shape)}, expected a "
                "floating-point [F, *] with at least one more dimension. Cast it, or unsqueeze it."
            )
        bad = value.isfinite().flatten(1).all(-1).logical_not()
        if bad.any():
            raise ValueError(f"{self.name}: {show(key)} is not finite in frame {_first(bad)}.")

    def _check_shapes(self, fields: dict[Key, Tensor]) -> None:
        num = len(fields["joint_pos"])
        if fields["joint_pos"].ndim != 2:
            raise ValueError(
                f"{self.name}: 'joint_pos' is {tuple(fields['joint_pos'].shape)}, expected [{num}, W]."
            )
        here = [key for key in SHAPES if key in fields]
        bodies = [fields[key].shape[1] for key in here if len(SHAPES[key]) == 2]
        num_bodies = len(self.body_names) or (bodies[0] if bodies else 0)
        for key in here:
            expected = (num, *(num_bodies if size == -1 else size for size in SHAPES[key]))
            if tuple(fields[key].shape) != expected:
                raise ValueError(
                    f"{self.name}: {show(key)} is {tuple(fields[key].shape)}, expected {expected}"
                    f"{', by the body names' if self.body_names and bodies else ''}."
                )

    def _times(self, fps: float | None, times: Tensor | None, num: int, device: torch.device) -> Tensor:
        if (fps is None) == (times is None):
            raise ValueError(f"{self.name}: give either `fps` or `times`, got {fps=} and {times=}.")
        if times is None:
            assert fps is not None
            rate = positive(fps, f"{self.name}: `fps`")
            return torch.arange(num, dtype=torch.float64, device=device) / rate
        times = times.to(device, torch.float64)
        if tuple(times.shape) != (num,):
            raise ValueError(f"{self.name}: `times` has shape {tuple(times.shape)}, expected ({num},).")
        times = times - times[0]
        stands = torch.logical_not(times.diff() > 0)  # not `<= 0`: NaN stands too
        if stands.any() or times[-1].isinf():
            frame = _first(stands) if stands.any() else num - 2
            raise ValueError(
                f"{self.name}: time does not increase from frame {frame} to frame {frame + 1} "
                f"({times[frame].item()} s to {times[frame + 1].item()} s after the first)."
            )
        return times

    def _unit(self, key: Key, fields: dict[Key, Tensor], start: tuple[int, ...]) -> Tensor:
        if key not in fields:
            raise ValueError(
                f"{self.name}: `quaternions` names {show(key)}, which is none of {show_all(fields)}."
            )
        value = fields[key]
        overlap = any(after - before < 4 for before, after in pairwise(start))
        if overlap or not start or start[0] < 0 or start[-1] + 4 > value.shape[-1]:
            raise ValueError(
                f"{self.name}: {show(key)} is {tuple(value.shape)}, which has no room for quaternions of "
                f"four columns that start in the columns {list(start)} of its last dimension."
            )
        places = columns(start, value.device)
        q = take(value, places)
        # Below its rounding error a quaternion has no direction.
        zero = torch.linalg.vector_norm(q, dim=-1) < torch.finfo(q.dtype).eps
        if zero.any():
            frame = _first(zero.flatten(1).any(-1))
            raise ValueError(f"{self.name}: {show(key)} holds a quaternion of length zero in frame {frame}.")
        return put(value, places, continuous(q))

    def _check_joints(self, fields: dict[Key, Tensor]) -> None:
        joint_pos, spherical = fields["joint_pos"], self.quaternions.get("joint_pos", ())
        joints, degrees = joint_pos.shape[-1] - 3 * len(spherical), joint_pos.shape[-1] - len(spherical)
        if self.joint_names and len(self.joint_names) != joints:
            raise ValueError(
                f"{self.name}: there are {len(self.joint_names)} joint names, but 'joint_pos' "
                f"{tuple(joint_pos.shape)} has {joints} joints."
            )
        if "joint_vel" not in fields:
            velocity = joint_velocity(joint_pos.double(), self.times.diff(), spherical)
            fields["joint_vel"] = velocity.to(joint_pos.dtype)
        elif tuple(fields["joint_vel"].shape) != (len(joint_pos), degrees):
            raise ValueError(
                f"{self.name}: 'joint_vel' is {tuple(fields['joint_vel'].shape)}, but 'joint_pos' "
                f"{tuple(joint_pos.shape)} has {degrees} degrees of freedom."
            )


def positive(value: float, what: str) -> float:
    """``value`` as a float; raises a ValueError that names ``what`` unless it is finite and above zero."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} must be finite and above zero, got {value!r}.")
    return float(value)


def _first(flags: Tensor) -> int:
    return int(flags.to(torch.uint8).argmax())
