"""Functions of arrays and slices, called with tables and their gradients.

In a traced program a call is one equation, which runs the function when the program is
lowered. Its derivative is :func:`jslices.vjp`'s: every lookup known there gives rows.
"""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import hijax

import jslices as js

IN_CHECKPOINT = (
    "a lookup of a jslices.experimental.table inside of jax.checkpoint: type "
    'jax.config.update("jax_remat3", True) and jax.checkpoint(f, prevent_cse=False), or '
    "look the rows up before it, as in jax.checkpoint(f)(table[ids], ...)"
)


@dataclasses.dataclass(frozen=True, repr=False)
class Wrapping(hijax.HiType):
    """A type whose values stand for an array, of the type ``core``, or for rows of it.

    A subclass has ``wrap`` and ``unwrap`` (from what a value stands for to the value, and
    back), ``described`` (that for ``jax.eval_shape``), ``mirrored`` (the type of a result
    where such a value was, or None), and ``advice`` for who takes it for an array.
    """

    core: Any
    room: int | None
    row_axes: int

    # So that isinstance(x, jax.Array) holds, which Equinox asks of what has a gradient.
    __class__ = property(lambda self: hijax.ShapedArray)
    shape = property(lambda self: self.core.shape)
    dtype = property(lambda self: self.core.dtype)
    ndim = property(lambda self: len(self.shape))

    def str_short(self, *_: bool, **__: bool) -> str:
        return f"{type(self).__name__} of {self.core}"

    def __getattr__(self, name: str) -> Any:
        if name in ("sharding", "weak_type", "memory_space", "manual_axis_type", "mat"):
            return getattr(self.core, name)
        primitive = name == "array_abstraction_level"  # which those of JAX ask for
        raise (TypeError if primitive else AttributeError)(f"{name}: this is {self.advice}")


def type_of(x: Any) -> Any:
    """The type of a table, or of the gradient of one; None for anything else."""
    type = getattr(x, "aval", None)
    return type if isinstance(type, Wrapping) else None


def _unwrapped(x: Any) -> Any:
    type = type_of(x)
    return type.unwrap(x) if type else x


def _dense(x: Any) -> Any:
    return x.to_dense() if js.is_slices(x) else x


def _filled(values: Any, at: list[int], some: Any) -> list[Any]:
    """The values, with others at these places."""
    return list((dict(enumerate(values)) | dict(zip(at, some, strict=True))).values())


