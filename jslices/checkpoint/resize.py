"""Resizing tables, and beginning rows anew, with the state of their optimizer."""

import collections
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices import GradientTransformation, is_slices, mask_rows, row_major
from jslices._place.boundary import like_first, on_any_mesh
from jslices._rows.access import canonical_indices
from jslices._rows.ids import as_ids
from jslices._slices import rows_at
from jslices._slices.held import held_where, takes_held, unheld
from jslices._typing import Params, PyTree, State
from jslices.checkpoint import trees
from jslices.checkpoint.state_walk import placed
from jslices.checkpoint.trees import brief, clocks_in, listed, named_leaves
from jslices.extend import as_transformation
from jslices.optim.engine.clock import OTHER_NUMBERS, RowClock


class _Source(NamedTuple):
    """Where the rows of a resized parameter come from."""

    height: int  #: V, its old number of rows.
    rows: np.ndarray  #: ``[V']``: the old row of each new one, -1 for new rows.
    axis: int = 0  #: that of the rows: 1 for tables ``[L, V, D]`` that all grow.


def resize_rows(
    tx: GradientTransformation,
    params: Params,
    state: State,
    fresh: Params,
    rows: Mapping[str, ArrayLike] | None = None,
) -> tuple[Params, State]:
    """Takes parameters and the state of their optimizer to tables of more rows, or fewer.

    For a vocabulary that has grown, lost words or changed its order. A row keeps its value
    and its optimizer state; a new one begins as in ``fresh`` and ``tx.init(fresh)``, and
    with ``untouched="exact"`` has missed no step. Once all rows have caught up (``flush``)
    it also takes the state to other numbers of the optimizer, such as ``b1``.

    Args:
      tx: the optimizer, of jslices or of Optax, made for the new tables.
      params: the old parameters, tables ``[V, *D]``.
      state: the old state of the optimizer. Both may come from ``js.Saver().restore(path)``
        without variables to restore into, in which states are dicts.
      fresh: the parameters in their new shapes: tables ``[V', *D]`` in which new rows have
        the values to begin from, others like those in ``params``, which are taken. Tables
        of layers ``[L, V, D]`` become ``[L, V', D]``, or ``[L', V, D]``.
      rows: ``{name or pattern: numbers}``, for each of the V' new rows the number of the
        old one, or -1 for a new one, along the axis that changes, or the first; duplicates
        are copies. Names are paths, ``"embed/embedding"``; a pattern: ``"*/embedding"``.
        Other tables keep their first rows: new ones are appended, last ones cut off.

    Returns:
      ``(params, state)`` in the structure of ``fresh`` and of ``tx.init(fresh)``, arrays
      placed as they are there. Steps taken, and everything else that does not depend on V,
      are the old arrays themselves: do not use the old ones once the new are donated.

    Raises:
      ValueError: for arrays that differ in more than their rows or in dtype, states of
        another optimizer, ``rows`` of another length or that do not exist, and gradients
        that :func:`jslices.optim.multi_steps` has gathered for its next step. All arrays
        that do not fit are named.
      NotFoundError: if ``rows`` names no parameter.

    Cost: resized arrays go through the memory of the host, one at a time; an old, a new and
    a fresh state exist together for a moment.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx, table = js.adagrad(0.5), jnp.zeros((2, 1))
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([1]), (2, 1))
      >>> table, state = tx.apply(grads, tx.init(table), table)
      >>> table, state = js.checkpoint.resize_rows(tx, table, state, jnp.full((4, 1), 9.0))
      >>> table.ravel().round(2)
      Array([ 0.  , -0.48,  9.  ,  9.  ], dtype=float32)
      >>> state.sum_of_squares.ravel().round(1)
      Array([0.1, 1.1, 0.1, 0.1], dtype=float32)

    Source: ours. TensorFlow's warm start remaps rows by vocabularies
    (``tf.train.VocabInfo``) and drops the slots of the optimizer; in PyTorch
    ``resize_token_embeddings`` of Transformers keeps no state either.
    """
    tx = as_transformation("resize_rows", tx)
    _check_arrays(params, state, fresh)
    start = tx.init(fresh)
    old, new = _by_name(params), _by_name(fresh)
    _check_names("params", old, new, "fresh has", "resize_rows")
    sources = _sources(old, new, {} if rows is None else rows)
    before, begin = _by_name(state), _by_name(start)
    # Of earlier versions also arrays without elements.
    has_elements = lambda x: all(map(jnp.size, jax.tree.leaves(x)))  # noqa: E731
    before = {n: x for n, x in before.items() if n in begin or has_elements(x)}
    before = _with_clocks_of(begin, before)
    _check_names("state", before, begin, "tx.init(fresh) has", "resize_rows")
    if any(_is_under_way(name, x) for name, x in before.items()):
        raise ValueError(
            "resize_rows: gradients of the old tables wait in the state for the next step "
            "of multi_steps; resize it when mini_step is 0"
        )
    fresh = unheld(fresh)
    structure: Any = jax.tree.structure(fresh)
    owners = _owners(begin, new, structure)
    for name, count in _counts_of_clocks(before).items():
        begin[name] = RowClock(begin[name], np.asarray(count)).after_all()
    problems: list[str] = []
    resized_params = [
        _resized(name, old[name], x, sources.get(name), problems) for name, x in new.items()
    ]
    resized_state = [
        x if is_slices(x) else _resized(n, before[n], x, sources.get(owners[n]), problems)
        for n, x in begin.items()
    ]
    if problems:
        raise ValueError(f"resize_rows: {listed(problems)}")
    tree: Any = jax.tree.structure(start, is_leaf=is_slices)
    held = dict(zip(old, trees.held_leaves(params), strict=True))
    params = held_where(structure.unflatten(resized_params), [held[n] for n in new])
    return params, tree.unflatten(resized_state)


