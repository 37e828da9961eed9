"""The options of a Saver, as a value."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SaverDef:
    """The options of a ``Saver``, under the names of TensorFlow's ``SaverDef``.

    There is no graph, so the names of its tensors are what TensorFlow would have used.
    """

    max_to_keep: int = 5
    sharded: bool = False
    keep_checkpoint_every_n_hours: float = 10000.0
    filename_tensor_name: str = "save/Const:0"
    save_tensor_name: str = "save/control_dependency:0"
    restore_op_name: str = "save/restore_all"
    version: int = 2
