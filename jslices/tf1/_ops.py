"""TensorFlow's operations on arrays, variables and IndexedSlices.

They accept a :class:`jslices.tf1.Variable` wherever an array is wanted.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

import jslices as js
from jslices import IndexedSlices
from jslices.tf1 import _arrays
from jslices.tf1._arrays import TensorLike, canonical_dtype, is_array, operation
from jslices.tf1._variable import Variable


@operation
def convert_to_tensor(
    value: TensorLike, dtype: DTypeLike | None = None, name: str | None = None
) -> jax.Array:
    """An array of a number, a list, an array, a variable or IndexedSlices.

    Another ``dtype`` than that of an array, a variable or slices is refused, and one that
    cannot hold the numbers. IndexedSlices become dense as by ``slices.to_dense()``, with a
    :class:`jslices.DensificationWarning`.

    Example:
      >>> import jslices.tf1 as tf
      >>> tf.convert_to_tensor([1, 2], tf.float32)
      Array([1., 2.], dtype=float32)
    """
    theirs = _arrays.dtype_of(value)
    result = theirs if dtype is None else canonical_dtype(dtype)
    if is_array(value) and theirs != result and not _arrays.is_numpys_default(value):
        raise ValueError(
            f"convert_to_tensor: dtype {result} was requested for a value of {theirs}; "
            f"cast it: value.astype('{result}')"
        )
    return _arrays.as_value(value, result, "convert_to_tensor")


def convert_to_tensor_or_indexed_slices(
    value: TensorLike, dtype: DTypeLike | None = None, name: str | None = None
) -> jax.Array | IndexedSlices:
    """IndexedSlices as they are, anything else by :func:`jslices.tf1.convert_to_tensor`."""
    if not isinstance(value, IndexedSlices):
        return convert_to_tensor(value, dtype, name)
    if dtype is not None and canonical_dtype(dtype) != value.dtype:
        raise ValueError(
            f"convert_to_tensor_or_indexed_slices: dtype {canonical_dtype(dtype)} was "
            f"requested for slices of {value.dtype}; cast them: slices.astype(...)"
        )
    return value


def shape(
    input: TensorLike, name: str | None = None, out_type: DTypeLike = np.int32
) -> np.ndarray:
    """The shape as a NumPy array of integers, which is known while JAX traces.

    IndexedSlices need a ``dense_shape``, and stay sparse (TensorFlow makes them dense).

    Example:
      >>> import jslices.tf1 as tf
      >>> tf.shape([[1, 2, 3]])
      array([1, 3], dtype=int32)
    """
    dims = tuple(input.shape) if is_array(input) else np.shape(input)
    if None in dims:
        raise ValueError(
            "shape: the slices have no dense_shape; give them one: "
            "IndexedSlices(values, indices, dense_shape)"
        )
    return np.array(dims, out_type)


@operation
def gather(
    params: TensorLike,
    indices: ArrayLike,
    validate_indices: bool | None = None,
    name: str | None = None,
    axis: int = 0,
) -> jax.Array:
    """``params[indices]`` along an axis.

    Along the first this is :func:`jslices.embedding_lookup`, errors included, and the
    gradient of ``params`` IndexedSlices. Along another one, known before tracing,
    ``indices`` ``[*B]`` mean the same and give ``[..., *B, ...]``; the gradient is dense.

    Example:
      >>> import jax.numpy as jnp, jslices.tf1 as tf
      >>> tf.gather(jnp.array([10.0, 20.0, 30.0]), [2, 0])
      Array([30., 10.], dtype=float32)
    """
    array = convert_to_tensor(params)
    if axis == 0:
        return js.embedding_lookup(array, indices)
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"gather: params {array.shape} have no axis {axis}")
    ids = jnp.asarray(indices)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"gather wants integer indices, got {ids.dtype}")
    ids = jnp.where(ids < 0, jnp.iinfo(ids.dtype).max, ids)
    return jnp.take(array, ids, axis, mode="fill")


# --- assigning --------------------------------------------------------------------------


def assign(
    ref: Variable,
    value: TensorLike,
    validate_shape: bool | None = None,
    use_locking: bool | None = None,
    name: str | None = None,
) -> jax.Array:
    """:meth:`jslices.tf1.Variable.assign`; ``validate_shape=False`` keeps the shape."""
    variable = _variable(ref, "assign")
    if validate_shape is False:
        what = f"assign to {variable.name} with validate_shape=False"
        value = _arrays.as_value(value, variable.dtype, what)
        if value.shape != variable.shape:
            raise ValueError(
                f"{what}: a variable keeps its shape {variable.shape}, the value has "
                f"{value.shape}; create a variable of that shape, or pad the value and "
                "keep its length in another variable"
            )
    return variable.assign(value)


def assign_add(
    ref: Variable,
    value: TensorLike,
    use_locking: bool | None = None,
    name: str | None = None,
) -> jax.Array:
    """:meth:`jslices.tf1.Variable.assign_add` of ``ref``."""
    return _variable(ref, "assign_add").assign_add(value)


def assign_sub(
    ref: Variable,
    value: TensorLike,
    use_locking: bool | None = None,
    name: str | None = None,
) -> jax.Array:
    """:meth:`jslices.tf1.Variable.assign_sub` of ``ref``."""
    return _variable(ref, "assign_sub").assign_sub(value)


def count_up_to(ref: Variable, limit: int, name: str | None = None) -> jax.Array:
    """:meth:`jslices.tf1.Variable.count_up_to` of ``ref``."""
    return _variable(ref, "count_up_to").count_up_to(limit)


def _variable(ref: object, caller: str) -> Variable:
    if not isinstance(ref, Variable):
        raise TypeError(
            f"{caller} wants a Variable, got {type(ref).__name__}; an array cannot be "
            "assigned to, so compute the new one instead"
        )
    return ref


# --- what jslices has, with TensorFlow's arguments --------------------------------------


def _scatter(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A pure scatter of jslices that assigns its result if ``ref`` is a variable."""
    verb = function.__name__

    def scatter(
        ref: TensorLike,
        indices: ArrayLike,
        updates: ArrayLike,
        use_locking: bool | None = None,
        name: str | None = None,
        *,
        mode: str = "drop",
    ) -> jax.Array:
        compute = functools.partial(function, mode=mode)
        with jax.named_scope(name or verb):
            if isinstance(ref, Variable):
                return ref._apply(verb, compute, indices, updates)
            return compute(*_arrays.plain_tree((ref, indices, updates)))

    scatter.__name__ = scatter.__qualname__ = verb
    scatter.__doc__ = f""":func:`jslices.{verb}`; a variable is assigned the result."""
    return scatter


