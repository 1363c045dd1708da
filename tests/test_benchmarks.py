"""The benchmarks run, are fed alike, and report what they promise.

Figures are not judged here: a machine that runs tests is busy.
"""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import benchmarks  # noqa: E402 - found from a checkout only
from benchmarks import (  # noqa: E402
    bench_bridge,
    bench_distillation,
    bench_gae,
    bench_history,
    bench_iteration,
    bench_loss,
    bench_memory,
    bench_mini_batches,
    bench_recurrent,
    bench_write,
    contenders,
    harness,
    report,
)
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.harness import MEMCPY, OURS, RSL_RL, TORCHRL, Contender, Row, Settings, Timing  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRL's, of its future

CPU = torch.device("cpu")
TINY = harness.parse_shape("8x4", [8])
WITH_CRITIC = dataclasses.replace(TINY, groups={"policy": 5, "critic": 7})
SUBJECTS = {
    bench_write: {"write": {OURS, RSL_RL, TORCHRL, MEMCPY}},
    bench_mini_batches: {
        "mini_batches": {OURS, RSL_RL, TORCHRL, MEMCPY},
        "mini_batches_reshuffled": {OURS, RSL_RL, TORCHRL, MEMCPY},
    },
    bench_gae: {
        "gae": {OURS, RSL_RL, TORCHRL, MEMCPY, "ours_checked", "torchrl_vectorized"},
        "gae_recursion": {OURS, RSL_RL, TORCHRL, MEMCPY, "torchrl_vectorized"},
    },
    bench_loss: {
        "loss_forward": {OURS, RSL_RL, TORCHRL, "ours_terms", "bare_formula"},
        "update": {OURS, RSL_RL, TORCHRL},
    },
    bench_iteration: {"iteration": {OURS, RSL_RL, TORCHRL}},
    bench_history: {
        "history_append": {OURS, TORCHRL, MEMCPY, "torchrl_extend"},
        "history_at_age": {OURS, TORCHRL, MEMCPY, "ours_one_age"},
        "history_mini_batches": {OURS, TORCHRL, MEMCPY, "ours_partly_reset", "ours_one_draw"},
    },
    bench_recurrent: {
        "recurrent_mini_batches": {OURS, RSL_RL, TORCHRL, MEMCPY},
        "recurrent_update": {OURS, RSL_RL},
    },
    bench_distillation: {
        "distillation": {OURS, RSL_RL},
        "distillation_recurrent": {OURS, RSL_RL},
    },
    bench_bridge: {
        name: {OURS, RSL_RL} for name in (*bench_bridge.SUBJECTS, *bench_bridge.RECURRENT_SUBJECTS)
    },
}


def settings(**options) -> Settings:
    return Settings(**{"shapes": ["8x4"], "rounds": 1, "hidden_dims": [8], **options})


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.__name__)
def test_every_contender_of_every_subject_takes_a_finite_positive_time(subject):
    with harness.quiet():
        rows = list(subject.run(settings(rounds=2)))
    assert {row.subject: set(row.timings) for row in rows} == SUBJECTS[subject]
    for row in rows:
        for timing in row.timings.values():
            assert 0 < timing.q1 <= timing.median <= timing.q3 < math.inf
            assert timing.rounds == 2


# -- measuring ---------------------------------------------------------------------------------------


def test_contenders_run_in_turns_and_each_begins_a_round():
    order = []

    def contender(name):
        def run():
            time.sleep(0.003)  # long enough to be a sample by itself
            order.append(name)

        return Contender(name, run)

    harness.measure([contender(name) for name in "abc"], settings(rounds=4))
    warm_up, rounds = order[:9], order[9:]
    assert warm_up == list("aaabbbccc")
    assert rounds == list("abcbcacababc")


def test_preparing_is_not_timed():
    prepared = Contender("prepared", lambda: None, prepare=lambda: time.sleep(0.003))
    timings = harness.measure([prepared], settings())
    assert timings["prepared"].median < 1.0  # ms


def test_short_runs_are_timed_many_at_a_time():
    count = 0

    def run():
        nonlocal count
        count += 1

    harness.measure([Contender("short", run)], settings(rounds=1))
    assert count > 50


