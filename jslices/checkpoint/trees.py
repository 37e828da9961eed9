"""Trees of variables: names of the leaves, choosing some, the structure as JSON."""

import bisect
import collections
import fnmatch
import re
import reprlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jslices import IndexedSlices, InvalidArgumentError, is_slices
from jslices._slices import opened
from jslices._slices.held import is_held, unheld
from jslices._typing import PyTree
from jslices.errors import NotFoundError
from jslices.optim.engine.clock import RowClock

#: Names of variables, or ``{name in the checkpoint: name in the variables}``; None: all.
VarList: TypeAlias = Sequence[str] | Mapping[str, str] | None

_ODD = re.compile("[\0\ud800-\udfff]")  # safetensors keeps neither
_ROOT = "value"  # the name of a tree that is a single leaf


# --- names ----------------------------------------------------------------------------


def named_leaves(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[str], list[Any], Any]:
    """Flatten a tree into the names of the leaves, the leaves, and the structure.

    A name is the path of the leaf, its parts joined by ``/``: ``"params/dense/w"``,
    ``"state/0/mu/table"``. Refuses two leaves of one name, and one that cannot be stored.
    Tables come out of their boxes.
    """
    plain = unheld(tree)
    pairs, structure = jax.tree_util.tree_flatten_with_path(plain, is_leaf=is_leaf)
    names = [_path_text(path) or _ROOT for path, _ in pairs]
    check_names(names)
    if twice := _twice(names):
        raise InvalidArgumentError(
            f"two variables would be saved under one name: {twice}. A key that contains a "
            "'/' means the same as a dict within a dict; rename one of them"
        )
    return names, [opened(leaf) for _, leaf in pairs], structure


def held_leaves(tree: PyTree) -> list[bool]:
    """Of each leaf whether it is in a box, as its rows may be behind."""
    return [is_held(x) for x in jax.tree.leaves(tree, is_leaf=is_held)]


