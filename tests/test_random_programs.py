"""Random programs: nested lookups, steps and control flow, against jax.grad.

Hypothesis draws a program as text, so that a failing one is printed as code that runs by
itself. The quick test compiles a few programs as one; the long one runs each without jit.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PROGRAMS, all_at_once, assert_close, fast_jit
from hypothesis import given, note, settings
from hypothesis import strategies as st

import jslices as js

PREAMBLE = """\
import jax, jax.numpy as jnp, jslices as js, numpy as np
from jax import lax
from jax.experimental import sparse
rng = np.random.default_rng(0)
V, D = 6, 3
P = {
    "table": jnp.asarray(rng.normal(size=(V, D)) / 2, jnp.float32),
    "other": jnp.asarray(rng.normal(size=(V, D)) / 2, jnp.float32),
    "bias": jnp.asarray(rng.normal(size=V) / 2, jnp.float32),
    "w": jnp.asarray(rng.normal(size=(D, D)) / 2, jnp.float32),
    "s": jnp.float32(0.7),
}
IDS = jnp.array([4, 1, 4, 0], jnp.int32)

def equal(ids):
    ids = jnp.expand_dims(ids, -1)
    counts = lax.broadcasted_iota(ids.dtype, (*ids.shape[:-1], V), ids.ndim - 1)
    return (counts == ids).astype(jnp.float32)

