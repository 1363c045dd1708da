"""The optimisation step and the training loop."""

from __future__ import annotations

import math
import os
import pickle
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import tensordict
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict
from tiny import Simulator, equal, make_trainer, parameters, policy_of, torchrl_networks
from torch import nn
from torchrl.checkpoint import Checkpoint, CheckpointError
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.record.loggers import CSVLogger
from torchrl.record.loggers.common import Logger

from torchrl_rslstorage import (
    ActorCritic,
    KLAdaptiveStepper,
    MiniBatchSampler,
    MLPActor,
    MLPCritic,
    PendulumEnv,
    PPOConfig,
    RolloutBuffer,
    RolloutCollector,
    RolloutGAE,
    RSLPPOLoss,
    RSLPPOTrainer,
)
from torchrl_rslstorage.trainers.learning_rate import adapted_learning_rate

# -- the learning rate ---------------------------------------------------------------------------


def rsl_rl_rule(learning_rate: float, kl: float, desired_kl: float) -> float:
    """rsl_rl 5.5.1, algorithms/ppo.py, ``PPO.update``."""
    if kl > desired_kl * 2.0:
        return max(1e-5, learning_rate / 1.5)
    elif kl < desired_kl / 2.0 and kl > 0.0:
        return min(1e-2, learning_rate * 1.5)
    return learning_rate


@given(
    learning_rate=st.floats(1e-5, 1e-2),
    kl=st.floats(0, 0.1) | st.sampled_from([0.0, 0.005, 0.02, math.inf, math.nan]),
    desired_kl=st.sampled_from([0.01, 0.003]),
)
@example(learning_rate=1e-3, kl=0.02, desired_kl=0.01)  # at the bounds nothing changes
@example(learning_rate=1e-3, kl=0.005, desired_kl=0.01)
@example(learning_rate=1e-3, kl=math.nextafter(0.02, 1), desired_kl=0.01)
@example(learning_rate=1e-3, kl=math.nextafter(0.005, 0), desired_kl=0.01)
@example(learning_rate=1e-3, kl=0.0, desired_kl=0.01)
@example(learning_rate=1.4e-5, kl=1.0, desired_kl=0.01)  # would fall below the lowest rate
@example(learning_rate=8e-3, kl=1e-4, desired_kl=0.01)  # would rise above the highest
@example(learning_rate=1e-5, kl=1.0, desired_kl=0.01)
@example(learning_rate=1e-2, kl=1e-4, desired_kl=0.01)
def test_the_learning_rate_follows_rsl_rls_rule_to_the_bit(learning_rate, kl, desired_kl):
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (learning_rate, kl))
    assert adapted_learning_rate(*tensors, desired_kl).item() == rsl_rl_rule(learning_rate, kl, desired_kl)


class Quadratic(nn.Module):
    """A loss whose gradients are known: ``a/2·|x − 1|²`` for the actor, ``c/2·|x − 1|²`` for the critic."""

    def __init__(self, actor, critic, kl: float, scale: tuple[float, float]) -> None:
        super().__init__()
        self.networks, self.kl, self.scale = (actor, critic), kl, scale

    def forward(self, batch):
        actor, critic = (
            scale / 2 * sum((p - 1).square().sum() for p in network.parameters())
            for network, scale in zip(self.networks, self.scale, strict=True)
        )
        found = {"loss_objective": actor, "loss_critic": critic, "kl": torch.tensor(self.kl)}
        return TensorDict({**found, "entropy": torch.tensor(100.0)})


def linear_networks() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.Linear(3, 1)


def test_the_learning_rate_changes_before_the_step_that_its_kl_belongs_to():
    (actor, critic), (before, _) = linear_networks(), linear_networks()
    KLAdaptiveStepper(actor, critic).update(Quadratic(actor, critic, kl=1.0, scale=(1, 1)), TensorDict())
    # The first step of Adam moves every parameter by the learning rate, whatever the gradient.
    moved = (actor.weight - before.weight).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-3 / 1.5), rtol=1e-4, atol=0)


def test_a_fixed_schedule_keeps_the_learning_rate():
    actor, critic = linear_networks()
    stepper = KLAdaptiveStepper(actor, critic, schedule="fixed", learning_rate=0.25)
    stepper.update(Quadratic(actor, critic, kl=1.0, scale=(1, 1)), TensorDict())
    assert float(stepper.learning_rate) == 0.25


