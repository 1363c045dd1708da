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
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase, TensorDictPrimer

from torchrl_rslstorage.data.leaves import Key, canonical, leaves, nest, show, show_all
from torchrl_rslstorage.data.trajectory_layouts import Layout, layout_of
from torchrl_rslstorage.modules.distributions import DiagonalGaussian
from torchrl_rslstorage.modules.heads import Activation, GaussianActor, StdType, ValueCritic
from torchrl_rslstorage.modules.observations import ObservationModule, action_width, observation_width
from torchrl_rslstorage.modules.recurrent_core import RecurrentCore, RNNType, Steps, mark_written


def _name(network: object) -> str:
    return type(network).__name__


class RecurrentModule(ObservationModule):
    """What `RNNActor` and `RNNCritic` share: the step, the padded mini-batch, the states."""

    core: RecurrentCore

    @property
    def state_keys(self) -> list[NestedKey]:
        """Where the states stand, before the step."""
        return self.core.state_keys

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The transform that makes environments carry the states, for collectors other than ours."""
        return self.core.primer()

    def latent(self, tensordict: TensorDictBase) -> Tensor:
        """What the head reads: ``[N, H]`` of a step, ``[L, B, H]`` (zeros on padding) of a mini-batch."""
        if tensordict.ndim == 2 and "mask" in tensordict.keys():
            out, layout = self._valid_latent(tensordict)
            return layout.put(out)
        return self._stepped(tensordict)[0]

    def _stepped(self, td: TensorDictBase) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """One step of ``td [N]``: outputs ``[N, H]``, the states before it and those after it."""
        who = _name(self)
        if td.ndim != 1:
            raise ValueError(
                f"{who} steps through a batch [N], or evaluates a padded mini-batch [L, B] with its `mask`; "
                f"got batch size {tuple(td.batch_size)} without one."
            )
        x = self.features(td)
        before = self.core.states_before_step(td, who)
        out, after = self.core.step(x, before)
        return out, before, after

    def _step(self, td: TensorDictBase) -> Tensor:
        """`_stepped`, with the states written: those before the step at the root, those after under next."""
        out, before, after = self._stepped(td)
        for key, state in zip(self.core.state_keys, before, strict=True):
            mark_written(state)
            td.set(key, state)
        for key, state in zip(self.core.next_state_keys, after, strict=True):
            td.set(key, state)
        return out

    def _valid_latent(self, td: TensorDictBase) -> tuple[Tensor, Layout]:
        """Outputs ``[V, H]`` for the valid cells of the padded ``td [L, B]``, in the order of its layout."""
        layout = layout_of(td.get("mask"))
        states = self.core.entering_states(td, layout, _name(self))
        x = self._features_of_rows(td, layout)
        outs, _ = self.core.run(x, states, layout)
        return layout.of_rows(outs[0] if len(outs) == 1 else torch.cat(outs)), layout

    def _features_of_rows(self, td: TensorDictBase, layout: Layout) -> Tensor:
        """The features ``[T, M, F]`` of the rows that the padded ``td [L, B]`` was made of."""
        found: dict[Key, Tensor] = {}
        for key in self.observation_keys:
            value = td.get(key, None)
            if value is None:
                raise KeyError(
                    f"{type(self).__name__} reads {show(key)}, which is not there. The mini-batch holds "
                    f"{show_all(leaves(td))}."
                )
            found[canonical(key)] = layout.rows(value)
        batch_size = next(iter(found.values())).shape[:2]
        return self.features(TensorDict(nest(found), batch_size))


class RNNActor(RecurrentModule, GaussianActor):
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
        activation: name of the activation, as in `MLPActor`.
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

    def valid_dist(self, tensordict: TensorDictBase) -> DiagonalGaussian:
        """The action distribution ``[V]`` of the valid cells of a padded mini-batch; writes nothing."""
        return self._dist(self._valid_latent(tensordict)[0])

    def unroll(
        self, tensordict: TensorDictBase, states: list[Tensor], steps: Steps
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What the head reads of consecutive rows, and the states after the last of them.

        The former comes in pieces ``[L', N, H]``, in the order of the rows.

        Args:
            tensordict: batch size ``[L, N]``, time first; it is not written to.
            states: as they stand before row 0, ``[N, layers, H]`` in the order of ``state_keys``.
            steps: where they start anew in later rows.
        """
        return self.core.run(self.features(tensordict), states, steps)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Acts: writes mean, std, action, log-probability, and the states before and after the step."""
        return self._act(tensordict, self._step(tensordict))


class RNNCritic(RecurrentModule, ValueCritic):
    """A state-value function with memory: LSTM or GRU, then an MLP; writes ``state_value`` ``[*, 1]``.

    Args:
        in_keys: observation groups, concatenated; may hold what the actor does not see.
        in_features: their summed width.
        rnn_type: "lstm" or "gru".
        rnn_hidden_dim: H.
        rnn_num_layers: stacked layers.
        hidden_dims: widths of the head's hidden layers.
        activation: name of the activation, as in `MLPActor`.
        normalize_observations: keep an `EmpiricalNormalizer` before the RNN.
        value_key: the entry written.
        state_key: the group of the states, as in `RNNActor`.
        is_init_key: flags ``[N, 1]`` of environments that start an episode.

    Raises:
        ValueError: an unknown activation or RNN type, or a size that is not positive.

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

    def valid_values(self, tensordict: TensorDictBase) -> Tensor:
        """The values ``[V, 1]`` of the valid cells of a padded mini-batch; writes nothing."""
        return self.mlp(self._valid_latent(tensordict)[0])

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the value, and the states before and after the step."""
        return tensordict.set(self._value_key, self.mlp(self._step(tensordict)))
