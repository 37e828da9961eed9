"""The warning names the user's line, can be filtered, and can be made fatal."""

import itertools
import re
import sys
import traceback
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jslices as js

TABLE = jnp.ones((6, 2))
IDS = jnp.array([1, 4])


def test_each_cell_of_a_notebook_is_warned_of(slices):
    """Cells have the same line numbers, and files of their own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for cell in ("one", "two", "one"):
            exec(compile("np.asarray(slices)", cell, "exec"), {"np": np, "slices": slices})
    assert [w.filename for w in caught] == ["one", "two"]


@pytest.fixture
def slices():
    return js.IndexedSlices(jnp.ones((2, 2)), IDS, (6, 2))


@pytest.mark.parametrize(
    "convert",
    [
        lambda s: jnp.sum(s),
        lambda s: s + jnp.zeros((6, 2)),
        lambda s: s * jnp.ones((6, 2)),
        lambda s: s / jnp.ones((6, 2)),
        lambda s: np.asarray(s).sum(),
        lambda s: jax.jit(lambda s: s + 0.0)(s).sum(),
        lambda s: jnp.ones((1, 6)) @ s,
    ],
)
def test_implicit_conversion_works_and_names_this_line(slices, convert):
    with pytest.warns(js.DensificationWarning, match=r"\(6, 2\)") as caught:
        result = convert(slices)
    assert np.sum(result) in (4, 4.0)
    (warning,) = caught
    assert warning.filename == __file__
    assert warning.lineno == convert.__code__.co_firstlineno
    assert "48 B" in str(warning.message) and "To stay sparse" in str(warning.message)


def test_shown_once_per_line_by_default(slices):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            np.asarray(slices)
        np.asarray(slices)
    assert len(caught) == 2


def test_explicit_conversion_is_silent(slices):
    assert slices.to_dense().sum() == 4
    assert (jnp.zeros((6, 2)) + slices).sum() == 4


def test_can_be_silenced_and_made_fatal(slices):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", js.DensificationWarning)
        np.asarray(slices)
        warnings.simplefilter("error", js.DensificationWarning)
        with pytest.raises(js.DensificationWarning):
            np.asarray(slices)


def test_tied_weights_warn_once_with_the_dense_line():
    def loss(params):
        hidden = params["table"][IDS]
        return (hidden @ params["table"].T).sum()  # the dense use

    dense_line = loss.__code__.co_firstlineno + 2
    with pytest.warns(js.DensificationWarning) as caught:
        grads = js.grad(loss)({"table": TABLE})
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, dense_line)
    text = str(warning.message)
    assert "params['table'] (float32[6,2]) is dense" in text
    assert "hidden @ params" in text and "2 rows, 16 B" in text
    np.testing.assert_allclose(grads["table"], jax.grad(loss)({"table": TABLE})["table"])


def test_the_line_is_that_of_this_call_of_a_jitted_library_function():
    """JAX remembers the trace of ``jnp.linalg.norm`` from whoever called it first."""
    jax.make_jaxpr(jnp.linalg.norm)(TABLE)

    def loss(table):
        rows = jnp.take(table, IDS, axis=0)
        return rows.sum() + jnp.linalg.norm(table)

    line = loss.__code__.co_firstlineno
    with pytest.warns(js.DensificationWarning) as caught:
        js.grad(loss)(TABLE)
    assert (caught[0].filename, caught[0].lineno) == (__file__, line + 2)
    assert f"{__file__}:{line + 1} (rows = jnp.take" in str(caught[0].message)


def test_a_table_that_is_never_looked_up_is_nobodys_business():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(js.grad(lambda w: (w @ w.T).sum())(TABLE), jax.Array)


def test_plain_jax_grad_of_an_embedding_lookup_is_dense_and_says_so():
    def loss(table):
        return js.embedding_lookup(table, IDS).sum()

    with pytest.warns(js.DensificationWarning, match="jslices.grad") as caught:
        grad = jax.grad(loss)(TABLE)
    assert caught[0].lineno == loss.__code__.co_firstlineno + 1
    assert caught[0].filename == __file__ and "48 B" in str(caught[0].message)
    np.testing.assert_array_equal(grad, js.grad(loss)(TABLE).to_dense())


def test_an_accepted_dense_gradient_does_not_warn():
    def loss(table):
        return (
            js.embedding_lookup(table, IDS).sum()
            + jax.jit(lambda t: js.embedding_lookup(t, IDS))(table).sum()
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grad = js.grad(loss, sparse=False)(TABLE)
        _, pull = js.vjp(loss, TABLE, sparse=False)
        np.testing.assert_array_equal(pull(jnp.float32(1))[0], grad)
    assert isinstance(grad, jax.Array) and grad.sum() == 8


def test_forced_sparse_raises_with_the_line():
    def loss(table):
        return table[IDS].sum() * table.sum()

    with pytest.raises(js.DenseUseError) as caught:
        js.grad(loss, sparse=True)(TABLE)
    line = loss.__code__.co_firstlineno + 1
    text = str(caught.value)
    assert f"{__file__}:{line}" in text and "table.sum()" in text and "reduce_sum" in text


def last_frame(error):
    return traceback.extract_tb(error.__traceback__)[-1]


def test_a_fatal_warning_ends_at_the_users_line():
    def loss(table):
        hidden = table[IDS]
        return (hidden @ table.T).sum()

    line = loss.__code__.co_firstlineno + 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", js.DensificationWarning)
        with pytest.raises(js.DensificationWarning) as caught:
            js.grad(loss)(TABLE)
    frame = last_frame(caught.value)
    assert (frame.filename, frame.lineno) == (__file__, line)
    assert frame.line == "return (hidden @ table.T).sum()"
    with pytest.raises(js.DenseUseError) as caught:
        js.grad(loss, sparse=True)(TABLE)
    assert last_frame(caught.value).lineno == line


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, t: jax.jvp(f, (t,), (t,))[1],
        lambda f, t: jax.linearize(f, t)[1](t),
        lambda f, t: jax.jacfwd(f)(t),
        lambda f, t: jax.hessian(f)(t),
        lambda f, t: jax.vmap(jax.grad(f))(jnp.stack([t, t])),
        lambda f, t: jax.jit(jax.grad(jax.checkpoint(f)))(t),
        lambda f, t: jax.jvp(js.grad(f), (t,), (t,))[1].values,
        lambda f, t: jax.jvp(jax.grad(f), (t,), (t,))[1],
    ],
)
def test_every_derivative_goes_through_an_embedding_lookup(derivative):
    def marked(table):
        return (js.embedding_lookup(table, IDS) ** 3).sum()

    def plain(table):
        return (table[IDS] ** 3).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", js.DensificationWarning)
        got, wanted = derivative(marked, TABLE), derivative(plain, TABLE)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_forward_derivatives_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jvp(lambda t: js.embedding_lookup(t, IDS).sum(), (TABLE,), (TABLE,))
        jax.grad(lambda w: (js.embedding_lookup(TABLE, IDS) * w).sum())(jnp.float32(1))


@pytest.mark.parametrize("file", ["/cells/82.py", "<ipython-input-4-0a1b2c>"])
def test_a_line_of_a_notebook_goes_by_its_cell(file, monkeypatch):
    """As IPython names it: 8 and later by a method, 7 by the file's name."""
    new = types.SimpleNamespace(
        format_code_name=lambda f: ("Cell", "In[4]") if "82" in f else None
    )
    compiler = types.SimpleNamespace() if file.startswith("<") else new
    shell = types.SimpleNamespace(compile=compiler)
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    names = {"table": TABLE, "ids": IDS, "js": js}
    exec(
        compile(
            "\ndef loss(table):\n    return (table[ids] @ table.T).sum()", file, "exec"
        ),
        names,
    )
    assert "Cell In[4], line 3" in str(js.explain(names["loss"])(TABLE))


