"""The blocking accumulators: objects that threads share, which wait for gradients."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices import IndexedSlices, InvalidArgumentError
from jslices._place.hints import hint_once
from jslices._rows.access import empty_index
from jslices.accumulators import _gradients
from jslices.accumulators._state import ArraySum, RowSums, Turns, divided, merged

_shared: weakref.WeakValueDictionary[tuple[str, str], Turns] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()
#: Takes of so many sizes get a hint.
SEVERAL = 4


class ConditionalAccumulatorBase:
    """Steps, counts, closing and sharing by name: the same for rows and whole arrays.

    An abstract base class. ``name=`` of a method is ignored: there are no operations.
    """

    dtype: np.dtype  #: of the gradients
    shape: _gradients.PartialShape  #: as declared, None for unknown lengths
    name: str
    reduction_type: str  #: "MEAN" or "SUM"
    _store_type: type[RowSums] | type[ArraySum]
    _default_name: str

    def __init__(
        self,
        dtype: DTypeLike,
        shape: Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str | None = None,
        reduction_type: str = "MEAN",
    ) -> None:
        kind = type(self).__name__
        self.dtype = _gradients.float_dtype(kind, dtype)
        self.shape = _gradients.partial_shape(kind, shape)
        if self._store_type is RowSums:
            self.shape = self.shape or None  # there must be rows
        _gradients.REDUCTIONS.check(kind, "reduction_type", reduction_type)
        self.reduction_type = reduction_type
        self.name = self._default_name if name is None else name
        terms = (self.dtype, self.shape, reduction_type)
        self._turns = Turns(self._store_type, terms)
        if shared_name:  # which lives as long as an accumulator that uses it
            with _shared_lock:
                other = _shared.get((kind, shared_name))
                if other is not None and not other.closed:
                    self._turns = other
                _shared[kind, shared_name] = self._turns
            if self._turns.terms != terms:
                raise InvalidArgumentError(
                    f"{kind}(shared_name={shared_name!r}) exists with dtype, shape and "
                    f"reduction_type {self._turns.terms}, not {terms}"
                )

    @property
    def accumulator_ref(self) -> object:
        """The state: the same object for all accumulators of one ``shared_name``."""
        return self._turns

    def num_accumulated(self, name: str | None = None) -> int:
        """How many gradients have been accepted since the last take."""
        return self._turns.count

    def num_stale(self) -> int:
        """How many gradients have been dropped as stale, in all."""
        return self._turns.stale

    def num_waiting(self) -> int:
        """How many takers are waiting."""
        return len(self._turns.waiting)

    def global_step(self) -> int:
        """The step below which a gradient's ``local_step`` is stale."""
        return self._turns.step

    def set_global_step(self, new_global_step: ArrayLike, name: str | None = None) -> None:
        """Sets the step; accumulated gradients stay.

        A step lower than the current one is set too, with a warning in the log (logger
        ``jslices.accumulators``), as in TensorFlow.
        """
        self._turns.set_step(_gradients.whole_number("new_global_step", new_global_step))

    def close(self) -> None:
        """Ends it: every waiting take, and every later call, raises CancelledError.

        Accumulators that share the state are closed as well; the name becomes free.
        """
        self._turns.close()

    def __repr__(self) -> str:
        shape = None if self.shape is None else list(self.shape)
        return (
            f"{type(self).__name__}({self.dtype}, shape={shape}, {self.reduction_type}, "
            f"{self.num_accumulated()} accumulated, step {self.global_step()})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} lives in one process and cannot be pickled or "
            "copied; give it to others with jslices.accumulators.serve({'name': it})"
        )


# --- rows -----------------------------------------------------------------------------


class SparseAccumulatorTakeGradient(NamedTuple):
    """The result of :meth:`SparseConditionalAccumulator.take_grad`."""

    indices: np.ndarray
    values: np.ndarray
    shape: np.ndarray


