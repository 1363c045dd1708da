"""Every private or version-dependent TorchRL name that the package touches, in one place.

Read against TorchRL 0.14.1 and tensordict 0.14.3. When TorchRL moves, this file moves with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.nn import dispatch as _dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers import Sampler
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs import EnvBase
from torchrl.trainers import Trainer

__all__ = [
    "Columns",
    "ModuleBase",
    "ReplayBufferBase",
    "SamplerBase",
    "TrainerBase",
    "WriterBase",
    "dispatch",
    "entry",
    "foreach_copy_",
    "fused_adam_",
    "plain_entries",
    "reset_after_step",
    "resets_after_step",
    "resets_natively",
    "root_after_step",
    "unchecked",
]

Method = TypeVar("Method", bound=Callable[..., Any])


def dispatch(method: Method) -> Method:
    """The decorator of tensordict 0.14, whose types know only its form with arguments."""
    return cast("Any", _dispatch)(method)


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies many tensors in one call, without gradients (torch 2: all foreach functions are underscored)."""
    if not torch.is_grad_enabled():
        cast("Any", torch)._foreach_copy_(targets, sources)
        return
    # What `torch.no_grad` does, at a fifth of its price: it is paid once per environment step.
    torch._C._set_grad_enabled(False)
    try:
        cast("Any", torch)._foreach_copy_(targets, sources)
    finally:
        torch._C._set_grad_enabled(True)