class Call(hijax.HiPrim):
    """A call of a function of what values of the types ``arguments`` stand for.

    It returns a list. ``sparse`` is that of :func:`jslices.vjp`, for tables; None if there
    is no derivative.
    """

    lin, linearized = hijax.linearize_from_jvp

    def __init__(self, fun: Any, arguments: Any, results: Any, sparse: Any = None) -> None:
        self.in_avals, self.out_aval = tuple(arguments), list(results)
        self.params = {"fun": fun, "sparse": sparse}
        super().__init__()

    def expand(self, *args: Any) -> list[Any]:
        pairs = zip(self.out_aval, self.fun(*map(_unwrapped, args)), strict=True)
        return [t.wrap(x) if isinstance(t, Wrapping) else x for t, x in pairs]

    def staging(self, trace: Any, *args: Any) -> Any:
        outer = trace
        while outer is not None:
            info = getattr(getattr(outer, "frame", None), "debug_info", None)
            if getattr(info, "traced_for", "") == "checkpoint / remat":
                raise NotImplementedError(IN_CHECKPOINT)
            outer = getattr(outer, "parent_trace", None)
        return super().staging(trace, *args)

    def batch(self, axis: Any, args: Any, dims: Any) -> Any:
        if all(d is None for d in dims):
            return self(*args), [None] * len(self.out_aval)
        fun, first = hijax.vmap_rule(axis, self.fun, dims, 0), [0] * len(self.out_aval)
        results = hijax.unmap_avals(axis, self.out_aval, first)
        made = type(self)(fun, map(jax.typeof, args), results, self.sparse)
        return made(*args), first

    def _of(self, at: list[int], primals: Any) -> Any:
        if self.sparse is None:
            raise NotImplementedError(
                "steps of optimizers, and functions of gradients, have no derivative by a "
                "jslices.experimental.table; pass experimental.arrays(tree)"
            )
        return lambda *args: self.fun(*_filled(primals, at, args))

    def vjp_fwd(self, _: Any, *primals: Any) -> Any:
        return self(*primals), primals

    def vjp_bwd_retval(self, primals: Any, cotangents: Any) -> Any:
        types, count = self.in_avals, len(primals)
        at = [i for i in range(count) if jnp.issubdtype(types[i].dtype, jnp.inexact)]
        sparse = tuple(isinstance(types[i], Wrapping) and self.sparse for i in at)

        def pull(*values: Any) -> list[Any]:
            moved = (values[i] for i in at)
            _, pullback = js.vjp(self._of(at, values[:count]), *moved, sparse=sparse)
            return list(pullback(list(map(_dense, values[count:]))))

        values = *primals, *map(hijax.instantiate_zeros, cotangents)
        results = [types[i].to_tangent_aval() for i in at]
        found = Call(pull, map(jax.typeof, values), results, self.sparse)(*values)
        return tuple(_filled([None] * count, at, found))

    def jvp(self, primals: Any, tangents: Any) -> Any:
        results = [type.to_tangent_aval() for type in self.out_aval]
        count = len(primals)
        at = [i for i in range(count) if not isinstance(tangents[i], hijax.Zero)]
        if not at:
            return self(*primals), list(map(hijax.Zero, results))

        def push(*values: Any) -> list[Any]:
            moved, by = [values[i] for i in at], list(map(_dense, values[count:]))
            pairs = zip(*jax.jvp(self._of(at, values[:count]), moved, by), strict=True)
            return [x.with_values(t.values) if js.is_slices(x) else t for x, t in pairs]

        values = *primals, *(tangents[i] for i in at)
        return self(*primals), Call(push, map(jax.typeof, values), results)(*values)


def call(
    fun: Any, args: Any, kwargs: Any, like: Any = None, part: Any = None, sparse: Any = None
) -> Any:
    """``fun(*args, **kwargs)``, of tables and gradients of tables among other things.

    ``like`` is the place of an argument: the result, or this ``part`` of it, has tables,
    and gradients of tables, where that has. ``sparse`` is as of :class:`Call`.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    if not any(map(type_of, leaves)):
        return fun(*args, **kwargs)
    at = [i for i, x in enumerate(leaves) if type_of(x) or isinstance(x, jax.core.Tracer)]
    values = [leaves[i] for i in at]

    def of_values(*values: Any) -> Any:
        args, kwargs = tree.unflatten(_filled(leaves, at, values))
        return fun(*args, **kwargs)

    def typed(result: Any, make: Any) -> Any:
        def one(x: Any, found: Any) -> Any:
            type = type_of(x) and found is not None and type_of(x).mirrored(found)
            return make(type, found) if type else found

        if like is None:
            return result
        name = list(inspect.signature(fun).parameters)[like]
        model = args[like] if len(args) > like else kwargs.get(name)
        parts, k = [result] if part is None else list(result), part or 0
        is_leaf = lambda x: x is None or js.is_slices(x)  # noqa: E731
        parts[k] = jax.tree.map(one, model, parts[k], is_leaf=is_leaf)
        return parts[0] if part is None else tuple(parts)

    if not any(isinstance(x, jax.core.Tracer) for x in values):
        return typed(of_values(*map(_unwrapped, values)), lambda type, x: type.wrap(x))
    arguments = list(map(jax.typeof, values))
    described = (t.described() if isinstance(t, Wrapping) else t for t in arguments)
    shapes = typed(jax.eval_shape(of_values, *described), lambda type, x: type)
    results, structure = jax.tree.flatten(shapes)
    results = [x if isinstance(x, Wrapping) else jax.typeof(x) for x in results]
    flat = lambda *values: structure.flatten_up_to(of_values(*values))  # noqa: E731
    return structure.unflatten(Call(flat, arguments, results, sparse)(*values))
