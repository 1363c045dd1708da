"""Motion clips: read from files, looked up by time, drawn as windows and pairs, and every refusal."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from torchrl_rslstorage import MotionClip, MotionDataset, read_motion
from torchrl_rslstorage.motions.readers import HUMANOID

# 99.9 % quantiles of the chi-squared distribution, by degrees of freedom (NIST e-Handbook, 1.3.6.7.4).
CHI_SQUARED_999 = {2: 13.816, 9: 27.877}


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def about_z(angle: Tensor) -> Tensor:
    """Quaternions of turns about z: between two of them, slerp is linear in the angle."""
    zero = torch.zeros_like(angle)
    return torch.stack([(angle / 2).cos(), zero, zero, (angle / 2).sin()], -1)


def angle_about_z(q: Tensor) -> Tensor:
    assert torch.equal(q[..., 1:3], torch.zeros_like(q[..., 1:3]))
    return 2 * torch.atan2(q[..., 3], q[..., 0])


def random_clip(number: int, num: int, seed: int, *, uneven: bool = True, weight: float = 1.0) -> MotionClip:
    """A clip whose ``clip`` is its number and whose ``time`` is its time, among other fields."""
    generator = rng(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(num, *shape, dtype=torch.float64, generator=generator)

    dt = torch.full((num - 1,), 0.02, dtype=torch.float64)
    dt += torch.rand(num - 1, dtype=torch.float64, generator=generator) * uneven
    times = torch.cat([dt.new_zeros(1), dt.cumsum(0)])
    turns = torch.rand(num, 3, dtype=torch.float64, generator=generator)  # within ±1: never half a turn
    frames = TensorDict(
        {
            "joint_pos": torch.cat([randn(1), about_z(turns[:, 0]), randn(2)], -1),
            "body_quat": about_z(turns[:, 1:]),
            "body_pos": randn(2, 3),
            "clip": torch.full((num, 1), number, dtype=torch.float64),
            "nested": {"time": times.unsqueeze(-1)},
        },
        [num],
    )
    return MotionClip(
        frames,
        times=times,
        name=f"clip {number}",
        weight=weight,
        quaternions={"joint_pos": [1], "body_quat": [0]},
    )


def motions_of(
    lengths: Sequence[int], *, dtype: torch.dtype = torch.float64, **options: Any
) -> MotionDataset:
    return MotionDataset(
        [random_clip(i, num, 10 + i, **options) for i, num in enumerate(lengths)], dtype=dtype
    )


# -- look-up by time ---------------------------------------------------------------------------


@given(
    st.lists(st.integers(2, 7), min_size=1, max_size=4),
    st.integers(0, 2**31 - 1),
    st.sampled_from([(), (5,), (2, 3)]),
)
def test_frames_at_any_time_are_what_numpy_interpolates(
    lengths: list[int], seed: int, shape: tuple[int, ...]
) -> None:
    motions = motions_of(lengths)
    generator = rng(seed)
    clip = torch.randint(len(lengths), shape, generator=generator)
    time = torch.rand(shape, dtype=torch.float64, generator=generator) * 8 - 0.5  # some before, some after
    found = motions.frames_at(clip, time)
    assert found.batch_size == torch.Size(shape)
    for place in np.ndindex(*shape):
        source = motions.clips[int(clip[place])]

        def at(values: Tensor, source: MotionClip = source, place: tuple[int, ...] = place) -> Tensor:
            columns = values.flatten(1).numpy().T
            each = [np.interp(time[place].item(), source.times.numpy(), column) for column in columns]
            return torch.tensor(np.array(each)).view(values.shape[1:])

        def same(ours: Tensor, reference: Tensor) -> None:
            torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10)

        row, frames = found[place], source.frames
        assert row["clip"].item() == clip[place].item()
        for key in ("joint_vel", "body_pos", ("nested", "time")):
            same(row[key], at(frames[key]))
        same(row["joint_pos"][[0, 5, 6]], at(frames["joint_pos"][:, [0, 5, 6]]))
        same(
            angle_about_z(row["joint_pos"][1:5]),
            at(angle_about_z(frames["joint_pos"][:, 1:5]).unsqueeze(-1))[0],
        )
        same(angle_about_z(row["body_quat"]), at(angle_about_z(frames["body_quat"])))


def test_times_outside_a_clip_hold_its_first_and_its_last_frame() -> None:
    motions = motions_of([4, 5, 3])
    clip = torch.tensor([0, 1, 2])
    for time, frame in ((-3.0, 0), (1e9, -1)):
        found = motions.frames_at(clip, torch.full((3,), time))
        for i, source in enumerate(motions.clips):
            torch.testing.assert_close(found[i], source.frames[frame], rtol=0, atol=1e-15)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_a_clip_resampled_at_its_own_rate_is_itself(dtype: torch.dtype, atol: float) -> None:
    motions = motions_of([50, 2, 333], dtype=dtype, uneven=False)
    again = motions.resample(0.02)
    for clip, before in zip(again.clips, motions.clips, strict=True):
        assert (len(clip), clip.name, clip.quaternions) == (len(before), before.name, before.quaternions)
        torch.testing.assert_close(clip.frames.double(), before.frames, rtol=atol, atol=atol)
        torch.testing.assert_close(clip.times, before.times, rtol=0, atol=1e-9)


def test_twice_the_frames_and_back_are_the_frames() -> None:
    motions = motions_of([50, 3], uneven=False)
    finer = motions.resample(0.01)
    assert [len(clip) for clip in finer.clips] == [99, 5]
    for clip, before in zip(finer.resample(0.02).clips, motions.clips, strict=True):
        torch.testing.assert_close(clip.frames, before.frames, rtol=1e-12, atol=1e-12)


def test_resampling_drops_what_is_left_of_the_last_step_and_keeps_weights() -> None:
    motions = MotionDataset(random_clip(0, 6, 0, uneven=False), weights=[3.0]).resample(0.03)
    assert len(motions.clips[0]) == 4  # 0.10 s hold three steps
    assert motions.weights == [3.0]


# -- windows and pairs -------------------------------------------------------------------------


@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=4),
    st.integers(1, 5),
    st.floats(0.05, 1),
    st.integers(0, 2**31 - 1),
)
def test_windows_are_dt_apart_and_never_leave_their_clip(
    lengths: list[int], window: int, share: float, seed: int
) -> None:
    motions = motions_of(lengths)
    durations = torch.tensor([clip.duration for clip in motions.clips], dtype=torch.float64)
    dt = share * durations.min().item() / max(window - 1, 1)
    windows = motions.sample(64, dt, window, generator=rng(seed))
    assert windows.batch_size == (64, window)
    time, clip = windows["nested", "time"].squeeze(-1), windows["clip"].squeeze(-1)
    assert torch.equal(clip, clip[:, :1].expand_as(clip))
    torch.testing.assert_close(time.diff(dim=1), torch.full_like(time[:, 1:], dt), rtol=0, atol=1e-9)
    assert (time >= 0).all()
    assert (time <= durations[clip.long()] + 1e-9).all()


def test_a_window_as_long_as_the_clip_is_the_clip() -> None:
    motions = motions_of([6], uneven=False)
    windows = motions.sample(3, 0.02, 6, generator=rng(0))
    torch.testing.assert_close(windows[1], motions.clips[0].frames, rtol=0, atol=1e-12)


def test_a_window_as_long_as_the_clip_fits_although_its_span_is_rounded_up() -> None:
    clip = MotionClip(TensorDict({"joint_pos": torch.arange(4.0).unsqueeze(-1)}, [4]), fps=10)
    assert clip.duration < 3 * 0.1
    windows = MotionDataset(clip).sample(2, 0.1, 4)["joint_pos"].squeeze(-1)
    torch.testing.assert_close(windows, torch.arange(4.0).expand(2, 4), rtol=0, atol=1e-6)


def chi_squared(counts: Tensor, expected: Tensor) -> float:
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("own", [False, True], ids=["weights of the dataset", "weights of the clips"])
def test_clips_are_drawn_by_their_weights_whatever_their_lengths(own: bool) -> None:
    weights = [1.0, 5.0, 2.0]
    clips = [random_clip(i, n, i, weight=weights[i] if own else 1.0) for i, n in enumerate([40, 3, 9])]
    motions = MotionDataset(clips, weights=None if own else weights)
    drawn = motions.sample(8000, 0.01, generator=rng(1))["clip"][:, 0].long().view(-1)
    expected = 8000 * torch.tensor(weights) / 8
    assert chi_squared(torch.bincount(drawn, minlength=3), expected) < CHI_SQUARED_999[2]


def test_starts_are_uniform_over_the_times_at_which_the_window_fits() -> None:
    motions = motions_of([9])
    span = 0.3 * motions.clips[0].duration
    start = motions.sample(10_000, span, generator=rng(2))["nested", "time"][:, 0].view(-1)
    tenth = (start / (motions.clips[0].duration - span) * 10).long()
    assert chi_squared(torch.bincount(tenth, minlength=10), torch.full((10,), 1000.0)) < CHI_SQUARED_999[9]


def test_the_same_generator_draws_the_same_and_torchs_own_is_left_alone() -> None:
    motions = motions_of([5, 8])
    state = torch.get_rng_state()
    one, other = (motions.sample(32, 0.01, generator=rng(7)) for _ in range(2))
    assert (one == other).all()
    assert not (one == motions.sample(32, 0.01, generator=rng(8))).all()
    with_its_own = MotionDataset(motions.clips, dtype=torch.float64, generator=rng(7))
    assert (with_its_own.sample(32, 0.01) == one).all()
    assert not (with_its_own.sample(32, 0.01) == one).all()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    first = motions.sample(32, 0.01)
    torch.manual_seed(3)
    assert (motions.sample(32, 0.01) == first).all()


@pytest.mark.parametrize("out_key", ["observation", ("amp", "state")])
def test_pairs_are_the_flattened_fields_of_a_window_of_two(out_key: str | tuple[str, str]) -> None:
    motions = motions_of([5, 8])
    pairs = motions.pairs(
        16, 0.01, ["body_pos", "clip", ("nested", "time")], out_key=out_key, generator=rng(4)
    )
    windows = motions.sample(16, 0.01, generator=rng(4))
    after = ("next", out_key) if isinstance(out_key, str) else ("next", *out_key)
    assert pairs.batch_size == (16,)
    assert pairs[out_key].shape == pairs[after].shape == (16, 2 * 3 + 1 + 1)
    for i, key in enumerate((out_key, after)):
        state = windows[:, i]
        expected = torch.cat([state["body_pos"].flatten(1), state["clip"], state["nested", "time"]], -1)
        assert torch.equal(pairs[key], expected)


# -- files -------------------------------------------------------------------------------------


def npz_arrays(num: int = 5) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    quat = generator.normal(size=(num, 2, 4))
    return {
        "joint_pos": generator.normal(size=(num, 3)),
        "joint_vel": generator.normal(size=(num, 3)),
        "body_pos": generator.normal(size=(num, 2, 3)),
        "body_quat": quat / np.linalg.norm(quat, axis=-1, keepdims=True),
        "body_lin_vel": generator.normal(size=(num, 2, 3)),
        "body_ang_vel": generator.normal(size=(num, 2, 3)),
        "joint_names": np.array(["a", "b", "c"]),
        "body_names": np.array(["torso", "foot"]),
        "fps": 50,
    }


OURS = tuple(npz_arrays())
ISAAC_LAB = (
    "dof_positions",
    "dof_velocities",
    "body_positions",
    "body_rotations",
    "body_linear_velocities",
    "body_angular_velocities",
    "dof_names",
    "body_names",
    "fps",
)
BEYOND_MIMIC = (*OURS[:2], *(f"{name}_w" for name in OURS[2:6]), *OURS[6:])


@pytest.mark.parametrize("names", [OURS, ISAAC_LAB, BEYOND_MIMIC], ids=["ours", "Isaac Lab", "BeyondMimic"])
def test_an_npz_is_read_by_each_of_its_spellings(tmp_path: Path, names: tuple[str, ...]) -> None:
    arrays = npz_arrays()
    file = tmp_path / "walk.npz"
    np.savez(file, **dict(zip(names, arrays.values(), strict=True)), something_else=np.arange(3))
    clip = read_motion(file)
    assert set(clip.frames.keys()) == set(OURS[:6])
    for key in OURS[:6]:
        ours, theirs = clip.frames[key], torch.from_numpy(arrays[key])
        if key == "body_quat":  # of the two quaternions of a rotation, one is chosen
            ours, theirs = (torch.einsum("fbi,fbj->fbij", q, q) for q in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)
    assert (clip.name, clip.joint_names, clip.body_names) == (str(file), ("a", "b", "c"), ("torso", "foot"))
    torch.testing.assert_close(clip.times, torch.arange(5, dtype=torch.float64) / 50)


@pytest.mark.parametrize("clock", [{"fps": np.array([50])}, {"times": 3 + np.arange(5) / 50}, {"fps": 50.0}])
def test_an_npz_tells_its_rate_as_one_number_or_as_times(tmp_path: Path, clock: dict[str, Any]) -> None:
    np.savez(tmp_path / "walk.npz", joint_pos=np.zeros((5, 1), dtype=np.float32), **clock)
    clip = read_motion(tmp_path / "walk.npz")
    torch.testing.assert_close(clip.times, torch.arange(5, dtype=torch.float64) / 50)


def test_joint_velocities_that_a_file_lacks_are_numpys_gradient(tmp_path: Path) -> None:
    arrays = npz_arrays(7)
    np.savez(tmp_path / "walk.npz", joint_pos=arrays["joint_pos"], fps=20)
    found = read_motion(tmp_path / "walk.npz").frames["joint_vel"]
    expected = np.gradient(arrays["joint_pos"], 1 / 20, axis=0)
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=1e-12)


def humanoid_rows(num: int = 4) -> list[list[float]]:
    """Rows in which every joint turns about z, the i-th at i + 1 rad/s, and the root at a half."""
    rows = []
    for frame in range(num):
        time = 0.1 * frame
        row = [
            0.1 if frame < num - 1 else 0.0,
            time,
            1.0,
            0.0,
            *about_z(torch.tensor(time / 2, dtype=torch.float64)).tolist(),
        ]
        for i, width in enumerate(HUMANOID.values()):
            angle = torch.tensor((i + 1) * time, dtype=torch.float64)
            row += about_z(angle).tolist() if width == 4 else [angle.item()]
        rows.append(row)
    return rows


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_deepmimic_humanoid_has_quaternions_where_it_has_spherical_joints(tmp_path: Path) -> None:
    rows = humanoid_rows()
    clip = read_motion(write(tmp_path / "walk.txt", {"Loop": "wrap", "Frames": rows}))
    assert len(rows[0]) == 44
    assert (len(clip), clip.joint_names[1], len(clip.joint_names)) == (4, "neck", 12)
    torch.testing.assert_close(clip.times, torch.arange(4, dtype=torch.float64) / 10)
    time = torch.tensor(0.15, dtype=torch.float64)
    between = MotionDataset(clip, dtype=torch.float64).frames_at(torch.tensor(0), time)
    expected: list[Tensor] = []
    for i, width in enumerate(HUMANOID.values()):
        angle = (i + 1) * time
        expected.append(about_z(angle) if width == 4 else angle.view(1))
    torch.testing.assert_close(between["joint_pos"], torch.cat(expected), rtol=0, atol=1e-8)
    torch.testing.assert_close(between["root_quat"], about_z(time / 2), rtol=0, atol=1e-8)
    speeds = [[0, 0, i + 1.0] if width == 4 else [i + 1.0] for i, width in enumerate(HUMANOID.values())]
    velocity = torch.tensor([speed for joint in speeds for speed in joint], dtype=torch.float64)
    torch.testing.assert_close(between["joint_vel"], velocity, rtol=0, atol=1e-8)


def test_the_durations_of_deepmimic_frames_may_differ_and_the_last_one_is_not_used(tmp_path: Path) -> None:
    rows = humanoid_rows()
    for row, seconds in zip(rows, [0.1, 0.3, 0.2, -7.0], strict=True):
        row[0] = seconds
    clip = read_motion(write(tmp_path / "walk.json", {"Frames": rows}))
    torch.testing.assert_close(clip.times, torch.tensor([0, 0.1, 0.4, 0.6], dtype=torch.float64))


def test_files_folders_patterns_and_clips_may_be_mixed(tmp_path: Path) -> None:
    for name in ("walk_b.npz", "walk_a.npz", "run.npz"):
        np.savez(tmp_path / name, joint_pos=np.zeros((3, 2)), fps=10)
    (tmp_path / "readme.md").write_text("no motion")

    def names(motions: Any) -> list[str]:
        return [Path(clip.name).name for clip in MotionDataset(motions).clips]

    assert names(tmp_path) == ["run.npz", "walk_a.npz", "walk_b.npz"]
    assert names(f"{tmp_path}/walk_*.npz") == ["walk_a.npz", "walk_b.npz"]
    clip = MotionClip(TensorDict({"joint_pos": torch.zeros(2, 2)}, [2]), fps=1)
    assert names([clip, str(tmp_path / "run.npz"), tmp_path]) == [
        "clip",
        "run.npz",
        "run.npz",
        "walk_a.npz",
        "walk_b.npz",
    ]


# -- refusals ----------------------------------------------------------------------------------


def changed_npz(tmp_path: Path, **changes: Any) -> Path:
    arrays = {**npz_arrays(), **changes}
    file = tmp_path / "walk.npz"
    np.savez(file, **{name: value for name, value in arrays.items() if value is not None})
    return file


def with_cell(key: str, place: tuple[int, ...] | int, value: float) -> np.ndarray:
    array = npz_arrays()[key]
    array[place] = value
    return array


BAD_NPZ: dict[str, tuple[dict[str, Any], str]] = {
    "no joint positions": (
        {"joint_pos": None},
        "no joint positions (joint_pos or dof_positions), only joint_vel",
    ),
    "no rate": ({"fps": None}, "no 'fps' (frames a second), and no 'times'"),
    "a rate of zero": ({"fps": 0}, "'fps' must be finite and above zero, got 0"),
    "a rate of nothing": ({"fps": np.nan}, "'fps' must be finite and above zero, got nan"),
    "several rates": ({"fps": np.ones(5)}, "'fps' is float64 (5,), expected one number"),
    "rate and times": ({"times": np.arange(5)}, "fps and times are the same field"),
    "two spellings": ({"dof_positions": np.zeros((5, 3))}, "joint_pos and dof_positions are the same field"),
    "NaN": ({"joint_pos": with_cell("joint_pos", (3, 1), np.nan)}, "'joint_pos' is not finite in frame 3"),
    "infinity": (
        {"body_pos": with_cell("body_pos", (2, 1, 0), np.inf)},
        "'body_pos' is not finite in frame 2",
    ),
    "zero quaternion": (
        {"body_quat": with_cell("body_quat", (4, 1), 0.0)},
        "'body_quat' holds a quaternion of length zero in frame 4",
    ),
    "one frame": (
        {key: value[:1] for key, value in npz_arrays().items() if key in OURS[:6]},
        "batch size [1], expected [F] with at least two frames",
    ),
    "fewer frames in one field": (
        {"body_pos": np.zeros((4, 2, 3))},
        "'body_pos' has 4 frames, but 'joint_pos' has 5",
    ),
    "body without its axis": (
        {"body_pos": np.zeros((5, 3))},
        "'body_pos' is (5, 3), expected (5, 2, 3), by the body names",
    ),
    "rotation without w": (
        {"body_quat": np.zeros((5, 2, 3))},
        "'body_quat' is (5, 2, 3), expected (5, 2, 4)",
    ),
    "root of another width": ({"root_pos": np.zeros((5, 2))}, "'root_pos' is (5, 2), expected (5, 3)"),
    "joints of rank three": ({"joint_pos": np.zeros((5, 3, 1))}, "'joint_pos' is (5, 3, 1), expected [5, W]"),
    "joints of rank one": (
        {"joint_pos": np.zeros(5)},
        "'joint_pos' is float64 (5,), expected a floating-point [F, *]",
    ),
    "fewer velocities": (
        {"joint_vel": np.zeros((5, 2))},
        "'joint_vel' is (5, 2), but 'joint_pos' (5, 3) has 3 degrees",
    ),
    "fewer joint names": (
        {"joint_names": np.array(["a"])},
        "there are 1 joint names, but 'joint_pos' (5, 3) has 3 joints",
    ),
    "numbers for names": (
        {"joint_names": np.arange(3)},
        "'joint_names' is int64 (3,), expected a list of strings",
    ),
    "text for numbers": (
        {"joint_pos": np.array([["a"]] * 5)},
        "'joint_pos' is <U1 (5, 1), expected numbers [F, *]",
    ),
    "a pickle inside": (
        {"joint_names": np.array(["a", None, "c"], dtype=object)},
        "'joint_names' cannot be read (Object arrays cannot be loaded when allow_pickle=False)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_NPZ.values(), ids=BAD_NPZ)
def test_a_bad_npz_is_refused_by_file_field_and_frame(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    file = changed_npz(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        read_motion(file)
    assert str(refused.value).startswith(str(file))


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([0.0, 1.0, 1.0, 2.0, 3.0], "from frame 1 to frame 2"),
        ([0.0, 1.0, 2.0, 1.5, 3.0], "from frame 2 to frame 3"),
        ([0.0, 1.0, 2.0, 3.0, np.nan], "from frame 3 to frame 4"),
        ([0.0, 1.0, 2.0, 3.0, np.inf], "from frame 3 to frame 4"),
        ([0.0, 1.0], "`times` has shape (2,), expected (5,)"),
    ],
)
def test_times_that_do_not_increase_are_refused(tmp_path: Path, times: list[float], message: str) -> None:
    file = changed_npz(tmp_path, fps=None, times=np.array(times))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_motion(file)


def truncated(file: Path) -> None:
    np.savez(file, fps=50, joint_pos=np.zeros((500, 3)))
    file.write_bytes(file.read_bytes()[:-100])


def damaged(file: Path) -> None:
    np.savez_compressed(file, fps=50, joint_pos=np.random.default_rng(0).normal(size=(500, 3)))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def single_array(file: Path) -> None:
    with file.open("wb") as handle:
        np.save(handle, np.zeros(3))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.write_bytes(b""), "this is no .npz archive of arrays"),
        (lambda file: file.write_bytes(b"not an archive"), "this is no .npz archive of arrays"),
        (lambda file: file.write_bytes(pickle.dumps({"fps": 50})), "this is no .npz archive of arrays"),
        (truncated, "this is no .npz archive of arrays"),
        (damaged, "'joint_pos' cannot be read"),
        (single_array, "this is a single array, not an .npz archive"),
    ],
    ids=["empty", "text", "pickle", "truncated", "damaged", "npy"],
)
def test_what_is_no_npz_is_refused(tmp_path: Path, spoil: Callable[[Path], Any], message: str) -> None:
    file = tmp_path / "walk.npz"
    spoil(file)
    with pytest.raises(ValueError, match=re.escape(f"{file}: {message}")):
        read_motion(file)


def rows_with(frame: int, change: Callable[[list[float]], Any]) -> dict[str, Any]:
    rows: Any = humanoid_rows()
    rows[frame] = change(rows[frame])
    return {"Loop": "wrap", "Frames": rows}


BAD_JSON: dict[str, tuple[Any, str]] = {
    "no Frames": ({"Loop": "wrap"}, "there is no list 'Frames' of at least two frames"),
    "a list": ([1, 2], "there is no list 'Frames' of at least two frames"),
    "one frame": ({"Frames": humanoid_rows()[:1]}, "there is no list 'Frames' of at least two frames"),
    "a shorter row": (rows_with(2, lambda row: row[:-1]), "frame 2 has 43 numbers, but frame 0 has 44"),
    "a row of text": (rows_with(1, lambda row: ["a", *row[1:]]), "frame 1 is not a list of numbers"),
    "a row of truths": (rows_with(1, lambda row: [True, *row[1:]]), "frame 1 is not a list of numbers"),
    "a row that is none": (rows_with(1, lambda _: 3), "frame 1 is not a list of numbers"),
    "NaN": (rows_with(3, lambda row: [*row[:-1], float("nan")]), "'joint_pos' is not finite in frame 3"),
    "zero root": (
        rows_with(2, lambda row: [*row[:4], 0, 0, 0, 0, *row[8:]]),
        "'root_quat' holds a quaternion of length zero in frame 2",
    ),
    "zero neck": (
        rows_with(1, lambda row: [*row[:12], 0, 0, 0, 0, *row[16:]]),
        "'joint_pos' holds a quaternion of length zero in frame 1",
    ),
    "dt of zero": (
        rows_with(1, lambda row: [0.0, *row[1:]]),
        "dt of frame 1 is 0.0, expected the seconds to the next frame",
    ),
    "dt of nothing": (rows_with(2, lambda row: [float("nan"), *row[1:]]), "dt of frame 2 is nan"),
    "another character": (
        {"Frames": [[0.1] * 61] * 3},
        "frame 0 has 61 numbers, and only rows of 44 (humanoid), 20 (Laikago)",
    ),
    "another format": (
        {"FrameDuration": 0.02, "Frames": [[0.1] * 19] * 3},
        "With 'FrameDuration' it is another format",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_a_bad_deepmimic_file_is_refused_by_file_and_frame(
    tmp_path: Path, content: Any, message: str
) -> None:
    file = write(tmp_path / "walk.txt", content)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        read_motion(file)
    assert str(refused.value).startswith(str(file))


@pytest.mark.parametrize(
    "content", [b"", b'{"Frames": [[0.1,', b"\xff\xfe\x00"], ids=["empty", "cut", "not text"]
)
def test_broken_json_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "walk.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{file}: this is no JSON")):
        read_motion(file)


def test_missing_files_and_unknown_endings_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "no.npz"))):
        read_motion(tmp_path / "no.npz")
    for motions in (tmp_path, tmp_path / "no.npz", f"{tmp_path}/*.npz"):
        with pytest.raises(FileNotFoundError, match="no motion file, and no folder or pattern with one"):
            MotionDataset(motions)
    (tmp_path / "walk.pkl").write_bytes(b"")
    with pytest.raises(ValueError, match=re.escape("ends in one of .npz, .txt, .json, not in '.pkl'")):
        MotionDataset(tmp_path / "walk.pkl")
    with pytest.raises(ValueError, match="There is no motion"):
        MotionDataset([])


def test_a_clip_is_told_its_times_once() -> None:
    frames = TensorDict({"joint_pos": torch.zeros(3, 1)}, [3])
    with pytest.raises(ValueError, match="either `fps` or `times`"):
        MotionClip(frames)
    with pytest.raises(ValueError, match="either `fps` or `times`"):
        MotionClip(frames, fps=3, times=torch.arange(3))
    with pytest.raises(ValueError, match="`weight` must be finite and above zero, got 0"):
        MotionClip(frames, fps=3, weight=0)


@pytest.mark.parametrize(
    ("quaternions", "message"),
    [
        ({"joint_pos": [2]}, "no room for quaternions of four columns that start in the columns [2]"),
        ({"joint_pos": [-1]}, "no room for quaternions of four columns that start in the columns [-1]"),
        ({"joint_pos": [0, 1]}, "no room for quaternions of four columns that start in the columns [0, 1]"),
        ({"joint_pos": []}, "no room for quaternions of four columns that start in the columns []"),
        ({"other": [0]}, "`quaternions` names 'other', which is none of 'joint_pos'"),
    ],
)
def test_quaternions_must_have_room(quaternions: dict[str, list[int]], message: str) -> None:
    frames = TensorDict({"joint_pos": torch.ones(3, 5)}, [3])
    with pytest.raises(ValueError, match=re.escape(message)):
        MotionClip(frames, fps=1, quaternions=quaternions)
    with pytest.raises(ValueError, match=r"'foot_quat' is .* no room for quaternions"):
        MotionClip(frames.set("foot_quat", torch.ones(3, 6)), fps=1)


def test_whole_numbers_are_refused_as_fields() -> None:
    with pytest.raises(ValueError, match=r"'joint_pos' is int64 .* expected a floating-point"):
        MotionClip(TensorDict({"joint_pos": torch.zeros(3, 1, dtype=torch.int64)}, [3]), fps=1)
    with pytest.raises(ValueError, match="there is no 'joint_pos', only 'q'"):
        MotionClip(TensorDict({"q": torch.zeros(3, 1)}, [3]), fps=1)


def named(name: str, fields: dict[str, Tensor] | None = None, **options: Any) -> MotionClip:
    fields = {"joint_pos": torch.ones(3, 5)} if fields is None else fields
    return MotionClip(TensorDict(fields, [3]), fps=10, name=name, **options)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: named("b", {"joint_pos": torch.ones(3, 6)}), "'joint_pos' is (3, 6) in b, but (3, 5) in a"),
        (
            lambda: named("b", {"joint_pos": torch.ones(3, 5), "root_pos": torch.ones(3, 3)}),
            "b holds 'joint_pos', 'root_pos', 'joint_vel', but a holds 'joint_pos', 'joint_vel'",
        ),
        (
            lambda: named(
                "b",
                {"joint_pos": torch.ones(3, 5), "joint_vel": torch.ones(3, 4)},
                quaternions={"joint_pos": [0]},
            ),
            "'joint_vel' is (3, 4) in b, but (3, 5) in a",
        ),
        (
            lambda: named("b", joint_names="vwxyz"),
            "`joint_names` of b are ['v', 'w', 'x', 'y', 'z'], but those of a",
        ),
    ],
    ids=["width", "fields", "quaternions", "order of joints"],
)
def test_clips_that_do_not_fit_together_are_refused(other: Callable[[], MotionClip], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MotionDataset([named("a", joint_names="abcde"), other()])


def test_clips_with_quaternions_in_other_columns_are_refused() -> None:
    clips = [named("a", quaternions={"joint_pos": [0]}), named("b", quaternions={"joint_pos": [1]})]
    with pytest.raises(ValueError, match=r"of b start in the columns .*\(1,\).* of a in .*\(0,\)"):
        MotionDataset(clips)


def test_clips_shorter_than_what_is_asked_of_them_are_refused() -> None:
    motions = MotionDataset([random_clip(0, 50, 0, uneven=False), random_clip(1, 3, 1, uneven=False)])
    motions.sample(4, 0.02, 3)
    message = re.escape("clip 1 lasts 0.04 s, which is shorter than the 0.06 s")
    with pytest.raises(ValueError, match=message):
        motions.sample(4, 0.02, 4)
    with pytest.raises(ValueError, match=message):
        motions.pairs(4, 0.06, ["joint_pos"])
    with pytest.raises(ValueError, match=message):
        motions.resample(0.06)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.sample(0, 0.1), "`num` and `window` must be at least one, got 0 and 2"),
        (lambda m: m.sample(4, 0.1, 0), "`num` and `window` must be at least one, got 4 and 0"),
        (lambda m: m.sample(4, 0.0), "`dt` must be finite and above zero, got 0.0"),
        (lambda m: m.resample(-0.1), "`dt` must be finite and above zero, got -0.1"),
        (
            lambda m: m.pairs(4, 0.1, ["joint_pos", "q"]),
            "fields of the clips, got 'q'. There are 'joint_pos', 'joint_vel'",
        ),
        (lambda m: m.pairs(4, 0.1, []), "fields of the clips, got no keys"),
        (
            lambda m: m.frames_at(torch.tensor([0]), torch.tensor(0.0)),
            "`clip` must be int64 and `time` floating-point",
        ),
        (
            lambda m: m.frames_at(torch.tensor([0.0]), torch.tensor([0.0])),
            "`clip` must be int64 and `time` floating-point",
        ),
        (
            lambda m: m.frames_at(torch.tensor([0]), torch.tensor([0])),
            "`clip` must be int64 and `time` floating-point",
        ),
        (lambda m: MotionDataset(m.clips, weights=[1, 2]), "There are 2 weights for 1 clips"),
        (
            lambda m: MotionDataset(m.clips, weights=[-1]),
            "The weight of a must be finite and above zero, got -1",
        ),
    ],
)
def test_arguments_are_refused_by_name(call: Callable[[MotionDataset], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(MotionDataset(named("a")))


def test_a_clip_that_is_not_there_is_an_index_error() -> None:
    for clip in (-1, 1):
        with pytest.raises(IndexError):
            MotionDataset(named("a")).frames_at(torch.tensor([clip]), torch.tensor([0.0]))


# -- DeepMimic's own clips ---------------------------------------------------------------------


def deepmimic_folder() -> Path | None:
    spec = importlib.util.find_spec("pybullet_data")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "data" / "motions"


FOLDER = deepmimic_folder()
needs_pybullet = pytest.mark.skipif(
    FOLDER is None, reason="the pybullet wheel, which has the clips, is absent"
)


@needs_pybullet
def test_every_deepmimic_clip_looked_up_at_its_own_times_is_itself_to_1e_6() -> None:
    assert FOLDER is not None
    humanoids = MotionDataset([FOLDER / "humanoid3d_*.txt", FOLDER / "walker"])
    assert Counter(len(clip) for clip in humanoids.clips)[38] == 5
    assert len(humanoids) == 20
    for motions in (humanoids, MotionDataset(FOLDER / "laikago_walk.txt")):
        for number, clip in enumerate(motions.clips):
            found = motions.frames_at(torch.full((len(clip),), number), clip.times)
            torch.testing.assert_close(found.double(), clip.frames, rtol=0, atol=1e-6)


@needs_pybullet
def test_every_deepmimic_clip_of_one_rate_resampled_at_that_rate_is_its_file_to_1e_6() -> None:
    assert FOLDER is not None
    resampled = 0
    for file in FOLDER.rglob("*.txt"):
        rows = torch.tensor(json.loads(file.read_text())["Frames"], dtype=torch.float64)
        dt = rows[0, 0].item()
        if not (rows[:-1, 0] == dt).all():
            continue  # one frame of the roll lasts twice as long as the others
        clip = MotionDataset(file).resample(dt).clips[0]
        found = torch.cat([clip.frames[key] for key in ("root_pos", "root_quat", "joint_pos")], -1).double()
        assert len(found) == len(rows)
        starts = [3, *(7 + start for start in clip.quaternions.get("joint_pos", ()))]
        expected = rows[:, 1:]
        for start in starts:
            q = expected[:, start : start + 4]
            q /= q.norm(dim=-1, keepdim=True)  # many in these files are not of unit length
            q *= (q * found[:, start : start + 4]).sum(-1, keepdim=True).sign()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        resampled += 1
    assert resampled == 20


def test_a_field_may_be_named_by_itself_and_integers_cannot_be_interpolated():
    alone, listed = (
        MotionDataset(random_clip(0, 5, 0)).pairs(3, 0.1, keys, generator=torch.Generator().manual_seed(0))
        for keys in ("joint_pos", ["joint_pos"])
    )
    assert torch.equal(alone["observation"], listed["observation"])
    with pytest.raises(ValueError, match="`dtype` is int64, in which nothing can be interpolated"):
        MotionDataset(random_clip(0, 5, 0), dtype=torch.int64)
