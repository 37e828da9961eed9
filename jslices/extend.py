"""Names for libraries that are built on jslices: stable, but not for programs.

``jslices`` itself, ``jslices.optim``, ``jslices.testing`` and ``jslices.tree`` are for
programs. What the parts around the core share beside these has no promise, and a list in
``tests/test_satellites.py``.
"""

# The values of a pytree prefix for each leaf.
from jslices._jax import broadcast_prefix as broadcast_prefix

# Parameters in boxes that name their axes, of Flax or registered, and out of them.
from jslices.optim.engine.boxes import boxed_as as boxed_as
from jslices.optim.engine.boxes import is_box as is_box
from jslices.optim.engine.boxes import register_box as register_box
from jslices.optim.engine.boxes import unboxed as unboxed
from jslices.optim.engine.boxes import with_axes as with_axes

# The state of some rows of a table, for what goes by row numbers.
from jslices.optim.engine.protocol import StateOfRows as StateOfRows

# Optimizers of Optax where those of jslices are expected.
from jslices.optim.transforms.base import as_transformation as as_transformation

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
