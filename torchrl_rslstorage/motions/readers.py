"""Motion files: ``.npz`` of joint and body poses, and the DeepMimic JSON clips."""

from __future__ import annotations

import glob
import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDict

from torchrl_rslstorage.motions.clips import MotionClip, positive

SUFFIXES = (".npz", ".txt", ".json")

# What a field is called: by us and by mjlab, by BeyondMimic (csv_to_npz.py), by Isaac Lab (humanoid_amp).
SPELLINGS: dict[str, tuple[str, ...]] = {
    "joint_pos": ("joint_pos", "dof_positions"),
    "joint_vel": ("joint_vel", "dof_velocities"),
    "root_pos": ("root_pos",),
    "root_quat": ("root_quat",),
    "body_pos": ("body_pos", "body_pos_w", "body_positions"),
    "body_quat": ("body_quat", "body_quat_w", "body_rotations"),
    "body_lin_vel": ("body_lin_vel", "body_lin_vel_w", "body_linear_velocities"),
    "body_ang_vel": ("body_ang_vel", "body_ang_vel_w", "body_angular_velocities"),
}
JOINT_NAMES = ("joint_names", "dof_names")
BODY_NAMES = ("body_names",)

# DeepMimic's humanoid (Peng et al. 2018, arXiv:1804.02717), as pybullet 3.2.7 reads its rows
# (deep_mimic/env/humanoid_pose_interpolator.py): joint and columns, 4 for a quaternion, 1 for an angle.
HUMANOID = {
    "chest": 4,
    "neck": 4,
    "right_hip": 4,
    "right_knee": 1,
    "right_ankle": 4,
    "right_shoulder": 4,
    "right_elbow": 1,
    "left_hip": 4,
    "left_knee": 1,
    "left_ankle": 4,
    "left_shoulder": 4,
    "left_elbow": 1,
}
# pybullet's Laikago (deep_mimic/env/quadrupedPoseInterpolator.py): twelve angles, which it does not name.
QUADRUPED_ANGLES = 12
ROOT_COLUMNS = 8  # dt, root xyz, root wxyz


def read_motion(path: str | os.PathLike[str]) -> MotionClip:
    """The motion in one file, as it stands there.

    ``.npz`` (read without pickle): a frame rate ``fps``, or ``times [F]`` in seconds, and fields by any one
    of these names; other arrays are left alone. Quaternions are ``wxyz``.

    | field | names | shape |
    |---|---|---|
    | ``joint_pos`` | ``joint_pos``, ``dof_positions`` | ``[F, J]`` |
    | ``joint_vel`` (else derived) | ``joint_vel``, ``dof_velocities`` | ``[F, J]`` |
    | ``root_pos``, ``root_quat`` | the same | ``[F, 3]``, ``[F, 4]`` |
    | ``body_pos`` | ``body_pos``, ``body_pos_w``, ``body_positions`` | ``[F, B, 3]`` |
    | ``body_quat`` | ``body_quat``, ``body_quat_w``, ``body_rotations`` | ``[F, B, 4]`` |
    | ``body_lin_vel`` | ``body_lin_vel``, ``body_lin_vel_w``, ``body_linear_velocities`` | ``[F, B, 3]`` |
    | ``body_ang_vel`` | ``body_ang_vel``, ``body_ang_vel_w``, ``body_angular_velocities`` | ``[F, B, 3]`` |
    | joint names | ``joint_names``, ``dof_names`` | ``[J]`` |
    | body names | ``body_names`` | ``[B]`` |

    ``.txt`` and ``.json``, DeepMimic's clips: ``Frames`` of ``[dt, root xyz, root wxyz, joints...]``, where
    dt is the time to the next frame (the last frame's is not used). Rows of 44 numbers are the humanoid,
    whose eight spherical joints are quaternions in ``joint_pos [F, 36]`` and angular velocities in
    ``joint_vel [F, 28]``; rows of 20 are pybullet's Laikago, twelve angles. ``Loop`` is not followed: a clip
    ends with its last frame. Positions have y up, as in the files.

    Args:
        path: the file; its ending tells the format.

    Returns:
        The clip, float64, with weight 1, named after the path.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, or holds no motion; the message names file, field and frame.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from torchrl_rslstorage import read_motion
        >>> file = tempfile.mkdtemp() + "/swing.npz"
        >>> np.savez(file, fps=50, joint_pos=np.linspace(0, 1, 101)[:, None])
        >>> clip = read_motion(file)
        >>> len(clip), clip.duration, [round(v, 4) for v in clip.frames["joint_vel"][0].tolist()]
        (101, 2.0, [0.5])
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no motion file {path}.")
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{path}: a motion file ends in one of {', '.join(SUFFIXES)}, not in {path.suffix!r}."
        )
    return _read_npz(path) if path.suffix == ".npz" else _read_deepmimic(path)


def find_motions(path: str | os.PathLike[str]) -> list[Path]:
    """The motion files that ``path`` stands for, sorted: itself, those of a folder, or those of a pattern.

    Raises:
        FileNotFoundError: there are none.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file()]
    else:
        found = [Path(file) for file in glob.glob(str(path), recursive=True) if Path(file).is_file()]
    if not found:
        raise FileNotFoundError(
            f"{path} is no motion file, and no folder or pattern with one ({', '.join(SUFFIXES)})."
        )
    return sorted(found)


