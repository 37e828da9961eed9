"""``grad``, ``value_and_grad`` and ``vjp``: JAX's own, with rows for looked-up arrays."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices._grad import compat
from jslices._grad.choose import Leaf, SparseSpec, describe_leaves, report_dense
from jslices._grad.evaluate import evaluate
from jslices._grad.views import Table, whole
from jslices._grad.walk import DenseUse, Plan, Site, map_sites, sites, walk
from jslices._lookup.embedding import without_dense_warning
from jslices._lookup.rows import empty_slot_for
from jslices._slices import IndexedSlices
from jslices._trees import flatten


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    sparse: SparseSpec = None,
) -> Callable[..., tuple[Any, Any]]:
    """``jax.value_and_grad``, where every array that is only looked up gets its rows.

    The gradient of an array ``[V, *D]`` whose every use reads whole rows (``table[ids]``,
    ``jnp.take``, :func:`jslices.embedding_lookup`, anywhere inside ``jit``, ``vmap``,
    ``scan``, ``cond`` or ``checkpoint``) is an :class:`jslices.IndexedSlices` with
    ``values`` ``[K, *D]`` of the array's dtype and int32 ``indices`` ``[K]``, K being the
    number of rows read, duplicates counted. Untouched rows do not appear. Every other
    gradient is what JAX gives.

    ``fun`` is traced as under ``jax.jit``: its control flow may not depend on values.

    Args:
      fun: a function with a scalar result (or ``(result, aux)``).
      argnums: which positional argument or arguments to differentiate.
      has_aux: whether ``fun`` returns ``(result, aux)``.
      holomorphic: whether ``fun`` is holomorphic; then complex in and out.
      allow_int: whether integer arrays may be differentiated (their gradient is of
        dtype float0).
      sparse: None decides by the program. A bool, a pytree prefix of bools, or a function
        ``(path, leaf) -> bool`` of JAX's key path decides per array: False makes it
        dense, True insists on rows.

    Returns:
      A function of the same arguments that returns ``(value, grads)``, or
      ``((value, aux), grads)``.

    Raises:
      DenseUseError: for an array that ``sparse`` insists on but that is used whole.
      TypeError: for a result that is not a scalar, or integer arguments.

    Warns:
      DensificationWarning: for an array that is looked up and also used whole (tied
        weights); its gradient is dense and right, and the warning names the line.

    Cost: that of ``jax.value_and_grad`` without writing ``[V, *D]``, and tracing once
    more.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> def loss(table, ids):
      ...     return (table[ids] ** 2).sum()
      >>> value, grad = js.value_and_grad(loss)(jnp.ones((1000, 2)), jnp.array([3, 9, 3]))
      >>> grad
      IndexedSlices(3 rows of float32[1000, 2], indices int32[3]: 36 B, dense 7.8 KB, saves 7.8 KB)

    Source: TensorFlow's ``tf.gradients`` gives IndexedSlices where the gradient function
    of the lookup itself is reached; here any program is read, and the steps that commute
    with a lookup (a cast, a scaling, any row-wise function) may stand in between.
    """  # noqa: E501
    _check_callable(fun)

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        chosen = _chosen(argnums, args)
        call = _Call(fun, chosen, args, kwargs, has_aux)
        _check_inputs(call.primals, holomorphic, allow_int)
        single = isinstance(argnums, int)
        value, pullback, aux = _linearize(call, single, sparse)
        seed = _seed(value, holomorphic)
        grads = pullback(seed)
        grads = grads[0] if single else grads
        return ((value, aux), grads) if has_aux else (value, grads)

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    sparse: SparseSpec = None,
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
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, sparse=sparse)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def vjp(
    fun: Callable[..., Any],
    *primals: Any,
    has_aux: bool = False,
    sparse: SparseSpec = None,
) -> Any:
    """``jax.vjp``, where every array that is only looked up gets its rows.

    Args:
      fun: a function of ``primals``, its result any pytree of arrays.
      *primals: pytrees of arrays.
      has_aux: whether ``fun`` returns ``(result, aux)``.
      sparse: as in :func:`value_and_grad`; a prefix of the tuple ``primals``.

    Returns:
      ``(result, vjp_fun)`` or ``(result, vjp_fun, aux)``. ``vjp_fun(cotangent)`` returns
      a tuple like ``primals``, with an IndexedSlices for each array that is only looked
      up. It is a pytree and can leave a ``jit``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> rows, vjp_fun = js.vjp(lambda t: t[jnp.array([1, 1])], jnp.zeros((4, 2)))
      >>> (g,) = vjp_fun(jnp.ones((2, 2)))
      >>> g.indices
      Array([1, 1], dtype=int32)
    """
    _check_callable(fun)
    call = _Call(fun, tuple(range(len(primals))), primals, {}, has_aux)
    result, pullback, aux = _linearize(call, False, sparse)
    return (result, pullback, aux) if has_aux else (result, pullback)


# --- the call ---------------------------------------------------------------------


class _Call:
    """One call of the user's function, as a function of the differentiated arrays."""

    def __init__(
        self,
        fun: Callable[..., Any],
        chosen: Sequence[int],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        has_aux: bool,
    ) -> None:
        self.fun, self.args, self.kwargs, self.has_aux = fun, args, kwargs, has_aux
        self.chosen = chosen
        self.primals, self.tree = flatten(tuple(args[i] for i in chosen))

    @property
    def names(self) -> list[str]:
        """What the user calls the differentiated arguments."""
        try:
            parameters = list(inspect.signature(self.fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        return [positional[i] if i < len(positional) else f"args[{i}]" for i in self.chosen]

    def trace(self) -> tuple[compat.Program, "_Outputs"]:
        """The traced program (inputs: the arrays), and how to read its outputs."""
        found: list[_Outputs] = []

        def flat(*leaves: Any) -> list[Any]:
            args = list(self.args)
            for i, arg in zip(self.chosen, self.tree.unflatten(leaves), strict=True):
                args[i] = arg
            out = self.fun(*args, **self.kwargs)
            out, aux = _split_aux(out, self.has_aux)
            results, out_tree = flatten(out)
            aux_leaves, aux_tree = flatten(aux)
            # Only arrays can leave a traced program; names, None, numbers stay outside.
            arrays = [x for x in aux_leaves if isinstance(x, jax.Array)]
            fixed = [None if isinstance(x, jax.Array) else (x,) for x in aux_leaves]
            found.append(_Outputs(out_tree, len(results), aux_tree, fixed))
            return [*results, *arrays]

        program = jax.make_jaxpr(flat)(*self.primals)
        return program, found[-1]


class _Outputs(NamedTuple):
    """How the flat outputs of the traced program make the user's result and aux."""

    tree: Any
    num_results: int
    aux_tree: Any
    aux_fixed: list[Any]

    def result(self, flat: Sequence[Any]) -> Any:
        return self.tree.unflatten(flat)

    def aux(self, arrays: Sequence[Any]) -> Any:
        left = iter(arrays)
        leaves = [next(left) if fixed is None else fixed[0] for fixed in self.aux_fixed]
        return self.aux_tree.unflatten(leaves)


def _split_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return out, ()
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(
            "with has_aux=True the function must return a pair (result, aux), got "
            f"{type(out).__name__}"
        )
    return out[0], out[1]


# --- differentiating ---------------------------------------------------------------


def plan_call(
    call: _Call, single: bool, spec: SparseSpec
) -> tuple[compat.Program, _Outputs, list[Leaf], Plan, dict[int, DenseUse]]:
    """Traces the call and decides which leaves are sparse."""
    leaves = describe_leaves(call.tree.unflatten(call.primals), call.names, single, spec)
    program, outputs = call.trace()
    candidates = {
        i: leaf.aval
        for i, leaf in enumerate(leaves)
        if leaf.can_be_sparse and leaf.forced is not False
    }
    plan, dense, looked_up = walk(program, candidates, outputs.num_results)
    report_dense(leaves, dense, looked_up)
    return program, outputs, leaves, plan, dense


def _linearize(
    call: _Call, single: bool, spec: SparseSpec
) -> tuple[Any, Callable[[Any], Any], Any]:
    program, outputs, leaves, plan, _ = plan_call(call, single, spec)
    planned = sites(plan)
    read = {site.leaf for site in planned}
    sparse = [i in read or bool(leaf.forced) for i, leaf in enumerate(leaves)]
    dense_primals = [x for x, s in zip(call.primals, sparse, strict=True) if not s]
    slots = map_sites(
        lambda s: empty_slot_for(s.times, s.count, s.table_shape, s.dtype), plan
    )

    def run(dense: list[Any], slots: Any) -> tuple[list[Any], Any]:
        left = iter(dense)
        operands = [
            Table(x.shape, x.dtype, i, x) if is_sparse else next(left)
            for i, (x, is_sparse) in enumerate(zip(primals, sparse, strict=True))
        ]
        flat, indices = evaluate(program, operands, plan, slots)
        flat = [whole(x) for x in flat]
        return flat[: outputs.num_results], (flat[outputs.num_results :], indices)

    primals = [
        jnp.asarray(x) if s else x for x, s in zip(call.primals, sparse, strict=True)
    ]
    with without_dense_warning():
        flat, pullback, (aux, indices) = jax.vjp(run, dense_primals, slots, has_aux=True)
    gather = _Assemble(
        tuple(sparse), tuple(leaf.aval for leaf in leaves), planned, call.tree
    )
    pull = functools.partial(_pull_back, gather, outputs.tree)
    vjp_fun = jax.tree_util.Partial(pull, pullback, jax.tree.leaves(indices))
    return outputs.result(flat), vjp_fun, outputs.aux(aux)


def _pull_back(
    assemble: "_Assemble",
    tree: Any,
    pullback: Any,
    indices: list[jax.Array],
    cotangent: Any,
) -> Any:
    leaves, given = flatten(cotangent)
    if given != tree:
        raise TypeError(
            f"the cotangent must have the structure of the result, {tree}, got {given}"
        )
    with without_dense_warning():
        dense, slots = pullback(leaves)
    is_slot = lambda x: isinstance(x, IndexedSlices)  # noqa: E731
    return assemble(dense, jax.tree.leaves(slots, is_leaf=is_slot), indices)


class _Assemble:
    """Puts the cotangents of slots and dense leaves back into the argument's tree."""

    def __init__(
        self, sparse: tuple[bool, ...], avals: Any, planned: list[Site], tree: Any
    ) -> None:
        self.sparse, self.avals, self.tree = sparse, avals, tree
        self.leaf_of_site = [site.leaf for site in planned]
        self.planned = planned

    def __call__(
        self,
        dense: Sequence[Any],
        slots: Sequence[IndexedSlices],
        indices: Sequence[jax.Array],
    ) -> Any:
        rows: dict[int, list[tuple[jax.Array, jax.Array]]] = {}
        for leaf, slot, index in zip(self.leaf_of_site, slots, indices, strict=True):
            values = slot.values.reshape(-1, *self.avals[leaf].shape[1:])
            rows.setdefault(leaf, []).append((values, index.reshape(-1)))
        left = iter(dense)
        return self.tree.unflatten(
            self._slices(i, rows.get(i, [])) if is_sparse else next(left)
            for i, is_sparse in enumerate(self.sparse)
        )

    def _slices(self, leaf: int, parts: list[Any]) -> IndexedSlices:
        aval = self.avals[leaf]
        shape = tuple(aval.shape)
        if not parts:  # forced sparse, and never read
            none = jnp.zeros((0, *shape[1:]), aval.dtype)
            return IndexedSlices(none, jnp.zeros((0,), jnp.int32), shape)
        values, indices = zip(*parts, strict=True)
        if len(parts) == 1:
            return IndexedSlices(values[0], indices[0], shape)
        widest = max((i.dtype for i in indices), key=lambda dtype: dtype.itemsize)
        return IndexedSlices(
            jnp.concatenate(values),
            jnp.concatenate([i.astype(widest) for i in indices]),
            shape,
        )


# --- checks ------------------------------------------------------------------------


def _check_callable(fun: Any) -> None:
    if not callable(fun):
        raise TypeError(f"expected a function to differentiate, got {fun!r}")


def _chosen(argnums: int | Sequence[int], args: Sequence[Any]) -> tuple[int, ...]:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"argnums={argnums} needs at least {max(numbers) + 1} positional "
                f"arguments, got {len(args)}; differentiated arguments cannot be "
                "passed by keyword"
            )
    return tuple(number % len(args) for number in numbers)


def _check_inputs(primals: Sequence[Any], holomorphic: bool, allow_int: bool) -> None:
    for x in primals:
        dtype = getattr(x, "dtype", None)
        if dtype is None:
            if not isinstance(x, int | float | complex | np.generic):
                raise TypeError(
                    f"cannot differentiate {x!r} of type {type(x).__name__}: the "
                    "differentiated arguments must consist of arrays. Split the model "
                    "first (equinox.partition, nnx.split), or pass the rest as another "
                    "argument"
                )
            dtype = jnp.result_type(x)
        if holomorphic and not jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(f"holomorphic=True wants complex inputs, got {dtype}")
        if jnp.issubdtype(dtype, jnp.inexact):
            if jnp.issubdtype(dtype, jnp.complexfloating) and not holomorphic:
                raise TypeError(
                    f"cannot differentiate a {dtype} array unless holomorphic=True"
                )
        elif not allow_int:
            raise TypeError(
                f"cannot differentiate an array of dtype {dtype}; pass it as another "
                "argument, or set allow_int=True (its gradient is then of dtype float0)"
            )


def _seed(value: Any, holomorphic: bool) -> jax.Array:
    leaves = jax.tree.leaves(value)
    if len(leaves) != 1 or jax.tree.structure(value) != jax.tree.structure(0):
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
    wanted = jnp.complexfloating if holomorphic else jnp.floating
    if not jnp.issubdtype(dtype, wanted):
        raise TypeError(
            f"the function must return a {wanted.__name__} scalar, got dtype {dtype}"
        )
    return jnp.ones((), dtype)
