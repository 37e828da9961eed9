"""explain: its figures, its lines, its suggestions, its layout."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jslices as js

S = jax.ShapeDtypeStruct
F32 = jnp.float32


def model(params, ids, scale):
    def body(carry, i):
        return carry + params["table"][i] @ params["w"], None

    hidden, _ = lax.scan(body, jnp.zeros((4, 8)), ids)
    hidden = hidden + params["tied"][ids[0]]
    logits = hidden @ params["tied"].T
    return (logits**2).sum() * scale


LINE = model.__code__.co_firstlineno
PARAMS = {
    "table": S((10**9, 128), F32),
    "tied": S((5000, 8), jnp.bfloat16),
    "unused": S((7,), F32),
    "w": S((128, 8), F32),
}
IDS = S((100, 4), jnp.int32)


@pytest.fixture(scope="module")
def report():
    # A table of half a terabyte: nothing is computed.
    return js.explain(model)(PARAMS, IDS, S((), F32))


def test_figures(report):
    leaves = {leaf.path: leaf for leaf in report.leaves}
    assert list(leaves) == [
        "params['table']",
        "params['tied']",
        "params['unused']",
        "params['w']",
    ]
    table = leaves["params['table']"]
    assert (
        table.kind == "sparse" and table.shape == (10**9, 128) and table.dtype == "float32"
    )
    assert table.rows == 400 and table.sparse_bytes == 400 * (128 * 4 + 4)
    assert table.dense_bytes == 10**9 * 128 * 4
    assert table.step_bytes == 400 * 128 * 4 * 6
    assert [(site.line.file, site.line.line, site.rows) for site in table.lookups] == [
        (__file__, LINE + 2, 400)
    ]
    assert table.lookups[0].line.text.startswith('return carry + params["table"][i]')
    assert table.dense_line is None and table.suggestion is None
    assert leaves["params['unused']"].kind == "unused"
    assert report.dense_bytes == sum(leaf.dense_bytes for leaf in report.leaves)
    assert report.sparse_bytes == table.sparse_bytes + 5000 * 8 * 2 + 128 * 8 * 4


def test_what_made_it_dense(report):
    tied = next(leaf for leaf in report.leaves if "tied" in leaf.path)
    assert tied.kind == "dense" and tied.rows == 4
    assert (tied.dense_line.file, tied.dense_line.line) == (__file__, LINE + 6)
    assert tied.dense_line.text == 'logits = hidden @ params["tied"].T'
    assert "score only some rows" in tied.suggestion
    plain = next(leaf for leaf in report.leaves if leaf.path == "params['w']")
    assert plain.kind == "dense" and plain.dense_line.line == LINE + 2 and not plain.lookups


def test_weights_without_lookups_take_one_line():
    params = {name: S((8, 8), F32) for name in "abc"} | {"t": S((90, 8), F32)}

    def fun(p, ids):
        return jnp.tanh(p["t"][ids] @ p["a"] @ p["b"] + p["c"].sum(0)[None]).sum()

    report = js.explain(fun)(params, S((5,), jnp.int32))
    lines = str(report).splitlines()
    assert [leaf.path for leaf in report.leaves] == ["p['a']", "p['b']", "p['c']", "p['t']"]
    assert [line.split("  ")[0] for line in lines[2:4]] == ["p['t']", "3 without lookups"]
    assert lines[3].split()[-3:] == ["B", "4.6", "KB"] and "768 B" in lines[3]
    assert "p['a']" not in str(report) and "3 without lookups" in report.to_markdown()
    # Without any lookup there is nothing else to show.
    alone = str(js.explain(lambda p: (p["a"] @ p["b"]).sum())(params))
    assert "p['a']" in alone and "p['b']" in alone


def test_tables_that_would_be_smaller_dense():
    params = {"t": S((1000, 8), F32), "tiny": S((3, 8), F32)}

    def fun(p, ids):
        return (p["t"][ids] * p["tiny"][ids % 3]).sum()

    args = params, S((50,), jnp.int32)
    report = js.explain(fun)(*args)
    assert [leaf.kind for leaf in report.leaves] == ["sparse", "sparse"]
    (note,) = [line for line in str(report).splitlines() if "if_smaller" in line]
    assert str(report).index("p['tiny']:") < str(report).index(note)
    chosen = js.explain(fun, sparse="if_smaller")(*args)
    assert [(leaf.kind, leaf.rows) for leaf in chosen.leaves] == [
        ("sparse", 50),
        ("dense", 50),
    ]
    assert "if_smaller" not in str(chosen)
    assert chosen.sparse_bytes < report.sparse_bytes


def test_layout(report):
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    assert "params['table']" in text and "512.0 GB" in text and "instead: " in text
    assert f"test_explain.py:{LINE + 6}" in text
    markdown = report.to_markdown()
    assert markdown.splitlines()[1].startswith("| --- |")
    assert "score only some rows" in markdown
    assert "&#x27;tied&#x27;" in report._repr_html_()


def test_long_names_and_shapes_still_fit():
    params = {
        f"a_very_long_module_name_{i}" * 3: S((10**9, 2, 3, 4, 5, 6), F32) for i in range(2)
    }
    report = js.explain(lambda p, i: sum(x[i].sum() for x in p.values()))(params, IDS)
    assert max(map(len, str(report).splitlines()[:5])) <= 100


@jax.custom_jvp
def over_all_rows(table):
    return table / table.sum(axis=0, keepdims=True)


over_all_rows.defjvp(lambda primals, tangents: (over_all_rows(*primals), *tangents))


@pytest.mark.parametrize(
    "use, hint",
    [
        (lambda t: over_all_rows(t)[jnp.array([0])].sum(), "after the lookup"),
        (lambda t: (t**2).sum(), "penalise the rows"),
        (lambda t: t[jnp.array([0, 1]), jnp.array([1, 0])].sum(), "whole rows of a"),
        (
            lambda t: lax.scan(lambda c, row: (c + row.sum(), None), 0.0, t)[0],
            "loop's body",
        ),
        (lambda t: jnp.sort(t, axis=0)[0].sum(), "sort the rows"),
        (lambda t: lax.cumlogsumexp(t, axis=0).sum(), "table[ids], before this step"),
    ],
)
def test_suggestions(use, hint):
    (leaf,) = js.explain(use)(S((6, 3), F32)).leaves
    assert leaf.kind == "dense" and hint in leaf.suggestion


def test_arguments_as_for_grad():
    def fun(scale, table, ids):
        return scale * table[ids].sum(), {"aux": ids}

    report = js.explain(fun, argnums=(1, 0), has_aux=True)(1.0, jnp.ones((5, 2)), ids=IDS)
    assert [(leaf.path, leaf.kind) for leaf in report.leaves] == [
        ("table", "sparse"),
        ("scale", "dense"),
    ]
    forced = js.explain(fun, argnums=1, has_aux=True, sparse=False)(
        1.0, jnp.ones((5, 2)), IDS
    )
    assert forced.leaves[0].kind == "dense"


def test_an_optimizer_says_how_it_steps_each_array():
    def loss(params, ids):
        return (params["table"][ids] @ params["w"]).sum()

    params = {
        "table": jax.ShapeDtypeStruct((10**6, 64), jnp.float32),
        "w": jax.ShapeDtypeStruct((64,), jnp.float32),
    }
    for count, way in ((100, "together"), (10**5, "in chunks"), (2 * 10**6, "all rows")):
        ids = jax.ShapeDtypeStruct((count,), jnp.int32)
        for tx in (js.adam(1e-3), js.optim.chain(js.optim.clip(1.0), js.lamb(1e-3))):
            report = js.explain(loss, optimizer=tx)(params, ids)
            table, w = report.leaves
            assert (table.step.way, table.step.entries, w.step) == (way, count, None)
            assert f"stepped: {count:,} entries" in str(report)
    assert js.explain(loss)(params, ids).leaves[0].step is None


APART = js.optim.partition({0: js.sgd(0.1), 1: js.adam(0.1)}, {"t": 1, "w": 0})


@pytest.mark.parametrize(
    ["name", "tx", "row", "weights"],  # numbers of a row of 64, and of 64 weights
    [
        ("sgd", js.sgd(0.1), 64, 64),
        ("rowwise_adagrad", js.rowwise_adagrad(0.1), 65, 128),
        ("adam", js.adam(0.1, untouched="exact"), 193, 256),
        ("chain", js.optim.chain(js.optim.clip(1.0), js.lion(0.1)), 128, 128),
        ("partition", APART, 192, 64),
    ],
)
def test_the_bytes_that_an_optimizer_moves(name, tx, row, weights):
    params, ids = {"t": S((10**6, 64), F32), "w": S((64,), F32)}, S((100,), jnp.int32)
    loss = lambda params, ids: (params["t"][ids] @ params["w"]).sum()  # noqa: E731
    report = js.explain(loss, optimizer=tx)(params, ids)
    assert [x.step_bytes for x in report.leaves] == [8 * 100 * row, 8 * weights]
    assert str(report).splitlines()[0].endswith(f"{name} moves")
    if name != "partition":  # which has a label for each array
        again = js.explain(loss, optimizer=tx)({**params, "none": None}, ids)
        assert [x.step_bytes for x in again.leaves] == [8 * 100 * row, 8 * weights]