def _path_text(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _twice(names: Iterable[str]) -> list[str]:
    """The names that occur more than once."""
    return sorted(n for n, count in collections.Counter(names).items() if count > 1)


def check_names(
    names: Iterable[str], where: str = "", error: type[Exception] = InvalidArgumentError
) -> None:
    """Refuse names that would mean something else as a path."""
    bad = [n for n in names if n.startswith("/") or _ODD.search(n) or ".." in n.split("/")]
    if bad:
        raise error(
            f"{where}variables cannot have the names {bad}: a name must not begin with '/' "
            "or contain '..', a NUL or half a character (surrogate)"
        )


def brief(names: Iterable[str], most: int = 12) -> str:
    """The names, or the first of them, for an error message."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{names[:most]}{more}"


def listed(problems: Sequence[str], most: int = 8) -> str:
    """Problems, or the first of them, for an error message."""
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


# --- handles --------------------------------------------------------------------------


def _is_handle(node: object) -> bool:
    """True for objects with a name and a value, such as ``jslices.tf1.Variable``."""
    return callable(getattr(type(node), "value", None)) and hasattr(node, "name")


def without_handles(tree: PyTree) -> PyTree:
    """Replace handles by the arrays that they hold."""
    held = lambda x: x.value() if _is_handle(x) else x  # noqa: E731
    return jax.tree.map(held, tree, is_leaf=_is_handle)


# --- choosing variables ---------------------------------------------------------------


def resolve_name(name: str, available: Container[str]) -> str:
    """A name as it is in ``available``, if necessary without TensorFlow's ``:0``."""
    return name if name in available else name.removesuffix(":0")


def clocks_in(names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """For each array of last steps the paths of its clock and table, and its number.

    ``{clock}last{table}`` is its name, and that of the table ends with ``table``. Its
    number is that of the table's last step in ``{clock}whole``.
    """
    numbers: dict[str, int] = collections.Counter()
    for name in names:
        if found := re.fullmatch("((?:.*/)?clock/)last((?:/.*)?)", name):
            clock, table = found.groups()
            yield clock, table, numbers[clock]
            numbers[clock] += 1


def row_clock(
    at: tuple[str, str, int], names: Container[str], read: Callable[[str], Any]
) -> RowClock:
    """The last steps of the rows of one of ``clocks_in``."""
    clock, table, number = at
    whole, count = f"{clock}whole", clock.removesuffix("clock/") + "count"
    as_whole = read(whole)[number] if whole in names else -1  # of an earlier version
    return RowClock.of(read(f"{clock}last{table}"), as_whole, read(count))


def matching(pattern: str, names: Mapping[str, Any], argument: str) -> list[str]:
    """Expand a name, or a pattern such as ``*/table``, to one name at least."""
    exact = resolve_name(pattern, names)
    matches = [exact] if exact in names else []
    if any(mark in pattern for mark in "*?["):  # a plain name costs no look at the others
        fits = lambda name: fnmatch.fnmatchcase(name, pattern)  # noqa: E731
        matches = [n for n in names if n == exact or fits(n)]
    if not matches:
        raise NotFoundError(
            f"{argument} names no variable with {pattern!r}; there are {brief(names)}, and "
            "patterns such as '*/table' are allowed"
        )
    return matches


def check_var_list(var_list: object, allow_empty: bool) -> VarList:
    """Copy a list or dict of names, replacing handles by theirs; refuse anything else."""
    if var_list is None:
        return None
    if not isinstance(var_list, list | tuple | Mapping):
        raise TypeError(
            "var_list must be a list of names, or a dict {name in the checkpoint: name in "
            f"the variables}}, not {type(var_list).__name__}"
        )
    if isinstance(var_list, Mapping):
        var_list = {saved: _name_of(v) for saved, v in var_list.items()}
        names = list(var_list.values())
    else:
        var_list = names = [_name_of(v) for v in var_list]
    strange = [n for n in [*names, *var_list] if not isinstance(n, str)]
    if strange:
        raise TypeError(
            "var_list must hold names, such as 'params/table', or the handles that "
            f"get_variable returns, not {strange[0]!r}; the variables themselves are "
            "arguments of save and restore"
        )
    if not names and not allow_empty:
        raise ValueError("No variables to save: var_list is empty")
    if twice := _twice(n.removesuffix(":0") for n in names):
        raise ValueError(f"var_list names {twice} twice; give each variable one name")
    check_names(var_list, "in a checkpoint ")
    return var_list


def _name_of(variable: Any) -> Any:
    is_handle = not isinstance(variable, str) and _is_handle(variable)
    return variable.name.removesuffix(":0") if is_handle else variable


def choose(available: Sequence[str], var_list: VarList, where: str) -> dict[str, str]:
    """Choose variables: ``{name in the checkpoint: name in the variables}``.

    A name means the leaf of that name, or every leaf below it.
    """
    if var_list is None:
        return {name: name for name in available}
    names, ordered = set(available), sorted(available)
    if not isinstance(var_list, Mapping):
        var_list = {resolve_name(n, names): n for n in var_list}
    chosen: dict[str, str] = {}
    missing = []
    for saved, name in var_list.items():
        name = resolve_name(name, names)
        if name in names:
            chosen[saved] = name
            continue
        # The "0" comes after the "/".
        first, end = (bisect.bisect_left(ordered, f"{name}{mark}") for mark in "/0")
        below = ordered[first:end]
        chosen.update({saved + n[len(name) :]: n for n in below})
        if not below:
            missing.append(name)
    if missing:
        raise NotFoundError(
            f"{where} no variables of the names {missing}; there are {brief(available)}"
        )
    return chosen


# --- structure ------------------------------------------------------------------------


def describe(tree: PyTree, prefix: str = "") -> Any:
    """Describe a tree in JSON (a description), with names in place of its leaves.

    Dicts, lists, tuples, None and IndexedSlices are told apart. Any other node, for
    example the state of an optimizer, becomes a dict of its parts.
    """
    if tree is None:
        return None
    if is_slices(tree):
        values, indices = _joined(prefix, "values"), _joined(prefix, "indices")
        return {"slices": [values, indices], "dense_shape": tree.dense_shape}
    is_child = lambda node: node is not tree  # noqa: E731
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_child)
    if len(children) == 1 and not children[0][0]:
        return prefix or _ROOT
    parts = []
    for path, child in children:
        key = getattr(path[0], "key", None)
        text = _path_text(path)
        is_integer = isinstance(key, int) and not isinstance(key, bool) and len(path) == 1
        description = describe(child, _joined(prefix, text))
        parts.append((key if is_integer else text, description))
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [part for _, part in parts]}
    return {"dict": parts}


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def names_in(description: Any, path: str = "") -> Iterator[tuple[str, str | None]]:
    """List the names of the leaves of a description.

    The values of IndexedSlices come with the name of their indices, other leaves with None.
    ValueError if :func:`describe` never returns this.
    """
    match description:
        case None:
            return
        case str() if description == (path or _ROOT):
            yield description, None
            return
        case {"slices": [values, indices], "dense_shape": shape} if (
            len(description) == 2
            and values == _joined(path, "values")
            and indices == _joined(path, "indices")
            and (shape is None or _is_shape(shape))
        ):
            yield values, indices
            yield indices, None
            return
        case {"list": [*parts]} | {"tuple": [*parts]} if len(description) == 1:
            children: list[Any] = list(enumerate(parts))
        case {"dict": [*children]} if len(description) == 1:
            pass
        case _:
            raise ValueError(f"its structure has {reprlib.repr(description)} at {path!r}")
    keys = []
    for child in children:
        match child:
            case [str() | int() as key, part]:
                keys.append(key)
                yield from names_in(part, _joined(path, str(key)))
            case _:
                raise ValueError(f"its structure has {reprlib.repr(child)} in a dict")
    if len(set(keys)) < len(keys):
        raise ValueError(f"its structure has a key twice at {path!r}")


def _is_shape(value: object) -> bool:
    return type(value) is list and all(type(n) is int and n >= 0 for n in value)


def rebuild(description: Any, leaves: Mapping[str, Any]) -> PyTree:
    """Rebuild a tree from its description and its leaves."""
    if description is None:
        return None
    if isinstance(description, str):
        return leaves[description]
    kind, parts = next(iter(description.items()))
    if kind == "slices":
        children = tuple(leaves[name] for name in parts)
        counts = [len(child) for child in children]
        if counts[0] != counts[1]:
            raise InvalidArgumentError(
                f"rows would leave {counts[0]} values and {counts[1]} indices of "
                f"IndexedSlices; ask for the same rows of {parts[0]!r} and {parts[1]!r}"
            )
        # By their structure, as the children need not be arrays of JAX.
        dense_shape = description["dense_shape"]
        shape = None if dense_shape is None else tuple(dense_shape)
        empty = jnp.zeros((0, *(shape or ())[1:])), jnp.zeros(0, jnp.int32)
        structure: Any = jax.tree.structure(IndexedSlices(*empty, shape))
        return structure.unflatten(children)
    if kind == "dict":
        return {key: rebuild(part, leaves) for key, part in parts}
    return {"list": list, "tuple": tuple}[kind](rebuild(part, leaves) for part in parts)
