"""Types for values that JAX leaves untyped, so that signatures say what they take."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax

#: Any pytree.
PyTree: TypeAlias = Any
#: A pytree of arrays: the parameters of a model.
Params: TypeAlias = Any
#: A pytree that mirrors the parameters: an array, an IndexedSlices or None for each.
Gradients: TypeAlias = Any
#: The state of an optimizer, a pytree of arrays.
State: TypeAlias = Any
#: A traced or described array: it has a shape and a dtype.
Aval: TypeAlias = Any
#: Arrays, one after the other.
Arrays: TypeAlias = tuple[jax.Array, ...]
#: The state of rows, by name: arrays ``[V, ...]`` beside a parameter, or some rows of them.
#: Rows that catch up have their ``"last"`` step there too.
Record: TypeAlias = dict[str, jax.Array]
#: What a step does to rows: what it adds to them, and what it changes of their state.
Change: TypeAlias = tuple[jax.Array, Record]
#: A key of ``jax.random``, typed or old.
Key: TypeAlias = jax.Array
#: A dimension: an int, or a symbolic one of ``jax.export``.
Size: TypeAlias = Any
#: A leaf of a tree of gradients or updates: an array, an IndexedSlices or None.
Leaf: TypeAlias = Any
#: A hyperparameter: a number, or an array ``[]``.
Scalar: TypeAlias = float | jax.Array
#: A hyperparameter as a function of the step, which counts from 0.
Schedule: TypeAlias = Callable[[jax.Array], Scalar]
#: The other side of an arithmetic operator: a number, an array or an IndexedSlices.
Operand: TypeAlias = Any
#: An index along one axis, in the brackets of ``array[...]``.
Index: TypeAlias = Any


class Transformation(Protocol):
    """A transformation of jslices or of Optax."""

    @property
    def init(self) -> Callable[..., State]: ...

    @property
    def update(self) -> Callable[..., tuple[Gradients, State]]: ...
