"""Where arrays are: the mesh they are on, its Explicit axes, their layouts, the platform.

On a mesh of Explicit axes an array's type says how the array is split. JAX needs to know
the type of every result there, and refuses to gather rows of a table that is split by rows.
Reads and writes of rows therefore run with all axes Auto, as on other meshes, and their
results get their types back.

XLA:TPU lays an array out by columns where its rows are not a multiple of 128 elements long.
A gather or scatter of rows then copies the whole table, there and back. A row-major table
has the elements of a row side by side, so that reading rows copies nothing.

Outside of ``jax.jit`` a function at the boundary runs as one program (:func:`one_program`).
"""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Sharding, SingleDeviceSharding
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike, DTypeLike

from jslices._jax import (
    CONSTRAINS_LAYOUTS,
    flatten,
    identity_primitive,
    is_staged,
    split_alike,
    usual_promotion,
)
from jslices._typing import Aval, Leaf, PyTree

Spec = jax.P | tuple[None, ...]
P = ParamSpec("P")
R = TypeVar("R")

#: An array counts as a table if it has so many rows for each element of a row.
TALL = 32
#: Marks a result that would be row-major if the program were traced for a TPU.
row_major_p = identity_primitive("jslices_row_major")


def explicit_mesh(*trees: PyTree) -> AbstractMesh | None:
    """The mesh of the first array whose type says how it is split; None without any.

    The trees are of arrays or their abstract values.
    """
    shardings = map(_type_of, jax.tree.leaves(trees))
    return next((x.mesh for x in shardings if x is not None), None)


def _type_of(x: Aval) -> Any:
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return None
    return sharding


def shardings_of(tree: PyTree) -> Any:
    """How each array of a tree is split; None where its type does not tell."""
    return jax.tree.map(_type_of, tree)


def split_rows(x: Aval) -> tuple[str, ...]:
    """The mesh axes along which the first axis of an array is split, if its type tells."""
    return _spec(x)[0] if jnp.ndim(x) else ()


def everywhere(x: Aval, *others: PyTree) -> Any:
    """How arrays are split that have rows of ``x``, each on all devices."""
    return _on_mesh_of((x, others), (), *_spec(x)[1:])


def by_first_axis(x: Aval, *others: PyTree) -> Any:
    """How arrays are split whose first axis is that of ``x``; other axes are not split."""
    return _on_mesh_of((x, others), *_spec(x)[:1])


def looked_up(table: Aval, indices: Aval, combined: int = 0) -> Any:
    """How rows are split that ``indices`` ``[...]`` read from ``table`` ``[V, *D]``.

    ``combined``: along how many of the last axes of ``indices`` rows are combined to one.
    """
    batch, row = (_spec(x) for x in (indices, table))
    batch = batch[: len(batch) - combined]
    taken = {axis for axes in batch for axis in axes}
    columns = (tuple(axis for axis in axes if axis not in taken) for axes in row[1:])
    return _on_mesh_of((table, indices), *batch, *columns)


def _on_mesh_of(arrays: PyTree, *axes: tuple[str, ...]) -> jax.NamedSharding | None:
    mesh = explicit_mesh(arrays)
    return None if mesh is None else jax.NamedSharding(mesh, jax.P(*axes))


def _spec(x: Aval) -> tuple[tuple[str, ...], ...]:
    sharding = _type_of(x)
    return split_along(sharding.spec if sharding is not None else (), jnp.ndim(x))


def explicit_part(mesh: AbstractMesh, spec: jax.P) -> jax.NamedSharding:
    """The part of a split that types show: nothing about Auto axes."""
    explicit = set(mesh.explicit_axes)
    axes = (tuple(x for x in several if x in explicit) for several in split_along(spec))
    return jax.NamedSharding(mesh, jax.P(*axes))


def split_along(spec: Spec, ndim: int = 0) -> tuple[tuple[str, ...], ...]:
    """For each axis of an array the mesh axes along which it is split."""
    axes = [() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in spec]
    return (*axes, *((),) * (ndim - len(axes)))


@contextlib.contextmanager
def with_auto_axes(mesh: AbstractMesh | None) -> Iterator[None]:
    """In this context XLA decides how arrays on ``mesh``, if any, are split."""
    if mesh is None:
        yield
        return
    auto = dict.fromkeys(mesh.explicit_axes, AxisType.Auto)
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(auto)):
        yield


def drop_sharding(tree: PyTree) -> Any:
    """The same arrays for use in a context :func:`with_auto_axes`; they stay in place."""

    def cast(x: Leaf) -> Any:
        return x if _type_of(x) is None else jax.sharding.reshard(x, jax.P())

    return jax.tree.map(cast, tree)


