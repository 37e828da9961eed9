"""Different transformations for different parameters.

:func:`partition` gives every parameter the transformation of its label; :func:`masked`
transforms some parameters' gradients and leaves the others as they are. As in Optax, a
transformation sees the whole tree, with an empty node, :class:`MaskedNode`, in place of
every parameter that is not its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
from jax.tree_util import PyTreeDef

from jslices._arguments import is_function
from jslices._jax import broadcast_prefix, flatten
from jslices._typing import Gradients, Key, Params, PyTree, State, Transformation
from jslices.optim.engine.checks import check_fields
from jslices.optim.engine.constructors import combinator
from jslices.optim.engine.protocol import GradientTransformation, is_leaf, paths_of
from jslices.optim.transforms.base import as_transformation, renumbering, stateless

#: ``call(tx, share, state) -> (result, state)``, a function of one of the transformations;
#: ``share`` makes its share of a tree that mirrors the parameters, or of None.
_Share = Callable[[PyTree], PyTree]
_Result = tuple[PyTree, State]
_Call = Callable[[GradientTransformation, _Share, State], _Result]


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
    return _ByLabel(
        "partition(param_labels=...)",
        {label: as_transformation("partition", tx) for label, tx in transforms.items()},
        param_labels,
        PartitionState,
        lambda states: PartitionState({k: MaskedState(s) for k, s in states.items()}),
        lambda state: {k: part.inner_state for k, part in state.inner_states.items()},
        mask_compatible_extra_args,
    ).transformation()


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
      >>> clip = js.optim.clip_rows_by_norm(1.0)
      >>> tables = {"table": True, "w": False}
      >>> tx = js.optim.chain(js.optim.masked(clip, tables), js.sgd(1.0))
      >>> rows = js.IndexedSlices(jnp.array([[3., 4.]]), jnp.array([2]), (4, 2))
      >>> grads = {"table": rows, "w": jnp.array([5., 5.])}
      >>> params, state = tx.apply(grads, tx.init(params), params)
      >>> params["table"][2], params["w"]
      (Array([-0.6, -0.8], dtype=float32), Array([-5., -5.], dtype=float32))

    Source: ``optax.masked``, which calls mask functions with the gradients.
    """
    return _ByLabel(
        "masked(mask=...)",
        {True: as_transformation("masked", inner), False: stateless(lambda grads: grads)},
        mask,
        MaskedState,
        lambda states: MaskedState(states[True]),
        lambda state: {True: state.inner_state, False: ()},
        mask_compatible_extra_args,
    ).transformation()


