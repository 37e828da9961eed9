"""Random numbers by their newer names, as in ``tf.random``."""

from jslices.tf1._initial_values import random_normal as normal
from jslices.tf1._initial_values import random_uniform as uniform
from jslices.tf1._initial_values import set_random_seed as set_random_seed
from jslices.tf1._initial_values import truncated_normal as truncated_normal
from jslices.tf1.nn import log_uniform_candidate_sampler as log_uniform_candidate_sampler

set_seed = set_random_seed

__all__ = [
    "log_uniform_candidate_sampler",
    "normal",
    "set_random_seed",
    "set_seed",
    "truncated_normal",
    "uniform",
]
