"""The compiled optimisation step: the same numbers up to rounding, and a way back where there is none."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_rslstorage import KLAdaptiveStepper, MLPActor, MLPCritic, RSLPPOLoss


def problem(seed: int = 0) -> tuple[MLPActor, MLPCritic, RSLPPOLoss, list[TensorDict]]:
    torch.manual_seed(seed)
    actor = MLPActor(["obs"], 3, 2, hidden_dims=(8,), normalize_observations=True)
    critic = MLPCritic(["obs"], 3, hidden_dims=(8,))
    batches = []
    for size in (6, 6, 5):
        with torch.no_grad():
            batch = critic(actor(TensorDict({"obs": torch.randn(size, 3)}, [size])))
        batch["advantage"], batch["value_target"] = torch.randn(size, 1), torch.randn(size, 1)
        batches.append(batch)
    return actor, critic, RSLPPOLoss(actor, critic), batches


def train(compile: bool, epochs: int = 3) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    actor, critic, loss, batches = problem()
    stepper = KLAdaptiveStepper(actor, critic, compile=compile)
    metrics = [stepper.update(loss, batch) for _ in range(epochs) for batch in batches]
    assert stepper.metric_names == list(loss.out_keys)
    networks: list[nn.Module] = [actor, critic]
    parameters = [p.detach().clone() for network in networks for p in network.parameters()]
    return parameters, stepper.learning_rate, torch.stack(metrics)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch 2.13's own compiler uses it
def test_a_compiled_step_makes_the_eager_numbers_up_to_rounding():
    eager, eager_rate, eager_metrics = train(compile=False)
    compiled, rate, metrics = train(compile=True)
    for p, q in zip(compiled, eager, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(metrics, eager_metrics, rtol=1e-3, atol=1e-5)
    assert torch.equal(rate, eager_rate)
    assert eager_rate != 1e-3, "the learning rate was adapted at all"


def test_where_compiling_fails_training_goes_on_without_it_and_says_so_once(monkeypatch):
    def broken(function, **options):
        def call(*args):
            raise RuntimeError("the backend raised:\nno C++ compiler\nand more lines")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.warns(UserWarning, match=r"not possible here.*raised: no C\+\+ compiler$") as warned:
        fallen_back = train(compile=True)
    assert len(warned) == 1
    for p, q in zip(fallen_back[0], train(compile=False)[0], strict=True):
        assert torch.equal(p, q)


def test_a_fault_in_the_mini_batch_is_the_users_to_see_and_not_taken_for_one_of_the_compiler():
    actor, critic, loss, batches = problem()
    with pytest.raises(KeyError, match="'advantage'"):
        KLAdaptiveStepper(actor, critic, compile=True).update(loss, batches[0].exclude("advantage"))


def test_a_loss_with_a_forward_of_its_own_is_the_one_that_is_optimised():
    class Doubled(RSLPPOLoss):
        def forward(self, tensordict):
            losses = RSLPPOLoss.forward(self, tensordict)
            return losses.set("loss_critic", 2 * losses["loss_critic"])

    class Plain(RSLPPOLoss):
        """Inherits everything."""

    actor, critic, loss, batches = problem()
    number = list(loss.out_keys).index("loss_critic")
    expected = loss.terms(batches[0])["loss_critic"].detach()
    for kind, factor in ((Plain, 1), (Doubled, 2)):
        actor, critic, _, batches = problem()
        metrics = KLAdaptiveStepper(actor, critic).update(kind(actor, critic), batches[0])
        torch.testing.assert_close(metrics[number], factor * expected)


def test_a_compiled_step_follows_a_change_of_the_loss(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    actor, critic, loss, batches = problem()
    number = list(loss.out_keys).index("loss_entropy")
    stepper = KLAdaptiveStepper(actor, critic, compile=True)
    assert stepper.update(loss, batches[0])[number] != 0
    assert stepper.update(RSLPPOLoss(actor, critic, entropy_coeff=0.0), batches[0])[number] == 0
