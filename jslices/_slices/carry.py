"""Functions as compiled programs, also outside ``jax.jit``."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jslices._jax import is_staged, usual_promotion

P = ParamSpec("P")
R = TypeVar("R")


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
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
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
        result: R = jax.tree.map(
            lambda x: arrays[x.number] if isinstance(x, _Argument) else x,
            program(tree, bools, tuple(bound.kwargs.items()), arrays),
            is_leaf=lambda x: isinstance(x, _Argument),
        )
        return result

    return run


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
