"""Meshes of Explicit axes: how an array is split over devices is part of its type.

There JAX wants to know the type of every result, and refuses to gather rows of a table that
is split by rows. What reads or writes rows therefore runs with all axes Auto, as it does on
other meshes, and its results get their types back.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    reshard,
    use_abstract_mesh,
)


def explicit_mesh(*trees: Any) -> AbstractMesh | None:
    """The mesh of the first array whose type says how it is split; None without any.

    The trees are of arrays or their abstract values.
    """
    for x in jax.tree.leaves(trees):
        sharding = _type_of(x)
        if sharding is not None:
            return sharding.mesh  # type: ignore[no-any-return]
    return None


def _type_of(x: Any) -> Any:
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return None
    return sharding


def shardings_of(tree: Any) -> Any:
    """How each array of a tree is split; None where its type does not tell."""
    return jax.tree.map(_type_of, tree)


def everywhere(x: Any) -> Any:
    """How arrays are split that have rows of ``x``, each on all devices."""
    sharding = _type_of(x)
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))


def by_first_axis(x: Any, *others: Any) -> Any:
    """How arrays are split whose first axis is that of ``x``, and no other axis is."""
    mesh = explicit_mesh(x, others)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(*_named(x)[:1]))


def _named(x: Any) -> list[Any]:
    return [axes or None for axes in _spec(x)]


def looked_up(table: Any, indices: Any, combined: int = 0) -> Any:
    """How rows are split that ``indices`` ``[...]`` read from ``table`` ``[V, *D]``.

    ``combined``: along how many of the last axes of ``indices`` rows are combined to one.
    """
    mesh = explicit_mesh(table, indices)
    batch, row = (_spec(x) for x in (indices, table))
    batch = batch[: len(batch) - combined]
    taken = {axis for axes in batch for axis in axes}
    columns = (tuple(axis for axis in axes if axis not in taken) for axes in row[1:])
    spec = (axes or None for axes in (*batch, *columns))
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(*spec))


def _spec(x: Any) -> tuple[tuple[str, ...], ...]:
    sharding = _type_of(x)
    return split_along(sharding.spec if sharding is not None else (), jnp.ndim(x))


def explicit_part(mesh: AbstractMesh, spec: PartitionSpec) -> NamedSharding:
    """What types tell of arrays split so: nothing of axes that are Auto."""
    explicit = set(mesh.explicit_axes)
    axes = (tuple(x for x in several if x in explicit) for several in _axes(spec))
    return NamedSharding(mesh, PartitionSpec(*(several or None for several in axes)))


def split_along(spec: Any, ndim: int) -> tuple[tuple[str, ...], ...]:
    """For each axis of an array the mesh axes along which it is split."""
    axes = _axes(spec)
    return (*axes, *((),) * (ndim - len(axes)))


def _axes(spec: Any) -> list[tuple[str, ...]]:
    return [() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in spec]


@contextlib.contextmanager
def with_auto_axes(mesh: AbstractMesh | None) -> Iterator[None]:
    """In this context XLA decides how arrays on ``mesh`` are split, if there is one."""
    if mesh is None:
        yield
        return
    auto = dict.fromkeys(mesh.explicit_axes, AxisType.Auto)
    with use_abstract_mesh(mesh.update_axis_types(auto)):
        yield


def drop_sharding(tree: Any) -> Any:
    """The same arrays for use in a context :func:`with_auto_axes`; they stay in place."""

    def cast(x: Any) -> Any:
        return x if _type_of(x) is None else reshard(x, PartitionSpec())

    return jax.tree.map(cast, tree)


def restore_sharding(tree: Any, shardings: Any) -> Any:
    """Arrays with the types that a prefix of their tree names; None leaves them alone."""

    def cast(sharding: Any, part: Any) -> Any:
        if sharding is None:
            return part
        with use_abstract_mesh(sharding.mesh):
            return jax.tree.map(lambda x: reshard(x, _fitting(sharding, x)), part)

    return jax.tree.map(cast, shardings, tree, is_leaf=lambda x: x is None)


def _fitting(sharding: Any, x: Any) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: x.ndim]))


def running_with_auto_axes(
    fun: Callable[..., Any], results: Callable[..., Any]
) -> Callable[..., Any]:
    """``fun``, also for arrays on a mesh of Explicit axes.

    ``results(*args)`` gives the types of the results, as a prefix of their tree.
    """

    @functools.wraps(fun)
    def run(*args: Any) -> Any:
        mesh = explicit_mesh(args)
        if mesh is None:
            return fun(*args)
        with with_auto_axes(mesh):
            out = fun(*drop_sharding(args))
        return restore_sharding(out, results(*args))

    return run