scatter_add = _scatter(js.scatter_add)
scatter_div = _scatter(js.scatter_div)
scatter_max = _scatter(js.scatter_max)
scatter_min = _scatter(js.scatter_min)
scatter_mul = _scatter(js.scatter_mul)
scatter_sub = _scatter(js.scatter_sub)
scatter_update = _scatter(js.scatter_update)
scatter_nd_add = _scatter(js.scatter_nd_add)
scatter_nd_sub = _scatter(js.scatter_nd_sub)
scatter_nd_update = _scatter(js.scatter_nd_update)
batch_scatter_update = _scatter(js.batch_scatter_update)


def _named(function: Callable[..., Any], **theirs: str) -> Callable[..., Any]:
    """A function of jslices of handles too, with a last argument ``name``.

    ``theirs``: TensorFlow's names for some of its parameters.
    """
    ours = inspect.signature(function).parameters.values()
    parameters = [p.replace(name=theirs.get(p.name, p.name)) for p in ours]
    named = inspect.Parameter("name", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    signature = inspect.Signature([*parameters, named])

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return function(*given.args[:-1])

    call.__name__ = call.__qualname__ = function.__name__
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = f""":func:`jslices.{function.__name__}` of arrays, variables and slices.
    """
    return operation(call)


global_norm = _named(js.global_norm, tree="t_list")
clip_by_global_norm = _named(js.clip_by_global_norm, tree="t_list")
clip_by_norm = _named(js.clip_by_norm)
clip_by_average_norm = _named(js.clip_by_average_norm)
clip_by_value = _named(js.clip_by_value)


@operation
def sparse_mask(
    a: IndexedSlices,
    mask_indices: ArrayLike,
    name: str | None = None,
    *,
    size: int | None = None,
) -> IndexedSlices:
    """:func:`jslices.sparse_mask`: the slices whose index is not in ``mask_indices``."""
    return js.sparse_mask(a, mask_indices, size)


# --- what the programs on TensorFlow's pages use as well --------------------------------


@operation
def matmul(
    a: TensorLike,
    b: TensorLike,
    transpose_a: bool = False,
    transpose_b: bool = False,
    name: str | None = None,
) -> jax.Array:
    """The matrix product ``a @ b`` of ``jax.numpy.matmul``, each transposed if asked."""
    a, b = convert_to_tensor(a), convert_to_tensor(b)
    return (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)


@operation
def sigmoid(x: TensorLike, name: str | None = None) -> jax.Array:
    """``1 / (1 + exp(-x))``, by ``jax.nn.sigmoid``."""
    return jax.nn.sigmoid(convert_to_tensor(x))
