"""What a handle does with row numbers and coordinates, given as arrays."""

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from jslices._lookup import embedding_lookup
from jslices._scatter import (
    batch_scatter_update,
    scatter_nd_add,
    scatter_nd_sub,
    scatter_nd_update,
)
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices.tf1._cells import CopyCell, LiveCell
from jslices.tf1._operators import ArrayOperators, plain


class ElementMethods(ArrayOperators):
    """The part of :class:`jslices.Variable` that has no need of IndexedSlices."""

    _cell: LiveCell | CopyCell

    @property
    def name(self) -> str:
        """The whole name with ``:0``, as in TensorFlow: ``"foo/bar/v:0"``."""
        return f"{self._cell.name}:0"

    def read_value(self) -> Any:
        """The same as :meth:`value`, by TensorFlow's name for resource variables."""
        return self.value()

    def sparse_read(self, indices: ArrayLike, name: str | None = None) -> jax.Array:
        """The rows ``v[indices]``, by :func:`jslices.embedding_lookup`.

        ``indices``: integers ``[*B]``; out of range they read NaN (TensorFlow raises). The
        gradient of the variable is then IndexedSlices.

        Raises:
          TypeError: if ``indices`` are not integers.
        """
        with jax.named_scope(name or "sparse_read"):
            return embedding_lookup(self.value(), plain(indices))

    def scatter_nd_add(
        self, indices: ArrayLike, updates: ArrayLike, use_locking: bool = False
    ) -> Any:
        """Adds to elements or slices: ``v[tuple(indices[k])] += updates[k]``.

        As in the other ``scatter_nd`` methods: ``indices`` are integers ``[*B, d]``,
        ``updates`` is ``[*B, *v.shape[d:]]`` of the variable's dtype or one number. It is
        :func:`jslices.scatter_nd_add`: duplicates accumulate, coordinates out of range
        are dropped (TensorFlow raises), and the new value is returned.

        Raises:
          TypeError, ValueError: for shapes or dtypes that do not fit, naming the variable.
        """
        del use_locking
        return self._elements("scatter_nd_add", scatter_nd_add, indices, updates)

    def scatter_nd_sub(
        self, indices: ArrayLike, updates: ArrayLike, use_locking: bool = False
    ) -> Any:
        """Subtracts from elements or slices; see :meth:`scatter_nd_add`."""
        del use_locking
        return self._elements("scatter_nd_sub", scatter_nd_sub, indices, updates)

    def scatter_nd_update(
        self, indices: ArrayLike, updates: ArrayLike, use_locking: bool = True
    ) -> Any:
        """Replaces elements or slices; of duplicates the last wins.

        See :meth:`scatter_nd_add`.
        """
        del use_locking
        return self._elements("scatter_nd_update", scatter_nd_update, indices, updates)

    def batch_scatter_update(
        self,
        sparse_delta: IndexedSlices | tuple[ArrayLike, ArrayLike],
        use_locking: bool = True,
    ) -> Any:
        """Replaces rows in every example: ``v[b, indices[b, k]] = updates[b, k]``.

        ``sparse_delta``: IndexedSlices, for which this is ``scatter_update``; or, since
        they have one axis of indices here, a pair ``(indices, updates)`` of ``[*B, K]``
        and ``[*B, K, *D]`` for a variable ``[*B, V, *D]``, as
        :func:`jslices.batch_scatter_update` takes.

        Raises:
          ValueError: for something else, or shapes that do not fit.
          TypeError: for another dtype.
        """
        del use_locking
        what = "batch_scatter_update"
        if isinstance(sparse_delta, tuple) and len(sparse_delta) == 2:
            indices, updates = sparse_delta
        else:
            advice = ", or as a pair (indices, updates) for a batch"
            check_is_slices(sparse_delta, f"{what} to {self.name}", advice)
            check_slices(sparse_delta)
            indices, updates = sparse_delta.indices, sparse_delta.values
        return self._elements(what, batch_scatter_update, indices, updates)

    def _elements(
        self, verb: str, function: Callable[..., jax.Array], indices: Any, updates: Any
    ) -> Any:
        what, old = f"{verb} to {self.name}", self.value()
        try:
            new = function(old, plain(indices), plain(updates))
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{what}: {error}") from None
        self._cell.write(new, what)
        return self.value()


def check_is_slices(delta: Any, what: str, advice: str = "") -> None:
    """Refuses anything but IndexedSlices, as TensorFlow's first releases do."""
    if not is_slices(delta):
        raise ValueError(
            f"{what} wants IndexedSlices, got {type(delta).__name__}; make them with "
            f"jslices.IndexedSlices(values, indices){advice}"
        )
