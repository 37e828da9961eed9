"""Parameters of 16 bits, rounded stochastically by a key."""

import functools
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import all_at_once, fast_jit, numpy_dense, slow_unless
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from optimizers import KINDS, label, make

import jslices as js
import jslices.testing
from jslices.demo import skipgram

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
KEY = jax.random.key(0)
V, D = 9, 4
SIGMAS = 6  # of which a normal number is further away once in 5e8 draws


def slices(ids, values, height=V):
    ids = np.array(ids, np.int32)
    return js.IndexedSlices(*jax.device_put((values, ids)), (height, values.shape[1]))


def bits(x):
    return np.asarray(x).view(np.uint16)


def dtypes(tree):
    return jax.tree.map(lambda x: x.dtype, tree)


def assert_same_bits(actual, wanted):
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == w.dtype
        assert np.asarray(a).tobytes() == np.asarray(w).tobytes()


# --- One number, many roundings -------------------------------------------------------

MANY = 4096
add = jax.jit(js.apply_updates)


def neighbours(x, dtype):
    """The largest number of ``dtype`` that is at most ``x``, and the next one above."""
    up, down = (np.array(sign * np.inf, dtype) for sign in (1, -1))
    with np.errstate(over="ignore"):
        near = np.float32(x).astype(dtype)
        low = near if float(near) <= x else np.nextafter(near, down)
        return low, low if float(low) == x else np.nextafter(low, up)


def check_rounding(param, update, dtype):
    param = np.array(param, dtype)
    total = np.float32(param) + np.float32(update)
    table = np.full((MANY, 1), param)
    got = np.asarray(add(table, np.full((MANY, 1), update, np.float32), KEY))
    with np.errstate(over="ignore"):
        nearest = total.astype(dtype)
    if not np.isfinite(total):
        assert_same_bits(got, np.full_like(got, total))
        return
    low, high = neighbours(float(total), dtype)
    assert set(bits(got).ravel()) <= {*bits([low, high]), *bits([nearest])}
    if np.isfinite(nearest):
        assert np.isfinite(got).all()
    if not (np.isfinite(low) and np.isfinite(high)):
        return
    gap = float(high) - float(low)
    share = (float(total) - float(low)) / gap if gap else 0.0
    went_up = np.mean(got.astype(np.float64) == float(high)) if gap else 0.0
    noise = SIGMAS * np.sqrt(share * (1 - share) / MANY) + 2 / MANY
    assert abs(went_up - share) <= noise + 2.0**-16


@given(st.floats(width=16), st.floats(-1e5, 1e5, width=32, allow_subnormal=False))
def test_float16_goes_to_a_neighbour_with_the_right_share(param, update):
    if not np.isnan(param):
        check_rounding(param, update, FLOAT16)


@given(
    st.floats(2**-20, 2**20, width=32), st.floats(-1, 1, width=32, allow_subnormal=False)
)
def test_bfloat16_goes_to_a_neighbour_with_the_right_share(param, update):
    check_rounding(param, update, BFLOAT16)


@pytest.mark.parametrize(
    "param, update",
    [
        (65504, 15.99),  # nearest rounding stays at the largest number
        (-65504, -15.99),
        (65504, 16),  # and makes this infinite
        (0, 2**-24),  # the smallest subnormal
        (0, 2**-26),
        (0, -3 * 2**-33),
        (2**-14, -(2**-30)),  # the smallest normal number
        (2**-24, -(2**-25)),
        (np.inf, -1),
        (-np.inf, 1),
    ],
)
def test_the_edges_of_float16(param, update):
    check_rounding(param, update, FLOAT16)


def test_the_largest_bfloat16_stays_finite():
    largest = float(jnp.finfo(jnp.bfloat16).max)
    check_rounding(largest, 2.0**118, BFLOAT16)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_what_is_no_number_and_what_is_a_number_of_16_bits_stay(dtype):
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.5, -(2.0**-14)], dtype)
    got = add(special, np.full(7, -0.0, np.float32), KEY)
    assert_same_bits(got, special)
    got = add(np.ones(7, dtype), np.full(7, np.nan, np.float32), KEY)
    assert np.isnan(np.asarray(got)).all()


# --- Tables ---------------------------------------------------------------------------


def table_of(dtype, rng=None):
    rng = np.random.default_rng(1) if rng is None else rng
    return jax.device_put(rng.normal(size=(V, D)).astype(dtype))