def _read_npz(path: Path) -> MotionClip:
    arrays = _load_npz(path)
    fields = {}
    for field, names in SPELLINGS.items():
        name = _spelling(path, arrays, names)
        if name is not None:
            fields[field] = _numbers(path, name, arrays[name])
    if "joint_pos" not in fields:
        raise ValueError(
            f"{path}: there are no joint positions ({' or '.join(SPELLINGS['joint_pos'])}), only "
            f"{', '.join(arrays) or 'nothing'}."
        )
    num = len(fields["joint_pos"])
    for field, value in fields.items():
        if len(value) != num:
            raise ValueError(f"{path}: '{field}' has {len(value)} frames, but 'joint_pos' has {num}.")
    fps, times = _clock(path, arrays)
    return MotionClip(
        TensorDict(fields, [num]),
        fps=fps,
        times=times,
        name=str(path),
        joint_names=_names(path, arrays, JOINT_NAMES),
        body_names=_names(path, arrays, BODY_NAMES),
    )


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    arrays = {}
    with path.open("rb") as handle:  # np.load leaves the file open if it fails
        try:
            archive = np.load(handle, allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: this is no .npz archive of arrays ({error}).") from error
        if isinstance(archive, np.ndarray):
            raise ValueError(f"{path}: this is a single array, not an .npz archive. Write it with np.savez.")
        for name in archive.files:
            try:
                arrays[name] = archive[name]
            except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                raise ValueError(
                    f"{path}: '{name}' cannot be read ({error}). Objects are refused, since a pickle runs "
                    "code; save names as an array of strings."
                ) from error
    return arrays


def _spelling(path: Path, arrays: dict[str, np.ndarray], names: Sequence[str]) -> str | None:
    here = [name for name in names if name in arrays]
    if len(here) > 1:
        raise ValueError(f"{path}: {' and '.join(here)} are the same field; keep one of them.")
    return here[0] if here else None


def _numbers(path: Path, name: str, array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind not in "fiu" or array.ndim < 1:
        raise ValueError(f"{path}: '{name}' is {array.dtype} {array.shape}, expected numbers [F, *].")
    return torch.from_numpy(array.astype(np.float64))


def _names(path: Path, arrays: dict[str, np.ndarray], names: Sequence[str]) -> list[str]:
    name = _spelling(path, arrays, names)
    if name is None:
        return []
    if arrays[name].dtype.kind != "U" or arrays[name].ndim != 1:
        raise ValueError(
            f"{path}: '{name}' is {arrays[name].dtype} {arrays[name].shape}, expected a list of strings."
        )
    return arrays[name].tolist()


def _clock(path: Path, arrays: dict[str, np.ndarray]) -> tuple[float | None, torch.Tensor | None]:
    name = _spelling(path, arrays, ("fps", "times"))
    if name is None:
        raise ValueError(f"{path}: there is no 'fps' (frames a second), and no 'times' [F] (seconds).")
    if name == "times":
        return None, _numbers(path, name, arrays[name])
    array = arrays[name]
    if array.dtype.kind not in "fiu" or array.size != 1:
        raise ValueError(
            f"{path}: 'fps' is {array.dtype} {array.shape}, expected one number. Times of frames are called "
            "'times'."
        )
    return positive(array.item(), f"{path}: 'fps'"), None


def _read_deepmimic(path: Path) -> MotionClip:
    rows = torch.tensor(_load_rows(path), dtype=torch.float64)
    widths = list(HUMANOID.values()) if rows.shape[1] == ROOT_COLUMNS + sum(HUMANOID.values()) else []
    starts = [end - width for end, width in zip(accumulate(widths), widths, strict=True) if width == 4]
    dt = rows[:-1, 0]
    stands = [i for i, seconds in enumerate(dt.tolist()) if not seconds > 0]
    if stands:
        raise ValueError(
            f"{path}: dt of frame {stands[0]} is {dt[stands[0]].item()}, expected the seconds to the next "
            "frame, above zero."
        )
    return MotionClip(
        TensorDict(
            {"root_pos": rows[:, 1:4], "root_quat": rows[:, 4:8], "joint_pos": rows[:, ROOT_COLUMNS:]},
            [len(rows)],
        ),
        times=torch.cat([dt.new_zeros(1), dt.cumsum(0)]),
        name=str(path),
        quaternions={"root_quat": (0,), **({"joint_pos": starts} if starts else {})},
        joint_names=list(HUMANOID) if starts else (),
    )


def _load_rows(path: Path) -> list[list[float]]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{path}: this is no JSON ({error}).") from error
    rows = content.get("Frames") if isinstance(content, dict) else None
    if not isinstance(rows, list) or len(rows) < 2:
        raise ValueError(
            f"{path}: there is no list 'Frames' of at least two frames, which a DeepMimic clip has."
        )
    known = {ROOT_COLUMNS + sum(HUMANOID.values()): "humanoid", ROOT_COLUMNS + QUADRUPED_ANGLES: "Laikago"}
    for frame, row in enumerate(rows):
        if not isinstance(row, list) or not all(type(number) in (int, float) for number in row):
            raise ValueError(f"{path}: frame {frame} is not a list of numbers.")
        if len(row) != len(rows[0]):
            raise ValueError(f"{path}: frame {frame} has {len(row)} numbers, but frame 0 has {len(rows[0])}.")
        if len(row) not in known:
            _refuse_width(path, len(row), known, "FrameDuration" in content)
    return rows


def _refuse_width(path: Path, width: int, known: dict[int, str], has_duration: bool) -> NoReturn:
    layouts = ", ".join(f"{numbers} ({character})" for numbers, character in known.items())
    dialect = " With 'FrameDuration' it is another format, whose rows have no dt." if has_duration else ""
    raise ValueError(
        f"{path}: frame 0 has {width} numbers, and only rows of {layouts} are known: which columns of others "
        f"are quaternions is not told.{dialect} Build a MotionClip from its columns, or save them as .npz."
    )
