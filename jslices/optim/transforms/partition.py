"""Different transformations for different parameters.

:func:`partition` gives every parameter the transformation of its label; :func:`masked`
transforms some parameters' gradients and leaves the others as they are. As in Optax, a
transformation sees the whole tree, with an empty node, :class:`MaskedNode`, in place of
every parameter that is not its own.
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax

from jslices._jax import broadcast_prefix, flatten
from jslices._typing import Gradients, Params, PyTree, State, Transformation
from jslices.optim.engine.constructors import combinator
from jslices.optim.engine.protocol import GradientTransformation, is_leaf, paths_of
from jslices.optim.engine.transformation import check_fields
from jslices.optim.transforms.base import Call, as_transformation, stateless, wrapped


class MaskedNode(NamedTuple):
    """Replaces a left-out parameter in a tree: a node without children."""


class MaskedState(NamedTuple):
    """State of :func:`masked`, with the names of Optax."""

    inner_state: Any  #: the state of the transformation.


class PartitionState(NamedTuple):
    """State of :func:`partition`, with the names of Optax."""

    inner_states: Any  #: a dict from labels to :class:`MaskedState`.


@combinator
def partition(
    transforms: Mapping[Hashable, Any],
    param_labels: PyTree,
    *,
    mask_compatible_extra_args: bool = False,
) -> GradientTransformation:
    """Gives every parameter the transformation of its label.

    As ``optax.partition``, for gradients in which an IndexedSlices is one leaf. Untouched
    rows, duplicates and out-of-range indices are treated as each parameter's own
    transformation treats them.

    Args:
      transforms: a dict from labels to transformations, of jslices or of Optax.
      param_labels: labels in the structure of the parameters or a prefix of it, or a
        function from parameters to that. If ``update`` is not given the parameters, the
        function gets a ``jax.ShapeDtypeStruct`` for each gradient instead.
      mask_compatible_extra_args: whether extra arguments of ``update`` that have the
        structure of the parameters are divided up as well.

    Returns:
      A :class:`GradientTransformation` whose ``apply``, ``catch_up`` and ``flush`` call
      those of the transformations; ``ids`` mirrors all parameters. Its state is
      ``PartitionState(inner_states)``, where ``inner_states[label].inner_state`` is the
      state of that transformation: leaves and key paths are those of ``optax.partition``.

    Raises:
      TypeError: for anything but transformations in ``transforms``.
      ValueError: for parameters whose label has no transformation, or labels in another
        structure; from ``update``, for a function if neither the parameters nor all
        gradients are there.

    Cost: that of the transformations.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js, optax
      >>> params = {"table": jnp.zeros((4, 1)), "w": jnp.zeros(2)}
      >>> labels = lambda params: jax.tree.map(
      ...     lambda p: "table" if p.ndim == 2 else "dense", params)
      >>> tx = js.optim.partition(
      ...     {"table": js.rowwise_adagrad(0.5), "dense": optax.sgd(1.0)}, labels)
      >>> rows = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([2]), (4, 1))
      >>> grads = {"table": rows, "w": jnp.ones(2)}
      >>> params, state = tx.apply(grads, tx.init(params), params)
      >>> params["table"].ravel(), params["w"]
      (Array([ 0. ,  0. , -0.5,  0. ], dtype=float32), Array([-1., -1.], dtype=float32))

    Source: ``optax.partition``. It calls label functions with the gradients; mapped over
    slices, their labels end in "different types at key path".
    """
    if not isinstance(transforms, Mapping):
        raise TypeError(
            "partition(transforms=...) wants a dict from labels to transformations, got a "
            f"{type(transforms).__name__}"
        )
    return _by_label(
        "partition(param_labels=...)",
        {label: as_transformation("partition", tx) for label, tx in transforms.items()},
        param_labels,
        PartitionState,
        lambda states: PartitionState({k: MaskedState(s) for k, s in states.items()}),
        lambda state: {k: part.inner_state for k, part in state.inner_states.items()},
        mask_compatible_extra_args,
    )


@combinator
def masked(
    inner: Transformation, mask: PyTree, *, mask_compatible_extra_args: bool = False
) -> GradientTransformation:
    """Transforms the gradients of some parameters, and leaves the others as they are.

    As ``optax.masked``, for gradients in which an IndexedSlices is one leaf. Where the mask
    is False the updates are the gradients, unchanged; to give those parameters another
    transformation, use :func:`partition`. Untouched rows, duplicates, out-of-range indices
    and errors are those of :func:`partition`.

    Args:
      inner: a transformation of jslices or of Optax.
      mask: bools in the structure of the parameters or a prefix of it, or a function from
        parameters to that, called as label functions are.
      mask_compatible_extra_args: whether extra arguments of ``update`` that have the
        structure of the parameters are masked as well.

    Returns:
      A :class:`GradientTransformation` with the functions of ``inner``. Its state is
      ``MaskedState(inner_state)``: leaves and key paths are those of ``optax.masked``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> params = {"table": jnp.zeros((4, 2)), "w": jnp.zeros(2)}
      >>> clip = js.optim.clip_row_norms(1.0)
      >>> tables = {"table": True, "w": False}
      >>> tx = js.optim.chain(js.optim.masked(clip, tables), js.sgd(1.0))
      >>> rows = js.IndexedSlices(jnp.array([[3., 4.]]), jnp.array([2]), (4, 2))
      >>> grads = {"table": rows, "w": jnp.array([5., 5.])}
      >>> params, state = tx.apply(grads, tx.init(params), params)
      >>> params["table"][2], params["w"]
      (Array([-0.6, -0.8], dtype=float32), Array([-5., -5.], dtype=float32))

    Source: ``optax.masked``, which calls mask functions with the gradients.
    """
    return _by_label(
        "masked(mask=...)",
        {True: as_transformation("masked", inner), False: stateless(lambda grads: grads)},
        mask,
        MaskedState,
        lambda states: MaskedState(states[True]),
        lambda state: {True: state.inner_state, False: ()},
        mask_compatible_extra_args,
    )


def _by_label(
    argument: str,
    transforms: Mapping[Hashable, GradientTransformation],
    labels: PyTree,
    state_type: type[tuple[State, ...]],
    pack: Callable[[dict[Hashable, State]], State],
    unpack: Callable[[State], Mapping[Hashable, State]],
    mask_extra_args: bool,
) -> GradientTransformation:
    """The transformation that runs each of ``transforms`` on the leaves of its label.

    ``pack`` makes a ``state_type`` of a dict of states; ``unpack`` is its inverse.
    """

    def init(params: Params) -> State:
        if not flatten(params, is_leaf=is_leaf)[0]:
            # Without parameters, or for the node that optax.tree.map_params has in place of
            # all of them, the tree goes to every transformation, whatever the labels are.
            return pack({label: tx.init(params) for label, tx in transforms.items()})
        parts = _Parts(argument, transforms, labels, params)
        return pack({k: tx.init(parts.of(k, params)) for k, tx in transforms.items()})

    def inside(
        call: Call, state: State, params: Params, grads: Gradients = None
    ) -> tuple[PyTree, State]:
        check_fields(argument, state, state_type)
        parts, states = _Parts(argument, transforms, labels, params, grads), unpack(state)
        done = {
            label: call(tx, functools.partial(parts.of, label), states[label])
            for label, tx in transforms.items()
        }
        results = {label: result for label, (result, _) in done.items()}
        new = pack({label: state for label, (_, state) in done.items()})
        return parts.joined(results), new

    catches_up = any(tx.catches_up for tx in transforms.values())
    return wrapped(
        init,
        inside,
        catches_up=catches_up,
        share_extra_args=mask_extra_args,
        peeks=all(tx.peeks for tx in transforms.values() if tx.catches_up),
    )


class _Parts:
    """The leaves of a tree by label.

    Attributes:
      tree: the structure of the parameters, in which None and slices are leaves.
      labels: the label of each leaf.
    """

    def __init__(
        self,
        argument: str,
        transforms: Mapping[Hashable, GradientTransformation],
        labels: PyTree,
        params: Params,
        grads: Gradients = None,
    ) -> None:
        """The labels of ``params``, or of ``grads`` if ``params`` is None."""
        reference = grads if params is None else params
        leaves, self.tree = flatten(reference, is_leaf=is_leaf)
        if _is_label_function(labels):
            if params is None:
                reference = self.tree.unflatten(_shapes_of(argument, leaves))
            labels = labels(reference)
        text = f"{argument} must have the structure of the parameters or a prefix of it"
        self.labels = broadcast_prefix(labels, reference, text, is_leaf)
        self._refuse_unknown(argument, transforms, leaves)

    def _refuse_unknown(
        self, argument: str, transforms: Mapping[Hashable, Any], leaves: list[Any]
    ) -> None:
        """Raises if a leaf other than None has a label without a transformation."""
        paths = paths_of(self.tree)
        wrong = [
            f"{label!r}{path or ' at the root'}"
            for path, label, leaf in zip(paths, self.labels, leaves, strict=True)
            if leaf is not None and label not in transforms
        ]
        if wrong:
            raise ValueError(
                f"{argument}: wanted one of {list(transforms)} for each parameter, got "
                f"{', '.join(wrong)}"
            )

    def of(self, label: Hashable, tree: PyTree) -> PyTree:
        """``tree``, which mirrors the parameters, with the leaves of one label only."""
        if tree is None:
            return None
        pairs = zip(self.tree.flatten_up_to(tree), self.labels, strict=True)
        return self.tree.unflatten(
            [x if own == label else MaskedNode() for x, own in pairs]
        )

    def joined(self, results: Mapping[Hashable, PyTree]) -> PyTree:
        """Each leaf from the result of its label; None where it has none."""
        columns = {k: self.tree.flatten_up_to(tree) for k, tree in results.items()}
        return self.tree.unflatten(
            [
                columns[label][i] if label in columns else None
                for i, label in enumerate(self.labels)
            ]
        )


def _shapes_of(argument: str, grads: list[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes for a label function, in place of parameters."""
    if any(g is None for g in grads):
        raise ValueError(
            f"{argument} is a function of the parameters, and not every gradient is there "
            "to tell their shapes; pass the parameters: tx.update(grads, state, params)"
        )
    return [jax.ShapeDtypeStruct(g.shape, g.dtype) for g in grads]


def _is_label_function(labels: PyTree) -> bool:
    """True for a function; not for a module of labels that can be called."""
    leaves = jax.tree.leaves(labels)
    return callable(labels) and all(map(callable, leaves))
