"""Where a checkpoint goes: its path and its step."""

import operator
import os
from typing import Any

import numpy as np

from jslices._errors import NotFoundError
from jslices.checkpoint.names import brief, found_name, named_leaves, plain

#: A path as users give it.
Path = str | os.PathLike[str]


def checkpoint_path(
    path: Path,
    step: int | None,
    latest_filename: str | None,
    pad: bool,
    sharded: bool,
) -> str:
    """The path of a checkpoint, step included.

    Raises:
      ValueError: if nothing can be saved there.
    """
    prefix = os.fspath(path)
    if not isinstance(prefix, str):
        raise TypeError(f"path must be a str, not {type(prefix).__name__}")
    directory, name = os.path.split(prefix)
    state = latest_filename or "checkpoint"
    if not name:
        raise ValueError(f"{prefix!r} is no path of a checkpoint; it ends in no name")
    if os.path.dirname(state):
        raise ValueError(f"'latest_filename' must not contain path components: {state}")
    if step is not None:
        prefix += f"-{step:08d}" if pad else f"-{step:d}"
    if os.path.basename(prefix) == state and not sharded:
        raise ValueError(
            f"'latest_filename' collides with 'save_path': {state!r} and {prefix!r}"
        )
    if not os.path.isdir(directory or "."):
        raise ValueError(f"Parent directory of {prefix} doesn't exist, can't save.")
    if os.path.isdir(prefix):
        raise ValueError(f"{prefix} is a directory; give the path of a file")
    return prefix


def step_number(step: Any, variables: Any) -> int | None:
    """The step as an integer, which may be the value of a variable."""
    if step is None:
        return None
    if isinstance(step, str):
        names, values, _ = named_leaves(plain(variables))
        found = found_name(step, names)
        if found not in names:
            raise NotFoundError(
                f"global_step={step!r} is no variable; there are {brief(names)}"
            )
        step = values[names.index(found)]
    try:
        if isinstance(step, bool | np.bool_) or np.ndim(step):
            raise TypeError
        return operator.index(step.item() if hasattr(step, "item") else step)
    except TypeError:
        raise TypeError(
            f"global_step must be an integer, an array of one, or the name of a variable, "
            f"not {step!r}"
        ) from None