def fused_adam_(
    parameters: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    steps: Tensor,
    *,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """What ``torch.optim.adam.adam(fused=True)`` does with one tensor, at half its price (torch 2)."""
    steps.add_(1)
    cast("Any", torch)._fused_adam_(
        [parameters],
        [gradient],
        [mean],
        [square],
        [],
        [steps],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=maximize,
    )


def unchecked(entries: dict[str, Tensor]) -> TensorDict:
    """``TensorDict(entries)`` without batch dimensions, where there is nothing to check (tensordict 0.14)."""
    return TensorDict._new_unsafe(source=entries, batch_size=torch.Size([]))


def plain_entries(td: Any) -> dict[str, Any] | None:
    """The entries of a plain TensorDict as it keeps them (tensordict 0.14); ``None`` of anything else.

    To be read only. Lazy stacks, tensor classes and other subclasses keep theirs in other ways.
    """
    return td._tensordict if type(td) is TensorDict else None


def entry(td: Any, key: NestedKey) -> Any:
    """``td.get(key, None)``, at a tenth of its price for one name in a plain TensorDict (tensordict 0.14)."""
    if type(key) is str and type(td) is TensorDict:
        return cast("Any", td)._tensordict.get(key)
    return td.get(key, None)


def resets_after_step(env: EnvBase) -> bool:
    """Whether ``step_and_maybe_reset`` is ``step``, ``step_mdp`` and ``maybe_reset``, with room in between.

    TorchRL 0.14, envs/common.py: not where the environment has a method of its own or a compiled one, or
    where its simulator resets itself. Transforms may hook in between (`root_after_step`).
    """
    cls, own = type(env), vars(env)
    return (
        cls.step_and_maybe_reset is EnvBase.step_and_maybe_reset
        and cls._step_and_maybe_reset is EnvBase._step_and_maybe_reset
        and own.get("_compiled_step_and_maybe_reset") is None
        and not own.get("_torchrl_native_autoreset", False)
    )


def resets_natively(env: EnvBase) -> bool:
    """Whether the simulator resets itself within a step, and TorchRL 0.14 was told so."""
    return bool(vars(env).get("_torchrl_native_autoreset", False))


def root_after_step(env: EnvBase, stepped: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
    """The middle of TorchRL 0.14's ``step_and_maybe_reset``: a step, and the root before any reset."""
    following = env.step_mdp(stepped)
    if env._post_step_mdp_hooks is not None:
        stepped, following = env._post_step_mdp_hooks(stepped, following)
    return stepped, following


def reset_after_step(env: EnvBase, stepped: TensorDictBase) -> TensorDictBase:
    """The second half of TorchRL 0.14's ``step_and_maybe_reset``: from a step to the root of the next one."""
    return env.maybe_reset(root_after_step(env, stepped)[1])


class ModuleBase(TensorDictModuleBase):
    """tensordict 0.14 types a module's keys as ``list[str | tuple[str]]``, which leaves out nested keys."""

    def _name_keys(self, in_keys: Sequence[NestedKey], out_keys: Sequence[NestedKey]) -> None:
        self.in_keys = cast("Any", list(in_keys))
        self.out_keys = cast("Any", list(out_keys))


class Columns(LazyTensorStorage):
    """A ``[T, N]`` tensor storage whose TensorDict and row count a subclass manages itself.

    TorchRL 0.14: ``_storage`` holds the TensorDict, ``initialized`` says that it is there, ``_len``
    counts elements (not rows) and ``_bump_mutation_revision`` invalidates what stock samplers cache.
    """

    _storage: TensorDictBase | None
    device: torch.device
    _num_elements = 0

    @property
    def _len(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - TorchRL: locked memory
        # The stock one is shared between processes, at 8 us per write; a rollout has one writer.
        return self._num_elements

    @_len.setter
    def _len(self, value: int) -> None:
        self._num_elements = value

    @property
    def columns(self) -> TensorDictBase | None:
        """The whole ``[T, N]`` TensorDict, filled or not; ``None`` before the first write."""
        return self._storage

    def _set_columns(self, columns: TensorDictBase | None) -> None:
        self._storage = columns
        self.initialized = columns is not None
        self.__dict__.pop("_total_shape_value", None)

    def _changed(self) -> None:
        self._bump_mutation_revision()

    def _made_of(self) -> dict[str, Any]:
        """The constructor's arguments, by which a copy is made."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        # Tensors that are views of each other come apart where they are copied or pickled: writes would go
        # into one memory and reads come out of another.
        return {
            "made_of": self._made_of(),
            "written": self.state_dict(),
            "buffers": self._attached_entities,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        cast("Any", self).__init__(**state["made_of"])
        self.load_state_dict(state["written"])
        self._attached_entities_list = state["buffers"]


class WriterBase(Writer):
    """TorchRL 0.14: a buffer reads ``_write_count`` and ``_cursor`` off its writer."""

    _storage: Any
    _write_count: int
    _cursor: int

    def _announce(self, index: int) -> None:
        """Tells the buffers of the storage, and so their samplers, that something was written."""
        for buffer in self._storage._attached_entities_iter():
            buffer.mark_update(index)


class SamplerBase(Sampler):
    """TorchRL 0.14: a buffer sets ``_rng`` on its sampler and clears ``ran_out`` through a setter."""

    _rng: torch.Generator | None

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that the buffer's ``set_rng`` handed down; ``None`` means torch's global one."""
        return self._rng


class ReplayBufferBase(ReplayBuffer):
    """The stock buffer's private parts, by public names (TorchRL 0.14)."""

    _storage: Any
    _sampler: Any
    _writer: Any
    _transform: Any
    _rng: torch.Generator | None

    @property
    def generator(self) -> torch.Generator | None:
        """The generator set by ``set_rng`` or at construction; ``None`` means torch's global one."""
        return self._rng

    def _has_transform(self) -> bool:
        # `len(transform) > 0` at a ninth of its price: it is asked once per environment step.
        return self._transform is not None and bool(self._transform._modules["transforms"]._modules)

    def _empty_parts(self, empty_write_count: bool) -> None:
        self._writer._empty(empty_write_count=empty_write_count)
        self._sampler._empty()
        self._storage._empty()


class TrainerBase(Trainer):
    """The stock trainer's private parts, by public names (TorchRL 0.14)."""

    _optim_count: int
    _pbar_str: dict[str, float]
    _pbar: Any

    @property
    def optim_count(self) -> int:
        """Optimisation steps taken so far."""
        return self._optim_count

    @optim_count.setter
    def optim_count(self, value: int) -> None:
        self._optim_count = value

    def _show_progress(self, **values: float) -> None:
        if self.progress_bar:
            self._pbar_str.update(values)

    def _resume_progress(self) -> None:
        # The stock loop starts its bar at zero, also in the middle of a run.
        if self.progress_bar:
            self._pbar.initial = self._pbar.n = self.collected_frames
            self._pbar.refresh()
