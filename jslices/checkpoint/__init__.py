"""Checkpoints: TensorFlow's Saver for pytrees, in safetensors files.

``Saver`` is for one process or several that share a directory. To save in the background,
give the same trees to Orbax as they are (``docs/moving.md``): IndexedSlices and the states
of optimizers are pytrees, which its ``restore`` rebuilds from their shapes.

``import_state`` and ``export_state`` carry the state of an optimizer from PyTorch and
TensorFlow to here, and back; ``load_word_vectors`` and ``save_word_vectors`` vectors in
the files of word2vec, GloVe and fastText.
"""

from jslices._names import public as _public
from jslices.checkpoint.resize import reset_rows as reset_rows
from jslices.checkpoint.resize import resize_rows as resize_rows
from jslices.checkpoint.saver import Saver as Saver
from jslices.checkpoint.saver import SaverDef as SaverDef
from jslices.checkpoint.slots import export_state as export_state
from jslices.checkpoint.slots import import_state as import_state
from jslices.checkpoint.state_file import CheckpointState as CheckpointState
from jslices.checkpoint.state_file import get_checkpoint_state as get_checkpoint_state
from jslices.checkpoint.state_file import latest_checkpoint as latest_checkpoint
from jslices.checkpoint.state_file import update_checkpoint_state as update_checkpoint_state
from jslices.checkpoint.word_vectors import WordVectors as WordVectors
from jslices.checkpoint.word_vectors import load_word_vectors as load_word_vectors
from jslices.checkpoint.word_vectors import save_word_vectors as save_word_vectors
from jslices.errors import DataLossError as DataLossError
from jslices.errors import NotFoundError as NotFoundError

__all__, __dir__ = _public(__name__)
