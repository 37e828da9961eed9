"""Checks that gradients, parameters and the state of an optimizer belong together."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef

from jslices._arguments import check_array
from jslices._place.boundary import platform_of
from jslices._place.hints import (
    UNKEPT_BYTES,
    hint_large_step,
    hint_rows,
    keep_memory_of_steps,
)
from jslices._rows.access import is_below
from jslices._slices import IndexedSlices, check_slices
from jslices._typing import Leaf, State
from jslices.optim.engine import protocol
from jslices.optim.engine.boxes import is_box
from jslices.optim.engine.clock import OLD_CLOCK

#: The state of an ``nnx.Optimizer``, out of its Variables.
PURE = "nnx.as_pure(optimizer.opt_state)"

#: The names of state arrays, and their shapes.
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def check_state(state: State, state_type: type[State], names: Sequence[str]) -> None:
    """Reject the state of another optimizer, or of one with other settings."""
    if not isinstance(state, state_type):
        raise TypeError(other_state("this optimizer", state, _shown(state_type)))
    if not jax.tree.leaves(state._replace(count=None)):  # of no parameters
        return
    present = [name for name in state._fields[1:] if getattr(state, name) is not None]
    if set(present) != set(names):
        raise TypeError(
            f"this optimizer keeps {_listed(names)} in its {state_type.__name__}, got one "
            f"with {_listed(present)}: it was made by tx.init with other settings"
        )
    if hasattr(getattr(getattr(state, "clock", None), "log", None), "shape"):
        raise TypeError(OLD_CLOCK)  # unpickled, as old ones had as many fields


def check_fields(caller: str, state: State, state_type: type[State]) -> None:
    """Reject a state that lacks these fields; that of Optax, which has them, passes."""
    if not all(hasattr(state, name) for name in state_type._fields):
        raise TypeError(other_state(caller, state, _shown(state_type)))
    if any(map(is_box, state)):
        raise TypeError(f"{caller} wants its state as arrays, got Variables; pass {PURE}")


def checked_gradient(
    path: str,
    grad: Leaf,
    param: Leaf,
    state: Mapping[str, jax.Array] = MappingProxyType({}),
    state_shapes: Callable[[tuple[int, ...]], Shapes] = lambda shape: {},
) -> Leaf:
    """The gradient of one array, as IndexedSlices with the shape of that array.

    Args:
      path: of the leaf, as JAX writes it, for errors.
      grad: an array ``[V, *D]``, IndexedSlices of it, or None.
      param: the array, or None where it is not known.
      state: its state arrays, by name.
      state_shapes: from the shape of the array to those of its state.

    Raises:
      TypeError: for slices whose indices a foreign ``tree.map`` has changed.
      ValueError: for slices with a batch axis, and where the shapes do not belong together.
    """
    if grad is None or protocol.is_float0(grad):
        return None
    protocol.refuse_slices(path, param)
    if not isinstance(grad, IndexedSlices):
        check_array(f"the gradient{path}", grad, "an array, IndexedSlices or None")
        shape, dtype = jnp.shape(grad), jnp.result_type(grad)
    else:
        check_slices(grad)
        if grad.indices.ndim != 1:
            raise ValueError(
                f"an optimizer got {grad}{path}, which carries a batch axis from vmap; "
                "sum it first: IndexedSlices(s.values.reshape(-1, *row_shape), "
                "s.indices.reshape(-1), s.dense_shape)"
            )
        if platform_of(grad.values) == "cpu":
            keep_memory_of_steps()
        if is_below(UNKEPT_BYTES - 1, grad.values.nbytes):
            hint_large_step(grad.values)
        if grad.dense_shape is None:
            tall = [x for x in (param, *state.values()) if x is not None]
            if not tall:
                return grad
            shape = (*tall[0].shape[:1], *grad.values.shape[1:])
            grad = IndexedSlices(grad.values, grad.indices, shape)
        shape, dtype = grad.dense_shape, grad.dtype
    if param is not None and shape != jnp.shape(param):
        raise ValueError(
            f"the gradient{path} belongs to an array of shape {shape}, and the parameter "
            f"has shape {jnp.shape(param)}; pass tx.update(grads, state, params) the "
            "gradients of these params"
        )
    protocol.check_width(f"the gradient{path}", dtype)
    check_shapes(path, shape, state, state_shapes(shape))
    if not isinstance(grad, IndexedSlices):
        return grad
    axes = grad.row_axes
    if 1 < axes == len(shape) and any(x.shape == shape[:-1] for x in state.values()):
        raise ValueError(
            f"the gradient{path} has rows numbered by {axes} axes of {shape}, and this "
            f"optimizer keeps a number for each vector along the last axis; give it rows "
            f"of at least that: row_axes={len(shape) - 1}"
        )
    if platform_of(grad.values, param) == "tpu":
        hint_rows(path, shape, axes, grad.values, param)
    return grad


def check_shapes(
    path: str, shape: tuple[int, ...], state: Mapping[str, jax.Array], shapes: Shapes
) -> None:
    """Reject state arrays that do not belong to an array of this shape."""
    for name, needed in shapes.items():
        if jnp.shape(state[name]) != needed:
            raise ValueError(
                f"an array of shape {shape}{path} needs {name} of shape {needed} in the "
                f"optimizer state, got {jnp.shape(state[name])}; was the state made with "
                "tx.init(params) for these params?"
            )


def arrays_of(state: State, name: str, tree: PyTreeDef) -> list[jax.Array]:
    """The state arrays of this name, one for each leaf of ``tree``."""
    try:
        return list(tree.flatten_up_to(getattr(state, name)))
    except ValueError as error:
        raise ValueError(
            f"the {name} of the optimizer state has another structure than the gradients "
            f"or parameters; was the state made with tx.init(params) for these? {error}"
        ) from error


def other_state(caller: str, state: State, expected: str) -> str:
    """The error for a state that the caller did not make."""
    help = (
        "; jslices.checkpoint.import_state makes it from another optimizer's arrays"
        if isinstance(state, tuple)
        else f"; of an nnx.Optimizer that is {PURE}"
        if type(state).__module__.startswith("flax.nnx.")
        else ": tx.apply(grads, state, params), tx.flush(params, state)"
    )
    return (
        f"{caller} keeps its state in {expected}, got a {_shown(type(state))}; pass the "
        f"state that its own tx.init(params) or its last step returned{help}"
    )


def _shown(state_type: type) -> str:
    fields = getattr(state_type, "_fields", ())
    return f"{state_type.__name__}({', '.join(fields)})" if fields else state_type.__name__


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