@takes_held(like=1, part=0)
def reset_rows(
    tx: GradientTransformation, params: Params, state: State, rows: PyTree, values: PyTree
) -> tuple[Params, State]:
    """Begins rows of tables anew, with the state that their optimizer begins with.

    For rows that change their owner, of :func:`jslices.dynamic.id_map` for instance: the
    new one gets nothing of the old one, neither values nor moments, counts, or gradients
    that wait. With ``untouched="exact"`` the row has missed no step. Under ``jit`` or not.

    Args:
      tx: the optimizer, of jslices or of Optax.
      params: the parameters, tables ``[V, *D]``.
      state: the state of the optimizer.
      rows: mirrors ``params``: integers ``[*K]`` for a table, None for what stays.
        Out-of-range ones are dropped, ``2**31 - 1`` for instance.
      values: mirrors ``params``: the values to begin with, ``[*K, *D]`` or of a shape that
        broadcasts to it, a row or a number for all; None where ``rows`` are None.

    Returns:
      ``(params, state)``. Other rows, and what all rows share, stay: steps taken, means of
      columns. Duplicates want the same values.

    Raises:
      TypeError: for rows that are not integers.
      ValueError: for trees that do not mirror ``params``, values of another shape, a state
        of another optimizer, or one in which rows are not told from columns.

    Cost: writes ``K * D`` elements (D + 1 rows at least) of the table and of each state
    array, in place under donation; with those that wait in
    :func:`jslices.optim.multi_steps`, a sort of them and K.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx, table = js.adagrad(0.5), jnp.zeros((3, 1))
      >>> grads = js.IndexedSlices(jnp.ones((2, 1)), jnp.array([0, 1]), (3, 1))
      >>> table, state = tx.apply(grads, tx.init(table), table)
      >>> table, state = js.checkpoint.reset_rows(tx, table, state, jnp.array([1]), 9.0)
      >>> table.ravel().round(2), state.sum_of_squares.ravel().round(1)
      (Array([-0.48,  9.  ,  0.  ], dtype=float32), Array([1.1, 0.1, 0.1], dtype=float32))

    Source: ours. Tables of TensorFlow Recommenders Addons begin the slots of a new id anew
    as well, inside of their lookup.
    """
    tx = as_transformation("reset_rows", tx)
    names, tables, structure = named_leaves(params)
    try:
        columns = structure.flatten_up_to(rows), structure.flatten_up_to(values)
    except ValueError as error:
        raise ValueError(
            "reset_rows: rows and values must mirror params, with an array for each table "
            f"that has rows to reset and None elsewhere; {error}"
        ) from None
    changes = {
        name: _first_values(name, table, ids, value)
        for name, table, ids, value in zip(names, tables, *columns, strict=True)
        if ids is not None
    }
    return _begun(tx, changes, params, state) if changes else (params, state)


