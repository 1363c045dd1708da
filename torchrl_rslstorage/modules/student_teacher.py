"""StudentTeacher: the policy that collects for distillation, and asks the teacher in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type

from torchrl_rslstorage._compat import ModuleBase
from torchrl_rslstorage.data.leaves import Key, canonical, leaves, nest, show, show_all
from torchrl_rslstorage.data.rows import under_next
from torchrl_rslstorage.modules.heads import GaussianActor
from torchrl_rslstorage.modules.observations import ObservationModule, spec_keys

_TEACHER = "teacher_"


class StudentTeacher(ModuleBase):
    """A student that acts, and a teacher that says in every step what it would have done.

    Writes ``action``, what was executed; ``teacher_action``, the teacher's mean ``[*, A]``; and the
    recurrent states of both, the teacher's in a group of their own. Each of them reads a TensorDict of its
    own, so that they cannot disturb each other. The teacher is frozen: no gradient, eval mode whatever mode
    the policy is put in, and a normaliser whose statistics stay what they were.

    ``teacher_share`` is the probability with which an environment executes the teacher's action instead of
    the student's, drawn in each step anew: β_i of DAgger (Ross et al. 2011, arXiv:1011.0686, algorithm 3.1).
    0, which is RSL-RL's, lets the student act alone, 1 the teacher.

    Args:
        student: `MLPActor`, `RNNActor`, or an actor of TorchRL's.
        teacher: the same kinds.
        teacher_keys: the environment's names of what the teacher reads under another name.
        teacher_state_key: the group of the teacher's recurrent states.

    Raises:
        ValueError: the teacher has no weights yet (lazy or meta parameters), or acts in another space than
            the student.
        KeyError: in a step: the teacher's observations are missing.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rslstorage import MLPActor, StudentTeacher
        >>> student, teacher = MLPActor(["camera"], 4, 2), MLPActor(["state"], 3, 2)
        >>> policy = StudentTeacher(student, teacher)
        >>> td = policy(TensorDict({"camera": torch.zeros(5, 4), "state": torch.zeros(5, 3)}, [5]))
        >>> td["action"].shape, td["teacher_action"].shape
        (torch.Size([5, 2]), torch.Size([5, 2]))
    """

    teacher_share: float = 0.0

    def __init__(
        self,
        student: TensorDictModuleBase,
        teacher: TensorDictModuleBase,
        *,
        teacher_keys: Mapping[Any, NestedKey] | None = None,
        teacher_state_key: str = "teacher_state",
    ) -> None:
        super().__init__()
        if any(is_lazy(p) or p.is_meta for p in teacher.parameters()):
            raise ValueError(
                f"The teacher ({type(teacher).__name__}) has no weights yet: load them before it teaches "
                "(rslstorage distill --teacher does so from a run folder)."
            )
        widths = [len(x.std_param) for x in (student, teacher) if isinstance(x, GaussianActor)]
        if len(set(widths)) > 1:
            raise ValueError(
                f"The student acts with {widths[0]} numbers, the teacher with {widths[1]}: they must act in "
                "the same space."
            )
        self.student = student
        self.teacher = teacher.requires_grad_(False).eval()
        states = {canonical(key) for key in state_keys_of(teacher)}
        renamed = {canonical(own): canonical(key) for own, key in (teacher_keys or {}).items()}
        names: dict[Key, Key] = {}
        for raw in teacher.in_keys:
            key = canonical(raw)
            path = (key,) if isinstance(key, str) else key
            names[key] = (teacher_state_key, *path) if key in states else renamed.get(key, key)
        self._student = _Role("student", student, {canonical(key): canonical(key) for key in student.in_keys})
        self._teacher = _Role("teacher", teacher, names)
        roles = (self._student, self._teacher)
        written = [key for role in roles for key in role.written]
        self._name_keys(
            list(dict.fromkeys(key for role in roles for key in role.names.values())),
            ["action", "teacher_action", *written],
        )

    @classmethod
    def for_env(
        cls, env: EnvBase, student: TensorDictModuleBase, teacher: TensorDictModuleBase
    ) -> StudentTeacher:
        """The policy of an environment that shows the teacher what it was trained on.

        It may do so under the very names, or under ``teacher_observation`` beside an ``observation`` that
        shows the student less.

        Raises:
            ValueError: it shows the teacher something else; the message says what.
        """
        return cls(student, teacher, teacher_keys=teacher_keys(env, teacher))

    @property
    def state_keys(self) -> list[NestedKey]:
        """The recurrent states of student and teacher, as they stand before a step."""
        return [key for role in (self._student, self._teacher) for key in role.states.values()]

    def train(self, mode: bool = True) -> StudentTeacher:
        """Sets the student's mode; the teacher stays in eval mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Acts, and asks the teacher."""
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            wanted = self._teacher.act(tensordict)
        action = self._student.act(tensordict)
        if action.shape != wanted.shape:
            raise ValueError(
                f"The student's actions have shape {tuple(action.shape)}, the teacher's "
                f"{tuple(wanted.shape)}: they must act in the same space."
            )
        share = self.teacher_share
        if share >= 1:
            action = wanted
        elif share > 0:
            asks = torch.rand(*action.shape[:-1], 1, device=action.device) < share
            action = torch.where(asks, wanted, action)
        tensordict.set("action", action)
        return tensordict.set("teacher_action", wanted)


