"""Any Optax transformation, run on the touched rows only."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef

from jslices._densify import warn_at_line
from jslices._grad.untouched import read_update
from jslices._jax import flatten
from jslices._place.boundary import on_any_mesh, placed_as, row_major_array
from jslices._rows.access import room_for_distinct, rows_numbered, set_rows, where_rows
from jslices._slices import IndexedSlices, deduplicated, is_slices
from jslices._typing import Gradients, Leaf, Params, PyTree, State, Transformation
from jslices.optim.engine import protocol
from jslices.optim.engine.checks import checked_gradient, other_state
from jslices.optim.engine.constructors import combinator
from jslices.optim.engine.protocol import GradientTransformation, is_leaf
from jslices.optim.engine.step import Plan, read_rows

MIXES = (
    "from_optax: this transformation does not treat each row by itself, as far as can be "
    "read ({}). Trust ratios, norms of parameters, means over arrays, factored moments, "
    "noise and measurements do not: use jslices.lamb or jslices.adafactor, measure beside "
    "the step, or give it dense gradients (sparse=False)"
)
LIFTED_IS_LAZY = (
    "train_step got jslices.from_optax(...), which is lazy: rows wait in steps that do not "
    "read them, and make up for none. Type an optimizer of jslices with "
    'untouched="exact"; or, for lazy steps, value_and_grad and tx.apply'
)


@combinator
def from_optax(tx: Transformation) -> GradientTransformation:
    """Lift an Optax transformation to gradients that are IndexedSlices.

    At each step the duplicates are summed, the touched rows of the parameters and of every
    part of the state that mirrors the parameters are read, ``tx`` runs on those rows as if
    they were the whole array, and the rows are written back.

    Untouched rows: lazy. A row without gradient and its state are neither read nor written.

    ``tx`` must treat each row by itself, as nearly all do (Adam, RMSProp, Lion, clipping by
    value or by global norm, weight decay, schedules, chains and partitions of them). Its
    program is read before the first step, for tables of any height, and refused if it does
    otherwise, or may: a trust ratio, a norm of the parameters, a mean over an array, noise.

    Args:
      tx: an ``optax.GradientTransformation``.

    Returns:
      A :class:`GradientTransformation`; its state is that of ``tx``.

    Raises:
      TypeError: if ``tx`` is not a transformation.
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
    lifted = _Lifted(tx)

    def update(
        grads: Gradients, state: State, params: Params = None, **extra_args: PyTree
    ) -> tuple[Gradients, State]:
        run = on_any_mesh(protocol.shardings_of_step)(lifted.update)
        return run(grads, state, params, extra_args)

    return GradientTransformation(lifted.init, update, plan=lifted.plan)


class _Lifted:
    """A transformation of Optax, run on the rows that have a gradient."""

    def __init__(self, tx: Transformation) -> None:
        self.tx = GradientTransformation(tx.init, tx.update)  # it takes extra arguments
        #: For each kind of gradients that it was read for whether other rows stay.
        self.others_stay: dict[Hashable, bool] = {}

    def init(self, params: Params) -> State:
        leaves, tree = flatten(params)
        return _Rows(tree, leaves, ()).placed(self.tx.init(params))

    def update(
        self, grads: Gradients, state: State, params: Params, extra_args: dict[str, PyTree]
    ) -> tuple[Gradients, State]:
        """A step, once it is known to be allowed."""
        if params is None:
            raise ValueError(
                "from_optax needs the parameters, to know which part of the state mirrors "
                "them: tx.update(grads, state, params)"
            )
        structure: Any = jax.tree.structure(jax.eval_shape(self.tx.init, params))
        if jax.tree.structure(state) != structure:
            raise TypeError(other_state("from_optax", state, f"the structure {structure}"))
        leaves, tree = flatten(grads, is_leaf=is_leaf)
        arrays = tree.flatten_up_to(params)
        checked = map(checked_gradient, protocol.paths_of(tree), leaves, arrays)
        touched = [deduplicated(g) if is_slices(g) else g for g in checked]
        grads, is_exact = tree.unflatten(touched), extra_args.pop("exact", False)
        if any(map(is_slices, touched)):
            _refuse_accumulation(structure)
            extra_args["without_numbers"] = "from_optax"
            kind = jax.tree.structure(grads), *(x.dtype for x in jax.tree.leaves(grads))
            if kind not in self.others_stay:
                mixing, others_stay = read_update(self.tx, grads, params, extra_args)
                if mixing:
                    raise ValueError(MIXES.format(mixing))
                self.others_stay[kind] = others_stay
            if is_exact and not self.others_stay[kind]:
                warn_at_line(LIFTED_IS_LAZY, category=UserWarning)
        rows = _Rows(tree, arrays, touched)
        values = [_values(g) if is_slices(g) else g for g in touched]
        of_rows = tree.unflatten(values), rows.read_state(state), rows.read(params)
        outputs, new_state = self.tx.update(*of_rows, **extra_args)
        updates = map(_update, tree.flatten_up_to(outputs), touched)
        return tree.unflatten(updates), rows.write_state(state, new_state)

    def plan(self, grads: Gradients, params: Params, platform: str | None = None) -> PyTree:
        """The same for every gradient: Optax's arithmetic is run once, on all rows."""

        def of(grad: Leaf, param: jax.Array) -> Plan | None:
            if not is_slices(grad):
                return None
            entries = grad.values.shape[0]
            num_rows = rows_numbered(jnp.shape(param), grad.row_axes)
            capacity = room_for_distinct(entries, num_rows)
            why = "Optax steps all of them at once"
            return Plan("together", entries, capacity, why=why)

        return jax.tree.map(of, grads, params, is_leaf=is_leaf)


