"""``grad``, ``value_and_grad`` and ``vjp``: JAX's own, with rows for looked-up arrays."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jslices import _jax
from jslices._grad.arguments import Argnums, names_states
from jslices._grad.call import (
    ExchangeSpec,
    LeafSpec,
    SparseSpec,
    UserCall,
    check_callable,
    check_inputs,
)
from jslices._grad.explain import hint_smaller, report_dense
from jslices._grad.nnx import value_and_grad_of_states
from jslices._grad.plan import Planned, plan_call
from jslices._grad.run import (
    SlotTree,
    gradients_of,
    run_planned,
    slots_for,
    without_dense_warning,
)
from jslices._place.boundary import mesh_of
from jslices._place.hints import hinted
from jslices._rows import access
from jslices._slices import IndexedSlices, is_slices
from jslices._slices.held import unheld
from jslices._typing import PyTree


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    sparse: SparseSpec = None,
    exchange: ExchangeSpec = None,
) -> Callable[..., tuple[Any, Any]]:
    """``jax.value_and_grad``, where every array that is only looked up gets its rows.

    The gradient of an array ``[V, *D]`` whose every use reads whole rows (``table[ids]``,
    ``jnp.take``, :func:`jslices.embedding_lookup`, anywhere inside ``jit``, ``vmap``,
    ``scan``, ``cond`` or ``checkpoint``) is an :class:`jslices.IndexedSlices` with
    ``values`` ``[K, *D]`` of the array's dtype and int32 ``indices`` ``[K]``, K being the
    number of rows read, duplicates counted. Untouched rows do not appear. Arrays that
    receive no gradient (unused, looked up with no ids, behind ``stop_gradient``) get no
    rows: K is 0, and a lazy optimizer leaves them. Every other gradient is what JAX gives.
    If int32 cannot number rows, as those of ``[64, 40_000_000, 4]`` in ``tables[l, ids]``,
    coarser ones are taken, or JAX's gradient; int64 can, with ``jax_enable_x64``.

    ``fun`` is traced as under ``jax.jit``: its control flow may not depend on values.

    Args:
      fun: a function with a scalar result (or ``(result, aux)``).
      argnums: which positional argument or arguments to differentiate. ``nnx.DiffState``
        takes these states of a Flax model, as in ``nnx.value_and_grad``; what ``fun``
        changes in the rest of the model then stays changed.
      has_aux: whether ``fun`` returns ``(result, aux)``.
      holomorphic: whether ``fun`` is holomorphic; then complex in and out. The gradient of
        a real result by a complex array is JAX's, the conjugate of the steepest ascent: a
        step takes ``jslices.tree.map(lambda g: g.conj(), grads)``.
      allow_int: whether integer arrays may be differentiated (their gradient is of
        dtype float0).
      sparse: None decides by the program alone: the kind of a gradient then depends on
        sizes only where all row numbers are constants of the program, ``table[7]``,
        ``table[:n]`` (rows if they are at most half of the array). False makes a gradient
        dense, zeros if there is none, True insists on rows, and ``"if_smaller"`` makes a
        gradient dense if its rows and indices, K counted with duplicates, would take at
        least the bytes of the array: tables of a few rows, whose rows cost time to compile
        and to step. (Given a dense gradient, a lazy optimizer steps all rows.) One of these
        for all arrays, a pytree prefix of them, or a function ``(path, leaf)`` of JAX's key
        path that gives one.
      exchange: for tables split by rows over the devices of a mesh: a
        :class:`jslices.Exchange` for all of them, or a pytree prefix (a dict may leave
        arrays out). Then rows are sent between devices, never the table; the entries of the
        gradient are on the devices that hold their rows, and optimizers need nothing from
        other devices. On a mesh of Explicit axes the table's type says how it is split;
        without either XLA decides, and exchanges more.

    Returns:
      A function of the same arguments that returns ``(value, grads)``, or
      ``((value, aux), grads)``.

    Raises:
      DenseUseError: for an array that is used whole although ``sparse`` insists on rows.
      TypeError: for a result that is not a scalar, or integer arguments.

    Warns:
      DensificationWarning: for an array that is looked up and also used whole (tied
        weights), and for one of 64 KB or more that is not looked up by whole rows
        (``table[rows, columns]``, several tables in one array); its gradient is dense and
        right, and the warning names the line.
      PerformanceHint: for an array of 64 KB or more whose rows are eight times the bytes
        of a dense gradient, or more.

    Cost: that of ``jax.value_and_grad`` without writing ``[V, *D]``, and tracing once
    more. Without ``jax.jit`` around it ``fun`` is traced at every call, as by JAX; the
    jitted functions, loops and branches in it are compiled at the first.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> def loss(table, ids):
      ...     return (table[ids] ** 2).sum()
      >>> value, grad = js.value_and_grad(loss)(jnp.ones((1000, 2)), jnp.array([3, 9, 3]))
      >>> grad
      IndexedSlices(3 rows of float32[1000, 2], indices int32[3] (3, 9, 3): 36 B, dense 8.0 KB, saves 8.0 KB)

    Source: TensorFlow's ``tf.gradients`` gives IndexedSlices where the gradient function
    of the lookup itself is reached; here any program is read, and the steps that commute
    with a lookup (a cast, a scaling, any row-wise function) may come in between.
    """  # noqa: E501
    return _with_grad(fun, argnums, has_aux, (holomorphic, allow_int, sparse, exchange))


def _with_grad(
    fun: Callable[..., Any],
    argnums: Argnums,
    has_aux: bool,
    how: tuple[bool, bool, SparseSpec, ExchangeSpec],
    wants_value: bool = True,
) -> Callable[..., tuple[Any, Any]]:
    """``value_and_grad``; unless it ``wants_value`` XLA may leave the value out."""
    check_callable(fun)
    if names_states(argnums):
        one = functools.partial(_with_grad, how=how, wants_value=wants_value)
        return value_and_grad_of_states(one, fun, argnums, has_aux)
    holomorphic, allow_int, sparse, exchange = how

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = UserCall(fun, argnums, args, kwargs, has_aux)
        check_inputs(call, holomorphic, allow_int)
        planned = plan_call(call, sparse, exchange)
        value, aux, grads = differentiated(call, planned, holomorphic, wants_value)
        return (value, aux) if has_aux else value, grads[0] if call.single else grads

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    sparse: SparseSpec = None,
    exchange: ExchangeSpec = None,
) -> Callable[..., Any]:
    """``jax.grad``, where every array that is only looked up gets its rows.

    As :func:`value_and_grad`, without the value: returns ``grads``, or ``(grads, aux)``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> g = js.grad(lambda t, i: t[i].sum())(jnp.zeros((5, 2)), jnp.array([4, 4]))
      >>> g.indices, g.coalesce().values
      (Array([4, 4], dtype=int32), Array([[2., 2.],
             [0., 0.]], dtype=float32))
    """
    how = holomorphic, allow_int, sparse, exchange
    with_value = _with_grad(fun, argnums, has_aux, how, wants_value=False)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def differentiated(
    call: UserCall,
    planned: Planned,
    holomorphic: bool = False,
    wants_value: bool = True,
) -> tuple[Any, Any, Any]:
    """``(value, aux, grads)`` of a planned call; ``grads`` is a tuple of its arguments.

    They are in no box, whose rows may be behind. What is wanted is computed before the rows
    of a gradient.
    """
    value, pullback, aux = _linearize(call, planned)
    grads = unheld(pullback(_seed(value, holomorphic)))
    result = value if wants_value else None
    (result, aux), grads = _in_order((result, aux), grads, not wants_value)
    return result if wants_value else value, aux, grads


def evaluated(call: UserCall, planned: Planned) -> Any:
    """The aux of a planned call, without a gradient."""
    operands = [*call.primals, *call.inputs]
    with without_dense_warning():
        flat, _ = run_planned(planned, operands, slots_for(planned.plan))
    return planned.outputs.aux(flat[planned.outputs.num_results :])


def _in_order(returned: Any, grads: Any, all_by_values: bool) -> tuple[Any, Any]:
    """Both, but no row of a gradient before all else is computed.

    Whatever is returned reads tables that a step is about to write. XLA does not read first
    by itself: it copies the whole table to be able to read it later.
    """
    leaves, tree = _jax.flatten(grads, is_leaf=is_slices)
    outputs, structure = _jax.flatten(returned)
    rows = {i: g for i, g in enumerate(leaves) if is_slices(g)}
    arrays = {i: x for i, x in enumerate(outputs) if _is_computed(x)}
    if not _jax.is_staged() or not rows or len(rows) + len(arrays) < 2:
        return returned, grads

    # The rows of others, which an exact step brings up to date, wait for values.
    def by_values(g: IndexedSlices) -> bool:
        is_on_mesh = mesh_of(jax.typeof(g.values)) is not None
        return (all_by_values or g.facts.at_now) and not is_on_mesh

    # All values would be copied; the first of each table's is as late as the others.
    first = lambda x: x[(0,) * x.ndim].real if x.size else 0.0  # noqa: E731
    never = lambda x: jnp.asarray(first(x) > jnp.inf)  # noqa: E731
    late = [never(g.values) if by_values(g) else g.indices for g in rows.values()]
    every = access.at_once([*arrays.values(), *late])
    for i, x in zip(arrays, every, strict=False):
        outputs[i] = x
    for (i, g), x in zip(rows.items(), every[len(arrays) :], strict=True):
        if by_values(g):
            values = jnp.where(x, jnp.zeros((), g.dtype), g.values)
            leaves[i] = g.later(values, g.indices)
        else:
            leaves[i] = g.later(g.values, x)
    return structure.unflatten(outputs), tree.unflatten(leaves)


def _is_computed(x: Any) -> bool:
    """Whether it is an array of numbers; a key of ``jax.random`` is none."""
    return isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def vjp(
    fun: Callable[..., Any],
    *primals: Any,
    has_aux: bool = False,
    sparse: SparseSpec = None,
    exchange: ExchangeSpec = None,
) -> Any:
    """``jax.vjp``, where every array that is only looked up gets its rows.

    Args:
      fun: a function of ``primals``, its result any pytree of arrays.
      *primals: pytrees of arrays.
      has_aux: whether ``fun`` returns ``(result, aux)``.
      sparse: as in :func:`value_and_grad`; a prefix of the tuple ``primals``.
      exchange: likewise.

    Returns:
      ``(result, vjp_fun)`` or ``(result, vjp_fun, aux)``. ``vjp_fun(cotangent)`` returns a
      tuple like ``primals``, with an IndexedSlices for each array that is only looked up.
      It is a pytree and can leave a ``jit``; it refuses, by name, the attributes that
      ``jax.vjp``'s has (``with_refs``, ``args_res``, ``opaque_residuals``).

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> rows, vjp_fun = js.vjp(lambda t: t[jnp.array([1, 1])], jnp.zeros((4, 2)))
      >>> (g,) = vjp_fun(jnp.ones((2, 2)))
      >>> g.indices
      Array([1, 1], dtype=int32)
    """
    check_callable(fun)
    call = UserCall(fun, tuple(range(len(primals))), primals, {}, has_aux)
    result, pullback, aux = _linearize(call, plan_call(call, sparse, exchange))
    return (result, pullback, aux) if has_aux else (result, pullback)


# --- from a planned call to its gradient ------------------------------------------------


def _linearize(call: UserCall, planned: Planned) -> tuple[Any, Callable[[Any], Any], Any]:
    """``(result, pullback, aux)`` of the call, with a cotangent slot in every read."""
    for i, leaf in enumerate(planned.leaves):
        hinted.add(("dense", leaf.aval.shape))
        if planned.triggers_warning(i):
            report_dense(planned, i)
        elif planned.triggers_hint(i):
            hint_smaller(planned, i)
    kinds = tuple(planned.kind(i) for i in range(len(call.primals)))
    dense = [x for x, kind in zip(call.primals, kinds, strict=True) if kind == "dense"]
    slots = slots_for(planned.plan)

    def of_slots(dense: list[jax.Array], slots: SlotTree) -> tuple[Any, Any]:
        left = iter(dense)
        primals = [
            next(left) if kind == "dense" else x
            for x, kind in zip(call.primals, kinds, strict=True)
        ]
        flat, indices = run_planned(planned, [*primals, *call.inputs], slots)
        num_results = planned.outputs.num_results
        return flat[:num_results], (flat[num_results:], indices)

    with without_dense_warning():
        results, pullback, (aux, indices) = jax.vjp(of_slots, dense, slots, has_aux=True)
    sites = tuple(site for site in planned.sites if site.graded)
    static = tuple(planned.leaves), sites, kinds, call.tree, planned.outputs.tree
    vjp_fun = _VjpFun(static, (pullback, jax.tree.leaves(indices)))
    return planned.outputs.tree.unflatten(results), vjp_fun, planned.outputs.aux(aux)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _VjpFun:
    """The function from the result's cotangent to the gradients, a pytree."""

    _static: Any = dataclasses.field(metadata={"static": True})
    _arrays: Any

    def __call__(self, out_ct: PyTree, *others: PyTree) -> PyTree:
        leaves, sites, kinds, arguments, result = self._static
        # From the results' cotangents to those of dense leaves and slots; the row numbers
        # of each site.
        pullback, indices = self._arrays
        if others:
            raise TypeError(
                "a function of jslices.vjp takes one cotangent, of the structure of the "
                f"result, {result}, got {1 + len(others)} arguments"
            )
        cotangents, structure = jax.tree.flatten(out_ct)
        if structure != result:
            raise ValueError(
                f"the cotangent must have the structure of the result, {result}, got "
                f"{structure}"
            )
        with without_dense_warning():
            dense, slots = pullback(cotangents)
        rows = gradients_of(sites, jax.tree.leaves(slots), indices)
        left = iter(dense)
        return arguments.unflatten(
            next(left) if kind == "dense" else _leaf_gradient(leaf, rows.get(i))
            for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True))
        )

    def __getattr__(self, name: str) -> Any:
        instead = _INSTEAD_OF.get(name, "call it with the cotangent")
        raise AttributeError(f"a function of jslices.vjp has no {name}: {instead}")


#: Attributes of a function of ``jax.vjp`` that this one lacks.
_INSTEAD_OF = {
    "with_refs": "gradients are values here, which slices + slices adds up",
    "args_res": "it is a pytree, whose leaves are what the backward needs",
    "opaque_residuals": "it is a pytree, whose leaves are what the backward needs",
}


def _leaf_gradient(leaf: LeafSpec, rows: IndexedSlices | None) -> IndexedSlices:
    """The gradient of a leaf; without ``rows`` no gradient reaches it."""
    shape = tuple(leaf.aval.shape)
    if rows is not None:
        is_complex = jnp.iscomplexobj(rows.values)
        facts = rows.facts._replace(unconjugated=is_complex, as_taken=True)
        return rows.numbered_as(shape).with_facts(facts)
    none = jnp.zeros((0, *shape[1:]), leaf.aval.dtype)
    return IndexedSlices(none, jnp.zeros((0,), jnp.int32), shape)


def _seed(value: Any, holomorphic: bool) -> jax.Array:
    leaves = jax.tree.leaves(value)
    if len(leaves) != 1 or not jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):
        raise TypeError(
            "the function must return one scalar, got "
            f"{jax.tree.map(jnp.shape, value)}; return an auxiliary part with "
            "has_aux=True, or use jslices.vjp"
        )
    (out,) = leaves
    if jnp.ndim(out) != 0:
        raise TypeError(
            f"the function must return a scalar, got shape {jnp.shape(out)}; reduce it "
            "(.mean(), .sum()), or use jslices.vjp"
        )
    dtype = jnp.result_type(out)
    kind = jnp.complexfloating if holomorphic else jnp.floating
    if not jnp.issubdtype(dtype, kind):
        raise TypeError(
            f"the function must return a {kind.__name__} scalar, got dtype {dtype}; of a "
            "complex one return .real or jnp.abs(...), or set holomorphic=True if it is"
        )
    return _jax.one_for(out)