def test_a_step_is_adam_on_gradients_clipped_by_each_networks_own_norm():
    mine, theirs = linear_networks(), linear_networks()
    stepper = KLAdaptiveStepper(*mine, learning_rate=2e-3, max_grad_norm=0.7)
    adam = torch.optim.Adam([p for net in theirs for p in net.parameters()], lr=2e-3)
    for scale in ((1e-2, 30.0), (5.0, 1e-3), (1e-2, 1e-2), (9.0, 9.0)):
        metrics = stepper.update(Quadratic(*mine, kl=0.01, scale=scale), TensorDict())
        assert not metrics.requires_grad and stepper.metric_names[:2] == ["loss_objective", "loss_critic"]
        clipped = []
        for network, factor in zip(theirs, scale, strict=True):
            gradients = [factor * (p.detach() - 1) for p in network.parameters()]
            norm = torch.cat([g.flatten() for g in gradients]).norm().item()
            clipped.append(norm > 0.7)
            for p, g in zip(network.parameters(), gradients, strict=True):
                p.grad = g * min(1.0, 0.7 / (norm + 1e-6))  # torch's own epsilon
        assert clipped == [scale[0] > 1, scale[1] > 1]
        adam.step()
        for a, b in zip(parameters(*mine), parameters(*theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_shared_parameters_are_stepped_once_and_clipped_with_both_networks():
    trunk, heads = nn.Linear(3, 3), (nn.Linear(3, 1), nn.Linear(3, 1))
    actor, critic = (nn.Sequential(trunk, head) for head in heads)
    stepper = KLAdaptiveStepper(actor, critic, max_grad_norm=0.5)
    assert len(stepper.state_dict()["optimizer"]["state"]) == 6
    before = trunk.weight.detach().clone()
    stepper.update(Quadratic(actor, critic, kl=0.01, scale=(9.0, 9.0)), TensorDict())
    assert not torch.equal(trunk.weight, before)
    for network in (actor, critic):
        norm = torch.cat([p.grad.flatten() for p in network.parameters()]).norm()
        assert norm <= 0.5 + 1e-5


def test_a_frozen_network_is_no_obstacle():
    actor, critic = linear_networks()
    before = parameters(critic)
    for p in critic.parameters():
        p.requires_grad_(False)
    stepper = KLAdaptiveStepper(actor, critic)
    stepper.update(Quadratic(actor, critic, kl=0.01, scale=(1, 1)), TensorDict())
    assert equal(parameters(critic), before)


def update_problem(**kwargs):
    """Networks, a loss, a stepper, and the mini-batches of one update."""
    torch.manual_seed(0)
    env = PendulumEnv(6, seed=0, max_episode_steps=5)
    policy = policy_of(env, normalize_observations=True)
    sampler = MiniBatchSampler(3, 2)
    buffer = RolloutBuffer(8, 6, sampler=sampler)
    RolloutCollector(env, policy, replay_buffer=buffer).rollout()
    RolloutGAE(0.99, 0.95, policy.critic, normalize=True)(buffer)
    loss = RSLPPOLoss(policy.actor, policy.critic)
    return policy, loss, KLAdaptiveStepper(policy.actor, policy.critic, **kwargs), buffer


def test_no_step_of_an_update_reads_a_number_from_the_device(monkeypatch):
    policy, loss, stepper, buffer = update_problem()
    before = parameters(policy)

    def refuse(self, *args, **kwargs):
        raise AssertionError("this waits for the device")

    numpy = torch.Tensor.numpy

    def numpy_of_the_host(self, *, force=False):  # without `force` it never waits: it refuses other devices
        return refuse(self) if force else numpy(self)

    batches = iter(buffer)
    for name in ("item", "__bool__", "__float__", "__int__", "__index__", "tolist", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(torch.Tensor, "numpy", numpy_of_the_host)
    for batch in batches:
        stepper.update(loss, batch)
    monkeypatch.undo()
    assert not equal(parameters(policy), before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_step_of_an_update_waits_for_cuda():
    policy, _, _, buffer = update_problem()
    policy = policy.to("cuda")
    loss = RSLPPOLoss(policy.actor, policy.critic)
    stepper = KLAdaptiveStepper(policy.actor, policy.critic)
    batches = [batch.to("cuda") for batch in buffer]
    stepper.update(loss, batches[0])  # the first one allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            stepper.update(loss, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_stepper_resumed_from_its_state_continues_to_the_bit():
    policy, loss, stepper, buffer = update_problem(desired_kl=1e-4)
    other, other_loss, other_stepper, _ = update_problem(desired_kl=1e-4)
    batches = list(buffer)
    for batch in batches[:3]:
        stepper.update(loss, batch)
    assert float(stepper.learning_rate) != 1e-3
    other.load_state_dict(policy.state_dict())
    other_stepper.load_state_dict(stepper.state_dict())
    for batch in batches[3:]:
        stepper.update(loss, batch)
        other_stepper.update(other_loss, batch)
        assert torch.equal(stepper.learning_rate, other_stepper.learning_rate)
        assert equal(parameters(policy), parameters(other))


def test_a_saved_stepper_is_a_snapshot_of_the_learning_rate():
    _, loss, stepper, buffer = update_problem(desired_kl=1e-5)
    state = stepper.state_dict()
    for batch in buffer:
        stepper.update(loss, batch)
    assert float(state["learning_rate"]) == 1e-3 != float(stepper.learning_rate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "linear"}, r"`schedule` must be one of \('adaptive', 'fixed'\), got 'linear'"),
        ({"learning_rate": 0.0}, "`learning_rate` must be positive, got 0.0"),
        ({"max_grad_norm": -1.0}, "`max_grad_norm` must be positive"),
        ({"desired_kl": math.nan}, "`desired_kl` must be positive, got nan"),
    ],
)
def test_a_stepper_refuses_numbers_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        KLAdaptiveStepper(*linear_networks(), **options)


# -- one iteration after another -----------------------------------------------------------------


class Recorder(Logger):
    """A TorchRL logger that keeps what it is told."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = defaultdict(list)
        super().__init__("recorder", "")

    def _create_experiment(self):
        return None

    def log_scalar(self, name, value, step=None):
        self.scalars[name].append((step, value))

    def log_video(self, name, video, step=None, **kwargs): ...

    def log_hparams(self, cfg): ...

    def log_histogram(self, name, data, **kwargs): ...

    def __repr__(self):
        return "Recorder()"


def stock_trainer(**kwargs) -> RSLPPOTrainer:
    """TorchRL's collector, actor and critic in our trainer."""
    torch.manual_seed(0)
    actor, critic = torchrl_networks(3, 1)
    collector = Collector(
        PendulumEnv(4, seed=0, max_episode_steps=5),
        ActorCritic(actor, critic),
        replay_buffer=RolloutBuffer(4, 4),
        frames_per_batch=16,
        total_frames=48,
        auto_register_policy_transforms=False,
    )
    config = PPOConfig(num_learning_epochs=2, num_mini_batches=2)
    options = {"total_frames": 48, "config": config, "progress_bar": False, **kwargs}
    return RSLPPOTrainer(collector, actor, critic, **options)


@pytest.mark.parametrize("make", [make_trainer, stock_trainer], ids=["our parts", "torchrl's parts"])
def test_training_counts_frames_iterations_and_optimisation_steps_and_leaves_an_empty_window(make):
    trainer = make()
    before = parameters(trainer.actor, trainer.critic)
    trainer.train()
    assert (trainer.collected_frames, trainer.num_iterations) == (48, 3)
    assert trainer.optim_count == 3 * 2 * 2
    assert trainer.buffer.num_rows == 0 and trainer.buffer.write_count == 48
    after = parameters(trainer.actor, trainer.critic)
    assert all(torch.isfinite(p).all() and not torch.equal(p, b) for p, b in zip(after, before, strict=True))


def test_our_collector_and_torchrls_train_to_the_same_weights():
    stock = stock_trainer()
    torch.manual_seed(1)
    stock.train()
    torch.manual_seed(0)
    actor, critic = torchrl_networks(3, 1)
    env = PendulumEnv(4, seed=0, max_episode_steps=5)
    collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=RolloutBuffer(4, 4))
    ours = RSLPPOTrainer(collector, actor, critic, total_frames=48, config=stock.config, progress_bar=False)
    torch.manual_seed(1)
    ours.train()
    assert equal(parameters(actor, critic), parameters(stock.actor, stock.critic))


