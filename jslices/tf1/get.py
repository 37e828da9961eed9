"""get_variable: a variable by its name, created once and shared from then on."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices.tf1._create import Wish
from jslices.tf1._names import check_name
from jslices.tf1._operators import ArrayOperators
from jslices.tf1._values import canonical_dtype, dtype_of, static_shape
from jslices.tf1.frame import current_frame
from jslices.tf1.initializers import zeros_initializer
from jslices.tf1.scaled_initializers import glorot_uniform_initializer
from jslices.tf1.scope import Regularizer, VariableScope, current_scope, join
from jslices.tf1.variable import Variable, value_wish


def get_variable(
    name: str,
    shape: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    initializer: Any = None,
    trainable: bool = True,
    collections: Sequence[str] | None = None,
    regularizer: Regularizer | None = None,
) -> Variable:
    """The variable of this name in the present scope: a new one, or the one to share.

    Args:
      name: after the scope's: ``v`` in the scope ``foo/bar`` is ``foo/bar/v:0``.
      shape: of a new variable. Of a shared one: None, or what it must fit (None for any
        length of an axis).
      dtype: None means that of a constant initializer, else the scope's, else float32.
      initializer: a function ``init(key, shape, dtype)``, such as those of jslices or of
        ``jax.nn.initializers``; or a constant, whose shape and dtype are then the
        variable's. None means the scope's, else ``glorot_uniform_initializer`` (zeros for
        integers).
      trainable: whether it belongs to ``variables.trainable``.
      collections: keys of the collections to put it into; None means ``["variables"]``.
      regularizer: a function of the array; what it gives is in
        ``get_collection("regularization_losses")``. None means the scope's.

    Returns:
      The handle; the same object each time the variable is shared.

    Raises:
      ValueError: if it exists and the scope does not reuse, if it does not and the scope
        does, if shape or dtype are not those of the shared one, or miss.
      TypeError: for a name that is no string.
      RuntimeError: outside of a transformed function.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> def model(ids):
      ...     table = js.get_variable("table", [100, 8], initializer=js.ones_initializer())
      ...     return table[ids].sum()
      >>> model = js.transform(model)
      >>> variables = model.init(jax.random.key(0), jnp.array([3, 3]))
      >>> model.apply(variables, jnp.array([3, 3]))
      (Array(16., dtype=float32), Variables(table: float32[100, 8]))

    Source: ``tf.get_variable``. Its initializers take no key and are
    ``init(shape, dtype)``; the key here is the one given to ``init`` folded with the
    variable's name, so that a value depends on no other variable.
    """
    frame = current_frame("get_variable")
    scope = current_scope(frame)
    full = join(scope.name, check_name(name, "get_variable"))
    found = frame.store.get(full)
    if found is not None:
        if not scope.reuse:
            raise ValueError(
                f"Variable {full} already exists, disallowed. Did you mean to set "
                "reuse=True or reuse=js.AUTO_REUSE in VarScope?"
            )
        _check_shared(found, full, shape, _shared_dtype(dtype, initializer, scope))
        return found
    if scope.reuse is True:
        raise ValueError(
            f"Variable {full} does not exist, or was not created with js.get_variable(). "
            "Did you mean to set reuse=js.AUTO_REUSE in VarScope?"
        )
    with frame.names.given_back_on_error():
        # A name that a Variable has already: this one becomes v_1, as in TensorFlow.
        unique = frame.names.unique_path(full)
        wish = dataclasses.replace(
            _wish(unique, shape, dtype, initializer, scope),
            trainable=trainable,
            collections=collections,
            regularizer=scope.regularizer if regularizer is None else regularizer,
        )
        frame.store[full] = Variable._new(frame, wish)
    return frame.store[full]


def _is_function(initializer: Any) -> bool:
    return callable(initializer) and not isinstance(initializer, ArrayOperators)


def _dtype(dtype: DTypeLike | None, scope: VariableScope) -> np.dtype:
    wanted = scope.dtype if dtype is None else dtype
    return canonical_dtype(jnp.float32 if wanted is None else wanted)


def _shared_dtype(
    dtype: DTypeLike | None, initializer: Any, scope: VariableScope
) -> np.dtype:
    """What a shared variable must have. A constant tells, as it does when creating."""
    if dtype is None and initializer is not None and not _is_function(initializer):
        return dtype_of(initializer)
    return _dtype(dtype, scope)


def _check_shared(found: Variable, name: str, shape: Any, dtype: np.dtype) -> None:
    if shape is not None:
        wanted = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
        fits = len(wanted) == len(found.shape) and all(
            w is None or w == f for w, f in zip(wanted, found.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"Trying to share variable {name}, but specified shape {wanted} and found "
                f"shape {found.shape}."
            )
    declared = found._cell.entry.declared_dtype  # type: ignore[union-attr]
    if dtype != declared:
        raise ValueError(
            f"Trying to share variable {name}, but specified dtype {dtype} and found "
            f"dtype {declared}."
        )


def _static_shape(shape: Any, name: str) -> tuple[int, ...]:
    dims = tuple(shape) if isinstance(shape, list | tuple | np.ndarray) else (shape,)
    if any(n is None for n in dims):
        raise ValueError(
            f"Shape of a new variable ({name}) must be fully defined, but instead was "
            f"{dims}."
        )
    return static_shape(shape, name)


def _wish(
    name: str, shape: Any, dtype: Any, initializer: Any, scope: VariableScope
) -> Wish:
    """What get_variable asks for when it creates."""
    given = scope.initializer if initializer is None else initializer
    if given is not None and not _is_function(given):
        return _constant_wish(name, shape, dtype, given)
    if shape is None:
        raise ValueError(
            f"Variable {name} did not get an initializer, so its `shape` argument must be "
            "specified."
            if given is None
            else f"Shape of a new variable ({name}) must be fully defined, but instead was "
            "<unknown>."
        )
    static, wanted = _static_shape(shape, name), _dtype(dtype, scope)
    if given is None:
        floating = jnp.issubdtype(wanted, jnp.inexact)
        given = glorot_uniform_initializer() if floating else zeros_initializer()
    initialize: Any = given() if inspect.isclass(given) else given

    def make(key: Any) -> jax.Array:
        made: jax.Array = initialize(key, static, wanted)
        return made

    return Wish(name, make, static, wanted, initial=make)


def _constant_wish(name: str, shape: Any, dtype: Any, constant: Any) -> Wish:
    if shape is not None:
        raise ValueError(
            f"If initializer is a constant, do not specify shape. Variable {name} got both."
        )
    theirs = dtype_of(constant)
    if dtype is not None and canonical_dtype(dtype) != theirs:
        raise ValueError(
            f"Initializer type '{theirs}' and explicit dtype '{canonical_dtype(dtype)}' of "
            f"Variable {name} don't match."
        )
    return value_wish(name, constant, theirs)
