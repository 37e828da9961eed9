"""Parameters in boxes of Flax, which name their axes (``nn.with_partitioning``).

An optimizer steps what is in the boxes. The arrays of its state are in boxes as well, which
do not name the axes that an array lacks.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jslices._jax import flatten
from jslices._slices import is_slices
from jslices._typing import PyTree

F = TypeVar("F", bound=Callable[..., Any])
Start = Callable[[jax.Array], jax.Array]


def is_box(x: object) -> bool:
    """Whether it is a box: a pytree node with one child, and metadata of each axis."""
    meta: Any = sys.modules.get("flax.core.meta")
    return meta is not None and isinstance(x, meta.AxisMetadata)


def _is_leaf(x: object) -> bool:
    return is_box(x) or is_slices(x) or x is None


def _has_boxes(tree: PyTree) -> bool:
    loaded = "flax.core.meta" in sys.modules
    return loaded and any(map(is_box, jax.tree.leaves(tree, is_leaf=_is_leaf)))


def unboxed(tree: PyTree) -> Any:
    """The tree with what is in the boxes in their place."""
    return jax.tree.map(_content, tree, is_leaf=_is_leaf) if _has_boxes(tree) else tree


def _content(x: Any) -> Any:
    # `unbox` would constrain how it is split.
    return jax.tree.leaves(x, is_leaf=lambda part: part is not x)[0] if is_box(x) else x


def boxed_as(boxes: PyTree, tree: PyTree) -> Any:
    """A tree without boxes in the boxes of another."""

    put = lambda box, x: box.replace_boxed(x) if is_box(box) else x  # noqa: E731
    return jax.tree.map(put, boxes, tree, is_leaf=_is_leaf)


def boxed_anew(params: PyTree, starts: Sequence[Start], tree: PyTree) -> Any:
    """The state arrays that start so, in the boxes of the parameters."""
    if not _has_boxes(params):
        return tree
    boxes, structure = flatten(params, is_leaf=is_box)
    pairs = zip(boxes, starts, strict=True)
    return boxed_as(structure.unflatten([_less(*pair) for pair in pairs]), tree)


def _less(box: Any, start: Start) -> Any:
    """The box without the axes that a state array lacks which starts so."""
    if not is_box(box):
        return box
    shape = _content(box).shape
    # Other sizes tell the axes apart; the longest is the longest still.
    apart = tuple(n * len(shape) + i for i, n in enumerate(shape))
    real, sizes = (
        jax.eval_shape(start, jax.ShapeDtypeStruct(x, np.float32)).shape
        for x in (shape, apart)
    )
    left = [apart.index(n) for n in sizes if n in apart]
    if real != tuple(shape[axis] for axis in left):
        left = []  # a placeholder
    return with_axes(box, left)


def with_axes(box: Any, left: Sequence[int]) -> Any:
    """The box, which names the axes that are ``left`` alone."""
    names = getattr(box, "names", ())
    for axis in reversed(range(len(names))):
        if axis not in left:
            box = box.remove_axis(axis, {"partition_name": names[axis]})
    return box


def within_boxes(*like: int) -> Callable[[F], F]:
    """Let a method take boxes; its results are in those of these arguments."""

    def decorate(fun: F) -> F:
        @functools.wraps(fun)
        def without_boxes(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _has_boxes((args, kwargs)):
                return fun(self, *args, **kwargs)
            results = fun(self, *unboxed(args), **unboxed(kwargs))
            boxes = [args[i] for i in like]
            return boxed_as(boxes[0] if len(like) == 1 else tuple(boxes), results)

        return without_boxes  # type: ignore[return-value]

    return decorate
