"""Where a handle reads and writes: the variable of a run, or a copy that JAX made."""

from typing import Any

import jax
import numpy as np

from jslices._errors import FailedPreconditionError
from jslices.tf1._keys import initial_value
from jslices.tf1.frame import Entry, Frame, Mode, is_running
from jslices.tf1.state import is_initialized


class LiveCell:
    """A variable of a run: readable and writable while that run lasts."""

    def __init__(self, frame: Frame, entry: Entry) -> None:
        self._frame, self.entry = frame, entry
        self.name = entry.info.name
        self.shape, self.dtype = entry.shape, entry.dtype

    @property
    def computes(self) -> bool:
        """False in ``init``, which only finds out what there is."""
        return self._frame.mode is Mode.APPLY

    def _check_running(self) -> None:
        if not is_running(self._frame):
            raise RuntimeError(
                f"the Variable {self.name}:0 was used outside of the "
                f"{self._frame.mode.value} that made it: a handle leaked out of the "
                "transformed function, or into another thread. Return what is needed from "
                f"the function, or read variables['{self.name}'] from what apply returns"
            )

    def read(self) -> Any:
        self._check_running()
        if not is_initialized(self.entry.value):
            raise FailedPreconditionError(
                f"Attempting to use uninitialized value {self.name}; these variables are "
                "only declared: make them with model.init(key, *args)"
            )
        return self.entry.value

    def read_or_initial(self) -> Any:
        if is_initialized(self.entry.value):
            return self.read()
        self._check_running()
        return initial_value(self.entry.make_initial, self._frame.key, self.name)

    def write(self, value: jax.Array, what: str) -> None:
        self._check_running()
        if not self._frame.in_own_trace():
            raise RuntimeError(
                f"{what} inside of a scan, cond, while_loop, vmap, jit, grad or checkpoint "
                "that began within the transformed function: the value would leak out of "
                "it. Return the new value from the inner function, and assign it outside"
            )
        self.entry.value = value


class CopyCell:
    """The value that a JAX transformation put in the place of a handle."""

    computes = True

    def __init__(self, name: str, value: Any) -> None:
        self.name, self._value = name, value

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self._value))

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._value.dtype)

    def read(self) -> Any:
        return self._value

    read_or_initial = read

    def write(self, value: jax.Array, what: str) -> None:
        del value
        raise RuntimeError(
            f"{what} on a copy: the handle went through jit, vmap, grad or another "
            "transformation as an argument. Return the new value from the inner function, "
            "and assign it outside"
        )
