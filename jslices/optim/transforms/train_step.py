"""A whole training step: the rows that a loss reads, its gradient, and the optimizer."""

from collections.abc import Callable, Mapping
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
from jslices._grad.ids import RowsRead, joined, leaf_ids
from jslices._grad.plan import Planned, plan_call
from jslices._grad.run import NO_PREFETCH, Prefetched
from jslices._jax import is_symbolic
from jslices._place.boundary import mesh_of, platform_of
from jslices._place.hints import HINT_BYTES, hint_once
from jslices._rows.access import is_below
from jslices._typing import Params, PyTree, State
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.step import entries_of_a_pass

USED_WHOLE = (
    "{} is used as a whole at {}, without gradient, so that all of its rows catch up in "
    "each step. Look up the rows that are needed, table[ids], or compute that in a program "
    "of its own, after params, state = tx.flush(params, state)"
)


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
      What it returns is read before rows are written: no table is copied for a metric.
      Of a table ``[V, *D]`` that is only looked up, the rows that the call reads are
      written, duplicates together, out-of-range ids not at all. To be jitted by the
      caller, in place with ``donate_argnums=(0, 1)``, and to be scanned.

      Untouched rows: lazy ones wait. Exact ones go on missing steps, so type
      ``params, state = tx.flush(params, state)`` before parameters are saved or evaluated.
      Rows that are read without gradient (behind ``stop_gradient``, for ``aux``, by an id
      out of range) are read as they are after missed steps, and not written. An array that
      the call uses as a whole catches up as a whole; one that it does not use misses the
      step.

    Raises:
      ValueError: under an exact optimizer, if the rows that get a gradient depend on the
        values of the table itself, with the line that reads them; only ``tx.flush`` before
        every step can serve that.
      TypeError: if ``tx`` is not an optimizer of jslices. Otherwise as
        :func:`jslices.value_and_grad`, and nothing has changed then.

    Warns:
      PerformanceHint: for an array of more than 16 MB that is used as a whole where no
        gradient comes in, with the line: under an exact optimizer all of its rows catch up.

    ``tx`` gets the value as well, as ``optax.contrib.reduce_on_plateau`` wants it. Complex
    parameters go downhill: JAX's gradients by them are conjugated.

    Cost: a gradient and a step of the rows that are read; ``fun`` is traced once. An exact
    optimizer reads rows and their state before the loss, and XLA reads them once for the
    step as well. Rows catch up before, and are written twice, where a step is a pass over
    the table, on a mesh, outside of ``jit``, and by optimizers that cannot peek. An array
    that the call uses as a whole catches up before, if any row of it is behind.

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

    if tx.catches_up and not tx.peeks:
        hint_once(
            "peek",
            "train_step got an optimizer without peek: its rows are written when they "
            "catch up, and again by the step. Type GradientTransformation(init, update, "
            "catch_up, flush, apply=tx.apply, peek=tx.peek) where it is put together, or "
            "measure beside the step what a chain measures after it",
        )

    def step(params: Params, state: State, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if _is_state(params):
            raise TypeError("got a state first, wanted step(params, state, *batch)")
        call = UserCall(fun, 0, (params, *args), kwargs, has_aux)
        check_inputs(call, holomorphic=False, allow_int=False)
        planned = plan_call(call, sparse, exchange)
        taken, extra = NO_PREFETCH, {}
        if tx.catches_up:
            (params, state), call, taken, is_peeked = _up_to_date(
                tx, planned, call, params, state
            )
            extra = {"peeked": call.mirror(is_peeked)} if tx.peeks else {}
        value, aux, (grads,) = differentiated(call, planned, taken=taken)
        if any(map(jnp.iscomplexobj, call.primals)):
            grads = tree.map(lambda g: g.conj(), grads)
        params, state = tx.apply(grads, state, params, value=value, exact=True, **extra)
        return (params, state, value, aux) if has_aux else (params, state, value)

    return step


def _up_to_date(
    tx: GradientTransformation,
    planned: Planned,
    call: UserCall,
    params: Params,
    state: State,
) -> tuple[tuple[Params, State], UserCall, Prefetched, list[bool]]:
    """What a call reads, after the steps that it has missed.

    Parameters and state, in which some rows have caught up; the call of these; the rows of
    others that were peeked at instead; and for each array whether it was.
    """
    every = range(len(planned.leaves))
    may_peek = {i for i in every if tx.peeks and _is_one_program(planned, i)}
    reads = RowsRead(call, planned)
    for i, line in reads.whole_lines.items():
        if is_below(HINT_BYTES, planned.leaves[i].num_bytes):
            what = ("whole", planned.leaves[i].name, line)
            hint_once(what, USED_WHOLE.format(planned.leaves[i], line))
    if reads.sources:  # row numbers follow from these, which catch up before
        sources = call.mirror(i in reads.sources or None for i in every)
        params, state = tx.catch_up(params, state, sources)
        call = call.at(params)
    whole = reads.whole - reads.sources
    rows, others = reads.at(call.primals)
    by_rows = {i for i in may_peek if not (rows[i] is None and others[i] is None)}

    def catch_up_ids(i: int) -> PyTree:
        if i in by_rows:
            return None
        if i in whole:
            return True
        both = joined(rows[i], others[i])
        return both if tx.peeks and rows[i] is not None else leaf_ids(both)

    # Also without any: that of others may see to a rate that has changed.
    params, state = tx.catch_up(params, state, call.mirror(map(catch_up_ids, every)))
    call = call.at(params)

    def peek(wanted: Mapping[int, PyTree]) -> dict[int, jax.Array]:
        if not wanted:
            return {}
        now = tx.peek(params, state, call.mirror(map(wanted.get, every)))
        leaves = call.tree.flatten_up_to((now,))
        return {i: x for i, x in enumerate(leaves) if x is not None}

    now = peek({i: rows[i] for i in by_rows})
    alone = peek({i: x for i, x in enumerate(others) if i in by_rows and x is not None})
    taken = {(i, True): x for i, x in now.items()}
    taken |= {(i, False): x for i, x in alone.items()}
    return (params, state), call, taken, [i in by_rows for i in every]


def _is_state(x: PyTree) -> bool:
    """Whether it is the state of an optimizer, or of a chain of some."""
    parts = [x, *x] if isinstance(x, tuple) else [x]
    counts = (x.count for x in parts if "count" in getattr(type(x), "_fields", ()))
    return any(jnp.issubdtype(jnp.result_type(count), jnp.integer) for count in counts)


def _not_ours(tx: object) -> str:
    """Suggest the replacement for an Optax transformation, told by its constructor."""
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


def _is_one_program(planned: Planned, leaf: int) -> bool:
    """Whether XLA sees all that the call does to rows of an array, on one device.

    Not those of a pass over the table: the missed steps of a row are read from the state
    that they overwrite, and a pass would copy the whole of it for that.
    """
    aval, row_bytes = planned.leaves[leaf].aval, planned.leaves[leaf].row_bytes
    around = jax.sharding.get_abstract_mesh().explicit_axes
    if planned.eager or around or mesh_of(aval) is not None:
        return False
    sites = planned.sites_of(leaf)
    count = sum(site.total for site in sites if site.graded)
    if not sites or any(site.exchange for site in sites):
        return False
    num_rows = planned.leaves[leaf].table_shape[0]
    if is_symbolic(num_rows + sum(site.total for site in sites)):
        return False
    return count < entries_of_a_pass(num_rows, row_bytes, False, platform_of(aval))
