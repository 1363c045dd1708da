"""MLP actor and critic with RSL-RL's shape: optional normaliser, ELU layers, state-independent std."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.envs import EnvBase

from torchrl_rslstorage._compat import ModuleBase
from torchrl_rslstorage.data.leaves import show
from torchrl_rslstorage.modules.heads import Activation, GaussianActor, StdType, ValueCritic
from torchrl_rslstorage.modules.observations import action_width, observation_width


class MLPActor(GaussianActor):
    """A Gaussian policy: MLP mean, learned standard deviation that does not depend on the state.

    Writes ``loc``, ``scale`` and ``action`` ``[*, A]`` and ``action_log_prob`` ``[*]``. Acts by TorchRL's
    exploration type (``set_exploration_type``): samples unless told to be deterministic.

    Args:
        in_keys: observation groups, concatenated.
        in_features: their summed width.
        action_dim: A.
        hidden_dims: widths of the hidden layers (rsl_rl 5.5.1, models/mlp_model.py).
        activation: name of the activation. An "elu" writes into what the layer before it returned, which is
            what a hook on that layer sees; set ``inplace`` of the ``nn.ELU`` modules to False for hooks that
            look at layers before their activation, and for full backward hooks, which torch refuses else.
        normalize_observations: keep an `EmpiricalNormalizer` before the MLP.
        init_std: standard deviation at the start.
        std_type: what is learned, the standard deviation ("scalar") or its logarithm ("log"); both start
            at ``init_std`` and are clamped to a std in [1e-6, 1e6].
        action_key, log_prob_key, loc_key, scale_key: the entries written.

    Raises:
        ValueError: an unknown activation or std type, or a non-positive ``init_std``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import MLPActor
        >>> actor = MLPActor(["observation"], in_features=3, action_dim=2)
        >>> td = actor(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
        >>> td["action"].shape, td["action_log_prob"].shape
        (torch.Size([5, 2]), torch.Size([5]))
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        in_features: int,
        action_dim: int,
        *,
        hidden_dims: Sequence[int] = (256, 256, 256),
        activation: Activation = "elu",
        normalize_observations: bool = False,
        init_std: float = 1.0,
        std_type: StdType = "scalar",
        action_key: NestedKey = "action",
        log_prob_key: NestedKey = "action_log_prob",
        loc_key: NestedKey = "loc",
        scale_key: NestedKey = "scale",
    ) -> None:
        super().__init__(
            in_keys,
            in_features,
            in_features,
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
        )

    @classmethod
    def for_env(
        cls, env: EnvBase, in_keys: Sequence[NestedKey] = ("observation",), **kwargs: Any
    ) -> MLPActor:
        """An actor whose sizes are read off an environment.

        Raises:
            KeyError, TypeError, ValueError: the observations or the action space do not fit an MLP with
                a Gaussian; the message says which and why.
        """
        return cls(in_keys, observation_width(env, in_keys), action_width(env), **kwargs)


class MLPCritic(ValueCritic):
    """A state-value function: MLP on one or several observation groups; writes ``state_value`` ``[*, 1]``.

    Args:
        in_keys: observation groups, concatenated; may hold what the actor does not see.
        in_features: their summed width.
        hidden_dims: widths of the hidden layers.
        activation: name of the activation, as in `MLPActor`.
        normalize_observations: keep an `EmpiricalNormalizer` before the MLP.
        value_key: the entry written.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import MLPCritic
        >>> critic = MLPCritic(["observation"], in_features=3)
        >>> critic(TensorDict({"observation": torch.zeros(5, 3)}, [5]))["state_value"].shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        in_features: int,
        *,
        hidden_dims: Sequence[int] = (256, 256, 256),
        activation: Activation = "elu",
        normalize_observations: bool = False,
        value_key: NestedKey = "state_value",
    ) -> None:
        super().__init__(
            in_keys,
            in_features,
            in_features,
            hidden_dims=hidden_dims,
            activation=activation,
            normalize_observations=normalize_observations,
            value_key=value_key,
        )

    @classmethod
    def for_env(
        cls, env: EnvBase, in_keys: Sequence[NestedKey] = ("observation",), **kwargs: Any
    ) -> MLPCritic:
        """A critic whose width is read off an environment; raises as `MLPActor.for_env` does."""
        return cls(in_keys, observation_width(env, in_keys), **kwargs)


class ActorCritic(ModuleBase):
    """Actor, then critic: what a collector runs so that rollouts hold values from act time.

    The same as ``TensorDictSequential(actor, critic)`` at a fraction of its overhead; works with
    TorchRL's ``ProbabilisticActor`` and ``ValueOperator`` as well.

    Args:
        actor: writes the action, its log-probability and the distribution's parameters.
        critic: writes the state value.

    Raises:
        ValueError: both are recurrent and keep their states under the same key.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import ActorCritic, MLPActor, MLPCritic
        >>> policy = ActorCritic(MLPActor(["obs"], 3, 2), MLPCritic(["obs"], 3))
        >>> sorted(policy(TensorDict({"obs": torch.zeros(5, 3)}, [5])).keys())
        ['action', 'action_log_prob', 'loc', 'obs', 'scale', 'state_value']
    """

    def __init__(self, actor: TensorDictModuleBase, critic: TensorDictModuleBase) -> None:
        super().__init__()
        require_states_apart(actor, critic)
        self.actor = actor
        self.critic = critic
        self._name_keys(
            list(dict.fromkeys([*actor.in_keys, *critic.in_keys])),
            list(dict.fromkeys([*actor.out_keys, *critic.out_keys])),
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Runs both on ``tensordict``, which they write into."""
        return self.critic(self.actor(tensordict))


def require_states_apart(actor: Any, critic: Any) -> None:
    """Refuses recurrent networks that would write over each other's states.

    Raises:
        ValueError: a state key of ``actor`` is one of ``critic``'s.
    """
    shared = [key for key in getattr(actor, "state_keys", []) if key in getattr(critic, "state_keys", [])]
    if shared:
        raise ValueError(
            f"Actor and critic both keep their state under {show(shared[0])}: give one another state_key."
        )