class RowMethods:
    """Applying and taking rows, in whichever process the accumulator is."""

    apply_grad: Callable[..., None]
    _take_within: Callable[..., SparseAccumulatorTakeGradient]

    def apply_indexed_slices_grad(
        self, grad: IndexedSlices, local_step: int = 0, name: str | None = None
    ) -> None:
        """Like :meth:`apply_grad`, for slices ``values`` ``[K, *D]``, ``indices`` ``[K]``.

        Entries that are empty on purpose (negative indices, and the canonical index V
        with which ``coalesce`` fills up) are left out. An index beyond V is a wrong id and
        is refused, as in TensorFlow. ``dense_shape`` counts as ``grad_shape``.
        """
        call = "apply_indexed_slices_grad"
        _gradients.check_is_slices(call, grad, "ConditionalAccumulator")
        parts = grad.values, grad.indices
        values, indices = (_gradients.on_host("grad", x) for x in parts)
        shape = grad.dense_shape
        if indices.ndim == 1 and np.issubdtype(indices.dtype, np.integer):
            empty = np.iinfo(indices.dtype).max if shape is None else shape[0]
            is_entry = (indices >= 0) & (indices != empty)
            if not is_entry.all():
                values, indices = values[is_entry], indices[is_entry]
        self.apply_grad(indices, values, shape, local_step)

    def take_grad(
        self, num_required: int, name: str | None = None, *, timeout: float | None = None
    ) -> SparseAccumulatorTakeGradient:
        """Waits for ``num_required`` gradients and takes the mean (or sum) of all.

        Takers are served in the order in which they came, even if a later one needs fewer.

        Args:
          num_required: at least 1.
          timeout: seconds to wait; None waits for ever.

        Returns:
          NumPy arrays ``(indices, values, shape)``: ``[U]`` int64, ascending; ``[U, *D]``
          of the accumulator's dtype; and int64, ``(V, *D)``, where V is -1 if unknown.

        Raises:
          InvalidArgumentError: for ``num_required < 1``, at once.
          DeadlineExceededError: (a ``TimeoutError``) after ``timeout``; nothing is taken.
          CancelledError: when it is closed, also by another thread meanwhile.
        """
        return self._take_within(num_required, timeout)

    def take_indexed_slices_grad(
        self,
        num_required: int,
        name: str | None = None,
        *,
        timeout: float | None = None,
        size: int | None = None,
    ) -> IndexedSlices:
        """Like :meth:`take_grad`, as IndexedSlices on JAX's default device.

        Args:
          size: U, the number of entries; those that are left over are empty. None means
            as many as there are rows, as in TensorFlow. A jitted function of the slices is
            then compiled for each number of rows; a ``PerformanceHint`` says so from the
            fourth number on.

        Returns:
          ``values`` ``[U, *D]`` and ``indices`` ``[U]`` ascending, in the widest dtypes
          that JAX has enabled: without ``jax_enable_x64`` float32 and int32.
          ``dense_shape`` is None when V is not known.

        Raises:
          InvalidArgumentError: (nothing is taken) for more than ``size`` rows, or a row
            number that needs ``jax_enable_x64``; and as in :meth:`take_grad`.
        """
        has_64_bits = jax.config.read("jax_enable_x64")
        index_type: np.dtype = np.dtype(np.int64 if has_64_bits else np.int32)
        largest = int(np.iinfo(index_type).max)
        taken = self._take_within(num_required, timeout, max_rows=size, max_index=largest)
        shape = None if taken.shape[0] < 0 else tuple(int(n) for n in taken.shape)
        values, indices = taken.values, taken.indices.astype(index_type)
        if size is None:
            self._hint_sizes(indices.size)
        elif missing := size - indices.size:
            empty = empty_index(shape[0] if shape else None, index_type)
            if empty > largest:
                empty = -1  # V itself does not fit, but any negative index is empty
            indices = np.append(indices, np.full(missing, empty, index_type))
            room = np.zeros((missing, *values.shape[1:]), values.dtype)
            values = np.concatenate([values, room])
        return IndexedSlices(jnp.asarray(values), jnp.asarray(indices), shape)

    def _hint_sizes(self, size: int) -> None:
        """Hints at what a step costs that is compiled for each number of rows."""
        sizes: set[int] = vars(self).setdefault("_sizes", set())
        sizes.add(size)
        if len(sizes) == SEVERAL:
            hint_once(
                ("sizes of takes", id(self)),
                f"slices of {SEVERAL} numbers of rows were taken, {sorted(sizes)}, and JAX "
                "compiles a step of them for each. Give them all the same room, most of it "
                "used: take_indexed_slices_grad(num_required, "
                f"size={1 << max(sizes).bit_length()})",
            )


