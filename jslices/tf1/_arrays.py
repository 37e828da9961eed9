"""Handles as arrays: operators, dtypes, shapes, and functions that accept handles."""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.typing import DTypeLike

from jslices import IndexedSlices
from jslices._typing import PyTree

#: What TensorFlow converts to a tensor: an array, a number, a list, a variable.
TensorLike: TypeAlias = Any
#: A shape that is known before tracing.
ShapeLike: TypeAlias = int | Sequence[int]
#: An array, or one that is made later (``LazyValue``).
MaybeLazy: TypeAlias = Any

P = ParamSpec("P")
T = TypeVar("T")


def plain(x: TensorLike) -> TensorLike:
    """The array that a handle holds; anything else unchanged."""
    return x.value() if isinstance(x, ArrayOperators) else x


def plain_tree(tree: PyTree) -> PyTree:
    """The same tree with arrays in place of handles."""
    return jax.tree.map(
        plain, tree, is_leaf=lambda x: isinstance(x, ArrayOperators | IndexedSlices)
    )


def operation(function: Callable[P, T]) -> Callable[P, T]:
    """Make ``function`` accept handles, and show its argument ``name`` in profiles."""
    position = list(inspect.signature(function).parameters).index("name")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        name = kwargs.get("name", args[position] if len(args) > position else None)
        with jax.named_scope(str(name or function.__name__)):
            return function(*plain_tree(args), **plain_tree(kwargs))

    return call


def _binary(function: Callable[..., MaybeLazy]) -> Callable[..., MaybeLazy]:
    return lambda self, other: self._operate(function, self, other)


def _reflected(function: Callable[..., MaybeLazy]) -> Callable[..., MaybeLazy]:
    return lambda self, other: self._operate(function, other, self)


def _unary(function: Callable[..., MaybeLazy]) -> Callable[..., MaybeLazy]:
    return lambda self, *args: self._operate(function, self, *args)


def _number(function: Callable[..., T]) -> Callable[..., T]:
    return lambda self: function(self.value())


class ArrayOperators:
    """The base of handles: the operations of arrays, on ``self.value()``.

    ``==`` and ``hash`` stay those of the object, as in TensorFlow 1; ``v += x`` binds the
    name to an array. Iterating, ``len`` and truth are refused.
    """

    # Makes NumPy arrays leave `array + v` to `__radd__`.
    __array_ufunc__ = None
    is_lazy = False  #: whether operators wait until the value is needed

    def value(self) -> Any:
        raise NotImplementedError

    def get_shape(self) -> "TensorShape":
        """The shape, by TensorFlow's older name; it equals lists too."""
        return TensorShape(self.shape)

    def __jax_array__(self) -> Any:
        return self.value()

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.asarray(self.value(), dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        try:
            return getattr(self.value(), name)
        except AttributeError:
            methods = ", ".join(n for n in dir(type(self)) if not n.startswith("_"))
            raise AttributeError(
                f"a {type(self).__name__} has no {name!r}, and the array it holds has none "
                f"either; it has {methods}, and what arrays have"
            ) from None

    def __getitem__(self, index: PyTree) -> MaybeLazy:
        return self._operate(operator.getitem, self, plain(index))

    def _operate(
        self, function: Callable[..., MaybeLazy], *operands: TensorLike
    ) -> MaybeLazy:
        """The result of an operator; it is lazy if one of the operands is."""
        for x in operands:
            if isinstance(x, ArrayOperators) and x.is_lazy:
                return x._operate(function, *operands)
        return function(*map(plain, operands))

    __iter__ = None  # otherwise Python would try v[0], v[1], ... without end

    def __bool__(self) -> bool:
        kind = type(self).__name__
        raise TypeError(f"a {kind} is neither true nor false; compare its value()")

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _reflected(operator.matmul)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lt__, __gt__ = _binary(operator.lt), _binary(operator.gt)
    __le__, __ge__ = _binary(operator.le), _binary(operator.ge)
    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)
    __int__, __float__ = _number(int), _number(float)
    __complex__, __index__ = _number(complex), _number(operator.index)
    __round__ = _unary(round)


class TensorShape(tuple[int, ...]):
    """A shape that equals lists too; the result of ``get_shape()``."""

    def as_list(self) -> list[int]:
        return list(self)

    @property
    def ndims(self) -> int:
        return len(self)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, list) else other)

    __hash__ = tuple.__hash__


