"""Different transformations for different parameters.

:func:`partition` gives every parameter the transformation of its label; :func:`masked`
transforms some parameters' gradients and leaves the others as they are. As in Optax, a
transformation sees the whole tree, with an empty node, :class:`MaskedNode`, in place of
every parameter that is not its own.
"""

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax

from jslices._jax import flatten
from jslices.optim._engine.checks import check_fields
from jslices.optim._engine.protocol import GradientTransformation, apply_updates, is_leaf
from jslices.optim._engine.recipe import recorded
from jslices.optim.transforms.chain import as_transformation


class MaskedNode(NamedTuple):
    """Stands in a tree for a parameter that is left out: a node without children."""


class MaskedState(NamedTuple):
    """State of :func:`masked`, with the names of Optax."""

    inner_state: Any  #: the state of the transformation.


class PartitionState(NamedTuple):
    """State of :func:`partition`, with the names of Optax."""

    inner_states: Any  #: a dict from labels to :class:`MaskedState`.


@recorded
def partition(
    transforms: Mapping[Hashable, Any],
    param_labels: Any,
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
    return _split(
        "partition(param_labels=...)",
        {label: as_transformation("partition", tx) for label, tx in transforms.items()},
        param_labels,
        PartitionState,
        lambda states: PartitionState({k: MaskedState(s) for k, s in states.items()}),
        lambda state: {k: part.inner_state for k, part in state.inner_states.items()},
        mask_compatible_extra_args,
    )


@recorded
def masked(
    inner: Any, mask: Any, *, mask_compatible_extra_args: bool = False
) -> GradientTransformation:
    """Transforms the gradients of some parameters, and leaves the others as they are.

    As ``optax.masked``, for gradients in which an IndexedSlices is one leaf. Where the mask
    is False the updates are the gradients, unchanged; to give those parameters another
    transformation, use :func:`partition`. Untouched rows, duplicates and out-of-range
    indices are treated as ``inner`` treats them.

    Args:
      inner: a transformation of jslices or of Optax.
      mask: bools in the structure of the parameters or a prefix of it, or a function from
        parameters to that. If ``update`` is not given the parameters, the function gets a
        ``jax.ShapeDtypeStruct`` for each gradient instead.
      mask_compatible_extra_args: whether extra arguments of ``update`` that have the
        structure of the parameters are masked as well.

    Returns:
      A :class:`GradientTransformation` whose ``apply``, ``catch_up`` and ``flush`` call
      those of ``inner``; ``ids`` mirrors all parameters. Its state is
      ``MaskedState(inner_state)``: leaves and key paths are those of ``optax.masked``.

    Raises:
      TypeError: if ``inner`` is not a transformation.
      ValueError: for a mask in another structure, or of anything but bools; from
        ``update``, for a function if neither the parameters nor all gradients are there.

    Cost: that of ``inner``.

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

    Source: ``optax.masked``. It calls mask functions with the gradients; mapped over
    slices, their masks end in "different types at key path".
    """
    return _split(
        "masked(mask=...)",
        {True: as_transformation("masked", inner), False: None},
        mask,
        MaskedState,
        lambda states: MaskedState(states[True]),
        lambda state: {True: state.inner_state},
        mask_compatible_extra_args,
    )


def _split(
    argument: str,
    transforms: Mapping[Hashable, GradientTransformation | None],
    labels: Any,
    state_type: Any,
    pack: Callable[[dict[Any, Any]], Any],
    unpack: Callable[[Any], Mapping[Any, Any]],
    mask_extra_args: bool,
) -> GradientTransformation:
    """The transformation that runs each of ``transforms`` on the leaves of its label.

    A label with None instead of a transformation leaves updates as they are. ``pack`` makes
    one state, a ``state_type``, of a dict of states; ``unpack`` is its inverse.
    """
    active = {label: tx for label, tx in transforms.items() if tx is not None}

    def init(params: Any) -> Any:
        if not flatten(params, is_leaf=is_leaf)[0]:
            # Of no parameters, or of the node that optax.tree.map_params has for all of
            # them: whatever the labels are, it goes to every transformation.
            return pack({label: tx.init(params) for label, tx in active.items()})
        parts = _Parts(argument, transforms, labels, params)
        return pack({k: tx.init(parts.of(k, params)) for k, tx in active.items()})

    def each(
        parts: _Parts,
        run: Callable[[Any, GradientTransformation, Any], tuple[Any, Any]],
        state: Any,
        others: Any,
    ) -> tuple[Any, Any]:
        """The results of all transformations in one tree, beside their states."""
        check_fields(argument, state, state_type)
        states = unpack(state)
        done = {label: run(label, tx, states[label]) for label, tx in active.items()}
        results = {label: result for label, (result, _) in done.items()}
        new = pack({label: state for label, (_, state) in done.items()})
        return parts.joined(results, others), new

    def update(
        grads: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        parts = _Parts(argument, transforms, labels, params, grads)

        def run(label: Any, tx: GradientTransformation, inner: Any) -> tuple[Any, Any]:
            extra = extra_args if _takes_extra_args(tx) else {}
            if mask_extra_args:
                extra = {
                    name: parts.of(label, x) if parts.fits(x) else x
                    for name, x in extra.items()
                }
            mine = None if params is None else parts.of(label, params)
            return tx.update(parts.of(label, grads), inner, mine, **extra)

        return each(parts, run, state, grads)

    def apply(grads: Any, state: Any, params: Any, key: Any = None) -> tuple[Any, Any]:
        parts = _Parts(argument, transforms, labels, params, grads)

        def run(label: Any, tx: GradientTransformation, inner: Any) -> tuple[Any, Any]:
            mine = parts.of(label, params)
            return tx.apply(parts.of(label, grads), inner, mine, key)

        others = apply_updates(params, parts.without(active, grads), key)
        return each(parts, run, state, others)

    def catch_up(params: Any, state: Any, ids: Any) -> tuple[Any, Any]:
        parts = _Parts(argument, transforms, labels, params)

        def run(label: Any, tx: GradientTransformation, inner: Any) -> tuple[Any, Any]:
            return tx.catch_up(parts.of(label, params), inner, parts.of(label, ids))

        return each(parts, run, state, params)

    def flush(params: Any, state: Any) -> tuple[Any, Any]:
        parts = _Parts(argument, transforms, labels, params)

        def run(label: Any, tx: GradientTransformation, inner: Any) -> tuple[Any, Any]:
            return tx.flush(parts.of(label, params), inner)

        return each(parts, run, state, params)

    if not any(tx.catches_up for tx in active.values()):
        return GradientTransformation(init, update, apply=apply)
    return GradientTransformation(init, update, catch_up, flush, apply)


class _Parts:
    """Which leaves of a tree belong to which label.

    Attributes:
      tree: the structure of the parameters, in which None and slices are leaves.
      labels: the label of each leaf.
    """

    def __init__(
        self, argument: str, known: Any, labels: Any, params: Any, grads: Any = None
    ) -> None:
        """The labels of ``params``, or of ``grads`` if ``params`` is None."""
        reference = grads if params is None else params
        leaves, self.tree = flatten(reference, is_leaf=is_leaf)
        if _is_function(labels):
            if params is None:
                reference = self.tree.unflatten(_shapes(argument, leaves))
            labels = labels(reference)
        self.labels: list[Any] = []

        def spread(label: Any, part: Any) -> None:
            self.labels.extend([label] * len(flatten(part, is_leaf=is_leaf)[0]))

        try:
            jax.tree.map(spread, labels, reference, is_leaf=lambda x: x is None)
        except ValueError as error:
            raise ValueError(
                f"{argument} must have the structure of the parameters or a prefix of it; "
                f"{error}"
            ) from error
        self._refuse_unknown(argument, known, leaves)

    def _refuse_unknown(self, argument: str, known: Any, leaves: list[Any]) -> None:
        """Raises if a leaf other than None has a label that is not in ``known``."""
        paths = jax.tree_util.tree_flatten_with_path(
            self.tree.unflatten(range(len(leaves)))
        )[0]
        wrong = [
            f"{label!r} at {jax.tree_util.keystr(path) or 'the root'}"
            for (path, _), label, leaf in zip(paths, self.labels, leaves, strict=True)
            if leaf is not None and label not in known
        ]
        if wrong:
            raise ValueError(
                f"{argument}: wanted one of {list(known)} for each parameter, got "
                f"{', '.join(wrong)}"
            )

    def of(self, label: Any, tree: Any) -> Any:
        """``tree``, which mirrors the parameters, with the leaves of one label only."""
        pairs = zip(self.tree.flatten_up_to(tree), self.labels, strict=True)
        return self.tree.unflatten(
            [x if own == label else MaskedNode() for x, own in pairs]
        )

    def without(self, labels: Any, tree: Any) -> Any:
        """``tree`` with None for the leaves of these labels."""
        pairs = zip(self.tree.flatten_up_to(tree), self.labels, strict=True)
        return self.tree.unflatten([None if own in labels else x for x, own in pairs])

    def joined(self, results: Mapping[Any, Any], others: Any) -> Any:
        """Each leaf from the result of its label; from ``others`` where there is none."""
        columns = {k: self.tree.flatten_up_to(tree) for k, tree in results.items()}
        rest = self.tree.flatten_up_to(others)
        return self.tree.unflatten(
            [columns.get(label, rest)[i] for i, label in enumerate(self.labels)]
        )

    def fits(self, tree: Any) -> bool:
        """Whether ``tree`` mirrors the parameters."""
        return bool(flatten(tree, is_leaf=is_leaf)[1] == self.tree)


def _shapes(argument: str, grads: list[Any]) -> list[Any]:
    """What a label function gets in place of parameters."""
    if any(g is None for g in grads):
        raise ValueError(
            f"{argument} is a function of the parameters, and not every gradient is there "
            "to tell their shapes; pass the parameters: tx.update(grads, state, params)"
        )
    return [jax.ShapeDtypeStruct(g.shape, g.dtype) for g in grads]


def _is_function(labels: Any) -> bool:
    """True for a function; not for a module of labels that can be called."""
    leaves = jax.tree.leaves(labels)
    return callable(labels) and all(map(callable, leaves))


def _takes_extra_args(tx: GradientTransformation) -> bool:
    kinds = (p.kind for p in inspect.signature(tx.update).parameters.values())
    return inspect.Parameter.VAR_KEYWORD in kinds
