"""Reading a checkpoint into a tree."""

from collections.abc import Mapping
from typing import Any

import jax

from jslices._errors import InvalidArgumentError, NotFoundError
from jslices.checkpoint.archive import Archive
from jslices.checkpoint.names import brief, choose, named_leaves
from jslices.checkpoint.place import misfit, original, place
from jslices.checkpoint.ranges import narrow_to_rows
from jslices.checkpoint.structure import rebuild


def restore_all(archive: Archive, var_list: Any, rows: Any = None) -> Any:
    """Everything, as it was saved, or of some tables some rows."""
    if var_list is None:
        if rows is not None:
            narrow_to_rows(archive, rows, {name: name for name in archive.specs})
        leaves = {name: original(archive, name) for name in archive.specs}
        return rebuild(archive.structure, leaves) if archive.has_structure else leaves
    inverse = var_list
    if isinstance(inverse, Mapping):
        inverse = {name: saved for saved, name in inverse.items()}
    chosen = choose(list(archive.specs), inverse, f"{archive.prefix} holds")
    if rows is not None:
        narrow_to_rows(archive, rows, chosen)
    return {name: original(archive, saved) for name, saved in chosen.items()}


def restore_into(
    archive: Archive, variables: Any, var_list: Any, reshape: bool, rows: Any = None
) -> Any:
    """What ``variables`` holds, as the kind of thing that each leaf is."""
    names, templates, structure = named_leaves(variables)
    chosen = choose(names, var_list, "the variables hold")
    saved_as = {name: saved for saved, name in chosen.items()}
    missing = sorted(saved for saved in chosen if saved not in archive.specs)
    if missing:
        raise NotFoundError(
            f"Restoring from checkpoint failed: {archive.prefix} holds no {missing}; "
            f"it holds {brief(archive.specs)}"
        )
    if rows is not None:
        narrow_to_rows(archive, rows, saved_as)
    problems = []
    for name, template in zip(names, templates, strict=True):
        if name in saved_as:
            spec = archive.specs[saved_as[name]]
            problems.append(misfit(name, spec, template, reshape))
    if any(problems):
        raise InvalidArgumentError(
            f"Restoring from checkpoint failed: in {archive.prefix} "
            + "; ".join(problem for problem in problems if problem)
        )
    leaves = [
        place(archive, saved_as[name], template) if name in saved_as else template
        for name, template in zip(names, templates, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)