class SparseConditionalAccumulator(RowMethods, ConditionalAccumulatorBase):
    """Collects row gradients from many threads until there are enough to take their mean.

    It holds the sum of every row, a count, and a step. :meth:`apply_grad` adds a gradient
    unless its ``local_step`` is below the step (a *stale* one: dropped, silently and
    unchecked). :meth:`take_grad` waits for ``num_required`` gradients, reduces **all** that
    have arrived, empties the accumulator and adds one to the step.

    "MEAN" divides each row by the number of gradients that held **that row**, not by the
    number of gradients: ``{0: 1, 2: 2}`` and ``{2: 10, 3: 30}`` give
    ``{0: 1, 2: 6, 3: 30}``. Rows that no gradient held are not in the result.

    All methods may be called from any thread. It computes on the host with NumPy and
    never inside ``jit``; there use :func:`sparse_accumulator`. For other
    processes see :func:`jslices.accumulators.serve`.

    Args:
      dtype: floating dtype of the gradients. Gradients of one row are added in it, in the
        order they come, as TensorFlow does (duplicates within a gradient are summed in
        float32 and rounded once).
      shape: ``(V, *D)``; None for an unknown length, and None or ``()`` when all are.
        Known lengths are checked; a gradient's rows may have further axes.
      shared_name: accumulators of this process with the same one share their state for as
        long as one of them lives.
      name: for your own use.
      reduction_type: "MEAN" or "SUM".

    Raises:
      InvalidArgumentError: for other arguments, or a ``shared_name`` that is taken by an
        accumulator of another dtype, shape or reduction.

    Example:
      >>> import numpy as np, jslices as js
      >>> mean = js.accumulators.SparseConditionalAccumulator("float32", shape=(5, 1))
      >>> mean.apply_grad([0, 2], [[1.0], [2.0]])
      >>> mean.apply_grad([2, 3], [[10.0], [30.0]], local_step=0)
      >>> mean.take_grad(2).indices
      array([0, 2, 3])
      >>> mean.apply_grad([0], [[1.0]], local_step=0)  # stale: the step is 1 now
      >>> mean.num_accumulated(), mean.global_step()
      (0, 1)

    Source: ``tf.compat.v1.SparseConditionalAccumulator``. Differences: indices need not be
    sorted or unique (TensorFlow returns duplicate rows then, each divided by a count of
    its own), and the result is always ascending; any floating dtype, bfloat16 included;
    wrong dtypes and indices that are not integers are errors, where TensorFlow aborts or
    truncates; two uses of one ``shared_name`` must agree; ``timeout``, ``close``,
    ``global_step``, ``num_stale`` and ``num_waiting`` are new.
    """

    _store_type = RowSums
    _default_name = "sparse_conditional_accumulator"

    def apply_grad(
        self,
        grad_indices: ArrayLike,
        grad_values: ArrayLike,
        grad_shape: Sequence[int] | None = None,
        local_step: int = 0,
        name: str | None = None,
    ) -> None:
        """Adds a gradient, or drops it when ``local_step`` is below the step.

        Args:
          grad_indices: ``[K]`` integers, in any order; duplicates add, and count as one
            holding of the row. A negative one is an empty entry: it stays as it is and
            every operation on the taken slices drops it.
          grad_values: ``[K, *D]`` of the accumulator's dtype (a list takes it on).
          grad_shape: ``(V, *D)`` if known, to be compared with the accumulator's.
          local_step: the step on whose parameters the gradient was computed.

        Raises:
          InvalidArgumentError: for shapes, dtypes or indices that do not fit, V and
            beyond included. The accumulator is unchanged.
          CancelledError: after :meth:`close`.

        Cost: a sort of K integers unless they ascend, a search of K in U, and K rows.
        """

        def prepare() -> tuple[np.ndarray, np.ndarray]:
            indices = _gradients.host_indices(grad_indices)
            values = _gradients.host_array("grad_values", grad_values, self.dtype)
            shape = _gradients.partial_shape("apply_grad", grad_shape, "grad_shape")
            _gradients.check_sparse(indices, values, shape, self.shape, self.dtype)
            _gradients.check_rows(indices, self.shape)
            return merged(indices, values)

        self._turns.apply(local_step, prepare)

    def _take_within(
        self,
        num_required: int,
        timeout: float | None,
        max_rows: int | None = None,
        max_index: int | None = None,
        max_bytes: int = -1,
    ) -> SparseAccumulatorTakeGradient:
        """Take, but nothing that is more than the taker can hold."""

        def check(store: RowSums) -> None:
            rows = store.rows
            if max_index is not None and rows.size and rows[-1] > max_index:
                raise InvalidArgumentError(
                    f"row {rows[-1]} needs 64-bit indices; switch them on with "
                    "jax.config.update('jax_enable_x64', True), or use take_grad"
                )
            if max_rows is not None and rows.size > max_rows:
                raise InvalidArgumentError(
                    f"take_indexed_slices_grad(size={max_rows}): {rows.size} rows have "
                    f"been accumulated; pass size={rows.size} or more, or leave size out"
                )
            row_bytes = 8 + store.sums.nbytes // max(1, store.counts.size)
            if 0 <= max_bytes < rows.size * row_bytes + 1000:
                raise InvalidArgumentError(
                    f"{rows.size} rows of {row_bytes} bytes are larger than a message may "
                    "be; take more often, or in the process that serves"
                )

        store, _ = self._turns.take(num_required, timeout, check)
        rows, values = store.reduced(mean=self.reduction_type == "MEAN")
        num_rows = None if self.shape is None else self.shape[0]
        shape = (-1 if num_rows is None else num_rows, *values.shape[1:])
        return SparseAccumulatorTakeGradient(rows, values, np.array(shape, np.int64))


