"""Saving and restoring, as in ``tf.train``.

TensorFlow's ``Saver`` is given a session; this one is given the variables, a pytree::

    saver.save(variables, path, global_step)
    variables = saver.restore(path)
"""

from jslices.checkpoint import Saver as Saver
from jslices.checkpoint import SaverDef as SaverDef
from jslices.checkpoint import get_checkpoint_state as get_checkpoint_state
from jslices.checkpoint import latest_checkpoint as latest_checkpoint
from jslices.checkpoint import update_checkpoint_state as update_checkpoint_state
