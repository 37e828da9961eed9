"""The tables of any model in one array for each row shape, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jslices as js
from jslices._densify import current_user_line
from jslices._grad.explain import Explanation
from jslices._lookup.mark import mark_table
from jslices._slices import Stacked
from jslices._slices.held import unheld
from jslices._typing import Params, PyTree
from jslices.extend import broadcast_prefix, is_box, unboxed, with_axes
from jslices.optim.engine.clock import by_row, map_clocks
from jslices.tables.arrays import StackedTables

#: An array has at most so many rows that int32 numbers them.
MOST_ROWS = np.iinfo(np.int32).max


def stack_tables(
    params: Params, where: Any = None, *, devices: int = 1
) -> tuple[Stacked, "Unstack"]:
    """Put the tables of a model in one array for each row shape, its code unchanged.

    The lookups of all tables are then rows of that array, with one gradient and one step::

        stacked, unstack = stack_tables(params, js.explain(loss)(params, *batch))
        loss_of_stacked = lambda p, *batch: loss(unstack(p), *batch)

    Untouched rows, duplicates and ids out of range: as of tables apart. An id never reads
    a row of another table.

    Args:
      params: any pytree: dicts, NNX state, an Equinox module, Linen's boxes. Also of
        ``jax.ShapeDtypeStruct``. Tables are arrays ``[V_t, *D]`` of floats.
      where: which arrays are tables. What ``js.explain(loss)(params, *batch)`` returns
        (shapes suffice): those that the loss looks up, and only that. Or bools in the
        structure of params or a prefix of it, or a function from params to that. A string
        in place of True: only tables of the same string are put together, as those that
        get one optimizer or decay. None: all arrays of two axes or more; a matrix among
        them makes the gradient of its stack dense, of which ``js.grad`` warns.
      devices: as in :class:`StackedTables`.

    Returns:
      ``(stacked, unstack)``: a :class:`Stacked`, with an array for each row shape and dtype
      that several tables have, of less than 2**31 rows; and :class:`Unstack`.

    Raises:
      InvalidArgumentError: if no two tables have one row shape and dtype, with those of
        each; for another ``where``, or one that chooses what is no table.

    Cost: a copy of the tables. A step of 26 tables of 1,500 rows compiles in half of the
    time of dense Optax's; see docs/recommenders.md.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> from jslices.tables import stack_tables
      >>> params = {"user": jnp.ones((3, 2)), "item": jnp.ones((2, 2)), "w": jnp.ones(2)}
      >>> def loss(params, user, item):
      ...     return jnp.sum(params["user"][user] * params["item"][item] @ params["w"])
      >>> batch = jnp.array([2, 0]), jnp.array([1, 1])
      >>> stacked, unstack = stack_tables(params, js.explain(loss)(params, *batch))
      >>> unstack
      Unstack(2: StackedTables(item: rows 0 to 2, user: rows 2 to 5, of shape (2,)))
      >>> grads = js.grad(lambda p, *batch: loss(unstack(p), *batch))(stacked, *batch)
      >>> grads.tables["2"].indices
      Array([4, 2, 1, 1], dtype=int32)

    Source: ours. FBGEMM's table-batched embeddings want a model that is written for them.
    """
    leaves, tree = jax.tree.flatten_with_path(unheld(params), is_leaf=_is_leaf)
    boxes = [x for _, x in leaves]
    arrays = [unboxed(x) for x in boxes]
    names = [jax.tree_util.keystr(x, simple=True, separator=".") for x, _ in leaves]
    groups: dict[tuple[Any, ...], list[int]] = {}
    labels = _labels(where, params, arrays)
    for i, (label, x) in enumerate(zip(labels, arrays, strict=True)):
        if label is False:
            continue
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        if not shape or not shape[0] or not _is_of_floats(x):
            raise js.InvalidArgumentError(
                f"stack_tables wants tables [V, *D] of floats, got {dtype}{list(shape)} at "
                f"{names[i]}; leave it out of where"
            )
        groups.setdefault((label, shape[1:], dtype), []).append(i)
    members: dict[str, list[int]] = {}
    for (label, row_shape, dtype), group in groups.items():
        parts: list[list[int]] = []
        room = 0
        for i in group:
            height = jnp.shape(arrays[i])[0]
            if height > room:
                parts.append([])
                room = MOST_ROWS
            parts[-1].append(i)
            room -= height
        several = [part for part in parts if len(part) > 1]
        name = _name(label, row_shape, dtype)
        members |= {f"{name}_{n}" if n else name: part for n, part in enumerate(several)}
    if not members:
        found = [f"{dtype}[{', '.join(map(str, ('V', *x)))}]" for _, x, dtype in groups]
        raise js.InvalidArgumentError(
            "stack_tables wants two tables or more of one row shape and dtype, got "
            f"{', '.join(found) or 'no table'}; give it all parameters, and where="
            "js.explain(loss)(params, *batch)"
        )
    if len(set(names)) < len(names):
        twice = next(x for x in names if names.count(x) > 1)
        raise js.InvalidArgumentError(f"stack_tables got two arrays {twice}; rename one")
    unstack = Unstack(tree, names, boxes, members, arrays, devices)
    return unstack.stack(params), unstack


class Unstack:
    """From parameters in stacks to parameters as a model wants them, and back.

    Attributes:
      tables: which rows of each array of ``stacked.tables`` belong to which table, a
        :class:`StackedTables` for each; a table is named by its place in params,
        ``"layers.0.embedding"``.
    """

    def __init__(
        self,
        tree: Any,
        names: Sequence[str],
        boxes: Sequence[Any],
        members: dict[str, list[int]],
        arrays: Sequence[Any],
        devices: int,
    ) -> None:
        self._tree, self._names, self._members = tree, names, members
        empty = lambda x: jax.eval_shape(lambda x: x, x) if is_box(x) else None  # noqa: E731
        self._boxes = [*map(empty, boxes)]
        self.tables = {
            stack: StackedTables({names[i]: jnp.shape(arrays[i]) for i in part}, devices)
            for stack, part in members.items()
        }

    def __repr__(self) -> str:
        return f"Unstack({', '.join(f'{k}: {x}' for k, x in self.tables.items())})"

    def __call__(self, tree: PyTree) -> Any:
        """The tree with the tables of each :class:`Stacked` in it apart.

        Of parameters, in a loss: rows of its tables are then rows of the stacks, which
        nothing copies. Elsewhere, of gradients (:meth:`StackedTables.split`) and states of
        optimizers too: for checkpoints, export, and optimizers of tables apart.
        """
        wanted = "what stack_tables returned first, or a state or gradients of it"
        return self._changed("unstack", wanted, tree, _is_stacked, self._mirrors)

    def stack(self, tree: PyTree) -> Any:
        """The inverse: each part of the tree that mirrors params as a :class:`Stacked`."""
        wanted = "parameters as stack_tables got them, or a state or gradients of these"
        return self._changed("stack", wanted, tree, self._mirrors, _is_stacked)

    def per_stack(self, values: PyTree) -> Stacked:
        """One value for each stack, and for each other array, as for ``partition``.

        Labels, a mask of the weight decay, ``sparse=``, partition specs: ``values`` has one
        for each array of params, in their structure or a prefix of it. Raises
        InvalidArgumentError where tables of one stack differ.
        """
        each = self._each("per_stack", values)

        def common(stack: str, part: Sequence[int]) -> Any:
            first = each[part[0]]
            for i in part:
                if each[i] != first:
                    raise js.InvalidArgumentError(
                        f"per_stack wants one value for the tables of a stack, got "
                        f"{first!r} for {self._names[part[0]]} and {each[i]!r} for "
                        f"{self._names[i]}; stack tables of each value by themselves: "
                        "stack_tables(params, where) with a string for each"
                    )
            return first

        return self._stacked(each, common)

    def per_row(self, values: PyTree, default: float | None = None) -> Stacked:
        """A function of row numbers for each stack, by a number or a bool for each table.

        For :func:`jslices.optim.scale` and :func:`jslices.optim.freeze_rows`: see
        :meth:`StackedTables.per_row`. Other arrays keep their value.

        Args:
          values: as in :meth:`per_stack`.
          default: for tables whose value is None.
        """
        each = self._each("per_row", values)

        def function(stack: str, part: Sequence[int]) -> Any:
            named = {self._names[i]: each[i] for i in part if each[i] is not None}
            if not named:
                return None
            return self.tables[stack].per_row(named, default)

        return self._stacked(each, function)

    def _changed(
        self,
        caller: str,
        wanted: str,
        tree: PyTree,
        is_old: Callable[[Any], bool],
        is_new: Callable[[Any], bool],
    ) -> Any:
        """The tree with each part of the old form in the new one."""
        if (plain := unheld(tree)) is not tree:
            return js.hold(self._changed(caller, wanted, plain, is_old, is_new))
        found = jax.tree.leaves(tree, is_leaf=lambda x: is_old(x) or is_new(x))
        has_old, has_new = any(map(is_old, found)), any(map(is_new, found))
        if has_new or not (has_old or all(jnp.ndim(x) == 0 for x in found)):
            got = jax.tree.structure(tree)
            raise TypeError(f"{caller} wants {wanted}, got {str(got)[:200]}")
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
            how = caller, wanted
            shapes = lambda tree: self._changed(*how, tree, is_old, is_new)  # noqa: E731
            return jax.eval_shape(shapes, tree)
        change = self._apart if is_old is _is_stacked else self._together
        new = lambda x: change(x) if is_old(x) else x  # noqa: E731
        tree = jax.tree.map(new, map_clocks(by_row, tree), is_leaf=is_old)
        return map_clocks(_counted, tree)

    def _mirrors(self, tree: PyTree) -> bool:
        """Whether it has an array for each of params, or what a mask leaves of one."""
        try:
            parts = [unboxed(x) for x in self._tree.flatten_up_to(tree)]
        except ValueError:
            return False
        others = [x for x in parts if not hasattr(x, "shape")]
        return len(others) < len(parts) and not jax.tree.leaves(others)

    def _each(self, caller: str, values: PyTree) -> list[Any]:
        params = self._tree.unflatten(range(len(self._names)))
        text = f"{caller} wants values in the structure of params, or a prefix of it"
        return broadcast_prefix(values, params, text)

    def _stacked(
        self, each: Sequence[Any], value_of: Callable[[str, Sequence[int]], Any]
    ) -> Stacked:
        inside = {i for part in self._members.values() for i in part}
        rest = [None if i in inside else x for i, x in enumerate(each)]
        tables = {stack: value_of(stack, part) for stack, part in self._members.items()}
        return Stacked(tables, self._tree.unflatten(rest))

    def _boxed(self, number: int, x: Any) -> Any:
        """A table, or its state, in the box that the table came in."""
        box = self._boxes[number]
        if box is None or not hasattr(x, "shape"):
            return x
        return with_axes(box, range(x.ndim), x)

    def _together(self, tree: PyTree) -> Stacked:
        boxed = self._tree.flatten_up_to(tree)
        leaves = [unboxed(x) for x in boxed]

        def stack(name: str, part: Sequence[int]) -> Any:
            arrays = {self._names[i]: leaves[i] for i in part}
            first = leaves[part[0]]
            if not any(map(jax.tree.leaves, arrays.values())):  # None, or left by a mask
                return first
            return self.tables[name].stack(arrays)

        return self._stacked(boxed, stack)

    def _apart(self, stacked: Stacked) -> PyTree:
        leaves = self._tree.flatten_up_to(stacked.rest)
        for name, part in self._members.items():
            array, tables = stacked.tables[name], self.tables[name]
            if jax.tree.leaves(array):
                parts = tables.split(_marked(array))
            else:
                parts = dict.fromkeys(tables.names, array)
            for i, x in zip(part, parts.values(), strict=True):
                leaves[i] = self._boxed(i, x)
        return self._tree.unflatten(leaves)


def _is_of_floats(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _marked(x: Any) -> Any:
    """An array of which plain ``jax.grad`` warns that the gradient is dense."""
    if not isinstance(x, jax.core.Tracer) or not _is_of_floats(x):
        return x
    return mark_table(x, current_user_line(), "unstack")


def _is_stacked(x: Any) -> bool:
    return isinstance(x, Stacked)


def _is_leaf(x: Any) -> bool:
    return is_box(x) or isinstance(x, js.IndexedSlices)


def _labels(where: Any, params: Params, arrays: Sequence[Any]) -> list[Any]:
    """For each array the stacks that it may be in: False for none, True, or a string."""
    if where is None:
        return [jnp.ndim(x) > 1 and len(x) > 0 and _is_of_floats(x) for x in arrays]
    if isinstance(where, Explanation):
        shapes = [tuple(x.shape) for x in where.leaves]
        if shapes != [jnp.shape(x) for x in arrays]:
            raise js.InvalidArgumentError(
                "stack_tables got a report of other arrays than params: type "
                "js.explain(loss)(params, *batch)"
            )
        return [x.kind == "sparse" and x.row_axes == 1 for x in where.leaves]
    text = "where must be bools or strings in the structure of params, or a prefix of it"
    where = where(params) if callable(where) else where
    labels = broadcast_prefix(where, params, text, _is_leaf)
    for x in labels:
        if not isinstance(x, bool | np.bool_ | str | None):
            raise js.InvalidArgumentError(f"{text}, got {x!r}")
    return [x if isinstance(x, str) else bool(x) for x in labels]


def _name(label: Any, row_shape: tuple[int, ...], dtype: Any) -> str:
    """Of a stack: the row shape, and what else tells it from others."""
    parts = [
        label if isinstance(label, str) else "",
        "x".join(map(str, row_shape)) or "1",
        "" if dtype == np.float32 else str(dtype),
    ]
    return "_".join(filter(None, parts))


def _counted(clock: Any, _: Any) -> Any:
    """The clock, with a last step as a whole for each array."""
    count = len(jax.tree.leaves(clock.last))
    return clock._replace(whole=jnp.full(count, -1, jnp.int32))
