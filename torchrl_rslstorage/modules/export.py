"""A policy as one file for robots and simulators: ONNX, ``torch.export`` or TorchScript.

    inputs                                   outputs
    obs            [B, F]                    actions        [B, A]          the mean, no sampling
    h_in, c_in     [layers, B, H]            h_out, c_out   [layers, B, H]  recurrent (c of an LSTM only)

Names and shapes are those of rsl_rl 5.5.1's ONNX exporter (models/mlp_model.py, rnn_model.py), so that what
deploys RSL-RL's policies deploys these. ``obs`` is the actor's observation groups concatenated, in the order
of ``actor.observation_keys``; the normaliser is inside. Episodes start with states of zeros; who runs the
policy hands ``h_out`` back as ``h_in``. B is free.
"""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_rslstorage._extras import require_extra
from torchrl_rslstorage._files import atomic_write_bytes
from torchrl_rslstorage.modules.mlp import MLPActor
from torchrl_rslstorage.modules.recurrent import RNNActor

_OPSET = 18  # rsl_rl 5.5.1, runners/on_policy_runner.py


class PolicyStep(nn.Module):
    """One deterministic step of a policy as a function of plain tensors: a copy on the CPU, in eval mode.

    Args:
        actor: an `MLPActor` or `RNNActor`.

    Raises:
        ValueError: it is another kind of actor.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import PolicyStep, RNNActor
        >>> step = PolicyStep(RNNActor(["policy"], 3, 2, rnn_type="lstm", rnn_hidden_dim=8))
        >>> step.input_names, step.output_names
        (['obs', 'h_in', 'c_in'], ['actions', 'h_out', 'c_out'])
        >>> actions, h, c = step(*step.example(batch=4))
        >>> actions.shape, h.shape
        (torch.Size([4, 2]), torch.Size([1, 4, 8]))
    """

    def __init__(self, actor: MLPActor | RNNActor) -> None:
        super().__init__()
        if not isinstance(actor, MLPActor | RNNActor):
            raise ValueError(
                f"Policies are exported from MLPActor and RNNActor, got {type(actor).__name__}: give "
                "torch.onnx.export a module of its layers."
            )
        self.normalizer = nn.Identity() if actor.normalizer is None else copy.deepcopy(actor.normalizer)
        self.rnn = copy.deepcopy(actor.core.rnn) if isinstance(actor, RNNActor) else None
        self.mlp = copy.deepcopy(actor.mlp)
        self.in_features = actor.in_features
        self.requires_grad_(False).cpu().eval()

    @property
    def _states(self) -> tuple[str, ...]:
        return () if self.rnn is None else ("h", "c") if isinstance(self.rnn, nn.LSTM) else ("h",)

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs, in order."""
        return ["obs", *(f"{name}_in" for name in self._states)]

    @property
    def output_names(self) -> list[str]:
        """The names of the outputs, in order."""
        return ["actions", *(f"{name}_out" for name in self._states)]

    def example(self, batch: int = 1) -> tuple[Tensor, ...]:
        """Inputs of zeros for ``batch`` environments, which are those of a first step."""
        like = next(self.mlp.parameters())
        inputs = [like.new_zeros(batch, self.in_features)]
        if self.rnn is not None:
            shape = (self.rnn.num_layers, batch, self.rnn.hidden_size)
            inputs += [like.new_zeros(shape) for _ in self._states]
        return tuple(inputs)

    def forward(self, obs: Tensor, h_in: Tensor | None = None, c_in: Tensor | None = None) -> Any:
        """Actions ``[B, A]``; of a recurrent policy a tuple of them and the states after the step."""
        x = self.normalizer(obs)
        if self.rnn is None:
            return self.mlp(x)
        x, states = self.rnn(x.unsqueeze(0), h_in if c_in is None else (h_in, c_in))
        actions = self.mlp(x.squeeze(0))
        return (actions, *states) if c_in is not None else (actions, states)


def export_policy(actor: MLPActor | RNNActor, path: str | Path) -> Path:
    """Writes the deterministic policy to one file, whole or not at all; the ending says how.

    ``.onnx`` is ONNX (needs the extra ``onnx``; weights inside the file), ``.pt2`` is ``torch.export``,
    ``.pt`` is TorchScript, which torch has deprecated but robots still run. All have the inputs and outputs
    of `PolicyStep`, for any number of environments.

    Args:
        actor: an `MLPActor` or `RNNActor`.
        path: the file.

    Returns:
        The file.

    Raises:
        ValueError: another kind of actor, another ending, or a recurrent actor of float64 to ONNX.
        ImportError: ONNX's packages are missing.
        OSError: the file's folder is missing, or the file cannot be written.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_rslstorage import MLPActor, export_policy
        >>> file = export_policy(MLPActor(["policy"], 3, 2), tempfile.mkdtemp() + "/policy.pt2")
        >>> torch.export.load(file).module()(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    path = Path(path)
    write = _WRITERS.get(path.suffix)
    if write is None:
        raise ValueError(f"A policy is exported to {', '.join(sorted(_WRITERS))}, got {path.name!r}.")
    step = PolicyStep(actor)
    with warnings.catch_warnings():
        # torch 2.13 warns of its own internals while it exports, and of TorchScript's deprecation.
        warnings.simplefilter("ignore")
        data = write(step)
    atomic_write_bytes(path, data)
    return path


def _onnx(step: PolicyStep) -> bytes:
    for module in ("onnx", "onnxscript"):
        require_extra(module, "onnx", feature="the ONNX export")
    if step.rnn is not None and next(step.parameters()).dtype is torch.float64:
        raise ValueError(
            "ONNX Runtime has no LSTM or GRU of float64: export copy.deepcopy(actor).float(), or write .pt2."
        )
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it tells of every package that it can do without
    try:
        program: Any = torch.onnx.export(
            step,
            step.example(batch=2),  # of one environment, torch would take B for a constant
            input_names=step.input_names,
            output_names=step.output_names,
            opset_version=_OPSET,
            dynamic_shapes=_free_batch(step),
            dynamo=True,
            verbose=False,
        )
    finally:
        logger.setLevel(level)
    return program.model_proto.SerializeToString()


def _torch_export(step: PolicyStep) -> bytes:
    program = torch.export.export(step, step.example(batch=2), dynamic_shapes=_free_batch(step))
    data = io.BytesIO()
    torch.export.save(program, data)
    return data.getvalue()


def _torchscript(step: PolicyStep) -> bytes:
    data = io.BytesIO()
    torch.jit.save(torch.jit.trace(step, step.example(batch=2)), data)
    return data.getvalue()


_WRITERS: dict[str, Callable[[PolicyStep], bytes]] = {
    ".onnx": _onnx,
    ".pt2": _torch_export,
    ".pt": _torchscript,
}


def _free_batch(step: PolicyStep) -> tuple[dict[int, Any], ...]:
    batch = torch.export.Dim("batch", min=1)
    return ({0: batch}, *({1: batch} for _ in step.input_names[1:]))
