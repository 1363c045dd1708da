"""The folder that every training run leaves behind.

    run/
      config.json            every option of the run; its presence is what makes this a run folder
      logs/scalars/*.csv     rows ``frames,value``, written by TorchRL's ``CSVLogger("logs", run)``
      checkpoints/           the trainer's
      summary.json           written at the end
      learning_curve.png     drawn from the scalars

Decisions. A run never starts in a folder that holds another one. Whole files are written beside
their target and renamed over it, so that a reader (or a kill) meets the old file or the new one and
never half of one. Only the scalars grow in place: there a kill may tear the last line, and a resume
cuts them back to the frame of its checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from torchrl_rslstorage._extras import require_extra
from torchrl_rslstorage._files import atomic_write_bytes, atomic_write_text, finite, plain

RETURN_SCALAR = "Train/mean_reward"
"""Scalar of the learning curve: mean undiscounted return over the last 100 episodes."""

LENGTH_SCALAR = "Train/mean_episode_length"
"""Scalar of the learning curve's second panel: mean length over the last 100 episodes, in steps."""


class RunFolderError(RuntimeError):
    """A run folder cannot be made, read or written; the message is one sentence for the user.

    >>> RunFolder.open("no/such/folder")
    Traceback (most recent call last):
    torchrl_rslstorage.trainers.run_folder.RunFolderError: no/such/folder is not a run folder: ...
    """


class RunFolder:
    """Names the files of one training run. Holds no state beside the path.

    :meth:`create` starts a run, :meth:`open` returns to one; the constructor touches nothing.

    Args:
        path: the folder.

    >>> import tempfile
    >>> folder = RunFolder.create(tempfile.mkdtemp() + "/run", {"seed": 1})
    >>> folder.config
    {'seed': 1}
    >>> folder.write_summary({"return": float("nan")})
    >>> print((folder.path / "summary.json").read_text())
    {
      "return": null
    }
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any]) -> RunFolder:
        """Returns a new run's folder, made with its parents, with ``config`` written in it.

        Args:
            path: a folder that does not exist yet, or that holds no run.
            config: the run's options; anything JSON can say, and paths (kept as strings).

        Raises:
            TypeError: ``config`` holds something JSON cannot say.
            RunFolderError: ``path`` is a file, cannot be written, or holds a run already.
                What stands there is left as it was.
        """
        folder = cls(path)
        text = json.dumps(dict(config), indent=2, default=plain) + "\n"
        taken = f"{folder.path} already holds a run's files: choose another folder, or resume it."
        try:
            if folder.path.exists() and not folder.path.is_dir():
                raise RunFolderError(f"{folder.path} is a file: a run needs a folder of its own.")
            if any(p.exists() for p in (folder._config_file, folder.logs, folder.checkpoints)):
                raise RunFolderError(taken)
            folder.path.mkdir(parents=True, exist_ok=True)
            # `mkdir` without exist_ok lets only one of two runs that start together get through.
            folder.checkpoints.mkdir()
            folder.logs.mkdir()
            atomic_write_text(folder._config_file, text)
        except FileExistsError as error:
            raise RunFolderError(taken) from error
        except OSError as error:
            for made in (folder.logs, folder.checkpoints):  # only while empty
                with contextlib.suppress(OSError):
                    made.rmdir()
            raise RunFolderError(_cannot("make the run folder", folder.path, error)) from error
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Returns the folder of an existing run, whose config is known to be readable.

        Raises:
            RunFolderError: there is no run at ``path``, or its config is broken.
        """
        folder = cls(path)
        _ = folder.config
        return folder

    @property
    def config(self) -> dict[str, Any]:
        """The options that the run was created with, read from ``config.json``."""
        try:
            if not self._config_file.is_file():
                raise RunFolderError(f"{self.path} is not a run folder: it has no config.json.")
            config = json.loads(self._config_file.read_text(encoding="utf-8"))
        except OSError as error:
            raise RunFolderError(_cannot("read", self._config_file, error)) from error
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both of this kind
            raise RunFolderError(f"{self._config_file} is broken: {error}.") from error
        if not isinstance(config, dict):
            raise RunFolderError(f"{self._config_file} is broken: it holds no JSON object.")
        return config

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder of ``CSVLogger(exp_name="logs", log_dir=path)``, or of another logger."""
        return self.path / "logs"

    @property
    def scalars(self) -> Path:
        """The folder where the CSV logger puts one file a scalar; a ``/`` in a name is a folder."""
        return self.logs / "scalars"

    @property
    def _config_file(self) -> Path:
        return self.path / "config.json"

    def read_scalar(self, name: str) -> list[tuple[int, float]]:
        """Returns the ``(frames, value)`` rows of one scalar, without a torn last line.

        Raises:
            RunFolderError: no such scalar was logged (the message lists those that were), or its
                file is broken.
        """
        file = self.scalars / f"{name}.csv"
        if not file.is_file():
            known = ", ".join(self._names()) or "none"
            raise RunFolderError(f"{self.path} has no scalar {name!r}; it has: {known}.")
        return _read_rows(file)[0]

    def truncate_logs(self, frame: int) -> None:
        """Cuts every scalar back to the rows up to and including ``frame``.

        A resumed run then writes what the run it continues would have written. Call it before the
        logger is made: a logger that is open keeps writing to the file that was replaced.

        Raises:
            RunFolderError: a file is broken in its middle, or cannot be written. No file is cut
                unless every file could be read.
        """
        files = [self.scalars / f"{name}.csv" for name in self._names()]
        parsed = [(file, *_read_rows(file)) for file in files]
        for file, rows, lines in parsed:
            kept = [line for (step, _), line in zip(rows, lines, strict=True) if step <= frame]
            _replace(file, "".join(kept).encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes ``summary.json``; NaN and infinities become null, tensors become numbers.

        Raises:
            TypeError: ``summary`` holds something JSON cannot say.
            RunFolderError: the file cannot be written.
        """
        text = json.dumps(finite(summary), indent=2, allow_nan=False) + "\n"
        _replace(self.path / "summary.json", text.encode())

    def plot_learning_curve(
        self,
        title: str | None = None,
        *,
        return_scalar: str = RETURN_SCALAR,
        length_scalar: str | None = LENGTH_SCALAR,
    ) -> Path:
        """Draws ``learning_curve.png`` from the scalars and returns its path.

        Args:
            title: printed above the panels; the folder's name by default.
            return_scalar: drawn in the first panel.
            length_scalar: drawn in the second panel; there is only one with ``None``, or where the
                scalar was never logged.

        Raises:
            ImportError: matplotlib is missing.
            RunFolderError: ``return_scalar`` was never logged, or the file cannot be written.
        """
        feature = "the learning curve"
        figure_module = require_extra("matplotlib.figure", "cli", feature=feature)
        ticker = require_extra("matplotlib.ticker", "cli", feature=feature)
        panels = [("mean return", "#1f6feb", self.read_scalar(return_scalar))]
        if length_scalar in self._names():
            panels.append(("mean length", "#bf5700", self.read_scalar(length_scalar)))
        # A Figure without pyplot: no window, no global state, and Agg is what draws a PNG.
        heights = [4, 2][: len(panels)]
        figure = figure_module.Figure(figsize=(8, 1 + sum(heights)), layout="constrained")
        kwargs = {"sharex": True, "squeeze": False, "height_ratios": heights}
        all_axes = figure.subplots(len(panels), **kwargs)[:, 0]
        for axes, (label, colour, rows) in zip(all_axes, panels, strict=True):
            _draw(axes, rows, label, colour)
        figure.suptitle(title or self.path.resolve().name, fontsize=13, fontweight="bold")
        all_axes[-1].set(xlabel="frames", xlim=(0, None))
        all_axes[-1].xaxis.set_major_formatter(ticker.EngFormatter(sep=""))  # 500k, 1M
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=144)
        return _replace(self.path / "learning_curve.png", image.getvalue())

    def _names(self) -> list[str]:
        files = sorted(self.scalars.rglob("*.csv"))
        return [file.relative_to(self.scalars).as_posix().removesuffix(".csv") for file in files]


