"""Nothing to remember: steps that compile themselves, in place, of tables in boxes."""

import functools
import pickle
import re
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jslices as js
import jslices.tables
import jslices.testing
from jslices.checkpoint.archive import Archive

IDS = jnp.array([[1, 2, 2], [0, 5, 1], [7, 7, 3]])
HELD = type(js.hold(jnp.ones((1, 1))))
EXACT = functools.partial(js.sgd, 0.1, 0.9, untouched="exact")


def is_box(x):
    return type(x) is HELD


def loss(params, ids):
    return jnp.sum((params["table"][ids] @ params["w"] - 0.5) ** 2)


def start(rows=9):
    return {"table": jnp.linspace(-1, 1, 2 * rows).reshape(rows, 2), "w": jnp.ones(2)}


def trained(tx, step=None, params=None):
    params = start() if params is None else params
    step, state = step or js.train_step(loss, tx), tx.init(params)
    for ids in IDS:
        params, state, _ = step(params, state, ids)
    return params, state


def dense():
    params, tx = start(), optax.sgd(0.1, momentum=0.9)
    state = tx.init(params)
    for ids in IDS:
        updates, state = tx.update(jax.grad(loss)(params, ids), state)
        params = optax.apply_updates(params, updates)
    return params


# --- a compiled step in place -------------------------------------------------------------


@pytest.mark.parametrize("tx", [js.adam(0.1), EXACT()], ids=["lazy", "exact"])
def test_a_step_consumes_what_it_gets(tx):
    params = start()
    state = tx.init(params)
    where = params["table"].unsafe_buffer_pointer()
    step = js.train_step(loss, tx)
    new, _, _ = step(params, state, IDS[0])
    assert jax.tree.leaves(new)[0].unsafe_buffer_pointer() == where
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))
    kept = start()
    js.train_step(loss, tx, donate=False)(kept, tx.init(kept), IDS[0])
    assert not kept["table"].is_deleted()
    jslices.testing.assert_in_place(step, *large(tx))


def test_arrays_that_are_gone_or_there_twice_are_told():
    tx, params = js.sgd(0.1), start()
    state = tx.init(params)
    step = js.train_step(loss, tx)
    step(params, state, IDS[0])
    with pytest.raises(
        ValueError, match=r"consumed by an earlier step.*what that returned"
    ):
        step(params, state, IDS[0])
    table = jnp.ones((9, 2))
    twice = {"table": table, "other": table, "w": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"are one, and a step consumes .*jnp\.copy"):
        step(twice, tx.init(twice), IDS[0])
    assert not table.is_deleted()
    distance = lambda p, other, ids: loss(p, ids) - loss(other, ids)  # noqa: E731
    params = start()
    with pytest.raises(ValueError, match=r"are one, and a step consumes .*jnp\.copy"):
        js.train_step(distance, tx)(params, tx.init(params), params, IDS[0])


@pytest.mark.parametrize("tx", [js.sgd(0.1, untouched="exact"), EXACT()])
def test_parameters_as_they_are_now_outlive_the_next_step(tx):
    params, state = trained(tx)
    best = tx.now(params, state)
    js.train_step(loss, tx)(params, state, IDS[0])
    assert np.isfinite(best["table"]).all() and np.isfinite(best["w"]).all()


def test_it_compiles_once_for_plain_tables_and_tables_in_boxes():
    tx = EXACT()
    step = js.train_step(loss, tx)
    params, state = trained(tx, step)
    with jax.log_compiles(False), count_compilations() as compiled:
        for ids in IDS:
            params, state, _ = step(params, state, ids)
            params, state, _ = js.train_step(loss, tx)(params, state, ids)
            js.eval_step(loss, tx)(params, state, ids)
    assert compiled() <= 1  # that of eval_step


def count_compilations():
    import contextlib

    @contextlib.contextmanager
    def counting():
        counts = []
        listener = lambda name, *_, **__: counts.append("backend_compile" in name)  # noqa: E731
        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            yield lambda: sum(counts)
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)

    return counting()


def test_a_function_made_anew_in_each_turn_is_told(monkeypatch):
    monkeypatch.setattr("jslices._place.hints.hinted", set())
    tx = js.sgd(0.1)
    params, state = start(), tx.init(start())
    with pytest.warns(js.PerformanceHint, match=r"made anew for each call.*3 times"):
        for ids in IDS:
            step = js.train_step(lambda p, ids: loss(p, ids), tx)
            params, state, _ = step(params, state, ids)