@dataclasses.dataclass(frozen=True, eq=False)
class _ByLabel:
    """Runs each of ``transforms`` on the leaves of its label.

    ``pack`` makes a ``state_type`` of a dict of states; ``unpack`` is its inverse.
    """

    argument: str
    transforms: Mapping[Hashable, GradientTransformation]
    labels: PyTree
    state_type: type[tuple[State, ...]]
    pack: Callable[[dict[Hashable, State]], State]
    unpack: Callable[[State], Mapping[Hashable, State]]
    mask_extra_args: bool

    def transformation(self) -> GradientTransformation:
        late = [tx for tx in self.transforms.values() if tx.catches_up]
        return GradientTransformation(
            self.init,
            functools.partial(self._step, "update"),
            self.catch_up if late else None,
            apply=functools.partial(self._step, "apply"),
            plan=self.plan,
            of_rows=renumbering(self._of_rows, *self.transforms.values()),
            exact=any(tx.exact for tx in self.transforms.values()),
        )

    def _of_rows(self, *transforms: GradientTransformation) -> GradientTransformation:
        by_label = dict(zip(self.transforms, transforms, strict=True))
        return dataclasses.replace(self, transforms=by_label).transformation()

    def init(self, params: Params) -> State:
        if flatten(params, is_leaf=is_leaf)[0]:
            of = self._parts(params).of
        else:
            # Without parameters, or for the node that optax.tree.map_params has in place of
            # all of them, the tree goes to every transformation, whatever the labels are.
            of = lambda label, tree: tree  # noqa: E731
        return self.pack({k: tx.init(of(k, params)) for k, tx in self.transforms.items()})

    def plan(self, grads: Gradients, params: Params, platform: str | None = None) -> PyTree:
        def call(tx: GradientTransformation, share: _Share, state: State) -> _Result:
            return tx.plan(share(grads), share(params), platform), state

        return self._each(call, jax.eval_shape(self.init, params), params)[0]

    def _step(
        self,
        name: str,
        grads: Gradients,
        state: State,
        params: Params = None,
        *key: Key | None,
        **extra_args: PyTree,
    ) -> _Result:
        """``update`` or ``apply`` of each."""

        def call(tx: GradientTransformation, share: _Share, state: State) -> _Result:
            extra = {
                k: _share_of(share, x) if self.mask_extra_args or k == "at_now" else x
                for k, x in extra_args.items()
            }
            return getattr(tx, name)(share(grads), state, share(params), *key, **extra)

        return self._each(call, state, params, grads)

    def catch_up(self, params: Params, state: State, ids: PyTree) -> _Result:
        def call(tx: GradientTransformation, share: _Share, state: State) -> _Result:
            return tx.catch_up(share(params), state, share(ids))

        return self._each(call, state, params)

    def _each(
        self, call: _Call, state: State, params: Params, grads: Gradients = None
    ) -> _Result:
        """What ``call`` returns for each transformation, as one tree and one state.

        The gradients tell the structure where there are no parameters.
        """
        check_fields(self.argument, state, self.state_type)
        parts, states = self._parts(params, grads), self.unpack(state)
        done = {
            label: call(tx, functools.partial(parts.of, label), states[label])
            for label, tx in self.transforms.items()
        }
        results = {label: result for label, (result, _) in done.items()}
        new = self.pack({label: state for label, (_, state) in done.items()})
        return parts.joined(results), new

    def _parts(self, params: Params, grads: Gradients = None) -> "_Parts":
        """The labels of ``params``, or of ``grads`` if ``params`` is None."""
        reference = grads if params is None else params
        leaves, tree = flatten(reference, is_leaf=is_leaf)
        labels = self.labels
        if is_function(labels):
            if params is None:
                reference = tree.unflatten(_shapes_of(self.argument, leaves))
            labels = labels(reference)
        text = "must have the structure of the parameters or a prefix of it"
        labels = broadcast_prefix(labels, reference, f"{self.argument} {text}", is_leaf)
        wrong = [
            f"{label!r}{path or ' at the root'}"
            for path, label, leaf in zip(paths_of(tree), labels, leaves, strict=True)
            if leaf is not None and label not in self.transforms
        ]
        if wrong:
            raise ValueError(
                f"{self.argument}: wanted one of {list(self.transforms)} for each "
                f"parameter, got {', '.join(wrong)}"
            )
        return _Parts(tree, labels)


def _share_of(share: _Share, x: PyTree) -> PyTree:
    """The share of what mirrors the parameters; anything else as it is."""
    try:
        return share(x)
    except ValueError:
        return x


class _Parts(NamedTuple):
    """The leaves of a tree by label."""

    tree: PyTreeDef  #: the structure of the parameters; None and slices are leaves.
    labels: list[Hashable]  #: of each leaf.

    def of(self, label: Hashable, tree: PyTree) -> PyTree:
        """``tree``, which mirrors the parameters, with the leaves of one label only.

        And None where there is no parameter and no label.
        """
        if tree is None:
            return None
        pairs = zip(self.tree.flatten_up_to(tree), self.labels, strict=True)
        is_mine = lambda x, own: own == label or (own is None and x is None)  # noqa: E731
        mine = (x if is_mine(x, own) else MaskedNode() for x, own in pairs)
        return self.tree.unflatten(mine)

    def joined(self, results: Mapping[Hashable, PyTree]) -> PyTree:
        """Each leaf from the result of its label; None where it has none."""
        columns = {k: self.tree.flatten_up_to(tree) for k, tree in results.items()}
        nothing = [None] * len(self.labels)
        return self.tree.unflatten(
            columns.get(label, nothing)[i] for i, label in enumerate(self.labels)
        )


def _shapes_of(argument: str, grads: list[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes for a label function, in place of parameters."""
    if any(g is None for g in grads):
        raise ValueError(
            f"{argument} is a function of the parameters, and not every gradient is there "
            "to tell their shapes; pass the parameters: tx.update(grads, state, params)"
        )
    return [jax.ShapeDtypeStruct(g.shape, g.dtype) for g in grads]
