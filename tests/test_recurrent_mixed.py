"""Recurrent policies in other company: other environments, other modules, entries with unfortunate names."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from test_recurrent_training import filled, short_episodes, small_networks, torchrl_networks
from torch import nn
from torchrl.envs import InitTracker, ParallelEnv, RewardScaling, SerialEnv, TransformedEnv
from torchrl.envs.libs.gym import GymEnv
from torchrl.modules import MaskedCategorical, ProbabilisticActor, ValueOperator

from torchrl_rslstorage import (
    ActorCritic,
    MLPActor,
    MLPCritic,
    PendulumEnv,
    RNNActor,
    RNNCritic,
    RolloutBuffer,
    RolloutCollector,
    RolloutGAE,
    RSLPPOLoss,
    RSLPPOTrainer,
    TrajectorySampler,
)


def check_states(buffer: RolloutBuffer, actor: RNNActor) -> None:
    """Every row's state is what the policy makes of the rows before it, from zero after ``done``."""
    window = buffer.window
    state = torch.zeros_like(window["actor_state", "h"][0])
    cell = torch.zeros_like(state)
    for t in range(buffer.num_steps):
        assert torch.allclose(window["actor_state", "h"][t], state, atol=1e-6)
        td = TensorDict(
            {"observation": window["observation"][t], "is_init": window["is_init"][t]}, state.shape[:1]
        )
        td["actor_state"] = {"h": state, "c": cell}
        with torch.no_grad():
            actor(td)
        assert torch.allclose(td["loc"], window["loc"][t], atol=1e-6)
        done = window["next", "done"][t].unsqueeze(-1)
        state, cell = (td["next", "actor_state", name].masked_fill(done, 0) for name in ("h", "c"))


def batched(kind: str) -> Any:
    if kind == "lean":
        return short_episodes(3)
    if kind == "transformed":
        return TransformedEnv(short_episodes(3), RewardScaling(0.0, 0.5))
    make = partial(GymEnv, "Pendulum-v1", frame_skip=50)  # four steps an episode
    return SerialEnv(3, make) if kind == "serial" else ParallelEnv(3, make)


@pytest.mark.parametrize("kind", ["lean", "transformed", "serial", "parallel"])
def test_states_are_carried_and_reset_in_every_kind_of_environment(kind: str) -> None:
    env = batched(kind)
    try:
        actor, critic = small_networks(env)
        buffer = RolloutBuffer(10, 3)
        collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer)
        collector.rollout()
        assert buffer.window["next", "done"][:-1].any()
        check_states(buffer, actor)
    finally:
        env.close()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_torchrls_modules_need_no_primer_in_our_collector(kind: str) -> None:
    actor, critic, _ = torchrl_networks(kind)
    buffer = RolloutBuffer(10, 6, sampler=TrajectorySampler(2))
    policy = TensorDictSequential(actor, critic)
    RolloutCollector(short_episodes(), policy, replay_buffer=buffer).rollout()
    RolloutGAE(value_network=critic)(buffer)
    for batch in buffer:
        assert RSLPPOLoss(actor, critic)(batch)["kl"].abs() < 1e-5


def test_a_critic_whose_state_is_not_carried_is_noticed_beside_an_actor_whose_is() -> None:
    actor, critic = small_networks(short_episodes())
    env = TransformedEnv(short_episodes(), InitTracker())
    env.append_transform(actor.make_tensordict_primer())
    with pytest.raises(RuntimeError, match="RNNCritic got the state of the step before once more"):
        env.rollout(3, ActorCritic(actor, critic))


def test_shared_state_keys_are_refused() -> None:
    actor = RNNActor(["observation"], 3, 1, state_key="memory")
    critic = RNNCritic(["observation"], 3, state_key="memory")
    for make in (ActorCritic, RSLPPOLoss):
        with pytest.raises(ValueError, match="both keep their state under"):
            make(actor, critic)


@pytest.mark.parametrize("state_key", ["next", ("next", "memory"), "is_init"])
def test_state_keys_that_are_taken_are_refused(state_key: Any) -> None:
    with pytest.raises(ValueError, match=r"`state_key` .* is taken"):
        RNNActor(["observation"], 3, 1, state_key=state_key)


def test_other_entries_under_next_are_stored_as_ever() -> None:
    actor, critic = small_networks(short_episodes())

    def with_notes(td: Any) -> Any:
        td["next", "note"] = torch.ones(*td.batch_size, 1)
        return td

    class Policy(ActorCritic):
        def forward(self, tensordict: Any) -> Any:
            return with_notes(super().forward(tensordict))

    buffer = RolloutBuffer(10, 6)
    RolloutCollector(short_episodes(), Policy(actor, critic), replay_buffer=buffer).rollout()
    assert buffer.window["next", "note"].eq(1).all()


def test_an_action_mask_is_no_padding() -> None:
    logits = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(logits), in_keys=["logits", "mask"], distribution_class=MaskedCategorical,
        return_log_prob=True,
    )  # fmt: skip
    critic = ValueOperator(nn.Linear(3, 1), ["observation"])
    batch = TensorDict({"observation": torch.randn(5, 3), "mask": torch.ones(5, 4).bool()}, [5])
    with torch.no_grad():
        critic(actor(batch))
    batch["advantage"] = batch["value_target"] = torch.randn(5, 1)
    assert RSLPPOLoss(actor, critic)(batch)["kl"].abs() < 1e-6
    flat = critic(MLPActor(["observation"], 3, 2)(batch.select("observation"))).detach()
    flat["mask"], flat["advantage"], flat["value_target"] = torch.ones(5).bool(), *torch.randn(2, 5, 1)
    loss = RSLPPOLoss(MLPActor(["observation"], 3, 2), MLPCritic(["observation"], 3))
    assert loss(flat)["loss_critic"] > 0


