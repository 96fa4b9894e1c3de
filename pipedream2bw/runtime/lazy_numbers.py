"""Numbers of a train_step, its loss above all, read when they are wanted."""

from __future__ import annotations

import abc
import itertools
import json
import math
import numbers
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from .. import _C
from ..ranks.operations import Announcement, Operation
from .session import Session

if TYPE_CHECKING:  # it computes as one
    _Number = float
else:
    _Number = abc.ABC


class LazyNumber(_Number):
    """A number of the last ``train_step``, which may not exist yet.

    It computes as a ``float`` does, and as a tensor of one number in torch's functions: whatever
    reads it waits for it, ``json`` too. ``detach()``, ``cpu()`` and the like wait for nothing.
    ``torch.tensor([...])``, which asks for the type itself, needs ``float(...)``.

    It does not keep the pipeline alive. That of a discarded train_step is nan; read before that is
    known it may be any number. In one process the first that is read raises, see
    :class:`pipedream2bw.errors.StageError`.

    Attributes:
        train_step: its number.
    """

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self.train_step = session.num_train_steps - 1
        self._times_taken_back = session.discarding.num_times

    def _wait(self, read: Callable[[], list[float]]) -> list[float] | None:
        """Returns what ``read`` gives; None if the train_step is discarded.

        With several processes nothing is raised then: ranks that read would go another way than
        those that do not. All of them raise in their next common operation.

        Raises:
            StageError: the pipeline failed first; names the cause. In one process also if the
                train_step is discarded and has not been taken back: it has now.
        """
        session = self._session()
        if session is not None:
            session.ending.check_process()
            if self._is_taken_back(session):
                return None
        try:
            value = read()
        except RuntimeError:
            if session is not None:
                session.ending.check_open()
            raise
        if value:
            return value
        if session is not None and not session.grid.in_processes:
            with session.ending.failing_closes():
                session.drain()
        return None

    def _is_taken_back(self, session: Session) -> bool:
        return session.discarding.is_taken_back(self.train_step, self._times_taken_back)

    def _check_can_come(self, whose: str, count: Callable[[Session, int], int]) -> None:
        """Raises if last backwards are missing that need later train_steps.

        Args:
            count: gives how many.
        """
        session = self._session()
        if session is None or self.done() or self._is_taken_back(session):
            return
        session.ending.check_open()
        missing = count(session, self.train_step)
        if missing > 0:
            raise RuntimeError(
                f"{type(self).__name__} of train_step {self.train_step}: {whose} last backwards "
                f"run during the train_steps after it, of which {missing} must still be "
                "called. Read the number then, or after flush()"
            )

    @abc.abstractmethod
    def done(self) -> bool:
        """Returns whether the number can be read without waiting."""

    @abc.abstractmethod
    def item(self) -> float:
        """The number, waiting for it if need be."""

    def __repr__(self) -> str:
        shown = self.item() if self.done() else f"train_step {self.train_step}, not there yet"
        return f"{type(self).__name__}({shown})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"pickle or copy of a {kind}, which is read later: give float() of it")

    def __getattr__(self, name: str) -> Any:
        if name in _CHANGE_NOTHING:
            return lambda *args, **kwargs: self
        for kind, make in ((float, float), (torch.Tensor, _tensor_of)):
            if hasattr(kind, name) and not name.startswith("_"):
                return getattr(make(self), name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}: no float or tensor has it")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(cls, _tensor_of, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: object = None) -> Any:
        return _tensor_of(self).numpy().astype(dtype or "d")


_CHANGE_NOTHING = ("detach", "clone", "cpu", "float", "double", "mean", "sum")
_OF_FLOATS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow "
    "rpow neg pos abs round trunc floor ceil int float bool format str lt le gt ge eq ne hash"
)


def _tensor_of(number: Any) -> torch.Tensor:
    return torch.tensor(number.item(), dtype=torch.double)


