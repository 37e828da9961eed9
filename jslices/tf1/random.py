"""Random numbers by their newer names, as in ``tf.random``."""

from jslices.tf1 import _initial_values
from jslices.tf1 import nn as _nn

log_uniform_candidate_sampler = _nn.log_uniform_candidate_sampler
normal = _initial_values.random_normal
set_random_seed = set_seed = _initial_values.set_random_seed
truncated_normal = _initial_values.truncated_normal
uniform = _initial_values.random_uniform

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
