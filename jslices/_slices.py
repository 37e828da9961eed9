"""IndexedSlices: a few rows of a big array, and what arithmetic on them means."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices._bounds import add_rows, canonical_indices, index_dtype
from jslices._check import as_array, check_parts, static_shape
from jslices._coalesce import check_combine, sum_duplicates
from jslices._densify import human_bytes, warn_dense
from jslices._jax_operators import called_by_jax_operator


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class IndexedSlices:
    """Some rows of an array of shape ``dense_shape``; all others are zero.

    It stands for ``zeros(dense_shape).at[indices].add(values)``: **duplicates add**. An
    index outside ``[0, V)``, a negative one included, is an *empty slot* that every
    operation drops.

    It is a pytree: ``values`` and ``indices`` are its children, ``dense_shape`` is
    static. Under ``vmap`` the children gain leading axes; ``dense_shape`` stays that of
    one example.

    Args:
      values: ``[K, *D]``, the rows, of any dtype.
      indices: ``[K]`` of any integer dtype, the row number of each.
      dense_shape: ``(V, *D)``, static; None when unknown.

    Raises:
      TypeError: if ``indices`` are not integers or ``dense_shape`` is not static.
      ValueError: if the shapes do not fit together.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> s = js.IndexedSlices(jnp.ones((3, 2)), jnp.array([1, 1, 4]), (5, 2))
      >>> s
      IndexedSlices(3 rows of float32[5, 2], indices int32[3]: 36 B, dense 40 B, saves 4 B)
      >>> s.to_dense()[1]
      Array([2., 2.], dtype=float32)

    Source: ``tf.IndexedSlices``, which checks nothing when constructed, drops negative
    indices but refuses those beyond ``V``, and knows no arithmetic but ``-s``.
    """

    values: jax.Array
    indices: jax.Array
    dense_shape: tuple[int, ...] | None

    # NumPy arrays then leave `array + slices` to `__radd__`.
    __array_ufunc__ = None

    def __init__(
        self,
        values: ArrayLike,
        indices: ArrayLike,
        dense_shape: Sequence[int] | None = None,
    ) -> None:
        values, indices = as_array(values), as_array(indices)
        shape = static_shape(dense_shape)
        check_parts(values, indices, shape)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        object.__setattr__(self, "dense_shape", shape)

    # --- pytree -------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[int, ...] | None]:
        key = jax.tree_util.GetAttrKey
        children = ((key("values"), self.values), (key("indices"), self.indices))
        return children, self.dense_shape

    def tree_flatten(self) -> tuple[Any, tuple[int, ...] | None]:
        return (self.values, self.indices), self.dense_shape

    @classmethod
    def tree_unflatten(
        cls, dense_shape: tuple[int, ...] | None, children: Sequence[Any]
    ) -> "IndexedSlices":
        # JAX also unflattens with placeholders, so nothing is checked here.
        new = object.__new__(cls)
        for name, child in zip(("values", "indices"), children, strict=True):
            object.__setattr__(new, name, child)
        object.__setattr__(new, "dense_shape", dense_shape)
        return new

    # --- what it is ---------------------------------------------------------------

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of :meth:`to_dense`; V is None where ``dense_shape`` is."""
        batch = tuple(self.indices.shape[:-1])
        if self.dense_shape is not None:
            return batch + self.dense_shape
        return (*batch, None, *self.values.shape[self.indices.ndim :])

    @property
    def ndim(self) -> int:
        """The number of axes of :meth:`to_dense`."""
        return self.values.ndim

    @property
    def dtype(self) -> np.dtype:
        """The dtype of ``values``."""
        return np.dtype(self.values.dtype)

    @property
    def device(self) -> Any:
        """The device of ``values``."""
        return self.values.device

    @property
    def sharding(self) -> Any:
        """The sharding of ``values``."""
        return self.values.sharding

    def __repr__(self) -> str:
        try:
            rows = "x".join(map(str, self.indices.shape))
            shape = ", ".join("?" if n is None else str(n) for n in self.shape)
            kept = _num_bytes(self.values) + _num_bytes(self.indices)
            size = human_bytes(kept)
            if self.dense_shape is not None:
                dense = math.prod(self.indices.shape[:-1]) * math.prod(self.dense_shape)
                dense *= self.dtype.itemsize
                size += f", dense {human_bytes(dense)}"
                if dense > kept:
                    size += f", saves {human_bytes(dense - kept)}"
            return (
                f"IndexedSlices({rows} rows of {self.dtype}[{shape}], indices "
                f"{self.indices.dtype}[{', '.join(map(str, self.indices.shape))}]: "
                f"{size})"
            )
        except (AttributeError, TypeError):  # placeholders that JAX unflattened
            return (
                f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
                f"dense_shape={self.dense_shape})"
            )

    # --- what one does with it ----------------------------------------------------

    def to_dense(self) -> jax.Array:
        """The whole array ``[V, *D]``, duplicates added, empty slots dropped.

        Explicit, hence silent. 16-bit floats are summed in float32 and rounded once.

        Raises:
          ValueError: if ``dense_shape`` is unknown.

        Cost: writes ``V * D`` elements.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> js.IndexedSlices(jnp.array([3., 4.]), jnp.array([0, 9]), (2,)).to_dense()
          Array([3., 0.], dtype=float32)
        """
        check_slices(self)
        if self.dense_shape is None:
            raise ValueError(
                "these IndexedSlices have dense_shape=None, so the number of rows is "
                "not known; give it: IndexedSlices(s.values, s.indices, (num_rows, "
                f"{', '.join(map(str, self.values.shape[self.indices.ndim :]))}))"
            )
        if self.indices.ndim > 1:
            return jax.vmap(IndexedSlices.to_dense)(self)
        slices = self.coalesce() if self.dtype.itemsize < 4 else self
        return add_rows(
            jnp.zeros(self.dense_shape, self.dtype),
            canonical_indices(slices.indices, self.dense_shape[0]),
            slices.values,
        )

    def coalesce(self, size: int | None = None, combine: str = "sum") -> "IndexedSlices":
        """The same array with every row at most once, in a static number of slots.

        Args:
          size: U, the number of slots; None means ``min(K, V)``, which always suffices.
          combine: ``"sum"``; or, to make a frequent row weigh less, ``"mean"`` (the sum
            divided by the number of its occurrences) or ``"sqrtn"`` (by the square root
            of it). 16-bit floats are combined in float32 and rounded once.

        Returns:
          ``values`` ``[U, *D]``, ``indices`` ``[U]`` (int32, or int64 where that came
          in): sorted, unique, the remaining slots empty (index ``V``, zero values).

        Raises:
          ValueError: if more than ``size`` distinct rows are present; under jit, where
            nothing can be raised, floating values become NaN instead. For an unknown
            ``combine``.
          TypeError: for a mean of integers.

        Cost: a sort of K integers, reads ``K * D`` and writes ``U * D`` elements.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> s = js.IndexedSlices(jnp.array([1., 2., 4.]), jnp.array([7, 2, 7]), (9,))
          >>> s.coalesce().indices, s.coalesce().values
          (Array([2, 7, 9], dtype=int32), Array([2., 5., 0.], dtype=float32))
          >>> s.coalesce(combine="mean").values
          Array([2. , 2.5, 0. ], dtype=float32)

        Source: ``torch.Tensor.coalesce``; TensorFlow's optimizers do it inside, in the
        order of first appearance. The words of ``combine`` are those of TensorFlow's
        ``embedding_lookup_sparse``; PyTorch has ``scale_grad_by_freq`` for the mean, of
        dense gradients only.
        """
        check_slices(self)
        check_combine(combine, self.values.dtype)
        if self.indices.ndim > 1:
            return jax.vmap(lambda s: s.coalesce(size, combine))(self)
        num_rows = None if self.dense_shape is None else self.dense_shape[0]
        values, indices = sum_duplicates(self.values, self.indices, num_rows, size, combine)
        return IndexedSlices(values, indices, self.dense_shape)

    def astype(self, dtype: DTypeLike) -> "IndexedSlices":
        """The same rows with ``values`` cast to ``dtype``; ``indices`` stay."""
        return self._with(self.values.astype(dtype))

    def _with(self, values: jax.Array) -> "IndexedSlices":
        return IndexedSlices.tree_unflatten(self.dense_shape, (values, self.indices))

    # --- arithmetic ---------------------------------------------------------------

    def __neg__(self) -> "IndexedSlices":
        return self._with(-self.values)

    def __mul__(self, other: ArrayLike) -> Any:
        if _is_scalar(other):
            return self._with(self.values * other)
        return self._densely("slices * array", "IndexedSlices * scalar") * other

    __rmul__ = __mul__

    def __truediv__(self, other: ArrayLike) -> Any:
        if _is_scalar(other):
            return self._with(self.values / other)
        return self._densely("slices / array", "IndexedSlices / scalar") / other

    def __add__(self, other: Any) -> Any:
        if isinstance(other, IndexedSlices):
            return concat_slices([self, other])
        if isinstance(other, int) and other == 0:  # the start of Python's sum()
            return self
        return self._densely("slices + array", "array + slices") + other

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, int) and other == 0:
            return self
        other = jnp.asarray(other)
        if self.indices.ndim > 1 or other.shape != self.dense_shape:
            if other.ndim and self.dense_shape is None:
                num_rows = other.shape[0]
                return other + IndexedSlices(
                    self.values, self.indices, (num_rows, *self.values.shape[1:])
                )
            return other + self._densely("array + slices", "equal shapes")
        check_slices(self)
        table = other.astype(jnp.result_type(other, self.values))
        indices = canonical_indices(self.indices, table.shape[0])
        return add_rows(table, indices, self.values.astype(table.dtype))

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return other + (-self)

    # --- implicit conversion ------------------------------------------------------

    def _densely(self, what: str, instead: str) -> jax.Array:
        if self.dense_shape is not None:
            count = math.prod(self.shape) * self.dtype.itemsize  # type: ignore[arg-type]
            warn_dense(
                f"{what} turned {self.indices.shape[-1]} rows into a dense array of "
                f"shape {self.shape} ({human_bytes(count)}). To stay sparse use "
                f"{instead}; to silence this convert on purpose with slices.to_dense()."
            )
        return self.to_dense()

    def __jax_array__(self) -> Any:
        if called_by_jax_operator():
            # `array + slices` asks for an array first. Handing back the slices makes
            # JAX return NotImplemented, so that Python calls `__radd__`.
            return self
        return self._densely("an implicit conversion", "`.values` and `.indices`")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        dense = self._densely("np.asarray(slices)", "`.values` and `.indices`")
        return np.asarray(dense, dtype=dtype)


