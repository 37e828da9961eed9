"""What transformations and wrappers are made of."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jslices._jax import broadcast_prefix, flatten
from jslices._typing import Gradients, Leaf, Params, PyTree, State, Transformation
from jslices.optim.engine.protocol import GradientTransformation, has_no_rows, is_leaf
from jslices.optim.transforms.norms import as_leaf


def catching_up(
    tx: GradientTransformation,
    part: Callable[[State], State],
    whole: Callable[[State, State], State],
) -> dict[str, Any]:
    """``exact`` and ``catch_up`` of a transformation that holds ``tx``.

    Args:
      tx: sees all parameters.
      part: from a state of the whole to that of ``tx``.
      whole: ``whole(state, part)``, the state of the whole with a new part.
    """
    if not tx.catches_up:
        return {"exact": tx.exact}

    def catch_up(params: Params, state: State, ids: PyTree) -> tuple[Params, State]:
        params, new = tx.catch_up(params, part(state), ids)
        return params, whole(state, new)

    return {"catch_up": catch_up}


def renumbering(make: Callable[..., Any], *transforms: GradientTransformation) -> Any:
    """``of_rows`` of what ``make`` makes of some transformations."""
    if not any(tx.goes_by_row for tx in transforms):
        return None
    return lambda rows: make(*(tx.of_rows(rows) for tx in transforms))


def as_transformation(caller: str, tx: Transformation) -> GradientTransformation:
    """A transformation of jslices or of Optax as one of jslices; refuses anything else.

    One of Optax gets zeros for an array into which no gradient comes.
    """
    if isinstance(tx, GradientTransformation):
        return tx
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"{caller} wants transformations (with init and update), got {tx!r}"
        )

    @functools.wraps(tx.update)
    def update(
        grads: Gradients, state: State, params: Params = None, **extra_args: PyTree
    ) -> tuple[Gradients, State]:
        zeros = lambda g: g.to_dense() if has_no_rows(g) else g  # noqa: E731
        grads = jax.tree.map(zeros, grads, is_leaf=is_leaf)
        updates, new = tx.update(grads, state, params, **extra_args)
        if str(jax.tree.structure(new)) != str(jax.tree.structure(state)):
            raise TypeError(
                f"{caller} got a transformation of Optax whose state has another structure "
                "after a step of these gradients; type jslices.from_optax(tx) for it"
            )
        return updates, new

    return GradientTransformation(tx.init, update)


def stateless(f: Callable[[Gradients], Gradients], **parts: Any) -> GradientTransformation:
    """The transformation whose updates are ``f(grads)``, and whose state is ``()``."""

    def update(
        grads: Gradients, state: State, params: Params = None
    ) -> tuple[Gradients, State]:
        return f(grads), state

    return GradientTransformation(lambda params: (), update, **parts)


def each_leaf(f: Callable[[Leaf], Leaf], **parts: Any) -> GradientTransformation:
    """The stateless transformation that maps ``f`` over arrays and IndexedSlices."""
    over_present = lambda g: g if g is None else f(g)  # noqa: E731
    each = functools.partial(jax.tree.map, over_present, is_leaf=is_leaf)
    return stateless(each, **parts)


# --- Prefix pytrees, which say something of some of the parameters ------------------------


def map_with_prefix(
    argument: str, prefix: PyTree, f: Callable[..., Leaf], tree: PyTree, *rest: PyTree
) -> PyTree:
    """``tree``, which mirrors the parameters, with ``f(leaf, its value in prefix, *rest)``.

    Where the value is None the leaf stays; so do None and the nodes of ``partition``.
    """
    leaves, structure = flatten(tree, is_leaf=is_leaf_or_masked)
    if not leaves:  # of no parameters, as in optax.tree_map_params
        return tree
    columns = [values_of_prefix(argument, prefix, tree)]
    columns += map(structure.flatten_up_to, rest)
    return structure.unflatten(
        x if value is None or x is None or is_masked(x) else f(as_leaf(x), value, *more)
        for x, value, *more in zip(leaves, *columns, strict=True)
    )


def values_of_prefix(argument: str, prefix: PyTree, tree: PyTree) -> list[Any]:
    """The value of ``prefix`` for each leaf of ``tree``, None for nothing."""
    text = (
        f"{argument} must have the structure of the parameters or a prefix of it, with "
        "None for what it does not concern"
    )
    return broadcast_prefix(prefix, tree, text, is_leaf_or_masked)


def is_leaf_or_masked(x: Leaf) -> bool:
    """True for a leaf of a tree of gradients, and for the empty nodes of ``partition``."""
    return is_leaf(x) or is_masked(x)


def is_masked(x: Leaf) -> bool:
    return isinstance(x, tuple) and not x
