"""Recurrent actor and critic: RSL-RL's numbers while stepping, and the same numbers from a padded batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from rsl_rl.models import RNNModel
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs import Compose, InitTracker, TransformedEnv

from torchrl_rslstorage import PendulumEnv, RNNActor, RNNCritic, pad, plan_trajectories
from torchrl_rslstorage.data.trajectory_layouts import attach_plan, layout_of

T, N, F, A, H = 6, 4, 5, 2, 8
KINDS = pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
LAYERS = pytest.mark.parametrize("num_layers", [1, 2])


def make_actor(rnn_type: str = "lstm", num_layers: int = 1, **options) -> RNNActor:
    torch.manual_seed(0)
    return RNNActor(
        ["observation"], F, A, rnn_type=rnn_type, rnn_hidden_dim=H, rnn_num_layers=num_layers,
        hidden_dims=(16,), **options,
    )  # fmt: skip


def make_window(seed: int = 0, p_done: float = 0.3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    done = torch.rand(T, N, 1, generator=rng) < p_done
    return torch.randn(T, N, F, generator=rng), done


def step_through(actor: RNNActor, observations: Tensor, done: Tensor, state: dict | None = None) -> list:
    """The rows that a collector would write, one environment step at a time."""
    rows = []
    is_init = torch.full((N, 1), state is None)
    carried = state or {}
    for t in range(len(observations)):
        td = TensorDict({"observation": observations[t], "is_init": is_init, **carried}, [N])
        with torch.no_grad():
            rows.append(actor(td))
        is_init = done[t]
        carried = {"actor_state": rows[-1]["next", "actor_state"]}
    return rows


def padded_batch(rows: list, observations: Tensor, done: Tensor) -> TensorDict:
    plan = plan_trajectories(done)
    window = torch.stack(rows)
    keys = [("observation",), ("is_init",), *(("actor_state", n) for n in rows[0]["actor_state"].keys())]
    batch = TensorDict({}, plan.mask.shape)
    for key in keys:
        batch[key] = pad(window[key], plan)
    attach_plan(plan.mask, plan)
    return batch.set("mask", plan.mask)


@KINDS
@LAYERS
def test_stepping_gives_rsl_rls_means_and_states_through_resets(rnn_type: str, num_layers: int) -> None:
    observations, done = make_window()
    example = TensorDict({"observation": observations[0]}, [N])
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    theirs = RNNModel(
        example, {"actor": ["observation"]}, "actor", A, hidden_dims=[16], distribution_cfg=gaussian,
        rnn_type=rnn_type, rnn_hidden_dim=H, rnn_num_layers=num_layers, obs_normalization=True,
    )  # fmt: skip
    theirs.obs_normalizer.update(3 * observations.flatten(0, 1) + 1)
    actor = make_actor(rnn_type, num_layers, normalize_observations=True)
    actor.normalizer.update(3 * observations.flatten(0, 1) + 1)
    actor.core.rnn.load_state_dict(theirs.rnn.rnn.state_dict())
    for ours, their in zip(actor.mlp.parameters(), theirs.mlp.parameters(), strict=True):
        ours.data.copy_(their)

    rows = step_through(actor, observations, done)
    for t, row in enumerate(rows):
        before = theirs.get_hidden_state()
        mean = theirs(TensorDict({"observation": observations[t]}, [N]))
        assert torch.allclose(row["loc"], mean, atol=1e-6)
        if before is not None:
            before = before if isinstance(before, tuple) else (before,)
            for name, state in zip(["h", "c"], before, strict=False):
                assert torch.allclose(row["actor_state", name], state.transpose(0, 1), atol=1e-6)
        theirs.reset(done[t].view(-1))


@KINDS
@LAYERS
@pytest.mark.parametrize("p_done", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("with_plan", [True, False])
def test_a_padded_batch_gives_what_stepping_gave(
    rnn_type: str, num_layers: int, p_done: float, with_plan: bool
) -> None:
    actor = make_actor(rnn_type, num_layers)
    observations, done = make_window(p_done=p_done)
    earlier = step_through(actor, *make_window(seed=1, p_done=0.2))  # states are not zero at the start
    state = {"actor_state": earlier[-1]["next", "actor_state"]}
    rows = step_through(actor, observations, done, state)
    batch = padded_batch(rows, observations, done)
    if not with_plan:
        batch["mask"] = batch["mask"].clone()
    layout = layout_of(batch["mask"])
    expected = layout.take(pad(torch.stack([row["loc"] for row in rows]), plan_trajectories(done)))
    assert torch.allclose(actor.valid_dist(batch).loc, expected, atol=1e-6)
    everywhere = actor.get_dist(batch)
    assert everywhere.batch_shape == batch.batch_size
    assert torch.allclose(everywhere.loc[batch["mask"]], actor.get_dist(batch).loc[batch["mask"]])


def test_gradients_stop_where_an_episode_ends() -> None:
    actor = make_actor()
    observations, done = make_window(p_done=0.0)
    done[2, 0] = True
    rows = step_through(actor, observations, done)
    batch = padded_batch(rows, observations, done)
    batch["observation"].requires_grad_()
    loc = layout_of(batch["mask"]).put(actor.valid_dist(batch).loc)
    loc[2, 1].sum().backward()  # environment 0, t = 5: the third step of its second trajectory
    touched = batch["observation"].grad.ne(0).any(-1)
    assert touched[:3, 1].all()
    assert not touched[:, [0, 2, 3, 4]].any()


def test_the_module_keeps_no_state() -> None:
    torch.manual_seed(0)
    critic = RNNCritic(["observation"], F, rnn_hidden_dim=H, hidden_dims=(16,))
    td = TensorDict({"observation": torch.randn(N, F), "is_init": torch.zeros(N, 1).bool()}, [N])
    first = critic(td.copy())
    critic(TensorDict({"observation": torch.randn(N, F), "is_init": torch.ones(N, 1).bool()}, [N]))
    assert torch.equal(critic(td.copy())["state_value"], first["state_value"])
    assert torch.equal(critic.evaluate(td), first["state_value"])


def test_states_stand_under_any_key() -> None:
    actor = make_actor("gru", state_key=("memory", "policy"), is_init_key=("collector", "first"))
    td = TensorDict({"observation": torch.zeros(N, F)}, [N])
    td["collector", "first"] = torch.ones(N, 1).bool()
    actor(td)
    assert td["memory", "policy", "h"].shape == td["next", "memory", "policy", "h"].shape == (N, 1, H)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda td: td.exclude("is_init"), KeyError, "Append torchrl.envs.InitTracker"),
        (lambda td: td.set("actor_state", {"h": torch.zeros(N, 1, 3), "c": torch.zeros(N, 1, H)}),
         ValueError, r"\('actor_state', 'h'\) has shape \(4, 1, 3\).*expects \(4, 1, 8\)"),
        (lambda td: td.exclude("observation"), KeyError, "reads 'observation', which is not there"),
        (lambda td: td.unsqueeze(0), ValueError, "without one"),
    ],
)  # fmt: skip
def test_what_is_missing_or_misshapen_is_named(change, error, message) -> None:
    td = TensorDict({"observation": torch.zeros(N, F), "is_init": torch.ones(N, 1).bool()}, [N])
    with pytest.raises(error, match=message):
        make_actor()(change(td))


def test_a_padded_batch_without_starting_states_is_refused() -> None:
    mask = torch.ones(3, 2, dtype=torch.bool)
    batch = TensorDict({"observation": torch.zeros(3, 2, F), "mask": mask}, [3, 2])
    with pytest.raises(KeyError, match=r"the state with which trajectories start.*TrajectorySampler"):
        make_actor().valid_dist(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rnn_type": "rnn"}, "`rnn_type` must be one of"),
        ({"num_layers": 0}, "`rnn_num_layers` must be at least 1"),
        ({"init_std": 0.0}, "`init_std` must be positive"),
    ],
)
def test_what_makes_no_network_is_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_actor(**options)


def test_a_state_that_was_not_carried_on_is_noticed() -> None:
    env = TransformedEnv(PendulumEnv(N, seed=0), InitTracker())
    actor = RNNActor.for_env(env, rnn_hidden_dim=H, hidden_dims=(16,))
    with pytest.raises(RuntimeError, match=r"Append network\.make_tensordict_primer"):
        env.rollout(3, actor)
    env = TransformedEnv(PendulumEnv(N, seed=0), Compose(InitTracker(), actor.make_tensordict_primer()))
    rows = env.rollout(3, actor, auto_cast_to_device=True).unbind(1)
    for row, following in pairwise(rows):
        assert torch.equal(following["actor_state", "h"], row["next", "actor_state", "h"])
        assert following["actor_state", "c"].abs().sum() > 0


def test_one_row_may_be_evaluated_twice() -> None:
    actor = make_actor()
    td = TensorDict({"observation": torch.zeros(N, F), "is_init": torch.ones(N, 1).bool()}, [N])
    first = actor(td)["loc"].clone()
    assert torch.equal(actor(td)["loc"], first)
