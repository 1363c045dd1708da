"""Mirror images of observations, actions and states: permutations with signs, or a function.

A robot that is the mirror image of itself has vectors of which each component is another one, or that one's
negative, seen in the mirror:

    x            left hip   right hip   lateral velocity
    permutation     1           0              2             the component that is seen there
    signs           1           1             -1
    image        right hip  left hip    −lateral velocity
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_rslstorage.data.leaves import Key, canonical, dtype_name, leaves, nest, show, show_all


class Mirror(nn.Module):
    """The mirror image of vectors: ``image[i] = signs[i] · x[permutation[i]]``.

    Args:
        permutation: for each component, the one that is seen there; every index once.
        signs: 1 or -1 for each component of the image; all 1 if left out.

    Raises:
        ValueError: an index is missing or comes twice, a sign is neither 1 nor -1, or there are more or
            fewer signs than components.

    Examples:
        >>> import torch
        >>> from torchrl_rslstorage import Mirror
        >>> hips_and_lateral_velocity = Mirror([1, 0, 2], [1, 1, -1])
        >>> hips_and_lateral_velocity(torch.tensor([0.1, 0.2, 0.3]))
        tensor([ 0.2000,  0.1000, -0.3000])
    """

    permutation: Tensor
    signs: Tensor

    def __init__(self, permutation: Sequence[int], signs: Sequence[float] | None = None) -> None:
        super().__init__()
        order = list(permutation)
        if not order or sorted(order) != list(range(len(order))):
            raise ValueError(
                f"`permutation` must hold every index from 0 to {max(len(order) - 1, 0)} once, got {order}."
            )
        factors = [1.0] * len(order) if signs is None else list(signs)
        if len(factors) != len(order) or any(sign not in (1, -1) for sign in factors):
            raise ValueError(f"`signs` must be {len(order)} numbers 1 or -1, got {factors}.")
        self.register_buffer("permutation", torch.tensor(order), persistent=False)
        self.register_buffer("signs", torch.tensor(factors, dtype=torch.float32), persistent=False)

    @classmethod
    def identity(cls, width: int) -> Mirror:
        """The mirror that changes nothing, for what looks the same from both sides.

        Args:
            width: of the vectors.
        """
        return cls(range(width))

    @classmethod
    def of_names(cls, names: Sequence[str], swap: Mapping[str, str], negate: Iterable[str] = ()) -> Mirror:
        """A mirror read off the components' names.

            >>> from torchrl_rslstorage import Mirror
            >>> names = ["FL_hip", "FR_hip", "FL_knee", "FR_knee"]
            >>> mirror = Mirror.of_names(names, swap={"FL": "FR", "RL": "RR"}, negate=["*_hip"])
            >>> mirror.permutation.tolist(), mirror.signs.tolist()
            ([1, 0, 3, 2], [-1.0, -1.0, 1.0, 1.0])

        Args:
            names: of the components, in their order.
            swap: parts of names that change places; of each name the first that is found in it. A name with
                none of them stays where it is.
            negate: names, or patterns of them (``*_hip``), that change their sign.

        Raises:
            ValueError: a name comes twice, mirrors to one that is not there, or a pattern fits none.
        """
        place = {name: i for i, name in enumerate(names)}
        if len(place) != len(names):
            raise ValueError(f"`names` must differ from each other, got {list(names)}.")
        partners = [_swapped(name, swap) for name in names]
        for name, partner in zip(names, partners, strict=True):
            if partner not in place:
                raise ValueError(f"'{name}' mirrors to '{partner}', which is not in `names`.")
        patterns = list(negate)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"'{pattern}' in `negate` fits none of the names {list(names)}.")
        signs = [-1.0 if any(fnmatchcase(name, p) for p in patterns) else 1.0 for name in names]
        return cls([place[partner] for partner in partners], signs)

    def forward(self, x: Tensor, name: str = "the tensor") -> Tensor:
        """The image of ``[*, F]``.

        Args:
            x: vectors in the last dimension.
            name: what an error calls it.

        Raises:
            ValueError: the vectors have another width.
        """
        width = len(self.permutation)
        if x.shape[-1:] != (width,):
            raise ValueError(
                f"A mirror of {width} components cannot show {name}, which has shape {tuple(x.shape)}: its "
                f"last dimension must be {width}."
            )
        return x.index_select(-1, self.permutation) * self.signs.to(x.dtype)

    def extra_repr(self) -> str:
        """Shown in the module's repr."""
        return f"{self.permutation.tolist()}, {self.signs.tolist()}"


