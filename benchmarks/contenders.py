"""The three sides, on the same data, with the same networks.

A rollout is made once as a TensorDict ``[T, N]``; each side gets it in the form that its own collection
leaves behind:

    ours         a full RolloutBuffer [T, N], sparse final observations, as RolloutCollector writes it
    rsl-rl-lib   a full RolloutStorage [T, N], as PPO.process_env_step writes it
    TorchRL      a collector's batch [N, T] with a whole `next`, as Collector yields it

TorchRL's side does what its PPO example does (sota-implementations/ppo/ppo_mujoco.py): GAE in each epoch,
the batch reshaped and extended into a ``TensorDictReplayBuffer`` over a ``LazyTensorStorage``, drawn by
``SamplerWithoutReplacement``, ``ClipPPOLoss``, Adam. It neither clips gradients nor adapts the learning
rate. Three things speak in its favour and are not what the example does: a plain Gaussian instead of a
squashed one, ELU like the others, and GAE's default loop, which on a CPU is faster than the example's
vectorised one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import Tensor, nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from benchmarks.harness import NUM_EPOCHS, NUM_MINI_BATCHES, Shape
from torchrl_rslstorage import (
    KLAdaptiveStepper,
    MiniBatchSampler,
    MLPActor,
    MLPCritic,
    RolloutBuffer,
    RolloutGAE,
    RSLPPOLoss,
)

GAMMA, LMBDA = 0.99, 0.95
LEARNING_RATE = 1e-3
CLIP = 0.2
ENTROPY_COEFF = 0.01
_TERMINATED, _TRUNCATED = 0.005, 0.001
"""Shares of steps. RSL-RL's legged robots and Gymnasium's MuJoCo tasks are truncated after 1000 steps."""

Restore = Callable[[], None]


# -- the data ----------------------------------------------------------------------------------------


def make_rollout(shape: Shape, device: torch.device, *, seed: int = 0) -> TensorDict:
    """Random steps ``[T, N]``, with everything that the policy and the environment wrote.

    Next observations are views of the following row, so that very large shapes fit into memory.
    """
    generator = torch.Generator(device).manual_seed(seed)
    steps, envs = shape.num_steps, shape.num_envs

    def noise(*size: int) -> Tensor:
        return torch.empty(size, device=device).uniform_(-1.7, 1.7, generator=generator)

    observations = {key: noise(steps + 1, envs, width) for key, width in shape.groups.items()}
    terminated = noise(steps, envs, 1).abs() < 1.7 * _TERMINATED
    truncated = (noise(steps, envs, 1).abs() < 1.7 * _TRUNCATED) & ~terminated
    loc = noise(steps, envs, shape.num_actions)
    action = loc + noise(steps, envs, shape.num_actions)
    after = {
        **{key: rows[1:] for key, rows in observations.items()},
        "reward": noise(steps, envs, 1),
        "done": terminated | truncated,
        "terminated": terminated,
        "truncated": truncated,
    }
    rollout = {
        **{key: rows[:-1] for key, rows in observations.items()},
        "loc": loc,
        "scale": torch.ones_like(loc),
        "action": action,
        "action_log_prob": -0.5 * (action - loc).square().sum(-1),
        "state_value": noise(steps, envs, 1),
        "next": TensorDict(after, [steps, envs], device=device),
    }
    return TensorDict(rollout, [steps, envs], device=device)


def rows_of(rollout: TensorDict) -> list[TensorDict]:
    """The rollout's steps ``[N]``, as an environment loop hands them over one by one."""
    return [rollout[t] for t in range(rollout.shape[0])]


@torch.no_grad()
def act(rollout: TensorDict, actor: MLPActor, critic: MLPCritic) -> None:
    """Overwrites what the policy wrote by what these networks would write, so that ratios start at one."""
    for row in rows_of(rollout):
        acted = critic(actor(row.select(*actor.in_keys, *critic.in_keys)))
        for key in ("loc", "scale", "action", "action_log_prob", "state_value"):
            row.get(key).copy_(acted.get(key))


# -- ours --------------------------------------------------------------------------------------------


def our_networks(shape: Shape, device: torch.device) -> tuple[MLPActor, MLPCritic]:
    hidden: dict[str, Any] = {"hidden_dims": shape.hidden_dims}
    actor = MLPActor(["policy"], shape.groups["policy"], shape.num_actions, **hidden)
    critic = MLPCritic([shape.critic_group], shape.groups[shape.critic_group], **hidden)
    return actor.to(device), critic.to(device)


def our_loss(actor: MLPActor, critic: MLPCritic) -> RSLPPOLoss:
    return RSLPPOLoss(actor, critic, clip_epsilon=CLIP, entropy_coeff=ENTROPY_COEFF)