def test_the_memcpy_bound_copies_every_byte():
    copy = harness.memcpy(1000, CPU)
    copy.run()
    source, target = (
        cell.cell_contents for cell in copy.run.__closure__ if torch.is_tensor(cell.cell_contents)
    )
    assert source.nbytes == 1000
    assert torch.equal(source, target)


@pytest.mark.parametrize(
    ("text", "label"), [("xs", "XS (16 x 16)"), ("L", "L (24 x 4096)"), ("64x1024", "64 x 1024")]
)
def test_shapes_have_names_or_numbers(text, label):
    assert harness.parse_shape(text).label == label


@pytest.mark.parametrize("text", ["XXL", "0x4", "4x", "1x3"])
def test_a_shape_that_cannot_be_is_refused_in_words(text, capsys):
    with pytest.raises(SystemExit):
        main(["gae", "--shape", text])
    assert text in capsys.readouterr().err


# -- the same work on the same data ------------------------------------------------------------------


def test_all_sides_hold_the_same_rollout():
    rollout = contenders.make_rollout(WITH_CRITIC, CPU)
    window = contenders.our_buffer(WITH_CRITIC, rollout, keys=["action"]).window
    storage = contenders.rsl_rl_storage(WITH_CRITIC, rollout)
    batch = contenders.torchrl_batch(rollout).transpose(0, 1)
    for key in WITH_CRITIC.groups:
        assert torch.equal(window[key], storage.observations[key])
        assert torch.equal(window[key], batch[key])
        assert torch.equal(rollout["next", key], batch["next", key])
    for key, theirs in {
        "action": storage.actions,
        "loc": storage.distribution_params[0],
        "scale": storage.distribution_params[1],
        ("next", "reward"): storage.rewards,
        ("next", "done"): storage.dones.bool(),
    }.items():
        assert torch.equal(window[key], theirs)
        assert torch.equal(window[key], batch[key])
    assert torch.equal(window["state_value"], storage.values)
    assert torch.equal(window["action_log_prob"], storage.actions_log_prob.squeeze(-1))


def test_torchrls_batch_is_what_its_collector_yields():
    shape = bench_iteration.pendulum(TINY)
    with harness.quiet():
        collected = next(bench_iteration.TorchRLIteration(shape, CPU).batches)
    made = contenders.torchrl_batch(contenders.make_rollout(shape, CPU))

    def layout(batch, observation):
        names = {key: observation if key == "policy" else key for key in batch.keys()}
        root = {names[key]: batch[key] for key in batch.keys() if key not in ("next", "collector")}
        after = {f"next {names.get(key, key)}": value for key, value in batch["next"].items()}
        entries = {**root, **after, "traj_ids": batch["collector", "traj_ids"]}
        return {key: (tuple(value.shape), value.dtype) for key, value in entries.items()}

    assert layout(made, "observation") == layout(collected, "observation")


