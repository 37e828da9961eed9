"""Running a call with slots in its lookups, and its gradient from the slots' cotangents."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices._grad import compat
from jslices._grad.call import Call, Outputs
from jslices._grad.choose import Leaf, SparseSpec, describe_leaves, report_dense
from jslices._grad.evaluate import evaluate
from jslices._grad.views import Table, whole
from jslices._grad.walk import DenseUse, Plan, Site, map_sites, sites, walk
from jslices._lookup.mark import without_dense_warning
from jslices._lookup.rows import empty_slot_for
from jslices._slices import IndexedSlices
from jslices._trees import flatten


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

    program: compat.Program
    outputs: Outputs
    leaves: list[Leaf]
    plan: Plan
    dense: dict[int, DenseUse]
    looked_up: dict[int, list[Site]]


def plan_call(call: Call, single: bool, spec: SparseSpec) -> Planned:
    """Traces the call and decides which leaves are sparse."""
    leaves = describe_leaves(call.tree.unflatten(call.primals), call.names, single, spec)
    program, outputs = call.trace()
    candidates = {
        i: leaf.aval
        for i, leaf in enumerate(leaves)
        if leaf.can_be_sparse and leaf.forced is not False
    }
    decided = walk(program, candidates, outputs.num_results)
    return Planned(program, outputs, leaves, *decided)


def linearize(
    call: Call, single: bool, spec: SparseSpec
) -> tuple[Any, Callable[[Any], Any], Any]:
    """``(result, pullback, aux)``: the call's value, and the function to its gradients."""
    program, outputs, leaves, plan, dense, looked_up = plan_call(call, single, spec)
    report_dense(leaves, dense, looked_up)
    planned = sites(plan)
    read = {site.leaf for site in planned}
    sparse = [i in read or bool(leaf.forced) for i, leaf in enumerate(leaves)]
    dense_primals = [x for x, s in zip(call.primals, sparse, strict=True) if not s]
    slots = map_sites(
        lambda s: empty_slot_for(s.times, s.count, s.table_shape, s.dtype), plan
    )

    def run(dense: list[Any], slots: Any) -> tuple[list[Any], Any]:
        left = iter(dense)
        operands = [
            Table(x.shape, x.dtype, i, x) if is_sparse else next(left)
            for i, (x, is_sparse) in enumerate(zip(primals, sparse, strict=True))
        ]
        flat, indices = evaluate(program, operands, plan, slots)
        flat = [whole(x) for x in flat]
        return flat[: outputs.num_results], (flat[outputs.num_results :], indices)

    primals = [
        jnp.asarray(x) if s else x for x, s in zip(call.primals, sparse, strict=True)
    ]
    with without_dense_warning():
        flat, pullback, (aux, indices) = jax.vjp(run, dense_primals, slots, has_aux=True)
    gather = _Assemble(
        tuple(sparse), tuple(leaf.aval for leaf in leaves), planned, call.tree
    )
    pull = functools.partial(_pull_back, gather, outputs.tree)
    vjp_fun = jax.tree_util.Partial(pull, pullback, jax.tree.leaves(indices))
    return outputs.result(flat), vjp_fun, outputs.aux(aux)


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
        self, sparse: tuple[bool, ...], avals: Any, planned: list[Site], tree: Any
    ) -> None:
        self.sparse, self.avals, self.tree = sparse, avals, tree
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
        return self.tree.unflatten(
            self._slices(i, rows.get(i, [])) if is_sparse else next(left)
            for i, is_sparse in enumerate(self.sparse)
        )

    def _slices(self, leaf: int, parts: list[Any]) -> IndexedSlices:
        aval = self.avals[leaf]
        shape = tuple(aval.shape)
        if not parts:  # forced sparse, and never read
            none = jnp.zeros((0, *shape[1:]), aval.dtype)
            return IndexedSlices(none, jnp.zeros((0,), jnp.int32), shape)
        values, indices = zip(*parts, strict=True)
        if len(parts) == 1:
            return IndexedSlices(values[0], indices[0], shape)
        widest = max((i.dtype for i in indices), key=lambda dtype: dtype.itemsize)
        return IndexedSlices(
            jnp.concatenate(values),
            jnp.concatenate([i.astype(widest) for i in indices]),
            shape,
        )
