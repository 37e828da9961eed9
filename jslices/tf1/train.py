"""Saving and restoring, as in ``tf.train``."""

import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jax

import jslices as js
from jslices._typing import PyTree
from jslices.checkpoint import SaverDef as SaverDef
from jslices.checkpoint import get_checkpoint_state as get_checkpoint_state
from jslices.checkpoint import latest_checkpoint as latest_checkpoint
from jslices.checkpoint import update_checkpoint_state as update_checkpoint_state
from jslices.tf1._instead import missing

__all__ = ["Saver", "SaverDef", "get_checkpoint_state", "latest_checkpoint"]
__all__ += ["update_checkpoint_state"]
__dir__ = __all__.copy


class Saver(js.Saver):
    """:class:`jslices.Saver` with TensorFlow's arguments in TensorFlow's order.

    Where TensorFlow takes a session, ``save`` and ``restore`` take the variables, any
    pytree, and ``restore`` returns them.

    Args:
      builder, defer_build, write_version, filename: only TensorFlow's defaults.
      allow_empty: True lets ``save`` return None if there is nothing to save.

    Example:
      >>> import tempfile, jax.numpy as jnp, jslices.tf1 as tf
      >>> variables, saver = {"v1": jnp.ones(2), "v2": jnp.zeros(3)}, tf.train.Saver(["v1"])
      >>> path = saver.save(variables, f"{tempfile.mkdtemp()}/my-model", global_step=0)
      >>> saver.restore({"v1": jnp.zeros(2)}, path)
      {'v1': Array([1., 1.], dtype=float32)}
    """

    def __init__(
        self,
        var_list: Sequence[str] | Mapping[str, str] | None = None,
        reshape: bool = False,
        sharded: bool = False,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000.0,
        name: str | None = None,
        restore_sequentially: bool = False,
        saver_def: SaverDef | None = None,
        builder: None = None,
        defer_build: bool = False,
        allow_empty: bool = False,
        write_version: int = 2,
        pad_step_number: bool = False,
        save_relative_paths: bool = False,
        filename: None = None,
    ) -> None:
        theirs = {
            "builder": builder,
            "defer_build": defer_build,
            "write_version": None if write_version in (1, 2) else write_version,
            "filename": filename,
        }
        super().__init__(
            var_list,
            reshape,
            sharded,
            max_to_keep,
            keep_checkpoint_every_n_hours,
            saver_def=saver_def,
            allow_empty=allow_empty,
            pad_step_number=pad_step_number,
            save_relative_paths=save_relative_paths,
            **{key: value for key, value in theirs.items() if value},  # type: ignore[arg-type]
        )
        self._may_be_empty = allow_empty
        self._holds_nothing = var_list is not None and not var_list

    def save(  # type: ignore[override]
        self,
        sess: PyTree,
        save_path: str | os.PathLike[str],
        global_step: int | str | jax.Array | None = None,
        latest_filename: str | None = None,
        meta_graph_suffix: str = "meta",
        write_meta_graph: bool = True,
        write_state: bool = True,
        strip_default_attrs: bool = False,
        save_debug_info: bool = False,
    ) -> str | None:
        """Save the variables ``sess`` by :meth:`jslices.Saver.save`.

        There is no graph, so arguments for its file change nothing.
        """
        if self._is_empty(sess):
            return None
        options = global_step, latest_filename, write_state
        return super().save(sess, save_path, *options)

    def restore(  # type: ignore[override]
        self, sess: PyTree, save_path: str | os.PathLike[str] | None = None
    ) -> PyTree:
        """The variables saved at ``save_path``, by :meth:`jslices.Saver.restore`.

        ``sess`` are those to restore into, None for all. The path may also come first.
        """
        if isinstance(sess, str | os.PathLike):
            sess, save_path = save_path, sess
        if sess is not None and self._is_empty(sess):
            return sess
        return super().restore(save_path, sess)  # type: ignore[arg-type]

    def _is_empty(self, variables: PyTree) -> bool:
        nothing = self._holds_nothing or not jax.tree.leaves(variables)
        return self._may_be_empty and nothing

    def __getattr__(self, name: str) -> NoReturn:
        raise missing("a Saver", name)


def __getattr__(name: str) -> NoReturn:
    raise missing(__name__, name)
