"""That gradients, parameters and state belong together, asked before anything is done."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jslices._place.hints import hint_large_step
from jslices._slices import IndexedSlices, check_slices

#: The names of state arrays, and their shapes.
Shapes = Mapping[str, tuple[int, ...]]


def check_state(state: Any, wanted: Any, kept: Sequence[str]) -> None:
    """Refuses the state of another optimizer, or of one with other settings."""
    if not isinstance(state, wanted):
        raise TypeError(_other_state("this optimizer", state, wanted.__name__))
    if not jax.tree.leaves(state._replace(count=None)):  # of no parameters
        return
    held = [name for name in state._fields[1:] if getattr(state, name) is not None]
    if set(held) != set(kept):
        raise TypeError(
            f"this optimizer keeps {_listed(kept)} in its {wanted.__name__}, got one with "
            f"{_listed(held)}: it was made by tx.init with other settings"
        )


def check_fields(caller: str, state: Any, wanted: Any) -> None:
    """Refuses a state without the fields of ``wanted``, which that of Optax has as well."""
    if not all(hasattr(state, name) for name in wanted._fields):
        raise TypeError(_other_state(caller, state, wanted.__name__))


def check_links(state: Any, count: int) -> None:
    """Refuses anything but the tuple of ``count`` states that a chain has."""
    if not isinstance(state, tuple) or hasattr(state, "_fields") or len(state) != count:
        raise TypeError(_other_state("this chain", state, f"a tuple of {count} states"))


def check_structure(caller: str, state: Any, wanted: Any) -> None:
    """Refuses a state that is not of this structure."""
    if jax.tree.structure(state) != wanted:
        raise TypeError(_other_state(caller, state, f"the structure {wanted}"))


def checked_gradient(
    place: str,
    grad: Any,
    param: Any,
    state: Sequence[Any] = (),
    state_shapes: Callable[[tuple[int, ...]], Shapes] = lambda shape: {},
) -> Any:
    """The gradient of one array, as IndexedSlices with the shape of that array.

    Args:
      place: the leaf, as JAX writes it, for errors.
      grad: an array ``[V, *D]``, IndexedSlices of it, or None.
      param: the array, or None where it is not known.
      state: its state arrays.
      state_shapes: from the shape of the array to those of its state.

    Raises:
      TypeError: for slices whose indices a foreign ``tree.map`` has changed.
      ValueError: for slices with a batch axis, and where the shapes do not belong together.
    """
    if grad is None:
        return None
    if not isinstance(grad, IndexedSlices):
        given = jnp.shape(grad)
    else:
        check_slices(grad)
        if grad.indices.ndim != 1:
            raise ValueError(
                f"an optimizer got {grad}{place}, which carries a batch axis from vmap; "
                "sum it first: IndexedSlices(s.values.reshape(-1, *row_shape), "
                "s.indices.reshape(-1), s.dense_shape)"
            )
        hint_large_step(grad.values.nbytes)
        heights = [x.shape[0] for x in (*[param] * (param is not None), *state)]
        if grad.dense_shape is None and not heights:
            return grad
        given = grad.dense_shape or (heights[0], *grad.values.shape[1:])
    if param is not None and given != jnp.shape(param):
        raise ValueError(
            f"the gradient{place} belongs to an array of shape {given}, and the parameter "
            f"has shape {jnp.shape(param)}; pass tx.update(grads, state, params) the "
            "gradients of these params"
        )
    check_shapes(place, given, state, state_shapes(given))
    if isinstance(grad, IndexedSlices) and grad.dense_shape is None:
        return IndexedSlices(grad.values, grad.indices, given)
    return grad


def check_shapes(
    place: str, shape: tuple[int, ...], state: Sequence[Any], wanted: Shapes
) -> None:
    """Refuses state arrays that do not belong to an array of this shape."""
    for array, (name, needed) in zip(state, wanted.items(), strict=True):
        if jnp.shape(array) != needed:
            raise ValueError(
                f"an array of shape {shape}{place} needs {name} of shape {needed} in the "
                f"optimizer state, got {jnp.shape(array)}; was the state made with "
                "tx.init(params) for these params?"
            )


def arrays_of(state: Any, name: str, tree: Any) -> list[Any]:
    """The state arrays of this name, one for each leaf of ``tree``."""
    try:
        return list(tree.flatten_up_to(getattr(state, name)))
    except ValueError as error:
        raise ValueError(
            f"the {name} of the optimizer state has another structure than the gradients "
            f"or parameters; was the state made with tx.init(params) for these? {error}"
        ) from error


def places(tree: Any) -> list[str]:
    """`` at ['table']`` for each leaf of ``tree``; nothing for a tree that is a leaf."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree.unflatten(range(tree.num_leaves)))
    return [f" at {jax.tree_util.keystr(path)}" if path else "" for path, _ in paths]


def _other_state(caller: str, state: Any, wanted: str) -> str:
    return (
        f"{caller} keeps its state in {wanted}, got a {type(state).__name__}; pass the "
        "state that its own tx.init(params) or its last step returned"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
