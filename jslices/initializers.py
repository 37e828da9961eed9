"""The initializers by short names, as in ``tf.initializers``.

``js.initializers.zeros()`` is ``js.zeros_initializer()``, and so on: all are called as
``init(key, shape, dtype)``, like those of ``jax.nn.initializers``.
"""

from jslices.tf1 import constant_initializer as constant
from jslices.tf1 import glorot_normal_initializer as glorot_normal
from jslices.tf1 import glorot_uniform_initializer as glorot_uniform
from jslices.tf1 import ones_initializer as ones
from jslices.tf1 import orthogonal_initializer as orthogonal
from jslices.tf1 import random_normal_initializer as random_normal
from jslices.tf1 import random_uniform_initializer as random_uniform
from jslices.tf1 import truncated_normal_initializer as truncated_normal
from jslices.tf1 import uniform_unit_scaling_initializer as uniform_unit_scaling
from jslices.tf1 import variance_scaling_initializer as variance_scaling
from jslices.tf1 import zeros_initializer as zeros

__all__ = [
    "constant",
    "glorot_normal",
    "glorot_uniform",
    "ones",
    "orthogonal",
    "random_normal",
    "random_uniform",
    "truncated_normal",
    "uniform_unit_scaling",
    "variance_scaling",
    "zeros",
]
