"""A diagonal Gaussian over action vectors, with nothing computed that PPO does not read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.kl import register_kl

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class DiagonalGaussian(Distribution):
    """Independent normals over the last dimension, one event per action vector.

        log p(a) = Σ_i −(a_i − μ_i)² / 2σ_i² − log σ_i − ½ log 2π
        H        = Σ_i ½ + ½ log 2π + log σ_i

    The same numbers as ``Independent(Normal(loc, scale), 1)``. ``scale`` may be ``[A]`` while ``loc`` is
    ``[*, A]``: a state-independent std is never expanded, and its logarithm is taken once, not per sample.

    Args:
        loc: mean ``[*, A]``.
        scale: standard deviation ``[A]`` or ``[*, A]``, positive; not checked.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import DiagonalGaussian
        >>> dist = DiagonalGaussian(torch.zeros(5, 2), torch.ones(2))
        >>> dist.log_prob(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        self.loc = loc
        self.scale = scale
        self._log_scale: Tensor | None = None
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)

    @property
    def arg_constraints(self) -> dict[str, constraints.Constraint]:
        """What the parameters must be."""
        positive_vector = constraints.independent(constraints.positive, 1)
        return {"loc": constraints.real_vector, "scale": positive_vector}

    @property
    def support(self) -> constraints.Constraint:
        """All real vectors."""
        return constraints.real_vector

    @property
    def mean(self) -> Tensor:
        """Mean ``[*, A]``."""
        return self.loc

    @property
    def mode(self) -> Tensor:
        """Mode ``[*, A]``."""
        return self.loc

    @property
    def deterministic_sample(self) -> Tensor:
        """What TorchRL takes as the action without exploration: the mean, ``[*, A]``."""
        return self.loc

    @property
    def stddev(self) -> Tensor:
        """Standard deviation, expanded to ``[*, A]``."""
        return self.scale.expand_as(self.loc)

    @property
    def log_scale(self) -> Tensor:
        """Logarithm of ``scale``, in its own shape; taken once."""
        # Not functools.cached_property: until Python 3.12 it holds a lock, which torch.compile cannot trace.
        if self._log_scale is None:
            self._log_scale = self.scale.log()
        return self._log_scale

    @property
    def variance(self) -> Tensor:
        """Variance ``[*, A]``."""
        return self.stddev.square()

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Actions ``[*sample_shape, *, A]``, without gradient."""
        with torch.no_grad():
            shape = self._extended_shape(torch.Size(sample_shape))
            # What torch.normal draws, which searches the scale for negative numbers first.
            noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
            return noise.mul_(self.scale).add_(self.loc)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Actions ``[*sample_shape, *, A]``, differentiable in mean and std."""
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + noise * self.scale

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of ``value`` ``[*, A]``, one number per action vector ``[*]``.

        Raises:
            ValueError: ``value`` holds vectors of another width, which would broadcast.
        """
        if value.shape[-1:] != self.event_shape:
            raise ValueError(
                f"Actions of shape {tuple(value.shape)} are no vectors of width {self.event_shape[0]}."
            )
        # Rounded as torch.distributions.Normal does it, so that RSL-RL's numbers come out. The sign, which
        # changes no digit, stands with the variance: [A] numbers instead of [*, A].
        # Products, since the gradient of square() takes a kernel more.
        shift = value - self.loc
        exponent = shift * shift / (self.scale * (-2 * self.scale))
        return (exponent - self.log_scale - _HALF_LOG_2PI).sum(-1)

    def entropy(self) -> Tensor:
        """Entropy ``[*]``."""
        return self._entropy().expand(self.batch_shape)

    def mean_entropy(self) -> Tensor:
        """Mean of `entropy` over all action vectors, 0-dim; that of one of them, where all are the same."""
        entropy = self._entropy()
        return entropy.mean() if entropy.ndim else entropy

    def _entropy(self) -> Tensor:
        """Entropy in the shape of the scale, ``[]`` or ``[*]``."""
        return (self.log_scale + (0.5 + _HALF_LOG_2PI)).sum(-1)

    def expand(
        self, batch_shape: Sequence[int], _instance: DiagonalGaussian | None = None
    ) -> DiagonalGaussian:
        """The same distribution over a larger batch shape."""
        shape = (*batch_shape, *self.event_shape)
        return DiagonalGaussian(self.loc.expand(shape), self.scale.expand(shape))


@register_kl(DiagonalGaussian, DiagonalGaussian)
def _kl_diagonal_gaussians(p: DiagonalGaussian, q: DiagonalGaussian) -> Tensor:
    var_ratio = (p.scale / q.scale).square()
    shift = ((p.loc - q.loc) / q.scale).square()
    return 0.5 * (var_ratio + shift - 1 - var_ratio.log()).sum(-1)
