"""RSL-RL's checkpoints, written and read by rsl-rl-lib itself: the same actions and the same next step."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rsl_rl.algorithms import PPO
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor
from torchrl.checkpoint import CheckpointError
from torchrl.envs import ExplorationType, set_exploration_type

from torchrl_rslstorage import (
    KLAdaptiveStepper,
    MLPActor,
    MLPCritic,
    RNNActor,
    RNNCritic,
    load_rsl_rl_checkpoint,
    save_rsl_rl_checkpoint,
)

N, A = 6, 3
WIDTHS = {"policy": 5, "privileged": 4}
GROUPS = {"actor": ["policy"], "critic": ["policy", "privileged"]}


class Kind(NamedTuple):
    """A pair of networks."""

    rnn_type: str | None = None
    std_type: str = "scalar"
    normalize: bool = False

    @property
    def shape(self) -> dict[str, Any]:
        rnn = {"rnn_type": self.rnn_type, "rnn_hidden_dim": 7, "rnn_num_layers": 2}
        return {"hidden_dims": [16, 8], "activation": "elu", **(rnn if self.rnn_type else {})}

    def ours(self, seed: int = 1, **changes: Any) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        shape = {**self.shape, "normalize_observations": self.normalize}
        actor_class, critic_class = (RNNActor, RNNCritic) if self.rnn_type else (MLPActor, MLPCritic)
        actor = actor_class(GROUPS["actor"], 5, A, **{**shape, "std_type": self.std_type, **changes})
        return actor, critic_class(GROUPS["critic"], 9, **shape)

    def config(self) -> dict[str, Any]:
        model = {"class_name": "RNNModel" if self.rnn_type else "MLPModel", **self.shape}
        model["obs_normalization"] = self.normalize
        gaussian = {"class_name": "GaussianDistribution", "std_type": self.std_type}
        return {
            "num_steps_per_env": 4,
            "save_interval": 100,
            "obs_groups": {name: list(groups) for name, groups in GROUPS.items()},
            "actor": {**model, "distribution_cfg": gaussian},
            "critic": model,
            "algorithm": {"class_name": "PPO", "num_mini_batches": 2, "num_learning_epochs": 2},
        }


KINDS = [
    Kind(rnn_type, std_type, normalize)
    for rnn_type in (None, "gru", "lstm")
    for std_type in ("scalar", "log")
    for normalize in (False, True)
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
PLAIN, ALL = Kind(), Kind("lstm", "log", True)
some_kinds = pytest.mark.parametrize("kind", [PLAIN, Kind(normalize=True), Kind("gru"), ALL], ids=str)


def observe(*, num_envs: int = N) -> TensorDict:
    return TensorDict({k: 2 * torch.randn(num_envs, w) + 1 for k, w in WIDTHS.items()}, [num_envs])


class World:
    """An RSL-RL ``VecEnv`` of random observations and rewards."""

    num_envs, num_actions, max_episode_length, device, cfg = N, A, 10, "cpu", {}

    def __init__(self) -> None:
        self.episode_length_buf = torch.zeros(N, dtype=torch.long)

    def get_observations(self) -> TensorDict:
        return observe()

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict]:
        return observe(), torch.randn(N), (torch.rand(N) < 0.2).long(), {}


@contextlib.contextmanager
def silence():
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def runner(kind: Kind, seed: int = 0) -> OnPolicyRunner:
    torch.manual_seed(seed)
    with silence():
        return OnPolicyRunner(World(), kind.config(), log_dir=None, device="cpu")


def trained(kind: Kind, path: Path) -> OnPolicyRunner:
    """A runner after two iterations, and its checkpoint."""
    made = runner(kind)
    with silence():
        made.learn(2)
        made.logger.save_model = lambda *args: None  # without a log folder it has no writer to tell
        made.save(str(path), infos={"note": "theirs"})
    return made


def our_actions(actor: Any, critic: Any, steps: int = 5) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Mean, std and value over some steps, in which environment 0 starts anew."""
    torch.manual_seed(5)
    carrier: dict[Any, Tensor] = {}
    out = []
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        for t in range(steps):
            td = observe()
            flags = torch.zeros(N, 1, dtype=torch.bool)
            flags[0] = t == 2
            td["is_init"] = flags if t else torch.ones_like(flags)
            td.update({key[1:]: value for key, value in carrier.items()})
            critic(actor(td))
            keys = [k for network in (actor, critic) for k in network.out_keys if k[0] == "next"]
            carrier = {key: td[key] for key in keys}
            out.append((td["action"], td["scale"][0], td["state_value"]))
    return out