def _first_values(name: str, table: Any, rows: Any, values: Any) -> tuple[Any, Any]:
    """Row numbers ``[n]``, and the values ``[n, *D]`` that they begin with.

    There are as many as it takes for a state of the same form, which in Adafactor depends
    on whether there are more rows than columns.
    """
    numbers, shape = as_ids(rows, "reset_rows", f"rows of {name}"), jnp.shape(table)
    if not shape:
        raise ValueError(f"reset_rows: {name} is a number, which has no rows; pass None")
    wanted = (*numbers.shape, *shape[1:])
    try:
        start = jnp.broadcast_to(jnp.asarray(values, _dtype(table)), wanted)
    except (TypeError, ValueError):
        raise ValueError(
            f"reset_rows: values of {name} must be {list(wanted)}, or broadcast to it, got "
            f"{None if values is None else list(jnp.shape(values))}"
        ) from None
    numbers = canonical_indices(numbers.reshape(-1), shape[0])
    start = start.reshape(numbers.size, *shape[1:])
    enough = min(shape[0], 1 + max(shape[1:], default=0))
    if numbers.size < enough:
        at = jnp.arange(enough, dtype=jnp.int32)
        numbers, start = rows_at(numbers, at, fill_value=shape[0]), rows_at(start, at)
    return numbers, start


def _begun(
    tx: GradientTransformation,
    changes: dict[str, tuple[Any, Any]],
    params: Params,
    state: State,
) -> tuple[Params, State]:
    """Parameters with other values of some rows, whose state is that of ``tx.init``."""
    names, leaves, structure = named_leaves(params)
    tables = dict(zip(names, leaves, strict=True))
    begin = structure.unflatten(changes.get(n, (0, x))[1] for n, x in tables.items())
    old, start = _by_name(state), _by_name(jax.jit(tx.of_rows().init)(begin))
    _check_names("state", old, start, "tx.init(params) has", "reset_rows")
    owners, counts = _owners(old, tables, structure), _counts_of_clocks(old)

    def begun(name: str, x: Any) -> Any:
        owner = owners[name]
        if owner not in changes:
            return x
        (ids, values), table, shape = changes[owner], tables[owner].shape, jnp.shape(x)
        if is_slices(x):
            return mask_rows(x, lambda at: ~jnp.isin(at, ids))
        if name in counts:
            return _with_rows(x, ids, RowClock(rows_at(x, ids), counts[name]).after_all())
        by_row = table[0] not in (*shape[1:], *table[1:]) and shape[:1] == table[:1]
        fits = jnp.shape(start[name])[:1] == values.shape[:1]
        if fits and (by_row or shape == table):
            return _with_rows(x, ids, start[name])
        if table[0] in shape and table[0] > 1:
            raise ValueError(
                f"reset_rows: which axis of {name} {list(shape)} has the rows of {owner} "
                f"{list(table)} cannot be told; make the table higher than it is wide"
            )
        return x

    tree: Any = jax.tree.structure(state, is_leaf=is_slices)
    state = tree.unflatten(begun(name, x) for name, x in old.items())
    params = structure.unflatten(
        _with_rows(x, *changes[n]) if n in changes else x for n, x in tables.items()
    )
    return params, state


