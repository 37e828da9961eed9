"""A name for every leaf of a pytree, and the choice of some of them."""

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax

from jslices._errors import InvalidArgumentError, NotFoundError

_ODD = re.compile("[\0\ud800-\udfff]")  # safetensors keeps neither

#: The name of a tree that is a single leaf.
ROOT = "value"


def named_leaves(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[str], list[Any], Any]:
    """The names of the leaves, the leaves, and the structure of the tree.

    A name is the path of the leaf, its parts joined by ``/``: ``"params/dense/w"``,
    ``"state/0/mu/table"``.

    Raises:
      InvalidArgumentError: if two leaves have one name, or a name could not be kept.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    names = ["/".join(map(key_text, path)) or ROOT for path, _ in pairs]
    check_names(names)
    twice = (
        sorted({name for name in names if names.count(name) > 1})
        if (len(set(names)) < len(names))
        else []
    )
    if twice:
        raise InvalidArgumentError(
            f"two variables would be saved under one name: {twice}. A key that holds a "
            "'/' means the same as a dict within a dict; rename one of them"
        )
    return names, [leaf for _, leaf in pairs], structure


def bare_name(name: str) -> str:
    """``"foo/v"`` for ``"foo/v"`` and for TensorFlow's ``"foo/v:0"``."""
    return name.removesuffix(":0")


def is_handle(x: Any) -> bool:
    """Whether ``x`` stands for a variable: it has a ``name`` and a ``read_value()``.

    These are TensorFlow's names, which ``jslices.tf1.Variable`` has as well.
    """
    return hasattr(type(x), "read_value") and hasattr(type(x), "name")


def plain(tree: Any) -> Any:
    """A tree with arrays in the places of handles."""
    return jax.tree.map(
        lambda x: x.read_value() if is_handle(x) else x, tree, is_leaf=is_handle
    )


def key_text(key: Any) -> str:
    """One step of a path, as it stands in a name."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def check_names(names: Iterable[str], where: str = "") -> None:
    """Refuses names that would mean something else as a path."""
    bad = [n for n in names if n.startswith("/") or _ODD.search(n) or ".." in n.split("/")]
    if bad:
        raise InvalidArgumentError(
            f"{where}variables cannot have the names {bad}: neither a leading '/' nor "
            "'..', a NUL or half a character (surrogate) may stand in a name"
        )


def found_name(name: str, available: Container[str]) -> str:
    """The name as it stands in ``available``, where TensorFlow's ``:0`` may be missing."""
    return name if name in available else bare_name(name)


def choose(available: Sequence[str], var_list: Any, where: str) -> dict[str, str]:
    """What is saved, as ``{name in the checkpoint: name in the variables}``.

    A name stands for the leaf of that name, or for every leaf below it.

    Raises:
      NotFoundError: if there is no such variable.
    """
    if var_list is None:
        return {name: name for name in available}
    known = set(available)
    if not isinstance(var_list, Mapping):
        var_list = {found_name(n, known): n for n in var_list}
    chosen: dict[str, str] = {}
    missing = []
    for saved, name in var_list.items():
        name = found_name(name, known)
        if name in known:
            found = {saved: name}
        else:
            below = [n for n in available if n.startswith(f"{name}/")]
            found = {saved + n[len(name) :]: n for n in below}
        if not found:
            missing.append(name)
        chosen.update(found)
    if missing:
        raise NotFoundError(
            f"{where} no variables of the names {missing}; there are {brief(available)}"
        )
    return chosen


def check_var_list(var_list: Any, allow_empty: bool) -> Any:
    """A list or dict of names, copied; TensorFlow's complaints about anything else."""
    if var_list is None:
        return None
    if not isinstance(var_list, list | tuple | Mapping):
        raise TypeError(
            "var_list must be a list of names, or a dict {name in the checkpoint: name in "
            f"the variables}}, not {type(var_list).__name__}"
        )
    if isinstance(var_list, Mapping):
        var_list = {saved: _name_of(v) for saved, v in var_list.items()}
    else:
        var_list = [_name_of(v) for v in var_list]
    names = list(var_list.values()) if isinstance(var_list, Mapping) else var_list
    strange = [n for n in [*names, *var_list] if not isinstance(n, str)]
    if strange:
        raise TypeError(
            f"var_list must hold names, such as 'params/table', or the handles that "
            f"get_variable gives, not {strange[0]!r}; the variables themselves are given "
            "to save and restore"
        )
    if not names and not allow_empty:
        raise ValueError("No variables to save: var_list is empty")
    bare = [bare_name(n) for n in names]
    twice = sorted({n for n in bare if bare.count(n) > 1})
    if twice:
        raise ValueError(f"var_list names {twice} twice; one variable has one name")
    check_names(var_list, "in a checkpoint ")
    return var_list


def _name_of(variable: Any) -> Any:
    """The name of a handle, which outlives the handle's value."""
    return bare_name(variable.name) if is_handle(variable) else variable


def brief(names: Iterable[str], most: int = 12) -> str:
    """The names, or the first of them."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{names[:most]}{more}"
