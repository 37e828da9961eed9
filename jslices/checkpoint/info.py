"""The description of a checkpoint in the metadata of its files: JSON, checked when read.

Anyone can write a file with the right checksums, so nothing in it is trusted.
"""

import dataclasses
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jslices.checkpoint.leaves import Spec, check_spec
from jslices.checkpoint.trees import check_names, names_in

INFO_KEY = "jslices"  #: The entry of a file's metadata that holds the description.
_VERSION = 1
_ID = re.compile("[0-9a-f]{24}")

_T = TypeVar("_T")
_shown = reprlib.repr


@dataclasses.dataclass(frozen=True)
class Delta:
    """The base of a delta, and the tables that it holds in part."""

    base: str  #: the name of the checkpoint that it builds on, in the same directory.
    base_id: str  #: the id of the save that wrote the base.
    rows: dict[str, str]  #: by table the name of the tensor with the numbers of its rows.


@dataclasses.dataclass(frozen=True)
class Info:
    """The description of one file of a checkpoint."""

    save_id: str
    shard: int  #: the number of the file.
    shards: int  #: how many files there are.
    starts: dict[str, tuple[int, ...]]  #: of each tensor in its variable.
    specs: dict[str, Spec]  #: of the variables; like the rest only in the first file.
    structure: Any  #: the tree in which the variables came, from :func:`trees.describe`.
    has_structure: bool  #: whether the structure is known.
    delta: Delta | None  #: None for a full checkpoint.
    held: frozenset[str]  #: tables that were saved in boxes, as their rows may be behind.


def dump_info(
    save_id: str,
    shard: int,
    shards: int,
    starts: Mapping[str, Sequence[int]],
    info: Mapping[str, Any],
) -> str:
    """The metadata of one file, ``info`` among it."""
    own = {"id": save_id, "version": _VERSION, "shard": shard, "shards": shards}
    return json.dumps({**own, **info, "starts": starts})


def parse_info(text: str) -> Info:
    """Read the metadata of one file; ValueError if this package cannot have written it."""
    raw = json.loads(text)
    version = _item(raw, "version", int)
    if version > _VERSION:
        raise ValueError("it was written by a later version of jslices; update jslices")
    save_id = _item(raw, "id", str)
    if not _ID.fullmatch(save_id):
        raise ValueError(f"{_shown(save_id)} is no id of a save")
    starts = {n: _sizes(n, start) for n, start in _item(raw, "starts", dict).items()}
    shard, shards = _item(raw, "shard", int), _item(raw, "shards", int)
    variables = _item(raw, "variables", dict) if shard == 0 else {}
    specs = {name: _spec(name, spec) for name, spec in variables.items()}
    check_names(specs)
    if "structure" in raw and sorted(_leaves(raw["structure"], specs)) != sorted(specs):
        raise ValueError("its structure does not hold every variable once")
    delta = _delta(_item(raw, "delta", dict), specs) if "delta" in raw else None
    if delta is not None and shards != 1:
        raise ValueError("it is a delta of more than one file")
    structure = raw.get("structure"), "structure" in raw
    held = _item(raw, "held", list) if "held" in raw else []
    if not all(type(name) is str and name in specs for name in held):
        raise ValueError(f"it holds {_shown(held)} in boxes, and not all are variables")
    return Info(save_id, shard, shards, starts, specs, *structure, delta, frozenset(held))


def _spec(name: str, raw: Any) -> Spec:
    match raw:
        case [str(kind), str(dtype), shape]:
            spec = Spec(kind, dtype, _sizes(name, shape))
        case _:
            raise ValueError(f"{name!r} is described as {_shown(raw)}")
    try:
        check_spec(spec)
    except ValueError as error:
        raise ValueError(f"{name!r} is described as {_shown(raw)}: {error}") from error
    return spec


def _leaves(structure: Any, specs: dict[str, Spec]) -> Iterator[str]:
    for name, indices in names_in(structure):
        yield name
        counts = {specs[n].shape[:1] for n in (name, indices) if n in specs}
        if indices is not None and len(counts) > 1:
            raise ValueError(f"{name!r} and {indices!r} differ in their numbers of rows")


def _delta(raw: dict[str, Any], specs: dict[str, Spec]) -> Delta:
    rows = _item(raw, "rows", dict)
    for name, row_name in rows.items():
        if type(row_name) is not str or name not in specs or not specs[name].shape:
            raise ValueError(f"it holds the rows {_shown(row_name)} of {_shown(name)}")
    if len({*specs, *rows.values()}) < len(specs) + len(rows):
        raise ValueError("a tensor of row numbers has the name of something else")
    return Delta(_item(raw, "base", str), _item(raw, "base_id", str), rows)


def _item(raw: Any, key: str, kind: type[_T]) -> _T:
    value = raw.get(key) if type(raw) is dict else None
    if type(value) is not kind:  # True is not an int
        raise ValueError(f"its {key!r} is {_shown(value)}, not of the type {kind.__name__}")
    return value


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    """A shape, or the start of a tensor."""
    if type(value) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise ValueError(f"{_shown(value)} is no shape or place of {name!r}")
    return tuple(value)
