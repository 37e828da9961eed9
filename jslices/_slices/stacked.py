"""Parameters of which many tables are in one array."""

from typing import NamedTuple

import jax

from jslices._typing import PyTree


class Stacked(NamedTuple):
    """Parameters whose tables are in one array for each row shape.

    Made by :func:`jslices.tables.stack_tables`, a pytree like any other. Gradients and the
    state of an optimizer have the same form.
    """

    tables: dict[str, jax.Array]  #: ``[V, *D]`` each, rows of one table after another.
    rest: PyTree  #: the other parameters as they came, None where a table was.
