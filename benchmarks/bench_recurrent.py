"""Recurrent policies: the 20 mini-batches of one update, and one epoch of it, at three rates of done.

*Mini-batches*: ours cuts and pads the window once; rsl-rl-lib pads all observations once, to T, and picks
hidden states in each mini-batch of each epoch. TorchRL's ``SliceSampler`` draws as many slices a mini-batch
as there are trajectories in a quarter of the window, from a buffer that holds the same frames with hidden
states and ``next``; it pads nothing, which its modules do later. The memcpy bound is one copy of our padded
mini-batches.

*Update*: LSTM of 256 and a head of 128 for actor and critic, from a full window to new weights: advantages,
then 4 mini-batches. It is one epoch instead of five, since rsl-rl-lib's takes minutes where many episodes
end: it runs its LSTM over trajectories padded to T, ours over the rows that they were made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from rsl_rl.models import RNNModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SliceSampler

from benchmarks.contenders import (
    ENTROPY_COEFF,
    GAMMA,
    LEARNING_RATE,
    LMBDA,
    keeper,
    make_rollout,
    our_loss,
    rows_of,
    rsl_rl_ppo,
    rsl_rl_transitions,
)
from benchmarks.harness import (
    NUM_EPOCHS,
    NUM_MINI_BATCHES,
    OURS,
    RSL_RL,
    TORCHRL,
    Contender,
    Row,
    Settings,
    Shape,
    measure,
    memcpy,
    nbytes,
)
from torchrl_rslstorage import (
    KLAdaptiveStepper,
    RNNActor,
    RNNCritic,
    RolloutBuffer,
    RolloutGAE,
    TrajectorySampler,
)

SUBJECTS = ("recurrent_mini_batches", "recurrent_update")
SHAPES = ("M",)
DONE_RATES = (0.005, 0.05, 0.3)
HIDDEN, HEAD = 256, (128,)
_UPDATE_ROUNDS = 3


def at_rate(shape: Shape, rate: float) -> Shape:
    """The shape under a name that tells the share of steps that end an episode."""
    return dataclasses.replace(shape, name=f"{shape.name}, {100 * rate:g} % done", hidden_dims=HEAD)


def recurrent_rollout(shape: Shape, rate: float, device: torch.device, hidden: int = HIDDEN) -> TensorDict:
    """Random steps, ``rate`` of them ending an episode, with states as LSTM actor and critic leave them."""
    rollout = make_rollout(shape, device)
    generator = torch.Generator(device).manual_seed(1)
    done = torch.rand(*rollout.shape, 1, device=device, generator=generator) < rate
    after = rollout["next"]
    after["done"], after["terminated"], after["truncated"] = done, done.clone(), torch.zeros_like(done)
    rollout["is_init"] = torch.cat([torch.ones_like(done[:1]), done[:-1]])
    state = torch.rand(shape.num_envs, 1, hidden, device=device, generator=generator).sub_(0.5)
    for name in ("actor_state", "critic_state"):
        for part in ("h", "c"):
            # Expanded, so that the benchmark's own memory stays small; writers copy.
            rollout[name, part] = state.expand(*rollout.shape, 1, hidden)
            after[name, part] = state.expand(*rollout.shape, 1, hidden)
    return rollout


def our_networks(shape: Shape, device: torch.device, hidden: int = HIDDEN) -> tuple[RNNActor, RNNCritic]:
    options: dict[str, Any] = {"rnn_hidden_dim": hidden, "hidden_dims": shape.hidden_dims}
    critic_width = shape.groups[shape.critic_group]
    actor = RNNActor(["policy"], shape.groups["policy"], shape.num_actions, **options)
    return actor.to(device), RNNCritic([shape.critic_group], critic_width, **options).to(device)


def our_buffer(
    shape: Shape, rollout: TensorDict, keys: list[Any], num_epochs: int = NUM_EPOCHS
) -> RolloutBuffer:
    buffer = RolloutBuffer(
        shape.num_steps,
        shape.num_envs,
        sampler=TrajectorySampler(NUM_MINI_BATCHES, num_epochs, keys=keys),
        device=rollout.device or "cpu",
        state_keys=["actor_state", "critic_state"],
    )
    for row in rows_of(rollout):
        buffer.add(row)
    return buffer


def rsl_rl_storage(shape: Shape, rollout: TensorDict) -> RolloutStorage:
    observations = rollout[0].select(*shape.groups)
    device = str(rollout.device)
    storage = RolloutStorage("rl", shape.num_envs, shape.num_steps, observations, [shape.num_actions], device)
    for t, transition in enumerate(rsl_rl_transitions(shape, rollout)):
        states = [
            tuple(rollout[name, part][t].transpose(0, 1) for part in ("h", "c"))
            for name in ("actor_state", "critic_state")
        ]
        transition.hidden_states = (states[0], states[1])
        storage.add_transition(transition)
    return storage


# -- mini-batches --------------------------------------------------------------------------------------


def mini_batch_contenders(shape: Shape, rate: float, settings: Settings) -> list[Contender]:
    rollout = recurrent_rollout(shape, rate, settings.device)
    buffer = our_buffer(shape, rollout, our_loss(*our_networks(shape, settings.device)).in_keys)
    for key in ("advantage", "value_target"):
        buffer.storage.derived(key).normal_()

    def ours() -> None:
        for _ in buffer:
            pass

    copied = [
        value for batch in list(buffer)[:NUM_MINI_BATCHES] for value in batch.values(True, True)
        if 0 not in value.stride()
    ]  # fmt: skip
    storage = rsl_rl_storage(shape, rollout)

    def rsl_rl() -> None:
        for _ in storage.recurrent_mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS):
            pass

    replay = _torchrl_buffer(shape, rollout)

    def torchrl() -> None:
        for _ in range(NUM_EPOCHS * NUM_MINI_BATCHES):
            replay.sample()

    return [
        Contender(OURS, ours),
        Contender(RSL_RL, rsl_rl),
        Contender(TORCHRL, torchrl),
        memcpy(nbytes(copied), settings.device),
    ]


def _torchrl_buffer(shape: Shape, rollout: TensorDict) -> TensorDictReplayBuffer:
    """A collector's batch ``[N, T]`` with ``next`` and what GAE added; states as their modules leave them."""
    batch = rollout.transpose(0, 1).contiguous()
    for key in ("advantage", "value_target"):
        batch[key] = torch.randn(*batch.shape, 1, device=rollout.device)
    ended = int(rollout["next", "done"][:-1].sum())
    slices = -(-(shape.num_envs + ended) // NUM_MINI_BATCHES)
    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(shape.num_cells, ndim=2, device=rollout.device),
        sampler=SliceSampler(
            num_slices=slices, end_key=("next", "done"), strict_length=False, cache_values=True
        ),
        batch_size=slices * shape.num_steps,
        dim_extend=0,
    )
    replay.extend(batch)
    return replay