@pytest.mark.parametrize("student", ["mlp", "lstm"])
def test_both_distil_the_same_student_on_the_same_window(student):
    with harness.quiet():
        shape = dataclasses.replace(harness.parse_shape("24x4", [8]), hidden_dims=(8,))
        rollout = bench_distillation.distillation_rollout(shape, student, CPU)
        ours = bench_distillation.OurPass(shape, student, rollout)
        theirs = bench_distillation.RSLRLPass(shape, student, rollout, ours.student)
        assert ours() == pytest.approx(theirs(), rel=1e-5)
    for a, b in zip(ours.student.mlp.parameters(), theirs.student.mlp.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_ours_and_rsl_rls_mini_batches_weigh_the_same():
    rollout = contenders.make_rollout(WITH_CRITIC, CPU)
    keys = contenders.our_loss(*contenders.our_networks(WITH_CRITIC, CPU)).in_keys
    buffer = contenders.our_buffer(WITH_CRITIC, rollout, keys=keys)
    for key in ("advantage", "value_target"):
        buffer.storage.derived(key)
    theirs = next(contenders.rsl_rl_storage(WITH_CRITIC, rollout).mini_batch_generator(4))
    fields = (theirs.actions, theirs.values, theirs.advantages, theirs.returns, theirs.old_actions_log_prob)
    parts = (*theirs.observations.values(), *fields, *theirs.old_distribution_params)
    assert harness.nbytes(next(iter(buffer)).values()) == harness.nbytes(parts)


@pytest.mark.parametrize("shape", [TINY, WITH_CRITIC], ids=["one group", "two groups"])
def test_all_sides_evaluate_the_same_networks(shape):
    with harness.quiet():
        sides = contenders.Updates(shape, CPU)
    rollout = sides.rollout.select(*shape.groups).reshape(-1)
    ours, theirs, torchrl = sides.ours.loss, sides.rsl_rl.ppo, sides.torchrl.loss
    with torch.no_grad():
        loc = ours.actor_network.get_dist(rollout).loc
        value = ours.critic_network.evaluate(rollout)
        assert torch.allclose(loc, theirs.actor(rollout), atol=1e-6)
        assert torch.allclose(value, theirs.critic(rollout), atol=1e-6)
        with torchrl.actor_network_params.to_module(torchrl.actor_network):
            dist = torchrl.actor_network.get_dist(rollout.clone())
        with torchrl.critic_network_params.to_module(torchrl.critic_network):
            assert torch.allclose(value, torchrl.critic_network(rollout.clone())["state_value"], atol=1e-6)
    assert torch.allclose(loc, dist.base_dist.loc, atol=1e-6)
    assert torch.allclose(dist.base_dist.scale, torch.ones_like(loc))
    acted = sides.rollout["loc"].reshape_as(loc)
    assert torch.allclose(loc, acted, atol=1e-6)


def test_the_bare_formula_and_rsl_rls_lines_are_our_loss():
    with harness.quiet():
        sides = contenders.Updates(TINY, CPU)
    ours = sides.ours
    ours.gae(ours.buffer)
    batch = next(iter(ours.buffer))
    ours.restore()
    terms = ours.loss.terms(batch)
    total = sum(value for name, value in terms.items() if name.startswith("loss_"))
    bare, kl = bench_loss.bare_formula(ours.loss.actor_network, ours.loss.critic_network, batch)
    assert torch.allclose(total, bare)
    assert torch.allclose(terms["kl"], kl, atol=1e-7)

    storage = sides.rsl_rl.ppo.storage
    batch_of_theirs = storage.Batch(
        observations=batch.select("policy"),
        actions=batch["action"],
        values=batch["state_value"],
        advantages=batch["advantage"],
        returns=batch["value_target"],
        old_actions_log_prob=batch["action_log_prob"].unsqueeze(-1),
        old_distribution_params=(batch["loc"], batch["scale"]),
    )
    theirs, _ = bench_loss.rsl_rl_loss(sides.rsl_rl.ppo, batch_of_theirs)
    assert torch.allclose(total, theirs)


def test_every_update_begins_at_the_same_weights():
    with harness.quiet():
        sides = contenders.Updates(TINY, CPU)
        for update, run in (
            (sides.ours, sides.ours),
            (sides.rsl_rl, sides.rsl_rl),
            (sides.torchrl, lambda: sides.torchrl(sides.batch.clone(recurse=False))),
        ):
            module = update.ppo.actor if update is sides.rsl_rl else update.loss
            before = [p.detach().clone() for p in module.parameters()]
            run()
            assert not all(map(torch.equal, before, module.parameters()))
            update.restore()
            assert all(map(torch.equal, before, module.parameters()))


def test_rsl_rls_pendulums_are_ours():
    ours = bench_iteration.PendulumEnv(4, seed=3, max_episode_steps=200)
    theirs = bench_iteration.PendulumVecEnv(4, CPU, seed=3)
    carrier = ours.reset()
    assert torch.equal(carrier["observation"], theirs.get_observations()["policy"])
    for _ in range(210):
        action = torch.randn(4, 1)
        stepped, carrier = ours.step_and_maybe_reset(carrier.set("action", action))
        observations, reward, done, extras = theirs.step(action)
        assert torch.equal(carrier["observation"], observations["policy"])
        assert torch.equal(stepped["next", "reward"].squeeze(-1), reward)
        assert torch.equal(stepped["next", "done"].squeeze(-1), done)
        assert torch.equal(stepped["next", "truncated"].squeeze(-1), extras["time_outs"])


def test_our_iteration_goes_on_where_it_stopped():
    iteration = bench_iteration.OurIteration(bench_iteration.pendulum(TINY), CPU)
    for _ in range(3):
        iteration()
    assert iteration.trainer.num_iterations == 3
    assert iteration.trainer.collected_frames == 3 * TINY.num_cells


# -- memory ------------------------------------------------------------------------------------------


def test_the_peak_counts_what_was_held_at_once():
    def run():
        for _ in range(3):
            torch.ones(1000, dtype=torch.uint8)
        kept = torch.ones(500, dtype=torch.uint8)
        return kept + torch.ones(500, dtype=torch.uint8)

    assert 1500 <= bench_memory.peak_bytes(run, CPU) < 1700


def test_mini_batches_take_one_copy_of_what_the_loss_reads():
    with harness.quiet():
        row = bench_memory.mini_batches_row(harness.parse_shape("16x64", [8]), CPU)
    assert row.bound_mib is not None
    # The permutation, 8 bytes a transition, comes on top; observations here are only 17 numbers.
    assert row.bound_mib <= row.mib[OURS] <= 1.15 * row.bound_mib


# -- the reports -------------------------------------------------------------------------------------


def test_one_run_leaves_table_json_and_picture(tmp_path, capsys):
    files = ["--json", str(tmp_path / "b.json"), "--png", str(tmp_path / "b.png")]
    few = ["--shape", "8x4", "--rounds", "1", "--hidden", "8", "--iterations", "2", "--goals", "--markdown"]
    rows = main(["write", "mini_batches", "memory", *few, *files])
    out = capsys.readouterr().out
    for word in ("| ours |", "rsl-rl-lib / ours", "TorchRL / ours", "ours / memcpy", "rsl-rl-lib 5.5.1"):
        assert word in out
    content = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert content["machine"]["threads"] == 1
    assert {"torch", "torchrl", "rsl-rl-lib", "torchrl-rslstorage"} <= set(content["versions"])
    assert [row["subject"] for row in content["rows"]] == ["write", "mini_batches", "mini_batches_reshuffled"]
    for row in content["rows"]:
        assert row["shape"] == "8x4"
        for name in ("ours", "rsl_rl_lib", "torchrl", "memcpy"):
            assert 0 < row[f"{name}_ms"] < math.inf
            low, high = row["quartiles_ms"][name]
            assert low <= row[f"{name}_ms"] <= high
    assert {row["subject"] for row in content["memory"]} == {
        "memory_mini_batches",
        "memory_update",
        "memory_growth",
    }
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert len(rows) == 6


def row(subject: str, shape: str, **ms: float) -> Row:
    return Row(subject, harness.parse_shape(shape), {k: Timing(v, v, v, 1) for k, v in ms.items()})


def test_ratios_say_how_many_times_longer_the_others_take():
    rows = [row("gae", "L", ours=2.0, ours_compiled=1.0, rsl_rl_lib=6.0, torchrl=8.0, memcpy=1.0)]
    header, cells = report.time_cells(rows)
    named = dict(zip(header, cells, strict=True))
    assert named["rsl-rl-lib / ours"] == "3.00x, compiled 6.00x"
    assert named["TorchRL / ours"] == "4.00x, compiled 8.00x"
    assert named["ours / memcpy"] == "2.00x"


def test_the_cost_per_transition_is_compared_at_xl_and_m():
    shapes = {name: harness.parse_shape(name) for name in ("M", "XL")}
    cells = shapes["XL"].num_cells / shapes["M"].num_cells
    (line,) = report.cost_per_transition([row("gae", "M", ours=1.0), row("gae", "XL", ours=1.2 * cells)])
    assert line.endswith("1.20x")


def test_very_large_shapes_are_ours_alone():
    assert harness.parse_shape("XL").ours_alone
    assert not harness.parse_shape("L").ours_alone


def test_the_folder_runs_by_its_path(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rslstorage bench", "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(Path(benchmarks.__file__).parent / "__main__.py"), run_name="__main__")
    assert stopped.value.code == 0
    assert "--device" in capsys.readouterr().out


def test_every_goal_names_a_subject_and_a_shape():
    for subject, shape in report.GOALS:
        assert subject in report.TITLES
        assert harness.parse_shape(shape.partition(",")[0])  # recurrent rows add their rate of done