def _as_float_does(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def compute(self: LazyNumber, *others: Any) -> Any:
        known = (each.item() if isinstance(each, LazyNumber) else each for each in others)
        return method(self.item(), *known)

    return compute


for _name in _OF_FLOATS.split():
    setattr(LazyNumber, f"__{_name}__", _as_float_does(f"__{_name}__"))
numbers.Real.register(LazyNumber)  # type: ignore[type-abstract]


_default_of_json = json.JSONEncoder.default


def _with_lazy_numbers(encoder: json.JSONEncoder, value: Any) -> Any:
    return value.item() if isinstance(value, LazyNumber) else _default_of_json(encoder, value)


# json has no other way to be told of a type, and a float of C's cannot wait for its value.
json.JSONEncoder.default = _with_lazy_numbers  # type: ignore[assignment,method-assign]


class Loss(LazyNumber):
    """What :meth:`PipelineModule.train_step` returns: its loss, which may not exist yet.

    That of :meth:`PipelineModule.eval_step` is there.
    ``float(loss)`` waits until the last stage has forwarded all microbatches; on any rank, at any
    time, in any order. Reading it one train_step late costs nothing. Under the V-shaped schedules
    with two weight versions the last stage forwards some of a batch's microbatches during the next
    train_step. Reading the loss before that drains the pipeline, on all ranks, which costs time and
    changes no number. Under ``"pipedream"``, where stages make their updates together
    (``max_grad_norm``, tied weights), it may need up to d - 2 more train_steps, or a ``flush()``.
    With ``width`` > 1 it is this replica's own. The same holds for :attr:`metrics`, which travel
    with it.
    """

    def __init__(self, session: Session, numbers: _C.AwaitedNumbers | list[float]) -> None:
        super().__init__(session)
        self._slot = None if isinstance(numbers, list) else numbers
        self._names = list(session.stages.options.metrics)
        self._numbers = numbers if isinstance(numbers, list) else None

    def done(self) -> bool:
        """Whether the loss can be read without waiting for the pipeline."""
        return self._slot is None or self._numbers is not None or self._slot.done()

    def item(self) -> float:
        """The loss.

        Raises:
            StageError: the pipeline failed before the loss existed; names the first cause.
            RuntimeError: it needs more train_steps; says how many.
        """
        return self._all()[0]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics by name, each the mean over the rows. Waits and raises as item()."""
        return dict(zip(self._names, self._all()[1:], strict=True))

    def backward(self, *args: object, **kwargs: object) -> None:
        """Refuses with a TypeError: the backward belongs to ``train_step``."""
        raise TypeError(
            "loss.backward(): train_step() has submitted the backward already; call opt.step()"
        )

    def __iter__(self) -> NoReturn:
        # torch.amp.GradScaler.scale() takes what is no tensor for a sequence of them.
        raise TypeError(
            "a Loss is one number, no sequence. To scale losses before their backwards give "
            "PipelineOptimizer(loss_scale=pipedream2bw.LossScale()) in place of a GradScaler"
        )

    def _all(self) -> list[float]:
        if self._numbers is None:
            assert self._slot is not None
            session = self._session()
            if session is not None and not self.done() and not self._is_taken_back(session):
                finish_forwards(session, self.train_step)
            whose = "an earlier one's, for whose update its forward waits on all stages,"
            self._check_can_come(whose, train_steps_until_loss)
            numbers = self._wait(self._slot.wait)
            self._numbers = [math.nan] * (1 + len(self._names)) if numbers is None else numbers
        return self._numbers


def finish_forwards(session: Session, train_step: int) -> None:
    """Drains if the train_step's loss would come during a later one's actions alone.

    The other ranks drain with this one, whatever they call next.
    """
    behind = session.schedule.forward_batches_behind
    is_late = train_step + behind >= session.num_train_steps
    if behind and is_late and session.first_unfinished is not None:
        session.ending.check_open()
        with session.ending.failing_closes():
            session.agree(Operation.read_loss, train_step, Announcement)


def train_steps_until_finished(session: Session, train_step: int) -> int:
    """How many more train_steps the last backward of one of them needs, on every stage."""
    if session.first_unfinished is None:
        return 0
    return train_step + session.schedule.most_batches_behind + 1 - session.num_train_steps


def train_steps_until_loss(session: Session, train_step: int) -> int:
    """How many more train_steps the loss of one of them needs.

    None, but where stages read different versions and make their updates together: there a forward
    may wait for an earlier batch's backward on a stage that does it later.
    """
    first, delay = session.first_unfinished, session.schedule.delay
    if first is None or session.schedule.has_one_delay:
        return 0
    needed = train_step
    for stages in session.stages.joint_updates:
        for stage, other in itertools.product(stages, repeat=2):
            batch_before = train_step - delay[stage] - 1
            if batch_before >= first:
                needed = max(needed, batch_before + delay[other])
    return needed + 1 - session.num_train_steps