# -- one update ----------------------------------------------------------------------------------------


def update_contenders(shape: Shape, rate: float, settings: Settings) -> list[Contender]:
    torch.manual_seed(0)
    rollout = recurrent_rollout(shape, rate, settings.device)
    actor, critic = our_networks(shape, settings.device)
    theirs = rsl_rl_networks_of(shape, rollout)
    for mine, model in ((actor, theirs[0]), (critic, theirs[1])):
        mine.core.rnn.load_state_dict(model.rnn.rnn.state_dict())
        for parameter, source in zip(mine.mlp.parameters(), model.mlp.parameters(), strict=True):
            parameter.data.copy_(source)
    loss = our_loss(actor, critic)
    buffer = our_buffer(shape, rollout, loss.in_keys, num_epochs=1)
    gae = RolloutGAE(GAMMA, LMBDA, critic, normalize=True, check_observations=True)
    stepper = KLAdaptiveStepper(actor, critic, learning_rate=LEARNING_RATE)
    assert loss.entropy_coeff == ENTROPY_COEFF
    ppo = rsl_rl_ppo(*theirs, rsl_rl_storage(shape, rollout))
    ppo.num_learning_epochs = 1
    last = rollout[-1]["next"].select(*shape.groups).clone()

    def ours() -> list[float]:
        gae(buffer)
        return torch.stack([stepper.update(loss, batch) for batch in buffer]).mean(0).tolist()

    def rsl_rl() -> dict[str, float]:
        with torch.inference_mode():
            ppo.compute_returns(last)
        return ppo.update()

    return [
        Contender(OURS, ours, keeper(actor, critic)),
        Contender(RSL_RL, rsl_rl, keeper(*theirs)),
    ]


def rsl_rl_networks_of(shape: Shape, rollout: TensorDict, hidden: int = HIDDEN) -> tuple[RNNModel, RNNModel]:
    observations = rollout[0].select(*shape.groups)
    groups = {"actor": ["policy"], "critic": [shape.critic_group]}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    options: dict[str, Any] = {
        "hidden_dims": list(shape.hidden_dims), "rnn_type": "lstm", "rnn_hidden_dim": hidden
    }  # fmt: skip
    actor = RNNModel(observations, groups, "actor", shape.num_actions, distribution_cfg=gaussian, **options)
    critic = RNNModel(observations, groups, "critic", 1, **options)
    return actor.to(observations.device), critic.to(observations.device)


def run(settings: Settings) -> Iterator[Row]:
    for plain in settings.chosen(SHAPES):
        for rate in DONE_RATES:
            shape = at_rate(plain, rate)
            yield Row(SUBJECTS[0], shape, measure(mini_batch_contenders(shape, rate, settings), settings))
            few = dataclasses.replace(settings, rounds=settings.rounds or _UPDATE_ROUNDS)
            yield Row(SUBJECTS[1], shape, measure(update_contenders(shape, rate, settings), few))


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    main(["recurrent", *sys.argv[1:]])
