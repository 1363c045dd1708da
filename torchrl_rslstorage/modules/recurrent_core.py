"""The RNN of recurrent actors and critics, and where its states stand in a TensorDict."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, Protocol, get_args

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from torchrl.data import Composite, Unbounded
from torchrl.envs import TensorDictPrimer

from torchrl_rslstorage.data.leaves import canonical, dtype_name, nest, show
from torchrl_rslstorage.data.trajectory_layouts import Layout

RNNType = Literal["lstm", "gru"]

_STATES: dict[str, tuple[str, ...]] = {"lstm": ("h", "c"), "gru": ("h",)}
_MODULES: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}
# States as they were written before a step, with their versions: they must not come back for the next one.
_WRITTEN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Steps(Protocol):
    """Where the states of some of M environments start anew among the rows ``[T, M]`` of a run."""

    @property
    def resets(self) -> tuple[int, ...]:
        """The rows in which some environment starts anew, ascending, row 0 left out."""
        ...

    def goes_on(self, row: int) -> Tensor:
        """Which environments go on from the row before, ``[M]`` bool."""
        ...


class RecurrentCore(nn.Module):
    """An ``nn.LSTM`` or ``nn.GRU``, and where its states stand in a TensorDict.

    Args:
        in_features: F.
        rnn_type: "lstm" or "gru".
        hidden_dim: H.
        num_layers: stacked layers.
        state_key: the group of the states, ``(state_key, "h")`` and for an LSTM ``(state_key, "c")``,
            ``[N, num_layers, H]``.
        is_init_key: flags ``[N, 1]`` of environments that start an episode with this step.

    Raises:
        ValueError: an unknown type, a size below one, or a state key that is taken.
    """

    def __init__(
        self,
        in_features: int,
        rnn_type: RNNType,
        hidden_dim: int,
        num_layers: int,
        state_key: NestedKey,
        is_init_key: NestedKey,
    ) -> None:
        super().__init__()
        if rnn_type not in get_args(RNNType):
            raise ValueError(f"`rnn_type` must be one of {get_args(RNNType)}, got {rnn_type!r}.")
        for name, number in (("rnn_hidden_dim", hidden_dim), ("rnn_num_layers", num_layers)):
            if number < 1:
                raise ValueError(f"`{name}` must be at least 1, got {number}.")
        self.rnn = _MODULES[rnn_type](in_features, hidden_dim, num_layers)
        group = canonical(state_key)
        path = (group,) if isinstance(group, str) else group
        if path[0] == "next" or group == canonical(is_init_key):
            raise ValueError(
                f"`state_key` {show(group)} is taken: states stand in a group of their own, such as "
                "'actor_state'."
            )
        self.state_keys: list[NestedKey] = [(*path, name) for name in _STATES[rnn_type]]
        self.next_state_keys: list[NestedKey] = [("next", *path, name) for name in _STATES[rnn_type]]
        self.is_init_key = is_init_key
        self._shape = (num_layers, hidden_dim)

    def step(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One step: features ``[N, F]`` and states ``[N, layers, H]`` to outputs ``[N, H]`` and states."""
        out, after = self.rnn(x.unsqueeze(0), self._packed([s.transpose(0, 1).contiguous() for s in states]))
        after = after if isinstance(after, tuple) else (after,)
        return out.squeeze(0), [s.transpose(0, 1) for s in after]

    def run(self, x: Tensor, states: list[Tensor], steps: Steps) -> tuple[list[Tensor], list[Tensor]]:
        """All rows: features ``[T, M, F]`` and the states ``[M, layers, H]`` before row 0.

        Rows are taken together up to the next one in which some environment starts anew: its state is zeroed
        there, and nothing is computed twice or for padding.

        Returns:
            Outputs ``[T', M, H]`` of the rows between resets, and the states after the last row.
        """
        present = [s.transpose(0, 1).contiguous() for s in states]
        edges = (0, *steps.resets, len(x))
        outs: list[Tensor] = []
        for begin, end in pairwise(edges):
            if begin:
                # A twelfth of the price of `masked_fill`. It lets NaN through, which the loss has by then.
                goes_on = steps.goes_on(begin).to(x.dtype).view(1, -1, 1)
                present = [s * goes_on for s in present]
            out, after = self.rnn(x[begin:end], self._packed(present))
            present = list(after) if isinstance(after, tuple) else [after]
            outs.append(out)
        return outs, [s.transpose(0, 1) for s in present]

    def states_before_step(self, td: TensorDictBase, who: str) -> list[Tensor]:
        """The states ``[N, layers, H]`` of ``td [N]``, zeroed where an episode starts.

        Where there are none yet, they are zeros.

        Raises:
            KeyError: ``is_init`` is missing: the states would never be reset.
            ValueError: a state has another shape, or ``is_init`` is no flag per environment.
            RuntimeError: the environment did not carry the states on.
        """
        is_init = td.get(self.is_init_key, None)
        if is_init is None:
            raise KeyError(
                f"{who} reads {show(self.is_init_key)}, the flags of environments that start an episode, "
                "which is not there: without it states are never reset. Append torchrl.envs.InitTracker "
                "to the environment (RolloutCollector writes 'is_init' by itself)."
            )
        found = [td.get(key, None) for key in self.state_keys]
        shape = (*td.batch_size, *self._shape)
        weight: Tensor = self.rnn.weight_ih_l0  # pyright: ignore[reportAssignmentType] - torch: any module
        if is_init.dtype is not torch.bool or tuple(is_init.shape) not in (shape[:1], (*shape[:1], 1)):
            raise ValueError(
                f"{show(self.is_init_key)} is {dtype_name(is_init.dtype)} {tuple(is_init.shape)}, expected "
                f"bool {(*shape[:1], 1)}."
            )
        starts_anew = is_init.view(*td.batch_size, 1, 1)
        states: list[Tensor] = []
        for key, state in zip(self.state_keys, found, strict=True):
            if state is None:
                states.append(weight.new_zeros(shape))
                continue
            self._check(key, state, shape, who)
            if _WRITTEN.get(state) == state._version and td.get(self.next_state_keys[0], None) is None:
                raise RuntimeError(
                    f"{who} got the state of the step before once more: the environment did not carry the "
                    "new one on, which none of its specs names. Append network.make_tensordict_primer() "
                    "to the environment, or collect with RolloutCollector, which carries states itself."
                )
            states.append(state.masked_fill(starts_anew, 0.0))
        return states

    def primer(self) -> TensorDictPrimer:
        """The transform that makes an environment carry these states."""
        weight: Any = self.rnn.weight_ih_l0
        spec = Unbounded(torch.Size(self._shape), dtype=weight.dtype, device=weight.device)
        flat = {canonical(key): spec.clone() for key in self.state_keys}
        return TensorDictPrimer(_composite(nest(flat)), expand_specs=True)

    def entering_states(self, td: TensorDictBase, layout: Layout, who: str) -> list[Tensor]:
        """The states with which the rows of the padded ``td [L, B]`` are entered, ``[M, layers, H]``.

        Raises:
            KeyError: they are missing.
            ValueError: a state has another shape.
        """
        states: list[Tensor] = []
        for key in self.state_keys:
            state = td.get(key, None)
            if state is None:
                raise KeyError(
                    f"{who} reads {show(key)}, the state with which trajectories start, which this "
                    "mini-batch does not hold. The collection policy must write it, and the buffer's "
                    "sampler be a TrajectorySampler."
                )
            self._check(key, state, (*td.batch_size, *self._shape), who)
            states.append(layout.entering(state))
        return states

    def _check(self, key: NestedKey, state: Tensor, shape: tuple[int, ...], who: str) -> None:
        if tuple(state.shape) != shape:
            raise ValueError(
                f"{show(key)} has shape {tuple(state.shape)}, but {who} with {self._shape[0]} layer(s) of "
                f"{self._shape[1]} expects {shape}."
            )

    def _packed(self, states: list[Tensor]) -> Any:
        return states[0] if len(states) == 1 else tuple(states)


def mark_written(state: Tensor) -> None:
    """Remembers that ``state`` stands at a root as it was before that step."""
    _WRITTEN[state] = state._version


def _composite(tree: dict[str, Any]) -> Composite:
    return Composite({k: _composite(v) if isinstance(v, dict) else v for k, v in tree.items()})