@on_any_mesh(like_first)
def _with_rows(x: Any, rows: Any, values: Any) -> jax.Array:
    return row_major(jnp.asarray(x)).at[rows].set(values, mode="drop")  # type: ignore[no-any-return]


def _by_name(tree: PyTree) -> dict[str, Any]:
    names, leaves, _ = named_leaves(tree, is_leaf=is_slices)
    return dict(zip(names, leaves, strict=True))


def _check_arrays(params: Params, state: State, fresh: Params) -> None:
    leaves = jax.tree.leaves((params, state, fresh))
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise TypeError("resize_rows goes through the host: call it outside of jit")
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise TypeError(
            "resize_rows got shapes; params, state and fresh are arrays, as new rows have "
            "the values of fresh"
        )


def _check_names(
    what: str, old: Mapping[str, Any], new: Mapping[str, Any], whose: str, caller: str
) -> None:
    missing, other = new.keys() - old.keys(), old.keys() - new.keys()
    if missing or other:
        parts = [f"no {brief(missing)}"] * bool(missing)
        parts += [f"{brief(other)} as well"] * bool(other)
        raise ValueError(
            f"{caller}: {what} must hold the arrays that {whose}, got "
            f"{' and '.join(parts)}; it must be what the same model and tx had with the "
            "old number of rows"
        )


def _sources(
    old: Mapping[str, Any], new: Mapping[str, Any], rows: Mapping[str, ArrayLike]
) -> dict[str, _Source]:
    if not isinstance(rows, Mapping):
        raise TypeError(
            "resize_rows(rows=...) wants a dict from names of parameters to row numbers, "
            f"got {type(rows).__name__}; there are {brief(new)}"
        )
    sources = {}
    heights = {
        name: _heights(jnp.shape(old[name]), jnp.shape(x))
        for name, x in new.items()
        if jnp.ndim(old[name]) and jnp.ndim(x)
    }
    for name, (before, now, axis) in heights.items():
        if before != now:
            numbers = np.arange(now)
            numbers = np.where(numbers < before, numbers, -1)
            sources[name] = _Source(before, numbers, axis)
    for pattern, ids in rows.items():
        numbers = np.asarray(ids)
        for name in trees.matching(pattern, heights, "resize_rows(rows=...)"):
            before, now, axis = heights[name]
            fits = numbers.dtype.kind in "iu" and numbers.shape == (now,)
            if not fits or not ((numbers >= -1) & (numbers < before)).all():
                raise ValueError(
                    f"resize_rows: rows of {name!r} must be {now} integers, for each new "
                    f"row an old one of {before}, or -1, got {numbers.dtype}"
                    f"{list(numbers.shape)}"
                    + (f" from {numbers.min()} to {numbers.max()}" if fits else "")
                )
            sources[name] = _Source(before, numbers, axis)
    return sources


def _heights(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, int, int]:
    """The old and the new number of rows, and their axis: the one that changes."""
    pairs = list(zip(old, new, strict=False))[: max(1, len(new) - 1)]
    axis = next((i for i, (before, now) in enumerate(pairs) if before != now), 0)
    return *pairs[axis], axis


def _is_under_way(name: str, x: Any) -> bool:
    """True for the count of gradients that wait for a step, if some do."""
    counts = name.split("/")[-1] == "mini_step" and jnp.issubdtype(_dtype(x), jnp.integer)
    return counts and jnp.ndim(x) == 0 and int(x) > 0


def _owners(state: Iterable[str], params: Mapping[str, Any], tree: Any) -> dict[str, str]:
    """The parameter of each state array, whose path ends with the parameter's; or ``""``.

    If several do, as where one has the name of a field, it is the one with most neighbours.
    """
    bare = next(iter(params)) if jax.tree_util.treedef_is_leaf(tree) else ""
    splits = {}
    for name in state:
        has_rows = not re.search("(?:^|/)clock/(?:whole|log|key|numbers)(?:/|$)", name)
        parts = name.split("/") * has_rows
        pairs = [("/".join(parts[:n]), "/".join(parts[n:])) for n in range(len(parts))]
        splits[name] = [pair for pair in pairs if bare or pair[1] in params]
    count = collections.Counter(start for pairs in splits.values() for start, _ in pairs)
    return {
        name: (bare or max(pairs, key=lambda pair: count[pair[0]])[1]) if pairs else ""
        for name, pairs in splits.items()
    }