def their_actions(ppo: PPO, steps: int = 5) -> list[tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(5)
    ppo.actor.reset()
    ppo.critic.reset()
    out = []
    with torch.no_grad():
        for t in range(steps):
            td = observe()
            if t == 2:
                dones = torch.zeros(N)
                dones[0] = 1
                ppo.actor.reset(dones)
                ppo.critic.reset(dones)
            actions = ppo.actor(td)
            distribution = ppo.actor.distribution
            distribution.update(actions)
            out.append((actions, ppo.actor.output_std[0], ppo.critic(td)))
    return out


def assert_the_same(left: list[tuple[Tensor, ...]], right: list[tuple[Tensor, ...]]) -> None:
    for ours, theirs in zip(left, right, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


# -- actions -------------------------------------------------------------------------------------


@every_kind
def test_what_rsl_rl_has_trained_acts_here_bit_for_bit_and_goes_back(kind, tmp_path):
    theirs = trained(kind, tmp_path / "model_2.pt")
    actor, critic = kind.ours()
    stepper = KLAdaptiveStepper(actor, critic)
    found = load_rsl_rl_checkpoint(tmp_path / "model_2.pt", actor, critic, stepper)
    assert (found.iteration, found.infos, found.left_out) == (1, {"note": "theirs"}, ())
    assert_the_same(our_actions(actor, critic), their_actions(theirs.alg))
    assert float(stepper.learning_rate) == theirs.alg.learning_rate

    back = tmp_path / "back.pt"
    save_rsl_rl_checkpoint(back, actor, critic, stepper, iteration=1, infos={"note": "theirs"})
    there, here = torch.load(tmp_path / "model_2.pt"), torch.load(back)
    assert list(there) == list(here)
    for entry in ("actor_state_dict", "critic_state_dict"):
        assert there[entry].keys() == here[entry].keys()
        for name, tensor in there[entry].items():
            assert torch.equal(tensor, here[entry][name]) and tensor.dtype == here[entry][name].dtype
    moments, ours = there["optimizer_state_dict"]["state"], here["optimizer_state_dict"]["state"]
    assert moments.keys() == ours.keys()
    for number, state in moments.items():
        assert all(torch.equal(value, ours[number][name]) for name, value in state.items())
    groups = [file["optimizer_state_dict"]["param_groups"] for file in (there, here)]
    assert groups[0] == groups[1]


@every_kind
def test_what_was_trained_here_acts_in_rsl_rls_runner_bit_for_bit_and_comes_back(kind, tmp_path):
    actor, critic = kind.ours(seed=3)
    for network in (actor, critic):
        network.update_normalizer(TensorDict({k: torch.randn(8, 2, w) for k, w in WIDTHS.items()}, [8, 2]))
    with torch.no_grad():
        actor.std_param.add_(torch.rand(A))
    stepper = KLAdaptiveStepper(actor, critic, learning_rate=3e-4)
    take_a_step(ours=stepper, seed=0)
    save_rsl_rl_checkpoint(tmp_path / "model_9.pt", actor, critic, stepper, iteration=9, infos={"a": 1})
    there = runner(kind)
    assert there.load(str(tmp_path / "model_9.pt")) == {"a": 1}
    assert there.current_learning_iteration == 9 and there.alg.learning_rate == 3e-4
    assert_the_same(our_actions(actor, critic), their_actions(there.alg))
    other_actor, other_critic = kind.ours(seed=4)
    load_rsl_rl_checkpoint(tmp_path / "model_9.pt", other_actor, other_critic)
    assert_the_same(our_actions(actor, critic), our_actions(other_actor, other_critic))


# -- the optimiser -------------------------------------------------------------------------------


def take_a_step(ours: KLAdaptiveStepper | None = None, theirs: PPO | None = None, seed: int = 0) -> None:
    """One step of Adam on gradients drawn from the seed, parameter by parameter in RSL-RL's order."""
    torch.manual_seed(seed)
    if ours is not None:
        ours.optimizer.zero_grad()
        for p in ours.optimizer.parameters:
            p.grad.copy_(torch.randn(p.shape))
        ours.optimizer.step()
    if theirs is not None:
        for p in [*theirs.actor.parameters(), *theirs.critic.parameters()]:
            p.grad = torch.randn(p.shape)
        theirs.optimizer.step()


@some_kinds
@pytest.mark.parametrize("direction", ["to ours", "to theirs"])
def test_the_next_step_of_the_optimiser_is_the_one_that_the_other_side_takes(kind, direction, tmp_path):
    theirs = trained(kind, tmp_path / "model.pt")
    actor, critic = kind.ours()
    stepper = KLAdaptiveStepper(actor, critic)
    load_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic, stepper)
    if direction == "to theirs":
        take_a_step(ours=stepper, seed=1)
        save_rsl_rl_checkpoint(tmp_path / "ours.pt", actor, critic, stepper)
        theirs = runner(kind, seed=8)
        theirs.load(str(tmp_path / "ours.pt"))
    before = [p.detach().clone() for p in actor.parameters()]
    take_a_step(ours=stepper, seed=2)
    take_a_step(theirs=theirs.alg, seed=2)
    mine = [*actor.parameters(), *critic.parameters()]
    others = [*theirs.alg.actor.parameters(), *theirs.alg.critic.parameters()]
    for a, b in zip(mine, others, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-7)
    assert max(float((a - b).detach().abs().max()) for a, b in zip(before, mine, strict=False)) > 1e-5


def test_a_checkpoint_without_a_stepper_starts_adam_anew(tmp_path):
    actor, critic = PLAIN.ours()
    save_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic)
    there = runner(PLAIN)
    there.load(str(tmp_path / "model.pt"))
    assert not there.alg.optimizer.state and there.alg.learning_rate == 1e-3
    with silence():
        there.learn(1)
    stepper = KLAdaptiveStepper(actor, critic)
    take_a_step(ours=stepper)
    load_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic, stepper)
    assert not stepper.optimizer._mean.any() and float(stepper.optimizer._steps) == 0