def test_an_entry_that_is_called_mask_is_not_written_over() -> None:
    _, _, buffer = filled()
    buffer.window["mask"] = torch.ones(10, 6, 2)
    buffer.set_sampler(TrajectorySampler(2))
    with pytest.raises(ValueError, match="an entry 'mask'"):
        next(iter(buffer))
    buffer.set_sampler(TrajectorySampler(2, keys=["observation"]))
    assert next(iter(buffer))["mask"].dtype is torch.bool


def test_an_rnn_over_a_stacked_history_is_no_memory() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, history: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(history)[0][:, -1])

    critic = ValueOperator(Encoder(), ["history"])
    assert not RSLPPOLoss(MLPActor(["observation"], 3, 2), critic).is_recurrent


def test_our_networks_inside_of_a_sequence_are_refused() -> None:
    critic = TensorDictSequential(RNNCritic(["observation"], 3))
    with pytest.raises(TypeError, match="RNNCritic stands inside of a TensorDictSequential"):
        RSLPPOLoss(RNNActor(["observation"], 3, 1), critic)


def test_an_episode_started_from_outside_starts_a_trajectory() -> None:
    actor, critic = small_networks(short_episodes())
    for options in ({}, {"state_keys": [*actor.state_keys, *critic.state_keys]}):
        env = PendulumEnv(6, seed=0)  # no episode ends by itself
        buffer = RolloutBuffer(10, 6, sampler=TrajectorySampler(2), **options)
        collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer)
        carrier = collector._start()
        for t in range(10):
            if t == 4:
                carrier.set("is_init", torch.arange(6).view(6, 1) % 2 == 0)
            with torch.no_grad():
                carrier = collector.policy(carrier)
            collector._give_first_states(carrier)
            buffer.writer.write_root(carrier)
            carrier = collector._step_leaves(env, carrier)
        assert not buffer.window["next", "done"].any()
        RolloutGAE(value_network=critic)(buffer)
        for batch in buffer:
            assert not batch["is_init"][1:].any()
            assert RSLPPOLoss(actor, critic)(batch)["kl"].abs() < 1e-6


def test_states_are_declared_before_rows_and_alike_in_what_is_loaded() -> None:
    dense, sparse = RolloutBuffer(10, 6), RolloutBuffer(10, 6, state_keys=["actor_state", "critic_state"])
    for buffer in (dense, sparse):
        actor, critic = small_networks(short_episodes())
        RolloutCollector(short_episodes(), ActorCritic(actor, critic), replay_buffer=buffer).rollout()
    with pytest.raises(RuntimeError, match="cannot become states any more"):
        dense.storage.keep_only_starts(["actor_state"])
    with pytest.raises(ValueError, match="build it with the same state_keys"):
        RolloutBuffer(10, 6).load_state_dict(sparse.state_dict())
    with pytest.raises(ValueError, match="build it with the same state_keys"):
        RolloutBuffer(10, 6, state_keys=["actor_state"]).load_state_dict(dense.state_dict())


def test_asking_for_bytes_decides_nothing() -> None:
    buffer = RolloutBuffer(4, 3, state_keys=["memory"])

    def row(width: int) -> TensorDict:
        flags = {"reward": torch.zeros(3, 1), "done": torch.zeros(3, 1).bool()}
        return TensorDict({"x": torch.zeros(3, 2), "memory": torch.zeros(3, width), "next": flags}, [3])

    assert buffer.nbytes(row(8)) < buffer.nbytes(row(16))
    buffer.add(row(16))
    assert buffer.nbytes() == buffer.nbytes(row(16))


def test_an_example_row_leaves_states_as_columns_of_a_trainers_window() -> None:
    env = short_episodes()
    actor, critic = small_networks(env)
    policy = ActorCritic(actor, critic)
    td = env.reset().set("is_init", torch.ones(6, 1).bool())
    with torch.no_grad():
        row = env.step(policy(td))
    buffer = RolloutBuffer(10, 6, example=row)
    trainer = RSLPPOTrainer(
        RolloutCollector(env, policy, replay_buffer=buffer),
        actor,
        critic,
        total_frames=60,
        progress_bar=False,
    )
    trainer.train()
    assert trainer.num_iterations == 1
    assert ("actor_state", "h") in trainer.buffer.storage.columns.keys(True)


def test_a_recurrent_critic_that_does_not_collect_is_refused_by_the_trainer() -> None:
    env = short_episodes()
    actor, critic = small_networks(env)
    collector = RolloutCollector(env, actor, replay_buffer=RolloutBuffer(10, 6))
    with pytest.raises(ValueError, match=r"does not write .*critic_state"):
        RSLPPOTrainer(collector, actor, critic, total_frames=60)


def test_float64_networks_make_float64_primers() -> None:
    env = TransformedEnv(short_episodes(), InitTracker())
    actor = small_networks(short_episodes())[0].double()
    env.append_transform(actor.make_tensordict_primer())
    assert env.reset()["actor_state", "h"].dtype is torch.float64


@pytest.mark.parametrize(
    "flags", [torch.ones(4, 1), torch.ones(4, 2).bool(), torch.ones(4, 1, dtype=torch.uint8)]
)
def test_flags_that_are_none_are_named(flags: torch.Tensor) -> None:
    actor = RNNActor(["observation"], 3, 1)
    with pytest.raises(ValueError, match=r"'is_init' is .* expected bool \(4, 1\)"):
        actor(TensorDict({"observation": torch.zeros(4, 3), "is_init": flags}, [4]))