def is_slices(x: Any) -> bool:
    """True for IndexedSlices: ``jax.tree.map(f, grads, is_leaf=js.is_slices)``.

    Example:
      >>> import jslices as js
      >>> js.is_slices(3)
      False
    """
    return isinstance(x, IndexedSlices)


def concat_slices(slices: Sequence[IndexedSlices]) -> IndexedSlices:
    """The sum of several slices of one array: their rows, one after the other.

    Args:
      slices: at least one; the row shapes must agree, and so must the ``dense_shape``
        of those that know it.

    Returns:
      ``values`` ``[K1 + K2 + ..., *D]`` of the common dtype and ``indices`` of the
      wider integer dtype. Nothing is merged; ``coalesce()`` does that.

    Raises:
      ValueError: if there are none, or the shapes differ.

    Cost: copies every row once.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> s = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([3]), (4, 2))
      >>> js.concat_slices([s, s]).indices
      Array([3, 3], dtype=int32)

    Source: TensorFlow's aggregation of gradients, where an unknown ``dense_shape`` of
    the first wins; here a known one does.
    """
    slices = list(slices)
    if not slices:
        raise ValueError("concat_slices got an empty sequence; it needs at least one")
    shapes = {s.dense_shape for s in slices if s.dense_shape is not None}
    rows = {s.values.shape[s.indices.ndim :] for s in slices}
    if len(shapes) > 1 or len(rows) > 1:
        given = ", ".join(str(s.shape) for s in slices)
        raise ValueError(f"cannot add slices of arrays of different shapes: {given}")
    shape = shapes.pop() if shapes else None
    num_rows = None if shape is None else shape[0]
    dtype = jnp.result_type(*(s.values for s in slices))
    wanted = [index_dtype(num_rows, np.dtype(s.indices.dtype)) for s in slices]
    widest = max(wanted, key=lambda d: d.itemsize)
    axis = slices[0].indices.ndim - 1
    # Narrow integers are settled before they widen: an int8 -1 is empty, not 255.
    indices = [
        s.indices.astype(widest)
        if s.indices.dtype in (jnp.int32, jnp.int64)
        else canonical_indices(s.indices, num_rows).astype(widest)
        for s in slices
    ]
    return IndexedSlices.tree_unflatten(
        shape,
        (
            jnp.concatenate([s.values.astype(dtype) for s in slices], axis),
            jnp.concatenate(indices, axis),
        ),
    )


def check_slices(slices: IndexedSlices) -> None:
    """Refuses slices whose indices a foreign ``tree.map`` has turned into numbers."""
    if not jnp.issubdtype(slices.indices.dtype, jnp.integer):
        raise TypeError(
            f"these IndexedSlices have indices of dtype {slices.indices.dtype}, which "
            "are not row numbers any more. A tree.map (of an Optax transformation, for "
            "example) was mapped over the slices and changed them. Wrap that "
            "transformation with jslices.from_optax(...), or map over whole slices: "
            "jax.tree.map(f, grads, is_leaf=jslices.is_slices)"
        )


def _is_scalar(x: Any) -> bool:
    return not isinstance(x, IndexedSlices) and np.ndim(x) == 0


def _num_bytes(x: Any) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize
