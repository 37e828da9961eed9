"""Parameters in boxes, which name their axes: of Flax, Haliax, penzai, or registered.

An optimizer steps what is in the boxes. The arrays of its state are in boxes as well, which
do not name the axes that an array lacks.
"""

import dataclasses
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
Axes = Sequence[int]


@functools.singledispatch
def with_axes(box: Any, left: Axes, array: Any) -> Any:
    """A box of an array that has the axes ``left`` of those that ``box`` names."""
    raise TypeError(f"{type(box)} is no box")


def register_box(kind: type, with_axes_of: Callable[[Any, Axes, Any], Any]) -> None:
    """Let optimizers take parameters in boxes of a class.

    Args:
      kind: a pytree node with one child, the array, and names of its axes.
      with_axes_of: ``with_axes_of(box, left, array)``, a box for an array of a state with
        the axes ``left`` of those in ``box``: ``[0]`` for a number a row, ``[]`` for a
        scalar. ``tx.init`` calls it for arrays that have fewer axes than their parameter.

    Boxes that name no axes are pytrees like others: nothing is to be registered.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, jslices as js
      >>> from jslices.extend import register_box
      >>> @jax.tree_util.register_dataclass
      ... @dataclasses.dataclass
      ... class Named:
      ...     array: jax.Array
      ...     axes: tuple = dataclasses.field(metadata={"static": True})
      >>> register_box(Named, lambda x, left, a: Named(a, tuple(x.axes[i] for i in left)))
      >>> params = Named(jnp.ones((3, 2)), ("rows", "cols"))
      >>> js.rowwise_adagrad(0.1).init(params).sum_of_squares
      Named(array=Array([0., 0., 0.], dtype=float32), axes=('rows',))
    """
    with_axes.register(kind, with_axes_of)


def _of_linen(box: Any, left: Axes, array: Any) -> Any:
    names = getattr(box, "names", ())
    for axis in reversed(range(len(names))):
        if axis not in left:
            box = box.remove_axis(axis, {"partition_name": names[axis]})
    return box.replace_boxed(array)


def _of_nnx(box: Any, left: Axes, array: Any) -> Any:
    new = boxed_as(box, array)
    for key in ("out_sharding", "sharding_names", "sharding", "optimizer_sharding"):
        if names := box.get_metadata().get(key):
            new.set_metadata(key, _less_sharding(names, left))
    return new


def _less_sharding(names: Any, left: Axes) -> Any:
    """Names of axes, of which the last may be left out, or a sharding."""
    if hasattr(names, "spec"):
        return names.update(spec=_less_sharding(names.spec, left))
    if not isinstance(names, tuple | jax.P):
        return names
    kept = [names[i] for i in left if i < len(names)]
    return jax.P(*kept) if isinstance(names, jax.P) else tuple(kept)


def _of_haliax(box: Any, left: Axes, array: Any) -> Any:
    return box.tree_unflatten(tuple(box.axes[i] for i in left), [array])


def _of_penzai(box: Any, left: Axes, array: Any) -> Any:
    sizes = [*box.named_axes.items()]
    first = box.data_array.ndim - len(sizes)  # axes by position come before
    axes = type(box.named_axes)(sizes[i - first] for i in left if i >= first)
    return dataclasses.replace(box, named_axes=axes, data_array=array)


#: Boxes of libraries that are not imported yet, by module and class.
_LATER: dict[tuple[str, str], Callable[[Any, Axes, Any], Any]] = {
    ("flax.core.meta", "AxisMetadata"): _of_linen,
    ("flax.nnx", "Variable"): _of_nnx,
    ("haliax", "NamedArray"): _of_haliax,
    ("penzai.core.named_axes", "NamedArray"): _of_penzai,
}


def _are_known() -> bool:
    """Whether there are classes of boxes, after a look at what was imported since."""
    for (module, name), with_axes_of in [*_LATER.items()]:
        if kind := getattr(sys.modules.get(module), name, None):  # not half imported
            register_box(kind, with_axes_of)
            _LATER.pop((module, name), None)
    return len(with_axes.registry) > 1


_NO_BOX = with_axes.registry[object]


def is_box(x: object) -> bool:
    """Whether it is a box: a pytree node with one child, and metadata of each axis."""
    return _are_known() and _is_known(x)


def _is_known(x: object) -> bool:
    return with_axes.dispatch(type(x)) is not _NO_BOX


def _is_leaf(x: object) -> bool:
    return _is_known(x) or is_slices(x) or x is None


def _has_boxes(tree: PyTree) -> bool:
    return _are_known() and any(map(_is_known, jax.tree.leaves(tree, is_leaf=_is_leaf)))


def unboxed(tree: PyTree) -> Any:
    """The tree with what is in the boxes in their place."""
    return jax.tree.map(_content, tree, is_leaf=_is_leaf) if _has_boxes(tree) else tree


def _opened(box: Any) -> tuple[Any, Any]:
    # `unbox` of Flax would constrain how it is split.
    (content,), structure = jax.tree.flatten(box, is_leaf=lambda part: part is not box)
    return content, structure


def _content(x: Any) -> Any:
    return _opened(x)[0] if is_box(x) else x


def boxed_as(boxes: PyTree, tree: PyTree) -> Any:
    """A tree without boxes in the boxes of another."""

    def put(box: Any, x: Any) -> Any:
        return _opened(box)[1].unflatten([x]) if is_box(box) else x

    return jax.tree.map(put, boxes, tree, is_leaf=_is_leaf)


def boxed_anew(params: PyTree, starts: Sequence[Start], tree: PyTree) -> Any:
    """The state arrays that start so, in the boxes of the parameters."""
    if not _has_boxes(params):
        return tree
    boxes, structure = flatten(params, is_leaf=is_box)
    pairs, left = zip(boxes, structure.flatten_up_to(tree), strict=True), iter(starts)
    return structure.unflatten(
        [_in_box(box, x, [next(left) for _ in jax.tree.leaves(x)]) for box, x in pairs]
    )


def _in_box(box: Any, array: Any, starts: Sequence[Start]) -> Any:
    """A state array that starts so, in a box without the axes that it lacks."""
    if not (is_box(box) and starts):  # or a parameter of another label
        return array
    shape = getattr(_content(box), "shape", None)
    if shape is None:  # a tree in a box
        return boxed_as(box, array)
    (start,) = starts
    # Other sizes tell the axes apart; the longest is the longest still.
    apart = tuple(n * len(shape) + i for i, n in enumerate(shape))
    real, sizes = (
        jax.eval_shape(start, jax.ShapeDtypeStruct(x, np.float32)).shape
        for x in (shape, apart)
    )
    left = [apart.index(n) for n in sizes if n in apart]
    if real != tuple(shape[axis] for axis in left):
        left = []  # a placeholder
    if left == [*range(len(shape))]:
        return boxed_as(box, array)
    return with_axes(box, left, array)


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