def test_rsl_rl_goes_on_learning_from_what_was_trained_here(tmp_path):
    actor, critic = ALL.ours()
    stepper = KLAdaptiveStepper(actor, critic)
    take_a_step(ours=stepper)
    save_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic, stepper, iteration=5)
    there = runner(ALL)
    there.load(str(tmp_path / "model.pt"))
    with silence():
        there.learn(2)
    assert there.current_learning_iteration == 6


# -- older layouts -------------------------------------------------------------------------------


def older(file: dict[str, Any], kind: Kind, version: str) -> dict[str, Any]:
    """The checkpoint as an older version of RSL-RL would have written it."""
    actor, critic = dict(file["actor_state_dict"]), dict(file["critic_state_dict"])
    std = actor.pop("distribution.std_param" if kind.std_type == "scalar" else "distribution.log_std_param")
    name = "std" if kind.std_type == "scalar" else "log_std"
    optimizer = file["optimizer_state_dict"]
    if version == "4":
        return {**file, "actor_state_dict": {name: std, **actor}}
    model, order = {name: std}, ["actor distribution.std"]
    for role, state, memory in (("actor", actor, "memory_a"), ("critic", critic, "memory_c")):
        groups = {
            "rnn.rnn.": f"{memory}.rnn.",
            "mlp.": f"{role}.",
            "obs_normalizer.": f"{role}_obs_normalizer.",
        }
        # Version 3 makes the RNN before the MLP, and numbers parameters accordingly.
        for theirs, then in groups.items():
            for key, tensor in state.items():
                if key.startswith(theirs):
                    model[then + key[len(theirs) :]] = tensor
                    order += [f"{role} {key}"] if theirs != "obs_normalizer." else []
    now = [f"actor {k}" for k in ("distribution.std", *actor)] + [f"critic {k}" for k in critic]
    now = [k for k in now if "obs_normalizer" not in k]
    state = {i: optimizer["state"][now.index(name)] for i, name in enumerate(order)}
    out = {"model_state_dict": model, "iter": file["iter"], "infos": file["infos"]}
    out["optimizer_state_dict"] = {**optimizer, "state": state}
    if version != "3":
        for role, entry in (("actor", "obs_norm_state_dict"), ("critic", version)):
            inside = f"{role}_obs_normalizer."
            moved = {k[len(inside) :]: model.pop(k) for k in list(model) if k.startswith(inside)}
            out |= {entry: moved} if moved else {}
    return out


