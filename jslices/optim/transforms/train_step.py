"""A whole training step: the rows that a loss reads, its gradient, and the optimizer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jslices import tree
from jslices._grad.api import differentiated
from jslices._grad.call import (
    ExchangeSpec,
    SparseSpec,
    UserCall,
    check_callable,
    check_inputs,
)
from jslices._grad.ids import leaf_ids, rows_read
from jslices._grad.plan import Planned, plan_call
from jslices._jax import is_symbolic
from jslices._place.boundary import mesh_of, platform_of
from jslices._place.hints import hint_once
from jslices._slices import IndexedSlices
from jslices._typing import Params, PyTree, State
from jslices.optim.engine.catch_up import CHUNK_ELEMENTS
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.step import entries_of_a_pass


def train_step(
    fun: Callable[..., Any],
    tx: GradientTransformation,
    has_aux: bool = False,
    *,
    sparse: SparseSpec = None,
    exchange: ExchangeSpec = None,
) -> Callable[..., tuple[Any, ...]]:
    """The training step of a loss: its value and gradient, and the optimizer's step.

    What ``value_and_grad`` and ``tx.apply`` are in two calls. Under
    ``untouched="exact"`` the loss is that of rows which have made up for the steps that
    they missed: the program itself tells which it reads, so that no ids are passed by hand.
    Lazy optimizers have nothing to make up for.

    Args:
      fun: a function of the parameters and what else :func:`jslices.value_and_grad` takes,
        with a scalar result, or ``(result, aux)``.
      tx: an optimizer of jslices, also one in ``jslices.optim.chain`` or the like.
      has_aux: whether ``fun`` returns ``(result, aux)``.
      sparse: as in :func:`jslices.value_and_grad`.
      exchange: likewise.

    Returns:
      A pure function ``step(params, state, *args) -> (params, state, value)``, or
      ``(params, state, value, aux)``: the parameters and the state of ``tx`` after a step,
      shapes and dtypes as they came, and what ``fun(params, *args)`` returned before it.
      Of a table ``[V, *D]`` that is only looked up, the rows that the call reads are
      written, duplicates together, out-of-range ids not at all. To be jitted by the
      caller, in place with ``donate_argnums=(0, 1)``, and to be scanned.

      Untouched rows: lazy ones wait. Exact ones go on missing steps, so type
      ``params, state = tx.flush(params, state)`` before parameters are saved or evaluated;
      an array that the call uses as a whole, or behind ``stop_gradient``, catches up as a
      whole, and one that it does not use misses the step.

    Raises:
      ValueError: under an exact optimizer, if the rows that are read depend on the values
        of the table itself, with the line that reads them; only ``tx.flush`` before every
        step can serve that.
      TypeError: for what is no optimizer of jslices. Otherwise as
        :func:`jslices.value_and_grad`, and nothing has changed then.

    ``tx`` gets the value as well, as ``optax.contrib.reduce_on_plateau`` wants it. Complex
    parameters go downhill: JAX's gradients by them are conjugated.

    Cost: a gradient and a step of the rows that are read; ``fun`` is traced once. An exact
    optimizer reads rows and their state before the loss, and XLA reads them once for the
    step as well. Rows catch up before, and are written twice, where a step is a pass over
    the table, on a mesh, outside of ``jit``, and by optimizers that cannot peek. An array
    that the call uses as a whole does its missed steps in the step, whether there are any
    or not; one of more than 2**18 elements catches up before, if any row of it is behind.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> def loss(params, ids):
      ...     return ((params["table"][ids] @ params["w"]) ** 2).sum()
      >>> params = {"table": jnp.ones((9, 2)), "w": jnp.ones(2)}
      >>> tx = js.adam(0.1, untouched="exact")
      >>> step = jax.jit(js.train_step(loss, tx), donate_argnums=(0, 1))
      >>> state = tx.init(params)
      >>> for ids in jnp.array([[3, 8, 3], [0, 8, 1], [3, 2, 2]]):
      ...     params, state, value = step(params, state, ids)
      >>> params, state = tx.flush(params, state)
      >>> (100 * params["table"][:, 0]).round().astype(int)
      Array([ 87,  87,  94,  77, 100, 100, 100, 100,  73], dtype=int32)

    Source: ours; elsewhere the ids of an exact step are passed by hand.
    """
    check_callable(fun)
    if not isinstance(tx, GradientTransformation):
        raise TypeError(_not_ours(tx))

    catches_up, peeks = tx.catches_up, tx.peeks
    if catches_up and not peeks:
        hint_once(
            "peek",
            "train_step got an optimizer without peek: its rows are written when they "
            "catch up, and again by the step. Type GradientTransformation(init, update, "
            "catch_up, flush, apply=tx.apply, peek=tx.peek) where it is put together",
        )

    def step(params: Params, state: State, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if _is_state(params):
            raise TypeError("got a state first, wanted step(params, state, *batch)")
        call = UserCall(fun, 0, (params, *args), kwargs, has_aux)
        check_inputs(call, holomorphic=False, allow_int=False)
        planned = plan_call(call, sparse, exchange)
        taken: dict[int, jax.Array] = {}
        peeked: dict[str, PyTree] = {}
        if catches_up:
            rows, sources = rows_read(call, planned)
            if any(sources):  # row numbers follow from these, which catch up before
                whole = call.tree.unflatten(each or None for each in sources)
                params, state = tx.catch_up(params, state, *whole)
                call = call.at(params)
                rows, _ = rows_read(call, planned)
                rows = [None if each else x for each, x in zip(sources, rows, strict=True)]
            aside = [peeks and _is_one_program(planned, i, x) for i, x in enumerate(rows)]
            behind = [
                None if y else x if peeks else _ids(x)
                for x, y in zip(rows, aside, strict=True)
            ]
            # Also without any: that of others may see to a rate that has changed.
            params, state = tx.catch_up(params, state, *call.tree.unflatten(behind))
            call = call.at(params)
            if any(aside):
                some = [x if y else None for x, y in zip(rows, aside, strict=True)]
                now = tx.peek(params, state, *call.tree.unflatten(some))
                leaves = call.tree.flatten_up_to((now,))
                taken = {i: x for i, x in enumerate(leaves) if x is not None}
                (peeked["peeked"],) = call.tree.unflatten(aside)
                whole = {i: taken.pop(i) for i in [*taken] if rows[i] is True}
                read = (whole.get(i, p) for i, p in enumerate(call.primals))
                call = call.at(*call.tree.unflatten(read))
        value, aux, (grads,) = differentiated(call, planned, taken=taken)
        if any(map(jnp.iscomplexobj, call.primals)):
            grads = tree.map(lambda g: g.conj(), grads)
        params, state = tx.apply(grads, state, params, value=value, exact=True, **peeked)
        return (params, state, value, aux) if has_aux else (params, state, value)

    return step


def _is_state(x: PyTree) -> bool:
    """Whether it is the state of an optimizer, or of a chain of some."""
    parts = [x, *x] if isinstance(x, tuple) else [x]
    counts = (x.count for x in parts if "count" in getattr(type(x), "_fields", ()))
    return any(jnp.issubdtype(jnp.result_type(count), jnp.integer) for count in counts)


def _not_ours(tx: object) -> str:
    """What to type instead of something of Optax, which is known by who made it."""
    name = getattr(getattr(tx, "init", None), "__qualname__", "").partition(".")[0]
    chain = "jslices.adam for optax.adam, jslices.optim.chain for optax.chain"
    instead = {
        "chain": chain,
        "named_chain": chain,
        "partition": "jslices.optim.partition",
        "masked": "jslices.optim.masked",
        "MultiSteps": "jslices.optim.multi_steps(tx, k, shapes)",
        "apply_if_finite": "lax.cond with jslices.all_finite(grads) round tx.apply",
        "inject_hyperparams": "a schedule, or make the optimizer in the step that is "
        "jitted, jslices.train_step(loss, jslices.adam(rate)), with rate as an argument",
    }
    help = instead.get(name, "jslices.from_optax(tx) for what is Optax's")
    got = f"optax.{name}" if name in instead else repr(tx)
    return f"train_step wants an optimizer of jslices, got {got}; type {help}"


def _ids(rows: IndexedSlices | bool | None) -> PyTree:
    """What catches up of a leaf, as lookup_ids gives it."""
    return leaf_ids(rows) if isinstance(rows, IndexedSlices) else rows


def _is_one_program(planned: Planned, leaf: int, rows: IndexedSlices | bool | None) -> bool:
    """Whether XLA sees all that the call does to a small array or rows, on one device.

    Not those of a pass over the table: the missed steps of a row are read from the state
    that they overwrite, and a pass would copy the whole of it for that.
    """
    aval, row_bytes = planned.leaves[leaf].aval, planned.leaves[leaf].row_bytes
    around = jax.sharding.get_abstract_mesh().explicit_axes
    if planned.eager or around or mesh_of(aval) is not None:
        return False
    if not isinstance(rows, IndexedSlices):
        return rows is True and aval.size <= CHUNK_ELEMENTS
    count, num_rows = rows.indices.shape[0], planned.leaves[leaf].table_shape[0]
    if rows.facts.placement is not None or is_symbolic(count + num_rows):
        return False
    enough = entries_of_a_pass(num_rows, row_bytes, False, platform_of(aval))
    return 0 < count < enough
