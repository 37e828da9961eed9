"""Which file holds what, and how a set of files appears at once."""

import contextlib
import json
import os
from typing import Any

from jslices.checkpoint import files
from jslices.checkpoint.leaves import Leaf
from jslices.checkpoint.tensor_file import TensorFile
from jslices.checkpoint.tensor_writer import Tensor, write

#: The metadata entry that describes a file.
INFO = "jslices"
_VERSION = 1

#: What goes into one file: a tensor for each name, and where it begins in the array.
Part = dict[str, tuple[Tensor, tuple[int, ...]]]


def whole(leaves: dict[str, Leaf]) -> list[Part]:
    """Everything in one file."""
    return [{n: (leaf.tensor(), (0,) * len(leaf.spec.shape)) for n, leaf in leaves.items()}]


def by_device(leaves: dict[str, Leaf]) -> list[Part]:
    """A file for each shard; what is not sharded goes where there is least."""
    count = max((len(leaf.pieces) for leaf in leaves.values()), default=1)
    parts: list[Part] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, leaf in sorted(leaves.items(), key=lambda item: -len(item[1].pieces)):
        for number, piece in enumerate(leaf.pieces):
            if len(leaf.pieces) == 1:
                number = sizes.index(min(sizes))
            tensor = leaf.piece_tensor(piece)
            parts[number][name] = (tensor, piece.start)
            sizes[number] += tensor.num_bytes
    return parts


def write_checkpoint(
    prefix: str, parts: list[Part], info: dict[str, Any], sharded: bool
) -> str:
    """Writes the files of a checkpoint, which takes the place of an older one at once.

    Returns:
      The id of this save.

    Raises:
      OSError: if that cannot be done; what was there before is then as it was.
    """
    save_id, count = files.new_id(), len(parts)
    paths = [files.shard_path(prefix, i, count) for i in range(count)]
    paths = paths if sharded else [prefix]
    descriptors: list[int] = []
    waiting = {path: files.temporary_path(path, save_id) for path in paths}
    try:
        for number, (part, path) in enumerate(zip(parts, paths, strict=True)):
            mine = {"id": save_id, "version": _VERSION, "shard": number, "shards": count}
            mine |= info if number == 0 else {}
            descriptors.append(files.open_new(waiting[path]))
            _write_part(descriptors[-1], part, mine)
        _publish(prefix, waiting)
    except OSError as error:
        if saved_id(paths[0]) == save_id:  # it has its name: what failed is tidying up
            raise
        raise OSError(
            error.errno,
            f"{error.strerror or error}; {prefix} was not saved, and what was saved before "
            "is as it was",
            error.filename or prefix,
        ) from error
    finally:
        # Once the first shard has its name the others are part of a checkpoint.
        if os.path.exists(waiting[paths[0]]):
            for temporary in waiting.values():
                with contextlib.suppress(OSError):
                    files.remove(temporary)
        for descriptor in descriptors:  # their locks end here
            os.close(descriptor)
    return save_id


def _write_part(descriptor: int, part: Part, info: dict[str, Any]) -> None:
    starts = {name: start for name, (_, start) in part.items()}
    tensors = {name: tensor for name, (tensor, _) in part.items()}
    write(descriptor, tensors, {INFO: json.dumps({**info, "starts": starts})})


def _publish(prefix: str, waiting: dict[str, str]) -> None:
    """Gives written files their names. The first one decides."""
    directory, paths = os.path.dirname(prefix), list(waiting)
    with files.directory_lock(directory, exclusive=True):
        files.clean(directory, saved_id)
        for path, temporary in waiting.items():
            os.replace(temporary, path)
        for family in files.families(prefix):
            for path in family if family != paths else ():
                files.remove(path)
        files.sync_directory(directory)


def read_info(file: TensorFile) -> dict[str, Any]:
    """What this package wrote about a file; empty for a file of another's."""
    info: dict[str, Any] = json.loads(file.metadata.get(INFO, "{}"))
    if info.get("version", _VERSION) > _VERSION:
        raise ValueError(
            f"{file.path} was written by a later version of jslices; update jslices"
        )
    return info


def saved_id(path: str) -> str | None:
    """The id of the save that wrote a file; None if it cannot be told."""
    try:
        return read_info(TensorFile(path)).get("id")
    except (OSError, ValueError):
        return None