@every_kind
@pytest.mark.parametrize(
    "version", ["4", "3", "critic_obs_norm_state_dict", "privileged_obs_norm_state_dict"]
)
def test_older_layouts_hold_the_same_networks_and_moments(kind, version, tmp_path):
    theirs = trained(kind, tmp_path / "new.pt")
    torch.save(older(torch.load(tmp_path / "new.pt"), kind, version), tmp_path / "old.pt")
    actor, critic = kind.ours()
    stepper = KLAdaptiveStepper(actor, critic)
    assert load_rsl_rl_checkpoint(tmp_path / "old.pt", actor, critic, stepper).iteration == 1
    assert_the_same(our_actions(actor, critic), their_actions(theirs.alg))
    take_a_step(ours=stepper, seed=2)
    take_a_step(theirs=theirs.alg, seed=2)
    others = [*theirs.alg.actor.parameters(), *theirs.alg.critic.parameters()]
    for a, b in zip([*actor.parameters(), *critic.parameters()], others, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-7)


# -- what is refused -----------------------------------------------------------------------------


class Harm:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def as_plain_pickle(thing: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(thing))


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (torch.save, r"holds more than tensors .*mkdir.*nothing of it was loaded\."),
        (as_plain_pickle, "is broken, or no checkpoint at all"),
    ],
)
def test_a_checkpoint_that_would_run_code_is_refused_and_runs_none(write, said, tmp_path):
    file = tmp_path / "model.pt"
    actor, critic = PLAIN.ours()
    save_rsl_rl_checkpoint(file, actor, critic)
    write({**torch.load(file), "infos": Harm(tmp_path / "harm")}, file)
    before = [p.detach().clone() for p in actor.parameters()]
    with pytest.raises(CheckpointError, match=said) as caught:
        load_rsl_rl_checkpoint(file, actor, critic)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harm").exists()
    assert all(torch.equal(a, b) for a, b in zip(before, actor.parameters(), strict=True))
    torch.load(file, weights_only=False) if write is torch.save else pickle.loads(file.read_bytes())
    assert (tmp_path / "harm").exists(), "the checkpoint is harmless, which proves nothing"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is broken, or no checkpoint at all"),
        (b"PK\x03\x04 torn", "is broken, or no checkpoint at all"),
        ([1, 2], "holds list and no checkpoint"),
        ({"student_state_dict": {}, "iter": 1}, r"it holds \['iter', 'student_state_dict'\] and neither"),
        ({"model_state_dict": 3}, "is int and not a state dict"),
        ({"model_state_dict": {"actor.0.weight": 3}}, "'actor.0.weight' is int and not a tensor"),
        ({"model_state_dict": {"encoder.0.weight": torch.zeros(1)}}, "corresponds to 'encoder.0.weight'"),
        (
            {"actor_state_dict": {"cnns.a": torch.zeros(1)}, "critic_state_dict": {}},
            "corresponds to 'cnns.a' of its actor",
        ),
    ],
)
def test_what_is_no_checkpoint_of_ppo_is_refused(content, said, tmp_path):
    file = tmp_path / "model.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_rsl_rl_checkpoint(file, *PLAIN.ours())
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        load_rsl_rl_checkpoint(tmp_path / "model.pt", *PLAIN.ours())


