"""The initializers by their short names, as in ``tf.initializers``.

``tf.initializers.zeros()`` is ``tf.zeros_initializer()``, and so on. All are called as
``init(key, shape, dtype)``, like those of ``jax.nn.initializers``.
"""

from jslices.tf1._initializers import constant_initializer as constant
from jslices.tf1._initializers import glorot_normal_initializer as glorot_normal
from jslices.tf1._initializers import glorot_uniform_initializer as glorot_uniform
from jslices.tf1._initializers import ones_initializer as ones
from jslices.tf1._initializers import orthogonal_initializer as orthogonal
from jslices.tf1._initializers import random_normal_initializer as random_normal
from jslices.tf1._initializers import random_uniform_initializer as random_uniform
from jslices.tf1._initializers import truncated_normal_initializer as truncated_normal
from jslices.tf1._initializers import (
    uniform_unit_scaling_initializer as uniform_unit_scaling,
)
from jslices.tf1._initializers import variance_scaling_initializer as variance_scaling
from jslices.tf1._initializers import zeros_initializer as zeros

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