class _Role:
    """One of the two: its network, run on a TensorDict of its own, and its names in the common one."""

    def __init__(self, role: str, network: TensorDictModuleBase, names: dict[Key, Key]) -> None:
        self.names = names
        self.states = {key: names[key] for key in map(canonical, state_keys_of(network))}
        self.written: list[Key] = [*self.states.values(), *map(under_next, self.states.values())]
        self._role = role
        self._act = network
        self._observed = [own for own in names if own not in self.states]

    def act(self, td: TensorDictBase) -> Tensor:
        """Its action ``[*, A]``; its states are written into ``td``."""
        entries = {own: td.get(key, None) for own, key in self.names.items()}
        missing = [self.names[own] for own in self._observed if entries[own] is None]
        if missing:
            raise KeyError(
                f"The {self._role} reads {show_all(missing)}, which is not there. The TensorDict holds "
                f"{show_all(leaves(td))}."
            )
        given = {own: value for own, value in entries.items() if value is not None}
        made = self._act(TensorDict(nest(given), td.batch_size, device=td.device))
        for own, key in self.states.items():
            before = made.get(own, None)
            if before is not None:
                td.set(key, before)
            td.set(under_next(key), made.get(under_next(own)))
        return made.get("action")


def state_keys_of(network: Any) -> list[NestedKey]:
    """The recurrent states of a network: what it reads at the root and writes under ``next``."""
    written = {canonical(key) for key in network.out_keys}
    return [key for key in network.in_keys if under_next(canonical(key)) in written]


def teacher_keys(env: EnvBase, teacher: Any) -> dict[Key, Key]:
    """Under which names ``env`` shows what ``teacher`` reads.

    Raises:
        ValueError: it does not.
    """
    states = state_keys_of(teacher)
    observed = getattr(teacher, "observation_keys", None)
    if observed is None:
        observed = [key for key in teacher.in_keys if key not in states and key != "is_init"]
    own = [canonical(key) for key in observed]
    spec = env.observation_spec
    shown = spec_keys(spec)
    width = teacher.in_features if isinstance(teacher, ObservationModule) else None
    for names in (own, [_prefixed(key) if _prefixed(key) in shown else key for key in own]):
        if all(name in shown for name in names):
            found = sum(spec[name].shape[-1] for name in names)
            if width is None or found == width:
                return dict(zip(own, names, strict=True))
    numbers = "" if width is None else f", {width} numbers in all"
    shapes = ", ".join(f"{show(key)} of {tuple(spec[key].shape[len(env.batch_size) :])}" for key in shown)
    raise ValueError(
        f"The teacher reads {show_all(own)}{numbers}, but this environment shows {shapes}: it must show the "
        f"teacher what that was trained on, under the same names or with '{_TEACHER}' before them."
    )


def _prefixed(key: Key) -> Key:
    return f"{_TEACHER}{key}" if isinstance(key, str) else (*key[:-1], f"{_TEACHER}{key[-1]}")


def is_for_teachers(key: NestedKey) -> bool:
    """Whether an environment shows ``key`` to teachers only: its name begins with "teacher_"."""
    name = canonical(key)
    return (name if isinstance(name, str) else name[-1]).startswith(_TEACHER)
