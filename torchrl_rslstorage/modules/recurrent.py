"""GRU and LSTM actor and critic with RSL-RL's shape: normaliser, RNN, MLP head.

The shape is that of rsl_rl 5.5.1, models/rnn_model.py.

They run in two ways, told apart by ``mask``:

    collecting   td [N]     one step: is_init zeroes the state, the state before the step stays at the root,
                            the one after it goes under `next`, from where environments carry it on
    training     td [L, B]  a padded mini-batch of `TrajectorySampler`: its rows are stepped through with the
                            states that stood at the start; RNN and head see no padding

States live in the TensorDict, never in the module: evaluating a critic cannot disturb a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, TensorDictPrimer

from torchrl_rslstorage.data.leaves import Key, canonical, leaves, nest, show, show_all
from torchrl_rslstorage.data.trajectories import Layout
from torchrl_rslstorage.modules.distributions import DiagonalGaussian
from torchrl_rslstorage.modules.heads import Activation, GaussianActor, StdType, ValueCritic
from torchrl_rslstorage.modules.observations import ObservationModule, action_width, observation_width

RNNType = Literal["lstm", "gru"]

_WRITTEN = "_rslstorage_before_step"
"""Marks a state that was written as it stood before a step, which must not come back for the next one."""
_STATES: dict[str, tuple[str, ...]] = {"lstm": ("h", "c"), "gru": ("h",)}
_MODULES: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}


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
        ValueError: an unknown type, or a size below one.
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
        self.state_keys: list[NestedKey] = [(*path, name) for name in _STATES[rnn_type]]
        self.next_state_keys: list[NestedKey] = [("next", *path, name) for name in _STATES[rnn_type]]
        self.is_init_key = is_init_key
        self._shape = (num_layers, hidden_dim)

    def step(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One step: features ``[N, F]`` and states ``[N, layers, H]`` to outputs ``[N, H]`` and states."""
        out, after = self.rnn(x.unsqueeze(0), self._packed([s.transpose(0, 1).contiguous() for s in states]))
        after = after if isinstance(after, tuple) else (after,)
        return out.squeeze(0), [s.transpose(0, 1) for s in after]

    def run(self, x: Tensor, states: list[Tensor], layout: Layout) -> Tensor:
        """All rows: features ``[T, M, F]`` and the states ``[M, layers, H]`` before row 0, to ``[T, M, H]``.

        Rows are taken together up to the next one in which some environment starts anew: its state is
        zeroed there, and nothing is computed twice or for padding.
        """
        present = [s.transpose(0, 1).contiguous() for s in states]
        edges = (0, *layout.resets, len(x))
        outs: list[Tensor] = []
        for begin, end in pairwise(edges):
            if begin:
                starts_anew = layout.goes_on(begin).logical_not().view(1, -1, 1)
                present = [s.masked_fill(starts_anew, 0.0) for s in present]
            out, after = self.rnn(x[begin:end], self._packed(present))
            present = list(after) if isinstance(after, tuple) else [after]
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def states_before_step(self, td: TensorDictBase, who: str) -> list[Tensor]:
        """The states ``[N, layers, H]`` of ``td [N]``, zeroed where an episode starts.

        Where there are none yet, they are zeros.

        Raises:
            KeyError: ``is_init`` is missing: the states would never be reset.
            ValueError: a state has another shape.
            RuntimeError: the environment did not carry the states on.
        """
        is_init = td.get(self.is_init_key, None)
        if is_init is None:
            raise KeyError(
                f"{who} reads {show(self.is_init_key)}, the flags of environments that start an episode, "
                "which is not there: without it states are never reset. Append torchrl.envs.InitTracker "
                "to the environment (RolloutCollector writes it by itself)."
            )
        found = [td.get(key, None) for key in self.state_keys]
        shape = (*td.batch_size, *self._shape)
        weight: Tensor = self.rnn.weight_ih_l0  # pyright: ignore[reportAssignmentType] - torch: any module
        starts_anew = is_init.view(*td.batch_size, 1, 1)
        states: list[Tensor] = []
        for key, state in zip(self.state_keys, found, strict=True):
            if state is None:
                states.append(weight.new_zeros(shape))
                continue
            self._check(key, state, shape, who)
            if hasattr(state, _WRITTEN) and "next" not in td.keys():
                raise RuntimeError(
                    f"{who} got the state of the step before once more: the environment did not carry the "
                    "new one on, which none of its specs names. Append network.make_tensordict_primer() "
                    "to the environment, or collect with RolloutCollector, which carries states itself."
                )
            states.append(state.masked_fill(starts_anew, 0.0))
        return states

    def primer(self) -> TensorDictPrimer:
        """The transform that makes an environment carry these states."""
        spec = Unbounded(torch.Size(self._shape))
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


def _composite(tree: dict[str, Any]) -> Composite:
    return Composite({k: _composite(v) if isinstance(v, dict) else v for k, v in tree.items()})


