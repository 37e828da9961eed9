"""Variable: a handle on a piece of state, inside of a transformed function."""

import dataclasses
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices._errors import OutOfRangeError
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices.variables._cells import CopyCell, LiveCell
from jslices.variables._create import Wish, create
from jslices.variables._names import bare_name, check_name
from jslices.variables._operators import ArrayOperators
from jslices.variables._row_updates import scatter_rows
from jslices.variables._values import (
    as_value,
    canonical_dtype,
    check_shape,
    dtype_of,
    is_array,
)
from jslices.variables.frame import Frame, current_frame
from jslices.variables.state import VariableInfo


class Variable(ArrayOperators):
    """A variable of the function that :func:`jslices.transform` runs.

    Inside of that function a handle is used as the array it holds, and assigned to;
    afterwards ``apply`` returns the new values. It is found again by its name, which is
    made unique: ``v``, ``v_1``, ...; :func:`jslices.get_variable` shares one instead.

    Args:
      initial_value: an array, number or list, or a function of nothing or of a PRNG key
        that gives one; its shape ``[...]`` is the variable's. Looked at by ``init`` only.
      trainable: whether it belongs to ``variables.trainable``.
      collections: keys of the collections to put it into; None means ``["variables"]``.
      validate_shape: as in TensorFlow; here every shape is known.
      name: None means ``"Variable"``; a name scope goes before it.
      dtype: None means that of the value (float32 and int32 for Python's numbers).

    Raises:
      RuntimeError: outside of a transformed function.
      TypeError, ValueError: for a value, a name or collections that are not right.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> def count():
      ...     steps = js.Variable(0, name="steps", trainable=False)
      ...     return steps.assign_add(1)
      >>> model = js.transform(count)
      >>> variables = model.init(jax.random.key(0))
      >>> out, variables = model.apply(variables)
      >>> int(out), variables
      (1, Variables(steps: int32[] not trainable))

    Source: ``tf.Variable`` of TensorFlow 1, whose state lives in a session. There reading
    a variable before or after an assignment is a matter of luck; here the order of the
    program decides.
    """

    _cell: LiveCell | CopyCell

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool = True,
        collections: Sequence[str] | None = None,
        validate_shape: bool = True,
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        del validate_shape
        frame = current_frame("Variable")
        if initial_value is None:
            raise ValueError("initial_value must be specified: Variable(jnp.zeros(3))")
        checked = check_name("Variable" if name is None else name, "Variable")
        wanted = None if dtype is None else canonical_dtype(dtype)
        full = frame.names.unique(checked)
        wish = _wish(full, initial_value, wanted)
        self._bind(
            frame, dataclasses.replace(wish, trainable=trainable, collections=collections)
        )

    def _bind(self, frame: Frame, wish: Wish) -> None:
        self._cell = create(frame, wish)
        frame.add(self._cell.entry, self)

    @classmethod
    def _new(cls, frame: Frame, wish: Wish) -> "Variable":
        """What get_variable makes: the name is settled already."""
        new = object.__new__(cls)
        new._bind(frame, wish)
        return new

    # --- what it is ---------------------------------------------------------------

    @property
    def name(self) -> str:
        """The whole name with ``:0``, as in TensorFlow: ``"foo/bar/v:0"``."""
        return f"{self._cell.name}:0"

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the value."""
        return self._cell.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._cell.shape

    def get_shape(self) -> tuple[int, ...]:
        """The shape, by TensorFlow's older name."""
        return self.shape

    @property
    def info(self) -> VariableInfo:
        """What is static about it."""
        cell = self._cell
        return cell.entry.info if isinstance(cell, LiveCell) else VariableInfo(cell.name)

    @property
    def trainable(self) -> bool:
        """Whether it belongs to ``variables.trainable``."""
        return self.info.trainable

    def __repr__(self) -> str:
        return f"<js.Variable '{self.name}' shape={self.shape} dtype={self.dtype}>"

    # --- reading ------------------------------------------------------------------

    def value(self) -> Any:
        """The array it holds now; a later assignment does not change that array.

        Raises:
          FailedPreconditionError: if it is only declared.
          RuntimeError: after the run that made the handle.
        """
        return self._cell.read()

    def eval(self, session: Any = None) -> Any:
        """The same; TensorFlow needs a session for it."""
        del session
        return self.value()

    def initialized_value(self) -> Any:
        """The value; the initial one if there is none yet. For initial values of others."""
        return self._cell.read_or_initial()

    # --- assigning ----------------------------------------------------------------

    def assign(self, value: Any, use_locking: bool = False) -> Any:
        """Replaces the value, and returns the new one.

        ``value``: of exactly this shape and dtype (Python's numbers become it); nothing is
        broadcast. IndexedSlices become dense, with a warning.

        Raises:
          ValueError, TypeError: for another shape or dtype, naming the variable.
        """
        del use_locking
        return self._assign("assign", value, lambda old, new: new)

    def assign_add(self, delta: Any, use_locking: bool = False) -> Any:
        """Adds ``delta``, and returns the new value; see :meth:`assign`.

        IndexedSlices are added row by row: duplicates add, empty slots are dropped.
        """
        del use_locking
        if is_slices(delta):
            return self._scatter("assign_add", "add", delta, whole=True)
        return self._assign("assign_add", delta, operator.add)

    def assign_sub(self, delta: Any, use_locking: bool = False) -> Any:
        """Subtracts ``delta``, and returns the new value; see :meth:`assign_add`."""
        del use_locking
        if is_slices(delta):
            return self._scatter("assign_sub", "sub", delta, whole=True)
        return self._assign("assign_sub", delta, operator.sub)

    def count_up_to(self, limit: int) -> Any:
        """Increments an integer scalar until it reaches ``limit``.

        Returns:
          ``[]``, the value before the increment.

        Raises:
          OutOfRangeError: at the limit; the variable is unchanged. Under ``jit``, where
            nothing can be raised, and in ``init``, it stays unchanged and is returned: a
            result of at least ``limit`` means that.
          TypeError, ValueError: if the variable is no integer scalar or ``limit`` no int.
        """
        what = f"count_up_to of {self.name}"
        if not isinstance(limit, int | np.integer) or isinstance(limit, bool):
            raise TypeError(f"{what} wants a Python int as limit, got {limit!r}")
        if not jnp.issubdtype(self.dtype, jnp.integer):
            raise TypeError(f"{what} wants an integer variable, this is {self.dtype}")
        if self.shape:
            raise ValueError(f"{what} wants a scalar variable, this has {self.shape}")
        if not jnp.iinfo(self.dtype).min <= limit <= jnp.iinfo(self.dtype).max:
            raise ValueError(f"{what}: the limit {limit} is no {self.dtype}")
        before = self.value()
        seen = self._cell.computes and not isinstance(before, jax.core.Tracer)
        if seen and int(before) >= limit:
            raise OutOfRangeError(f"Reached limit of {limit}: {self.name}")
        self._cell.write(jnp.where(before < limit, before + 1, before), what)
        return before

    # --- rows ---------------------------------------------------------------------

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Adds rows: ``v[indices[k]] += values[k]``; duplicates accumulate.

        As in all scatter methods: ``sparse_delta`` holds K rows ``[K, *D]`` for a variable
        ``[V, *D]``, of its dtype; a row number outside ``[0, V)`` is dropped (TensorFlow
        raises); ``dense_shape`` is not looked at; the new value is returned.

        Raises:
          ValueError: for something else than IndexedSlices, or rows of another shape.
          TypeError: for another dtype.

        Cost: reads and writes K rows, in place when the variables are donated.
        """
        del use_locking
        return self._scatter("scatter_add", "add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Subtracts rows; duplicates accumulate. See :meth:`scatter_add`."""
        del use_locking
        return self._scatter("scatter_sub", "sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Multiplies by rows; duplicates compound. See :meth:`scatter_add`."""
        del use_locking
        return self._scatter("scatter_mul", "mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Divides by rows; duplicates compound, integers truncate towards zero."""
        del use_locking
        return self._scatter("scatter_div", "div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """The smaller of old and new, elementwise. See :meth:`scatter_add`."""
        del use_locking
        return self._scatter("scatter_min", "min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """The larger of old and new, elementwise. See :meth:`scatter_add`."""
        del use_locking
        return self._scatter("scatter_max", "max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Replaces rows; of duplicates the last wins. See :meth:`scatter_add`."""
        del use_locking
        return self._scatter("scatter_update", "update", sparse_delta)

    # --- how ----------------------------------------------------------------------

    def _assign(self, verb: str, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        what = f"{verb} to {self.name}"
        if verb != "assign" and self.dtype == jnp.bool_:
            raise TypeError(f"{what} wants numbers, the variable is bool")
        value = as_value(value, self.dtype, what)
        check_shape(value, self.shape, what)
        old = self.value() if verb != "assign" else None
        self._cell.write(combine(old, value), what)
        return self.value()

    def _scatter(self, verb: str, how: str, delta: Any, whole: bool = False) -> Any:
        what = f"{verb} to {self.name}"
        if not is_slices(delta):
            raise ValueError(
                f"{what} wants IndexedSlices, got {type(delta).__name__}; make them with "
                "jslices.IndexedSlices(values, indices)"
            )
        check_slices(delta)
        rows, shape = tuple(delta.values.shape[1:]), self.shape
        if delta.indices.ndim != 1 or not shape or rows != shape[1:]:
            raise ValueError(
                f"{what}: a variable of shape {shape} takes rows of shape {shape[1:]}, "
                f"got values {tuple(delta.values.shape)}"
            )
        if whole and delta.dense_shape not in (None, shape):
            raise ValueError(
                f"{what}: the variable has shape {shape}, the slices {delta.dense_shape}"
            )
        if delta.dtype != self.dtype or (self.dtype == jnp.bool_ and how != "update"):
            raise TypeError(
                f"{what}: the variable is {self.dtype}, the slices are {delta.dtype}; "
                f"cast them: slices.astype('{self.dtype}')"
            )
        self._cell.write(scatter_rows(how, self.value(), delta), what)
        return self.value()


def _wish(name: str, value: Any, dtype: Any) -> Wish:
    """What ``Variable(value)`` asks for."""
    if not callable(value) or isinstance(value, ArrayOperators):
        return value_wish(name, value, dtype or _dtype_of_any(value))
    takes_key = any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(value).parameters.values()
    )

    def make(key: Any) -> jax.Array:
        made = value(key) if takes_key else value()
        wanted = dtype or _dtype_of_any(made)
        return as_value(made, wanted, f"the initial value of {name}")

    return Wish(name, make, None, dtype, initial=make)


def value_wish(name: str, value: Any, dtype: np.dtype) -> Wish:
    """A variable that begins with this very value.

    Only a number is kept to begin again with: an array may be as large as a table.
    """
    array = as_value(value, dtype, f"the initial value of {name}")
    number = isinstance(value, bool | int | float | complex)
    again = (lambda key: jnp.asarray(value, dtype)) if number else None
    return Wish(name, lambda key: array, tuple(array.shape), dtype, initial=again)


def _dtype_of_any(value: Any) -> np.dtype:
    """The dtype of a constant, which may be a list that holds arrays."""
    if isinstance(value, ArrayOperators):
        return value.value().dtype
    if isinstance(value, list | tuple):
        leaves = jax.tree.leaves(value)
        if any(is_array(x) for x in leaves):
            return np.dtype(jnp.result_type(*leaves))
    return dtype_of(value)


def _flatten(variable: Variable) -> tuple[tuple[Any], str]:
    return (variable.value(),), variable._cell.name


def _unflatten(name: str, children: Sequence[Any]) -> Variable:
    new = object.__new__(Variable)
    new._cell = CopyCell(bare_name(name), children[0])
    return new


# So that jnp.sum(v) and jax.jit(f)(v) take a handle: what they see is a read-only copy.
jax.tree_util.register_pytree_node(Variable, _flatten, _unflatten)