def test_a_step_within_programs_is_pure():
    tx = js.sgd(0.1, 0.9, untouched="exact")
    step = js.train_step(loss, tx)
    params, state = start(), tx.init(start())
    by_jit, *_ = jax.jit(step)(params, state, IDS[0])
    assert not is_box(by_jit["table"]) and not params["table"].is_deleted()

    def body(carry, ids):
        *carry, value = step(*carry, ids)
        return tuple(carry), value

    for boxed in (params, js.hold(params)):
        (scanned, scanned_state), _ = jax.lax.scan(body, (boxed, state), IDS)
        assert is_box(scanned["table"]) == (boxed is not params)
        now = tx.now(scanned, scanned_state)
        chex.assert_trees_all_close(now, tx.now(*trained(tx)), rtol=1e-5)
    values = jax.eval_shape(jax.vmap(lambda ids: step(params, state, ids)[2]), IDS)
    assert values.shape == (3,)
    lowered = step.lower(params, state, IDS[0]).compile()
    again = lowered(*lowered(params, state, IDS[0])[:2], IDS[1])
    assert not is_box(again[0]["table"])


def test_arguments_that_are_no_arrays_are_static():
    def by_name(params, ids, how, scaled=False):
        value = loss(params, ids) if how == "sum" else loss(params, ids) / 2
        return value * 3 if scaled else value

    tx = js.sgd(0.1)
    arguments = start(), tx.init(start()), IDS[0]
    for given in (("sum",), ("sum", True)):
        with pytest.raises(TypeError, match=r"'sum', which is no array.*static_argnames="):
            js.train_step(by_name, tx)(*arguments, *given)
    for names in ("how", ("how", "scaled")):
        step = js.train_step(by_name, tx, donate=False, static_argnames=names)
        whole, half = (step(*arguments, how)[2] for how in ("sum", "mean"))
        assert whole == 2 * half == step(*arguments, how="sum")[2]
    assert step(*arguments, "sum", True)[2] == 3 * whole
    with pytest.raises(TypeError, match=r"got True, which is no array"):
        flagged = lambda p, ids, flag: loss(p, ids) if flag else 0 * loss(p, ids)  # noqa: E731
        js.train_step(flagged, tx)(*arguments, True)
    assert step(*arguments, "sum")[2] == whole  # nothing was consumed


def test_an_error_of_the_loss_is_told_as_it_is():
    """Whatever other arguments are."""

    def of_mode(params, ids, mode, times=1):
        if mode == "shapes":
            return jnp.zeros(3) @ jnp.zeros(4)
        if mode == "rows":
            return params["table"][ids]
        if mode == "branch" and params["w"].sum() > 0:
            return 0.0
        return sum(loss(params, ids) for _ in range(times))

    tx = js.sgd(0.1)
    step = js.train_step(of_mode, tx, static_argnames="mode")
    arguments = start(), tx.init(start()), IDS[0]
    for mode, said in {
        "shapes": "dot_general",
        "rows": "scalar",
        "branch": "boolean",
    }.items():
        with pytest.raises(TypeError, match=f"(?s)^(?!js).*{said}"):
            step(*arguments, mode, 2)
    with pytest.raises(TypeError, match=r'got 2, which is no array.*=\("times",\)'):
        step(*arguments, "", 2)


def test_a_state_in_place_of_parameters_or_of_another_optimizer_is_told():
    tx, params = js.adam(0.1, untouched="exact"), start()
    for make in (js.train_step, js.eval_step):
        with pytest.raises(
            TypeError, match=r"got a state first, wanted \w+\(params, state"
        ):
            make(loss, tx)(tx.init(params), params, IDS[0])
    other = js.adamw(0.1, untouched="exact").init(params)
    for call in (js.train_step(loss, tx), js.eval_step(loss, tx)):
        with pytest.raises(ValueError, match="an exact optimizer with other numbers"):
            call(params, other, IDS[0])


def test_without_jit_it_is_the_pure_function():
    tx, params = EXACT(), start()
    params, *_ = js.train_step(loss, tx, jit=False)(params, tx.init(params), IDS[0])
    assert not is_box(params["table"])


# --- tables in boxes ----------------------------------------------------------------------


def test_a_table_whose_rows_may_be_behind_refuses_to_be_read():
    tx = EXACT()
    params, _ = trained(tx)
    table = params["table"]
    assert not is_box(params["w"])  # used as a whole in each step
    for read in (
        lambda: table[IDS[0]],
        lambda: jnp.take(table, IDS[0], axis=0),
        lambda: table + 1,
        lambda: np.ones((9, 2)) * table,
        lambda: jnp.ones((9, 2)) - table,
        lambda: jnp.asarray(table),
        lambda: np.asarray(table),
        lambda: jnp.dot(table, params["w"]),
        lambda: list(table),
        lambda: table == 0,
        lambda: js.embedding_lookup(table, IDS[0]),
        lambda: jax.jit(loss)(params, IDS[0]),
        lambda: js.value_and_grad(loss)(params, IDS[0]),
    ):
        with pytest.raises(TypeError, match=r"rows of this table may be behind.*eval_step"):
            read()
    with pytest.raises(AttributeError, match=r"rows of this table may be behind"):
        table.at[0].set(1.0)
    assert (table.shape, table.dtype, table.ndim, table.size) == ((9, 2), "float32", 2, 18)
    assert re.fullmatch(r"Held\(float32\[9, 2\]; read it by .*eval_step.*\)", repr(table))
    assert jax.tree.leaves(params)[0] is table.table
    assert is_box(pickle.loads(pickle.dumps(params))["table"])