BOTH = slow_unless([(BFLOAT16,), (FLOAT16,)], lambda case: case[0] == BFLOAT16)


@pytest.mark.parametrize("dtype", BOTH)
def test_the_mean_of_many_roundings_is_the_sum(dtype):
    rng, count = np.random.default_rng(2), 2000
    table = table_of(dtype, rng)
    update = slices([7, 2, 7, V], rng.normal(size=(4, D)).astype(np.float32) * 1e-3)
    keys = jax.random.split(KEY, count)
    many = jax.jit(jax.vmap(js.apply_updates, (None, None, 0)))(table, update, keys)
    many = np.asarray(many, np.float64)
    summed = numpy_dense(update.values, update.indices, (V, D))
    exact = np.asarray(table, np.float64) + np.float64(summed)
    noise = SIGMAS * many.std(axis=0) / np.sqrt(count) + 1e-7
    assert (np.abs(many.mean(axis=0) - exact) <= noise).all()
    nearest = np.asarray(add(table, update), np.float64)
    assert (np.abs(nearest - exact) > noise).any()


@pytest.mark.parametrize("dtype", BOTH)
def test_the_order_of_entries_and_how_a_row_is_put_together_do_not_matter(dtype):
    rng, table = np.random.default_rng(3), table_of(dtype)
    values = rng.integers(-64, 64, (6, D)).astype(np.float32) * 2.0**-14  # sums are exact
    ids = np.array([7, 2, 7, 0, V, 2])
    wanted = add(table, slices(ids, values), KEY)
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 1, 3, 5, 4]):
        assert_same_bits(add(table, slices(ids[order], values[order]), KEY), wanted)
    together = fast_jit(js.IndexedSlices.coalesce)(slices(ids, values))
    assert_same_bits(add(table, together, KEY), wanted)
    assert_same_bits(add(table, numpy_dense(values, ids, (V, D)), KEY), wanted)
    assert_same_bits(js.apply_updates(table, together, KEY), wanted)  # without jit


def test_the_bits_follow_from_key_leaf_and_row():
    half = 2.0**-9  # of the gap above 1
    ones, update = np.ones((300, 8), BFLOAT16), np.full((300, 8), half, np.float32)
    once = js.apply_updates({"a": ones, "b": ones}, {"a": update, "b": update}, KEY)
    again = js.apply_updates({"b": ones, "c": None}, {"b": update, "c": None}, KEY)
    assert_same_bits(again["b"], once["b"])
    other = js.apply_updates(ones, update, jax.random.key(1))
    draws = [bits(x) > bits(ones) for x in (once["a"], once["b"], other)]
    for i, x in enumerate(draws):
        assert abs(x.mean() - 0.25) < 0.06
        assert len({row.tobytes() for row in x}) > 60  # rows differ
        for y in draws[:i]:
            assert abs((x == y).mean() - 0.625) < 0.06  # as independent ones do


def threefry(key, first, second):
    """Threefry-2x32 of 20 rounds (Salmon et al., 2011), in Python's integers."""
    full = 2**32 - 1
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    first, second = first + keys[0] & full, second + keys[1] & full
    for i in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            first = first + second & full
            second = (second << by | second >> 32 - by) & full ^ first
        first = first + keys[(i + 1) % 3] & full
        second = second + keys[(i + 2) % 3] + i + 1 & full
    return first, second


def test_the_bits_are_those_of_threefry():
    ids, width = [3, 0], 7
    table = {"t": np.ones((V, width), BFLOAT16)}
    half = slices(ids, np.full((2, width), 2.0**-8, np.float32))
    new = js.apply_updates(table, {"t": half}, jax.random.key(5))["t"]
    key = threefry((0, 5), zlib.crc32(b"['t']"), 0x524F554E)
    for row in ids:
        words = np.array([threefry(key, row, block) for block in range(2)]).T
        quarters = np.stack([words & 0xFFFF, words >> 16], axis=1)
        went_up = quarters.ravel()[:width] < 2**15
        assert (np.asarray(new)[row] > 1).tolist() == went_up.tolist()