def versions() -> dict[str, str]:
    """Returns the versions that a result depends on, ``"unknown"`` for what is not installed.

    >>> sorted(versions())
    ['platform', 'python', 'tensordict', 'torch', 'torchrl', 'torchrl_rslstorage']
    """
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "tensordict", "torchrl", "torchrl_rslstorage"):
        try:
            found[package] = metadata.version(package.replace("_", "-"))
        except metadata.PackageNotFoundError:  # run from a source tree
            found[package] = "unknown"
    return found


def _read_rows(file: Path) -> tuple[list[tuple[int, float]], list[str]]:
    """Returns the parsed rows and their lines, without a last line torn by a kill."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise RunFolderError(_cannot("read", file, error)) from error
    if lines and not lines[-1].endswith("\n"):  # the logger writes the newline last
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            step, value = line.split(",")
            rows.append((int(step), float(value)))
        except ValueError as error:
            message = f"{file} is broken in line {number}: {line.strip()!r} is not `frames,value`."
            raise RunFolderError(message) from error
    return rows, lines


def _draw(axes: Any, rows: list[tuple[int, float]], label: str, colour: str) -> None:
    """Draws one panel; rows before the first finished episode are NaN and are left out."""
    finished = [(step, value) for step, value in rows if math.isfinite(value)]
    if finished:
        steps, values = zip(*finished, strict=True)
        axes.plot(steps, values, color=colour, linewidth=1.8)
        axes.plot(steps[-1], values[-1], "o", color=colour, markersize=5)
        style = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "color": colour}
        last = f"{values[-1]:,.1f}".replace("-", "\N{MINUS SIGN}")  # as on the axis
        axes.annotate(last, (steps[-1], values[-1]), fontweight="bold", **style)
    else:
        axes.set_title("no episode has finished yet", y=0.45, fontsize=10, color="0.4")
        axes.set(xticks=[], yticks=[])
    axes.set_ylabel(f"{label}\n(last 100 episodes)")
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _replace(file: Path, data: bytes) -> Path:
    """Returns ``file`` after replacing it by ``data``, with the error of this module."""
    try:
        atomic_write_bytes(file, data)
    except OSError as error:
        raise RunFolderError(_cannot("write", file, error)) from error
    return file


def _cannot(what: str, path: Path, error: OSError) -> str:
    return f"cannot {what} {path}: {error.strerror or error}."
