"""Rows whose numbers stand in the program, and when a dense gradient is worth a word."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import all_at_once, assert_close, slow_but_first
from jax import lax
from jax.sharding import PartitionSpec as P

import jslices as js

V, D = 4200, 4  # 67 KB: of elements of smaller arrays no word is said
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(V, D)).astype(np.float32)
TABLE, SMALL = jax.device_put((TABLE, TABLE[:20]))
IDS = jnp.array([3, 5, 3])
COLUMNS = jnp.array([1, 0, 2])
stop = lax.stop_gradient


def windows(t):
    window = lambda start: lax.dynamic_slice(t, (start, 0), (2, D))  # noqa: E731
    return jax.vmap(window)(IDS), jax.vmap(window)(jnp.array([-3, V])).sum(0)


def in_bodies(t):
    few = t[5:10]
    turn = lambda c, x: (c + (few * x).sum() + (t[0] * x).sum(), None)  # noqa: E731
    return (
        lax.scan(turn, 0.0, jnp.arange(3.0))[0],
        lax.cond(IDS[0] > 2, lambda: few @ jnp.ones(D), lambda: t[20:25, 0]),
        jax.checkpoint(lambda: jnp.sin(few) * t[7:8])(),
        jax.jit(lambda x, y: x * y)(few, few),
        lax.scan(lambda c, row: (c + row.sum(), row * c), 0.0, t[:3]),
        jax.vmap(lambda x: (few * x).sum())(jnp.arange(2.0)),
    )


def while_loop(t):
    def turn(carry):
        k, total = carry
        return k + 1, stop((t @ t[k]).max() + total)

    return lax.while_loop(lambda c: c[0] < 3, turn, (0, 0.0))[1] * t[IDS]


# By name: a program, and how many rows its gradient has.
ROWS = {
    "number": (lambda t: t[7], 1),
    "numpy": (lambda t: t[np.int64(7)], 1),
    "last": (lambda t: t[-1], 1),
    "slice": (lambda t: t[5:10], 5),
    "first": (lambda t: t[:10], 10),
    "strided": (lambda t: t[::420], 10),
    "columns": (lambda t: t[5:10, 1:3], 5),
    "layer": (lambda t: jax.nn.relu(t[:10] @ jnp.ones((D, 3))), 10),
    "transposed": (lambda t: jnp.ones((2, D)) @ t[:10].T, 10),
    "used_twice": (lambda t: [(x @ jnp.ones(D), x.sum(0)) for x in [t[:10]]], 10),
    "stopped_first": (
        lambda t: [stop(x).sum(0, keepdims=True) * x * (x > stop(x) - 1) for x in [t[:10]]],
        10,
    ),
    "two": (lambda t: t[0] * t[1], 2),
    "joined": (lambda t: jnp.concatenate([t[:2], jnp.ones((3, D))]).std(0), 2),
    "beside_ids": (lambda t: t[IDS].sum() * t[:10], 13),
    "windows": (windows, 10),
    "in_bodies": (in_bodies, None),
    "while": (while_loop, 3),
}
DENSE = {
    "parts": lambda t: (t[:1400] * t[1400:2800]).sum() + t[2800:].mean(),
    "split": lambda t: jnp.split(t, 3, axis=0),
    "most": lambda t: t[1:] - t[:-1],
    "many_turns": lambda t: lax.map(lambda x: x * t[:10], jnp.arange(300.0)),
}


def loss_of(form):
    def loss(table):
        return sum((jnp.sin(x) ** 2).sum() for x in jax.tree.leaves(form(table)))

    return loss


@functools.cache
def gradients(which):
    grad = {"jax": jax.grad, "js": js.grad}[which]
    forms = {name: form for name, (form, _) in ROWS.items()} | DENSE
    losses = {name: grad(loss_of(form)) for name, form in forms.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return all_at_once(losses, TABLE)


@pytest.mark.parametrize("name", [*ROWS, *DENSE])
def test_kinds_and_values(name):
    grad = gradients("js")[name]
    assert_close(grad, gradients("jax")[name], rtol=1e-4, atol=1e-5)
    assert js.is_slices(grad) == (name in ROWS)
    if name in ROWS and ROWS[name][1] is not None:
        assert grad.indices.shape == (ROWS[name][1],)


@pytest.mark.parametrize("name", slow_but_first("windows", "in_bodies"))
def test_without_jit(name):
    assert_close(js.grad(loss_of(ROWS[name][0]))(TABLE), gradients("jax")[name], 1e-4, 1e-5)


def test_vjp_of_fixed_rows_as_they_are():
    rows, pull = js.vjp(lambda t: t[5:10], TABLE)
    (grad,) = pull(rows)
    assert grad.indices.tolist() == [5, 6, 7, 8, 9]
    np.testing.assert_array_equal(grad.values, np.asarray(TABLE)[5:10])
    (site,) = js.explain(loss_of(lambda t: t[7]))(TABLE).leaves[0].lookups
    assert site.rows == 1


def test_at_most_half_of_the_rows():
    for count in (1, 10, 11):
        grad = js.grad(loss_of(lambda t, n=count: t[:n]))
        assert js.is_slices(jax.eval_shape(grad, SMALL)) == (count <= 10)
    grad = js.grad(loss_of(lambda t: t[:11]), sparse=True)
    assert js.is_slices(jax.eval_shape(grad, SMALL))


# --- words -------------------------------------------------------------------------------


def warned(loss, table, kind=UserWarning, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grad = jax.eval_shape(js.grad(loss, **options), table)
    assert all(w.filename == __file__ for w in caught)
    return js.is_slices(grad), [(w.category, str(w.message)) for w in caught]


WORDS = {
    "penalty": (lambda t: t[IDS].sum() + (t**2).sum(), r"penalise the rows"),
    "centred": (
        lambda t: (t - t.mean(0, keepdims=True))[IDS].sum(),
        r"rows - rows.mean\(0\)",
    ),
    "elements": (lambda t: t[IDS, COLUMNS].sum(), r"whole rows of a table"),
    "windows": (
        lambda t: jax.vmap(lambda s: lax.dynamic_slice(t, (s, 1), (2, 2)))(IDS).sum(),
        r"whole rows of a table",
    ),
    "of_row_functions": (
        lambda t: jax.nn.log_softmax(t, -1)[IDS, COLUMNS].sum(),
        r"whole rows of a table",
    ),
    "normalised": (
        lambda t: (t / jnp.linalg.norm(t, axis=1, keepdims=True))[IDS, COLUMNS].sum(),
        r"whole rows of a table",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_advice_by_what_is_done_and_none_for_elements_of_small_arrays(name):
    loss, advice = WORDS[name]
    is_rows, ((kind, text),) = warned(loss, TABLE)
    assert not is_rows and kind is js.DensificationWarning
    with pytest.warns(js.DensificationWarning, match=advice):
        warnings.warn(text, kind, stacklevel=1)
    if "whole rows" in advice:
        assert warned(loss, SMALL) == (False, [])


@pytest.mark.parametrize("where", ["inside", "around"])
def test_shard_map(where):
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    ids = jnp.arange(jax.device_count())
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("x")))
    loss = lambda t, i: (t[i] ** 2).sum()  # noqa: E731
    if where == "inside":
        grad, advice = mapped(jax.grad(loss), out_specs=P()), "pcast"
        ours = mapped(js.grad(loss), out_specs=P())
    else:
        total = mapped(lambda t, i: lax.psum(loss(t, i), "x"), out_specs=P())
        grad, advice = jax.grad(total), "call jslices.grad inside the shard_map"
        ours = js.grad(total)
    with jax.set_mesh(mesh), pytest.warns(js.DensificationWarning, match=advice):
        split = jax.device_put(ids, jax.NamedSharding(mesh, P("x")))
        found = jax.jit(ours)(SMALL, split)
    with jax.set_mesh(mesh):
        assert_close(found, jax.jit(grad)(SMALL, split))


def test_a_hint_where_rows_are_many_times_the_array():
    experts = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)
    ids = jnp.arange(80) % 8
    loss = lambda w: jnp.sin(w[ids]).sum()  # noqa: E731
    is_rows, ((kind, text),) = warned(loss, experts)
    assert is_rows and kind is js.PerformanceHint
    assert 'sparse="if_smaller"' in text and "80 rows, 1.3 MB" in text
    assert warned(loss, experts, sparse="if_smaller") == (False, [])
    assert warned(loss, experts, sparse=True) == (True, [])
    assert warned(lambda w: w[ids[:60]].sum(), experts) == (True, [])
    assert warned(loss, jax.ShapeDtypeStruct((8, 9, 64), jnp.float32)) == (True, [])