@pytest.mark.slow
def test_a_table_on_several_devices_gets_the_same_bits():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    by_row = NamedSharding(mesh, PartitionSpec("x"))
    table, update = np.ones((8, D), BFLOAT16), np.full((8, D), 2e-3, np.float32)
    rows = slices([1, 6, 1], np.full((3, D), 1e-3, np.float32), 8)
    for change in (update, rows):
        wanted = add(table, change, KEY)
        assert_same_bits(add(jax.device_put(table, by_row), change, KEY), wanted)
    exchange = js.Exchange("x", overflow="nan", capacity=4.0)
    ids = jax.device_put(np.array([1, 6, 1, 7]), by_row)

    @functools.partial(jax.jit, static_argnums=1)
    def step(table, exchange):
        grads = js.grad(lambda t: t[ids].sum() * 1e-3, exchange=exchange)(table)
        return js.apply_updates(table, grads, KEY)

    split = step(jax.device_put(table, by_row), exchange)
    assert_same_bits(split, step(table, None))
    # Where each device steps rows of its own, their numbers are its own as well.
    spec = PartitionSpec("x")
    each = jax.shard_map(
        js.apply_updates, mesh=mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec
    )
    first = add(table[:2], update[:2], KEY)
    assert_same_bits(np.asarray(jax.jit(each)(table, update, KEY))[2:4], first)


def test_keys_of_all_kinds():
    table, update = table_of(BFLOAT16), slices([3], np.full((1, D), 1e-3, np.float32))
    wanted = add(table, update, jax.random.key(7))
    assert_same_bits(add(table, update, jax.random.PRNGKey(7)), wanted)
    words = np.asarray(jax.random.PRNGKey(7))
    assert_same_bits(js.apply_updates(table, update, words), wanted)
    rbg = jax.random.key(7, impl="rbg")
    wanted = js.apply_updates(table, update, rbg)
    assert_same_bits(js.apply_updates(table, update, jax.random.key_data(rbg)), wanted)


@pytest.mark.parametrize(
    "key", [7, jnp.uint32(7), jnp.zeros(2), jax.random.split(KEY, 3), "seed", jnp.zeros(3)]
)
def test_what_is_no_key_is_refused(key):
    params, tx = {"table": table_of(jnp.float32)}, js.sgd(0.1)
    wanted = r"wants one random key, got key=.*; type .*key=jax.random.fold_in\("
    with pytest.raises(TypeError, match="apply_updates " + wanted):
        js.apply_updates(params, params, key)
    with pytest.raises(TypeError, match="tx.apply " + wanted):
        tx.apply(params, tx.init(params), params, key)


@pytest.mark.parametrize("ids", [[3, 5, 3, V], [3, 5, 3, -1] * 200], ids=["few", "many"])
def test_rows_that_no_entry_names_keep_their_bits(ids):
    rng = np.random.default_rng(4)
    patterns = rng.integers(0, 2**16, (V, D)).astype(np.uint16)
    patterns[0, :2] = 0x8000, 0x7E01  # -0.0, and a NaN of its own
    # (Where XLA makes bfloat16 tables float32 to write, every NaN becomes the same.)
    table, tx = jax.device_put(patterns.view(FLOAT16)), js.adagrad(0.1)
    grads = slices(ids, rng.normal(size=(len(ids), D)).astype(np.float32))
    new, _ = fast_jit(tx.apply)(grads, tx.init(table), table, KEY)
    untouched = ~np.isin(np.arange(V), ids)
    assert (bits(new)[untouched] == patterns[untouched]).all()


def test_other_parameters_get_the_bits_that_they_get_without_a_key():
    rng = np.random.default_rng(5)
    params = {
        "table": table_of(jnp.float32),
        "w": np.ones(3, np.float32),
        "n": np.arange(3, dtype=np.int32),
        "half": np.ones(3, BFLOAT16),
        "none": None,
    }
    updates = {
        "table": slices([1, 1, 4], rng.normal(size=(3, D)).astype(np.float32)),
        "w": np.full(3, 1e-3, np.float32),
        "n": np.ones(3, np.int32),
        "half": None,
        "none": None,
    }
    wanted, got = js.apply_updates(params, updates), js.apply_updates(params, updates, KEY)
    assert_same_bits(got, wanted)
    floats = {k: params[k] for k in ("table", "w")}
    grads, tx = {k: updates[k] for k in floats}, js.adam(0.1)
    step = fast_jit(tx.apply)
    state = tx.init(floats)
    assert_same_bits(step(grads, state, floats, KEY), step(grads, state, floats))