# --- whole arrays ---------------------------------------------------------------------


class ConditionalAccumulator(ConditionalAccumulatorBase):
    """Collects dense gradients from many threads until there are enough to take the mean.

    All else is as in :class:`SparseConditionalAccumulator`, except that a gradient is one
    array and "MEAN" divides by the number of gradients.

    Args:
      dtype: floating dtype of the gradients, in which they are added as they come.
      shape: of the gradients; None for an unknown length, and None when not even the
        rank is known. ``()`` is a scalar.

    Example:
      >>> import numpy as np, jslices as js
      >>> mean = js.accumulators.ConditionalAccumulator("float32", shape=(2,))
      >>> mean.apply_grad([1.0, 5.0])
      >>> mean.apply_grad([3.0, 5.0])
      >>> mean.take_grad(2)
      array([2., 5.], dtype=float32)

    Source: ``tf.compat.v1.ConditionalAccumulator``.
    """

    _store_type = ArraySum
    _default_name = "conditional_accumulator"

    def apply_grad(
        self, grad: ArrayLike, local_step: int = 0, name: str | None = None
    ) -> None:
        """Adds ``grad``, of the accumulator's shape and dtype, unless it is stale.

        As :meth:`SparseConditionalAccumulator.apply_grad`, errors included.
        """

        def prepare() -> tuple[np.ndarray]:
            array = _gradients.host_array("grad", grad, self.dtype)
            _gradients.check_dense(array, self.shape, self.dtype)
            return (array,)

        self._turns.apply(local_step, prepare)

    def take_grad(
        self, num_required: int, name: str | None = None, *, timeout: float | None = None
    ) -> np.ndarray:
        """Waits for ``num_required`` gradients; the mean (or sum) of all that have arrived.

        As :meth:`SparseConditionalAccumulator.take_grad`, errors included.
        """
        store, count = self._turns.take(num_required, timeout)
        return divided(store.total, count) if self.reduction_type == "MEAN" else store.total
