"""The dense accumulator as pure functions on a state."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices._errors import InvalidArgumentError
from jslices.accumulators._gradients import check_dense, check_reduction, partial_shape
from jslices.accumulators._pure_base import PureSteps, device_dtype, sum_dtype, zero


class DenseAccumulatorState(NamedTuple):
    """What has been accumulated: a pytree of static shapes."""

    total: jax.Array  #: like the gradient, float32 where it has 16 bits.
    num_accumulated: jax.Array  #: int32 ``[]``, gradients since the last take.
    global_step: jax.Array  #: int32 ``[]``.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class DenseAccumulator(PureSteps):
    """The functions of one accumulator; made by :func:`dense_accumulator`."""

    dtype: np.dtype
    shape: tuple[int, ...]
    reduction_type: str

    def init(self) -> DenseAccumulatorState:
        """The state that holds nothing, at step 0."""
        total = jnp.zeros(self.shape, sum_dtype(self.dtype))
        return DenseAccumulatorState(total, zero(), zero())

    def apply_grad(
        self, state: DenseAccumulatorState, grad: ArrayLike, local_step: ArrayLike = 0
    ) -> tuple[DenseAccumulatorState, jax.Array]:
        """``(state, accepted)``: adds a gradient unless ``local_step`` is stale.

        Raises:
          InvalidArgumentError: for another shape or dtype.
        """
        grad = jnp.asarray(grad)
        check_dense(grad, self.shape, self.dtype)
        accepted = jnp.asarray(local_step) >= state.global_step
        # A choice and no product: a stale gradient may hold NaN.
        added = jnp.where(accepted, grad.astype(state.total.dtype), 0)
        count = state.num_accumulated + accepted.astype(jnp.int32)
        return state._replace(total=state.total + added, num_accumulated=count), accepted

    def take_grad(
        self, state: DenseAccumulatorState, num_required: ArrayLike
    ) -> tuple[DenseAccumulatorState, jax.Array]:
        """``(state, mean)`` of all gradients; zeros and the same state when not ready.

        Raises:
          InvalidArgumentError: for ``num_required < 1``, where it is a plain number.
        """
        ready = self.ready(state, num_required)
        total = jnp.where(ready, state.total, 0)
        if self.reduction_type == "MEAN":
            total = total / jnp.maximum(state.num_accumulated, 1).astype(total.dtype)
        emptied = self.init()._replace(global_step=state.global_step + 1)
        new_state = jax.tree.map(
            lambda new, old: jnp.where(ready, new, old), emptied, state
        )
        return new_state, total.astype(self.dtype)


def dense_accumulator(
    dtype: DTypeLike, shape: Sequence[int], reduction_type: str = "MEAN"
) -> DenseAccumulator:
    """Dense gradients of several micro-batches, summed up under ``jit``.

    The pure form of :class:`ConditionalAccumulator`, to stand beside
    :func:`sparse_accumulator` for the dense leaves of a model.

    Args:
      dtype: floating dtype of the gradients; 16-bit floats are summed in float32.
      shape: of the gradients, all of it known; ``()`` is a scalar here.
      reduction_type: "MEAN" divides by the number of gradients, "SUM" does not.

    Returns:
      An accumulator with the same functions as :func:`sparse_accumulator` gives.

    Raises:
      InvalidArgumentError: for arguments that are none of these.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> accumulator = js.accumulators.dense_accumulator("float32", (2,))
      >>> state, accepted = accumulator.apply_grad(accumulator.init(), jnp.ones(2))
      >>> accumulator.take_grad(state, 1)[1]
      Array([1., 1.], dtype=float32)

    Source: ``tf._jax.v1.ConditionalAccumulator``.
    """
    owner = "dense_accumulator"
    found = partial_shape(owner, shape)
    if found is None or None in found:
        raise InvalidArgumentError(
            f"{owner}(shape={shape!r}): its state has a static size; give the shape of "
            "the gradients"
        )
    check_reduction(owner, reduction_type)
    known = tuple(n for n in found if n is not None)
    return DenseAccumulator(device_dtype(owner, dtype), known, reduction_type)
