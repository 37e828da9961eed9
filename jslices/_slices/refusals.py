"""Attributes that arrays have and slices lack, and what to type instead."""

from typing import Any

import jax
import numpy as np

from jslices._jax import set_type_of
from jslices._slices.entries import Entries

#: What to type instead of attributes that slices lack.
_INSTEAD = {
    "size": "math.prod(slices.shape), or slices.values.size for what is held",
    "nbytes": "slices.values.nbytes + slices.indices.nbytes",
    "block_until_ready": "jax.block_until_ready(slices)",
    "at": "jslices.scatter_update(table, ids, rows) and its relatives",
    "if slices": "grad is None, or slices.to_dense().any()",
    "len(slices)": "slices.shape[0], or slices.indices.size for the rows held",
    "slices ** x": "slices.square_sum() or jslices.global_norm(grads)",
    "abs(slices)": "abs(slices.coalesce().values)",
}
_OPERATORS = {
    "__bool__": "if slices",
    "__len__": "len(slices)",
    "__float__": "float(slices)",
    "__int__": "int(slices)",
    "__abs__": "abs(slices)",
    "__pow__": "slices ** x",
    "__rpow__": "x ** slices",
    "__mod__": "slices % x",
    "__floordiv__": "slices // x",
    "__rtruediv__": "x / slices",
    "__lt__": "slices < x",
    "__le__": "slices <= x",
    "__gt__": "slices > x",
    "__ge__": "slices >= x",
    "__eq__": "slices == x",
    "__ne__": "slices != x",
    "__dlpack__": "from_dlpack(slices)",
    "__dlpack_device__": "from_dlpack(slices)",
    "_type_for_jax": "jax.typeof(slices), nor are they operands of jax.lax",
}
_ARRAYS = jax.Array, np.ndarray
_COMPARED = (Entries, *_ARRAYS, np.generic, bool, int, float, complex)


class Refusals(Entries):
    """Slices whose errors say what to type when they are used like arrays."""

    def _no_attribute(self, name: str) -> AttributeError:
        if name not in _INSTEAD and not any(hasattr(x, name) for x in _ARRAYS):
            return AttributeError(f"'IndexedSlices' object has no attribute {name!r}")
        instead = f"slices.to_dense().{name}"
        return AttributeError(self._have_no(f"slices.{name}", _INSTEAD.get(name, instead)))

    def _have_no(self, what: str, instead: str) -> str:
        return (
            f"IndexedSlices have no {what}: they are {self.indices.shape[-1]} rows of an "
            f"array {self._type} that is zero elsewhere; type {instead}, or take "
            "slices.values and slices.indices"
        )


def _refuse_operator(name: str, expression: str) -> None:
    """Make an operator say what to type."""

    def refuse(self: Refusals, *others: object, **options: object) -> Any:
        if name in ("__eq__", "__ne__") and not isinstance(others[0], _COMPARED):
            return NotImplemented  # None, say: Python tells whether it is the same object
        instead = _INSTEAD.get(expression, "slices.to_dense() first")
        # JAX puts a TypeError of an operand into other words.
        error = ValueError if name == "_type_for_jax" else TypeError
        raise error(self._have_no(expression, instead))

    setattr(Refusals, name, refuse)


Refusals.__hash__ = Entries.__hash__  # type: ignore[method-assign]
for _name, _expression in _OPERATORS.items():
    _refuse_operator(_name, _expression)
set_type_of(Refusals, Refusals._type_for_jax)  # type: ignore[attr-defined]
