"""A whole training step: the rows that a loss reads, its gradient, and the optimizer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jslices import tree
from jslices._grad.api import differentiated, evaluated
from jslices._grad.call import (
    ExchangeSpec,
    SparseSpec,
    UserCall,
    check_callable,
    check_inputs,
)
from jslices._grad.exchange_report import hint_exchange
from jslices._grad.ids import leaf_ids, rows_read
from jslices._grad.plan import Planned, plan_call
from jslices._jax import is_symbolic
from jslices._place import donated
from jslices._place.boundary import platform_of
from jslices._place.hints import HINT_BYTES, hint_once
from jslices._rows.access import is_below
from jslices._slices.held import held_as, held_where
from jslices._typing import Params, PyTree, State
from jslices.optim.engine.protocol import GradientTransformation, plain_of
from jslices.optim.engine.step import entries_of_a_pass
from jslices.optim.transforms.compiled import ARGUMENTS, Step, made_once
from jslices.optim.transforms.of_models import (
    compiled_for,
    eval_step_of_model,
    is_nnx_optimizer,
    train_step_of_model,
)

USED_WHOLE = (
    "{} is used as a whole at {}, without gradient, so that all of its rows catch up in "
    "each step. Look up the rows that are needed, table[ids], or compute that in a program "
    "of its own, after params, state = tx.flush(params, state)"
)


@made_once
def train_step(
    fun: Callable[..., Any],
    tx: GradientTransformation,
    has_aux: bool = False,
    *,
    jit: bool = True,
    donate: bool = True,
    static_argnames: str | Sequence[str] = (),
    sparse: SparseSpec = None,
    exchange: ExchangeSpec = None,
) -> Callable[..., tuple[Any, ...]]:
    """The training step of a loss: its value and gradient, and the optimizer's step.

    ``value_and_grad`` of ``fun(tx.now(params, state), *args)``, and ``tx.apply``: under
    ``untouched="exact"`` the loss is that of rows which have made up for the steps that
    they missed. Lazy optimizers have nothing to make up for.

    Args:
      fun: a function of the parameters and what else :func:`jslices.value_and_grad` takes,
        with a scalar result, or ``(result, aux)``.
      tx: an optimizer of jslices, also one in ``jslices.optim.chain`` or the like; or an
        ``nnx.Optimizer`` of one, and then ``fun`` is a function of the model.
      has_aux: whether ``fun`` returns ``(result, aux)``.
      jit: whether a step that is called with arrays compiles itself.
      donate: whether it then consumes the parameters and the state that it gets, so that
        rows are written in place. False copies every table in every step, and says nothing.
      static_argnames: the names of arguments that are no arrays (strings, flags), as for
        ``jax.jit``.
      sparse: as in :func:`jslices.value_and_grad`.
      exchange: likewise.

    Returns:
      ``step(params, state, *args) -> (params, state, value)``, or ``(params, state, value,
      aux)``: the parameters and the state of ``tx`` after a step, shapes and dtypes as they
      came, and what ``fun(params, *args)`` returned before it. What it returns is read
      before rows are written: no table is copied for a metric. Of a table ``[V, *D]`` that
      is only looked up, the rows that the call reads are written, duplicates together,
      out-of-range ids not at all.

      Called with arrays it is compiled, once for the same ``fun`` and ``tx``, and consumes
      ``params`` and ``state``. Called with tracers (in your own ``jax.jit``, ``scan``,
      ``vmap``) it is a pure function, and donating is for that ``jax.jit`` to do:
      ``donate_argnums=(0, 1)``. ``step.lower`` and ``step.trace`` are those of ``jax.jit``.
      Of an ``nnx.Optimizer`` it is ``step(model, *args) -> value``, or ``(value, aux)``,
      which changes the model and the optimizer.

      Untouched rows: lazy ones wait. Exact ones go on missing steps, and their tables come
      back in a box that refuses to be read (:func:`jslices.hold`), but by jslices:
      evaluate by :func:`jslices.eval_step`, save parameters and state together, or
      ``tx.now(params, state)``. Inside your own program what comes plain goes plain.
      Rows that are read without gradient (behind ``stop_gradient``, for ``aux``, by an id
      out of range) are read as they are after missed steps, and not written. An array that
      the call uses as a whole catches up as a whole; one that it does not use misses the
      step.

    Raises:
      TypeError: if ``tx`` is not an optimizer of jslices; for an argument that is no array
        and not static. Otherwise as :func:`jslices.value_and_grad`, and nothing has changed
        then.

    Warns:
      PerformanceHint: for an array of more than 16 MB that is used as a whole where no
        gradient comes in, with the line: under an exact optimizer all of its rows catch up;
        for one that a program of your own gets undonated; for a step that is made anew for
        each call.

    ``tx`` gets the value as well, as ``optax.contrib.reduce_on_plateau`` wants it. Complex
    parameters go downhill: JAX's gradients by them are conjugated.

    Cost: a gradient and a step of the rows that are read; ``fun`` is traced once. An exact
    optimizer reads rows and their state for the loss, and again for the step. Rows catch up
    before, and are written twice, where a step is a pass over the table, and where rows are
    exchanged between devices. An array that the call uses as a whole catches up before, if
    any row of it is behind.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> def loss(params, ids):
      ...     return ((params["table"][ids] @ params["w"]) ** 2).sum()
      >>> params = {"table": jnp.ones((9, 2)), "w": jnp.ones(2)}
      >>> tx = js.adam(0.1, untouched="exact")
      >>> step, state = js.train_step(loss, tx), tx.init(params)
      >>> for ids in jnp.array([[3, 8, 3], [0, 8, 1], [3, 2, 2]]):
      ...     params, state, value = step(params, state, ids)
      >>> (100 * tx.now(params, state)["table"][:, 0]).round().astype(int)
      Array([ 87,  87,  94,  77, 100, 100, 100, 100,  73], dtype=int32)

    Source: ours; elsewhere the ids of an exact step are passed by hand. ``jit=`` is
    JAXopt's.
    """
    check_callable(fun)
    how: dict[str, Any] = {"sparse": sparse, "exchange": exchange}
    compiled: dict[str, Any] = {"static_argnames": static_argnames}
    compiled |= {"donate_argnums": (0, 1)} if donate else {}
    if is_nnx_optimizer(tx):
        step_of = functools.partial(train_step, has_aux=True, donate=donate, **how)
        step_of = functools.partial(step_of, jit=False)  # the step of the model compiles
        of_model = functools.partial(train_step_of_model, step_of, fun, has_aux)
        boxes = of_model(True) if jit else None
        return compiled_for(tx, "train_step", fun, of_model(False), boxes, **compiled)
    if not isinstance(tx, GradientTransformation):
        raise TypeError(_not_ours(tx))

    def stepped(params: Params, state: State, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What a step returns, and which parameters may have rows that are behind."""
        _refuse_state(params, "step")
        params, state, call, planned, behind = _of_rows_now(
            fun, tx, params, state, args, kwargs, has_aux, **how
        )
        if arrays := ARGUMENTS.get():
            hint_exchange(planned, *arrays)
        value, aux, (grads,) = differentiated(call, planned)
        if any(map(jnp.iscomplexobj, call.primals)):
            grads = tree.map(lambda g: g.conj(), grads)
        params, state = tx.apply(grads, state, params, value=value, exact=True)
        return (params, state, value, *[aux] * has_aux), behind

    @donated.unsaid(not donate)
    def pure(params: Params, state: State, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        (new, *others), _ = stepped(plain_of(tx, params), state, args, kwargs)
        return held_as(params, new), *others

    @donated.unsaid(not donate)
    def boxed(params: Params, state: State, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        (new, *others), behind = stepped(params, state, args, kwargs)
        return held_where(new, behind), *others

    plain = functools.partial(plain_of, tx)
    return Step("train_step", fun, pure, boxed, plain, jit, **compiled)


def _of_rows_now(
    fun: Callable[..., Any],
    tx: GradientTransformation,
    params: Params,
    state: State,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_aux: bool,
    *,
    sparse: SparseSpec = None,
    exchange: ExchangeSpec = None,
) -> tuple[Params, State, UserCall, Planned, list[bool]]:
    """The call ``fun(tx.now(params, state), *args)``, which reads rows alone.

    And the parameters and state of it, in which arrays that it uses as a whole have caught
    up, and of each array whether rows of it may be behind after a step.
    """
    by_rows: list[bool] = []
    behind: list[bool] = []

    @functools.wraps(fun)
    def fun_of_now(params: Params, state: State, *args: Any, **kwargs: Any) -> Any:
        now, by_rows[:] = tx.now_with(params, state, caught_up=True)
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(now), by_rows, strict=True)
        behind[:] = [not rows or old is not new for old, new, rows in pairs]
        return fun(now, *args, **kwargs)

    call = UserCall(fun_of_now, 0, (params, state, *args), kwargs, has_aux, inputs=[1])
    check_inputs(call, holomorphic=False, allow_int=False)
    planned = plan_call(call, sparse, exchange)
    if not tx.catches_up:
        return params, state, call, planned, behind
    for i, line in planned.whole_lines.items():
        if is_below(HINT_BYTES, planned.leaves[i].num_bytes):
            what = ("whole", planned.leaves[i].name, line)
            hint_once(what, USED_WHOLE.format(planned.leaves[i], line))
    of_all = planned.read_whole
    # Rows that are sent from device to device catch up where they are. A pass over all rows
    # that does missed steps as well would copy what the loss has read of them.
    first = {site.leaf for site in planned.sites if site.exchange}
    first |= {i for i, x in enumerate(by_rows) if not x or _is_a_pass(planned, i)}
    first -= of_all
    rows = rows_read(call, planned, first) if first else [None] * len(by_rows)
    ids = call.mirror(True if i in of_all else leaf_ids(x) for i, x in enumerate(rows))
    params, state = tx.catch_up(params, state, ids)
    planned = planned.with_caught_up(of_all | first)
    behind = [x and i not in of_all for i, x in enumerate(behind)]
    return params, state, call.at(params, state), planned, behind


@made_once
def eval_step(
    fun: Callable[..., Any],
    tx: GradientTransformation,
    *,
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """A function of parameters as they are now, after all missed steps: for evaluation.

    Under ``untouched="exact"`` rows wait for the next step that reads them, and the
    parameters alone are not what a dense optimizer would have.

    Args:
      fun: a function of the parameters and other arguments, its result any pytree of
        arrays: a loss, metrics, scores. It is traced as :func:`jslices.value_and_grad` has
        it.
      tx: the optimizer, or an ``nnx.Optimizer`` of one.
      static_argnames: as in :func:`jslices.train_step`.

    Returns:
      ``evaluate(params, state, *args, **kwargs)``, which is
      ``fun(tx.now(params, state), *args, **kwargs)``. Nothing is written, and nothing
      donated. Called with arrays it is compiled, once for the same ``fun`` and ``tx``; with
      tracers (in your own ``jax.jit``) it is a pure function. Of an ``nnx.Optimizer`` it is
      ``evaluate(model, *args)``, which keeps no change of the model. Under a lazy optimizer
      it is ``fun(params, *args, **kwargs)``.

    Raises:
      TypeError: if ``tx`` is not an optimizer of jslices.

    Warns:
      PerformanceHint: for an array of more than 16 MB that is used as a whole, of which all
        rows catch up in each call.

    Cost: that of ``fun``, and of a table that is only looked up ``K * D`` elements of each
    state array. An array that is used as a whole is read as a whole.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> loss = lambda table, ids: (table[ids] ** 2).sum()
      >>> tx, table = js.adam(0.1, untouched="exact"), jnp.ones((9, 1))
      >>> step, state = js.train_step(loss, tx), tx.init(table)
      >>> for ids in jnp.array([[3], [8], [8]]):
      ...     table, state, value = step(table, state, ids)
      >>> js.eval_step(loss, tx)(table, state, jnp.array([3])).round(2)  # 0.81 as it is
      Array(0.61, dtype=float32)

    Source: ours.
    """
    check_callable(fun)
    compiled = {"static_argnames": static_argnames}
    if is_nnx_optimizer(tx):
        of_model = eval_step_of_model(eval_step, fun)
        return compiled_for(tx, "eval_step", fun, of_model, of_model, **compiled)
    if not isinstance(tx, GradientTransformation):
        raise TypeError(_not_ours(tx, "eval_step"))

    def evaluate(params: Params, state: State, *args: Any, **kwargs: Any) -> Any:
        _refuse_state(params, "evaluate")
        params = plain_of(tx, params, state)
        if not tx.catches_up:
            return fun(params, *args, **kwargs)
        alone = lambda *args, **kwargs: (jnp.zeros(()), fun(*args, **kwargs))  # noqa: E731
        functools.update_wrapper(alone, fun)
        *_, call, planned, _ = _of_rows_now(alone, tx, params, state, args, kwargs, True)
        return evaluated(call, planned)

    plain = functools.partial(plain_of, tx)
    return Step("eval_step", fun, evaluate, evaluate, plain, True, **compiled)


def _is_a_pass(planned: Planned, leaf: int) -> bool:
    """Whether the step of an array is a pass over all of its rows."""
    aval, row_bytes = planned.leaves[leaf].aval, planned.leaves[leaf].row_bytes
    count = sum(site.total for site in planned.sites_of(leaf) if site.graded)
    num_rows = planned.leaves[leaf].table_shape[0] if count else 0
    if is_symbolic(num_rows + count) or not num_rows:
        return False
    return count >= entries_of_a_pass(num_rows, row_bytes, False, platform_of(aval))


def _refuse_state(params: PyTree, call: str) -> None:
    """Refuse the state of an optimizer, or of a chain of some, in place of parameters."""
    parts = [params, *params] if isinstance(params, tuple) else [params]
    counts = (x.count for x in parts if "count" in getattr(type(x), "_fields", ()))
    if any(jnp.issubdtype(jnp.result_type(count), jnp.integer) for count in counts):
        raise TypeError(f"got a state first, wanted {call}(params, state, *batch)")


def _not_ours(tx: object, caller: str = "train_step") -> str:
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
    return f"{caller} wants an optimizer of jslices, got {got}; type {help}"