class _Rows:
    """Reads and writes the touched rows of trees that mirror the parameters."""

    def __init__(
        self, tree: PyTreeDef, arrays: Sequence[jax.Array], touched: Sequence[Leaf]
    ) -> None:
        self.tree, self.arrays, self.touched = tree, arrays, touched
        self.sizes = {g.dense_shape[: g.row_axes] for g in touched if is_slices(g)}

    def mirrors(self, subtree: PyTree) -> bool:
        """True for a part of the state that has the structure and shapes of params.

        Parameters that a mask leaves out are empty nodes there.
        """
        try:
            parts = self.tree.flatten_up_to(subtree)
        except (TypeError, ValueError):
            return False
        pairs = [x for x in zip(parts, self.arrays, strict=True) if not _is_empty(x[0])]
        return bool(pairs) and all(
            hasattr(x, "shape") and jnp.shape(x) == jnp.shape(p) for x, p in pairs
        )

    def read(self, subtree: PyTree) -> PyTree:
        return self._map(lambda g, x: read_rows(x, g.indices, g.row_axes), subtree)

    def write(self, subtree: PyTree, rows: PyTree) -> PyTree:
        def written(g: IndexedSlices, x: PyTree, new: PyTree) -> PyTree:
            return row_major_array(set_rows(x, g.indices, new.astype(x.dtype)))

        return self._map(written, subtree, rows)

    def placed(self, state: State) -> State:
        """The state with its arrays on the devices where the parameters are."""

        def place(part: PyTree) -> PyTree:
            pairs = zip(self.arrays, self.tree.flatten_up_to(part), strict=True)
            return self.tree.unflatten(
                [x if _is_empty(x) else placed_as(p, x) for p, x in pairs]
            )

        return self._each(state, place, lambda x: x)

    def read_state(self, state: State) -> State:
        return self._each(state, self.read, self._refuse_rows)

    def write_state(self, state: State, new: State) -> State:
        return self._each(state, self.write, lambda old, new: new, new)

    def _each(
        self,
        state: State,
        mirrored: Callable[..., PyTree],
        other: Callable[..., PyTree],
        *states: State,
    ) -> State:
        """``mirrored`` of the parts that mirror the parameters, ``other`` of the rest."""

        def of(part: PyTree, *more: PyTree) -> PyTree:
            return (mirrored if self.mirrors(part) else other)(part, *more)

        return jax.tree.map(of, state, *states, is_leaf=self.mirrors)

    def _map(self, f: Callable[..., PyTree], *subtrees: PyTree) -> PyTree:
        """``f`` of each table with a gradient by rows; of the others the last one given."""

        def of(g: Leaf, *parts: PyTree) -> PyTree:
            return f(g, *parts) if is_slices(g) and not _is_empty(parts[0]) else parts[-1]

        columns = map(self.tree.flatten_up_to, subtrees)
        return self.tree.unflatten(map(of, self.touched, *columns))

    def _refuse_rows(self, x: jax.Array) -> jax.Array:
        if any(jnp.shape(x)[: len(sizes)] == sizes for sizes in self.sizes):
            raise ValueError(
                "from_optax cannot tell the rows of a state array of shape "
                f"{jnp.shape(x)}, which does not mirror the parameters; use an optimizer "
                "whose state does (not a factored one), or one of jslices' own"
            )
        return x


def _is_empty(x: PyTree) -> bool:
    return not jax.tree.leaves(x)


#: Transformations that act on all rows in some steps, which the program of one step does
#: not show: the names of their states, and their own in Optax.
ACT_ON_ALL_ROWS = {
    "ApplyEvery": "apply_every",
    "LookaheadState": "lookahead",
    "MultiStepsState": "MultiSteps",
    "SAMState": "contrib.sam",
}


def _refuse_accumulation(structure: PyTreeDef) -> None:
    for state, name in ACT_ON_ALL_ROWS.items():
        if f"[{state}]" in str(structure):
            raise ValueError(
                f"from_optax cannot lift optax.{name}: in some steps it moves all rows "
                "together, and rows that such a step does not touch would miss it. "
                "Accumulate the slices, by jslices.accumulate_gradients or "
                "jslices.optim.multi_steps(from_optax(tx), k, grads), or give it dense "
                "gradients (sparse=False)"
            )


def _present(grad: IndexedSlices) -> jax.Array:
    """bool ``[U]``: which entries are rows, not empty."""
    assert grad.num_rows is not None
    return grad.indices < grad.num_rows


def _values(grad: IndexedSlices) -> jax.Array:
    """The values, zero in empty entries, through which no derivative passes there."""
    return where_rows(_present(grad), grad.values, jax.lax.stop_gradient(grad.values))


def _update(update: jax.Array, grad: Leaf) -> Leaf:
    if not isinstance(grad, IndexedSlices) or grad.dense_shape is None:
        return update
    return grad.with_values(where_rows(_present(grad), update))
