"""Symmetry of policies with memory: what appending each mirrored trajectory by hand would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from test_recurrent_training import scalars_and_gradients, short_episodes, spoilt, torchrl_networks
from test_symmetry import BOTH, PENDULUM, mirrored
from torch import Tensor
from torchrl.modules import set_recurrent_mode

from torchrl_rslstorage import (
    ActorCritic,
    GaussianActor,
    Mirror,
    MLPActor,
    MLPCritic,
    RNNActor,
    RNNCritic,
    RolloutBuffer,
    RolloutCollector,
    RolloutGAE,
    RSLPPOLoss,
    RSLPPOTrainer,
    Symmetry,
    TrajectorySampler,
)

RECURRENT = pytest.mark.parametrize(
    "kind", ["lstm", "gru", "feed-forward critic", "feed-forward actor", "torchrl"]
)


def in_the_middle(kind: str, **options: Any) -> tuple[Any, Any, RolloutBuffer]:
    """A window that begins in the middle of episodes, with the networks moved since."""
    env = short_episodes()
    if kind == "torchrl":
        actor, critic, _ = torchrl_networks("lstm")
    else:
        torch.manual_seed(0)
        memory = {"rnn_type": "gru" if kind == "gru" else "lstm", "rnn_hidden_dim": 8, "hidden_dims": (16,)}
        feed_forward = {"hidden_dims": (16,)}
        actor: Any = (
            MLPActor.for_env(env, **feed_forward)
            if kind == "feed-forward actor"
            else RNNActor.for_env(env, **memory, **options)
        )
        critic = (
            MLPCritic.for_env(env, **feed_forward)
            if kind == "feed-forward critic"
            else RNNCritic.for_env(env, **memory)
        )
    buffer = RolloutBuffer(10, 6, sampler=TrajectorySampler(2))
    collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=buffer)
    collector.rollout()
    buffer.empty()
    collector.rollout()
    RolloutGAE(value_network=critic, normalize=True)(buffer)
    with torch.no_grad():
        for p in (*actor.parameters(), *critic.parameters()):
            p += 0.1 * torch.randn_like(p)
    return actor, critic, buffer


def state_keys(batch: TensorDictBase) -> list[Any]:
    flat = [key for key in batch.keys(True, True) if batch[key].ndim == 4]
    return [key for key in flat if key != "mask"]


def states_mirrored(batch: TensorDictBase) -> dict[Any, Mirror]:
    """A mirror of the hidden units that nobody would have in earnest."""
    return {key: Mirror(range(7, -1, -1), [1, -1] * 4) for key in state_keys(batch)}


@RECURRENT
@pytest.mark.parametrize("with_states", [False, True])
def test_the_loss_of_trajectories_is_that_with_their_copies_appended(kind, with_states):
    actor, critic, buffer = in_the_middle(kind)
    tables = [PENDULUM, {"observation": Mirror([2, 0, 1]), "action": Mirror([0])}]
    for batch in buffer:
        assert not batch["is_init"][0].all(), "some trajectories go on from the window before"
        assert any(batch[key][0].any() for key in state_keys(batch))
        states = [states_mirrored(batch)] * 2 if with_states else None
        symmetry = Symmetry(tables, **BOTH, states=states)
        terms, gradients = scalars_and_gradients(RSLPPOLoss(actor, critic, symmetry=symmetry), batch)

        appended = [batch.clone()]
        for table in tables:
            copy = mirrored(batch, table)
            for key, mirror in states_mirrored(batch).items():
                copy[key] = mirror(batch[key]) if with_states else torch.zeros_like(batch[key])
            appended.append(copy)
        plain = RSLPPOLoss(actor, critic, entropy_coeff=0.0)
        expected = plain(torch.cat(appended, 1))
        for key in ("loss_objective", "loss_critic"):
            torch.testing.assert_close(terms[key], expected[key], rtol=1e-5, atol=1e-6)

        alone = plain(batch)
        for key in ("kl", "entropy", "clip_fraction", "explained_variance"):
            assert torch.equal(terms[key], alone[key]), f"{key} is of the original alone"

        error = mirror_error_by_trajectories(actor, appended, tables)
        torch.testing.assert_close(terms["symmetry"], error.detach(), rtol=1e-5, atol=1e-7)
        entropy = RSLPPOLoss(actor, critic)(batch)["loss_entropy"]
        total = expected["loss_objective"] + expected["loss_critic"] + entropy + 0.5 * error
        theirs = torch.autograd.grad(total, [*actor.parameters(), *critic.parameters()])
        for a, b in zip(gradients, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def mirror_error_by_trajectories(
    actor: Any, batches: list[TensorDictBase], tables: list[dict[str, Mirror]]
) -> Tensor:
    """The mirror loss, each trajectory evaluated alone, at its own length."""
    squares: list[Tensor] = []
    for b, length in enumerate(batches[0]["mask"].sum(0).tolist()):
        original, *copies = (mean_of_policy(actor, td[:length, b : b + 1].clone()) for td in batches)
        for mean, table in zip(copies, tables, strict=True):
            squares.append((mean - table["action"](original.detach())).square().flatten())
    return torch.cat(squares).mean()


def mean_of_policy(actor: Any, trajectory: TensorDictBase) -> Tensor:
    """Of one trajectory ``[L, 1]`` without padding."""
    if isinstance(actor, GaussianActor):
        return actor.get_dist(trajectory).loc.squeeze(1)
    with set_recurrent_mode(True):
        return actor.get_dist(trajectory.transpose(0, 1)).mean.squeeze(0)


@RECURRENT
@pytest.mark.parametrize("filling", [1e3, float("nan")])
@pytest.mark.parametrize("keep_plan", [True, False])
def test_padding_reaches_no_scalar_and_no_gradient_of_symmetry(kind, filling, keep_plan):
    actor, critic, buffer = in_the_middle(kind)

    def augment(td: TensorDictBase) -> TensorDictBase:
        assert all(bool(value.isfinite().all()) for value in td.values()), "a function sees no padding"
        return torch.cat([td, mirrored(td, {key: PENDULUM[key] for key in td.keys()})])

    for clean in buffer:
        assert not clean["mask"].all(), "a mini-batch without padding proves nothing"
        dirty = spoilt(clean, filling)
        if keep_plan:
            dirty.set("mask", clean["mask"])
        for how in (PENDULUM, augment):
            symmetry = Symmetry(how, **BOTH, states=states_mirrored(clean))
            loss = RSLPPOLoss(actor, critic, normalize_advantage=True, symmetry=symmetry)
            terms, gradients = scalars_and_gradients(loss, clean)
            their_terms, their_gradients = scalars_and_gradients(loss, dirty)
            for key, value in terms.items():
                torch.testing.assert_close(their_terms[key], value, rtol=1e-5, atol=1e-6)
            for a, b in zip(gradients, their_gradients, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@RECURRENT
def test_an_identity_of_states_too_changes_nothing_in_trajectories(kind):
    actor, critic, buffer = in_the_middle(kind)
    same = {"observation": Mirror.identity(3), "action": Mirror.identity(1)}
    for batch in buffer:
        states = {key: Mirror.identity(8) for key in state_keys(batch)}
        plain = RSLPPOLoss(actor, critic)(batch)
        terms = RSLPPOLoss(actor, critic, symmetry=Symmetry(same, **BOTH, states=states))(batch)
        assert terms["symmetry"] == 0
        for key, value in plain.items():
            torch.testing.assert_close(terms[key], value, rtol=1e-6, atol=1e-8)


def odd_lstm(actor: RNNActor) -> RNNActor:
    """Gates that are constant, cells that read what changes its sign, no biases: states change theirs."""
    with torch.no_grad():
        H = 8
        for name, p in actor.core.rnn.named_parameters():
            if "bias" in name:
                p.zero_()
                continue
            cells = p[2 * H : 3 * H].clone()
            p.zero_()
            p[2 * H : 3 * H] = cells
        actor.core.rnn.weight_ih_l0[:, 0] = 0
        for name, p in actor.mlp.named_parameters():
            if "bias" in name:
                p.zero_()
    return actor


def test_a_symmetric_policy_with_memory_has_a_mirror_loss_of_exactly_zero_if_its_states_are_mirrored():
    actor, critic, buffer = in_the_middle("lstm", activation="tanh")
    odd_lstm(actor)
    negative = {key: Mirror(range(8), [-1] * 8) for key in actor.state_keys}
    only = {"use_mirror_loss": True, "mirror_loss_coeff": 1.0}
    exact = RSLPPOLoss(actor, critic, symmetry=Symmetry(PENDULUM, **only, states=negative))
    from_zero = RSLPPOLoss(actor, critic, symmetry=Symmetry(PENDULUM, **only))
    for batch in buffer:
        assert exact(batch)["symmetry"] == 0
        assert from_zero(batch)["symmetry"] > 0, "a window begins in the middle of an episode"
        # Without the trajectories that go on from before, zeros are right.
        fresh = batch.clone().unlock_()
        fresh["mask"] &= batch["is_init"][0].squeeze(-1)
        assert from_zero(fresh)["symmetry"] == 0


def test_states_without_a_mirror_and_of_another_number_of_copies_are_refused():
    actor, critic, buffer = in_the_middle("gru")
    one = {("actor_state", "h"): Mirror.identity(8)}
    with pytest.raises(ValueError, match=r"no mirror for \('critic_state', 'h'\).*add it to `states`"):
        RSLPPOLoss(actor, critic, symmetry=Symmetry(PENDULUM, **BOTH, states=one))
    both = {**one, ("critic_state", "h"): Mirror.identity(8)}
    loss = RSLPPOLoss(actor, critic, symmetry=Symmetry(PENDULUM, **BOTH, states=[both, both]))
    with pytest.raises(ValueError, match="`states` makes 2 mirrored copies but `augment` 1"):
        loss(next(iter(buffer)))


@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
def test_recurrent_policies_train_with_symmetry(rnn_type):
    env = short_episodes()
    memory = {"rnn_type": rnn_type, "rnn_hidden_dim": 8, "hidden_dims": (16,)}
    torch.manual_seed(0)
    actor, critic = RNNActor.for_env(env, **memory), RNNCritic.for_env(env, **memory)
    collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=RolloutBuffer(10, 6))
    symmetry = Symmetry(PENDULUM, **BOTH)
    trainer = RSLPPOTrainer(collector, actor, critic, total_frames=120, progress_bar=False, symmetry=symmetry)
    trainer.train()
    assert trainer.metrics["Loss/symmetry"] > 0
