"""Products that read rows: of one-hot arrays and of sparse matrices with a table.

``jax.nn.one_hot(ids, V) @ table`` is ``table[ids]``, with zeros for ids out of range. The
one-hot array is not used then, and XLA does not make it. ``matrix @ table`` of a BCOO or
BCSR matrix (``jax.experimental.sparse``) reads for each element the row of its column,
scales it, and adds it to the row of the element.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode as Mode

from jslices import _jax
from jslices._grad.origins import Origins
from jslices._grad.reads import RowRead, form_for
from jslices._grad.views import Transposed, Values, View, flat
from jslices._jax import Equation
from jslices._rows.access import wide
from jslices._rows.sums import add_rows


class _Factor(NamedTuple):
    """A view in a product along an axis that numbers its rows."""

    view: View
    axis: int  # that of the product
    #: The axes of rows for a batch of products, in its order. Others have the same ids.
    batch: tuple[int, ...]
    columns: tuple[int, ...]  # the axes of a row ``[*D]`` in the order of the product

    @property
    def alike(self) -> list[int]:
        """The sizes of the axes that have the same ids everywhere."""
        sizes = enumerate(self.view.shape[: self.view.lead])
        return [n for axis, n in sizes if axis != self.axis and axis not in self.batch]

    def numbers(self, examples: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
        """The numbers ``[n]`` of the rows with these ids in these examples of a batch."""
        rows = self.view.shape[: self.view.lead]
        shape, alike = (*ids.shape, *self.alike), ids.ndim
        ids = wide(ids, math.prod(rows))
        number = jnp.zeros(shape, ids.dtype)
        for axis, size in enumerate(rows):
            if axis != self.axis and axis not in self.batch:
                place = lax.broadcasted_iota(ids.dtype, shape, alike)
                alike += 1
            else:
                here = ids if axis == self.axis else examples[self.batch.index(axis)]
                place = here.reshape(*here.shape, *(1 for _ in self.alike))
            number = number * size + place.astype(ids.dtype)
        good = (ids >= 0) & (ids < rows[self.axis])
        good = good.reshape(*good.shape, *(1 for _ in self.alike))
        return jnp.where(good, number, math.prod(rows)).reshape(-1)

    def arranged(self, rows: jax.Array) -> jax.Array:
        """Rows ``[n, *D]`` for each id, with their axes in the order of the product."""
        rows = jnp.transpose(rows, (0, *(1 + axis for axis in self.columns)))
        count = rows.shape[0] // max(math.prod(self.alike), 1)
        return rows.reshape(count, *self.alike, *rows.shape[1:])


def _factor(view: View, contracted: Sequence[int], batch: Sequence[int]) -> _Factor | None:
    """The factor that a view is if these axes of it number its rows; else None."""
    order, inner = tuple(range(len(view.shape))), view
    if isinstance(view, Transposed):
        order, inner = view.order, view.inner
    axes, first = [order[axis] for axis in contracted], tuple(order[x] for x in batch)
    if len(axes) != 1 or max(*axes, *first, 0) >= inner.lead:
        return None
    columns = tuple(axis - inner.lead for axis in order if axis >= inner.lead)
    return _Factor(inner, axes[0], first, columns)


@form_for("dot_general")
def _one_hot_product(eqn: Equation, operands: Values, origins: Origins) -> RowRead | None:
    contracted, batch = eqn.params["dimension_numbers"]
    side = 0 if isinstance(operands[0], View) else 1
    view, one_hot = operands[side], eqn.invars[1 - side]
    if isinstance(operands[1 - side], View):
        return None
    factor = _factor(view, contracted[side], batch[side])
    made = None if factor is None else origins.one_hot(one_hot)
    if factor is None or made is None or made.numbers is None:
        return None
    if tuple(contracted[1 - side]) != (made.axis,):
        return None
    shape, first, reshape = _jax.shape_of(one_hot), tuple(batch[1 - side]), made.reshape
    rest = tuple(d for d in range(len(shape)) if d != made.axis and d not in first)
    outer = tuple(shape[d] for d in (*first, *rest))

    def ids(values: Values) -> jax.Array:
        once = tuple(1 if d == made.axis else n for d, n in enumerate(shape))
        numbers = jnp.broadcast_to(reshape(values[-1]), once)
        numbers = numbers.transpose(*first, *rest, made.axis).reshape(outer)
        every = range(len(first))
        examples = [lax.broadcasted_iota(jnp.int32, outer, d) for d in every]
        return factor.numbers(examples, numbers)

    def arrange(rows: jax.Array, values: Values) -> jax.Array:
        rows = factor.arranged(rows).astype(eqn.outvars[0].aval.dtype)
        rows = rows.reshape(*outer, *rows.shape[1:])
        if side == 1:
            return rows
        return jnp.moveaxis(rows, range(len(first), len(outer)), range(-len(rest), 0))

    numbers, count = made.numbers, math.prod((*outer, *factor.alike))
    how = Mode.FILL_OR_DROP, 0, numbers.aval, ids, arrange
    return RowRead(flat(factor.view), count, *how, operand=side, beside=numbers)


@form_for("bcoo_dot_general", "bcsr_dot_general")
def _sparse_product(eqn: Equation, operands: Values, origins: Origins) -> RowRead | None:
    (contracted, along), (batch, along_batch) = eqn.params["dimension_numbers"]
    view, shape = operands[-1], tuple(eqn.params["lhs_spinfo"].shape)
    is_bcoo = eqn.primitive.name == "bcoo_dot_general"
    # [*B, n, axes] in a BCOO matrix; [*B, n], the columns, in a BCSR matrix.
    indices, data = map(_jax.shape_of, (eqn.invars[1], eqn.invars[0]))
    first = len(indices) - (2 if is_bcoo else 1)
    factor = _factor(view, along, along_batch) if isinstance(view, View) else None
    if factor is None or len(data) > first + 1 or min(contracted) < first:
        return None
    (axis,) = contracted
    every = (*shape[:first], data[-1])
    kept = [*batch, *(d for d in range(len(shape)) if d != axis and d not in batch)]
    outer = tuple(shape[d] for d in kept)

    def places(values: Values) -> tuple[dict[int, jax.Array], jax.Array]:
        """Where the elements are along each axis, and which are not padding."""
        coordinates = _coordinates(values[1:-1], shape[first:])
        good = jnp.ones((), bool)
        along = {d: lax.broadcasted_iota(jnp.int32, every, d) for d in range(first)}
        for d, at in enumerate(coordinates, first):
            along[d] = jnp.broadcast_to(at, every)
            good &= (along[d] >= 0) & (along[d] < shape[d])
        return along, good

    def ids(values: Values) -> jax.Array:
        along, good = places(values)
        columns = jnp.where(good, along[axis], shape[axis])
        return factor.numbers([along[d] for d in batch], columns)

    def arrange(rows: jax.Array, values: Values) -> jax.Array:
        along, good = places(values)
        number = jnp.zeros((), jnp.int32)
        for d in kept:
            number = number * shape[d] + along[d]
        number = jnp.where(good, number, math.prod(outer)).reshape(-1)
        rows, out = factor.arranged(rows), eqn.outvars[0].aval
        data = jnp.broadcast_to(values[0], every).reshape(-1, *(1,) * (rows.ndim - 1))
        dtype = jnp.promote_types(jnp.promote_types(data.dtype, rows.dtype), out.dtype)
        scaled = (data.astype(dtype) * rows.astype(dtype)).astype(out.dtype)
        zeros = jnp.zeros((math.prod(outer), *rows.shape[1:]), out.dtype)
        return add_rows(zeros, number, scaled).reshape(out.shape)

    numbers, count = eqn.invars[1].aval, math.prod((*every, *factor.alike))
    last = len(operands) - 1
    how = Mode.FILL_OR_DROP, 0, numbers, ids, arrange
    return RowRead(flat(factor.view), count, *how, operand=last)


def _coordinates(indices: Values, shape: Sequence[int]) -> list[jax.Array]:
    """Along each of these axes the places ``[*B, n]`` of the elements of a sparse matrix.

    Negative ones of BCOO count from the end, as JAX has it.
    """
    if len(indices) == 1:
        at = indices[0]
        every = (at[..., axis] for axis in range(len(shape)))
        return [jnp.where(x < 0, x + n, x) for x, n in zip(every, shape, strict=True)]
    columns, splits = indices
    places = jnp.arange(columns.shape[-1], dtype=splits.dtype)
    row_of = lambda ends: jnp.searchsorted(ends, places, side="right") - 1  # noqa: E731
    return [jnp.vectorize(row_of, signature="(m)->(n)")(splits), columns]


def picks_rows(eqn: Equation, held: Sequence[bool], origins: Origins) -> bool:
    """True for a product with a one-hot array, weighted or not, along its one-hot axis.

    ``held`` says which operands of this ``dot_general`` hold a table.
    """
    contracted, _ = eqn.params["dimension_numbers"]
    for side in (0, 1):
        made = origins.one_hot(eqn.invars[1 - side]) if held[side] else None
        if made is not None and made.axis in contracted[1 - side]:
            return True
    return False
