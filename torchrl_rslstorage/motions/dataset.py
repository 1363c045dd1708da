"""Many motions as one: looked up by clip and time, and drawn as windows and pairs.

All clips stand behind each other in one flat table, on one time axis; a clip's last frame and the next
one's first share a time, and belonging to a clip is a matter of its first and last row.

    rows       0 · 1 · 2 · 3 │ 4 · 5 · 6        clip 0 is rows 0 to 3, clip 1 is rows 4 to 6
    axis [s]   0   1   2   3 │ 3  3.5  4        time 0.6 of clip 1 is 3.6 on the axis: between rows 5 and 6

So a look-up of any number of times in any clips is one search and one gather, without a loop over clips.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_rslstorage.data.leaves import Key, canonical, dtype_name, leaves, nest, show, show_all
from torchrl_rslstorage.motions.clips import MotionClip, positive
from torchrl_rslstorage.motions.quaternions import columns, put, slerp, take
from torchrl_rslstorage.motions.readers import find_motions, read_motion

Motion = MotionClip | str | os.PathLike[str]

# Of a clip's duration, by which a window may be longer: `steps * dt` and times kept in float32 are rounded.
TIME_TOLERANCE = 1e-6


class MotionDataset:
    """Demonstrations drawn by weight: states ``dt`` seconds apart, of clips with any frame rate.

    Between two frames, fields are interpolated linearly and quaternions by slerp; at a frame, the result is
    that frame. Times are clamped to the clip: also a clip that loops ends with its last frame. A draw takes
    a clip with probability proportional to its weight, then a start uniformly among the times at which the
    whole window lies within the clip.

    The dataset has no state but its generator's. Nothing in `frames_at`, `sample` and `pairs` waits for the
    device.

    Args:
        motions: a `MotionClip`, a file, a folder, a pattern such as ``"motions/walk_*.npz"``, or several of
            these. All clips have the same fields, of the same widths.
        weights: one for each clip, above zero, in place of the clips' own.
        device: where the table is kept and drawn. ``None`` is where the first clip is.
        dtype: of the fields. ``None`` is torch's default one.
        generator: on that device, used where a call is given none. ``None`` is torch's own.

    Attributes:
        clips: the clips, in order, as they were read.
        weights: one a clip.
        generator: as given.
        device: where the table is.

    Raises:
        FileNotFoundError: a file is missing, or a folder or pattern has none.
        ValueError: a file cannot be read; there is no clip; clips differ in their fields, widths, quaternions
            or names; a weight is not above zero, or the number of weights is not that of clips.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import MotionClip, MotionDataset
        >>> frames = TensorDict({"joint_pos": torch.arange(5.0).unsqueeze(-1)}, [5])
        >>> motions = MotionDataset(MotionClip(frames, fps=10))
        >>> motions.frames_at(torch.tensor([0, 0]), torch.tensor([0.1, 0.25]))["joint_pos"].tolist()
        [[1.0], [2.5]]
        >>> pairs = motions.pairs(8, dt=0.1, keys=["joint_pos", "joint_vel"])
        >>> (
        ...     pairs["observation"].shape,
        ...     torch.allclose(
        ...         pairs["next", "observation"] - pairs["observation"], torch.tensor([1.0, 0.0]), atol=1e-5
        ...     ),
        ... )
        (torch.Size([8, 2]), True)
    """

    def __init__(
        self,
        motions: Motion | Iterable[Motion],
        *,
        weights: Sequence[float] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.clips = _clips(motions)
        for clip in self.clips[1:]:
            _check_same(self.clips[0], clip)
        if weights is None:
            weights = [clip.weight for clip in self.clips]
        if len(weights) != len(self.clips):
            raise ValueError(
                f"There are {len(weights)} weights for {len(self.clips)} clips; give one for each."
            )
        self.weights = [
            positive(weight, f"The weight of {clip.name}")
            for weight, clip in zip(weights, self.clips, strict=True)
        ]
        self.generator = generator
        self.device = self.clips[0].times.device if device is None else torch.device(device)
        self._dtype = torch.get_default_dtype() if dtype is None else dtype
        if not self._dtype.is_floating_point:
            raise ValueError(f"`dtype` is {dtype_name(self._dtype)}, in which nothing can be interpolated.")
        self._durations = [clip.duration for clip in self.clips]

        def on_device(numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=self.device)

        lengths = on_device([len(clip) for clip in self.clips], torch.int64)
        self._first = lengths.cumsum(0) - lengths
        self._last = self._first + lengths - 1
        self._duration = on_device(self._durations, torch.float64)
        self._start = self._duration.cumsum(0) - self._duration
        self._chances = on_device(self.weights, torch.float64).cumsum(0)
        self._axis = torch.cat([clip.times.to(self.device) for clip in self.clips])
        self._axis += self._start.repeat_interleave(lengths)
        tables = [leaves(clip.frames) for clip in self.clips]
        self._fields = {
            key: torch.cat([table[key].to(self.device, self._dtype) for table in tables]) for key in tables[0]
        }
        self._quaternions = {
            key: columns(start, self.device) for key, start in self.clips[0].quaternions.items()
        }

    def __len__(self) -> int:
        return len(self.clips)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} clips, {len(self._axis)} frames, "
            f"{sum(self._durations):.4g} s, fields {show_all(self._fields)})"
        )

    def frames_at(self, clip: Tensor, time: Tensor) -> TensorDict:
        """The state of each clip at each time.

        Args:
            clip: ``[*]`` int64, numbers of clips.
            time: ``[*]`` floating-point, seconds after the clip's first frame; before it, that frame holds,
                and after the last one, the last.

        Returns:
            ``[*]`` with every field of the clips.

        Raises:
            ValueError: the two differ in shape, or have other dtypes.
            IndexError: there is no such clip (on CUDA, torch's device-side assertion).

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl_rslstorage import MotionClip, MotionDataset
            >>> clip = MotionClip(TensorDict({"joint_pos": torch.tensor([[0.0], [4.0]])}, [2]), fps=1)
            >>> MotionDataset(clip).frames_at(torch.tensor(0), torch.tensor(0.25))["joint_pos"]
            tensor([1.])
        """
        if clip.shape != time.shape or clip.dtype is not torch.int64 or not time.is_floating_point():
            raise ValueError(
                f"`clip` must be int64 and `time` floating-point, of one shape; got {clip.dtype} "
                f"{tuple(clip.shape)} and {time.dtype} {tuple(time.shape)}."
            )
        fields = self._read(clip, time, list(self._fields))
        return TensorDict(nest(fields), clip.shape, device=self.device)

    def sample(
        self, num: int, dt: float, window: int = 2, *, generator: torch.Generator | None = None
    ) -> TensorDict:
        """Windows of consecutive states.

        Args:
            num: how many windows.
            dt: seconds between two states of a window, such as the environment's step.
            window: states of a window.
            generator: on the dataset's device, in place of the dataset's.

        Returns:
            ``[num, window]`` with every field of the clips.

        Raises:
            ValueError: a clip is shorter than the window; ``dt`` is not above zero, or a number is below one.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl_rslstorage import MotionClip, MotionDataset
            >>> frames = TensorDict({"joint_pos": torch.arange(5.0).unsqueeze(-1)}, [5])
            >>> MotionDataset(MotionClip(frames, fps=10)).sample(3, dt=0.1, window=4).shape
            torch.Size([3, 4])
        """
        clip, time = self._draw(num, dt, window, generator)
        return self.frames_at(clip, time)

    def pairs(
        self,
        num: int,
        dt: float,
        keys: Sequence[NestedKey],
        *,
        out_key: NestedKey = "observation",
        generator: torch.Generator | None = None,
    ) -> TensorDict:
        """Transitions as a discriminator reads them: a vector, and the vector ``dt`` seconds later.

        Args:
            num: how many pairs.
            dt: seconds from a state to the next.
            keys: the fields that make up the vector, in this order, each flattened.
            out_key: what the vector is called.
            generator: on the dataset's device, in place of the dataset's.

        Returns:
            ``[num]`` with ``out_key`` and ``("next", out_key)``, each ``[num, D]``.

        Raises:
            ValueError: a key is no field of the clips; a clip is shorter than ``dt``; ``dt`` is not above
                zero; ``num`` is below one.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl_rslstorage import MotionClip, MotionDataset
            >>> frames = TensorDict({"joint_pos": torch.zeros(5, 3), "root_pos": torch.zeros(5, 3)}, [5])
            >>> motions = MotionDataset(MotionClip(frames, fps=10))
            >>> motions.pairs(8, 0.02, ["root_pos", "joint_pos"])["next", "observation"].shape
            torch.Size([8, 6])
        """
        names = [canonical(key) for key in ([keys] if isinstance(keys, str) else keys)]
        unknown = [name for name in names if name not in self._fields]
        if unknown or not names:
            raise ValueError(
                f"`keys` must name fields of the clips, got {show_all(unknown or names)}. There are "
                f"{show_all(self._fields)}."
            )
        clip, time = self._draw(num, dt, 2, generator)
        fields = self._read(clip, time, names)
        vector = torch.cat([fields[name].flatten(2) for name in names], -1)
        out = canonical(out_key)
        after = ("next", out) if isinstance(out, str) else ("next", *out)
        return TensorDict(nest({out: vector[:, 0], after: vector[:, 1]}), [num], device=self.device)

    def resample(self, dt: float) -> MotionDataset:
        """The same motions with a frame every ``dt`` seconds, the first at each clip's start.

        What is left of a clip after its last whole step is dropped. At its own rate, a clip stays as it is.

        Args:
            dt: seconds, such as the environment's step.

        Raises:
            ValueError: ``dt`` is not above zero, or longer than a clip.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl_rslstorage import MotionClip, MotionDataset
            >>> clip = MotionClip(TensorDict({"joint_pos": torch.tensor([[0.0], [1.0]])}, [2]), fps=1)
            >>> MotionDataset(clip).resample(0.25).clips[0].frames["joint_pos"].flatten().tolist()
            [0.0, 0.25, 0.5, 0.75, 1.0]
        """
        self._check_span(positive(dt, "`dt`"))
        clips = []
        for number, clip in enumerate(self.clips):
            steps = int(self._durations[number] / dt * (1 + TIME_TOLERANCE))
            times = torch.arange(steps + 1, dtype=torch.float64, device=self.device) * dt
            clips.append(
                MotionClip(
                    self.frames_at(torch.full_like(times, number, dtype=torch.int64), times),
                    times=times,
                    name=clip.name,
                    weight=self.weights[number],
                    quaternions=clip.quaternions,
                    joint_names=clip.joint_names,
                    body_names=clip.body_names,
                )
            )
        return MotionDataset(clips, device=self.device, dtype=self._dtype, generator=self.generator)

    def _draw(
        self, num: int, dt: float, window: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        if num < 1 or window < 1:
            raise ValueError(f"`num` and `window` must be at least one, got {num} and {window}.")
        span = positive(dt, "`dt`") * (window - 1)
        self._check_span(span)
        generator = self.generator if generator is None else generator
        chance, phase = torch.rand(2, num, dtype=torch.float64, device=self.device, generator=generator)
        clip = torch.searchsorted(self._chances, chance * self._chances[-1])
        start = phase * (self._duration.index_select(0, clip) - span).clamp_(min=0)
        steps = torch.arange(window, dtype=torch.float64, device=self.device) * dt
        return clip.unsqueeze(-1).expand(num, window), start.unsqueeze(-1) + steps

    def _check_span(self, span: float) -> None:
        shortest = min(self._durations)
        if span > shortest * (1 + TIME_TOLERANCE):
            clip = self.clips[self._durations.index(shortest)]
            raise ValueError(
                f"{clip.name} lasts {shortest:.6g} s, which is shorter than the {span:.6g} s that were asked "
                "for. Leave it out, or ask for less."
            )

    def _read(self, clip: Tensor, time: Tensor, names: Sequence[Key]) -> dict[Key, Tensor]:
        shape, clip = clip.shape, clip.reshape(-1)
        time = time.reshape(-1).double().clamp(min=0)
        time = torch.minimum(time, self._duration.index_select(0, clip)) + self._start.index_select(0, clip)
        before = torch.searchsorted(self._axis, time, right=True) - 1
        before = torch.maximum(before, self._first.index_select(0, clip))
        before = torch.minimum(before, self._last.index_select(0, clip) - 1)
        left, right = self._axis.index_select(0, before), self._axis.index_select(0, before + 1)
        weight = ((time - left) / (right - left)).to(self._dtype)
        return {name: self._blend(name, before, weight, shape) for name in names}

    def _blend(self, name: Key, before: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        field = self._fields[name]
        a, b = field.index_select(0, before), field.index_select(0, before + 1)
        weight = weight.view(-1, *[1] * (field.ndim - 1))
        between = torch.lerp(a, b, weight)
        places = self._quaternions.get(name)
        if places is not None:
            between = put(between, places, slerp(take(a, places), take(b, places), weight))
        return between.view(*shape, *field.shape[1:])


def _clips(motions: Motion | Iterable[Motion]) -> list[MotionClip]:
    if isinstance(motions, MotionClip | str | os.PathLike):
        motions = [motions]
    clips: list[MotionClip] = []
    for motion in motions:
        if isinstance(motion, MotionClip):
            clips.append(motion)
        else:
            clips += [read_motion(file) for file in find_motions(motion)]
    if not clips:
        raise ValueError("There is no motion: give at least one clip, file, folder or pattern.")
    return clips


def _check_same(first: MotionClip, clip: MotionClip) -> None:
    one, other = leaves(first.frames), leaves(clip.frames)
    if one.keys() != other.keys():
        raise ValueError(
            f"{clip.name} holds {show_all(other)}, but {first.name} holds {show_all(one)}. All clips of a "
            "dataset have the same fields; exclude those that some lack."
        )
    for key in one:
        if one[key].shape[1:] != other[key].shape[1:]:
            raise ValueError(
                f"{show(key)} is {tuple(other[key].shape)} in {clip.name}, but {tuple(one[key].shape)} in "
                f"{first.name}. All clips of a dataset have fields of the same widths."
            )
    if first.quaternions != clip.quaternions:
        raise ValueError(
            f"The quaternions of {clip.name} start in the columns {clip.quaternions}, but those of "
            f"{first.name} in {first.quaternions}."
        )
    for kind in ("joint_names", "body_names"):
        names, others = getattr(first, kind), getattr(clip, kind)
        if names and others and names != others:
            raise ValueError(
                f"`{kind}` of {clip.name} are {list(others)}, but those of {first.name} {list(names)}: the "
                "same column would mean different things."
            )