def test_metrics_are_averages_over_all_epochs_and_mini_batches():
    trainer = make_trainer(num_iterations=1, config=PPOConfig(num_mini_batches=3, value_loss_coef=0.5))
    taken, update = [], trainer.stepper.update

    def record(loss_module, batch):
        losses = update(loss_module, batch)
        taken.append(dict(zip(trainer.stepper.metric_names, losses.tolist(), strict=True)))
        return losses

    trainer.stepper.update = record
    trainer.train()
    assert len(taken) == 5 * 3
    for scalar, key, factor in (
        ("Loss/surrogate", "loss_objective", 1),
        ("Loss/value", "loss_critic", 2),  # as RSL-RL logs it: before its coefficient
        ("Loss/entropy", "entropy", 1),
        ("Loss/kl", "kl", 1),
        ("Loss/clip_fraction", "clip_fraction", 1),
        ("Loss/explained_variance", "explained_variance", 1),
    ):
        values = [factor * losses[key] for losses in taken]
        assert len(set(values)) > 1 or scalar == "Loss/clip_fraction"
        assert trainer.metrics[scalar] == pytest.approx(sum(values) / len(values), rel=1e-5, abs=1e-7), scalar
    assert trainer.metrics["Loss/learning_rate"] == float(trainer.stepper.learning_rate)