def restore_sharding(tree: PyTree, shardings: PyTree) -> Any:
    """Arrays with the types that a prefix of their tree names; None leaves them alone."""

    def cast(sharding: jax.NamedSharding | None, part: PyTree) -> Any:
        if sharding is None:
            return part
        mesh, spec = sharding.mesh, sharding.spec
        of = lambda x: jax.NamedSharding(mesh, jax.P(*spec[: x.ndim]))  # noqa: E731
        with jax.sharding.use_abstract_mesh(mesh):  # type: ignore[arg-type]
            return jax.tree.map(lambda x: jax.sharding.reshard(x, of(x)), part)

    return jax.tree.map(cast, shardings, tree, is_leaf=lambda x: x is None)


def on_any_mesh(types: Callable[..., PyTree]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function that is written for one device take arrays on Explicit axes.

    A decorator for functions at the boundary. Inside, all axes are Auto. Positional
    arguments are pytrees of arrays and other things; keyword arguments pass unchanged.
    ``types(*args)`` gives the types of the results, as a prefix of their tree. What has
    none, as it is like an argument on no mesh, is in a program on all devices, as in JAX.
    """

    def decorate(fun: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fun)
        def without_explicit_axes(*args: P.args, **kwargs: P.kwargs) -> R:
            mesh = explicit_mesh(args)
            if mesh is None:
                return fun(*args, **kwargs)
            with with_auto_axes(mesh):
                out = fun(*drop_sharding(args), **kwargs)
            around = jax.sharding.get_abstract_mesh().explicit_axes and is_staged()
            everywhere = jax.NamedSharding(mesh, jax.P()) if around else None
            whole = jax.tree.map(
                lambda x: x or everywhere, types(*args), is_leaf=lambda x: x is None
            )
            return restore_sharding(out, whole)

        return without_explicit_axes

    return decorate


def like_first(x: PyTree, *rest: PyTree) -> PyTree:
    """The types of results that are split as the first argument is."""
    del rest
    return shardings_of(x)


# --- programs ---


def one_program(fun: Callable[P, R]) -> Callable[P, R]:
    """``fun``, compiled as a whole outside ``jax.jit``, not operation by operation.

    Its arguments are pytrees of arrays and slices. Bools in them, and keyword-only
    arguments, are static. With anything else, or arrays on different devices, it runs
    uncompiled. Arguments that it returns are not copied. Dtypes are promoted in JAX's usual
    way, even if the user's program is strict.
    """
    signature = inspect.signature(fun)

    @functools.partial(jax.jit, static_argnums=(0, 1, 2))
    def program(
        tree: PyTreeDef,
        bools: tuple[bool | None, ...],
        kwargs: tuple[tuple[str, Any], ...],
        arrays: Sequence[Any],
    ) -> Any:
        numbers = {id(x): _Argument(n) for n, x in enumerate(arrays)}
        leaves = [x if y is None else y for x, y in zip(arrays, bools, strict=True)]
        result = fun(*tree.unflatten(leaves), **dict(kwargs))
        return jax.tree.map(lambda x: numbers.get(id(x), x), result)

    @usual_promotion
    @functools.wraps(fun)
    def as_one_program(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{fun.__name__}(): {error}") from None
        bound.apply_defaults()
        if is_staged():
            return fun(*args, **kwargs)
        leaves, tree = jax.tree.flatten(bound.args)
        bools = tuple(bool(x) if isinstance(x, bool | np.bool_) else None for x in leaves)
        arrays = [0 if isinstance(x, bool | np.bool_) else x for x in leaves]
        if not _are_of_one_program(arrays):
            return fun(*args, **kwargs)
        return jax.tree.map(
            lambda x: arrays[x.number] if isinstance(x, _Argument) else x,
            program(tree, bools, tuple(bound.kwargs.items()), arrays),
            is_leaf=lambda x: isinstance(x, _Argument),
        )

    return as_one_program


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Argument:
    """In a program's result, the place of one of its arguments."""

    number: int


def _are_of_one_program(arrays: Sequence[Any]) -> bool:
    devices: set[tuple[jax.Device, ...]] = set()
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            if x.committed:
                devices.add(_devices_in_order(x.sharding))
        elif not isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex):
            return False
        elif isinstance(x, np.ndarray) and x.dtype.kind in "OSU":  # which ``fun`` refuses
            return False
    return len(devices) < 2


