"""``grad``, ``value_and_grad`` and ``vjp``: JAX's own, with rows for looked-up arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._grad.call import Call, chosen_arguments, is_number
from jslices._grad.choose import SparseSpec
from jslices._grad.linearize import linearize, plan_call


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
        call = Call(fun, chosen_arguments(argnums, args), args, kwargs, has_aux)
        value, aux, grads = _run(call, argnums, holomorphic, allow_int, sparse)
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
    _check_callable(fun)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        call = Call(fun, chosen_arguments(argnums, args), args, kwargs, has_aux)
        _, aux, grads = _run(call, argnums, holomorphic, allow_int, sparse)
        return (grads, aux) if has_aux else grads

    return grad_fun


def _run(
    call: Call,
    argnums: int | Sequence[int],
    holomorphic: bool,
    allow_int: bool,
    sparse: SparseSpec,
) -> tuple[Any, Any, Any]:
    """``(value, aux, grads)`` of one call."""
    _check_inputs(call.primals, holomorphic, allow_int)
    single = is_number(argnums)
    planned = plan_call(call, single, sparse)
    value, pullback, aux = linearize(call, planned)
    grads = pullback(_seed(value, holomorphic))
    return value, planned.outputs.aux(aux), grads[0] if single else grads


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
    call = Call(fun, tuple(range(len(primals))), primals, {}, has_aux)
    planned = plan_call(call, False, sparse)
    result, pullback, aux = linearize(call, planned)
    return (result, pullback, planned.outputs.aux(aux)) if has_aux else (result, pullback)


# --- checks ------------------------------------------------------------------------


def _check_callable(fun: Any) -> None:
    if not callable(fun):
        raise TypeError(f"expected a function to differentiate, got {fun!r}")


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
    wanted = jnp.complexfloating if holomorphic else jnp.floating
    if not jnp.issubdtype(dtype, wanted):
        raise TypeError(
            f"the function must return a {wanted.__name__} scalar, got dtype {dtype}"
        )
    return jnp.ones_like(out, dtype)
