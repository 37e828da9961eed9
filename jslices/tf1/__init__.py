"""TensorFlow's variables, scopes and initializers as pure functions of explicit state.

Inside of a function given to :func:`transform` one writes the familiar calls; outside
there are ``init``, ``apply`` and a pytree of :class:`Variables`.

What differs from TensorFlow, on purpose:

* The order of the program decides what a read sees, not a session.
* Operations have no names; scopes put theirs into profiles instead.
* Initializers take a PRNG key; a value depends on the key and the variable's name.
* A float variable that is given no initializer gets ``glorot_uniform_initializer``, as
  from TensorFlow 1.0 on (before it was ``uniform_unit_scaling_initializer``).
* Row numbers out of range are dropped by the scatter methods, not refused.
* Regularizers are called by ``get_collection``, when their losses are asked for.
* ``count_up_to`` raises at the limit where it can; under ``jit`` it returns the limit.
* A shared variable may be asked for by a constant of its own dtype; TensorFlow compares
  with float32.
* ``bool(variable)`` and a name of None are errors; there are no custom getters, no
  partitioners and no caching devices.
"""

from jslices.tf1.collections import GraphKeys as GraphKeys
from jslices.tf1.collections import get_collection as get_collection
from jslices.tf1.constants import constant as constant
from jslices.tf1.constants import ones as ones
from jslices.tf1.constants import zeros as zeros
from jslices.tf1.get import get_variable as get_variable
from jslices.tf1.helpers import all_variables as all_variables
from jslices.tf1.helpers import (
    assert_variables_initialized as assert_variables_initialized,
)
from jslices.tf1.helpers import initialize_all_variables as initialize_all_variables
from jslices.tf1.helpers import initialize_variables as initialize_variables
from jslices.tf1.helpers import (
    report_uninitialized_variables as report_uninitialized_variables,
)
from jslices.tf1.helpers import trainable_variables as trainable_variables
from jslices.tf1.initializers import constant_initializer as constant_initializer
from jslices.tf1.initializers import ones_initializer as ones_initializer
from jslices.tf1.initializers import (
    random_normal_initializer as random_normal_initializer,
)
from jslices.tf1.initializers import (
    random_uniform_initializer as random_uniform_initializer,
)
from jslices.tf1.initializers import (
    truncated_normal_initializer as truncated_normal_initializer,
)
from jslices.tf1.initializers import zeros_initializer as zeros_initializer
from jslices.tf1.random_values import random_normal as random_normal
from jslices.tf1.random_values import random_uniform as random_uniform
from jslices.tf1.random_values import truncated_normal as truncated_normal
from jslices.tf1.scaled_initializers import (
    glorot_normal_initializer as glorot_normal_initializer,
)
from jslices.tf1.scaled_initializers import (
    glorot_uniform_initializer as glorot_uniform_initializer,
)
from jslices.tf1.scaled_initializers import (
    orthogonal_initializer as orthogonal_initializer,
)
from jslices.tf1.scaled_initializers import (
    uniform_unit_scaling_initializer as uniform_unit_scaling_initializer,
)
from jslices.tf1.scaled_initializers import (
    variance_scaling_initializer as variance_scaling_initializer,
)
from jslices.tf1.scope import AUTO_REUSE as AUTO_REUSE
from jslices.tf1.scope import VariableScope as VariableScope
from jslices.tf1.scope import get_variable_scope as get_variable_scope
from jslices.tf1.scope import name_scope as name_scope
from jslices.tf1.scope import variable_scope as variable_scope
from jslices.tf1.state import VariableInfo as VariableInfo
from jslices.tf1.state import Variables as Variables
from jslices.tf1.transform import Transformed as Transformed
from jslices.tf1.transform import transform as transform
from jslices.tf1.variable import Variable as Variable
