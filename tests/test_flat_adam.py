"""FlatAdam against torch.optim.Adam and clip_grad_norm_, over the very same networks."""

import copy

import pytest
import torch
from torch import nn

from torchrl_rslstorage.trainers.flat_adam import FlatAdam

RATE = torch.tensor(0.01, dtype=torch.float64)


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), nn.Linear(3, 1)


def parameters(*modules: nn.Module) -> list[list[nn.Parameter]]:
    return [list(module.parameters()) for module in modules]


def loss(modules, step: int) -> torch.Tensor:
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(step))
    return sum(100 * module(x).square().mean() for module in modules)


def reference_steps(modules, steps: range, optimizer=None):
    optimizer = optimizer or torch.optim.Adam([p for m in modules for p in m.parameters()], lr=RATE.item())
    for step in steps:
        optimizer.zero_grad()
        loss(modules, step).backward()
        for module in modules:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return optimizer


def flat_steps(modules, steps: range, optimizer=None):
    optimizer = optimizer or FlatAdam(parameters(*modules), RATE.clone())
    for step in steps:
        optimizer.zero_grad()
        loss(modules, step).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return optimizer


def assert_close(mine, theirs):
    for module, other in zip(mine, theirs, strict=True):
        for p, q in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_steps_are_those_of_adam_with_each_network_clipped_on_its_own():
    mine, theirs = networks(), networks()
    flat_steps(mine, range(20))
    reference_steps(theirs, range(20))
    assert_close(mine, theirs)


def test_its_state_dict_is_adams_and_either_goes_on_from_the_others():
    mine, theirs = networks(), networks()
    flat, adam = flat_steps(mine, range(5)), reference_steps(theirs, range(5))
    assert flat.state_dict()["param_groups"][0]["params"] == adam.state_dict()["param_groups"][0]["params"]
    for number, entry in adam.state_dict()["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(flat.state_dict()["state"][number][name], value, rtol=1e-5, atol=1e-7)
    saved_flat, saved_adam = copy.deepcopy(flat.state_dict()), copy.deepcopy(adam.state_dict())
    flat.load_state_dict(saved_adam)
    adam.load_state_dict(saved_flat)
    flat_steps(mine, range(5, 9), flat)
    reference_steps(theirs, range(5, 9), adam)
    assert_close(mine, theirs)


def test_modules_keep_their_own_state_dict_and_load_into_the_buffer():
    mine = networks()
    flat = FlatAdam(parameters(*mine), RATE.clone())
    assert mine[0].state_dict().keys() == networks()[0].state_dict().keys()
    mine[0].load_state_dict({name: torch.ones_like(p) for name, p in mine[0].state_dict().items()})
    assert (flat.state[0][: sum(p.numel() for p in mine[0].parameters())] == 1).all()
    flat.check_in_place()


def test_parameters_that_both_networks_share_count_in_both_norms():
    def shared():
        torch.manual_seed(1)
        trunk = nn.Linear(3, 4)
        return nn.Sequential(trunk, nn.Linear(4, 2)), nn.Sequential(trunk, nn.Linear(4, 1))

    mine, theirs = shared(), shared()
    flat = FlatAdam(parameters(*mine), RATE.clone())
    adam = torch.optim.Adam(dict.fromkeys(p for m in theirs for p in m.parameters()), lr=RATE.item())
    flat_steps(mine, range(6), flat)
    reference_steps(theirs, range(6), adam)
    assert_close(mine, theirs)


def test_parameters_that_do_not_learn_stay_where_they_are():
    mine = networks()
    frozen = mine[1].bias
    frozen.requires_grad_(False)
    before = frozen.clone()
    flat_steps(mine, range(3))
    assert torch.equal(frozen, before)


def test_a_gradient_that_somebody_dropped_is_taken_back():
    mine, theirs = networks(), networks()
    flat = flat_steps(mine, range(1))
    mine[0].zero_grad(set_to_none=True)
    flat_steps(mine, range(1, 3), flat)
    reference_steps(theirs, range(3))
    assert_close(mine, theirs)


def test_the_traceable_step_equals_the_eager_one():
    mine, theirs = networks(), networks()
    flat, eager = FlatAdam(parameters(*mine), RATE.clone()), FlatAdam(parameters(*theirs), RATE.clone())
    for step in range(5):
        for optimizer, modules in ((flat, mine), (eager, theirs)):
            optimizer.zero_grad()
            loss(modules, step).backward()
        flat.clip_and_step_(flat._gradient.clone(), 1.0, RATE)
        eager.clip_grad_norm_(1.0)
        eager.step()
    assert_close(mine, theirs)


def test_a_network_that_was_cast_afterwards_is_refused():
    mine = networks()
    flat = FlatAdam(parameters(*mine), RATE.clone())
    mine[0].double()
    with pytest.raises(RuntimeError, match="replaced after its optimiser was made"):
        flat.zero_grad()


def test_nothing_to_optimise_mixed_dtypes_and_foreign_states_are_refused():
    with pytest.raises(ValueError, match="nothing to optimise"):
        FlatAdam([[], []], RATE.clone())
    with pytest.raises(ValueError, match="one dtype and device"):
        FlatAdam(parameters(nn.Linear(2, 1), nn.Linear(2, 1).double()), RATE.clone())
    flat = FlatAdam(parameters(nn.Linear(2, 1)), RATE.clone())
    foreign = FlatAdam(parameters(nn.Linear(3, 1)), RATE.clone()).state_dict()
    with pytest.raises(ValueError, match="parameters of shapes"):
        flat.load_state_dict(foreign)
