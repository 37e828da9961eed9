"""Tables in a box that refuses to be read, as their rows may be behind.

Under ``untouched="exact"`` rows wait for the next step that reads them. A table in a box is
the same leaf of a tree, which everything in jslices sees through and nobody else can read.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import jax

from jslices._jax import flatten
from jslices._typing import Params, PyTree

F = TypeVar("F", bound=Callable[..., Any])

_BEHIND = (
    'rows of this table may be behind (untouched="exact"). Type js.eval_step(fun, tx)('
    "params, state, *batch) for a function of rows as they are now, tx.now(params, state) "
    "for the parameters, or params, state = tx.flush(params, state)"
)


class Held:
    """A table in a box: it has a shape and a dtype, and no values to read."""

    __slots__ = ("table",)
    __array_ufunc__ = None

    def __init__(self, table: Any) -> None:
        self.table = table

    def __repr__(self) -> str:
        what = self.table
        if hasattr(what, "dtype"):
            what = f"{what.dtype}[{', '.join(map(str, what.shape))}]"
        return f"Held({what}; read it by js.eval_step, tx.now(params, state) or tx.flush)"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            name if name.startswith("__") else _BEHIND, name=name, obj=self
        )


def _refuse(self: Held, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(_BEHIND)


for _name in "shape dtype ndim size nbytes sharding".split():
    setattr(Held, _name, property(operator.attrgetter(f"table.{_name}")))
for _name in (
    "getitem iter contains bool float int complex index array jax_array dlpack neg pos abs "
    "invert round eq ne lt le gt ge add sub mul truediv floordiv mod divmod pow matmul and "
    "or xor lshift rshift radd rsub rmul rtruediv rfloordiv rmod rdivmod rpow rmatmul rand "
    "ror rxor rlshift rrshift"
).split():
    setattr(Held, f"__{_name}__", _refuse)
Held.__hash__ = object.__hash__  # type: ignore[method-assign]
# Each step makes all boxes anew: register_dataclass would make a dict for each.
jax.tree_util.register_pytree_with_keys(
    Held,
    lambda box: (((jax.tree_util.GetAttrKey("table"), box.table),), None),
    lambda _, tables: Held(*tables),
    lambda box: ((box.table,), None),
)
#: Whether it is a table in a box: in C, as it is asked of each node of a tree.
is_held = Held.__instancecheck__


def hold(params: Params) -> Any:
    """Tables in a box that refuses to be read, as a compiled exact step returns them.

    For parameters that a program of your own steps under ``untouched="exact"``: their rows
    may be behind, and a box keeps them from being read as if they were not. Whatever takes
    parameters in jslices sees through boxes.

    Args:
      params: a pytree of arrays, ``[V, *D]`` and others, in boxes or not.

    Returns:
      The same tree, of the same leaves, in which arrays of two axes or more are in boxes.
      ``tx.now`` and ``tx.flush`` take them out.

    Cost: nothing is copied.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx, params = js.adam(0.1, untouched="exact"), {"table": jnp.ones((9, 2))}
      >>> state, params = tx.init(params), js.hold(params)
      >>> try:
      ...     params["table"][0]
      ... except TypeError as error:
      ...     print(str(error)[:33])
      rows of this table may be behind
      >>> tx.now(params, state)["table"][0]
      Array([1., 1.], dtype=float32)

    Source: ours.
    """
    flags = [getattr(x, "ndim", 0) > 1 for x in jax.tree.leaves(params)]
    return held_where(params, flags)


def held_where(params: Params, flags: Iterable[bool]) -> Any:
    """The tree with these leaves in boxes, besides those that are."""
    boxes, tree = flatten(params, is_held)
    pairs = zip(boxes, flags, strict=True)
    return tree.unflatten([Held(x) if flag and not is_held(x) else x for x, flag in pairs])


def unheld(tree: PyTree) -> Any:
    """The tree without boxes; itself if it has none."""
    leaves, structure = flatten(tree, is_held)
    if not any(map(is_held, leaves)):
        return tree
    return structure.unflatten([x.table if is_held(x) else x for x in leaves])


def refuse_held(tree: PyTree) -> None:
    """Refuse tables in boxes, where values are read."""
    if any(map(is_held, flatten(tree, is_held)[0])):
        raise TypeError(_BEHIND)


def held_as(boxes: PyTree, tree: PyTree) -> Any:
    """The tree in the boxes of another."""
    put = lambda box, x: Held(x) if is_held(box) else x  # noqa: E731
    return jax.tree.map(put, boxes, tree, is_leaf=is_held)


def takes_held(like: int | None = None, part: int | None = None) -> Callable[[F], F]:
    """Let a function take tables in boxes.

    Its result, or the ``part`` of it, is in the boxes of argument ``like``.
    """

    def decorate(fun: F) -> F:
        @functools.wraps(fun)
        def of_tables(*args: Any, **kwargs: Any) -> Any:
            plain, options = unheld((args, kwargs))
            result = fun(*plain, **options)
            if like is None or plain is args:
                return result
            if part is None:
                return held_as(args[like], result)
            return *result[:part], held_as(args[like], result[part]), *result[part + 1 :]

        return of_tables  # type: ignore[return-value]

    return decorate
