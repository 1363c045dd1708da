"""Exported policies act as the policy they were made of, step after step, in runtimes nobody here wrote."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rsl_rl.models import MLPModel, RNNModel
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs import ExplorationType, set_exploration_type

from torchrl_rslstorage import MLPActor, MLPCritic, PolicyStep, RNNActor, export_policy

F, A, STEPS = 5, 3, 100
GROUPS = {"policy": 3, "heights": 2}
Tensors = tuple[Tensor, ...]
kinds = pytest.mark.parametrize("kind", ["mlp", "gru", "lstm"])
endings = pytest.mark.parametrize("ending", [".onnx", ".pt2", ".pt"])


def make_actor(kind: str, **options: Any) -> Any:
    """An actor with a normaliser that has seen something."""
    torch.manual_seed(0)
    options = {"hidden_dims": (32, 16), "normalize_observations": True, **options}
    if kind == "mlp":
        actor = MLPActor(list(GROUPS), F, A, **options)
    else:
        rnn = {"rnn_type": kind, "rnn_hidden_dim": 12, "rnn_num_layers": 2}
        actor = RNNActor(list(GROUPS), F, A, **rnn, **options)
    actor.update_normalizer(observe(50).unsqueeze(0))
    return actor


def observe(batch: int) -> TensorDict:
    return TensorDict({name: 3 * torch.randn(batch, width) + 1 for name, width in GROUPS.items()}, [batch])


def concatenated(td: TensorDict) -> Tensor:
    return torch.cat([td[name] for name in GROUPS], -1)


def runs(file: Path, step: PolicyStep) -> Callable[[Tensors], Tensors]:
    """The file as a function of tensors, in the runtime that it is for."""
    if file.suffix == ".onnx":
        ort = pytest.importorskip("onnxruntime", reason="onnxruntime is missing")
        session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        assert [i.name for i in session.get_inputs()] == step.input_names
        assert [o.name for o in session.get_outputs()] == step.output_names

        def run(inputs: Tensors) -> Tensors:
            named = dict(zip(step.input_names, (x.numpy() for x in inputs), strict=True))
            return tuple(torch.from_numpy(x) for x in session.run(None, named))

        return run
    if file.suffix == ".pt2":
        module = torch.export.load(file).module()
    else:
        with pytest.deprecated_call():
            module = torch.jit.load(file)

    def call(inputs: Tensors) -> Tensors:
        with torch.no_grad():
            out = module(*inputs)
        return out if isinstance(out, tuple) else (out,)

    return call


def require(ending: str) -> None:
    if ending == ".onnx":
        pytest.importorskip("onnx", reason="onnx is missing")
        pytest.importorskip("onnxscript", reason="onnxscript is missing")


def largest_difference(actor: Any, run: Callable[[Tensors], Tensors], batch: int) -> float:
    """Of actions and states over 100 steps, in which episodes start anew here and there."""
    step = PolicyStep(actor)
    states = step.example(batch)[1:]
    carried: dict[Any, Tensor] = {}
    worst = 0.0
    actor.eval()
    torch.manual_seed(1)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        for t in range(STEPS):
            td = observe(batch)
            starts = torch.rand(batch, 1) < 0.05 if t else torch.ones(batch, 1, dtype=torch.bool)
            td["is_init"] = starts
            td.update({key[1:]: value for key, value in carried.items()})
            actor(td)
            states = tuple(s.masked_fill(starts.view(1, -1, 1), 0.0) for s in states)
            actions, *states = run((concatenated(td), *states))
            worst = max(worst, float((actions - td["action"]).abs().max()))
            if states:
                carried = {key: td[key] for key in actor.core.next_state_keys}
                for mine, theirs in zip(carried.values(), states, strict=True):
                    worst = max(worst, float((mine.transpose(0, 1) - theirs).abs().max()))
    return worst


@endings
@kinds
def test_an_exported_policy_equals_the_policy_over_a_hundred_steps(kind, ending, tmp_path):
    require(ending)
    actor = make_actor(kind)
    file = export_policy(actor, tmp_path / f"policy{ending}")
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "one file, weights inside"
    run = runs(file, PolicyStep(actor))
    for batch in (1, 2, 7):
        assert largest_difference(actor, run, batch) < 1e-5


def test_the_comparison_notices_a_policy_without_its_normaliser(tmp_path):
    actor = make_actor("gru")
    file = export_policy(actor, tmp_path / "policy.pt2")
    run = runs(file, PolicyStep(actor))
    actor.normalizer = None
    assert largest_difference(actor, run, 2) > 1e-2


@pytest.mark.parametrize("activation", ["celu", "gelu", "silu", "mish"])
def test_activations_that_onnx_composes_are_exported(activation, tmp_path):
    require(".onnx")
    actor = make_actor("mlp", activation=activation, normalize_observations=False, std_type="log")
    run = runs(export_policy(actor, str(tmp_path / "policy.onnx")), PolicyStep(actor))
    assert largest_difference(actor, run, 3) < 1e-5


@kinds
def test_inputs_and_outputs_are_those_of_rsl_rls_exporter(kind):
    step = PolicyStep(make_actor(kind))
    groups = {"actor": list(GROUPS)}
    gaussian = {"class_name": "GaussianDistribution"}
    rnn = {"rnn_type": kind, "rnn_hidden_dim": 12, "rnn_num_layers": 2} if kind != "mlp" else {}
    model = RNNModel if rnn else MLPModel
    theirs = model(observe(1), groups, "actor", A, distribution_cfg=gaussian, **rnn).as_onnx(verbose=False)
    assert (step.input_names, step.output_names) == (theirs.input_names, theirs.output_names)
    ours, dummies = step.example(), theirs.get_dummy_inputs()
    assert [x.shape for x in ours] == [x.shape for x in dummies]


def test_exporting_leaves_the_actor_as_it_was(tmp_path):
    actor = make_actor("lstm").double().train()
    before = {name: value.clone() for name, value in actor.state_dict().items()}
    file = export_policy(actor, tmp_path / "policy.pt2")
    step = PolicyStep(actor)
    assert runs(file, step)(step.example(3))[0].dtype == torch.float64
    assert actor.training and all(p.requires_grad for p in actor.parameters())
    assert all(torch.equal(value, before[name]) for name, value in actor.state_dict().items())


def test_what_cannot_be_exported_is_refused_in_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"exported to \.onnx, \.pt, \.pt2, got 'policy\.tflite'"):
        export_policy(make_actor("mlp"), tmp_path / "policy.tflite")
    with pytest.raises(ValueError, match="exported from MLPActor and RNNActor, got MLPCritic"):
        export_policy(MLPCritic(["policy"], 3), tmp_path / "policy.pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install torchrl-rslstorage\[onnx\]"):
        export_policy(make_actor("mlp"), tmp_path / "policy.onnx")
    assert not list(tmp_path.iterdir())


def test_a_recurrent_policy_of_float64_is_refused_by_onnx_whose_runtime_has_none(tmp_path):
    require(".onnx")
    actor = RNNActor(["policy"], 3, 2, rnn_hidden_dim=4).double()
    with pytest.raises(ValueError, match=r"no LSTM or GRU of float64: export .*float\(\), or write \.pt2"):
        export_policy(actor, tmp_path / "policy.onnx")
    assert not list(tmp_path.iterdir())
    policy = torch.export.load(export_policy(actor, tmp_path / "policy.pt2")).module()
    assert policy(*PolicyStep(actor).example(batch=3))[0].dtype is torch.float64
