"""Frozen rows never move, bit for bit: any optimizer, any gradient, any wrapper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, numpy_dense, slow_but_first, slow_unless
from optimizers import KINDS, SCHEDULE, THREE, D, V, label, make, rng_tree

import jslices as js

FROZEN = np.isin(np.arange(V), [0, 2, 5, 8])
IDS = np.array([0, 1, 1, 5, 7, V, -1, 2])
EXACT = [
    ("sgd", {"momentum": 0.9, "untouched": "exact"}),
    ("adamw", {"weight_decay": 0.1, "untouched": "exact"}),
    ("adamw", {"weight_decay": 0.1, "weight_decay_mode": "all"}),
    ("lion", {"weight_decay": 0.1, "untouched": "exact"}),
]
LATE = {"untouched": "exact"}
FACTORED = ("adafactor", {"min_dim_size_to_factor": 1})
DECAYS = js.adamw(0.1, weight_decay=0.1)
EXACTLY = make(js, "lion", 0.1, EXACT[-1][1])
BITS = {"table": FROZEN, "w": None}
freeze = functools.partial(js.optim.freeze_rows, frozen=BITS)


def grads_of(seed, dense):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(len(IDS), D)).astype(np.float32)
    rows[FROZEN[IDS.clip(0, V - 1)]] = np.nan  # whatever a frozen row gets is gone
    table = numpy_dense(rows, IDS, (V, D)) if dense else js.IndexedSlices(rows, IDS, (V, D))
    return {"table": table, "w": np.ones(4, np.float32)}


SHAPES = grads_of(0, dense=False)
WRAPPED = {
    "from_optax": freeze(js.from_optax(optax.adamw(0.1, weight_decay=0.1))),
    "chain": freeze(js.optim.chain(js.optim.clip_by_global_norm(1.0), EXACTLY)),
    "in a chain": js.optim.chain(js.optim.clip(1.0), freeze(DECAYS)),
    "multi_steps": freeze(js.optim.multi_steps(EXACTLY, 1, SHAPES)),
    "in multi_steps": js.optim.multi_steps(freeze(EXACTLY), 1, SHAPES),
    "partition": freeze(js.optim.partition({"a": EXACTLY, "b": js.sgd(0.1)}, "a")),
    "in partition": js.optim.partition(
        {
            "a": js.optim.freeze_rows(EXACTLY, lambda rows: jnp.asarray(FROZEN)[rows]),
            "b": js.sgd(0.1),
        },
        {"table": "a", "w": "b"},
    ),
    "masked": freeze(js.optim.masked(DECAYS, {"table": True, "w": False})),
    "inject_hyperparams": freeze(
        optax.inject_hyperparams(js.adamw)(learning_rate=0.1, weight_decay=0.1)
    ),
    "in optax.chain": optax.chain(js.optim.clip(9.0), freeze(DECAYS)),
}


QUICK = ("from_optax", "masked")


def start():
    params = rng_tree(np.random.default_rng(0))
    table = np.array(params["table"])
    table[2] = -0.0
    return {**params, "table": jax.device_put(table)}


def bits(x):
    return np.asarray(x).view(np.uint8)


def rows_of(state):
    """What a state has for each row of the table, by key path."""
    pairs = jax.tree.leaves_with_path(state)
    keys = [(jax.tree_util.keystr(path), x) for path, x in pairs]
    return {k: x for k, x in keys if k.endswith("['table']") and x.shape[:1] == (V,)}


def train(tx, kinds):
    """Parameters and state at first, and after each step, on slices or an array.

    Of exact optimizers after each flush as well, from which no step goes on.
    """
    exact = getattr(tx, "catches_up", False)

    @fast_jit
    def run(params, state, grads):
        seen = []
        for dense, grad in zip(kinds, grads, strict=True):
            if exact:
                ids = {"table": True if dense else IDS, "w": None}
                params, state = tx.catch_up(params, state, ids)
            updates, state = tx.update(grad, state, params)
            params = js.apply_updates(params, updates)
            flushed = [tx.flush(params, state)] if exact else []
            seen.append([(params, state), *flushed])
        return seen

    grads = [grads_of(seed, dense) for seed, dense in enumerate(kinds)]
    first = start(), tx.init(start())
    return first, run(*first, grads)


def check(tx, kinds):
    """Frozen rows keep their bits, and so does their state under row gradients."""
    (before, state), steps = jax.device_get(train(tx, kinds))
    for dense, after in zip(kinds, steps, strict=True):
        for params, _ in after:
            frozen = (tree["table"][FROZEN] for tree in (params, before))
            np.testing.assert_array_equal(*map(bits, frozen))
        if not dense:
            now = rows_of(after[0][1])
            for key, x in rows_of(state).items():
                if "acc_grads" not in key:
                    same = bits(x[FROZEN]), bits(now[key][FROZEN])
                    np.testing.assert_array_equal(*same, key)
    assert np.isfinite(params["table"]).all()
    assert (params["table"] != before["table"]).any(1)[[1, 7]].all()


@pytest.mark.parametrize(
    "name, kwargs",
    slow_unless([*KINDS, THREE[0], FACTORED, *EXACT], [*THREE, FACTORED].__contains__),
    ids=label,
)
def test_frozen_rows_keep_their_bits(name, kwargs):
    check(freeze(make(js, name, 0.1, kwargs)), [False, True])


@pytest.mark.parametrize(
    ["wrap"], slow_unless([(wrap,) for wrap in WRAPPED], lambda case: case[0] in QUICK)
)
def test_whatever_stands_around_the_optimizer(wrap):
    # Those with multi_steps are made for one kind of gradient.
    check(WRAPPED[wrap], [False, "multi_steps" not in wrap])


@pytest.mark.parametrize(
    "tx, dense",
    [(DECAYS, True), (js.adafactor(0.1, min_dim_size_to_factor=1), False)],
    ids=["adamw", "adafactor"],
)
def test_free_rows_move_as_if_the_others_had_no_gradient(tx, dense):
    params, grads = start(), grads_of(0, dense)
    masked = {**grads, "table": js.mask_rows(grads["table"], ~FROZEN)}
    wanted, wanted_state = fast_jit(tx.apply)(masked, tx.init(params), params)
    frozen = freeze(tx)
    got, state = fast_jit(frozen.apply)(grads, frozen.init(params), params)
    free = (np.asarray(x["table"])[~FROZEN] for x in (got, wanted))
    np.testing.assert_array_equal(*free)
    assert_close((got["w"], state), (wanted["w"], wanted_state), 0, 0)


@pytest.mark.parametrize(
    "tx, dense",
    slow_unless([(DECAYS, False), (EXACTLY, True)], lambda case: case[0] is DECAYS),
    ids=["lazy", "exact"],
)
def test_rows_are_frozen_later(tx, dense):
    """Round an optimizer that has taken steps: they stay where they are."""
    _, [[(params, state), *_]] = train(tx, [False])
    frozen = freeze(tx)

    @fast_jit
    def step(grads, params, state, ids):
        params, state = frozen.catch_up(params, state, ids)
        return frozen.flush(*frozen.apply(grads, state, params))

    ids = {"table": np.arange(V), "w": None}
    new, _ = jax.device_get(step(grads_of(3, dense), params, state, ids))
    params = jax.device_get(params)
    np.testing.assert_array_equal(bits(new["table"][FROZEN]), bits(params["table"][FROZEN]))
    assert (new["table"] != params["table"]).any(1)[[1, 7]].all()


NONE = np.zeros(V, bool)
GRADUALLY = (NONE, FROZEN, FROZEN & (np.arange(V) != 5), NONE)
SCHEDULED = ("lion", {"learning_rate": SCHEDULE, "weight_decay": 0.1})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flushed", "read", "state"])
@pytest.mark.parametrize("name, kwargs", [EXACT[0], EXACT[1], SCHEDULED], ids=label)
def test_rows_thaw_as_in_a_dense_optimizer(name, kwargs, how):
    """Frozen ones have gradients and updates of zero there; by their state only updates.

    They go on at the change if the new optimizer flushes, else when a step reads them.
    """
    kwargs = {k: x for k, x in kwargs.items() if k != "untouched"}
    tx, dense = make(js, name, 0.1, {**kwargs, **LATE}), make(optax, name, 0.1, kwargs)
    rng, reads_all = np.random.default_rng(4), how == "read"

    @functools.partial(fast_jit, static_argnums=0)
    def step(number, params, state, ids, rows):
        tx = steps[number]
        params, state = tx.catch_up(params, state, np.arange(V) if reads_all else ids)
        grads = js.IndexedSlices(rows, ids, (V, D))
        return tx.apply(grads, state, params)

    @fast_jit
    def dense_step(params, state, ids, rows, bits):
        masked = lambda x: jnp.where(bits[:, None], 0, x)  # noqa: E731
        grads = js.IndexedSlices(rows, ids, (V, D)).to_dense()
        grads = grads if how == "state" else masked(grads)
        updates, state = dense.update(grads, state, params)
        return optax.apply_updates(params, masked(updates)), state

    steps = [js.optim.freeze_rows(tx, bits) if bits.any() else tx for bits in GRADUALLY]
    steps = [tx] * len(steps) if how == "state" else steps
    params = wanted = start()["table"]
    state, wanted_state = steps[0].init(params), dense.init(params)
    for number, bits in enumerate(GRADUALLY):
        params, state = steps[max(number - 1, 0)].flush(params, state)
        if how == "state":
            state = js.optim.freeze_rows(state, bits)
        if how != "read":
            params, state = steps[number].flush(params, state)
        for _ in range(3):
            batch = rng.integers(0, V, 2), rng.normal(size=(2, D)).astype(np.float32)
            params, state = step(number, params, state, *batch)
            wanted, wanted_state = dense_step(wanted, wanted_state, *batch, bits)
        now, _ = steps[number].flush(params, state)
        assert_close(now, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rows_thaw_in_a_resized_table():
    """There they go on as in the old one."""
    tx, back = make(js, "adamw", 0.1, EXACT[1][1]), np.arange(V)[::-1]
    fewer = FROZEN & (np.arange(V) != 5)

    @functools.partial(fast_jit, static_argnums=0)
    def step(tx, params, state, ids, number):
        grads = js.IndexedSlices(jnp.sin(number + jnp.ones((5, D))), ids, (V, D))
        return tx.apply(grads, *tx.catch_up(params, state, ids)[::-1])

    old, new = (js.optim.freeze_rows(tx, x) for x in (fewer, fewer[back]))
    first = js.optim.freeze_rows(tx, FROZEN)
    params, state = start()["table"], first.init(start()["table"])
    for number in range(3):
        params, state = step(first, params, state, IDS[:5], number)
    rows = {"value": back}
    there = js.checkpoint.resize_rows(new, params, state, params + 9, rows=rows)
    here, there = old.flush(params, state), new.flush(*there)
    for number in range(3):
        here = step(old, *here, IDS[:5], number)
        there = step(new, *there, back[IDS[:5]], number)
    here, there = old.flush(*here)[0], new.flush(*there)[0]
    np.testing.assert_array_equal(here, there[back])
    assert (here[5] != start()["table"][5]).all()


@pytest.mark.parametrize("bools", slow_but_first(True, False), ids=["bools", "function"])
def test_rows_that_are_reset_stay_frozen_or_free(bools):
    frozen = np.arange(V) > 4 if bools else lambda rows: rows > 4
    late = js.optim.freeze_rows(js.lion(0.1, **LATE), frozen)
    params, grads = start()["table"], grads_of(0, False)["table"]

    @fast_jit
    def reset(params, state):
        params, state = late.apply(grads, state, params)
        return js.checkpoint.reset_rows(late, params, state, np.array([1, 7]), 3.0)

    params, state = reset(params, late.init(params))
    free = (np.asarray(state.clock.last) >= 0).tolist()
    assert free == [True] * 5 + [False] * 4
    ids = jnp.array([1, 7])
    grads = js.IndexedSlices(jnp.ones((2, D)), ids, (V, D))
    step = fast_jit(lambda *x: late.apply(grads, *late.catch_up(*x, ids)[::-1]))
    for _ in range(2):
        params, state = step(params, state)
    assert (params[7] == 3).all() and (params[1] < 2.9).all()


HIGH = np.arange(V) > 4
ONE = grads_of(0, False)["table"]


@pytest.mark.parametrize(
    "tx",
    [
        js.optim.multi_steps(js.optim.freeze_rows(js.sgd(0.1), HIGH), 1, ONE),
        js.optim.with_state_dtype(js.optim.freeze_rows(js.adam(0.1), HIGH), "float32"),
        js.optim.chain(js.optim.clip(1.0), js.optim.freeze_rows(js.adam(0.1), HIGH)),
        js.optim.partition({0: js.optim.freeze_rows(js.adagrad(0.1), HIGH)}, 0),
    ],
    ids=["multi_steps", "with_state_dtype", "chain", "partition"],
)
def test_rows_are_reset_whatever_stands_around(tx):
    params, rows = start()["table"], np.array([1, 7])
    params = params.astype("bfloat16" if "state_dtype" in repr(tx) else "float32")
    state = tx.init(params)
    reset, new = js.checkpoint.reset_rows(tx, params, state, rows, 3)
    assert (reset[rows] == 3).all() and (reset[2] == params[2]).all()
    assert jax.tree.structure(state) == jax.tree.structure(new)
    assert [x.dtype for x in jax.tree.leaves(new)] == [
        x.dtype for x in jax.tree.leaves(state)
    ]


def test_two_tables_are_reset_of_which_bools_freeze_rows():
    params = {"a": jnp.ones((V, D)), "b": jnp.ones((2 * V, D)), "c": jnp.ones(2)}
    frozen = {"a": FROZEN, "b": np.tile(FROZEN, 2), "c": True}
    tx = js.optim.freeze_rows(js.adam(0.1, **LATE), frozen)
    rows = {"a": np.array([3]), "b": np.array([3, 2 * V - 1]), "c": None}
    values = {"a": 4.0, "b": np.array([[5.0], [6.0]]), "c": None}
    new, _ = js.checkpoint.reset_rows(tx, params, tx.init(params), rows, values)
    np.testing.assert_array_equal(new["a"][:, 0], [1, 1, 1, 4, 1, 1, 1, 1, 1])
    assert new["b"][jnp.array([2, 3, 2 * V - 1]), 0].tolist() == [1, 5, 6]


WHOLE = {"table": jnp.ones((V, D)), "layers": jnp.ones((2, V, D)), "w": jnp.ones(D)}
WHOLE |= {"scale": jnp.ones(()), "free": jnp.ones(D)}
#: Bools of Python and of NumPy, for arrays of any number of axes.
ALL_BUT_ONE = {"table": True, "layers": np.True_, "w": np.bool_(1), "scale": True}
ALL_BUT_ONE |= {"free": False}


def of_all(params, ids):
    rows = params["table"][ids] * params["scale"] + params["layers"][1, ids]
    return (rows @ params["w"]).sum() ** 2 * params["free"].sum()


@pytest.mark.parametrize(
    "untouched, form, dense",
    slow_unless(
        [
            (untouched, form, dense)
            for untouched, form in (("lazy", "tx"), ("exact", "tx"), ("exact", "state"))
            for dense in (False, True)
        ],
        ("lazy", "tx", False).__eq__,
    ),
)
def test_a_bool_freezes_all_of_an_array(untouched, form, dense):
    tx = js.adamw(0.1, weight_decay=0.1, untouched=untouched)
    if form == "tx":
        tx = js.optim.freeze_rows(tx, ALL_BUT_ONE)
    state = tx.init(WHOLE)
    if form == "state":
        state = js.optim.freeze_rows(state, ALL_BUT_ONE)
    step = js.train_step(of_all, tx, sparse=False if dense else None)

    @fast_jit
    def run(params, state):
        for ids in ([1, 1, 4], [2, 4, 0]):
            params, state, _ = step(params, state, jnp.array(ids))
        ids = jnp.array([1, 8])
        rows = {"table": ids, "layers": None, "w": True, "scale": True, "free": True}
        params, state = tx.catch_up(params, state, rows)
        grads = {**jax.tree.map(jnp.ones_like, WHOLE), "layers": None}
        grads["table"] = js.IndexedSlices(jnp.ones((2, D)), ids, (V, D))
        updates, state = tx.update(grads, state, params)
        return tx.flush(js.apply_updates(params, updates), state)[0]

    params = run(WHOLE, state)
    assert (params["free"] != 1).all()
    for name in WHOLE.keys() - {"free"}:
        np.testing.assert_array_equal(params[name], WHOLE[name], name)


def test_true_freezes_everything_and_false_nothing():
    for frozen in (True, False, np.True_, np.False_):
        tx = js.optim.freeze_rows(js.sgd(1.0), frozen)
        new, _ = tx.apply(WHOLE, tx.init(WHOLE), WHOLE)
        assert all((x == bool(frozen)).all() for x in jax.tree.leaves(new))
    # In a state without clocks there is nothing that False would have to be noted in.
    tx = js.optim.partition({"a": EXACTLY, "b": js.sgd(0.1)}, {"table": "a", "w": "b"})
    state = js.optim.freeze_rows(tx.init(start()), {"table": True, "w": False})
    clock = state.inner_states["a"].inner_state.clock
    assert (clock.last["table"] < -(2**30)).all()
    with pytest.raises(TypeError, match="for every table whose rows are frozen"):
        js.optim.freeze_rows(tx.init(start()), {"table": True, "w": True})


def test_forms_of_frozen():
    tree = {"table": jnp.ones((V, D)), "rest": {"a": jnp.ones(2), "b": [jnp.ones(3)]}}
    grads = jax.tree.map(jnp.ones_like, tree)
    for frozen in (
        {"table": FROZEN, "rest": None},
        {"table": jnp.asarray(FROZEN), "rest": {"a": None, "b": [None]}},
        {"table": lambda rows: jnp.asarray(FROZEN)[rows], "rest": None},
    ):
        tx = js.optim.freeze_rows(js.sgd(1.0), frozen)
        new, _ = tx.apply(grads, tx.init(tree), tree)
        np.testing.assert_array_equal(new["table"], np.repeat(FROZEN[:, None], D, 1))
        assert new["rest"]["b"][0].tolist() == [0, 0, 0]
    # A single table; slices whose number of rows is not known; no gradient.
    tx = js.optim.freeze_rows(js.sgd(1.0), lambda rows: rows < 8)
    rows = js.IndexedSlices(jnp.ones((2, D)), jnp.array([7, 8]))
    new, _ = tx.apply(rows, tx.init(tree["table"]), tree["table"])
    np.testing.assert_array_equal(new[:, 0], np.arange(V) < 8)
    assert tx.update(None, tx.init(tree["table"]))[0] is None
    assert tx.plan(rows, tree["table"]).entries == 2


@pytest.mark.parametrize("grad", [js.grad, jax.grad])
def test_a_step_is_in_place_and_without_temporaries(grad):
    """By rows nothing is as large as the table, and under an array only the gradient."""
    rows, count = 50_000, 64
    tx = js.optim.freeze_rows(js.adamw(0.1, weight_decay=0.1), lambda rows: rows < 9)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        return tx.apply(grad(lambda t: (t[ids] ** 2).sum())(params), state, params)

    params = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    given = params, jax.eval_shape(tx.init, params), ids
    memory = js.testing.assert_in_place(step, *given, min_bytes=rows * 4)
    assert memory.temp_bytes < (1.1 * rows if grad is jax.grad else 8 * count) * 16 * 4


@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_state_of_an_exact_optimizer(dense):
    """It knows when each row did its last step: never, if it is frozen."""
    before = start()
    chained = js.optim.chain(js.optim.clip(9.0), EXACTLY)

    @fast_jit
    def run(params, state):
        ids = {"table": True if dense else IDS, "w": None}
        params, state = chained.catch_up(params, state, ids)
        grads = jax.tree.map(jnp.nan_to_num, grads_of(0, dense))
        return chained.flush(*chained.apply(grads, state, params))

    params, _ = run(*run(before, freeze(chained.init(before))))
    table, old = np.asarray(params["table"]), np.asarray(before["table"])
    np.testing.assert_array_equal(bits(table[FROZEN]), bits(old[FROZEN]))
    assert (table != old).any(1)[~FROZEN].all()


def test_errors():
    params = start()
    with pytest.raises(
        TypeError, match=r"of an optimizer with untouched=\"exact\" .* for any"
    ):
        freeze(DECAYS.init(params))
    with pytest.raises(TypeError, match="wants an optimizer, or the state"):
        freeze(params["table"])
    wrong = [
        (TypeError, r"wants bools, got int32\[9\]; for row numbers: l", jnp.arange(V)),
        (ValueError, r"bools of shape \(4,\) for a table of shape \(9, 3\)", FROZEN[:4]),
        (ValueError, r"bools of shape \(9, 1\) for a table", FROZEN[:, None]),
    ]
    for error, message, bits in wrong:
        tx = js.optim.freeze_rows(DECAYS, {"table": bits, "w": None})
        with pytest.raises(error, match=message):
            tx.init(params)
        with pytest.raises(error, match=message):
            tx.update(grads_of(0, dense=True), DECAYS.init(params), params)
    tx = js.optim.freeze_rows(DECAYS, {"tabel": FROZEN, "w": None})
    with pytest.raises(ValueError, match=r"must have the structure of the parameters or a"):
        tx.init(params)
