"""Variable: a handle on a piece of state, inside of a transformed function."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices.tf1._assigning import Assignable
from jslices.tf1._cells import CopyCell, LiveCell
from jslices.tf1._create import Wish, create
from jslices.tf1._lazy import LazyValue
from jslices.tf1._names import bare_name, check_name
from jslices.tf1._operators import ArrayOperators
from jslices.tf1._values import (
    as_value,
    canonical_dtype,
    check_dtype,
    dtype_of,
    is_array,
)
from jslices.tf1.frame import Frame, current_frame
from jslices.tf1.state import VariableInfo


class Variable(Assignable):
    """A variable of the function that :func:`jslices.transform` runs.

    Inside of that function a handle is used as the array it holds, and assigned to;
    afterwards ``apply`` returns the new values. It is found again by its name, which is
    made unique: ``v``, ``v_1``, ...; :func:`jslices.get_variable` shares one instead.

    Operators, indexing, ``jax.numpy``, ``jax.nn`` and array methods take a handle. The
    functions of ``jax.lax`` take arrays only, and want ``v.value()``; for a convolution
    there is :func:`jslices.tf1.nn.conv2d`. ``==`` compares handles, not values.

    Args:
      initial_value: an array, number or list, what :func:`jslices.random_normal` and the
        like give, or a function of nothing or of a PRNG key that gives one; its shape
        ``[...]`` is the variable's. Looked at by ``init`` only.
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
        with frame.names.given_back_on_error():
            wish = _wish(frame.names.unique(checked), initial_value, wanted)
            wish = dataclasses.replace(wish, trainable=trainable, collections=collections)
            self._bind(frame, wish)

    def _bind(self, frame: Frame, wish: Wish) -> None:
        cell = self._cell = create(frame, wish)
        frame.add(cell.entry, self)

    @classmethod
    def _new(cls, frame: Frame, wish: Wish) -> "Variable":
        """What get_variable makes: the name is settled already."""
        new = object.__new__(cls)
        new._bind(frame, wish)
        return new

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

    def eval(self, session: Any = None) -> Any:
        """The same as :meth:`value`; TensorFlow needs a session for it."""
        del session
        return self.value()

    def initialized_value(self) -> Any:
        """The value; the initial one if there is none yet. For initial values of others."""
        return self._cell.read_or_initial()


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
        return _own(as_value(made, wanted, f"the initial value of {name}"))

    return Wish(name, make, None, dtype, initial=make)


def value_wish(name: str, value: Any, dtype: np.dtype) -> Wish:
    """A variable that begins with this very value.

    To begin again with, only a number or what to draw is kept: an array may be as large
    as a table.
    """
    if isinstance(value, LazyValue):
        return _lazy_wish(name, value, dtype)
    array = as_value(value, dtype, f"the initial value of {name}")
    recipe = current_frame("Variable").recipe_of(value)
    number = isinstance(value, bool | int | float | complex)
    again = (lambda key: jnp.asarray(value, dtype)) if number else None
    if recipe is not None:
        again = lambda key: recipe()  # noqa: E731
    return Wish(name, lambda key: _own(array), tuple(array.shape), dtype, initial=again)


def _lazy_wish(name: str, value: LazyValue, dtype: np.dtype) -> Wish:
    check_dtype(value.dtype, dtype, f"the initial value of {name}")
    value.begins(name)

    def make(key: Any) -> jax.Array:
        del key  # each draw has a place of its own
        made: jax.Array = value.value()
        return made

    return Wish(name, make, value.shape, dtype, initial=make if value.again else None)


def _own(array: jax.Array) -> jax.Array:
    """A copy: donating the variables must not take an array away from somebody else."""
    return jnp.array(array, copy=True)


def _dtype_of_any(value: Any) -> np.dtype:
    """The dtype of a constant, which may be a list that holds arrays."""
    if isinstance(value, ArrayOperators):
        return np.dtype(value.dtype)
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
