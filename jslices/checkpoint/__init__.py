"""Checkpoints: TensorFlow's Saver for pytrees, in safetensors files."""

from jslices._errors import DataLossError as DataLossError
from jslices._errors import NotFoundError as NotFoundError
from jslices.checkpoint.saver import Saver as Saver
from jslices.checkpoint.saver import SaverDef as SaverDef
from jslices.checkpoint.state_file import CheckpointState as CheckpointState
from jslices.checkpoint.state_file import get_checkpoint_state as get_checkpoint_state
from jslices.checkpoint.state_file import latest_checkpoint as latest_checkpoint
from jslices.checkpoint.state_file import update_checkpoint_state as update_checkpoint_state
