"""Row numbers as leaves of a pytree: arrays that can only be moved, cut and joined.

JAX has dtypes that it carries through every transformation and refuses to add, negate or
sum, while tracing: those of random keys. Row numbers get one of their own; its name, which
JAX's errors quote, says what to type.

They are held as their complement, ``~n``: so zeros mean row -1, an empty entry, and
``jax.tree.map(jnp.zeros_like, slices)`` has no rows, instead of touching row 0.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jslices import _jax
from jslices._instead import instead_of_optax
from jslices._rows.access import in_32_bits
from jslices._typing import Leaf

_WHAT = "row numbers of IndexedSlices, which have no arithmetic: type"
_INSTEAD = (
    "jslices.global_norm for a norm, jslices.tree.map for jax.tree.map, "
    "jslices.all_reduce_slices for lax.psum, jslices.sum_stacked for a sum or mean of "
    "stacked gradients"
)
_ABSTRACT = jax.ShapeDtypeStruct | jax.core.ShapedArray
_IN_EAGER_MODE = _jax.trace_state()


_NAMES = "int32", "int64", "uint32", "uint64", "int16", "int8", "uint16", "uint8"
_PLAIN = tuple(np.dtype(name) for name in _NAMES)


def _words(dtype: np.dtype) -> int:
    """How many uint32 hold a number."""
    return 2 if dtype.itemsize == 8 else 1


def _advice() -> str:
    """What these are, and what to type instead of the function that met them."""
    return f"{_WHAT} {instead_of_optax() or _INSTEAD}"


#: For each a kind of random keys, and its dtype, which JAX moves but does not add.
_KINDS = {
    dtype: _jax.define_keys(f"{dtype} row numbers", _advice, _words(dtype))
    for dtype in _PLAIN
}
#: A dtype that NumPy moves but does not add.
_ON_HOST = {
    dtype: np.dtype([(f"{dtype} {_WHAT} jslices.tree.map", f"V{dtype.itemsize}")])
    for dtype in _PLAIN
}
#: From both to integers.
_DTYPES: dict[Any, np.dtype] = {
    **{opaque: dtype for dtype, (_, opaque) in _KINDS.items()},
    **{opaque: dtype for dtype, opaque in _ON_HOST.items()},
}


def _wrap(numbers: jax.Array, dtype: np.dtype) -> jax.Array:
    wide = numbers if dtype.itemsize >= 4 else numbers.astype(jnp.int32)
    bits = lax.bitcast_convert_type(~wide, jnp.uint32)
    if _words(dtype) == 1:
        bits = lax.expand_dims(bits, [bits.ndim])
    return jax.random.wrap_key_data(bits, impl=_KINDS[dtype][0])


def _unwrap(keys: jax.Array, dtype: np.dtype) -> jax.Array:
    bits = jax.random.key_data(keys)
    if _words(dtype) == 1:
        bits = lax.squeeze(bits, [bits.ndim - 1])
    wide = dtype if dtype.itemsize >= 4 else np.dtype(np.int32)
    return (~lax.bitcast_convert_type(bits, wide)).astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _program(fun: Callable[..., jax.Array], x: jax.Array, dtype: np.dtype) -> jax.Array:
    return fun(x, dtype)


def _at_once(fun: Callable[..., jax.Array], x: jax.Array, dtype: np.dtype) -> jax.Array:
    """``fun(x, dtype)``, compiled once; 64 bits also where they are not enabled (now)."""
    wide = contextlib.nullcontext() if _words(dtype) == 1 else jax.enable_x64(True)
    with wide, _jax.trace_at_hand(x):
        return _program(fun, x, dtype)


def is_sealed(x: Leaf) -> bool:
    """Whether these row numbers are sealed: nobody can add them."""
    return getattr(x, "dtype", None) in _DTYPES


def sealed(x: Leaf) -> Any:
    """Row numbers that nobody can add, abstract ones too; other things as they are."""
    dtype = getattr(x, "dtype", None)
    if isinstance(x, _jax.KeyArray):
        return x if type(x) is RowNumbers else RowNumbers(*_jax.key_parts(x))
    if not isinstance(dtype, np.dtype):
        return x
    if dtype in _DTYPES:
        x, dtype = opened(x), _DTYPES[dtype]
    if not np.issubdtype(dtype, np.integer):
        return x
    if isinstance(x, _ABSTRACT):
        return x.update(dtype=_KINDS[jax.dtypes.canonicalize_dtype(dtype)][1])
    if isinstance(x, np.ndarray | np.generic):
        x = jnp.asarray(in_32_bits(np.asarray(x)))
    if not isinstance(x, jax.Array):
        return x
    if isinstance(x, jax.core.Tracer) or _jax.trace_state() != _IN_EAGER_MODE:
        with _jax.trace_at_hand(x):
            return _wrap(x, x.dtype)
    return x if x.is_deleted() else sealed(_at_once(_wrap, x, x.dtype))


def opened(x: Leaf) -> Any:
    """The integers that were sealed; other things as they are."""
    if not is_sealed(x):
        return x
    dtype = _DTYPES[x.dtype]
    if isinstance(x, _ABSTRACT):
        return x.update(dtype=dtype)
    if isinstance(x, np.ndarray | np.generic):
        return np.bitwise_not(np.asarray(x).view(dtype))
    if isinstance(x, jax.core.Tracer) or _jax.trace_state() != _IN_EAGER_MODE:
        with _jax.trace_at_hand(x):
            return _unwrap(x, dtype)
    return _at_once(_unwrap, x, dtype)


def from_bits(bits: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """The integers of ``[..., 1]``, or ``[..., 2]``, uint32."""
    wide = np.bitwise_not(bits.view(np.int32 if bits.shape[-1] == 1 else np.int64)[..., 0])
    return wide if dtype is None else wide.astype(dtype)


def of_shape(bits: jax.ShapeDtypeStruct) -> Any:
    """Row numbers of the shape whose bits, ``[..., 1]`` or ``[..., 2]``, have this one."""
    *shape, words = bits.shape
    place: Any = bits.sharding
    if isinstance(place, jax.NamedSharding):
        place = place.update(spec=jax.P(*place.spec[: len(shape)]))
    dtype = np.dtype(np.int32 if words == 1 else np.int64)
    return bits.update(shape=(*shape,), dtype=_KINDS[dtype][1], sharding=place)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError(f"these are {_advice()}")


def _compare(
    numbers: Any, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
) -> Any:
    """The operations of NumPy on row numbers: whether they are finite, or the same."""
    if ufunc in (np.isfinite, np.isnan, np.isinf):
        return np.full(numbers.shape, ufunc is np.isfinite)
    if ufunc not in (np.equal, np.not_equal):
        raise TypeError(f"np.{ufunc.__name__} got {_advice()}")
    plain = (opened(np.asarray(x)) for x in inputs)
    return getattr(ufunc, method)(*plain, **kwargs)


def _is_close(
    numbers: Any, func: Callable[..., Any], types: object, args: Any, kwargs: Any
) -> Any:
    """For row numbers, close means the same."""
    if func in (np.ones_like, np.full_like):
        _refuse()
    bare = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, _NUMBERS) else x, args)
    if func not in (np.isclose, np.allclose):
        try:
            return func(*bare, **kwargs)
        except (TypeError, ValueError) as error:  # of a norm, say
            raise TypeError(f"np.{func.__name__} got {_advice()}") from error
    same = np.equal(*map(opened, bare[:2]))
    return same if func is np.isclose else bool(same.all())


class _HostNumbers(np.ndarray):
    """Row numbers that ``np.testing.assert_allclose`` compares."""

    __array_ufunc__ = _compare  # type: ignore[assignment]
    __array_function__ = _is_close  # type: ignore[assignment]


class RowNumbers(_jax.KeyArray):
    """Row numbers outside traced programs, where NumPy, too, must not add them.

    ``np.asarray`` gives a dtype without arithmetic, ``jax.device_get`` integers.
    """

    __array_ufunc__ = _compare
    __array_function__ = _is_close

    def __array__(
        self, dtype: Any = None, context: None = None, copy: bool | None = None
    ) -> np.ndarray:
        numbers = self._integers()
        return (~numbers).view(_ON_HOST[numbers.dtype]).view(_HostNumbers)

    def _integers(self) -> np.ndarray:
        return from_bits(np.asarray(_jax.key_parts(self)[1]), _DTYPES[self.dtype])

    def __reduce__(self) -> Any:
        return sealed, (self._integers(),)

    def __repr__(self) -> str:
        return f"RowNumbers({self._integers().tolist()})"


_NUMBERS = (_HostNumbers, RowNumbers)
for _name in dir(jax.Array):
    _method = getattr(jax.Array, _name)
    lacking = getattr(_jax.KeyArray, _name) is _method and not _name.startswith("_")
    if lacking or _name in ("T", "mT", "transpose", "__pow__"):
        # Attributes that random keys lack: `astype`, `sum`, `real`, and so on; and `x**2`,
        # which JAX calls no data type.
        setattr(RowNumbers, _name, _refuse if callable(_method) else property(_refuse))


_jax.register_key_arrays(RowNumbers, lambda bits, dtype: from_bits(bits, _DTYPES[dtype]))