def test_the_first_mini_batch_after_collecting_has_ratio_one_and_the_same_rollout_every_epoch():
    trainer = make_trainer(normalize_observations=True, num_iterations=3)
    kls, update = [], trainer.stepper.update

    def record(loss_module, batch):
        losses = update(loss_module, batch)
        kls.append(float(losses[trainer.stepper.metric_names.index("kl")]))
        return losses

    trainer.stepper.update = record
    trainer.train()
    assert [abs(kl) < 1e-6 for kl in kls] == [True, False, False, False] * 3


def test_normalisers_take_in_each_window_once_and_after_the_update():
    trainer = make_trainer(normalize_observations=True)
    for network in (trainer.actor, trainer.critic):
        seen, update = [], network.normalizer.update

        def record(x, seen=seen, update=update):
            seen.append((trainer.optim_count, x.clone(), trainer.buffer.window["observation"].clone()))
            update(x)

        network.normalizer.update = record
        network.seen = seen
    trainer.train()
    for network in (trainer.actor, trainer.critic):
        assert [count for count, _, _ in network.seen] == [4, 8, 12]
        assert all(torch.equal(x, window.flatten(0, 1)) for _, x, window in network.seen)
        assert network.normalizer.count == 48


def test_every_logger_receives_every_scalar_at_every_iteration_under_rsl_rls_names(tmp_path):
    recorders, csv = [Recorder(), Recorder()], CSVLogger("run", log_dir=str(tmp_path))
    make_trainer(logger=[*recorders, csv]).train()
    expected = {
        *(f"Loss/{name}" for name in ("surrogate", "value", "entropy", "learning_rate", "kl")),
        *(f"Loss/{name}" for name in ("clip_fraction", "explained_variance")),
        *(f"Train/{name}" for name in ("mean_reward", "mean_episode_length", "mean_step_reward")),
        *(f"Perf/{name}" for name in ("collection_time", "learning_time", "total_fps")),
        "Policy/mean_std",
    }
    for recorder in recorders:
        assert set(recorder.scalars) == expected
        for rows in recorder.scalars.values():
            assert [step for step, _ in rows] == [16, 32, 48]
            assert all(isinstance(value, float) for _, value in rows)
    for name in expected:
        lines = (tmp_path / "run" / "scalars" / f"{name}.csv").read_text().splitlines()
        assert [float(line.split(",")[1]) for line in lines] == pytest.approx(
            [value for _, value in recorders[0].scalars[name]], nan_ok=True
        )


def test_one_logger_need_not_be_a_list():
    recorder = Recorder()
    make_trainer(logger=recorder, num_iterations=1).train()
    assert recorder.scalars["Loss/value"]


def test_the_mean_reward_is_that_of_whole_episodes_and_is_not_made_up_where_nobody_counts_them():
    trainer = make_trainer(Simulator([2, 4]), num_steps=8, num_iterations=1)
    trainer.train()
    whole = [101 + 102, 201 + 202, 301 + 302, 401 + 402, 101 + 102 + 103 + 104, 201 + 202 + 203 + 204]
    assert trainer.metrics["Train/mean_reward"] == sum(whole) / 6
    assert trainer.metrics["Train/mean_episode_length"] == (4 * 2 + 2 * 4) / 6
    assert trainer.metrics["Train/mean_step_reward"] == sum(whole) / 16
    stock = stock_trainer()
    stock.train()
    assert "Train/mean_reward" not in stock.metrics and "Train/mean_step_reward" in stock.metrics