def test_an_optimizer_whose_rows_never_catch_up_takes_none_that_may_be_behind():
    lazy, (params, state) = js.sgd(0.1, 0.9), trained(EXACT())
    plain, calls = EXACT().init(start()), (lazy.now, lazy.flush)
    evaluate, step = (make(loss, lazy) for make in (js.eval_step, js.train_step))
    calls += tuple(lambda *args, x=x: x(*args, IDS[0]) for x in (evaluate, step))
    for given in ((params, state), (params, lazy.init(params)), (start(), plain)):
        for call in calls:
            with pytest.raises(ValueError, match=r"by sgd\(.* none catches up: .*flush\("):
                call(*given)
    assert not params["table"].table.is_deleted()
    none_behind = js.sgd(0.1, untouched="exact")
    now = none_behind.now(js.hold(start()), none_behind.init(start()))
    chex.assert_trees_all_equal(now, start())


def test_everything_of_ours_sees_through():
    tx, wanted = EXACT(), dense()
    params, state = trained(tx)
    chex.assert_trees_all_close(tx.now(params, state), wanted, rtol=1e-5)
    value = js.eval_step(loss, tx)(params, state, IDS[0])
    np.testing.assert_allclose(value, loss(wanted, IDS[0]), rtol=1e-4)
    caught_up, _ = tx.catch_up(params, state, {"table": IDS[0], "w": None})
    assert is_box(caught_up["table"])
    chex.assert_trees_all_close(tx.flush(params, state)[0], wanted, rtol=1e-5)
    with pytest.raises(
        AssertionError, match=r"rows have missed steps: .* of params\['table"
    ):
        jslices.testing.assert_up_to_date(params, state)
    assert "params['table']" in str(js.explain(loss)(params, IDS[0]))
    ids = js.lookup_ids(loss)(params, IDS[0])["table"]
    assert ids.tolist() == IDS[0].tolist()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def by_hand(params, state, ids):
        now = lambda params: loss(tx.now(params, state), ids)  # noqa: E731
        return tx.apply(js.grad(now)(params), state, params)

    params, state = by_hand(params, state, IDS[0])
    assert is_box(params["table"])
    plan = tx.plan(jax.eval_shape(js.grad(loss), start(), IDS[0]), params)
    assert plan["table"] is not None
    assert chex.assert_trees_all_equal_shapes(tx.init(params), state) is None


def test_gradients_of_parameters_in_boxes_are_in_none():
    tx = EXACT()
    params, state = trained(tx)
    now = lambda params, ids: loss(tx.now(params, state), ids)  # noqa: E731
    grads = js.grad(now)(params, IDS[0])
    assert grads["table"].values.shape == (3, 2) and js.global_norm(grads) > 0
    assert "3 entries" in str(tx.plan(grads, params)["table"])
    assert is_box(tx.apply(grads, state, params)[0]["table"])
    with pytest.raises(TypeError, match="rows of this table may be behind"):
        js.global_norm(params)


def test_boxes_go_by_the_optimizer_of_each_array():
    labels = {"table": "exact", "other": "lazy", "unread": "exact"}
    tx = js.optim.partition({"exact": EXACT(), "lazy": js.adam(0.1)}, labels)
    params = dict.fromkeys(("table", "other", "unread"), jnp.ones((9, 2)))
    params = jax.tree.map(jnp.copy, params)
    total = lambda p, ids: (p["table"][ids] * p["other"][ids]).sum()  # noqa: E731
    state = tx.init(params)
    params, state, _ = js.train_step(total, tx)(params, state, IDS[0])
    # A table that is not read misses the step.
    held = {name: is_box(x) for name, x in params.items()}
    assert held == {"table": True, "other": False, "unread": True}
    square = lambda p, ids: (p["other"][ids] ** 2).sum()  # noqa: E731
    params, state, _ = js.train_step(square, tx)(params, state, IDS[0])
    assert {name: is_box(x) for name, x in params.items()} == held