# --- Optimizers -----------------------------------------------------------------------

WIDE = 64


@pytest.mark.parametrize(
    "name, kwargs",
    slow_unless(KINDS, lambda case: case[0] == "adam"),
    ids=label,
)
def test_the_mean_of_many_steps_is_the_step_of_float32(name, kwargs):
    rng, count = np.random.default_rng(6), 200
    sizes = rng.uniform(1, 1.9, (V, WIDE)).astype(BFLOAT16).astype(np.float32)
    values = rng.choice([-1, 1], (5, WIDE)).astype(np.float32)
    ones = np.ones(WIDE, np.float32)
    grads = {"table": slices([7, 2, 7, 0, V], values), "w": ones}
    params = {"table": sizes, "w": ones}
    tx = make(js, name, 1.0 if name == "adadelta" else 1e-3, kwargs)

    def moved(dtype, key=None):
        def cast(tree):
            return js.tree.map(lambda x: x.astype(dtype), tree)

        start = cast(params)
        state = tx.init(start)
        new, now = tx.apply(cast(grads), state, start, key)
        assert dtypes(now) == dtypes(state)
        assert dtypes(new) == dtypes(start)
        return jax.tree.map(
            lambda x, y: x.astype("float32") - y.astype("float32"), new, start
        )

    keys = jax.random.split(KEY, count)
    wanted = fast_jit(lambda: moved(jnp.float32))()
    got = fast_jit(jax.vmap(functools.partial(moved, jnp.bfloat16)))(keys)
    for x, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
        noise = SIGMAS * np.sqrt(np.abs(w) * 2**-7 / count) + np.abs(w).max() * 0.01
        assert (np.abs(x.mean(axis=0) - w) <= noise).all()


def wrappers(tx, grads):
    labels = {"table": "t", "w": "w"}
    shapes = jax.eval_shape(lambda: grads)
    return {
        "chain": js.optim.chain(js.optim.clip(1e9), tx),
        "chain of chains": js.optim.chain(js.optim.chain(tx)),
        "clip_by_global_norm": js.optim.chain(js.optim.clip_by_global_norm(1e9), tx),
        "partition": js.optim.partition({"t": tx, "w": tx}, labels),
        "masked": js.optim.chain(js.optim.masked(tx, {"table": True, "w": True})),
        "freeze_rows": js.optim.freeze_rows(tx, {"table": lambda r: r > V, "w": None}),
        "multi_steps": js.optim.multi_steps(tx, 1, shapes),
        "from_optax": js.from_optax(optax.sgd(2.0**-10)),
        "optax.chain": js.GradientTransformation(*optax.chain(tx)),
    }


@pytest.mark.slow
def test_what_stands_round_an_optimizer_hands_the_key_on():
    rng = np.random.default_rng(7)
    values = rng.integers(-8, 8, (3, D)).astype(BFLOAT16)
    grads = {"table": slices([5, 1, 5], values), "w": np.ones(D, BFLOAT16)}
    params = {"table": table_of(BFLOAT16), "w": np.ones(D, BFLOAT16)}
    tx = js.sgd(2.0**-10)
    given = {"bare": tx, **wrappers(tx, grads)}
    steps = {
        name: functools.partial(lambda tx: tx.apply(grads, tx.init(params), params, KEY), x)
        for name, x in given.items()
    }
    new = {name: params for name, (params, _) in all_at_once(steps).items()}
    nearest, _ = fast_jit(tx.apply)(grads, tx.init(params), params)
    assert (bits(nearest["table"]) != bits(new["bare"]["table"])).any()
    for got in new.values():
        assert_same_bits(got, new["bare"])


@pytest.mark.parametrize("name", ["adam", "rowwise_adagrad", "adafactor"])
def test_a_state_in_float32(name):
    bare = getattr(js, name)(0.1)
    tx = js.optim.with_state_dtype(bare, "float32")
    params = {"table": table_of(BFLOAT16)}
    grads = {"table": slices([1, 4, 1], np.ones((3, D), BFLOAT16))}
    narrow, state = (jax.eval_shape(x.init, params) for x in (bare, tx))
    assert any(x.dtype == BFLOAT16 for x in jax.tree.leaves(narrow))
    assert all(x.dtype != BFLOAT16 for x in jax.tree.leaves(state))
    for key in (None, KEY):
        new = jax.eval_shape(tx.apply, grads, state, params, key)
        assert dtypes(new) == dtypes((params, state))