def matrix(ids):  # two numbers for each id, one of them padding
    ids = jnp.atleast_1d(ids)
    n = ids.shape[0]
    ids = jnp.concatenate([ids, ids // 2])
    rows = jnp.concatenate([jnp.arange(n), n - jnp.arange(n)])
    places = jnp.stack([rows, ids], axis=1)
    return sparse.BCOO((jnp.cos(ids * 1.0), places), shape=(n, V))

@jax.custom_jvp
def soft(x):
    return jnp.tanh(x)

@soft.defjvp
def _(primals, tangents):
    return soft(*primals), (1 - soft(*primals) ** 2) * tangents[0]
"""

# Expressions for an array with the rows of a table, before it is looked up.
TABLES = [
    'P["table"]',
    'P["other"] * P["s"]',
    '(-P["table"] / 2)',
    'P["table"].astype(jnp.bfloat16).astype(jnp.float32)',
    'jnp.sin(P["other"])',
    'jnp.where(P["table"] > 0, P["table"], 0.5 * P["table"])',
    'P["table"].reshape(V, D, 1).transpose(0, 2, 1).reshape(V, D)',
    '(P["table"] + P["other"])',
    'jnp.concatenate([P["other"], P["table"] * P["s"]])[2:2 + V]',
    '(P["table"] - P["table"].mean(axis=1, keepdims=True))',
    'lax.stop_gradient(P["table"])',
    'lax.optimization_barrier(P["other"])',
    '(P["table"] * P["bias"][:, None])',
    'jax.nn.relu(P["other"])',
    'soft(P["table"])',
    'P["other"][::-1]',
    'P["table"].at[1].set(0.5)',
    'jnp.pad(P["table"], ((1, 0), (0, 0)))[:V]',
    '(P["table"] @ P["w"])',
    'P["other"].reshape(2, 3, D)[::-1].reshape(V, D)',
    'jnp.concatenate(jnp.split(P["table"], 2)[::-1])',
]


@st.composite
def lookups(draw, ids):
    """A scalar made of rows: ``ids`` is an expression for an array of ids, or one id."""
    table = draw(st.sampled_from(TABLES))
    rows = draw(
        st.sampled_from(
            [
                f"({table})[{ids}]",
                f"js.embedding_lookup({table}, {ids}, mode='clip')",
                f"jnp.take({table}, {ids}, axis=0, mode='clip')",
                f"({table}).at[{ids}].get(mode='fill', fill_value=0)",
                f"(jax.nn.one_hot({ids}, V) @ {table})",
                f"(equal({ids}) @ {table})",
                f"(matrix({ids}) @ {table})",
            ]
        )
    )
    body = draw(
        st.sampled_from(
            [
                "{r}.sum()",
                "jnp.sin({r} @ P['w']).sum()",
                "soft({r}).sum()",
                "({r} ** 2).sum()",
            ]
        )
    ).format(r=rows)
    bias = draw(
        st.sampled_from(["", f" * P['bias'][{ids}].sum()", f" + P['bias'][{ids}].max()"])
    )
    return f"({body}{bias})"


@st.composite
def programs(draw, depth, ids="IDS", scalar="IDS[0]", level=0):
    """An expression for a scalar; ``level`` numbers the names it binds."""
    if depth == 0:
        return draw(lookups(ids))
    here = draw(lookups(ids))
    k = f"k{level}"
    inner = draw(programs(depth - 1, k, k, level + 1))
    same = draw(programs(depth - 1, ids, scalar, level + 1))
    many = f"jnp.atleast_1d({ids})"
    form = draw(
        st.sampled_from(
            ["scan", "fori", "cond", "switch", "vmap", "checkpoint", "jit", "add", "custom"]
        )
    )
    return {
        "scan": f"lax.scan(lambda c, {k}: (c * 0.5 + {inner}, c), 0.0, {many})[0]",
        "fori": f"lax.fori_loop(0, 2, lambda i, c: c * 0.5 + "
        f"(lambda {k}: {inner})({many}[i % {many}.shape[0]]), 0.0)",
        "cond": f"lax.cond({scalar} > 2, lambda: {same}, lambda: {here} * 2.0)",
        "switch": f"lax.switch({scalar} % 3, "
        f"[lambda: {here}, lambda: {same}, lambda: 0.0])",
        "vmap": f"jax.vmap(lambda {k}: {inner})({many}).sum()",
        "checkpoint": f"jax.checkpoint(lambda P, ids: {here} + {same})(P, {ids})",
        "jit": f"jax.jit(lambda: {same})()",
        "add": f"({here} + {same} * P['s'])",
        "custom": f"soft({same})",
    }[form]


def run(code):
    namespace = {}
    exec(PREAMBLE + code, namespace)
    return namespace["loss"], namespace["P"]


@st.composite
def losses(draw):
    """A program as code that defines ``loss`` and ``P``."""
    depth = draw(st.sampled_from([1, 1, 2, 2, 3, 4]))
    code = f"\ndef loss(P):\n    return {draw(programs(depth))}\n"
    note(PREAMBLE + code + "\nprint(js.grad(loss)(P), jax.grad(loss)(P))")
    return code


def check(loss, params, found, wanted):
    assert_close(found, wanted, rtol=2e-3, atol=2e-4)
    # Only `P["bias"][:, None]` and the scale use anything whole, and neither is a use of
    # the tables: what reads a table, reads rows of it.
    report = js.explain(loss)(params).leaves
    for name in ("table", "other"):
        kind = next(leaf.kind for leaf in report if leaf.path == f"P['{name}']")
        assert kind in ("sparse", "unused")
        assert js.is_slices(found[1][name])


@settings(max_examples=1)
@given(st.lists(losses(), min_size=5, max_size=5))
def test_a_few_random_programs(codes):
    drawn = {str(number): run(code) for number, code in enumerate(codes)}
    params = drawn["0"][1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", js.DensificationWarning)
        found, wanted = (
            all_at_once({name: grad(loss) for name, (loss, _) in drawn.items()}, params)
            for grad in (js.value_and_grad, jax.value_and_grad)
        )
    for name, (loss, _) in drawn.items():
        check(loss, params, found[name], wanted[name])


@pytest.mark.fuzz
@pytest.mark.slow
@settings(max_examples=PROGRAMS)
@given(losses())
def test_random_program(code):
    loss, params = run(code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", js.DensificationWarning)
        wanted = fast_jit(jax.value_and_grad(loss))(params)
        check(loss, params, js.value_and_grad(loss)(params), wanted)


def test_the_fuzz_can_fail():
    """A wrong gradient, and a dense one, are noticed."""
    loss, params = run("\ndef loss(P):\n    return P['table'][IDS].sum()\n")
    wrong = js.grad(loss)(params)["table"] * 2
    with np.testing.assert_raises(AssertionError):
        assert_close(wrong, jax.grad(loss)(params)["table"])
    loss, params = run("\ndef loss(P):\n    return P['table'].cumsum(0)[IDS].sum()\n")
    assert js.explain(loss)(params).leaves[3].kind == "dense"
    assert jnp.ndim(js.grad(loss)(params)["table"]) == 2