def our_buffer(
    shape: Shape, rollout: TensorDict, *, keys: list[Any], reshuffle: bool = False
) -> RolloutBuffer:
    """A full window."""
    sampler = MiniBatchSampler(NUM_MINI_BATCHES, NUM_EPOCHS, reshuffle=reshuffle, keys=keys)
    buffer = RolloutBuffer(shape.num_steps, shape.num_envs, sampler=sampler, device=rollout.device or "cpu")
    for row in rows_of(rollout):
        buffer.add(row)
    return buffer


class OurUpdate:
    """One update of a full window: advantages, then every mini-batch of every epoch."""

    def __init__(
        self, buffer: RolloutBuffer, actor: MLPActor, critic: MLPCritic, *, compile: bool = False
    ) -> None:
        self.buffer = buffer
        self.loss = our_loss(actor, critic)
        self.gae = RolloutGAE(GAMMA, LMBDA, critic, normalize=True, check_observations=True)
        self.stepper = KLAdaptiveStepper(actor, critic, learning_rate=LEARNING_RATE, compile=compile)
        self.restore = keeper(actor, critic)

    def __call__(self) -> list[float]:
        """The means of all losses and diagnostics."""
        self.gae(self.buffer)
        metrics = [self.stepper.update(self.loss, mini_batch) for mini_batch in self.buffer]
        return torch.stack(metrics).mean(0).tolist()


# -- rsl-rl-lib --------------------------------------------------------------------------------------


def rsl_rl_networks(shape: Shape, observations: TensorDict) -> tuple[MLPModel, MLPModel]:
    groups = {"actor": ["policy"], "critic": [shape.critic_group]}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    hidden = list(shape.hidden_dims)
    actor = MLPModel(
        observations, groups, "actor", shape.num_actions, hidden_dims=hidden, distribution_cfg=gaussian
    )
    critic = MLPModel(observations, groups, "critic", 1, hidden_dims=hidden)
    return actor.to(observations.device), critic.to(observations.device)


def rsl_rl_transitions(shape: Shape, rollout: TensorDict) -> list[RolloutStorage.Transition]:
    """The rollout's steps as ``PPO.process_env_step`` hands them to the storage."""
    transitions = []
    for row in rows_of(rollout):
        transition = RolloutStorage.Transition()
        transition.observations = row.select(*shape.groups)
        transition.actions = row["action"]
        transition.rewards = row["next", "reward"].squeeze(-1)
        transition.dones = row["next", "done"].squeeze(-1)
        transition.values = row["state_value"]
        transition.actions_log_prob = row["action_log_prob"]
        transition.distribution_params = (row["loc"], row["scale"])
        transitions.append(transition)
    return transitions


def rsl_rl_storage(shape: Shape, rollout: TensorDict, *, full: bool = True) -> RolloutStorage:
    observations = rollout[0].select(*shape.groups)
    device = str(rollout.device)
    storage = RolloutStorage("rl", shape.num_envs, shape.num_steps, observations, [shape.num_actions], device)
    for transition in rsl_rl_transitions(shape, rollout) if full else ():
        storage.add_transition(transition)
    return storage


def rsl_rl_ppo(actor: Any, critic: Any, storage: RolloutStorage) -> PPO:
    return PPO(
        actor,
        critic,
        storage,
        num_learning_epochs=NUM_EPOCHS,
        num_mini_batches=NUM_MINI_BATCHES,
        clip_param=CLIP,
        gamma=GAMMA,
        lam=LMBDA,
        entropy_coef=ENTROPY_COEFF,
        learning_rate=LEARNING_RATE,
        device=str(storage.device),
    )


class RslRlUpdate:
    """The second half of ``OnPolicyRunner.learn``: returns, then the update."""

    def __init__(self, shape: Shape, rollout: TensorDict, actor: MLPModel, critic: MLPModel) -> None:
        self.ppo = rsl_rl_ppo(actor, critic, rsl_rl_storage(shape, rollout))
        self.last = rollout[-1]["next"].select(*shape.groups).clone()
        self.restore = keeper(actor, critic)

    def __call__(self) -> dict[str, float]:
        with torch.inference_mode():
            self.ppo.compute_returns(self.last)
        return self.ppo.update()


# -- TorchRL -----------------------------------------------------------------------------------------


