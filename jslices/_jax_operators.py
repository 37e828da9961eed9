"""Telling JAX's binary operators from its functions.

``jnp.sum(slices)`` and ``array + slices`` both ask the slices for an array through
``__jax_array__``. The first must get one; the second must not, or Python never reaches
``IndexedSlices.__radd__``, which adds the rows in place. Both releases that jslices is
tested on call it straight from the operator's own function (``_operator_add``, before
that ``deferring_binary_op``). Should that change, the sum is still right, but dense, and
a test fails.
"""

import sys

_OPERATORS = (
    *("_operator_add", "_operator_sub", "_operator_mul"),
    *("_operator_radd", "_operator_rsub", "_operator_rmul"),
    "deferring_binary_op",
)


def called_by_jax_operator() -> bool:
    """True inside ``__jax_array__`` when ``array + slices`` (or ``-``, ``*``) asked."""
    return sys._getframe(2).f_code.co_name in _OPERATORS


def called_by_any_jax_operator() -> bool:
    """The same for all operators, ``array @ x`` and ``array < x`` included."""
    name = sys._getframe(2).f_code.co_name
    return name.startswith("_operator_") or name == "deferring_binary_op"
