"""dp_sgd: the distribution is that of dense DP-SGD, whatever rows are read when."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, slow_but_first

import jslices as js
from jslices.optim.engine.clock import RowClock

KEY = jax.random.key(7)
V, N = 9, 4000  # each of N columns is a run by itself
IDS = np.random.default_rng(0).integers(0, 6, (6, 3)).astype(np.int32)  # 6 to 8: never read
RATE = 0.5
SIGMA, CLIP, BATCH = 1.5, 0.4, 2


def decaying(count):
    return 0.5 / (1 + count)


def make(rate=RATE, sigma=SIGMA, key=KEY):
    return js.optim.dp_sgd(rate, CLIP, sigma, BATCH, key)


def loss(table, ids):
    return (table[ids].sum(axis=0) ** 2).sum() / 2


def nothing(ids, shape=(V, N)):
    """A gradient of zero of some rows."""
    return js.IndexedSlices(jnp.zeros((len(ids), *shape[1:])), jnp.asarray(ids), shape)


def run(tx, table, state, batches=IDS, gradient=None):
    def step(table, state, ids):
        table, state = tx.catch_up(table, state, ids)
        grads = (gradient or js.grad(loss))(table, ids)
        if gradient is None:  # as if it were clipped, or there would be a warning
            grads = grads.with_values(grads.values)
        return tx.apply(grads, state, table)

    step = fast_jit(step)
    for ids in batches:
        table, state = step(table, state, ids)
    return table, state


def dense_moments(rate):
    """Mean and covariance of the rows after dense DP-SGD, in closed form."""
    mean, covariance = np.ones(V), np.zeros((V, V))
    for count, ids in enumerate(IDS):
        reads = np.bincount(ids, minlength=V)
        moved = np.eye(V) - rate(count) / BATCH * np.outer(reads, reads)
        mean = moved @ mean
        deviation = rate(count) * SIGMA * CLIP / BATCH
        covariance = moved @ covariance @ moved.T + deviation**2 * np.eye(V)
    return mean, covariance


@pytest.mark.parametrize(
    "rate", slow_but_first(decaying, RATE), ids=["schedule", "constant"]
)
def test_distribution_is_that_of_dense_dp_sgd(rate):
    tx, table = make(rate), jnp.ones((V, N))
    table, _ = tx.flush(*run(tx, table, tx.init(table)))
    mean, covariance = dense_moments(rate if callable(rate) else lambda count: rate)
    variances = np.diag(covariance)
    # Five standard errors of each moment, of N normal samples.
    error = 5 * np.sqrt(variances / N)
    assert (np.abs(np.mean(table, axis=1) - mean) < error).all()
    products = np.outer(variances, variances) + covariance**2
    difference = np.cov(table) - covariance
    assert (np.abs(difference) < 5 * np.sqrt(products / N)).all()
    # The same test tells apart noise that is a tenth too large.
    assert (np.abs(1.21 * np.cov(table) - covariance) > 5 * np.sqrt(products / N)).any()


def test_a_gradient_in_which_no_example_was_clipped_is_told():
    """At the line; not where examples were clipped, by us or by hand, or without noise."""
    tx, table, ids = make(), jnp.ones((V, N)), jnp.array([[0, 3], [3, 3]])
    of_batch = lambda table, ids: jax.vmap(loss, (None, 0))(table, ids).sum()  # noqa: E731

    def step(gradient, tx=tx):
        return lambda table, state: tx.apply(gradient(table), state, table)

    def by_hand(table):  # example by example
        clipped = [js.clip_by_global_norm(js.grad(loss)(table, x), CLIP)[0] for x in ids]
        return clipped[0] + clipped[1]

    def by_us(table):
        each = jax.vmap(js.grad(loss), (None, 0))(table, ids)
        return js.per_example_global_norm_clip(each, CLIP)[0]

    raw = lambda table: js.grad(of_batch)(table, ids)  # noqa: E731
    twice = lambda table: raw(table) + by_us(table)  # noqa: E731
    state = tx.init(table)
    for gradient in (raw, twice, lambda table: raw(table).coalesce()):
        with pytest.warns(
            UserWarning, match=r"no example was clipped.*per_example"
        ) as told:
            jax.eval_shape(step(gradient), table, state)
        assert {x.filename for x in told} == {__file__}
    for gradient in (by_us, by_hand):
        jax.eval_shape(step(gradient), table, state)
    silent = make(sigma=0.0)
    jax.eval_shape(step(raw, silent), table, silent.init(table))


def test_an_array_gets_noise_as_a_whole():
    tx, table = make(), jnp.zeros((V, N))
    table, state = run(tx, table, tx.init(table), range(4), lambda p, _: jnp.zeros_like(p))
    assert np.std(table) == pytest.approx(2 * RATE * SIGMA * CLIP / BATCH, rel=0.02)
    assert_close(tx.flush(table, state)[0], table, 0, 0)


def test_without_noise_it_is_sgd_of_clipped_sums():
    def each(grad, table, ids):
        return jax.vmap(grad(loss), in_axes=(None, 0))(table, ids)

    tx, other = make(decaying, 0.0), js.sgd(decaying)

    @fast_jit
    def both(table, state, wanted, plain, ids):
        table, state = tx.catch_up(table, state, ids)
        total, _ = js.per_example_global_norm_clip(each(js.grad, table, ids), CLIP)
        dense, _ = optax.per_example_global_norm_clip(each(jax.grad, wanted, ids), CLIP)
        moved = tx.apply(total, state, table)
        return *moved, *other.apply(dense / BATCH, plain, wanted)

    table = wanted = jnp.ones((V, 2))
    state, plain = tx.init(table), other.init(table)
    for ids in IDS.reshape(3, BATCH, 3):
        table, state, wanted, plain = both(table, state, wanted, plain, ids)
    np.testing.assert_array_equal(tx.flush(table, state)[0], table)
    assert_close(table, wanted)


def noise_of(tree, sigma=SIGMA):
    """The noise in each row of what began at zero, as normal numbers."""
    rows = np.concatenate([np.asarray(x).reshape(-1, N) for x in jax.tree.leaves(tree)])
    return rows / (RATE * sigma * CLIP / BATCH)


@pytest.mark.slow
def test_no_noise_is_drawn_twice():
    """Rows, tables, steps and keys: what is added is independent of all that was."""
    start = {"one": jnp.zeros((V, N)), "other": jnp.zeros((V, N))}
    drawn = []
    for key in (KEY, jax.random.key(8)):
        tx, params = make(key=key), start
        state = tx.init(params)
        for ids in IDS[:2]:
            rows = dict.fromkeys(params, ids)
            grads = jax.tree.map(nothing, rows)
            before, state = tx.catch_up(params, state, rows)
            after, state = tx.apply(grads, state, before)
            drawn += [before["one"] - params["one"], after["one"] - before["one"]]
            drawn += [before["other"] - params["other"], after["other"] - before["other"]]
            params = after
        whole, _ = tx.flush(params, state)
        drawn += [whole[name] - params[name] for name in whole]
    noise = noise_of(drawn)
    noise = noise[(noise != 0).any(axis=1)]
    assert len(noise) > 50
    correlations = np.abs(np.corrcoef(noise) - np.eye(len(noise)))
    assert correlations.max() < 5.5 / np.sqrt(N)
    assert (noise != 0).mean() > 0.999


def test_a_flush_that_is_thrown_away_shares_no_noise_with_later_ones():
    tx, table = make(), jnp.zeros((V, N))
    state, released = tx.init(table), []
    for _ in range(3):
        table, state = tx.apply(nothing([0]), state, *tx.catch_up(table, state, [0])[:1])
        released.append(tx.flush(table, state)[0][1:])
    correlations = np.corrcoef(noise_of(released)) - np.eye(3 * (V - 1))
    assert np.abs(correlations).max() < 5.5 / np.sqrt(N)


@pytest.mark.slow
def test_flush_leaves_no_row_behind():
    tx = make()
    params = {"table": jnp.zeros((V, N)), "bias": jnp.zeros(N), "scale": jnp.zeros(())}
    state = tx.init(params)
    grads = {"table": nothing([1]), "bias": None, "scale": jnp.zeros(())}
    params, state = tx.apply(grads, state, params)
    params, state = tx.flush(params, state)
    last = jax.tree.leaves(state.clock.last)
    pairs = zip(last, state.clock.whole, strict=True)
    done = [RowClock.of(x, whole, state.count).step for x, whole in pairs]
    assert all((x == 1).all() for x in done)
    assert all((x != 0).mean() > 0.999 for x in jax.tree.leaves(params))
    again, _ = tx.flush(params, state)
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dp_sgd got")
def test_rows_as_they_are_now_and_the_step_after_agree():
    tx, table = make(), jnp.zeros((V, 3))
    table, state = run(
        tx, table, tx.init(table), [[1], [2, 2]], lambda p, i: nothing(i, p.shape)
    )
    ids = jnp.array([4, 2, 4, 1])

    @fast_jit
    def both(table, state):
        grads = nothing(ids, table.shape)
        caught, later = tx.catch_up(table, state, ids)
        wanted = caught[ids], tx.apply(grads, later, caught)[0]
        at_now = js.grad(lambda table: (0 * tx.now(table, state)[ids]).sum())(table)
        got = tx.now(table, state)[ids], tx.apply(at_now, state, table)[0]
        return got, wanted

    assert_close(*both(table, state), 0, 1e-6)


@pytest.mark.slow
def test_a_checkpoint_in_between(tmp_path):
    tx, start = make(decaying), jnp.ones((V, 3))
    middle = run(tx, start, tx.init(start), IDS[:3])
    wanted = tx.flush(*run(tx, *middle, IDS[3:]))
    path = js.Saver().save(
        {"table": middle[0], "state": middle[1]}, str(tmp_path / "model")
    )
    other = make(decaying, key=jax.random.key(99))  # the state has its own key
    like = {"table": start, "state": other.init(start)}
    restored = js.Saver().restore(path, like)
    got = other.flush(*run(other, restored["table"], restored["state"], IDS[3:]))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("height", [16, 70_000])
def test_the_same_noise_in_any_program(height):
    """In chunks, together, on a mesh, rows in another order."""
    tx, ids = make(), jnp.arange(0, height - 1, 3)[: 2 * (height // 6) + 1]
    table = jnp.zeros((height, 4))

    def steps(table, ids):
        grads = nothing(ids, table.shape)
        table, state = tx.apply(grads, tx.init(table), table)
        table, state = tx.catch_up(table, state, ids[::2])
        table, state = tx.apply(nothing(ids[::2], table.shape), state, table)
        return tx.flush(table, state)[0]

    step = fast_jit(steps)
    wanted = step(table, ids)
    assert_close(step(table, jnp.flip(ids)), wanted, 0, 1e-6)
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), (jax.sharding.AxisType.Auto,))
    split = jax.device_put(table, jax.NamedSharding(mesh, jax.P("x")))
    assert_close(jax.jit(steps)(split, ids), wanted, 0, 1e-6)


@pytest.mark.slow
def test_parts_of_a_tree_and_split_tables_get_the_same_noise():
    """Behind a clip, stepped apart, and on a mesh with Explicit axes."""
    params = {"table": jnp.ones((16, 3)), "w": jnp.ones(3)}
    parts = {"sparse": make(), "dense": make()}
    transformations = {
        "alone": make(),
        "chain": js.optim.chain(js.optim.clip(1e9), make()),
        "partition": js.optim.partition(parts, {"table": "sparse", "w": "dense"}),
    }

    def steps(tx, params, ids):
        params, state = tx.catch_up(params, tx.init(params), {"table": ids, "w": None})
        grads = {"table": nothing(ids, (16, 3)), "w": jnp.zeros(3)}
        return tx.flush(*tx.apply(grads, state, params))[0]

    run = {k: functools.partial(steps, tx) for k, tx in transformations.items()}
    ids = jnp.array([3, 9, 3])
    wanted, *others = fast_jit(lambda *x: [f(*x) for f in run.values()])(params, ids)
    for got in others:
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        specs = {"table": jax.P("x"), "w": jax.P()}
        got = fast_jit(run["alone"])(
            jax.device_put(params, specs), jax.reshard(ids, jax.P())
        )
    assert_close(got, wanted, 0, 1e-6)
    loss = lambda params, ids: params["table"][ids].sum()  # noqa: E731
    for tx in transformations.values():
        with pytest.raises(ValueError, match="no example is clipped"):
            jax.eval_shape(js.train_step(loss, tx), params, tx.init(params), ids)


def test_devices_of_a_shard_map_draw_their_own():
    tx, count = make(), len(jax.devices())
    mesh = jax.make_mesh((count,), ("x",), (jax.sharding.AxisType.Auto,))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    def step(table):
        return tx.apply(jnp.zeros_like(table), tx.init(table), table)[0]

    table = step(jnp.zeros((count, N)))
    assert np.abs(np.corrcoef(table) - np.eye(count)).max() < 5.5 / np.sqrt(N)


def test_refusals(tmp_path):
    table = jnp.ones((V, 2))
    tx = make()
    with pytest.raises(ValueError, match="never get noise"):
        js.HostTable((V, 2), tx)
    with pytest.raises(TypeError, match="numbers of Python"):
        js.optim.dp_sgd(jnp.float32(0.1), CLIP, SIGMA, BATCH, KEY)
    with pytest.raises(TypeError, match="one random key, got key=7"):
        make(key=7)
    narrow = table.astype("bfloat16")
    with pytest.raises(TypeError, match="got a parameter of bfloat16"):
        tx.apply(narrow, tx.init(narrow), narrow)
    assert "7" not in repr(make())