def _devices_in_order(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


# --- meshes ---


def mesh_of(aval: Aval) -> AbstractMesh | None:
    """The mesh of an array, if it is known to be on one; else None.

    Inside a ``shard_map`` there is none: arrays are those of one device.
    """
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty or mesh.are_all_axes_manual:
        return None
    return mesh


def on_one_mesh(arrays: PyTree) -> Any:
    """Put all arrays on the mesh that one of them is on.

    Outside ``jax.jit`` arrays computed from constants, ids say, may be on a single device,
    and JAX does not spread them by itself.
    """

    def is_placed(x: Leaf) -> bool:
        return isinstance(x, jax.core.Tracer) or isinstance(
            getattr(x, "sharding", None), jax.NamedSharding
        )

    leaves, tree = flatten(arrays)
    on_a_mesh = [x for x in leaves if is_placed(x) and not isinstance(x, jax.core.Tracer)]
    if not on_a_mesh or all(map(is_placed, leaves)):
        return arrays
    everywhere = jax.NamedSharding(on_a_mesh[0].sharding.mesh, jax.P())
    placed = [x if is_placed(x) else jax.device_put(x, everywhere) for x in leaves]
    return tree.unflatten(placed)


def on_all_devices(values: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Entries ``[K, *D]`` and ``[K]`` on every device of a mesh.

    If the table is on several devices, each then steps the rows that it holds. Left to
    itself, XLA would sum the arrays of V rows that each device would write.
    """
    mesh = mesh_of(jax.typeof(values))
    if mesh is None or mesh.size == 1 or not mesh.are_all_axes_auto:
        return values, indices
    rows = jax.P(None, *(jax.P.UNCONSTRAINED,) * (values.ndim - 1))
    shardings = jax.NamedSharding(mesh, rows), jax.NamedSharding(mesh, jax.P(None))
    return lax.with_sharding_constraint(on_one_mesh((values, indices)), shardings)


def filled_like(
    p: jax.Array,
    value: ArrayLike,
    dtype: DTypeLike | None = None,
    axes: Sequence[int] | None = None,
) -> jax.Array:
    """An array of ``value`` with some axes of ``p``, split over devices as these are.

    No device makes more than its own part. ``axes=None`` means all axes, ``dtype=None``
    the dtype of ``p``.
    """
    if axes is None:
        # Without a dtype JAX leaves arrays like a weakly typed one on one device.
        dtype = jnp.result_type(p) if dtype is None else dtype
        return placed_as(p, jnp.full_like(p, value, dtype=dtype))
    p, axes = jnp.asarray(p), tuple(axes)
    shape, dtype = tuple(p.shape[n] for n in axes), p.dtype if dtype is None else dtype
    if isinstance(p, jax.core.Tracer):
        return placed_as(p, jnp.full(shape, value, dtype), axes)
    where: Sharding | None = None
    if p.committed:
        if isinstance(p.sharding, jax.NamedSharding):
            where = _of_axes(p.sharding, p.ndim, axes)
        else:
            where = _first(p, axes).sharding
    return jnp.full(shape, value, dtype, device=where)


def split_by(p: jax.Array, tree: PyTree, spec: jax.P) -> Any:
    """Arrays on the mesh of ``p``, split over its devices as ``spec`` says."""
    if isinstance(p, jax.core.Tracer):
        mesh = mesh_of(jax.typeof(p))
        if mesh is None:
            return tree
        if AxisType.Explicit in mesh.axis_types:
            return restore_sharding(tree, explicit_part(mesh, spec))
        return jax.lax.with_sharding_constraint(tree, jax.NamedSharding(mesh, spec))
    if not isinstance(p.sharding, jax.NamedSharding):
        return tree
    return jax.device_put(tree, jax.NamedSharding(p.sharding.mesh, spec))


def placed_as(p: jax.Array, x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """``x``, which has some axes of ``p``, split over devices as these are.

    Only where ``p`` is traced: ``jit`` would give each device the whole of ``x``.
    """
    mesh = mesh_of(jax.typeof(p)) if isinstance(p, jax.core.Tracer) else None
    if mesh is None or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
        return x
    axes = range(p.ndim) if axes is None else axes
    if AxisType.Explicit in mesh.axis_types:
        x = restore_sharding(x, _of_axes(jax.typeof(p).sharding, p.ndim, axes))
        return split_alike(p, x)
    return split_alike(_first(p, axes) if p.size else x, x)


def _first(p: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The first elements of ``p`` along all axes but ``axes``."""
    return p[tuple(slice(None) if n in axes else 0 for n in range(p.ndim))]


def _of_axes(
    sharding: jax.NamedSharding, ndim: int, axes: Sequence[int]
) -> jax.NamedSharding:
    split = split_along(sharding.spec, ndim)
    spec = jax.P(*(split[n] for n in axes))
    return jax.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


# --- layouts ---


def row_major(tree: PyTree) -> Any:
    """The arrays of ``tree`` placed so that XLA reads and writes their rows in place.

    On a TPU a table is laid out by columns unless its rows are a multiple of 128 elements
    long, and each lookup and each step then copies all of it. Pass the tables, and the
    state of their optimizer if it exists already, to this function once: the results of
    ``tx.init``, ``tx.update``, ``tx.apply`` and :func:`jslices.apply_updates` stay
    row-major. (So do results of your own ``jit`` that come straight from one of them; after
    a loop or a ``cond``, return ``jslices.row_major(params)``. It needs jax 0.11.1. To
    compile for a TPU that is not here, shard the arguments over a mesh of it, or stay in
    ``with jax.default_device(tpu)``. To export a step for a TPU, also pass
    ``jax.export.export`` the ``disabled_checks``
    ``[jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]``.)

    Args:
      tree: a pytree of arrays ``[V, *D]`` or ``jax.ShapeDtypeStruct``, under ``jit`` too.
        Everything else is returned unchanged.

    Returns:
      The same tree, shapes, dtypes, values and shardings. Arrays that are row-major
      already, as all are on CPUs and GPUs, and arrays of rows of one element are returned
      as they are. A struct becomes that of a row-major array, on JAX's default device if
      it names none.

    Memory: a TPU pads rows to 128 elements, row-major ones of 16 to 8 times their size
    (docs/packed_tables.md says how to store short rows). Cost: one copy of each array that
    is moved.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> params = {"table": jnp.zeros((5, 3)), "bias": jnp.zeros(3)}
      >>> js.row_major(params)["table"] is params["table"]  # nothing to do on a CPU
      True
      >>> struct = jax.ShapeDtypeStruct((1_000_000, 64), jnp.float32)
      >>> js.row_major(struct).format.layout.major_to_minor
      (0, 1)

    Source: the layouts of ``jax.experimental.layout``, which this sets for tables.
    """
    return jax.tree.map(row_major_array, tree)


def row_major_array(x: Leaf) -> Any:
    """:func:`row_major` of one array."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct) or is_row_major(x):
        return x
    layout = Layout(tuple(range(x.ndim)))
    if isinstance(x, jax.core.Tracer):
        # Elsewhere arrays are row-major already, and XLA's operation for it would be one
        # that jax.export does not guarantee. A lowering rule comes too late: JAX reads the
        # layouts of results from its own equations.
        if not CONSTRAINS_LAYOUTS:
            return x
        if platform_of(x) == "tpu":
            return with_layout_constraint(x, layout)
        return row_major_p.bind(x)
    default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    device = default if isinstance(default, jax.Device) else jax.devices(default)[0]
    sharding = x.sharding or SingleDeviceSharding(device)
    placed = Format(layout, sharding)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)
    return jax.device_put(x, placed)


def is_row_major(x: Aval) -> bool:
    """True if the array is row-major already; False for tracers of unknown layout."""
    if math.prod(x.shape[1:]) < 2:
        return True
    if isinstance(x, jax.core.Tracer):
        return False
    layout = x.format.layout
    return layout is not None and layout.major_to_minor == tuple(range(x.ndim))


def laid_out_as(table: Aval, array: Aval) -> Any:
    """``array``, made for the rows of ``table``, row-major if that is known to be."""
    is_concrete = isinstance(table, jax.Array) and not isinstance(table, jax.core.Tracer)
    return row_major_array(array) if is_concrete and is_row_major(table) else array


def is_tall(x: Aval) -> bool:
    """Whether an array has so many rows that it counts as a table."""
    return x.ndim > 0 and x.shape[0] >= TALL * math.prod(x.shape[1:])


# --- platforms ---


def platform_of(*arrays: Aval) -> str:
    """``cpu``, ``gpu`` or ``tpu``: that of :func:`device_of`, or JAX's default."""
    device = device_of(*arrays)
    return getattr(device, "platform", device) or jax.default_backend()


def device_of(*arrays: Aval) -> Any:
    """A device, or its kind, where a program that is being traced will run.

    The types of arrays on a mesh tell, then the mesh in context and ``jax.default_device``;
    None is JAX's default. (The types of arrays on one device without a mesh do not tell.)
    """
    avals = (jax.typeof(x) if isinstance(x, jax.Array) else x for x in arrays)
    meshes = (getattr(getattr(x, "sharding", None), "mesh", None) for x in avals)
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if device := getattr(mesh, "abstract_device", None):
            return device
    return jax.config.jax_default_device  # type: ignore[attr-defined]