@pytest.mark.parametrize(
    ("there", "changes", "said"),
    [
        (
            PLAIN,
            {"hidden_dims": [16, 9]},
            r"'mlp.2.weight' has shape \(8, 16\) but .* actor has \(9, 16\)",
        ),
        (
            PLAIN,
            {"hidden_dims": [16]},
            "the actor has no layer for its 'mlp.4",
        ),
        (PLAIN, {"hidden_dims": [16, 8, 8]}, "its actor has no layer for 'mlp.6"),
        (PLAIN, {"std_type": "log"}, "std is of type 'scalar' but the actor's is 'log'"),
        (
            PLAIN,
            {"normalize_observations": True},
            "its actor has not an observation normaliser",
        ),
        (
            Kind(normalize=True),
            {"normalize_observations": False},
            "its actor has an observation normaliser but",
        ),
        (
            Kind("gru"),
            {"rnn_type": "lstm"},
            r"'rnn.rnn.weight_ih_l0' .* \(21, 5\) but .* \(28, 5\)",
        ),
        (Kind("gru"), {"rnn_num_layers": 1}, "the actor has no layer for its 'rnn.rnn.weight_ih_l1'"),
    ],
)
def test_networks_of_another_shape_are_refused_with_the_layer_and_both_shapes(there, changes, said, tmp_path):
    trained(there, tmp_path / "model.pt")
    actor, critic = there.ours(**changes)
    before = [tensor.clone() for tensor in (*actor.state_dict().values(), *critic.state_dict().values())]
    with pytest.raises(CheckpointError, match=said) as caught:
        load_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic)
    assert "\n" not in str(caught.value)
    after = (*actor.state_dict().values(), *critic.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "a file goes in whole or not"


def test_a_network_without_memory_is_no_recurrent_one(tmp_path):
    trained(PLAIN, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="its actor has not an RNN: build the actor accordingly"):
        load_rsl_rl_checkpoint(tmp_path / "model.pt", *Kind("gru").ours())


def test_a_critic_that_does_not_fit_leaves_the_actor_alone(tmp_path):
    trained(PLAIN, tmp_path / "model.pt")
    actor, _ = PLAIN.ours()
    before = actor.mlp[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"'mlp.0.weight' .* \(16, 9\) but .* critic has \(16, 2\)"):
        load_rsl_rl_checkpoint(tmp_path / "model.pt", actor, MLPCritic(["policy"], 2, hidden_dims=[16, 8]))
    assert torch.equal(before, actor.mlp[0].weight)


@pytest.mark.parametrize("iteration", ["soon", None, torch.ones(2), -1, 1.5])
def test_an_iteration_that_is_none_is_refused_and_nothing_is_loaded(iteration, tmp_path):
    trained(PLAIN, tmp_path / "model.pt")
    torch.save({**torch.load(tmp_path / "model.pt"), "iter": iteration}, tmp_path / "model.pt")
    actor, critic = PLAIN.ours()
    before = actor.mlp[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"its 'iter' is .* and not the number of an iteration"):
        load_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic)
    assert torch.equal(before, actor.mlp[0].weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.long(),
        lambda x: x.to(torch.complex64),
        lambda x: x.to_sparse(),
        lambda x: x.to("meta"),
    ],
    ids=["whole numbers", "complex", "sparse", "without data"],
)
def test_a_tensor_that_cannot_become_a_weight_is_refused_and_nothing_is_loaded(change, tmp_path):
    trained(PLAIN, tmp_path / "model.pt")
    file = torch.load(tmp_path / "model.pt")
    file["critic_state_dict"]["mlp.2.bias"] = change(file["critic_state_dict"]["mlp.2.bias"])
    torch.save(file, tmp_path / "model.pt")
    actor, critic = PLAIN.ours()
    before = actor.mlp[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"its 'mlp.2.bias' is a tensor of .* holds float32"):
        load_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic)
    assert torch.equal(before, actor.mlp[0].weight)


def other_group(**changes: Any) -> Any:
    return lambda saved: {**saved, "param_groups": [{**saved["param_groups"][0], **changes}]}


def flat_moments(saved: dict[str, Any]) -> dict[str, Any]:
    state = {i: {k: v.flatten() for k, v in moments.items()} for i, moments in saved["state"].items()}
    return {**saved, "state": state}