def test_hooks_of_torchrls_trainer_run_beside_ours():
    trainer, calls = make_trainer(), defaultdict(list)
    trainer.register_op("batch_process", lambda batch: calls["batch_process"].append(batch))
    for stage in ("setup", "shutdown", "pre_optim_steps", "post_optim", "post_steps"):
        trainer.register_op(stage, lambda stage=stage: calls[stage].append(trainer.num_iterations))
    for stage in ("pre_steps_log", "post_steps_log", "post_optim_log"):
        trainer.register_op(stage, lambda batch, stage=stage: calls[stage].append(batch))

    def flip(batch):  # what a hook returns is what is trained on
        calls["process_optim_batch"].append(len(batch))
        return batch.copy().set("advantage", -batch["advantage"])

    trainer.register_op("process_optim_batch", flip)
    trainer.train()
    assert calls["setup"] == [0] and calls["shutdown"] == [3]
    assert calls["pre_optim_steps"] == [0, 1, 2]
    assert calls["post_steps"] == [1, 2, 3]
    assert len(calls["post_optim"]) == len(calls["post_optim_log"]) == 12
    assert calls["process_optim_batch"] == [8] * 12
    assert calls["pre_steps_log"] == calls["post_steps_log"] == [None] * 3
    assert not calls["batch_process"]  # rows go straight into the buffer
    plain = make_trainer()
    plain.train()
    assert not equal(parameters(plain.actor), parameters(trainer.actor))


def test_training_on_after_the_end_does_nothing():
    trainer = make_trainer()
    trainer.train()
    before = parameters(trainer.actor, trainer.critic)
    trainer.train()
    assert trainer.num_iterations == 3 and equal(parameters(trainer.actor, trainer.critic), before)


@pytest.mark.parametrize("options", [{"reshuffle": True}, {"drop_remainder": True, "num_mini_batches": 3}])
def test_the_config_reaches_the_sampler(options):
    trainer = make_trainer(config=PPOConfig(**options), num_iterations=1)
    sizes = []
    trainer.register_op("process_optim_batch", lambda batch: sizes.append(len(batch)))
    trainer.train()
    assert sizes == ([4] * 20 if "reshuffle" in options else [5] * 15)


def test_the_config_reaches_loss_advantages_and_stepper():
    config = PPOConfig(
        clip_param=0.3,
        gamma=0.8,
        lam=0.7,
        value_loss_coef=0.4,
        entropy_coef=0.2,
        learning_rate=2e-4,
        max_grad_norm=3.0,
        use_clipped_value_loss=False,
        schedule="fixed",
        desired_kl=0.02,
        normalize_advantage_per_mini_batch=True,
        time_out="rsl_rl",
    )
    trainer = make_trainer(config=config)
    loss, gae, stepper = trainer.loss_module, trainer.advantages, trainer.stepper
    assert (loss.clip_epsilon, loss.clip_value, loss.normalize_advantage) == (0.3, None, True)
    assert (float(loss.critic_coeff), float(loss.entropy_coeff)) == pytest.approx((0.4, 0.2))
    assert (gae.gamma, gae.lmbda, gae.time_out, gae.normalize) == (0.8, 0.7, "rsl_rl", False)
    assert (stepper.max_grad_norm, stepper.schedule, stepper.desired_kl) == (3.0, "fixed", 0.02)
    assert float(stepper.learning_rate) == 2e-4


def test_a_buffers_own_generator_draws_the_mini_batches():
    found = []
    for seed in (0, 0, 1):
        trainer = make_trainer(num_iterations=1)
        trainer.buffer.set_rng(torch.Generator().manual_seed(seed))
        seen = []
        trainer.register_op("process_optim_batch", lambda batch, seen=seen: seen.append(batch.clone()))
        trainer.train()
        found.append(torch.cat([batch["observation"] for batch in seen]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_the_progress_bar_of_a_resumed_run_starts_where_the_run_stands(tmp_path, capsys):
    pytest.importorskip("tqdm")
    make_trainer(num_iterations=2, checkpoint_dir=tmp_path).train()
    trainer = make_trainer(num_iterations=3)
    trainer.progress_bar = True
    trainer.load_checkpoint(next(tmp_path.iterdir()))
    trainer.train()
    shown = capsys.readouterr().err
    assert "32/48" in shown and "48/48" in shown and "16/48" not in shown and "mean_reward" in shown


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 3}, "`gamma` must be between 0 and 1, got 3"),
        ({"lam": -0.1}, "`lam` must be between 0 and 1"),
        ({"num_mini_batches": 0}, "`num_mini_batches` must be at least 1, got 0"),
        ({"num_learning_epochs": 0}, "`num_learning_epochs` must be at least 1"),
        ({"clip_param": 0.0}, "`clip_param` must be positive"),
        ({"max_grad_norm": -1}, "`max_grad_norm` must be positive"),
        ({"learning_rate": math.nan}, "`learning_rate` must be positive, got nan"),
        ({"desired_kl": 0}, "`desired_kl` must be positive"),
        ({"entropy_coef": -1}, "`entropy_coef` must be zero or more"),
        ({"value_loss_coef": -1}, "`value_loss_coef` must be zero or more"),
        ({"num_mini_batches": 17}, r"holds 16 transitions \(4 steps x 4 environments\)"),
        ({"schedule": "cosine"}, "`schedule` must be one of"),
        ({"time_out": "never"}, "`time_out` must be one of"),
    ],
)
def test_a_config_out_of_range_is_refused_before_anything_is_collected(options, message):
    env = PendulumEnv(4, seed=0)
    with pytest.raises(ValueError, match=message):
        make_trainer(env, config=PPOConfig(**options))
    assert env.state is None