def test_what_is_saved_in_boxes_is_restored_in_boxes(tmp_path):
    tx = EXACT()
    params, state = trained(tx)
    saver = js.Saver()
    path = saver.save({"params": params, "state": state}, f"{tmp_path}/model")
    fresh = {"params": start(), "state": tx.init(start())}
    held = {**fresh, "params": params}
    for template in (fresh, held, jax.eval_shape(lambda: fresh), None):
        restored = js.Saver().restore(path, template)
        assert is_box(restored["params"]["table"])
        assert isinstance(restored["params"]["w"], jax.Array)
        now = tx.now(restored["params"], state)
        chex.assert_trees_all_equal(now, tx.now(params, state))
    with pytest.warns(UserWarning, match=r"rows of \['table'\] may be behind.*tx\.now"):
        alone = saver.save(params, f"{tmp_path}/alone")
    assert is_box(js.Saver().restore(alone)["table"])
    assert "params/table" in Archive(path).specs
    wider = jax.tree.map(jnp.copy, start(12))
    params, state = js.checkpoint.resize_rows(tx, params, state, wider)
    assert is_box(params["table"]) and params["table"].shape == (12, 2)


def test_stacked_tables_stay_in_boxes():
    params = {"a": jnp.ones((4, 2)), "b": jnp.ones((5, 2)), "w": jnp.ones(2)}
    fun = lambda p, ids: ((p["a"][ids] + p["b"][ids]) @ p["w"]).sum()  # noqa: E731
    stacked, unstack = jslices.tables.stack_tables(
        params, js.explain(fun)(params, IDS[0] % 4)
    )
    tx = EXACT()
    step, state = js.train_step(lambda p, *b: fun(unstack(p), *b), tx), tx.init(stacked)
    stacked, state, _ = step(stacked, state, IDS[0] % 4)
    with pytest.raises(TypeError, match="may be behind"):
        unstack(stacked)["a"][0]
    assert is_box(unstack.stack(unstack(stacked)).tables["2"])
    assert unstack(tx.now(stacked, state))["a"].shape == (4, 2)


# --- what is not donated ------------------------------------------------------------------

LARGE = jax.ShapeDtypeStruct((300_000, 16), jnp.float32)


def large(tx):
    params = {"table": LARGE, "w": jax.ShapeDtypeStruct((16,), jnp.float32)}
    return params, jax.eval_shape(tx.init, params), IDS[0]


def said(monkeypatch, lowered):
    monkeypatch.setattr("jslices._place.hints.hinted", set())
    with pytest.warns() as caught:
        lowered()
        warnings.warn("last", stacklevel=1)
    return [str(w.message) for w in caught if w.category is js.PerformanceHint]


@pytest.mark.parametrize("tx", [js.sgd(0.1), js.adam(0.1), EXACT()], ids=["0", "1", "2"])
def test_what_a_program_gets_undonated_is_said(tx, monkeypatch):
    step = js.train_step(loss, tx)

    def of_hand(params, state, ids):
        now = lambda params: loss(tx.now(params, state), ids)  # noqa: E731
        updates, state = tx.update(js.grad(now)(params), state, params)
        return js.apply_updates(params, updates), state

    def of_scan(params, state, ids):
        body = lambda carry, ids: (step(*carry, ids)[:2], None)  # noqa: E731
        return jax.lax.scan(body, (params, state), ids[None])[0]

    for fun in (step, of_hand, of_scan):
        lower = lambda **how: lambda: jax.jit(fun, **how).lower(*large(tx))  # noqa: B023, E731
        (hint,) = said(monkeypatch, lower())
        assert re.search(r"float32\[300000, 16\].*undonated.*19.2 MB.*donate_argnums", hint)
        assert not said(monkeypatch, lower(donate_argnums=(0, 1)))
    assert not said(monkeypatch, lambda: step.lower(*large(tx)))
    keeps = js.train_step(loss, tx, donate=False)
    assert not said(monkeypatch, lambda: keeps.lower(*large(tx)))
    assert not said(monkeypatch, lambda: jax.jit(keeps).lower(*large(tx)))


def test_donated_in_another_order(monkeypatch):
    tx = js.adam(0.1)
    params, state, ids = large(tx)
    grads = jax.eval_shape(js.grad(loss), params, ids)
    in_order = lambda params, state, grads: tx.apply(grads, state, params)  # noqa: E731
    (hint,) = said(
        monkeypatch,
        lambda: jax.jit(tx.apply, donate_argnums=(1, 2)).lower(grads, state, params),
    )
    assert "donated in another order" in hint
    right = jax.jit(in_order, donate_argnums=(0, 1))
    assert not said(monkeypatch, lambda: right.lower(params, state, grads))


def test_a_step_by_hand_outside_of_jit_is_told(monkeypatch):
    tx, params = js.sgd(0.1), {"table": jnp.zeros((300_000, 16)), "w": jnp.ones(16)}
    grads = js.grad(loss)(params, IDS[0])
    (hint,) = said(monkeypatch, lambda: tx.apply(grads, tx.init(params), params))
    assert "outside of jax.jit" in hint