# --- shapes and dtypes ------------------------------------------------------------------

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def is_array(x: object) -> bool:
    """True for arrays of a dtype; False for Python's numbers and lists."""
    return hasattr(x, "dtype") and hasattr(x, "shape")


def canonical_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype that JAX uses for this one: 64 bits only if they are enabled."""
    return np.dtype(dtypes.canonicalize_dtype(dtype))


def dtype_of(value: TensorLike) -> np.dtype:
    """The dtype of a constant: float32 and int32 for Python's numbers, as in TensorFlow."""
    if isinstance(value, str | bytes):
        raise TypeError(f"a variable cannot hold a string, got {value!r}")
    if is_array(value):
        of_numbers = isinstance(value, jax.Array) and value.weak_type
        float64 = value.dtype == np.float64
        return canonical_dtype(np.float32 if of_numbers and float64 else value.dtype)
    if _contains_arrays(value):
        return np.dtype(jnp.result_type(*jax.tree.leaves(value)))
    array = np.asarray(value)
    if array.dtype == np.int64 and (array != array.astype(np.int32)).any():
        return canonical_dtype(np.int64)  # as in TensorFlow
    narrow = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32}
    return canonical_dtype(narrow.get(array.dtype, array.dtype))


def kind_of(dtype: DTypeLike) -> int:
    """0, 1, 2, 3 for bools, integers, floats and complex numbers."""
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), 4)


def as_value(value: TensorLike, dtype: DTypeLike, what: str) -> jax.Array:
    """``value`` as an array of ``dtype``.

    Python's numbers are converted where nothing is lost, and NumPy's arrays of 64 bits, its
    default, within their kind; for other arrays a TypeError names both dtypes and ``what``.
    """
    value, dtype = plain(value), np.dtype(dtype)
    if isinstance(value, IndexedSlices):
        value = jnp.asarray(value)
    if is_numpys_default(value) and kind_of(value.dtype) == kind_of(dtype):
        cast = value.astype(dtype)
        if kind_of(dtype) == 1 and (cast != value).any():
            raise TypeError(f"{what} wants {dtype}, which cannot hold {value!r}")
        return jnp.asarray(cast)
    if is_array(value):
        weak = getattr(value, "weak_type", False)
        fits = jnp.result_type(value, dtype) == dtype if weak else False
        if not fits:
            check_dtype(value.dtype, dtype, what)
        return jnp.asarray(value, dtype)
    if _contains_arrays(value):
        return as_value(jnp.asarray(value), dtype, what)
    theirs, ours = kind_of(dtype_of(value)), kind_of(dtype)
    if theirs > ours or (theirs == 0) != (ours == 0):
        raise TypeError(f"{what} wants {dtype}, got {value!r}")
    return jnp.asarray(value, dtype)


def is_numpys_default(value: object) -> bool:
    """True for arrays of the dtypes of 64 bits that NumPy makes of Python's numbers."""
    defaults = (np.float64, np.int64, np.complex128)
    return isinstance(value, np.ndarray | np.generic) and value.dtype in defaults


def check_dtype(theirs: DTypeLike, dtype: np.dtype, what: str) -> None:
    """Raise a TypeError for an array of another dtype."""
    if canonical_dtype(theirs) != dtype:
        raise TypeError(
            f"{what} wants {dtype}, got an array of {theirs}; cast it: "
            f"value.astype('{dtype}')"
        )


def _contains_arrays(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(_contains_arrays(x) for x in value)
    return is_array(value) or isinstance(value, ArrayOperators)


def static_shape(shape: object, what: str) -> tuple[int, ...]:
    """A shape as a tuple of ints; refuses one of ``what`` that is traced, or negative."""
    several = isinstance(shape, list | tuple | np.ndarray) or np.ndim(shape) == 1  # type: ignore[arg-type]
    dims: tuple[Any, ...] = tuple(shape) if several else (shape,)  # type: ignore[arg-type]
    try:
        whole = tuple(operator.index(n) for n in dims)
    except (TypeError, jax.errors.TracerIntegerConversionError) as error:
        raise TypeError(
            f"the shape of {what} must be ints known before tracing, got {shape!r}; "
            "under jit tf.constant is traced too, so write the list itself"
        ) from error
    if any(n < 0 for n in whole):
        raise ValueError(f"the shape of {what} must not be negative, got {whole}")
    return whole
