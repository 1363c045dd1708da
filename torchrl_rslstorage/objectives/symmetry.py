"""Symmetry as RSL-RL learns it: mirrored copies of each mini-batch, and a mirror loss.

Mittal et al. 2024, "Symmetry Considerations for Learning Task Symmetric Robot Policies", arXiv:2403.04359;
rsl_rl 5.5.1, extensions/symmetry.py and algorithms/ppo.py.

    cells      original [V]        copy 1 [V]      copy 2 [V] …
    surrogate, value loss     the mean over all of them          (data augmentation)
    KL, entropy, metrics      of the original alone
    mirror loss               π's mean for the mirrored observation against the mirrored mean

A padded mini-batch ``[L, B]`` is mirrored trajectory by trajectory: each copy has the same mask, so that no
network sees padding and nothing is cut anew. RSL-RL refuses recurrent policies here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torchrl.modules import GRUModule, LSTMModule

from torchrl_rslstorage.data.leaves import Key, canonical, leaves, nest, show
from torchrl_rslstorage.modules import RNNActor, RNNCritic
from torchrl_rslstorage.objectives.mirror import Augment, Images, images_by
from torchrl_rslstorage.objectives.padded import Padded
from torchrl_rslstorage.objectives.reading import Part, Targets


class Copies(NamedTuple):
    """Mirrored copies of a mini-batch, to be evaluated at once."""

    td: TensorDictBase
    """Observations and actions of the cells, ``[number·V]``."""
    padded: Padded | None
    """The same as trajectories, for recurrent networks; ``number`` is 1 then."""
    number: int
    """How many copies."""


class MirroredKeys(NamedTuple):
    """The entries that copies of a mini-batch are made of."""

    observations: list[NestedKey]
    action: NestedKey
    states: list[NestedKey]


class Symmetry(nn.Module):
    """What `RSLPPOLoss` does about a robot, or task, that is the mirror image of itself.

    Mirrors are tables, one entry for each observation that the networks read and one for the action;
    several tables make several copies (left-right, front-back, both). A function does it, too: it is given a
    TensorDict ``[B]`` of what shall be mirrored (observations, the action, or both) and returns ``[k·B]``,
    the originals first. RSL-RL's own functions go through `rsl_rl_augmentation`.

    With neither use the symmetry of the policy is only measured, as ``symmetry``.

    Recurrent policies: the state with which a mirrored trajectory starts is one that nobody computed. Where
    an episode starts it is zero, like the original's. Where a window begins in the middle of an episode,
    ``states`` mirrors the original's, which only a network that was built to be symmetric has a table for;
    without it the copy starts from zeros there. That is an approximation: the network sees the mirrored
    steps without what came before them.

    Args:
        augment: the mirrors by key, a list of such tables, or a function.
        use_data_augmentation: learn from the mirrored copies as well. Their old log-probabilities, values,
            advantages and value targets are the original's.
        use_mirror_loss: add ``mirror_loss_coeff · mean (μ(mirrored s) − mirrored μ(s))²``, where the latter
            is without gradient.
        mirror_loss_coeff: its weight.
        states: recurrent states, mirrored as ``augment`` mirrors the rest; each state ``[B, layers, H]`` in
            its last dimension.

    Raises:
        ValueError: a negative coefficient, or tables that are none.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import Mirror, MLPActor, MLPCritic, RSLPPOLoss, Symmetry
        >>> mirrors = {"obs": Mirror([0, 1, 2], [1, -1, -1]), "action": Mirror([0], [-1])}
        >>> symmetry = Symmetry(mirrors, use_mirror_loss=True, mirror_loss_coeff=0.5)
        >>> actor, critic = MLPActor(["obs"], 3, 1), MLPCritic(["obs"], 3)
        >>> batch = critic(actor(TensorDict({"obs": torch.randn(8, 3)}, [8]))).detach()
        >>> batch["advantage"], batch["value_target"] = torch.randn(8, 1), torch.randn(8, 1)
        >>> losses = RSLPPOLoss(actor, critic, symmetry=symmetry)(batch)
        >>> bool(losses["loss_symmetry"] == 0.5 * losses["symmetry"])
        True
    """

    def __init__(
        self,
        augment: Augment,
        *,
        use_data_augmentation: bool = False,
        use_mirror_loss: bool = False,
        mirror_loss_coeff: float = 0.0,
        states: Augment | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= mirror_loss_coeff < math.inf:
            raise ValueError(f"`mirror_loss_coeff` must be zero or more, got {mirror_loss_coeff}.")
        self.use_data_augmentation = use_data_augmentation
        self.use_mirror_loss = use_mirror_loss
        self.mirror_loss_coeff = mirror_loss_coeff
        self._images: Images = images_by(augment, "augment")
        self._states: Images | None = None if states is None else images_by(states, "states")

    def keys_of(
        self, actor: TensorDictModuleBase, critic: TensorDictModuleBase, action: NestedKey
    ) -> MirroredKeys:
        """What copies of a mini-batch are made of.

        Args:
            actor: will see them.
            critic: will see them where the loss learns from them.
            action: where actions stand.

        Raises:
            ValueError: there is no mirror for one of the keys.
        """
        networks = [actor, critic] if self.use_data_augmentation else [actor]
        read = [inputs_of(network) for network in networks]
        observations = list(dict.fromkeys(key for keys, _ in read for key in keys))
        states = [key for _, keys in read for key in keys]
        lacking = [(key, "augment") for key in self._images.missing([*observations, action])]
        if self._states is not None:
            lacking += [(key, "states") for key in self._states.missing(states)]
        for key, name in lacking:
            raise ValueError(
                f"The symmetry has no mirror for {show(key)}, which the networks read or write: add it to "
                f"`{name}` (Mirror.identity(width) leaves it as it is)."
            )
        return MirroredKeys(observations, action, states)

    def with_copies(
        self,
        part: Part,
        targets: Targets,
        td: TensorDictBase,
        padded: Padded | None,
        keys: MirroredKeys,
        evaluate: Callable[[TensorDictBase, Padded | None, Targets], Part],
        act: Callable[[TensorDictBase, Padded | None], Distribution],
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Surrogate and value loss over the mini-batch and its copies, and the terms that symmetry adds.

        Args:
            part: the losses of the mini-batch itself.
            targets: its.
            td: its cells, ``[V]``.
            padded: the mini-batch, if it is one of trajectories.
            keys: of `keys_of`.
            evaluate: the losses of some cells.
            act: the policy's distribution for some cells.
        """
        objectives, critics = [part.loss_objective], [part.loss_critic]
        means: list[Tensor] = []
        learned = self.use_data_augmentation or self.use_mirror_loss
        with nullcontext() if learned else torch.no_grad():
            for copies in self._copies(td, padded, keys):
                if self.use_data_augmentation:
                    mirrored = evaluate(copies.td, copies.padded, targets.repeated(copies.number))
                    objectives += [mirrored.loss_objective] * copies.number
                    critics += [mirrored.loss_critic] * copies.number
                    means.append(mean_of(mirrored.dist))
                else:
                    means.append(mean_of(act(copies.td, copies.padded)))
            mirrored_means = torch.cat(means)
            image = self._image_of(part.dist, keys.action, mirrored_means.shape)
            error = (mirrored_means - image).square().mean()
        added = {"symmetry": error.detach()}
        if self.use_mirror_loss:
            added["loss_symmetry"] = self.mirror_loss_coeff * error
        return torch.stack(objectives).mean(), torch.stack(critics).mean(), added

    def _copies(self, td: TensorDictBase, padded: Padded | None, keys: MirroredKeys) -> list[Copies]:
        """The mirrored copies of the cells ``td [V]``, which are those of ``padded`` if it is there."""
        made = self._images(td.select(*keys.observations, keys.action))
        size = td.batch_size[0]
        count = made.batch_size[0] // size
        if padded is None:
            return [Copies(made, None, count)]
        first = self._first_states(padded.td, keys.states, count)
        return [
            Copies(copy, _trajectories(padded, copy.select(*keys.observations), states), 1)
            for copy, states in zip(made.split(size), first, strict=True)
        ]

    def _image_of(self, dist: Distribution, action: NestedKey, shape: torch.Size) -> Tensor:
        """The mirrored means of a policy, in the ``shape [k·V, A]`` of those that they are compared with."""
        mean = mean_of(dist).detach()
        image: Tensor = self._images(TensorDict(nest({canonical(action): mean}), mean.shape[:1])).get(action)
        if image.shape != shape:
            raise ValueError(
                f"The augmentation makes {len(image) // len(mean)} mirrored copies of actions alone, but "
                f"{shape[0] // len(mean)} of observations: it must make as many."
            )
        return image

    def _first_states(
        self, td: TensorDictBase, keys: Sequence[NestedKey], count: int
    ) -> list[dict[Key, Tensor]]:
        """The states ``[B, *]`` with which the trajectories of each copy start."""
        found = {canonical(key): value[0] for key in keys if (value := td.get(key, None)) is not None}
        if self._states is None or not found:
            zeros = {key: torch.zeros_like(state) for key, state in found.items()}
            return [zeros] * count
        size = td.batch_size[1]
        made = self._states(TensorDict(nest(found), [size]))
        if made.batch_size[0] != count * size:
            raise ValueError(
                f"`states` makes {made.batch_size[0] // size} mirrored copies but `augment` {count}: they "
                "must make as many."
            )
        return [leaves(copy) for copy in made.split(size)]