def is_recurrent(network: Any) -> bool:
    """Whether ``network`` is a recurrent actor or critic of this package."""
    return isinstance(getattr(network, "core", None), RecurrentCore)


def rows_of_observations(network: ObservationModule, td: TensorDictBase, layout: Layout) -> Tensor:
    """The features ``[T, M, F]`` of the rows that a padded mini-batch was made of."""
    found: dict[Key, Tensor] = {}
    for key in network.observation_keys:
        value = td.get(key, None)
        if value is None:
            raise KeyError(
                f"{type(network).__name__} reads {show(key)}, which is not there. The mini-batch holds "
                f"{show_all(leaves(td))}."
            )
        found[canonical(key)] = layout.rows(value)
    batch_size = next(iter(found.values())).shape[:2]
    return network.features(TensorDict(nest(found), batch_size))


def _name(network: object) -> str:
    return type(network).__name__


def _latent(network: RNNActor | RNNCritic, td: TensorDictBase) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One step of ``td [N]``: outputs ``[N, H]``, the states before it and those after it."""
    who = _name(network)
    if td.ndim != 1:
        raise ValueError(
            f"{who} steps through a batch [N], or evaluates a padded mini-batch [L, B] with its `mask`; got "
            f"batch size {tuple(td.batch_size)} without one."
        )
    x = network.features(td)
    before = network.core.states_before_step(td, who)
    out, after = network.core.step(x, before)
    return out, before, after


def _valid_latent(network: RNNActor | RNNCritic, td: TensorDictBase) -> tuple[Tensor, Layout]:
    """Outputs ``[V, H]`` for the valid cells of the padded ``td [L, B]``, in the order of its layout."""
    layout = Layout.of(td.get("mask"))
    states = network.core.entering_states(td, layout, _name(network))
    x = rows_of_observations(network, td, layout)
    return layout.of_rows(network.core.run(x, states, layout)), layout


def _write_states(
    network: RNNActor | RNNCritic, td: TensorDictBase, before: list[Tensor], after: list[Tensor]
) -> None:
    core = network.core
    for key, state in zip(core.state_keys, before, strict=True):
        setattr(state, _WRITTEN, True)
        td.set(key, state)
    for key, state in zip(core.next_state_keys, after, strict=True):
        td.set(key, state)


class RNNActor(GaussianActor):
    """A Gaussian policy with memory: LSTM or GRU, then an MLP for the mean; std as in `MLPActor`.

    Writes what `MLPActor` writes, and its states ``[N, layers, H]``: as they stood before the step at the
    root, as they stand after it under ``next``. Reads ``is_init`` (TorchRL's ``InitTracker``;
    `RolloutCollector` writes it) and starts from zeros there.

    Args:
        in_keys: observation groups, concatenated.
        in_features: their summed width.
        action_dim: A.
        rnn_type: "lstm" or "gru".
        rnn_hidden_dim: H.
        rnn_num_layers: stacked layers.
        hidden_dims: widths of the head's hidden layers.
        activation: name of the activation.
        normalize_observations: keep an `EmpiricalNormalizer` before the RNN.
        init_std, std_type: as in `MLPActor`.
        action_key, log_prob_key, loc_key, scale_key: the entries written.
        state_key: the group of the states, which are ``(state_key, "h")`` and, of an LSTM,
            ``(state_key, "c")``.
        is_init_key: flags ``[N, 1]`` of environments that start an episode.

    Raises:
        ValueError: an unknown activation, std or RNN type, or a size that is not positive.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import RNNActor
        >>> actor = RNNActor(["observation"], 3, 2, rnn_type="gru", rnn_hidden_dim=8)
        >>> step = {"observation": torch.zeros(5, 3), "is_init": torch.ones(5, 1, dtype=torch.bool)}
        >>> actor(TensorDict(step, [5]))["next", "actor_state", "h"].shape
        torch.Size([5, 1, 8])
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        in_features: int,
        action_dim: int,
        *,
        rnn_type: RNNType = "lstm",
        rnn_hidden_dim: int = 256,
        rnn_num_layers: int = 1,
        hidden_dims: Sequence[int] = (256, 256, 256),
        activation: Activation = "elu",
        normalize_observations: bool = False,
        init_std: float = 1.0,
        std_type: StdType = "scalar",
        action_key: NestedKey = "action",
        log_prob_key: NestedKey = "action_log_prob",
        loc_key: NestedKey = "loc",
        scale_key: NestedKey = "scale",
        state_key: NestedKey = "actor_state",
        is_init_key: NestedKey = "is_init",
    ) -> None:
        core = RecurrentCore(in_features, rnn_type, rnn_hidden_dim, rnn_num_layers, state_key, is_init_key)
        super().__init__(
            in_keys,
            in_features,
            rnn_hidden_dim,
            action_dim,
            hidden_dims=hidden_dims,
            activation=activation,
            normalize_observations=normalize_observations,
            init_std=init_std,
            std_type=std_type,
            action_key=action_key,
            log_prob_key=log_prob_key,
            loc_key=loc_key,
            scale_key=scale_key,
            extra_in_keys=[is_init_key, *core.state_keys],
            extra_out_keys=[*core.state_keys, *core.next_state_keys],
        )
        self.core = core

    @classmethod
    def for_env(
        cls, env: EnvBase, in_keys: Sequence[NestedKey] = ("observation",), **kwargs: Any
    ) -> RNNActor:
        """An actor whose sizes are read off an environment; raises as `MLPActor.for_env` does."""
        return cls(in_keys, observation_width(env, in_keys), action_width(env), **kwargs)

    @property
    def state_keys(self) -> list[NestedKey]:
        """Where the states stand, before the step."""
        return self.core.state_keys

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The transform that makes environments carry the states, for collectors other than ours."""
        return self.core.primer()

    def valid_dist(self, tensordict: TensorDictBase) -> DiagonalGaussian:
        """The action distribution ``[V]`` of the valid cells of a padded mini-batch; writes nothing."""
        return self._dist(_valid_latent(self, tensordict)[0])

    def latent(self, tensordict: TensorDictBase) -> Tensor:
        """What the head reads: ``[N, H]`` of a step, ``[L, B, H]`` (zeros on padding) of a mini-batch."""
        if "mask" in tensordict.keys():
            out, layout = _valid_latent(self, tensordict)
            return layout.put(out)
        return _latent(self, tensordict)[0]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Acts: writes mean, std, action, log-probability, and the states before and after the step."""
        out, before, after = _latent(self, tensordict)
        _write_states(self, tensordict, before, after)
        return self._act(tensordict, out)