@pytest.mark.parametrize("options", [{"save_interval": 0}, {"keep_last": 0}])
def test_checkpoint_options_out_of_range_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*(at least 1|greater than zero)"):
        make_trainer(checkpoint_dir=tmp_path, **options)


def test_a_collector_without_our_buffer_is_told_what_to_pass():
    actor, critic = torchrl_networks(3, 1)
    stock = ReplayBuffer(storage=LazyTensorStorage(16))
    for buffer in (None, stock):
        collector = type("Stub", (), {"replay_buffer": buffer})()
        with pytest.raises(ValueError, match=r"replay_buffer is (NoneType|ReplayBuffer).*RolloutBuffer\("):
            RSLPPOTrainer(collector, actor, critic, total_frames=1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (("reward", 9, 2), r"\('next', 'reward'\) is nan at step 1 of environment 2 \(1 of 12 cells"),
        (("observation", 8, 0), r"'observation' is nan at step 1 of environment 0"),
    ],
)
def test_a_fault_of_an_environment_ends_training_in_one_sentence_and_leaves_the_checkpoint(
    tmp_path, fault, message
):
    env = Simulator([5, 3, 9], faults={fault: math.nan})
    trainer = make_trainer(env, num_iterations=5, checkpoint_dir=tmp_path, save_interval=1)
    whole = {}

    def remember():
        whole.update(tree(tmp_path))

    trainer.register_op("pre_optim_steps", remember)
    ours = trainer._pre_optim_ops
    ours.insert(0, ours.pop())  # before the advantages are computed
    with pytest.raises(ValueError, match=message) as caught:
        trainer.train()
    assert "\n" not in str(caught.value)
    assert trainer.num_iterations == 2
    assert whole and tree(tmp_path) == whole
    with pytest.warns(UserWarning, match="cannot save its state"):
        make_trainer(Simulator([5, 3, 9]), num_iterations=5).load_checkpoint(trainer.latest_checkpoint)


def test_a_policy_whose_std_is_not_a_number_is_named_in_the_first_iteration():
    trainer = make_trainer(PendulumEnv(4, seed=0))
    trainer.actor.std_param.data.fill_(math.nan)
    with pytest.raises(ValueError, match=r"^'action_log_prob' is nan at step 0 .*standard deviation"):
        trainer.train()
    assert trainer.num_iterations == 0


# -- checkpoints ---------------------------------------------------------------------------------