def _trajectories(padded: Padded, cells: TensorDictBase, states: dict[Key, Tensor]) -> Padded:
    """``padded`` with the observations ``[V]`` of a copy, and its starting ``states`` seen from every row."""
    length = padded.td.batch_size[0]
    # The very same mask: layouts are known by it.
    entries: dict[Key, Tensor] = {
        key: value for key, value in leaves(padded.td).items() if value.dtype is torch.bool
    }
    entries.update({key: padded.layout.put(value) for key, value in leaves(cells).items()})
    entries.update({key: state.expand(length, *state.shape) for key, state in states.items()})
    return Padded(TensorDict(nest(entries), padded.td.batch_size), padded.layout)


def mean_of(dist: Distribution) -> Tensor:
    """What the policy would do without exploration, with its gradient, ``[V, A]``.

    Raises:
        TypeError: the distribution has no mean.
    """
    if isinstance(dist, Categorical):  # TorchRL's one-hot actions; their mean is NaN
        return dist.probs
    try:
        mean = dist.mean
    except (NotImplementedError, AttributeError):
        mean = getattr(dist, "deterministic_sample", None)
    if not isinstance(mean, Tensor):
        raise TypeError(f"The symmetry of a policy is that of its mean, but {type(dist).__name__} has none.")
    return mean


def inputs_of(network: TensorDictModuleBase) -> tuple[list[NestedKey], list[NestedKey]]:
    """The observations that ``network`` reads, and its recurrent states."""
    states: list[NestedKey] = []
    flags: list[NestedKey] = []
    for module in network.modules():
        if isinstance(module, RNNActor | RNNCritic):
            states += module.state_keys
            flags.append(module.core.is_init_key)
        elif isinstance(module, LSTMModule | GRUModule):
            _, *memory, flag = module.in_keys
            states += memory
            flags.append(flag)
    others = {canonical(key) for key in [*states, *flags]}
    return [key for key in network.in_keys if canonical(key) not in others], states
