"""rsl-rl-lib ends in the same bits on our RolloutStorage as on its own."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rsl_rl.runners import DistillationRunner, OnPolicyRunner
from rsl_rl.storage import RolloutStorage as Theirs
from simulators import SeeingWalkers, Walkers
from tensordict import TensorDict
from torch import Tensor

from torchrl_rslstorage.rsl_rl import RolloutStorage, patch_rsl_rl
from torchrl_rslstorage.rsl_rl import mini_batches as batches_module
from torchrl_rslstorage.rsl_rl import rollout_storage as storage_module
from torchrl_rslstorage.rsl_rl.mini_batches import ShuffledCopies, starting_states

GROUPS = {"policy": 3, "critic": 5}
Hidden = tuple[Any, Any]


# -- the same transitions into both ------------------------------------------------------------------


def make_both(
    num_envs: int, num_steps: int, kind: str = "rl", actions: tuple[int, ...] = (2,), obs: Any = None
) -> tuple[Theirs, RolloutStorage]:
    if obs is None:
        obs = TensorDict({key: torch.zeros(num_envs, width) for key, width in GROUPS.items()}, [num_envs])
    args: tuple[Any, ...] = (kind, num_envs, num_steps, obs, list(actions), "cpu")
    return Theirs(*args), RolloutStorage(*args)


def random_step(storage: Any, states: str = "", done_rate: float = 0.3) -> Any:
    """A transition in the storage's own class, of random numbers from the global generator."""
    n = storage.num_envs
    step = type(storage).Transition()
    step.observations = TensorDict(
        {key: torch.rand(n, *x.shape[2:]).mul(200).to(x.dtype) for key, x in storage.observations.items()},
        [n],
    )
    step.actions = torch.randn(n, *storage.actions_shape)
    step.rewards = torch.randn(n)
    step.dones = (torch.rand(n) < done_rate).long()
    if storage.training_type == "distillation":
        step.privileged_actions = torch.randn(n, *storage.actions_shape)
    else:
        step.values = torch.randn(n, 1)
        step.actions_log_prob = torch.randn(n)
        step.distribution_params = (torch.randn(n, 2), torch.rand(n, 2))
    kinds = {"l": lambda: (torch.randn(2, n, 3), torch.randn(2, n, 3)), "g": lambda: torch.randn(1, n, 4)}
    step.hidden_states = tuple(kinds[s]() if s in kinds else None for s in states or "--")
    return step


def fill(storage: Any, seed: int = 0, states: str = "", done_rate: float = 0.3) -> None:
    """One whole window; the first step has no states yet, as with rsl-rl-lib's networks."""
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    first = storage.step == 0 and getattr(storage, "saved_hidden_state_a", None) is None
    for t in range(storage.num_transitions_per_env):
        step = random_step(storage, states, done_rate)
        if t == 0 and first:
            step.hidden_states = (None, None)
        storage.add_transition(step)
    if storage.training_type == "rl":
        storage.returns = torch.randn_like(storage.returns)
        storage.advantages = storage.returns - storage.values
    torch.random.set_rng_state(generator)