def test_a_state_in_float32_catches_up_and_has_a_plan():
    tx = js.optim.with_state_dtype(js.adam(0.1, untouched="exact"), "float32")
    params = {"table": table_of(BFLOAT16), "counts": jnp.arange(3)}
    state = jax.eval_shape(tx.init, params)
    assert state.nu["counts"].dtype == "int32"  # what is not floating stays
    ids = {"table": jnp.array([1]), "counts": None}
    assert tx.catches_up
    for new in (
        jax.eval_shape(tx.catch_up, params, state, ids),
        jax.eval_shape(tx.flush, params, state),
    ):
        assert dtypes(new) == dtypes((params, state))

    table = jax.ShapeDtypeStruct((1_000_000, 64), BFLOAT16)
    ids = jnp.zeros(20_000, jnp.int32)
    grads = jax.eval_shape(js.grad(lambda table: table[ids].sum()), table)
    assert tx.plan(grads, table, "cpu").way == "in chunks"  # as the state is float32


def test_a_state_that_is_not_floating_is_refused():
    wanted = r"with_state_dtype\(dtype='int32'\): wanted a floating dtype of 16 bits"
    with pytest.raises(TypeError, match=wanted):
        js.optim.with_state_dtype(js.adam(0.1), "int32")


# --- Learning ---------------------------------------------------------------------------


@pytest.mark.slow
def test_word_vectors_learn_as_in_float32():
    topics, size, steps = 6, 8, 1000
    rng = np.random.default_rng(0)
    text = rng.integers(0, topics, (4000, 1)) * size + rng.integers(0, size, (4000, 10))
    counts = np.bincount(text.ravel(), minlength=topics * size)
    words = [str(i) for i in range(topics * size)]
    data = skipgram.make_data(skipgram.Corpus(words, counts, text.ravel()), seed=0)
    tx = js.optim.with_state_dtype(js.rowwise_adagrad(3e-3), "float32")

    def losses(dtype, stochastic):
        def wide(params):
            return {name: table.astype("float32") for name, table in params.items()}

        def step(carry, key):
            (params, state), pairs = carry, skipgram.draw(data, key, 32)
            value, grads = js.value_and_grad(lambda p: skipgram.loss(wide(p), *pairs))(
                params
            )
            return tx.apply(grads, state, params, key if stochastic else None), value

        start = skipgram.init_params(len(words), 16, seed=0)
        params = {name: table.astype(dtype) for name, table in start.items()}
        keys = jax.random.split(KEY, steps)
        return jax.lax.scan(step, (params, tx.init(params)), keys)[1]

    curves = all_at_once(
        {
            "float32": lambda: losses("float32", False),
            "nearest": lambda: losses("bfloat16", False),
            "stochastic": lambda: losses("bfloat16", True),
        }
    )
    last = {kind: float(x[-100:].mean()) for kind, x in curves.items()}
    first = float(curves["float32"][:10].mean())
    assert last["float32"] < 0.9 * first
    assert abs(last["stochastic"] - last["float32"]) < 0.01
    assert last["nearest"] > last["float32"] + 0.1


# --- Cost -----------------------------------------------------------------------------


#: Before, XLA makes bfloat16 tables float32 to write into them on a CPU.
NEW = jax.__version_info__ >= (0, 12)


@pytest.mark.parametrize("dtype", [FLOAT16, *[BFLOAT16] * NEW])
@pytest.mark.parametrize("name", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_step_with_a_key_works_in_place(name, dtype):
    tx = getattr(js, name)(1e-3)

    def step(params, state, ids, key):
        grads = js.grad(lambda t: (t[ids] ** 2).sum().astype("float32"))(params)
        return tx.apply(grads, state, params, key)

    table = jax.ShapeDtypeStruct((1_000_000, 16), dtype)
    ids = jax.ShapeDtypeStruct((1000,), jnp.int32)
    args = (table, jax.eval_shape(tx.init, table), ids, jax.eval_shape(lambda: KEY))
    js.testing.assert_in_place(step, *args, donate_argnums=(0, 1))
    js.testing.assert_no_dense_temporary(step, *args, donate_argnums=(0, 1))
