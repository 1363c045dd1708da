"""The loss of one mini-batch, and one whole update of 20 of them.

*Loss forward* at the shape's mini-batch size (64 at XS): `RSLPPOLoss`; the lines of rsl-rl-lib's
``PPO.update`` up to its loss, which has no function of its own; ``ClipPPOLoss`` with the networks of
TorchRL's example. Beside them "bare": the same formula on our networks with nothing around it, and "terms":
what our stepper calls.

*Update*, from a full window to new weights: advantages, 5 epochs x 4 mini-batches of loss, backward,
clipping and Adam, and the means of the losses as numbers. TorchRL computes its advantages in each epoch, as
its example does, and does not clip. All start from the same weights each time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributions import kl_divergence

from benchmarks.contenders import CLIP, ENTROPY_COEFF, Updates
from benchmarks.harness import (
    COMPILED,
    NUM_EPOCHS,
    NUM_MINI_BATCHES,
    OURS,
    RSL_RL,
    TORCHRL,
    Contender,
    Row,
    Settings,
    Shape,
    measure,
)
from torchrl_rslstorage import KLAdaptiveStepper, MLPActor, MLPCritic

SUBJECTS = ("loss_forward", "update")
FORWARD_SHAPES = ("XS",)
UPDATE_SHAPES = ("XS", "S")
BARE = "bare_formula"

CAN_COMPILE = "compile" in inspect.signature(KLAdaptiveStepper).parameters
NO_COMPILE = "this version cannot compile"


# -- forward -----------------------------------------------------------------------------------------


def forward_contenders(shape: Shape, settings: Settings) -> list[Contender]:
    sides = Updates(shape, settings.device)
    ours, ppo, torchrl = sides.ours, sides.rsl_rl.ppo, sides.torchrl
    ours.gae(ours.buffer)
    mini_batch = next(iter(ours.buffer))
    with torch.inference_mode():
        ppo.compute_returns(sides.rsl_rl.last)
    theirs = next(ppo.storage.mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS))
    with torch.no_grad():
        torchrl.buffer.extend(torchrl.gae(sides.batch).reshape(-1))
    torchrls = torchrl.buffer.sample()
    actor, critic = ours.loss.actor_network, ours.loss.critic_network
    return [
        Contender(OURS, lambda: ours.loss(mini_batch)),
        Contender("ours_terms", lambda: ours.loss.terms(mini_batch)),
        Contender(BARE, lambda: bare_formula(actor, critic, mini_batch)),
        Contender(RSL_RL, lambda: rsl_rl_loss(ppo, theirs)),
        Contender(TORCHRL, lambda: torchrl.loss(torchrls)),
    ]


def bare_formula(actor: MLPActor, critic: MLPCritic, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """PPO's loss and the KL of rsl_rl 5.5.1's ``PPO.update``, on networks of ours, unchecked."""
    dist = actor.get_dist(batch)
    advantage = batch["advantage"].squeeze(-1)
    ratio = (dist.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
    surrogate = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    value, old, target = critic.evaluate(batch), batch["state_value"], batch["value_target"]
    clipped = old + (value - old).clamp(-CLIP, CLIP)
    value_loss = torch.max((value - target).square(), (clipped - target).square()).mean()
    with torch.no_grad():
        kl = kl_divergence(actor.build_dist_from_params(batch), dist).mean()
    return surrogate + value_loss - ENTROPY_COEFF * dist.entropy().mean(), kl


def rsl_rl_loss(ppo: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """What rsl_rl 5.5.1's ``PPO.update`` does with a mini-batch before ``zero_grad``."""
    ppo.actor(batch.observations, masks=None, hidden_state=None, stochastic_output=True)
    log_prob = ppo.actor.get_output_log_prob(batch.actions)
    value = ppo.critic(batch.observations, masks=None, hidden_state=None)
    params = tuple(p[: len(value)] for p in ppo.actor.output_distribution_params)
    entropy = ppo.actor.output_entropy[: len(value)]
    with torch.inference_mode():
        kl = torch.mean(ppo.actor.get_kl_divergence(batch.old_distribution_params, params))
    ratio = torch.exp(log_prob - torch.squeeze(batch.old_actions_log_prob))
    advantage = torch.squeeze(batch.advantages)
    clipped = torch.clamp(ratio, 1.0 - CLIP, 1.0 + CLIP)
    surrogate = torch.max(-advantage * ratio, -advantage * clipped).mean()
    value_clipped = batch.values + (value - batch.values).clamp(-CLIP, CLIP)
    losses = torch.max((value - batch.returns).pow(2), (value_clipped - batch.returns).pow(2))
    return surrogate + losses.mean() - ENTROPY_COEFF * entropy.mean(), kl


# -- update ------------------------------------------------------------------------------------------


def update_contenders(shape: Shape, settings: Settings) -> list[Contender]:
    sides = Updates(shape, settings.device)
    given = sides.batch

    def torchrl() -> None:
        sides.torchrl(given.clone(recurse=False))  # GAE writes into what it is given

    found = [
        Contender(OURS, sides.ours, sides.ours.restore),
        Contender(RSL_RL, sides.rsl_rl, sides.rsl_rl.restore),
        Contender(TORCHRL, torchrl, sides.torchrl.restore),
    ]
    if settings.compile and CAN_COMPILE:
        compiled = sides.ours_compiled()
        found.insert(1, Contender(COMPILED, compiled, compiled.restore))
    return found


def run(settings: Settings) -> Iterator[Row]:
    for shape in settings.chosen(FORWARD_SHAPES):
        if not shape.ours_alone:
            yield Row(SUBJECTS[0], shape, measure(forward_contenders(shape, settings), settings))
    note = NO_COMPILE if settings.compile and not CAN_COMPILE else ""
    for shape in settings.chosen(UPDATE_SHAPES):
        if not shape.ours_alone:
            yield Row(SUBJECTS[1], shape, measure(update_contenders(shape, settings), settings), note)


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    main(["loss", *sys.argv[1:]])
