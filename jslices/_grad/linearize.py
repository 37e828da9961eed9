"""Running a call with slots in its lookups, and its gradient from the slots' cotangents."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices import _jax
from jslices._grad.call import Call, Outputs
from jslices._grad.choose import Leaf, SparseSpec, describe_leaves, report_dense
from jslices._grad.evaluate import evaluate
from jslices._grad.views import Table, whole
from jslices._grad.walk import DenseUse, Plan, Site, map_sites, outlets, sites, walk
from jslices._jax import flatten
from jslices._lookup.rows import without_dense_warning
from jslices._slices import IndexedSlices


class Planned(NamedTuple):
    """A traced call and what was decided about its leaves.

    Attributes:
      program: the traced call.
      outputs: how to read its outputs.
      leaves: the differentiated arrays, which are the program's first inputs.
      plan: the lookups of the sparse leaves.
      dense: why a leaf that could have been sparse is not.
      looked_up: for every leaf, sparse or not, the places that look it up.
    """

    program: _jax.Program
    outputs: Outputs
    leaves: list[Leaf]
    plan: Plan
    dense: dict[int, DenseUse]
    looked_up: dict[int, list[Site]]

    def kind(self, leaf: int) -> str:
        """``"sparse"``, ``"dense"``, or ``"unused"``: nothing asks for its gradient."""
        if leaf in self.dense or not may_be_sparse(self.leaves[leaf]):
            return "dense"
        return "sparse" if self.looked_up.get(leaf) else "unused"


def may_be_sparse(leaf: Leaf) -> bool:
    """Whether the program decides about this leaf."""
    return leaf.can_be_sparse and leaf.forced is not False


class Linearized(NamedTuple):
    """What :func:`linearize` gives.

    Attributes:
      result: the call's value.
      pullback: from the result's cotangent to the gradients.
      aux: the arrays that the call returned beside its value.
    """

    result: Any
    pullback: Callable[[Any], Any]
    aux: list[jax.Array]


def plan_call(call: Call, single: bool, spec: SparseSpec) -> Planned:
    """Traces the call and decides which leaves are sparse."""
    leaves = describe_leaves(call.tree.unflatten(call.primals), call.names, single, spec)
    program, outputs = call.trace()
    candidates = {i: leaf.aval for i, leaf in enumerate(leaves) if may_be_sparse(leaf)}
    decided = walk(program, candidates, outputs.num_results)
    return Planned(program, outputs, leaves, *decided)


def linearize(call: Call, planned: Planned) -> Linearized:
    """Runs the call, and gives the function that leads back from it."""
    report_dense(planned.leaves, planned.dense, planned.looked_up)
    outputs, plan = planned.outputs, planned.plan
    through = outlets(planned.program, outputs.num_results)
    kinds = [planned.kind(i) for i in range(len(call.primals))]
    dense = [x for x, kind in zip(call.primals, kinds, strict=True) if kind == "dense"]
    slots = map_sites(_slot, plan)

    def run(dense: list[Any], slots: Any) -> tuple[list[Any], Any]:
        left = iter(dense)
        operands = [
            next(left) if kind == "dense" else Table(leaf.aval.shape, leaf.aval.dtype, i, x)
            for i, (x, leaf, kind) in enumerate(
                zip(call.primals, planned.leaves, kinds, strict=True)
            )
        ]
        flat, indices = evaluate(planned.program, operands, through, plan, slots)
        flat = [whole(x) for x in flat]
        return flat[: outputs.num_results], (flat[outputs.num_results :], indices)

    with without_dense_warning():
        flat, pullback, (aux, indices) = jax.vjp(run, dense, slots, has_aux=True)
    assemble = _Assemble(planned.leaves, kinds, sites(plan), call.tree)
    pull = functools.partial(_pull_back, assemble, outputs.tree)
    vjp_fun = jax.tree_util.Partial(pull, pullback, jax.tree.leaves(indices))
    return Linearized(outputs.result(flat), vjp_fun, aux)


def _slot_shape(site: Site) -> tuple[int, ...]:
    return (*site.times, site.count, *site.table_shape[1:])


def _slot(site: Site) -> IndexedSlices:
    """Zeros for the rows of one lookup; see ``jslices._lookup.rows``."""
    zeros = jnp.zeros(_slot_shape(site), site.dtype)
    values = _jax.as_varying(zeros, site.varying)
    return IndexedSlices.tree_unflatten(site.table_shape, (values, None))


def _pull_back(
    assemble: "_Assemble",
    tree: Any,
    pullback: Any,
    indices: list[jax.Array],
    cotangent: Any,
) -> Any:
    leaves, given = flatten(cotangent)
    if given != tree:
        raise TypeError(
            f"the cotangent must have the structure of the result, {tree}, got {given}"
        )
    with without_dense_warning():
        dense, slots = pullback(leaves)
    is_slot = lambda x: isinstance(x, IndexedSlices)  # noqa: E731
    return assemble(dense, jax.tree.leaves(slots, is_leaf=is_slot), indices)


class _Assemble:
    """Puts the cotangents of slots and dense leaves back into the argument's tree."""

    def __init__(
        self, leaves: Sequence[Leaf], kinds: Sequence[str], planned: list[Site], tree: Any
    ) -> None:
        self.avals = [leaf.aval for leaf in leaves]
        self.kinds = [
            "sparse" if kind == "unused" and leaf.forced else kind
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]
        self.tree = tree
        self.leaf_of_site = [site.leaf for site in planned]

    def __call__(
        self,
        dense: Sequence[Any],
        slots: Sequence[IndexedSlices],
        indices: Sequence[jax.Array],
    ) -> Any:
        rows: dict[int, list[tuple[jax.Array, jax.Array]]] = {}
        for leaf, slot, index in zip(self.leaf_of_site, slots, indices, strict=True):
            values = slot.values.reshape(-1, *self.avals[leaf].shape[1:])
            rows.setdefault(leaf, []).append((values, index.reshape(-1)))
        left = iter(dense)
        gradients = []
        for i, kind in enumerate(self.kinds):
            if kind == "dense":
                gradients.append(next(left))
            elif kind == "sparse":
                gradients.append(_slices(self.avals[i], rows.get(i, [])))
            else:
                gradients.append(jnp.zeros(self.avals[i].shape, self.avals[i].dtype))
        return self.tree.unflatten(gradients)


def _slices(aval: Any, parts: list[tuple[jax.Array, jax.Array]]) -> IndexedSlices:
    """The gradient of one leaf, from the rows and row numbers of each of its lookups."""
    shape = tuple(aval.shape)
    if not parts:  # insisted on, and never looked up
        none = jnp.zeros((0, *shape[1:]), aval.dtype)
        return IndexedSlices(none, jnp.zeros((0,), jnp.int32), shape)
    if len(parts) == 1:
        return IndexedSlices(*parts[0], shape)
    widest = max((index.dtype for _, index in parts), key=lambda dtype: dtype.itemsize)
    return IndexedSlices(
        jnp.concatenate([values for values, _ in parts]),
        jnp.concatenate([index.astype(widest) for _, index in parts]),
        shape,
    )