def tree(path: Path) -> dict[str, bytes | None]:
    """Everything under ``path``: the bytes of a file, None for a folder."""
    entries = sorted(path.rglob("*"))
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in entries}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with one checkpoint of a finished run."""
    folder = tmp_path_factory.mktemp("checkpoints")
    make_trainer(checkpoint_dir=folder, normalize_observations=True).train()
    return folder


@pytest.fixture
def checkpoint(trained, tmp_path):
    """A copy of that checkpoint, to be broken."""
    (source,) = trained.iterdir()
    return Path(shutil.copytree(source, tmp_path / source.name))


def loader(**kwargs) -> RSLPPOTrainer:
    return make_trainer(normalize_observations=True, seed=7, **kwargs)


def test_without_a_folder_no_checkpoint_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(save_interval=1)
    trainer.train()
    trainer.save_trainer(force_save=True)
    assert not list(tmp_path.iterdir()) and trainer.latest_checkpoint is None


def test_checkpoints_are_written_every_so_many_iterations_and_at_the_end_and_the_last_are_kept(tmp_path):
    written = []
    trainer = make_trainer(num_iterations=8, checkpoint_dir=tmp_path, save_interval=3, keep_last=2)
    trainer.register_op("pre_optim_steps", lambda: written.append(sorted(p.name for p in tmp_path.iterdir())))
    trainer.train()
    assert [len(names) for names in written] == [0, 0, 0, 1, 1, 1, 2, 2]
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["checkpoint-000000000096", "checkpoint-000000000128"]
    assert trainer.latest_checkpoint == tmp_path / names[-1]


def test_a_loaded_trainer_is_the_saved_one_in_every_number(checkpoint):
    trainer = loader()
    trainer.load_checkpoint(checkpoint)
    saved = make_trainer(normalize_observations=True)
    saved.train()
    for name, component in saved.checkpoint_components().items():
        ours = trainer.checkpoint_components()[name].state_dict()
        theirs = component.state_dict()
        if name == "trainer":
            assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
        elif name == "replay_buffer":
            assert ours["_writer"] == theirs["_writer"] and trainer.buffer.num_rows == 0
        elif name != "rng":
            assert plain(ours) == plain(theirs), name


def plain(value):
    """A state dict with lists in place of tensors, which compare with ``==``."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), *torch.nan_to_num(value.double(), nan=-12345.0).flatten().tolist()]
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def test_torchrls_own_checkpoint_class_reads_ours(checkpoint):
    trainer, actor = loader(), loader().actor
    trainer.load_checkpoint(checkpoint)
    assert not equal(parameters(actor), parameters(trainer.actor))
    Checkpoint(actor=actor).load(checkpoint)
    assert equal(parameters(actor), parameters(trainer.actor))


COMPONENTS = ("actor", "collector", "critic", "replay_buffer", "rng", "stepper", "trainer")


def payload(checkpoint: Path, component: str) -> Path:
    (file,) = checkpoint.glob(f"components/*-{component}/state.pt")
    return file


def refused(checkpoint: Path, match: str, trainer: RSLPPOTrainer | None = None) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        (trainer or loader()).load_checkpoint(checkpoint)
    message = str(caught.value)
    assert "\n" not in message and checkpoint.name in message and len(message) < 500


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_truncated_file_is_refused_in_one_sentence(checkpoint, component):
    file = payload(checkpoint, component)
    for size in (0, 1, file.stat().st_size // 2, file.stat().st_size - 1):
        os.truncate(file, size)
        refused(checkpoint, f"component '{component}'.*state.pt is broken, or holds more than tensors")


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_deleted_file_or_component_is_refused_in_one_sentence(checkpoint, component):
    file = payload(checkpoint, component)
    file.unlink()
    refused(checkpoint, f"component '{component}'.*state.pt is missing")
    file.parent.rmdir()
    refused(checkpoint, f"component '{component}'.*state.pt is missing")


@pytest.mark.parametrize(
    "manifest", [b"", b"garbage", b"\xff\x00\x80", b"[]", b"null", b"{}", b'{"format": "torchrl.checkpoint"}']
)
def test_a_garbage_manifest_is_refused_in_one_sentence(checkpoint, manifest):
    (checkpoint / "manifest.json").write_bytes(manifest)
    refused(checkpoint, "is not a checkpoint of this package: it has no valid manifest")


def test_a_manifest_that_leaves_a_component_out_or_points_elsewhere_is_refused(checkpoint):
    file = checkpoint / "manifest.json"
    text = file.read_text()
    file.write_text(text.replace('"critic"', '"critics"'))
    refused(checkpoint, r"missing=\['critic'\]")
    file.write_text(text.replace("components/0002-critic", "../0002-critic"))
    refused(checkpoint, "is not a checkpoint of this package")


@pytest.mark.parametrize("path", ["not there", "a file", "a folder"])
def test_what_is_no_checkpoint_is_refused_in_one_sentence(tmp_path, path):
    path = tmp_path / path
    if path.name == "a file":
        path.write_text("hello")
    elif path.name == "a folder":
        path.mkdir()
    refused(path, "is not a checkpoint of this package: it has no valid manifest")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_dims": (16,)}, r"'actor'.*does not fit: size mismatch for .*\[8, 3\].*\[16, 3\]"),
        ({"hidden_dims": (8, 8)}, "'actor'.*does not fit: "),
        ({"normalize_observations": False}, "'actor'.*does not fit: Unexpected key.*normalizer"),
        ({"env": PendulumEnv(5, seed=0)}, "'collector'.*count 4 environments over 100 episodes, these 5"),
    ],
    ids=str,
)
def test_the_checkpoint_of_another_kind_of_run_is_refused_in_one_sentence(checkpoint, options, message):
    refused(checkpoint, message, make_trainer(**{"normalize_observations": True, **options}))