def first_moments(change: Any) -> Any:
    return lambda saved: {**saved, "state": {**saved["state"], 0: change(saved["state"][0])}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda saved: None, "holds no optimiser"),
        (lambda saved: [], "is not that of an optimiser"),
        (other_group(params=[0]), "1 parameters in 1"),
        (other_group(weight_decay=0.01), "not Adam with torch's defaults .weight_decay is 0.01 and not 0."),
        (other_group(lr=None), "learning rate is None and not a positive number"),
        (other_group(lr=float("nan")), "learning rate is nan and not a positive number"),
        (other_group(params=None), "is not that of an optimiser"),
        (lambda saved: {**saved, "param_groups": "none"}, "is not that of an optimiser"),
        (lambda saved: {**saved, "state": [1]}, "is not that of an optimiser"),
        (first_moments(lambda m: 3), "moments of .* are not Adam's"),
        (first_moments(lambda m: {**m, "step": None}), "moments of .* are not Adam's"),
        (first_moments(lambda m: {**m, "step": torch.ones(2)}), "moments of .* are not Adam's"),
        (first_moments(lambda m: {**m, "exp_avg": None}), "moments of .* are not Adam's"),
        (first_moments(lambda m: {"step": 1, "exp_avg": m["exp_avg"]}), "moments of .* are not Adam's"),
        (first_moments(lambda m: {**m, "exp_avg_sq": torch.ones(7)}), r"have shape \(7,\) and not"),
        (first_moments(lambda m: {**m, "exp_avg_sq": m["exp_avg"].to("meta")}), "are not Adam's"),
        (flat_moments, r"moments of 'mlp.0.weight' have shape \(80,\) and not \(16, 5\)"),
    ],
)
def test_an_optimiser_that_does_not_fit_is_refused_and_nothing_is_loaded(change, said, tmp_path):
    trained(PLAIN, tmp_path / "model.pt")
    file = torch.load(tmp_path / "model.pt")
    changed = change(file.pop("optimizer_state_dict"))
    torch.save(file if changed is None else {**file, "optimizer_state_dict": changed}, tmp_path / "model.pt")
    actor, critic = PLAIN.ours()
    before = actor.mlp[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=said):
        load_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic, KLAdaptiveStepper(actor, critic))
    assert torch.equal(before, actor.mlp[0].weight)
    load_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic)  # the networks alone


def test_a_std_that_was_not_learned_has_no_moments_and_starts_without(tmp_path):
    config = PLAIN.config()
    config["actor"]["distribution_cfg"]["learn_std"] = False
    with silence():
        theirs = OnPolicyRunner(World(), config, log_dir=None, device="cpu")
        theirs.learn(1)
    theirs.logger.save_model = lambda *args: None
    theirs.save(str(tmp_path / "model.pt"))
    actor, critic = PLAIN.ours()
    stepper = KLAdaptiveStepper(actor, critic)
    load_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic, stepper)
    state = stepper.optimizer.state_dict()["state"]
    assert not state[0]["exp_avg"].any() and state[1]["exp_avg"].any()


def test_curiosity_in_the_file_is_named_as_left_out(tmp_path):
    trained(PLAIN, tmp_path / "model.pt")
    file = torch.load(tmp_path / "model.pt")
    torch.save({**file, "rnd_state_dict": {"predictor.0.weight": torch.zeros(1)}}, tmp_path / "model.pt")
    assert load_rsl_rl_checkpoint(tmp_path / "model.pt", *PLAIN.ours()).left_out == ("rnd_state_dict",)


def test_a_stepper_of_other_networks_is_refused(tmp_path):
    actor, critic = PLAIN.ours()
    stepper = KLAdaptiveStepper(*PLAIN.ours())
    with pytest.raises(ValueError, match="does not optimise this actor"):
        save_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic, stepper)
    save_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic)
    for pair in ((actor, critic), (actor, None)):
        with pytest.raises(ValueError, match="does not optimise this actor"):
            load_rsl_rl_checkpoint(tmp_path / "model.pt", *pair, stepper)


def test_a_network_with_layers_of_its_own_is_not_written(tmp_path):
    actor, critic = PLAIN.ours()
    actor.extra = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"nothing that corresponds to 'extra\.weight'"):
        save_rsl_rl_checkpoint(tmp_path / "model.pt", actor, critic)
    assert not list(tmp_path.iterdir())