def torchrl_networks(
    shape: Shape, device: torch.device, *, actor_key: str = "policy", critic_key: str | None = None
) -> tuple[ProbabilisticActor, ValueOperator]:
    critic_key = shape.critic_group if critic_key is None else critic_key
    mean = _torchrl_mlp(shape.groups["policy"], shape.num_actions, shape)
    mean_std = nn.Sequential(mean, AddStateIndependentNormalScale(shape.num_actions, scale_lb=1e-8))
    actor = ProbabilisticActor(
        TensorDictModule(mean_std, in_keys=[actor_key], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(_torchrl_mlp(shape.groups[shape.critic_group], 1, shape), in_keys=[critic_key])
    return actor.to(device), critic.to(device)


def _torchrl_mlp(in_features: int, out_features: int, shape: Shape) -> MLP:
    return MLP(in_features, out_features, num_cells=list(shape.hidden_dims), activation_class=nn.ELU)


def torchrl_batch(rollout: TensorDict) -> TensorDict:
    """What TorchRL's ``Collector`` yields for these steps: contiguous ``[N, T]``, a whole ``next``."""
    steps, envs = rollout.shape
    batch = rollout.exclude("state_value").transpose(0, 1).contiguous()
    flags = torch.zeros(envs, steps, 1, dtype=torch.bool, device=rollout.device)
    for key in ("done", "terminated", "truncated"):
        batch[key] = flags.clone()
    batch["collector", "traj_ids"] = torch.zeros(envs, steps, dtype=torch.int64, device=rollout.device)
    batch.names = [None, "time"]
    return batch


def torchrl_buffer(shape: Shape, device: torch.device) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(shape.num_cells, device=device),
        sampler=SamplerWithoutReplacement(),
        batch_size=shape.mini_batch_size,
    )


class TorchRLUpdate:
    """One update of the PPO example on one batch of a collector."""

    def __init__(self, shape: Shape, device: torch.device, actor: ProbabilisticActor, critic: ValueOperator):
        self.gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=critic, average_gae=False)
        self.buffer = torchrl_buffer(shape, device)
        self.loss = ClipPPOLoss(
            actor,
            critic,
            clip_epsilon=CLIP,
            loss_critic_type="l2",
            entropy_coeff=ENTROPY_COEFF,
            critic_coeff=1.0,
            normalize_advantage=True,
        )
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=LEARNING_RATE, eps=1e-5)
        self.losses = TensorDict(batch_size=[NUM_EPOCHS, NUM_MINI_BATCHES], device=device)
        self.restore = keeper(actor, critic)

    def __call__(self, data: TensorDictBase) -> dict[str, float]:
        for epoch in range(NUM_EPOCHS):
            with torch.no_grad():
                data = self.gae(data)
            self.buffer.extend(data.reshape(-1))
            for number, mini_batch in enumerate(self.buffer):
                self.optimizer.zero_grad(set_to_none=True)
                losses = self.loss(mini_batch)
                total = losses["loss_critic"] + losses["loss_objective"] + losses["loss_entropy"]
                total.backward()
                self.optimizer.step()
                kept = losses.select("loss_critic", "loss_entropy", "loss_objective")
                self.losses[epoch, number] = kept.detach()
        means = self.losses.apply(lambda x: x.float().mean(), batch_size=[])
        return {key: value.item() for key, value in means.items()}


# -- the three beside each other -----------------------------------------------------------------------


class Updates:
    """The three updates of one rollout, from the same weights, which also made it."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        self.rollout = make_rollout(shape, device)
        actor, critic = our_networks(shape, device)
        theirs = rsl_rl_networks(shape, self.rollout[0].select(*shape.groups))
        torchrls = torchrl_networks(shape, device)
        copy_weights(actor, theirs[0], torchrls[0])
        copy_weights(critic, theirs[1], torchrls[1])
        act(self.rollout, actor, critic)
        self.ours = self._our_update(actor, critic)
        self.rsl_rl = RslRlUpdate(shape, self.rollout, *theirs)
        self.torchrl = TorchRLUpdate(shape, device, *torchrls)
        self.batch = torchrl_batch(self.rollout)

    def ours_compiled(self) -> OurUpdate:
        """Ours again, through ``torch.compile``, on networks of its own."""
        actor, critic = our_networks(self.shape, self.device)
        copy_weights(self.ours.loss.actor_network, actor)
        copy_weights(self.ours.loss.critic_network, critic)
        return self._our_update(actor, critic, compile=True)

    def _our_update(self, actor: MLPActor, critic: MLPCritic, **options: Any) -> OurUpdate:
        buffer = our_buffer(self.shape, self.rollout, keys=our_loss(actor, critic).in_keys)
        return OurUpdate(buffer, actor, critic, **options)


# -- the same start for all --------------------------------------------------------------------------


@torch.no_grad()
def copy_weights(source: nn.Module, *targets: nn.Module) -> None:
    """Copies the linear layers of one MLP into others of the same sizes."""
    for target in targets:
        for theirs, mine in zip(_linears(target), _linears(source), strict=True):
            theirs.load_state_dict(mine.state_dict())


def _linears(module: nn.Module) -> Iterator[nn.Linear]:
    return (layer for layer in module.modules() if isinstance(layer, nn.Linear))


def keeper(*networks: nn.Module) -> Restore:
    """A function that puts the networks' parameters back to what they are now.

    Each measured update then starts alike, and none learns a single window until it diverges.
    """
    parameters = [p for network in networks for p in network.parameters()]
    kept = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def restore() -> None:
        for p, value in zip(parameters, kept, strict=True):
            p.copy_(value)

    return restore