class Intruder:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.write_text, (self.mark, "the code of a stranger was run"))


@pytest.mark.parametrize("name", [*(f"components/*-{c}/state.pt" for c in COMPONENTS), "manifest.json"])
@pytest.mark.parametrize("form", ["pickle", "torch", "torch state"])
def test_code_hidden_in_a_checkpoint_is_refused_and_never_run(checkpoint, tmp_path, name, form):
    mark = tmp_path / "mark"
    (file,) = checkpoint.glob(name)
    if form == "pickle":
        file.write_bytes(pickle.dumps(Intruder(mark)))
    elif form == "torch":
        torch.save(Intruder(mark), file)
    else:
        known = torch.load(file, weights_only=False) if name.endswith(".pt") else {}
        torch.save({**known, "extra": Intruder(mark)}, file)
    refused(checkpoint, "is broken, or holds more than tensors|no valid manifest")
    assert not mark.exists()
    pickle.loads(pickle.dumps(Intruder(mark)))  # the trap itself works
    assert mark.exists()


def test_torchrls_memory_mapped_payload_in_which_pickles_hide_is_not_read(checkpoint, tmp_path):
    mark = tmp_path / "mark"
    file = payload(checkpoint, "actor")
    file.unlink()
    TensorDict({"trap": NonTensorData(Intruder(mark))}).memmap(file.parent / "state")
    (file.parent / "state.json").write_text('{"kind": "dict", "items": []}')
    refused(checkpoint, "state.pt is missing")
    assert not mark.exists()
    with pytest.warns(FutureWarning, match="loading a pickled non-tensor field"):
        tensordict.load(file.parent / "state")
    assert mark.exists()  # which is why


def test_the_latest_checkpoint_is_the_newest_whole_one(checkpoint):
    folder = checkpoint.parent
    trainer = loader(checkpoint_dir=folder)
    (folder / "checkpoint-000000000999").mkdir()  # no manifest
    (folder / "checkpoint-best").mkdir()
    (folder / ".checkpoint-000000000998.stage-abc").mkdir()
    assert trainer.latest_checkpoint == checkpoint
    for manifest in ("garbage", "[]"):
        (folder / "checkpoint-000000000999" / "manifest.json").write_text(manifest)
        assert trainer.latest_checkpoint == checkpoint


def test_a_folder_of_broken_checkpoints_only_is_not_taken_for_an_empty_one(checkpoint):
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=f"No checkpoint in .* is whole \\({checkpoint.name}"):
        _ = loader(checkpoint_dir=checkpoint.parent).latest_checkpoint


def test_a_stock_collector_trains_on_from_a_checkpoint(tmp_path):
    first = stock_trainer(checkpoint_dir=tmp_path, total_frames=32)
    first.train()
    second = stock_trainer()
    with pytest.warns(UserWarning, match="TorchRL's Collector does not save its environment"):
        second.load_checkpoint(first.latest_checkpoint)
    assert equal(parameters(second.actor, second.critic), parameters(first.actor, first.critic))
    second.train()
    assert (second.collected_frames, second.num_iterations, second.optim_count) == (48, 3, 12)


def test_a_checkpoint_that_lacks_parts_is_refused_in_one_sentence(tmp_path):
    trainer = make_trainer()
    Checkpoint(actor=trainer.actor).save(tmp_path / "checkpoint-1")
    refused(tmp_path / "checkpoint-1", r"missing=\['collector', 'critic'", trainer)


def test_an_actor_that_does_not_collect_is_refused():
    env = PendulumEnv(num_envs=4, seed=0)
    actor, critic = MLPActor.for_env(env, hidden_dims=(4,)), MLPCritic.for_env(env, hidden_dims=(4,))
    collector = RolloutCollector(env, ActorCritic(actor, critic), replay_buffer=RolloutBuffer(4, 4))
    other = MLPActor.for_env(env, hidden_dims=(4,))
    with pytest.raises(ValueError, match="not the one that collects"):
        RSLPPOTrainer(collector, other, critic, total_frames=16, progress_bar=False)
    with pytest.raises(ValueError, match="`total_frames` must be at least 1, got 0"):
        RSLPPOTrainer(collector, actor, critic, total_frames=0, progress_bar=False)
