"""What the pure accumulators share: counting gradients and steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._errors import InvalidArgumentError
from jslices.accumulators._gradients import float_dtype, positive


class PureSteps:
    """Functions of a state with ``num_accumulated`` and ``global_step``."""

    def num_accumulated(self, state: Any) -> jax.Array:
        """How many gradients have been accepted since the last take: int32 ``[]``."""
        return state.num_accumulated

    def global_step(self, state: Any) -> jax.Array:
        """The step below which a gradient's ``local_step`` is stale: int32 ``[]``."""
        return state.global_step

    def set_global_step(self, state: Any, new_global_step: ArrayLike) -> Any:
        """The state with another step, higher or lower; what is accumulated stays."""
        step = jnp.asarray(new_global_step).astype(jnp.int32)
        return state._replace(global_step=step)

    def ready(self, state: Any, num_required: ArrayLike) -> jax.Array:
        """Whether ``num_required`` gradients have been accumulated: bool ``[]``.

        Raises:
          InvalidArgumentError: for ``num_required < 1``, where it is a plain number.
        """
        if not isinstance(num_required, jax.core.Tracer):
            num_required = positive(num_required)
        return state.num_accumulated >= num_required


def zero() -> jax.Array:
    """int32 ``[]``."""
    return jnp.zeros((), jnp.int32)


def device_dtype(owner: str, dtype: Any) -> np.dtype:
    """``dtype``, which must be a floating one that JAX has switched on."""
    found = float_dtype(owner, dtype)
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise InvalidArgumentError(
            f"{owner}(dtype='{found}') needs "
            "jax.config.update('jax_enable_x64', True) before it is made"
        )
    return found


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """What gradients are summed in: 16-bit floats in float32, to be rounded once."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype
