"""The discriminator of adversarial motion priors: one score for a pair of consecutive states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_rslstorage.data.leaves import canonical, show
from torchrl_rslstorage.data.rows import under_next
from torchrl_rslstorage.modules.heads import Activation, make_mlp
from torchrl_rslstorage.modules.observations import ObservationModule


class AMPDiscriminator(ObservationModule):
    """Scores how much a step (s, s') looks like the demonstrations; a trunk and one linear layer.

    Writes ``amp_logit`` ``[*, 1]``; what it means is the objective's (`AMPLoss`). Peng et al. 2021,
    arXiv:2104.02180. Both states go through one normaliser, which is fed with *raw* states and only by
    `update_normalizer`: once an update, so that scores do not move while an update runs.

    Args:
        in_keys: the entries that make up a state, concatenated; read at the root and under ``next``.
        in_features: F, their summed width.
        hidden_dims: widths of the trunk; 1024 and 512 in the paper.
        activation: of the trunk.
        normalize_observations: keep an `EmpiricalNormalizer` before the network.
        logit_key: the entry written.

    Raises:
        ValueError: no keys, an unknown activation, or no hidden layer.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import AMPDiscriminator
        >>> discriminator = AMPDiscriminator(["observation"], in_features=3, hidden_dims=(16, 8))
        >>> pairs = TensorDict({"observation": torch.zeros(5, 3)}, [5])
        >>> pairs["next", "observation"] = torch.ones(5, 3)
        >>> discriminator(pairs)["amp_logit"].shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        in_features: int,
        *,
        hidden_dims: Sequence[int] = (1024, 512),
        activation: Activation = "relu",
        normalize_observations: bool = True,
        logit_key: NestedKey = "amp_logit",
    ) -> None:
        super().__init__(
            in_keys,
            in_features,
            out_keys=[logit_key],
            normalize_observations=normalize_observations,
            extra_in_keys=[] if isinstance(in_keys, str) else [under_next(canonical(key)) for key in in_keys],
        )
        self._logit_key = logit_key
        mlp = make_mlp(2 * in_features, 1, hidden_dims, activation)
        *trunk, linear = mlp
        self.trunk = nn.Sequential(*trunk)
        self.linear = cast("nn.Linear", linear)

    def pair_features(self, td: TensorDictBase) -> Tensor:
        """Both states of ``td``, normalised and side by side, ``[*, 2F]``: what `score` takes.

        Raises:
            KeyError: a state or the one after it is missing.
            ValueError, TypeError: its width or dtype does not fit.
        """
        after = td.get("next", None)
        if not isinstance(after, TensorDictBase):
            raise KeyError(
                f"AMPDiscriminator scores pairs of states, but there is no {show(('next', 'state'))} here: "
                "make pairs with transition_pairs or MotionDataset.pairs."
            )
        return torch.cat([self.features(td), self.features(after)], -1)

    def score(self, features: Tensor) -> Tensor:
        """Logits ``[*, 1]`` of normalised pairs ``[*, 2F]``."""
        return self.linear(self.trunk(features))

    def evaluate(self, td: TensorDictBase) -> Tensor:
        """Logits ``[*, 1]`` of the pairs in ``td``; writes nothing."""
        return self.score(self.pair_features(td))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the logits."""
        return tensordict.set(self._logit_key, self.evaluate(tensordict))