Table = Mapping[NestedKey, Mirror]
"""The mirrors of one copy, by key."""
Augment = Table | Sequence[Table] | Callable[[TensorDictBase], TensorDictBase]
"""How copies are made: the table of one copy, those of several, or a function."""


def rsl_rl_augmentation(
    function: Callable[..., tuple[Any, Any]], env: Any = None, action_key: NestedKey = "action"
) -> Callable[[TensorDictBase], TensorDictBase]:
    """RSL-RL's ``data_augmentation_func`` as a function from TensorDict to TensorDict, for `Symmetry`.

    RSL-RL calls ``function(env=..., obs=..., actions=...)`` with a TensorDict ``[B]`` of observation groups
    and actions ``[B, A]``, either of them None; it gives both back with ``k·B`` samples, the originals
    first (rsl_rl 5.5.1, extensions/symmetry.py).

    Args:
        function: RSL-RL's.
        env: what it is given as ``env``.
        action_key: where actions stand.

    Raises:
        ValueError: (when called) the function does not return two things of as many samples.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import rsl_rl_augmentation
        >>> def negate(env, obs, actions):
        ...     both = None if obs is None else torch.cat([obs, obs.apply(torch.neg)])
        ...     return both, None if actions is None else torch.cat([actions, -actions])
        >>> augment = rsl_rl_augmentation(negate)
        >>> augment(TensorDict({"action": torch.ones(1, 2)}, [1]))["action"].tolist()
        [[1.0, 1.0], [-1.0, -1.0]]
    """

    def augment(td: TensorDictBase) -> TensorDictBase:
        actions = td.get(action_key, None)
        observations = td.exclude(action_key)
        # A group that only held actions stays behind, empty.
        has_observations = bool(leaves(observations))
        made = function(env=env, obs=observations if has_observations else None, actions=actions)
        if not isinstance(made, tuple) or len(made) != 2:
            raise ValueError(
                f"RSL-RL's augmentation must return observations and actions, got {type(made).__name__}."
            )
        images, mirrored_actions = made
        sizes = {
            what: len(value)
            for what, value, asked in (
                ("observations", images, has_observations),
                ("actions", mirrored_actions, actions is not None),
            )
            if asked and value is not None
        }
        if len(sizes) != has_observations + (actions is not None) or len(set(sizes.values())) != 1:
            raise ValueError(
                "RSL-RL's augmentation must return as many observations as actions, and each that it was "
                f"given; got {sizes}."
            )
        (size,) = set(sizes.values())
        flat = leaves(images) if has_observations else {}
        if actions is not None:
            flat[canonical(action_key)] = mirrored_actions
        return TensorDict(nest(flat), [size])

    return augment


class Images(Protocol):
    """Makes the mirrored copies of a TensorDict ``[B]``."""

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """The copies ``[k·B]``, one behind the other, without the original."""
        ...

    def missing(self, keys: Iterable[NestedKey]) -> list[NestedKey]:
        """Those of ``keys`` that are known to have no image."""
        ...


def images_by(augment: Augment, what: str) -> MirrorTables | MirrorFunction:
    """The images that ``augment`` (`Augment`) stands for.

    Raises:
        ValueError: it is neither, empty, or its copies do not mirror the same keys.
    """
    if isinstance(augment, Mapping):
        return MirrorTables([augment], what)
    if callable(augment):
        return MirrorFunction(cast("Callable[[TensorDictBase], TensorDictBase]", augment))
    return MirrorTables(augment, what)