def test_a_line_goes_by_its_file_where_ipython_is_half_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace())
    assert f"{__file__}:" in str(js.explain(lambda t: (t[IDS] @ t.T).sum())(TABLE))


# --- Gradients of JAX, and an optimizer of ours -----------------------------------------

#: Rows of a table; of two tables one is told.
NUMBERS = itertools.count(70_000)
LABELS = {"table": "rows", "rest": "rest"}


def hints(tx, grad, loss, rows=None):
    """Those of a step that is traced twice, of two arrays of 18 MB unless ``rows`` says."""
    shapes = {k: ((rows or next(NUMBERS)), 64) for k in LABELS}
    params = {k: jax.ShapeDtypeStruct(shape, "float32") for k, shape in shapes.items()}
    state = jax.eval_shape(tx.init, params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step = lambda p, s: tx.update(grad(loss)(p), s, p)  # noqa: E731
            jax.eval_shape(step, params, state)
    kinds = [w for w in caught if issubclass(w.category, js.PerformanceHint)]
    return [w for w in kinds if "no gradient came as rows" in str(w.message)]


def looked_up(params):
    return (params["table"][IDS] * params["rest"][:2]).sum()


def tied(params):
    return looked_up(params) + params["table"].sum()


def both_found(params):
    return sum(js.embedding_lookup(x, IDS).sum() for x in params.values())


PARTS = js.optim.partition({"rows": js.adagrad(0.1), "rest": js.sgd(0.1)}, LABELS)


@pytest.mark.parametrize(
    "tx",
    [
        js.sgd(0.1),
        js.optim.chain(js.optim.clip(1.0), js.sgd(0.1)),
        PARTS,
        optax.chain(optax.clip(1.0), js.sgd(0.1)),
        js.from_optax(optax.sgd(0.1)),
    ],
    ids=["alone", "chain", "partition", "in Optax", "of Optax"],
)
def test_gradients_of_jax_are_noticed_where_the_optimizer_alone_is_ours(tx):
    """Once: nothing is wrong, but nothing is won."""
    (hint,) = hints(tx, jax.grad, looked_up)
    said = (
        r"float32\[7\d{4}, 64\], as from jax.grad: .* 17\.9 MB, .* type jslices.value_and"
    )
    assert re.search(said, str(hint.message)) and hint.filename == __file__
    assert not hints(tx, jax.grad, looked_up, rows=60_000)  # 15 MB


@pytest.mark.filterwarnings("ignore::jslices.DensificationWarning")
def test_gradients_that_are_arrays_on_purpose_or_by_parts_are_not_noticed():
    def dense(loss):
        return js.grad(loss, sparse=False)

    def by_both(loss):
        """Of the table by jslices, of the rest by JAX."""

        def grad(params):
            rows = js.grad(lambda table: loss(params | {"table": table}))(params["table"])
            return {"table": rows, "rest": jax.grad(loss)(params)["rest"]}

        return grad

    def converted(loss):
        return lambda params: js.tree.map(lambda g: g.to_dense(), js.grad(loss)(params))

    sgd = js.sgd(0.1)
    assert not hints(sgd, js.grad, looked_up)
    assert not hints(sgd, dense, looked_up)
    assert not hints(sgd, js.grad, tied)
    assert not hints(sgd, converted, both_found)
    assert not hints(sgd, jax.grad, both_found)  # of which there is a warning
    assert not hints(PARTS, by_both, looked_up)
    many = lambda params: (params["table"][jnp.arange(65_000)] * 2.0).sum()  # noqa: E731
    assert not hints(js.from_optax(optax.chain(js.sgd(0.1))), js.grad, many, rows=70_000)
    assert hints(sgd, jax.grad, tied)
