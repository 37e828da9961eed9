"""Values and row numbers of an array, and facts about them that are known while tracing."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jslices._densify import human_bytes
from jslices._jax import refuse_other_tree, trace_state
from jslices._place.boundary import mesh_of
from jslices._place.placement import Placement
from jslices._rows.access import rows_numbered
from jslices._slices.opaque import from_bits, is_sealed, of_shape, opened, sealed
from jslices._typing import Aval


class Facts(NamedTuple):
    """Facts about slices that are known while tracing, besides shapes and dtypes.

    Attributes:
      distinct: whether no row is held twice, so that adding the rows takes no sort, and
        the first V entries hold all rows.
      named: how many entries would suffice, if that is known.
      placement: which devices of a mesh hold the rows of the array; each of them holds the
        entries of its own rows. ``indices`` are still row numbers of the whole array.
        Reading or writing rows of the array then needs nothing from other devices.
      packed: how many of the rows that were looked up a row of the array holds.
      at_now: whether they are a gradient by rows as ``tx.now`` gives them, and not by those
        of the array itself.
      unconjugated: whether they are JAX's gradient of a real number by complex rows, whose
        conjugate a step follows.
      as_taken: whether they are a gradient, of all examples together, whose values nothing
        has changed since.

    Slices keep placement, packing and ``at_now`` wherever JAX takes them apart and puts
    them together. They forget the rest: a ``tree.map`` over ``values`` and ``indices`` may
    give other rows, and a ``lax.cond`` needs the same type for an update and for zeros.
    """

    distinct: bool = False
    placement: Placement | None = None
    packed: int = 1
    at_now: bool = False
    unconjugated: bool = False
    as_taken: bool = False
    named: int | None = None

    @property
    def lasting(self) -> "Facts":
        return Facts(placement=self.placement, packed=self.packed, at_now=self.at_now)


NO_FACTS = Facts()


class _Static(NamedTuple):
    """The static part of slices as a pytree."""

    dense_shape: tuple[int, ...] | None
    facts: Facts = NO_FACTS


class Entries:
    """Slices without arithmetic: rows ``values``, their numbers, and facts about them.

    Code that compiles or places slices needs only these. Row numbers are integers, but
    sealed as leaves of a pytree; each form is made from the other on demand.
    """

    values: jax.Array
    dense_shape: tuple[int, ...] | None
    facts: Facts
    _indices: Any  # None until somebody asks for them
    _leaf: Any  # None until the slices are taken apart
    _trace: object  # in which these slices were made

    @classmethod
    def of(
        cls,
        values: jax.Array,
        indices: jax.Array,
        shape: tuple[int, ...] | None,
        facts: Facts = NO_FACTS,
        leaf: Any = None,
    ) -> Self:
        """Slices of parts that fit together, and facts about them."""
        new = object.__new__(cls)
        vars(new).update(values=values, dense_shape=shape, facts=facts)
        vars(new).update(_indices=indices, _leaf=leaf, _trace=trace_state())
        return new

    def __setattr__(self, name: str, value: object = None) -> None:
        raise dataclasses.FrozenInstanceError(
            f"cannot assign to {name!r}: IndexedSlices do not change; type "
            "slices.with_values(values) or IndexedSlices(values, indices, dense_shape)"
        )

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name)

    def __reduce__(self) -> Any:
        return type(self).of, (self.values, self.indices, self.dense_shape, self.facts)

    @property
    def indices(self) -> jax.Array:
        """``[K]``, the row numbers."""
        if self._indices is not None:
            return self._indices  # type: ignore[no-any-return]
        return self._remember(_indices=opened(self._leaf))  # type: ignore[no-any-return]

    def _remember(self, **form: Any) -> Any:
        """Keeps a form of the row numbers, unless it belongs to a trace within."""
        if self._trace == trace_state():
            vars(self).update(form)
        (numbers,) = form.values()
        return numbers

    # --- pytree -------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, _Static]:
        (values, leaf), static = self._children()
        key = jax.tree_util.GetAttrKey
        return ((key("values"), values), (key("indices"), leaf)), static

    def tree_flatten(self) -> tuple[Any, _Static]:
        refuse_other_tree(self)
        return self._children()

    def _children(self) -> tuple[tuple[Any, Any], _Static]:
        static = _Static(self.dense_shape, self.facts.lasting)
        numbers = self._indices if self._leaf is None else self._leaf
        return (self.values, self._remember(_leaf=sealed(numbers))), static

    @classmethod
    def tree_unflatten(
        cls, static: _Static | tuple[int, ...] | None, children: Sequence[Any]
    ) -> Self:
        # JAX unflattens with placeholders, too, so nothing is checked here. A shape alone
        # is enough: slices with the axes of a batch are made like that.
        shape, facts = static if isinstance(static, _Static) else _Static(static)
        values, leaf = children
        if shape and getattr(leaf, "dtype", None) == np.uint32 and leaf.ndim > 1:
            row = np.shape(values)[leaf.ndim - 1 :]
            within = shape[len(shape) - len(row) :]
            if leaf.shape[-1] <= 2 and len(row) < len(shape) and row == within:
                # What JAX gives to a callback, and Orbax for a shape.
                is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
                leaf = of_shape(leaf) if is_shape else from_bits(np.asarray(leaf))
        indices: Any = None if is_sealed(leaf) else leaf
        sizes = (getattr(x, "shape", None) for x in (values, leaf))
        # Placeholders have none; Orbax' have None for it.
        if shape and indices is None and all(isinstance(x, tuple) for x in sizes):
            axes = len(leaf.shape)
            held, row = values.shape[:axes], values.shape[axes:]
            rows = [shape[i:] for i in range(1, 1 + len(shape))]
            if held != leaf.shape or row not in rows:
                raise TypeError(
                    "a function that was mapped over the parts of IndexedSlices of "
                    f"{shape} gave values {values.shape} and row numbers {leaf.shape}, "
                    "which do not belong together; map it over whole slices, by "
                    "jslices.tree.map, or change slices.values"
                )
        return cls.of(values, indices, shape, facts, leaf)

    def with_values(self, values: jax.Array) -> Self:
        """The same indices with other ``values`` ``[K, *D]``, and facts about them."""
        facts = self.facts._replace(unconjugated=False, as_taken=False)
        return self._changed(values=values, facts=facts)

    def later(self, values: jax.Array, indices: jax.Array) -> Self:
        """The same entries, computed later."""
        return self._changed(values=values, _indices=indices, _leaf=None)

    def _changed(self, **parts: Any) -> Self:
        new = object.__new__(type(self))
        vars(new).update(vars(self), **parts)
        return new

    # --- what it is ---------------------------------------------------------------

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of :meth:`to_dense`; None for lengths that are unknown."""
        batch = tuple(self.indices.shape[:-1])
        if self.dense_shape is not None:
            return batch + self.dense_shape
        return (*batch, None, *self.values.shape[self.indices.ndim :])

    @property
    def row_axes(self) -> int:
        """How many leading axes of ``dense_shape`` number the rows; 1 if it is unknown."""
        if self.dense_shape is None:
            return 1
        numbers = self._leaf if self._indices is None else self._indices
        return len(self.dense_shape) - self.values.ndim + numbers.ndim

    @property
    def ndim(self) -> int:
        """The number of axes of :meth:`to_dense`."""
        return self.values.ndim + self.row_axes - 1

    @property
    def dtype(self) -> np.dtype:
        """The dtype of ``values``."""
        return np.dtype(self.values.dtype)

    name = op = None  #: TensorFlow's; there is no graph with names

    @property
    def device(self) -> Any:
        """The device of ``values``; None where they are traced."""
        return None if isinstance(self.values, jax.core.Tracer) else self.values.device

    @property
    def sharding(self) -> Any:
        """The sharding of ``values``."""
        return self.values.sharding

    @property
    def is_placed(self) -> bool:
        """Whether the devices of a mesh hold the entries of their own rows.

        Not on the host, nor inside a ``shard_map``.
        """
        placement = self.facts.placement
        return placement is not None and mesh_of(jax.typeof(self.values)) is not None

    @property
    def _type(self) -> str:
        """The type of the whole array, as ``float32[5, 2]``."""
        sizes = ("?" if n is None else str(n) for n in self.shape)
        return f"{self.dtype}[{', '.join(sizes)}]"

    def _first_rows(self) -> str:
        """The first row numbers in words, if they are available."""
        x = self.indices
        at_hand = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        if not at_hand or x.is_deleted() or not x.is_fully_addressable or not x.size:
            return ""
        first = np.asarray(x).reshape(-1)[:4]
        return f" ({', '.join(map(str, first))}{', ...' if x.size > len(first) else ''})"

    @property
    def num_rows(self) -> int | None:
        """``V``, or ``L * V`` where two axes number the rows; None without dense_shape."""
        shape = self.dense_shape
        return None if shape is None else rows_numbered(shape, self.row_axes)

    def with_facts(self, facts: Facts) -> Self:
        """The same entries, with these facts."""
        return self._changed(facts=facts)

    def numbered_as(self, shape: tuple[int, ...] | None) -> Self:
        """The same entries as rows of an array of as many rows in another shape, unchecked.

        Of ``[L * V, *D]``: ``(L, V, *D)``. No cost.
        """
        return self._changed(dense_shape=shape)

    @property
    def flat(self) -> Self:
        """The same entries as rows of ``[L * V, *D]``, numbered by one axis. No cost.

        ``values`` ``[K, *D]`` and ``indices`` ``[K]`` stay, with duplicates and empty
        entries; for code that takes one axis of rows, such as accumulators.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> s = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([7]), (2, 5, 2), row_axes=2)
          >>> s.flat.shape, s.to_dense()[1, 2]
          ((10, 2), Array([1., 1.], dtype=float32))
        """
        shape, axes = self.dense_shape, self.row_axes
        if shape is None or axes == 1:
            return self
        return self.numbered_as((rows_numbered(shape, axes), *shape[axes:]))

    def __repr__(self) -> str:
        try:
            rows = "x".join(map(str, self.indices.shape))
            held_bytes = _num_bytes(self.values) + _num_bytes(self.indices)
            size = human_bytes(held_bytes)
            if self.dense_shape is not None:
                dense = math.prod(self.indices.shape[:-1]) * math.prod(self.dense_shape)
                dense *= self.dtype.itemsize
                size += f", dense {human_bytes(dense)}"
                if dense > held_bytes:
                    size += f", saves {human_bytes(dense - held_bytes)}"
            return (
                f"IndexedSlices({rows} rows of {self._type}, indices "
                f"{self.indices.dtype}{list(self.indices.shape)}{self._first_rows()}: "
                f"{size})"
            )
        except (AttributeError, TypeError):  # placeholders that JAX unflattened
            return (
                f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
                f"dense_shape={self.dense_shape})"
            )


def check_slices(slices: Entries) -> None:
    """Refuses slices whose indices a ``tree.map`` over their children has changed."""
    if slices.indices.dtype == jax.dtypes.float0:
        raise TypeError(
            "these IndexedSlices are a derivative that JAX took of slices, whose row "
            "numbers have none: type jslices.IndexedSlices(derivative.values, "
            "slices.indices, slices.dense_shape), or differentiate slices.to_dense()"
        )
    if not jnp.issubdtype(slices.indices.dtype, jnp.integer):
        raise TypeError(
            f"these IndexedSlices have indices of dtype {slices.indices.dtype}, which "
            "are not row numbers any more. A tree.map (of an Optax transformation, for "
            "example) was mapped over the slices and changed them. Wrap that "
            "transformation with jslices.from_optax(...), or map over whole slices: "
            "jax.tree.map(f, grads, is_leaf=jslices.is_slices)"
        )


def _num_bytes(x: Aval) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize
