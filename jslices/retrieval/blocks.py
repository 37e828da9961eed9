"""Products of queries with all rows of a table: block by block, each device its own."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

import jslices as js
from jslices import extend
from jslices.retrieval.arguments import as_floats

#: By default a block has so many scores of all queries (16 MiB, which stay near the cache:
#: on a CPU blocks of 256 MiB take ranks four times as long), and rows within these bounds.
SCORES, LEAST_ROWS, MOST_ROWS = 2**22, 2**12, 2**20
Axes = str | Sequence[str] | None


def checked(
    caller: str,
    table: Any,
    queries: Any,
    exclude: ArrayLike | None,
    block: int | None,
    axis: Axes,
) -> tuple[tuple[jax.Array, ...], tuple[int, ...], dict[str, Any]]:
    """The arrays, the shape ``*B``, and static arguments."""
    table = as_floats(table, caller, "table")
    queries = as_floats(queries, caller, "queries")
    if table.ndim != 2 or not len(table) or queries.shape[-1:] != table.shape[1:]:
        raise js.InvalidArgumentError(
            f"{caller} wants a table [V, D] and queries [*B, D], got {list(table.shape)} "
            f"and {list(queries.shape)}"
        )
    shape = queries.shape[:-1]
    seen = jnp.full((*shape, 0), -1, jnp.int32)
    if exclude is not None:
        seen = extend.as_ids(exclude, caller, "exclude")
    if seen.shape[:-1] != shape or seen.ndim != queries.ndim:
        raise js.InvalidArgumentError(
            f"{caller} wants exclude {[*shape, 'E']}, ids for each query, got "
            f"{list(seen.shape)}; pad short lists by -1"
        )
    count = math.prod(shape)
    if block is None:
        block = min(MOST_ROWS, max(LEAST_ROWS, SCORES // max(1, count)))
    extend.Number(at_least=1, integer=True).check(caller, "block", block)
    how = {"block": int(block), "place": _place(table, axis, caller)}
    return (table, queries, seen), shape, how


class Place(NamedTuple):
    """Where the rows of a table are."""

    mesh: Any  #: None: that of the table's type.
    rows: tuple[str, ...]  #: the axes of the mesh along which rows are split.


def _place(table: jax.Array, axis: Axes, caller: str) -> Place | None:
    """Where rows are; None if not on a mesh."""
    traced = isinstance(table, jax.core.Tracer)
    sharding: Any = jax.typeof(table).sharding if traced else table.sharding
    mesh: Any = getattr(sharding, "mesh", None)
    if traced and mesh.empty and jax.sharding.get_abstract_mesh().are_all_axes_auto:
        mesh = jax.sharding.get_abstract_mesh()  # of arguments that `jit` places
    if mesh is None or mesh.empty or mesh.size == 1 or getattr(mesh, "manual_axes", ()):
        return None  # within a shard_map rows are those of one device
    names = tuple(name for name in mesh.axis_names if mesh.shape[name] > 1)
    if axis is not None:
        chosen = (axis,) if isinstance(axis, str) else tuple(axis)
        if not {*chosen} <= {*mesh.axis_names}:
            raise js.InvalidArgumentError(
                f"{caller}(axis={axis!r}): the mesh has the axes {mesh.axis_names}"
            )
    elif not traced or mesh.explicit_axes:
        first = (*sharding.spec, None)[0]
        chosen = (first,) if isinstance(first, str) else tuple(first or ())
    elif len(names) == 1:
        chosen = names  # whether they are split or not: to split them sends nothing
    else:
        raise js.InvalidArgumentError(
            f"{caller} under jax.jit cannot tell along which of the axes {names} rows are "
            f"split; type {caller}(..., axis={names[-1]!r}), or axis=() for none"
        )
    fits = len(table) % math.prod(mesh.shape[name] for name in chosen) == 0
    # A concrete table may be a constant of the program, whose type tells no devices.
    return Place(None if mesh.explicit_axes else mesh, chosen if fits else ())


def on_each_device(
    search: Callable[..., Any],
    place: Place | None,
    table: jax.Array,
    *of_queries: jax.Array,
) -> Any:
    """``search(table, *of_queries, first row)``, of each device's rows and queries."""
    if place is None:
        return search(table, *of_queries, 0)
    rows, mesh = place.rows, place.mesh or jax.typeof(table).sharding.mesh
    others = tuple(name for name in mesh.axis_names if name not in rows)
    if len(of_queries[0]) % math.prod(mesh.shape[name] for name in others):
        others = ()

    def here(table: jax.Array, *of_queries: jax.Array) -> Any:
        part = lax.axis_index(rows) if rows else 0
        return search(table, *of_queries, part * len(table))

    by_query = jax.P(others)
    specs = jax.P(rows), *(by_query for _ in of_queries)
    # Devices along `rows` agree on results, of which JAX has no proof.
    return jax.shard_map(
        here, mesh=mesh, in_specs=specs, out_specs=by_query, check_vma=False
    )(table, *of_queries)


def fold_blocks(
    fold: Callable[..., Any],
    result: Any,
    table: jax.Array,
    queries: jax.Array,
    left_out: jax.Array,
    block: int,
) -> Any:
    """``result = fold(result, scores [B, W], first row)`` over blocks of W rows.

    Rows left out, ``[B, E]`` in ``table``, have the score -inf.
    """
    width = min(block, len(table))

    def one(number: jax.Array, result: Any) -> Any:
        # The last block begins early, and leaves out what the one before it had.
        first = jnp.minimum(number * width, len(table) - width)
        part = lax.dynamic_slice_in_dim(table, first, width)
        scores = queries @ part.astype(queries.dtype).T
        places = left_out - first
        places = jnp.where(places < 0, width, places)
        scores = jax.vmap(lambda x, i: x.at[i].set(-jnp.inf, mode="drop"))(scores, places)
        done = first + jnp.arange(width) < number * width
        return fold(result, jnp.where(done[None], -jnp.inf, scores), first)

    return lax.fori_loop(0, -(-len(table) // width), one, result)


def prepared(table: jax.Array, queries: jax.Array, *ids: jax.Array) -> list[jax.Array]:
    """Constants for differentiation; wide queries, ids in ``[0, V]``, ``*B`` one axis."""
    count = math.prod(queries.shape[:-1])
    wide = jnp.promote_types(*(extend.sum_dtype(x.dtype) for x in (table, queries)))
    settled = (extend.settle(x, len(table), "fill") for x in ids)
    rows = [queries.astype(wide), *settled]
    flat = [x.reshape(count, x.shape[-1]) for x in rows]
    return [lax.stop_gradient(x) for x in (table, *flat)]