class RNNCritic(ValueCritic):
    """A state-value function with memory: LSTM or GRU, then an MLP; writes ``state_value`` ``[*, 1]``.

    Args:
        in_keys: observation groups, concatenated; may hold what the actor does not see.
        in_features: their summed width.
        rnn_type: "lstm" or "gru".
        rnn_hidden_dim: H.
        rnn_num_layers: stacked layers.
        hidden_dims: widths of the head's hidden layers.
        activation: name of the activation.
        normalize_observations: keep an `EmpiricalNormalizer` before the RNN.
        value_key: the entry written.
        state_key: the group of the states, as in `RNNActor`.
        is_init_key: flags ``[N, 1]`` of environments that start an episode.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import RNNCritic
        >>> critic = RNNCritic(["observation"], 3, rnn_hidden_dim=8)
        >>> step = {"observation": torch.zeros(5, 3), "is_init": torch.ones(5, 1, dtype=torch.bool)}
        >>> critic(TensorDict(step, [5]))["state_value"].shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        in_features: int,
        *,
        rnn_type: RNNType = "lstm",
        rnn_hidden_dim: int = 256,
        rnn_num_layers: int = 1,
        hidden_dims: Sequence[int] = (256, 256, 256),
        activation: Activation = "elu",
        normalize_observations: bool = False,
        value_key: NestedKey = "state_value",
        state_key: NestedKey = "critic_state",
        is_init_key: NestedKey = "is_init",
    ) -> None:
        core = RecurrentCore(in_features, rnn_type, rnn_hidden_dim, rnn_num_layers, state_key, is_init_key)
        super().__init__(
            in_keys,
            in_features,
            rnn_hidden_dim,
            hidden_dims=hidden_dims,
            activation=activation,
            normalize_observations=normalize_observations,
            value_key=value_key,
            extra_in_keys=[is_init_key, *core.state_keys],
            extra_out_keys=[*core.state_keys, *core.next_state_keys],
        )
        self.core = core

    @classmethod
    def for_env(
        cls, env: EnvBase, in_keys: Sequence[NestedKey] = ("observation",), **kwargs: Any
    ) -> RNNCritic:
        """A critic whose width is read off an environment; raises as `MLPActor.for_env` does."""
        return cls(in_keys, observation_width(env, in_keys), **kwargs)

    @property
    def state_keys(self) -> list[NestedKey]:
        """Where the states stand, before the step."""
        return self.core.state_keys

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The transform that makes environments carry the states, for collectors other than ours."""
        return self.core.primer()

    def valid_values(self, tensordict: TensorDictBase) -> Tensor:
        """The values ``[V, 1]`` of the valid cells of a padded mini-batch; writes nothing."""
        return self.mlp(_valid_latent(self, tensordict)[0])

    def latent(self, tensordict: TensorDictBase) -> Tensor:
        """What the head reads: ``[N, H]`` of a step, ``[L, B, H]`` (zeros on padding) of a mini-batch."""
        if "mask" in tensordict.keys():
            out, layout = _valid_latent(self, tensordict)
            return layout.put(out)
        return _latent(self, tensordict)[0]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the value, and the states before and after the step."""
        out, before, after = _latent(self, tensordict)
        _write_states(self, tensordict, before, after)
        return tensordict.set(self._value_key, self.mlp(out))
