"""Saver: checkpoints of any pytree, with TensorFlow's names, retention and state file."""

from collections.abc import Mapping, Sequence

from jslices.checkpoint.names import check_var_list
from jslices.checkpoint.restoring import RestoringMethods
from jslices.checkpoint.retention import Retention, RetentionMethods
from jslices.checkpoint.saver_def import SaverDef
from jslices.checkpoint.saving import SavingMethods


class Saver(SavingMethods, RestoringMethods, RetentionMethods):
    """Saves and restores variables: any pytree, optimizer states and random keys included.

    A checkpoint is one safetensors file at ``path``, or one for each shard at
    ``path-00000-of-00004`` and so on. Every tensor and the header carry a checksum. A file
    is written under another name, flushed to the disk, and renamed: whatever happens in
    between, the last checkpoint can be restored and the state file names it.

    The name of a variable is its path in the tree: ``"params/table"``, ``"state/0/mu"``.
    A mapping whose keys hold slashes has the names that its keys are.

    Args:
      var_list: the names of what is saved and restored, a name standing for everything
        below it too; or a dict ``{name in the checkpoint: name in the variables}``; None
        for everything. A handle, and ``"v:0"``, stand for the name ``"v"``.
      reshape: allows :meth:`restore` to give an array another shape of as many elements.
      sharded: writes one file for each shard of the variables, straight from its device.
        Without it there is one file, into which a sharded array is written by blocks of
        rows. Neither gathers a table.
      max_to_keep: so many checkpoints are kept, the oldest saved goes first; None or 0
        keeps all, and then ``last_checkpoints`` stays empty.
      keep_checkpoint_every_n_hours: of those that would be deleted, one in so many hours
        is kept, beginning so many hours from now.
      name: stands for ``save`` in the names of ``as_saver_def()``.
      saver_def: takes ``sharded``, ``max_to_keep`` and ``keep_checkpoint_every_n_hours``
        from another Saver's ``as_saver_def()``.
      allow_empty: no variables are no error.
      pad_step_number: the step is written with at least eight digits.
      save_relative_paths: the state file holds paths relative to its directory, so that
        the directory can be moved.

    Raises:
      TypeError: if ``var_list`` holds anything but names and handles.
      ValueError: if ``var_list`` is empty or names a variable twice.

    Example:
      >>> import os, tempfile, jax.numpy as jnp, jslices as js
      >>> directory = tempfile.mkdtemp()
      >>> variables = {"table": jnp.zeros((4, 2)), "step": 3}
      >>> saver = js.Saver(max_to_keep=3)
      >>> path = saver.save(variables, f"{directory}/model", global_step=3)
      >>> sorted(os.listdir(directory))
      ['checkpoint', 'model-3']
      >>> saver.restore(js.checkpoint.latest_checkpoint(directory))["step"]
      3

    Source: ``tf.train.Saver``. There variables belong to a session; here they are given
    to ``save`` and returned by ``restore``. The names of the files are those of
    TensorFlow's first format.
    """

    def __init__(
        self,
        var_list: Sequence[str] | Mapping[str, str] | None = None,
        reshape: bool = False,
        sharded: bool = False,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000.0,
        name: str | None = None,
        saver_def: SaverDef | None = None,
        allow_empty: bool = False,
        pad_step_number: bool = False,
        save_relative_paths: bool = False,
    ) -> None:
        if saver_def is not None:
            sharded, max_to_keep = saver_def.sharded, saver_def.max_to_keep
            keep_checkpoint_every_n_hours = saver_def.keep_checkpoint_every_n_hours
        self._var_list = check_var_list(var_list, allow_empty)
        self._reshape, self._sharded, self._name = reshape, sharded, name or "save"
        self._every_n_hours = keep_checkpoint_every_n_hours
        self._allow_empty, self._pad = allow_empty, pad_step_number
        self._save_relative_paths = save_relative_paths
        self._retention = Retention(max_to_keep, keep_checkpoint_every_n_hours)
        self._previous = None

    def as_saver_def(self) -> SaverDef:
        """The options, for ``Saver(saver_def=...)``."""
        save = "Identity" if self._sharded else "control_dependency"
        return SaverDef(
            max_to_keep=self._retention.max_to_keep,
            sharded=self._sharded,
            keep_checkpoint_every_n_hours=self._every_n_hours,
            filename_tensor_name=f"{self._name}/Const:0",
            save_tensor_name=f"{self._name}/{save}:0",
            restore_op_name=f"{self._name}/restore_all",
        )
