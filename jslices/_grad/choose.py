"""Which leaves may be sparse: the ``sparse=`` argument, and what to say when one is not."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices import _jax
from jslices._densify import (
    UNKNOWN_LINE,
    DenseUseError,
    UserLine,
    human_bytes,
    raise_at,
    warn_dense,
)
from jslices._grad.advice import instead_of
from jslices._grad.walk import DenseUse, Site

#: ``sparse=``: one bool for all, a pytree prefix of bools, or a function of a leaf.
SparseSpec = Any | Callable[[Any, Any], bool | None] | None


class Leaf(NamedTuple):
    """One differentiated array."""

    name: str
    path: Any
    aval: Any
    #: True: must be sparse. False: must be dense. None: as the program has it.
    forced: bool | None

    @property
    def can_be_sparse(self) -> bool:
        return self.aval.ndim > 0 and jnp.issubdtype(self.aval.dtype, jnp.inexact)

    @property
    def num_bytes(self) -> int:
        return self.aval.size * self.aval.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} ({self.aval.str_short()})"


def describe_leaves(
    tree: Any, roots: Sequence[str], single: bool, spec: SparseSpec
) -> list[Leaf]:
    """A Leaf for every array of ``tree``, the tuple of differentiated arguments.

    Args:
      tree: the arguments, one entry per root.
      roots: their names, for messages.
      single: True where ``argnums`` was one number: ``spec`` then speaks of that
        argument, otherwise of the tuple.
      spec: ``sparse=``.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    forced = _broadcast(tree, single, spec)
    leaves = []
    for (path, leaf), force in zip(paths, forced, strict=True):
        name = roots[path[0].idx] + jax.tree_util.keystr(path[1:])
        if callable(spec):
            force = spec(path[1:] if single else path, leaf)
        if not (force is None or isinstance(force, bool)):
            raise TypeError(
                f"sparse= must give True, False or None for each array, got {force!r} "
                f"for {name}"
            )
        leaves.append(Leaf(name, path, jax.typeof(leaf), force))
    return leaves


def _broadcast(tree: Any, single: bool, spec: SparseSpec) -> list[Any]:
    if callable(spec):
        spec = None
    if spec is None or isinstance(spec, bool):
        return [spec] * len(jax.tree.leaves(tree))
    prefix = (spec,) if single else spec
    forced: list[Any] = []

    def add(force: Any, subtree: Any) -> None:
        forced.extend([force] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(add, prefix, tree, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ValueError(
            "sparse= must be a bool, a function of (path, leaf), or a pytree of bools "
            "whose structure is that of the differentiated argument or a prefix of it: "
            f"{error}"
        ) from None
    return forced


def report_dense(
    leaves: Sequence[Leaf], dense: dict[int, DenseUse], looked_up: dict[int, list[Site]]
) -> None:
    """Warns of leaves that are looked up but also used whole; raises if one was forced.

    Args:
      leaves: all differentiated leaves.
      dense: why a leaf that could have been sparse is not.
      looked_up: for every leaf the places that look rows of it up.
    """
    for number, leaf in enumerate(leaves):
        use = dense.get(number)
        if leaf.forced and not leaf.can_be_sparse:
            raise DenseUseError(
                f"sparse= asks for a sparse gradient of {leaf}, but only a floating "
                "array with at least one axis has rows; leave it out of sparse="
            )
        if use is None:
            continue
        line = UNKNOWN_LINE if use.eqn is None else _jax.user_line(use.eqn)
        sites = looked_up.get(number, [])
        if leaf.forced:
            message = (
                f"sparse= asks for a sparse gradient of {leaf}, but it is used whole "
                f"({use.what}) at {line}. Instead: {instead_of(use.what)}"
            )
            raise_at(line, DenseUseError(message))
        if sites:
            warn_dense(_mixed_use(leaf, use, line, sites), line)


def _mixed_use(leaf: Leaf, use: DenseUse, line: UserLine, sites: list[Site]) -> str:
    rows = sum(site.total for site in sites)
    row_bytes = leaf.num_bytes // max(leaf.aval.shape[0], 1)
    places = ", ".join(dict.fromkeys(str(_jax.user_line(s.eqn)) for s in sites))
    return (
        f"the gradient of {leaf} is dense, {human_bytes(leaf.num_bytes)}, because it is "
        f"used whole ({use.what}) at {line}. Its lookups alone ({places}) would give "
        f"{rows} rows, {human_bytes(rows * row_bytes)}. Instead: "
        f"{instead_of(use.what)}. To accept it: sparse=False"
    )
