"""Slices as arguments and results of compiled programs, their facts included."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from jslices._jax import is_staged, usual_promotion
from jslices._slices.entries import Entries
from jslices._typing import PyTree

P = ParamSpec("P")
R = TypeVar("R")


@jax.tree_util.register_pytree_node_class
class _Carried:
    """Slices, or a bool, as a pytree of which all but arrays is the static part."""

    def __init__(self, whole: Entries | bool) -> None:
        self.whole = whole

    def tree_flatten(self) -> tuple[Any, Any]:
        x = self.whole
        if isinstance(x, bool):
            return (), x
        return (x.values, x.indices), (type(x), x.dense_shape, x.facts)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Sequence[Any]) -> "_Carried":
        if isinstance(static, bool):
            return cls(static)
        kind, *shape_and_more = static
        return cls(kind.of(*children, *shape_and_more))


def carry_facts(tree: PyTree) -> PyTree:
    """The tree with all facts of its slices, and bools, in its structure.

    So they pass the arguments and results of ``jit`` and ``shard_map``; :func:`carried`
    gives the tree back.
    """

    def is_whole(x: object) -> bool:
        return isinstance(x, Entries | bool)

    return jax.tree.map(lambda x: _Carried(x) if is_whole(x) else x, tree, is_leaf=is_whole)


def carried(tree: PyTree) -> PyTree:
    """The tree that was given to :func:`carry_facts`."""

    def is_carried(x: object) -> bool:
        return isinstance(x, _Carried)

    return jax.tree.map(lambda x: x.whole if is_carried(x) else x, tree, is_leaf=is_carried)


def one_program(fun: Callable[P, R]) -> Callable[P, R]:
    """``fun``, compiled as a whole outside of ``jax.jit``, not operation by operation.

    Its arguments are pytrees of arrays and slices, those that must be keywords static. With
    anything else than arrays, or arrays on different devices, it runs as it is. An array
    that it returns as it came is not copied. Dtypes are promoted in JAX's usual way, though
    the user's program may be strict.
    """
    signature = inspect.signature(fun)

    @functools.partial(jax.jit, static_argnums=0)
    def program(static: tuple[tuple[str, Any], ...], args: PyTree) -> Any:
        numbers = {id(x): _Argument(n) for n, x in enumerate(jax.tree.leaves(args))}
        result = carry_facts(fun(*carried(args), **dict(static)))
        return jax.tree.map(lambda x: numbers.get(id(x), x), result)

    @usual_promotion
    @functools.wraps(fun)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{fun.__name__}(): {error}") from None
        if is_staged():
            return fun(*args, **kwargs)
        carriers = carry_facts(bound.args)
        arrays = jax.tree.leaves(carriers)
        if not _are_of_one_program(arrays):
            return fun(*args, **kwargs)
        result = jax.tree.map(
            lambda x: arrays[x.number] if isinstance(x, _Argument) else x,
            program(tuple(bound.kwargs.items()), carriers),
            is_leaf=lambda x: isinstance(x, _Argument),
        )
        return carried(result)

    return run


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Argument:
    """What stands in a program's result for one of its arguments."""

    number: int


def _are_of_one_program(arrays: Sequence[Any]) -> bool:
    devices: set[tuple[jax.Device, ...]] = set()
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            if x.committed:
                devices.add(_devices_in_order(x.sharding))
        elif not isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex):
            return False
        elif isinstance(x, np.ndarray) and x.dtype.kind in "OSU":  # which is then refused
            return False
    return len(devices) < 2


def _devices_in_order(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))