def _with_clocks_of(new: Mapping[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """The old state, whose logs begin anew where no row is behind, whatever made them."""
    counted = (at for at in clocks_in(old) if f"{at[0][:-6]}count" in old)
    for clock, clocks in itertools.groupby([*counted], lambda at: at[0]):
        rows = {f"{clock}last{at[1]}": trees.row_clock(at, old, old.get) for at in clocks}
        of_log = re.compile(rf"{re.escape(clock)}(?!last|key$)")
        begun = {n: x for n, x in new.items() if of_log.match(n)}
        numbers = {n: x for n, x in begun.items() if n == f"{clock}numbers"}
        old = numbers | old  # that of an earlier version is without
        if not any(x.is_late.any() for x in rows.values()):
            kept = {n: x for n, x in old.items() if n in new or not n.startswith(clock)}
            old = kept | begun | {n: x.marks for n, x in rows.items()}
        elif any(old[n][0] != x[0] for n, x in numbers.items()):
            raise ValueError(f"resize_rows: {OTHER_NUMBERS}")
    return old


def _resized(
    name: str, old: Any, new: Any, source: _Source | None, problems: list[str]
) -> Any:
    """``new`` with the values, or the rows, that ``old`` has; appends problems."""
    old_shape, new_shape = jnp.shape(old), jnp.shape(new)
    if re.search(r"(?:^|/)clock/log/\d+$", name):  # which stays as long as it is
        new_shape = *new_shape[:1], *old_shape[1:]
    before, after = _dtype(old), _dtype(new)
    axis = 0 if source is None else source.axis
    rows = slice(axis, axis + 1)
    pair = old_shape[rows], new_shape[rows]
    moved = source is not None and pair == ((source.height,), source.rows.shape)
    others = [shape[:axis] + shape[axis + moved :] for shape in (old_shape, new_shape)]
    if len(old_shape) != len(new_shape) or others[0] != others[1]:
        problems.append(
            f"{name} was {before}{list(old_shape)}, {after}{list(new_shape)} is wanted: "
            f"only the number of rows, along axis {axis}, can change"
        )
    elif source is not None and not moved and source.height in old_shape:
        problems.append(
            f"{name} is {before}{list(old_shape)}: its rows are not along axis {axis}"
        )
    elif before != after:
        problems.append(f'{name} was {before}, {after} is wanted: type x.astype("{after}")')
    elif source is not None and moved:
        array: Any = np.array(new)
        goes_on = np.flatnonzero(source.rows >= 0)
        rows_first = np.moveaxis(array, axis, 0)
        rows_first[goes_on] = np.moveaxis(np.asarray(old), axis, 0)[source.rows[goes_on]]
        return placed(array, new)
    else:
        return old if _lies_as(old, new) else placed(old, new)
    return new


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None) or jnp.asarray(x).dtype


def _lies_as(old: Any, new: Any) -> bool:
    """True if an array is placed like the new one."""
    if isinstance(old, jax.Array) and isinstance(new, jax.Array):
        return old.sharding.is_equivalent_to(new.sharding, old.ndim)
    return not isinstance(new, jax.Array)


def _counts_of_clocks(state: Mapping[str, Any]) -> dict[str, Any]:
    """For each array of last steps of rows, by its name, the steps of its optimizer."""
    counts = {
        f"{c}last{t}": c.removesuffix("clock/") + "count" for c, t, _ in clocks_in(state)
    }
    return {last: state[count] for last, count in counts.items() if count in state}
