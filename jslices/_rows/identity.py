"""Identities that a CPU is given another form of, for what XLA makes of the program.

Such a form computes the same value by other instructions. What it says is no part of the
value, hence a primitive that every transformation may drop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def identity(name: str, on_cpu: Callable[[jax.Array, jax.Array], jax.Array]) -> Primitive:
    """The primitive ``f(x, other) = x``, which a CPU computes as ``on_cpu(x, other)``."""
    primitive = Primitive(name)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        return primitive.bind(*primals), tangents[0]

    primitive.def_impl(lambda x, other: x)
    primitive.def_abstract_eval(lambda x, other: x)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = lambda args, dims: (args[0], dims[0])
    mlir.register_lowering(primitive, lambda _, x, other: [x])
    lowering = mlir.lower_fun(on_cpu, multiple_results=False)
    mlir.register_lowering(primitive, lowering, platform="cpu")
    return primitive


def zero_from(numbers: jax.Array) -> jax.Array:
    """Zeros computed from integers: one of two neighbours is even.

    No compiler knows it, so none removes what depends on them.
    """
    return (numbers * (numbers + 1)) & 1
