"""What the two blocking accumulators share: attributes, steps, sharing by name."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from jslices._errors import InvalidArgumentError
from jslices.accumulators._gradients import (
    PartialShape,
    check_reduction,
    float_dtype,
    partial_shape,
    whole_number,
)
from jslices.accumulators._turns import Store, Turns

_shared: weakref.WeakValueDictionary[tuple[str, str], Turns] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


class ConditionalAccumulatorBase:
    """Counting, steps and closing, the same for rows and for whole arrays."""

    #: Makes what holds the gradients of the given dtype.
    _store: Callable[[np.dtype], Store]

    dtype: np.dtype  #: of the gradients
    shape: PartialShape  #: as declared, None where it is not known
    name: str  #: as given
    reduction_type: str  #: "MEAN" or "SUM"

    def __init__(
        self,
        dtype: Any,
        shape: Any,
        shared_name: str | None,
        name: str,
        reduction_type: str,
    ) -> None:
        kind = type(self).__name__
        self.dtype = float_dtype(kind, dtype)
        self.shape = partial_shape(kind, shape)
        check_reduction(kind, reduction_type)
        self.reduction_type = reduction_type
        self.name = name
        terms = (self.dtype, self.shape, reduction_type)
        # Without a reference to self, which would keep a shared name alive.
        new_store = functools.partial(type(self)._store, self.dtype)
        self._turns = _turns(kind, shared_name, new_store, terms)

    def num_accumulated(self) -> int:
        """How many gradients have been accepted since the last take."""
        return self._turns.count

    def num_stale(self) -> int:
        """How many gradients have been dropped as stale, in all."""
        return self._turns.stale

    def global_step(self) -> int:
        """The step below which a gradient's ``local_step`` is stale."""
        return self._turns.step

    def set_global_step(self, new_global_step: Any) -> None:
        """Sets the step; what is accumulated stays.

        A lower one than the current is logged (logger ``jslices.accumulators``, level
        WARNING) and set, as in TensorFlow.
        """
        self._turns.set_step(whole_number("new_global_step", new_global_step))

    def close(self) -> None:
        """Ends it: who waits in a take, or applies or takes later, gets CancelledError.

        Whoever shares the state by name is closed as well; the name becomes free.
        """
        with _shared_lock:
            for key, turns in list(_shared.items()):
                if turns is self._turns:
                    del _shared[key]
        self._turns.close()

    def __repr__(self) -> str:
        shape = None if self.shape is None else list(self.shape)
        return (
            f"{type(self).__name__}({self.dtype}, shape={shape}, {self.reduction_type}, "
            f"{self.num_accumulated()} accumulated, step {self.global_step()})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} lives in one process and cannot be pickled or "
            "copied; give it to others with jslices.accumulators.serve({'name': it})"
        )


def _turns(
    kind: str, shared_name: str | None, new_store: Callable[[], Store], terms: Any
) -> Turns:
    """New state, or that of the accumulator of the same kind and name.

    A name lives as long as anybody who uses it.
    """
    if not shared_name:
        return Turns(new_store, terms)
    with _shared_lock:
        turns = _shared.get((kind, shared_name))
        if turns is None:
            turns = _shared[kind, shared_name] = Turns(new_store, terms)
    if turns.terms != terms:
        raise InvalidArgumentError(
            f"{kind}(shared_name={shared_name!r}) exists with dtype, shape and "
            f"reduction_type {turns.terms}, not {terms}"
        )
    return turns
