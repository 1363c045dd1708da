"""Behaviour cloning of a teacher through time, as a TorchRL loss module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.nn.functional import huber_loss, mse_loss
from torchrl.objectives import LossModule

from torchrl_rslstorage._compat import dispatch
from torchrl_rslstorage.data.leaves import show, show_all
from torchrl_rslstorage.data.time_step_sampler import starts_of
from torchrl_rslstorage.modules.student_teacher import state_keys_of
from torchrl_rslstorage.objectives.padded import is_recurrent
from torchrl_rslstorage.objectives.unroll import Memory, mean_actions, parts_of

LossType = Literal["mse", "huber"]

_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": mse_loss, "huber": huber_loss}


class DistillationLoss(LossModule):
    """How far a student's mean actions are from its teacher's, over consecutive rows (rsl_rl 5.5.1).

        loss_behavior = Σ_t mean_{n,a} ℓ(μ(s_t, h_t) − a*_t)        ℓ: squared or Huber error

    rsl_rl 5.5.1, algorithms/distillation.py, ``Distillation.update``. Beside it comes ``behavior``, the mean
    over the rows instead of the sum, without gradient.

    A mini-batch is a stretch ``[L, N]`` of rows in time order, or one row ``[N]`` (`TimeStepSampler`).
    Recurrent students go through it as they act:

    - where a mini-batch holds their states, they start from those (of its first row): a pass begins;
    - where it does not, they go on from where the last one left them;
    - where an episode starts (``done`` in the row before, or ``is_init``), they start from zeros, so that
      no gradient crosses the end of an episode.

    The gradient goes back through all mini-batches since `cut`, which is called after each optimisation step.

    Args:
        student_network: `MLPActor`, `RNNActor`, or an actor of TorchRL's, with ``LSTMModule`` or
            ``GRUModule`` too; it is evaluated without noise.
        loss_type: "mse" or "huber" (δ = 1).

    Raises:
        ValueError: an unknown loss type; of a mini-batch: teacher's actions of another shape than the
            student's, which would broadcast, or that require grad.
        KeyError: a mini-batch lacks the teacher's actions, or an observation.
        RuntimeError: a recurrent student is to go on, but no pass was begun.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import DistillationLoss, MLPActor
        >>> student = MLPActor(["obs"], 3, 2)
        >>> rows = TensorDict({"obs": torch.randn(5, 8, 3), "teacher_action": torch.randn(5, 8, 2)}, [5, 8])
        >>> rows["next", "done"] = torch.zeros(5, 8, 1, dtype=torch.bool)
        >>> losses = DistillationLoss(student)(rows)
        >>> losses["loss_behavior"].backward()
        >>> bool(torch.isclose(losses["loss_behavior"], 5 * losses["behavior"]))
        True
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Entries by their role, for ``set_keys``."""

        action: NestedKey = "action"
        """Where the student writes its action."""
        teacher_action: NestedKey = "teacher_action"
        """What the teacher would have done."""
        done: NestedKey = "done"
        """Under ``next``: the episode ended with the row."""
        is_init: NestedKey = "is_init"
        """The episode started with the row; may be missing."""

    default_keys = _AcceptedKeys
    student_network: Any

    def __init__(self, student_network: TensorDictModuleBase, loss_type: LossType = "mse") -> None:
        if loss_type not in get_args(LossType):
            raise ValueError(f"`loss_type` must be one of {get_args(LossType)}, got {loss_type!r}.")
        super().__init__()
        self.student_network = student_network
        self.loss_type: LossType = loss_type
        self.is_recurrent = is_recurrent(student_network)
        self._state_keys = state_keys_of(student_network) if self.is_recurrent else []
        self._states: list[Tensor] = []
        self._ended: Tensor | None = None
        self.out_keys = ["loss_behavior", "behavior"]
        self._set_in_keys()

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        self._set_in_keys()  # there is no value estimator; keys were changed

    def _set_in_keys(self) -> None:
        keys = self._keys
        names = [*self.student_network.in_keys, keys.teacher_action, keys.is_init, ("next", keys.done)]
        self.in_keys = cast("Any", list(dict.fromkeys(names)))

    @property
    def _keys(self) -> _AcceptedKeys:
        return cast("DistillationLoss._AcceptedKeys", self.tensor_keys)

    @property
    def state_keys(self) -> list[NestedKey]:
        """The student's recurrent states, which the mini-batch that begins a pass holds."""
        return list(self._state_keys)

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The loss of a stretch ``[L, N]`` or of a row ``[N]``, all scalars; it is not written to."""
        return TensorDict(cast("Any", self.terms(tensordict)))

    def terms(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """What `forward` returns, as a dictionary."""
        td, target, memory = self._read(tensordict)
        behavior, states = self._error(td, target, memory)
        self._remember(td, states)
        return {"loss_behavior": len(target) * behavior, "behavior": behavior.detach()}

    def backward(self, tensordict: TensorDictBase) -> Tensor:
        """Adds the gradient of a stretch to that of the student's parameters, and cuts behind it.

        The same as ``terms(td)["loss_behavior"].backward()`` and `cut`, but in parts whose gradients add up:
        environments do not depend on each other, nor do the rows of a student without memory. The memory of
        one part is used again by the next, which on a CPU stays in its cache.

        Returns:
            ``loss_behavior``, 0-dim, without gradient.
        """
        td, target, memory = self._read(tensordict)
        losses: list[Tensor] = []
        after: list[list[Tensor]] = []
        for rows, envs in parts_of(target, is_recurrent=self.is_recurrent):
            part, wanted = cast("TensorDictBase", td[rows, envs]), target[rows, envs]
            error, states = self._error(part, wanted, None if memory is None else memory.of(envs))
            loss = error * (wanted.shape[0] * wanted.shape[1] / target.shape[1])
            loss.backward()
            losses.append(loss.detach())
            after.append([state.detach() for state in states])
        self._remember(td, [torch.cat(parts) for parts in zip(*after, strict=True)])
        return torch.stack(losses).sum()

    def cut(self) -> None:
        """Ends the back-propagation here: later losses reach no further back. Call it after each step."""
        self._states = [state.detach() for state in self._states]

    def _error(
        self, td: TensorDictBase, target: Tensor, memory: Memory | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The mean error, and the states after the last row."""
        action, states = mean_actions(self.student_network, td, memory, self._keys.action)
        if action.shape != target.shape:
            raise ValueError(
                f"{show(self._keys.teacher_action)} has shape {tuple(target.shape)} but the student's "
                f"actions have {tuple(action.shape)}: they would broadcast. Teacher and student must act in "
                "the same space."
            )
        return _LOSSES[self.loss_type](action, target), states

    def _remember(self, td: TensorDictBase, states: list[Tensor]) -> None:
        if self.is_recurrent:
            self._states, self._ended = states, self._done(td)[-1].view(-1)

    # -- reading a mini-batch --------------------------------------------------------------------

    def _read(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, Tensor, Memory | None]:
        """The rows ``[L, N]``, the teacher's actions in them, and what a recurrent student remembers."""
        td = tensordict.unsqueeze(0) if tensordict.ndim == 1 else tensordict
        if td.ndim != 2 or 0 in td.batch_size:
            raise ValueError(
                "DistillationLoss reads rows in time order, [N] or [L, N], but this mini-batch has batch "
                f"size {tuple(tensordict.batch_size)}: give the buffer a TimeStepSampler."
            )
        return td, self._teacher_action(td), self._memory(td) if self.is_recurrent else None

    def _teacher_action(self, td: TensorDictBase) -> Tensor:
        key = self._keys.teacher_action
        action = td.get(key, None)
        if action is None:
            raise KeyError(
                f"DistillationLoss needs {show(key)}, which is not in the mini-batch: collect with "
                "StudentTeacher(student, teacher), which asks the teacher in every step."
            )
        if action.requires_grad:
            raise ValueError(f"{show(key)} in the mini-batch requires grad: collect under no_grad.")
        return action

    def _done(self, td: TensorDictBase) -> Tensor:
        key = ("next", self._keys.done)
        done = td.get(key, None)
        if done is None:
            raise KeyError(
                f"A recurrent student needs {key}, which is not in the mini-batch: without it states are "
                "never reset. TimeStepSampler hands it out."
            )
        return done

    def _memory(self, td: TensorDictBase) -> Memory:
        starts, resets = starts_of(self._done(td), td.get(self._keys.is_init, None))
        found = [td.get(key, None) for key in self._state_keys]
        states = [state[0] for state in found if state is not None]
        forget = starts[0]
        if not states and self._ended is not None:
            if len(self._ended) != len(forget):
                raise RuntimeError(
                    f"The student is to go on with {len(self._ended)} environments, but this mini-batch has "
                    f"{len(forget)}: begin a pass with one that holds its states."
                )
            states, forget = self._states, forget | self._ended
        if len(states) != len(found):
            missing = [key for key, state in zip(self._state_keys, found, strict=True) if state is None]
            raise RuntimeError(
                "The student is to go on, but no pass was begun: the first mini-batch of a pass must hold "
                f"its states, and this one lacks {show_all(missing)}. Let the collection policy write them "
                "and give the buffer a TimeStepSampler (with state_keys, where they are columns)."
            )
        entering = [s.masked_fill(forget.view(-1, *[1] * (s.ndim - 1)), 0.0) for s in states]
        return Memory(entering, starts, resets)
