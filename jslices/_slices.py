"""IndexedSlices: a few rows of a big array, and what arithmetic on them means."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices._arithmetic import RowArithmetic
from jslices._arithmetic import concat_slices as concat_slices
from jslices._densify import human_bytes
from jslices._jax import called_by_jax_operator
from jslices._reductions import RowReductions
from jslices._rows.bounds import add_rows, canonical_indices
from jslices._rows.check import as_array, as_indices, check_parts, static_shape
from jslices._rows.check import check_slices as check_slices
from jslices._rows.pick import nonzero_rows
from jslices._rows.sums import check_combine, sum_duplicates


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class IndexedSlices(RowArithmetic, RowReductions):
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
        values, indices = as_array(values), as_indices(indices)
        shape = static_shape(dense_shape)
        check_parts(values, indices, shape)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        object.__setattr__(self, "dense_shape", shape)

    @classmethod
    def from_dense(cls, x: ArrayLike, size: int | None = None) -> "IndexedSlices":
        """The rows of ``x`` that are not zero; see :func:`jslices.from_dense`."""
        array = as_array(x)
        return cls(*nonzero_rows(array, size), array.shape)

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
        values, indices, _ = sum_duplicates(
            self.values, self.indices, num_rows, size, combine
        )
        return IndexedSlices(values, indices, self.dense_shape)

    def astype(self, dtype: DTypeLike) -> "IndexedSlices":
        """The same rows with ``values`` cast to ``dtype``; ``indices`` stay."""
        return self._with(self.values.astype(dtype))

    # --- implicit conversion ------------------------------------------------------

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


def _num_bytes(x: Any) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize
