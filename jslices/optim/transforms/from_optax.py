"""Any Optax transformation, run on the touched rows only."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._jax import flatten, is_symbolic
from jslices._place.boundary import placed_as, row_major_array, running_with_auto_axes
from jslices._rows.bounds import set_rows
from jslices._rows.select import where_rows
from jslices._slices import IndexedSlices, deduplicated, is_slices
from jslices.optim._engine.checks import check_structure, checked_gradient, places
from jslices.optim._engine.execute import derivable, read_rows
from jslices.optim._engine.protocol import (
    GradientTransformation,
    is_leaf,
    shardings_of_update,
    warn_in_multi_steps,
)


def from_optax(tx: Any) -> GradientTransformation:
    """Lifts an Optax transformation to gradients that are IndexedSlices.

    At each step the duplicates are summed, the touched rows of the parameters and of every
    part of the state that mirrors the parameters are read, ``tx`` runs on those rows as if
    they were the whole array, and the rows are written back.

    Untouched rows: lazy. A row without gradient is neither read nor written, and nor is
    its state.

    ``tx`` must treat each row by itself, as nearly all do (Adam, RMSProp, Lion, clipping by
    value or by global norm, weight decay, schedules, chains and partitions of them). Before
    its first step it is tried on a small table, and refused if it does not: a trust ratio,
    a norm of the parameters, a mean over an array, noise.

    Args:
      tx: an ``optax.GradientTransformation``.

    Returns:
      A :class:`GradientTransformation`; its state is that of ``tx``.

    Raises:
      TypeError: for what is not a transformation.
      ValueError: from ``update``, without ``params``; for a transformation that does not
        treat each row by itself; for a state with an array that has as many rows as a table
        but not its shape (factored second moments), whose rows cannot be snapshot; and for
        ``optax.MultiSteps``, whose rows would wait for a step that touches them.

    Cost: a step reads and writes ``U * D`` elements of each parameter and state array.

    Example:
      >>> import jax.numpy as jnp, jslices as js, optax
      >>> tx = js.from_optax(optax.chain(optax.clip(0.5), optax.sgd(1.0)))
      >>> table = jnp.zeros((4, 1))
      >>> grads = js.IndexedSlices(jnp.ones((2, 1)), jnp.array([2, 2]), (4, 1))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> js.apply_updates(table, updates).ravel()
      Array([ 0. ,  0. , -0.5,  0. ], dtype=float32)

    Source: ours; Optax itself maps over the children of slices and changes the indices.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"from_optax wants an Optax transformation (with init and update), got {tx!r}"
        )

    tried: set[Any] = set()

    def update(
        grads: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "from_optax needs the parameters, to know which part of the state mirrors "
                "them: tx.update(grads, state, params)"
            )
        wanted = jax.tree.structure(jax.eval_shape(tx.init, params))
        check_structure("from_optax", state, wanted)
        _refuse_accumulation(state)
        leaves, tree = flatten(grads, is_leaf=is_leaf)
        arrays = tree.flatten_up_to(params)
        touched = [
            _coalesced(checked_gradient(place, g, p))
            for place, g, p in zip(places(tree), leaves, arrays, strict=True)
        ]
        kind = (tree, *((g.shape, g.dtype, is_slices(g)) for g in touched if g is not None))
        if any(map(is_slices, touched)) and kind not in tried:
            tried.add(kind)
            _refuse_mixing(tx, lifted, touched, tree)
        return lifted(tree.unflatten(touched), state, params, **extra_args)

    def lifted(grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        touched, tree = flatten(grads, is_leaf=is_leaf)
        arrays = tree.flatten_up_to(params)
        rows = _Rows(tree, arrays, touched)
        values = [_values(g) if is_slices(g) else g for g in touched]
        outputs, new_state = tx.update(
            tree.unflatten(values), rows.read_state(state), rows.read(params), **extra_args
        )
        updates = [
            _update(u, g) for u, g in zip(tree.flatten_up_to(outputs), touched, strict=True)
        ]
        return tree.unflatten(updates), rows.write_state(state, new_state)

    def init(params: Any) -> Any:
        warn_in_multi_steps()
        leaves, tree = flatten(params)
        return _Rows(tree, leaves, ()).placed(tx.init(params))

    def update_on_mesh(
        grads: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        def run(grads: Any, state: Any, params: Any, extra_args: Any) -> tuple[Any, Any]:
            return update(grads, state, params, **extra_args)

        arguments = grads, state, params, extra_args
        result: tuple[Any, Any] = running_with_auto_axes(run, shardings_of_update)(
            *arguments
        )
        return result

    return GradientTransformation(init, update_on_mesh)


class _Rows:
    """Reads and writes the touched rows of trees that mirror the parameters."""

    def __init__(self, tree: Any, arrays: Sequence[Any], touched: Sequence[Any]) -> None:
        self.tree, self.arrays, self.touched = tree, arrays, touched
        self.heights = {g.dense_shape[0] for g in touched if is_slices(g)}

    def mirrors(self, subtree: Any) -> bool:
        """True for a part of the state that has the structure and shapes of params.

        What a mask leaves out is an empty node there.
        """
        try:
            parts = self.tree.flatten_up_to(subtree)
        except (TypeError, ValueError):
            return False
        given = [x for x in zip(parts, self.arrays, strict=True) if not _left_out(x[0])]
        same = all(jnp.shape(x) == jnp.shape(p) for x, p in given if hasattr(x, "shape"))
        return bool(given) and same and all(hasattr(x, "shape") for x, _ in given)

    def read(self, subtree: Any) -> Any:
        def rows(x: Any, g: Any) -> Any:
            if not is_slices(g) or _left_out(x):
                return x
            return derivable(_present(g), read_rows(x, g.indices))

        return self._map(rows, subtree)

    def write(self, subtree: Any, rows: Any) -> Any:
        given = iter(self.tree.flatten_up_to(rows))

        def written(x: Any, g: Any) -> Any:
            new = next(given)
            if not is_slices(g) or _left_out(x):
                return new
            return row_major_array(set_rows(x, g.indices, new.astype(x.dtype)))

        return self._map(written, subtree)

    def placed(self, state: Any) -> Any:
        """The state with its arrays on the devices where the parameters are."""

        def place(part: Any) -> Any:
            pairs = zip(self.arrays, self.tree.flatten_up_to(part), strict=True)
            return self.tree.unflatten(
                [x if _left_out(x) else placed_as(p, x) for p, x in pairs]
            )

        return self._each(state, place, lambda x: x)

    def read_state(self, state: Any) -> Any:
        return self._each(state, self.read, self._refuse_rows)

    def write_state(self, state: Any, new: Any) -> Any:
        structure = flatten(state, is_leaf=self.mirrors)[1]
        parts = iter(structure.flatten_up_to(new))
        return self._each(
            state, lambda part: self.write(part, next(parts)), lambda _: next(parts)
        )

    def _each(
        self, state: Any, mirrored: Callable[..., Any], other: Callable[..., Any]
    ) -> Any:
        return jax.tree.map(
            lambda part: mirrored(part) if self.mirrors(part) else other(part),
            state,
            is_leaf=self.mirrors,
        )

    def _map(self, f: Callable[..., Any], subtree: Any) -> Any:
        parts = self.tree.flatten_up_to(subtree)
        return self.tree.unflatten(map(f, parts, self.touched))

    def _refuse_rows(self, x: Any) -> Any:
        if jnp.ndim(x) and jnp.shape(x)[0] in self.heights:
            raise ValueError(
                "from_optax cannot tell the rows of a state array of shape "
                f"{jnp.shape(x)}, which does not mirror the parameters; use an optimizer "
                "whose state does (not a factored one), or one of jslices' own"
            )
        return x


def _left_out(x: Any) -> bool:
    return not jax.tree.leaves(x)


#: States of transformations of Optax that act on all rows in some of their steps, or judge
#: all rows together, which trying one step does not show.
ACT_ON_ALL_ROWS = {
    "ApplyEvery": "apply_every",
    "DAdaptAdamWState": "contrib.dadapt_adamw",
    "DoGState": "contrib.dog",
    "DoWGState": "contrib.dowg",
    "LookaheadState": "lookahead",
    "ProdigyState": "contrib.prodigy",
    "SAMState": "contrib.sam",
}


def _refuse_accumulation(state: Any) -> None:
    """Refuses what acts on all rows at once in some step, wherever its state stands."""
    kinds = {type(node).__name__ for node in _nodes(state)}
    for kind in kinds & set(ACT_ON_ALL_ROWS):
        raise ValueError(
            f"from_optax cannot lift optax.{ACT_ON_ALL_ROWS[kind]}: it judges or moves all "
            "rows together, and rows that a step does not touch would miss that; give it "
            "dense gradients (sparse=False)"
        )
    if "MultiStepsState" in kinds:
        raise ValueError(
            "from_optax cannot lift optax.MultiSteps: rows that the last micro-step does "
            "not touch would keep what they have gathered. Accumulate the slices: "
            "jslices.accumulate_gradients, or jslices.optim.multi_steps(from_optax(tx), k, "
            "grads)"
        )


def _nodes(tree: Any) -> Iterator[Any]:
    """The tree and all that is in it."""
    yield tree
    inside = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
    for node in inside:
        if node is not tree and not hasattr(node, "shape"):
            yield from _nodes(node)


def _coalesced(grad: Any) -> Any:
    return deduplicated(grad) if is_slices(grad) else grad


def _present(grad: IndexedSlices) -> jax.Array:
    """bool ``[U]``: which entries are of a row."""
    assert grad.dense_shape is not None
    return grad.indices < grad.dense_shape[0]


def _values(grad: IndexedSlices) -> jax.Array:
    """The values, zero in empty entries, through which no derivative passes there."""
    return where_rows(_present(grad), grad.values, jax.lax.stop_gradient(grad.values))


def _update(update: Any, grad: Any) -> Any:
    if not isinstance(grad, IndexedSlices) or grad.dense_shape is None:
        return update
    update = where_rows(_present(grad), update, jnp.zeros((), update.dtype))
    return grad.with_values(update)


#: Rows of the table that is tried, and which of them get a gradient.
HEIGHT, TOUCHED = 7, (1, 4)


def _refuse_mixing(
    tx: Any, lifted: Callable[..., Any], grads: Sequence[Any], tree: Any
) -> None:
    """Refuses a transformation that is not the same on rows as on the whole array.

    It is tried on tables of a few rows: on the dense gradient of two of them, and, lifted,
    on these rows alone.

    Args:
      tx: the transformation.
      lifted: its ``update`` on IndexedSlices.
      grads: the gradients that came, for their kinds, shapes and dtypes.
      tree: their structure.

    Raises:
      ValueError: if the updates of the two rows differ.
    """
    try:
        with jax.ensure_compile_time_eval():
            difference = float(jax.jit(lambda: _difference(tx, lifted, grads, tree))())
    except (ArithmeticError, TypeError, ValueError, IndexError, KeyError):
        return  # It does not run on tables this small, which says nothing.
    if difference > 1e-3:
        raise ValueError(
            "from_optax: this transformation does not treat each row by itself. On a "
            f"table of {HEIGHT} rows, {len(TOUCHED)} of them with a gradient, its updates "
            f"differ by {difference:.0%} from those it makes of these rows alone. Trust "
            "ratios, norms of parameters, means over an array, factored moments and noise "
            "do that: use jslices.lamb or jslices.adafactor, or give it dense gradients "
            "(sparse=False)"
        )


def _difference(
    tx: Any, lifted: Callable[..., Any], grads: Sequence[Any], tree: Any
) -> jax.Array:
    rng = np.random.default_rng(0)

    def random(shape: Sequence[int], dtype: Any) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    columns: list[tuple[Any, Any, Any, Any]] = []
    for g in grads:
        if g is None:
            columns.append((random((), jnp.float32), None, None, None))
            continue
        by_row = is_slices(g)
        shape = tuple(HEIGHT if is_symbolic(n) else min(n, HEIGHT) for n in g.shape)
        shape = (HEIGHT, *g.values.shape[1:]) if by_row else shape
        param, before, now = (random(shape, g.dtype) for _ in range(3))
        rows: Any = now
        if by_row:
            touched = jnp.array(TOUCHED)
            rows = IndexedSlices(now[touched], touched, shape)
            now = rows.to_dense()
        columns.append((param, before, now, rows))
    params, before, whole, rows = map(tree.unflatten, zip(*columns, strict=True))
    _, state = tx.update(before, tx.init(params), params)
    wanted, got = tx.update(whole, state, params)[0], lifted(rows, state, params)[0]
    worst = jnp.zeros(())
    for u, w in zip(tree.flatten_up_to(got), tree.flatten_up_to(wanted), strict=True):
        if is_slices(u):
            u, w = u.values, w[u.indices]
        if u is not None and jnp.issubdtype(u.dtype, jnp.floating):
            gap = jnp.max(jnp.abs(u - w)) / (jnp.max(jnp.abs(w)) + 1e-30)
            worst = jnp.maximum(worst, gap.astype(worst.dtype))
    return worst
