"""Operators of something that stands for an array."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np


def plain(x: Any) -> Any:
    """The array that a handle holds; anything else as it is."""
    return x.value() if isinstance(x, ArrayOperators) else x


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._operate(function, self, other)


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._operate(function, other, self)


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: self._operate(function, self, *args)


def _number(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: function(self.value())


def _methods(cls: type) -> str:
    return ", ".join(name for name in dir(cls) if not name.startswith("_"))


class ArrayOperators:
    """Everything an array does, done with ``self.value()``.

    ``==`` and ``hash`` stay those of the object, as in TensorFlow 1; ``v += x`` binds the
    name to an array. Iterating, ``len`` and truth are refused.
    """

    # NumPy arrays then leave `array + v` to `__radd__`.
    __array_ufunc__ = None
    is_lazy = False  #: whether operators wait until the value is wanted

    def value(self) -> Any:
        raise NotImplementedError

    def __jax_array__(self) -> Any:
        return self.value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value(), dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        try:
            return getattr(self.value(), name)
        except AttributeError:
            raise AttributeError(
                f"a {type(self).__name__} has no {name!r}, and the array it holds has none "
                f"either; it has {_methods(type(self))}, and what arrays have"
            ) from None

    def __getitem__(self, index: Any) -> Any:
        return self._operate(operator.getitem, self, plain(index))

    def _operate(self, function: Callable[..., Any], *operands: Any) -> Any:
        """What an operator gives; with something lazy among its operands that decides."""
        for x in operands:
            if isinstance(x, ArrayOperators) and x.is_lazy:
                return x._operate(function, *operands)
        return function(*map(plain, operands))

    __iter__ = None  # else Python would try v[0], v[1], ... for ever

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