class MirrorTables(nn.Module):
    """Copies by tables of mirrors, one table a copy.

    Args:
        tables: mirrors by key.
        what: how errors call them.
    """

    def __init__(self, tables: Any, what: str) -> None:
        super().__init__()
        named: list[dict[Key, Mirror]] = []
        for table in tables if isinstance(tables, Sequence) else [None]:
            if not isinstance(table, Mapping) or not table:
                named = []
                break
            named.append({canonical(key): mirror for key, mirror in table.items()})
        mirrors = [mirror for table in named for mirror in table.values()]
        if not mirrors or not all(isinstance(mirror, Mirror) for mirror in mirrors):
            raise ValueError(
                f"`{what}` must be mirrors by key, such as {{'action': Mirror([1, 0])}}, a list of such "
                f"tables, or a function of a TensorDict, got {tables!r}."
            )
        keys = list(named[0])
        for table in named:
            if set(table) != set(keys):
                raise ValueError(
                    f"All tables of `{what}` must mirror the same keys, got {show_all(keys)} and "
                    f"{show_all(table)}."
                )
        self._by_key = {key: [table[key] for table in named] for key in keys}
        self.mirrors = nn.ModuleList(mirrors)  # so that they move with this module

    def missing(self, keys: Iterable[NestedKey]) -> list[NestedKey]:
        """Those of ``keys`` that no table has."""
        return [key for key in keys if canonical(key) not in self._by_key]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """The copies of ``td [B]``, ``[k·B]``."""
        made: dict[Key, Tensor] = {}
        for key, value in leaves(td).items():
            images = [mirror(value, show(key)) for mirror in self._by_key[key]]
            made[key] = images[0] if len(images) == 1 else torch.cat(images)
        size = next(iter(made.values())).shape[:1]
        return TensorDict(nest(made), size)


class MirrorFunction:
    """Copies by a function that returns the originals, followed by the copies.

    Args:
        function: of a TensorDict ``[B]``, which it may write into; what it returns is checked, the values of
            the originals only once (a device would have to be waited for) and not while compiling.
    """

    def __init__(self, function: Callable[[TensorDictBase], TensorDictBase]) -> None:
        self._function = function
        self._returns_originals = False

    def missing(self, keys: Iterable[NestedKey]) -> list[NestedKey]:
        """None that is known before the function is called."""
        return []

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """The copies of ``td [B]``, ``[k·B]``."""
        size = td.batch_size[0]
        # A copy: all epochs share the memory of a mini-batch, and functions mirror in place.
        made = self._function(td.clone())
        if not isinstance(made, TensorDictBase) or not made.ndim:
            raise ValueError(f"The augmentation must return a TensorDict [k·B], got {type(made).__name__}.")
        total = made.batch_size[0]
        if total % size or total < 2 * size:
            raise ValueError(
                f"The augmentation made {total} samples of {size}: it must return the {size} originals, "
                "followed by one mirrored copy of each, or by several."
            )
        for key, value in leaves(td).items():
            image = made.get(key, None)
            if image is None:
                raise ValueError(f"The augmentation was given {show(key)} but did not return it.")
            if image.shape[1:] != value.shape[1:] or image.dtype is not value.dtype:
                raise ValueError(
                    f"The augmentation made {dtype_name(image.dtype)} {tuple(image.shape)} of {show(key)}, "
                    f"expected {dtype_name(value.dtype)} {(total, *value.shape[1:])}."
                )
        if not (self._returns_originals or torch.compiler.is_compiling()):
            self._require_originals(td, cast("TensorDictBase", made[:size]))
        return cast("TensorDictBase", made[size:])

    def _require_originals(self, td: TensorDictBase, first: TensorDictBase) -> None:
        for key, value in leaves(td).items():
            if not torch.allclose(first.get(key), value, equal_nan=True):
                raise ValueError(
                    f"The first {len(value)} samples of {show(key)} that the augmentation made are not those "
                    "that it was given: it must return the originals first, and behind them their mirrored "
                    "copies."
                )
        self._returns_originals = True


def _swapped(name: str, swap: Mapping[str, str]) -> str:
    for one, other in swap.items():
        for part, partner in ((one, other), (other, one)):
            if part in name:
                return name.replace(part, partner)
    return name