def flat(value: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors below a batch, a TensorDict or a tuple, by name."""
    if value is None:
        return {}
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, tuple | list):
        items: Any = enumerate(value)
    elif isinstance(value, TensorDict):
        items = value.items()
    else:
        items = vars(value).items()
    return {key: x for part, item in items for key, x in flat(item, f"{name}.{part}").items()}


def assert_same(ours: Any, theirs: Any) -> None:
    ours, theirs = flat(ours), flat(theirs)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key].dtype is value.dtype, key
        assert torch.equal(ours[key], value), key


def assert_same_batches(ours: Any, theirs: Any) -> None:
    """Both generators to their end, beside each other, drawing from the same place in the random stream."""
    state = torch.random.get_rng_state()
    copies = [copy.deepcopy(flat(batch)) for batch in theirs]
    after = torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    number = 0
    for batch, expected in zip(ours, copies, strict=True):
        number += 1
        got = flat(batch)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert got[key].dtype is value.dtype, key
            assert torch.equal(got[key], value), key
    assert torch.equal(torch.random.get_rng_state(), after)
    assert number == len(copies)


sizes = st.integers(1, 7)


@given(T=sizes, N=sizes, M=st.integers(1, 4), epochs=st.integers(0, 3), seed=st.integers(0, 99))
def test_flat_mini_batches_are_rsl_rls_to_the_bit_in_the_same_order(T, N, M, epochs, seed):
    if T * N < M:
        return
    theirs, ours = make_both(N, T)
    torch.manual_seed(seed)
    for window in range(2):
        for storage in (theirs, ours):
            fill(storage, seed + window)
        assert_same_batches(ours.mini_batch_generator(M, epochs), theirs.mini_batch_generator(M, epochs))
        for storage in (theirs, ours):
            storage.clear()


@given(
    T=sizes,
    N=sizes,
    M=st.integers(1, 4),
    states=st.sampled_from(["ll", "gg", "lg", "l-", "-g", "--"]),
    rate=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 99),
)
def test_recurrent_mini_batches_are_rsl_rls_to_the_bit_in_the_same_order(T, N, M, states, rate, seed):
    if N < M:
        return
    theirs, ours = make_both(N, T)
    for window in range(2):
        for storage in (theirs, ours):
            fill(storage, seed + window, states, rate)
        assert_same(ours.saved_hidden_state_a, theirs.saved_hidden_state_a)
        assert_same_batches(
            ours.recurrent_mini_batch_generator(M, 2), theirs.recurrent_mini_batch_generator(M, 2)
        )
        for storage in (theirs, ours):
            storage.clear()


@given(T=sizes, N=sizes, seed=st.integers(0, 99))
def test_the_steps_for_distillation_are_rsl_rls_to_the_bit(T, N, seed):
    theirs, ours = make_both(N, T, "distillation")
    for storage in (theirs, ours):
        fill(storage, seed)
    assert_same(list(ours.generator()), list(theirs.generator()))


def test_every_attribute_is_rsl_rls_before_during_and_after_a_window():
    theirs, ours = make_both(3, 2)

    def compare():
        names = [name for name in vars(theirs) if name != "training_type"]
        for name in names:
            mine, other = getattr(ours, name), getattr(theirs, name)
            if isinstance(other, Tensor | TensorDict | tuple | list) and name != "actions_shape":
                assert_same(mine, other)
            else:
                assert mine == other, name

    compare()
    torch.manual_seed(0)
    first, second = (random_step(theirs, "lg") for _ in range(2))
    for step in (first, second):
        for storage in (theirs, ours):
            storage.add_transition(step)
        compare()
    for storage in (theirs, ours):
        storage.clear()
    compare()
    assert ours.step == 0
    for storage in (theirs, ours):
        storage.add_transition(second)
    compare()


@pytest.mark.parametrize("name", ["values", "privileged_actions", "returns"])
def test_what_a_kind_of_training_has_not_got_is_no_attribute(name):
    for kind in ("rl", "distillation"):
        theirs, ours = make_both(2, 2, kind)
        assert hasattr(ours, name) == hasattr(theirs, name)


def test_dtypes_of_groups_stay_and_everything_else_is_cast_as_rsl_rl_casts_it():
    obs = TensorDict(
        {"policy": torch.zeros(3, 2, dtype=torch.float16), "camera": torch.zeros(3, 2, 4, dtype=torch.uint8)},
        [3],
    )
    theirs, ours = make_both(3, 2, obs=obs)
    torch.manual_seed(0)
    for _ in range(2):
        step = random_step(theirs)
        step.actions = (10 * step.actions).long()
        step.rewards, step.values = step.rewards.double(), step.values.double()
        step.distribution_params = tuple(p.double() for p in step.distribution_params)
        step.dones = step.dones.float().unsqueeze(-1)
        for storage in (theirs, ours):
            storage.add_transition(step)
    for name in ("observations", "actions", "rewards", "values", "dones", "distribution_params"):
        assert_same(getattr(ours, name), getattr(theirs, name))
    assert_same_batches(ours.mini_batch_generator(2, 1), theirs.mini_batch_generator(2, 1))


def test_float64_by_default_makes_float64_columns():
    torch.set_default_dtype(torch.float64)
    try:
        theirs, ours = make_both(2, 2)
        for storage in (theirs, ours):
            fill(storage, states="lg")
        assert_same_batches(ours.mini_batch_generator(2, 1), theirs.mini_batch_generator(2, 1))
        assert ours.values.dtype is ours.saved_hidden_state_a[0].dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# -- writes ------------------------------------------------------------------------------------------


def test_assigned_attributes_are_read_back_and_reach_the_mini_batches_and_the_buffer():
    theirs, ours = make_both(3, 4)
    for storage in (theirs, ours):
        fill(storage, states="lg")
    for name in ("values", "rewards", "actions", "returns", "advantages", "actions_log_prob"):
        value = torch.randn_like(getattr(theirs, name))
        for storage in (theirs, ours):
            setattr(storage, name, value)
    observations = theirs.observations.clone().apply_(torch.neg)
    dones = torch.ones_like(theirs.dones)
    dones[0] = 0
    for storage in (theirs, ours):
        storage.observations = observations
        storage.dones = dones
        storage.distribution_params = tuple(p + 1 for p in storage.distribution_params)
        storage.saved_hidden_state_a = [s + 1 for s in storage.saved_hidden_state_a]
        storage.returns[1] = 7.0
    assert_same_batches(ours.mini_batch_generator(2, 2), theirs.mini_batch_generator(2, 2))
    assert_same_batches(
        ours.recurrent_mini_batch_generator(3, 2), theirs.recurrent_mini_batch_generator(3, 2)
    )
    window = ours.buffer.window
    assert torch.equal(window["value_target"], theirs.returns)
    assert torch.equal(window["next", "done"], theirs.dones.bool())
    assert torch.equal(window["observation", "critic"], theirs.observations["critic"])


def test_an_assignment_of_another_shape_names_both():
    _, ours = make_both(3, 4)
    with pytest.raises(ValueError, match=r"returns.*\(4, 3\).*\(4, 3, 1\)"):
        ours.returns = torch.zeros(4, 3)


def test_attributes_of_ones_own_are_kept_as_they_are():
    _, ours = make_both(3, 4)
    ours.note = [1]
    assert ours.note == [1]


def test_hidden_states_and_parameters_may_be_assigned_before_the_first_step():
    theirs, ours = make_both(3, 2)
    for storage in (theirs, ours):
        storage.distribution_params = (torch.ones(2, 3, 2), torch.ones(2, 3, 2))
        storage.saved_hidden_state_c = [torch.ones(2, 1, 3, 4)]
        fill(storage)
    assert_same_batches(
        ours.recurrent_mini_batch_generator(1, 1), theirs.recurrent_mini_batch_generator(1, 1)
    )
    for storage in (theirs, ours):
        storage.saved_hidden_state_c = None
    assert_same_batches(
        ours.recurrent_mini_batch_generator(1, 1), theirs.recurrent_mini_batch_generator(1, 1)
    )
    for storage in (theirs, ours):
        storage.clear()
        torch.manual_seed(2)
        storage.add_transition(random_step(theirs))
        storage.add_transition(random_step(theirs, "-g"))
    assert_same(ours.saved_hidden_state_c, theirs.saved_hidden_state_c)


def test_a_simulator_that_reuses_its_memory_does_not_change_what_was_stored():
    _, ours = make_both(3, 2)
    step = random_step(ours, "lg")
    ours.add_transition(step)
    kept = {key: value.clone() for key, value in flat(ours.observations).items()}
    rewards = ours.rewards.clone()
    step.observations.apply_(torch.zero_)
    step.rewards.zero_()
    assert all(torch.equal(flat(ours.observations)[key], value) for key, value in kept.items())
    assert torch.equal(ours.rewards, rewards)


def test_a_full_storage_refuses_another_step_until_it_is_cleared():
    theirs, ours = make_both(3, 2)
    for storage in (theirs, ours):
        fill(storage)
        with pytest.raises(OverflowError, match=r"clear\(\)"):
            storage.add_transition(random_step(storage))
        storage.clear()
        storage.add_transition(random_step(storage))
        assert storage.step == 1


def test_the_counter_may_be_set():
    theirs, ours = make_both(3, 3)
    for storage in (theirs, ours):
        fill(storage)
        storage.step = 1
        torch.manual_seed(5)
        storage.add_transition(random_step(storage))
        assert storage.step == 2
    assert_same(ours.observations, theirs.observations)
    with pytest.raises(ValueError, match="step"):
        ours.step = 4


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("rewards", torch.zeros(2), ValueError, r"`rewards` of shape \(2, 1\), expected \(3, 1\)"),
        ("dones", torch.zeros(1), ValueError, r"`dones` of shape \(1, 1\)"),
        ("actions", torch.zeros(3, 7), ValueError, r"`actions` of shape \(3, 7\), expected \(3, 2\)"),
        ("actions", torch.zeros(3, 1), ValueError, "actions"),
        ("distribution_params", (torch.zeros(3, 2),), ValueError, "tensors"),
        ("observations", TensorDict({"policy": torch.zeros(3, 3)}, [3]), KeyError, "'critic'"),
    ],
)
def test_a_refused_step_leaves_room_for_the_right_one(name, value, error, message):
    _, ours = make_both(3, 3)
    ours.add_transition(random_step(ours))
    step = random_step(ours)
    setattr(step, name, value)
    with pytest.raises(error, match=message):
        ours.add_transition(step)
    ours.add_transition(random_step(ours))
    assert ours.step == 2
    assert ours.buffer.write_count == 6


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("rl", lambda s: s.generator()),
        ("distillation", lambda s: s.mini_batch_generator(1)),
        ("distillation", lambda s: s.recurrent_mini_batch_generator(1)),
    ],
)
def test_the_wrong_generator_is_refused_as_rsl_rl_refuses_it(kind, method):
    for storage in make_both(3, 2, kind):
        with pytest.raises(ValueError, match=r"training|build it"):
            next(method(storage))


def test_more_mini_batches_than_can_be_cut_are_refused():
    _, ours = make_both(3, 2)
    fill(ours)
    with pytest.raises(ValueError, match=r"7 mini-batches .* 6 transitions"):
        next(ours.mini_batch_generator(7))
    with pytest.raises(ValueError, match=r"4 mini-batches .* 3 environments"):
        next(ours.recurrent_mini_batch_generator(4))


def test_a_storage_without_a_step_has_no_mini_batches():
    _, ours = make_both(3, 2)
    with pytest.raises(RuntimeError, match="no step"):
        next(ours.mini_batch_generator(1))


# -- mini-batches are views --------------------------------------------------------------------------


def test_mini_batches_of_one_update_share_the_memory_of_one_copy():
    _, ours = make_both(4, 3)
    fill(ours)
    batches = list(ours.mini_batch_generator(3, 2))
    assert batches[0].actions.data_ptr() == batches[3].actions.data_ptr()
    assert batches[0] is not batches[3]
    again = next(ours.mini_batch_generator(3, 1))
    assert again.actions.data_ptr() == batches[0].actions.data_ptr()


@given(T=sizes, N=sizes, M=st.integers(1, 4))
def test_mini_batches_start_at_memory_of_their_own_which_can_decide_a_products_last_bit(T, N, M):
    if T * N < M:
        return
    _, ours = make_both(N, T)
    fill(ours)
    for batch in ours.mini_batch_generator(M, 1):
        assert all(x.data_ptr() % 64 == 0 and x.is_contiguous() for x in flat(batch).values())


@pytest.mark.parametrize("method", ["mini_batch_generator", "recurrent_mini_batch_generator"])
def test_what_a_consumer_does_to_a_mini_batch_reaches_the_next_epoch_no_more_than_with_rsl_rl(method):
    theirs, ours = make_both(4, 3)
    for storage in (theirs, ours):
        fill(storage, states="lg")

    def spoil(storage):
        torch.manual_seed(1)
        for batch in getattr(storage, method)(2, 3):
            yield copy.deepcopy(flat(batch))
            batch.advantages = None
            batch.observations["policy"].mul_(2)
            batch.observations["new"] = torch.zeros(batch.observations.batch_size)

    for mine, other in zip(spoil(ours), spoil(theirs), strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], value) for key, value in other.items())


@pytest.mark.parametrize("method", ["mini_batch_generator", "recurrent_mini_batch_generator"])
def test_two_generators_beside_each_other_do_not_disturb_one_another(method):
    theirs, ours = make_both(4, 3)
    for storage in (theirs, ours):
        fill(storage, states="lg")

    def beside(storage):
        torch.manual_seed(1)
        two = [getattr(storage, method)(2, 2) for _ in range(2)]
        return [[copy.deepcopy(flat(batch)) for batch in pair] for pair in zip(*two, strict=True)]

    for mine, other in zip(beside(ours), beside(theirs), strict=True):
        for got, expected in zip(mine, other, strict=True):
            assert all(torch.equal(got[key], value) for key, value in expected.items())


# -- rsl-rl-lib's algorithms and runners -------------------------------------------------------------


def config(rnn: str | None = None, **algorithm: Any) -> dict[str, Any]:
    network: dict[str, Any] = {"class_name": "MLPModel", "hidden_dims": [16], "obs_normalization": True}
    if rnn is not None:
        network |= {"class_name": "RNNModel", "rnn_type": rnn, "rnn_hidden_dim": 8, "rnn_num_layers": 2}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    return {
        "num_steps_per_env": 7,
        "save_interval": 100,
        "obs_groups": {"actor": ["policy"], "critic": ["policy", "critic"]},
        "actor": {**network, "distribution_cfg": gaussian},
        "critic": copy.deepcopy(network),
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 3, "num_mini_batches": 4, **algorithm},
    }


def distillation_config(rnn: str | None = None) -> dict[str, Any]:
    made = config(rnn)
    algorithm = {"class_name": "Distillation", "num_learning_epochs": 2, "gradient_length": 7}
    return {
        "num_steps_per_env": 7,
        "save_interval": 100,
        "obs_groups": {"student": ["policy"], "teacher": ["policy", "critic"]},
        "student": made["actor"],
        "teacher": {**config()["critic"], "distribution_cfg": made["actor"]["distribution_cfg"]},
        "algorithm": algorithm,
    }


def learn(patched: bool, runner: Any, cfg: dict[str, Any], num_envs: int, tmp_path: Any = None) -> Any:
    """Five iterations; returns the algorithm."""
    with patch_rsl_rl() if patched else contextlib.nullcontext():
        torch.manual_seed(3)
        simulator = SeeingWalkers if "camera" in str(cfg["obs_groups"]) else Walkers
        env = simulator([3, 5, 4, 6, 9, 11, 2, 20, 5][:num_envs], limit=1.5)
        made = runner(env, copy.deepcopy(cfg), log_dir=None, device="cpu")
        if isinstance(made, DistillationRunner):
            made.alg.teacher_loaded = True
        made.learn(5, init_at_random_ep_len=True)
    assert (type(made.alg.storage) is RolloutStorage) == patched
    return made.alg


@pytest.mark.parametrize("num_envs", [8, 9])
@pytest.mark.parametrize("rnn", [None, "lstm", "gru"])
@pytest.mark.parametrize("per_mini_batch", [False, True])
def test_on_policy_runners_parameters_are_the_same_in_every_bit(num_envs, rnn, per_mini_batch):
    cfg = config(rnn, normalize_advantage_per_mini_batch=per_mini_batch)
    ours, theirs = (learn(patched, OnPolicyRunner, cfg, num_envs) for patched in (True, False))
    assert_same_states(ours.save(), theirs.save())
    assert ours.learning_rate == theirs.learning_rate


@pytest.mark.parametrize("rnn", [None, "lstm", "gru"])
def test_distillation_runners_parameters_are_the_same_in_every_bit(rnn):
    cfg = distillation_config(rnn)
    ours, theirs = (learn(patched, DistillationRunner, cfg, 8) for patched in (True, False))
    assert_same_states(ours.save(), theirs.save())


def assert_same_states(ours: Any, theirs: Any) -> None:
    moved = 0
    for name, state in theirs.items():
        if name.endswith("optimizer_state_dict"):
            continue
        for key, value in state.items():
            assert torch.equal(ours[name][key], value), (name, key)
            moved += 1
    assert moved
    for mine, other in zip(
        ours["optimizer_state_dict"]["state"].values(),
        theirs["optimizer_state_dict"]["state"].values(),
        strict=True,
    ):
        assert all(
            torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(value)) for key, value in other.items()
        )


def mirrored(env: Any, obs: Any, actions: Any) -> Any:
    """Both hands, and the other way round."""
    if obs is not None:
        obs = torch.cat([obs, obs.apply(torch.neg)])
    return obs, None if actions is None else torch.cat([actions, -actions])


def with_cameras() -> dict[str, Any]:
    cfg = config()
    cnn = {"output_channels": [4], "kernel_size": 3}
    for network in ("actor", "critic"):
        cfg["obs_groups"][network].append("camera")
        cfg[network] |= {"class_name": "CNNModel", "cnn_cfg": dict(cnn)}
    return cfg


def with_curiosity(cfg: dict[str, Any]) -> dict[str, Any]:
    cfg["obs_groups"]["rnd_state"] = ["policy"]
    hidden = {"predictor_hidden_dims": [8], "target_hidden_dims": [8]}
    cfg["algorithm"]["rnd_cfg"] = {"num_outputs": 2, **hidden, "weight": 10.0, "state_normalization": True}
    return cfg


BOTH_HANDS = {
    "data_augmentation_func": mirrored,
    "use_data_augmentation": True,
    "use_mirror_loss": True,
    "mirror_loss_coeff": 0.5,
}


@pytest.mark.parametrize(
    "cfg",
    [
        config(symmetry_cfg=BOTH_HANDS),
        with_curiosity(config()),
        with_curiosity(config("lstm")),
        with_cameras(),
        config(use_mixed_precision=True),
        config("gru", use_mixed_precision=True),
    ],
    ids=["symmetry", "curiosity", "recurrent curiosity", "cameras", "mixed precision", "recurrent mixed"],
)
def test_rsl_rls_extensions_end_in_the_same_bits(cfg):
    ours, theirs = (learn(patched, OnPolicyRunner, cfg, 8) for patched in (True, False))
    assert_same_states(ours.save(), theirs.save())


def test_an_algorithm_takes_our_storage_without_any_patch():
    theirs = learn(False, OnPolicyRunner, config(), 8)
    storage = RolloutStorage("rl", 8, 7, theirs.storage.observations[0], [2])
    theirs.storage = storage
    torch.manual_seed(0)
    env = Walkers([3] * 8)
    obs = env.get_observations()
    for _ in range(7):
        obs, rewards, dones, extras = env.step(theirs.act(obs))
        theirs.process_env_step(obs, rewards, dones, extras)
    with torch.inference_mode():
        theirs.compute_returns(obs)
    assert theirs.update()["value"] > 0
    assert storage.step == 0


# -- what the comparison notices ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rnn", "name", "wrong"),
    [
        (None, "draws twice", lambda m: _after(m, "mini_batch_generator", lambda s: torch.rand(1))),
        (None, "leaves rewards out", lambda m: _row_without(m, 3)),
        (None, "never lets go of the first copy", lambda m: m.setattr(ShuffledCopies, "shuffle", _once())),
        (
            "lstm",
            "states of the wrong cells",
            lambda m: m.setattr(storage_module, "starting_states", _shifted),
        ),
        (
            "lstm",
            "pads to the longest",
            lambda m: m.setattr(batches_module, "_up_to_the_last_row", _as_it_is),
        ),
    ],
)
def test_a_planted_fault_is_noticed(monkeypatch, rnn, name, wrong):
    wrong(monkeypatch)
    cfg = config(rnn)
    theirs = learn(False, OnPolicyRunner, cfg, 8).save()
    try:
        ours = learn(True, OnPolicyRunner, cfg, 8).save()
    except (RuntimeError, ValueError):
        return
    state = "actor_state_dict"
    assert not all(torch.equal(ours[state][key], value) for key, value in theirs[state].items()), name


def _after(m: Any, name: str, also: Any) -> None:
    original = getattr(RolloutStorage, name)
    m.setattr(RolloutStorage, name, lambda self, *args: (also(self), original(self, *args))[1])


def _row_without(m: Any, place: int) -> None:
    original = RolloutStorage._row

    def row(self, t):
        views = list(original(self, t))
        views[place] = torch.empty_like(views[place])
        return views

    m.setattr(RolloutStorage, "_row", row)


def _once() -> Any:
    first: list[Any] = []
    original = ShuffledCopies.shuffle

    def shuffle(self, columns, cells):
        if not first:
            first.append(copy.deepcopy(original(self, columns, cells)))
        return first[0]

    return shuffle


def _shifted(saved: Any, start: Tensor) -> list[Tensor]:
    return starting_states(saved, (start + 1) % (saved[0].shape[0] * saved[0].shape[1]))


def _as_it_is(plan: Any, num_steps: int) -> Any:
    return plan


# -- the patch ---------------------------------------------------------------------------------------


def test_the_patch_reaches_every_module_that_holds_the_class_and_is_taken_back():
    import rsl_rl.algorithms.ppo as ppo
    import rsl_rl.storage as storage

    mine = sys.modules[__name__]
    held = vars(mine)["Theirs"]
    mine.RolloutStorage = held  # type: ignore[assignment] - a project's own `from rsl_rl.storage import …`
    try:
        with patch_rsl_rl() as patch:
            assert ppo.RolloutStorage is storage.RolloutStorage is mine.RolloutStorage is not held
            assert __name__ in patch.modules
            with patch_rsl_rl() as again:
                assert again.modules == []
            assert storage.RolloutStorage is not held
        assert ppo.RolloutStorage is storage.RolloutStorage is mine.RolloutStorage is held
        patch.undo()
        assert ppo.RolloutStorage is held
    finally:
        from torchrl_rslstorage.rsl_rl import RolloutStorage as Ours

        mine.RolloutStorage = Ours  # type: ignore[assignment]


def test_without_rsl_rl_the_storage_works_and_the_patch_names_the_extra():
    source = """
import sys
sys.modules["rsl_rl"] = None
import torch
from tensordict import TensorDict
from torchrl_rslstorage.rsl_rl import RolloutStorage, patch_rsl_rl
RolloutStorage("rl", 2, 2, TensorDict({"policy": torch.zeros(2, 1)}, [2]), [1])
try:
    patch_rsl_rl()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert "torchrl-rslstorage[rsl-rl]" in done.stdout, done.stderr
