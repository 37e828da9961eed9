"""Steps between a table and its lookup that keep the gradient sparse, and every id form.

Most cases of one kind are compiled as one program: compiling is what takes the time.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import all_at_once, array, assert_close, fast_jit, gradients
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jslices as js

V, D = 6, 4
RNG = np.random.default_rng(5)
TABLE, OTHER = array(RNG.normal(size=(V, D))), array(RNG.normal(size=(V, D)))
SCALE = array(1.7)
IDS = array([4, 1, 4, 0], np.int32)

STEPS = {
    "cast": lambda t, s: t.astype(jnp.bfloat16).astype(jnp.float32),
    "scale": lambda t, s: -(t * s) / 3,
    "elementwise": lambda t, s: jnp.exp(jnp.tanh(t)) + 1,
    "special": lambda t, s: jnp.log2(t * t + 1) + jax.scipy.special.i0e(t * s),
    "row_vector": lambda t, s: t * jnp.arange(1.0, D + 1)[None],
    "where": lambda t, s: jnp.where(t > 0, t, s * t),
    "reshape": lambda t, s: t.reshape(V, 2, 2).transpose(0, 2, 1).reshape(V, D),
    "columns": lambda t, s: t[:, 1:3],
    "split": lambda t, s: jnp.concatenate(jnp.split(t, 2, axis=1)[::-1], axis=1),
    "stack": lambda t, s: jnp.stack([t, s * t], axis=1),
    "pad_columns": lambda t, s: jnp.pad(t, ((0, 0), (1, 2))),
    "cumulate": lambda t, s: jnp.flip(jnp.cumsum(t, axis=1), axis=1),
    "sort_columns": lambda t, s: jnp.sort(t, axis=1),
    "softmax": lambda t, s: jax.nn.softmax(t * s),
    "complex": lambda t, s: jnp.abs(lax.complex(t, s * t)),
    "normalise": lambda t, s: t / jnp.sqrt((t**2).sum(axis=1, keepdims=True)),
    "centre": lambda t, s: t - t.max(axis=1, keepdims=True),
    "beside": lambda t, s: jnp.concatenate([t * s, t], axis=1),
    "below": lambda t, s: t[1:],
    "window": lambda t, s: (s * t)[1:6, 1:4],
    "concatenate": lambda t, s: jnp.concatenate([t, t * s, jnp.ones((1, D))]),
    "add_array": lambda t, s: t + OTHER * s,
    "barrier": lambda t, s: lax.optimization_barrier((t, s))[0],
    "mask": lambda t, s: t * (t > 0),
}


def both(functions, *args, wanted=jax.grad):
    """``{name: gradients}`` of jslices, without a warning, and of JAX."""
    argnums = tuple(range(len(args)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = {name: js.grad(f, argnums) for name, f in functions.items()}
        got = all_at_once(ours, *args)
    theirs = {name: wanted(f, argnums) for name, f in functions.items()}
    return got, all_at_once(theirs, *args)


@pytest.fixture(scope="module")
def before_the_lookup():
    def make(step):
        return lambda table, scale: (step(table, scale)[IDS] ** 3).sum()

    return both({name: make(step) for name, step in STEPS.items()}, TABLE, SCALE)


@pytest.mark.parametrize("step", STEPS)
def test_step_before_the_lookup(step, before_the_lookup):
    got, wanted = before_the_lookup
    assert js.is_slices(got[step][0])
    assert_close(got[step], wanted[step], rtol=1e-5)


def test_weights_that_all_rows_share_leave_the_table_sparse():
    """They are differentiated as well, and their own gradient is dense."""

    def fun(table, params):
        rows = jnp.tanh(table * params["scale"] + params["bias"][None])
        return (jnp.concatenate([params["first"][None], rows])[IDS] ** 3).sum()

    row = jnp.linspace(0.5, 1.0, D)
    params = {"scale": row[None], "bias": row, "first": row}
    got, wanted = both({"fun": fun}, TABLE, params)
    table, weights = got["fun"]
    assert js.is_slices(table) and not any(map(js.is_slices, jax.tree.leaves(weights)))
    assert_close(got, wanted, rtol=1e-5)


def test_the_whole_table_is_not_computed(monkeypatch):
    rows = 50_000
    monkeypatch.setitem(globals(), "V", rows)

    def make(step):
        return js.grad(lambda table, scale: (step(table, scale)[IDS] ** 3).sum())

    functions = [make(step) for name, step in STEPS.items() if name != "add_array"]
    table = jax.ShapeDtypeStruct((rows, D), jnp.float32)
    compiled = jax.jit(lambda *args: [f(*args) for f in functions])
    compiled = compiled.lower(table, SCALE).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows * D  # a byte an element


ID_FORMS = {
    "colon": lambda t, i: t[i, :],
    "then_columns": lambda t, i: t[i][..., 0:3],
    "two_axes": lambda t, i: t[i[:, None] % jnp.arange(1, 4)[None]],
    "scalar": lambda t, i: t[i[0]],
    "fill": lambda t, i: t.at[i + 3].get(mode="fill", fill_value=2.0),
    "drop": lambda t, i: t.at[i + 3].get(mode="drop", fill_value=0.0),
    "clip": lambda t, i: t.at[i + 3].get(mode="clip"),
    "clip_low": lambda t, i: t.at[i - 2 * V].get(mode="clip", wrap_negative_indices=False),
    "promise": lambda t, i: t.at[i].get(mode="promise_in_bounds"),
    "beyond": lambda t, i: t[i + 3],
    "below": lambda t, i: t[i - V - 2],
    "take": lambda t, i: jnp.take(t, i.reshape(2, 2), axis=0, mode="clip"),
    "take_wrap": lambda t, i: jnp.take(t, i + V, axis=0, mode="wrap"),
    "dynamic_index": lambda t, i: lax.dynamic_index_in_dim(t, i[1] + 9),
    "dynamic_slice": lambda t, i: lax.dynamic_slice_in_dim(t, i[0], 3),
    "vmapped_slices": lambda t, i: jax.vmap(lambda k: lax.dynamic_slice_in_dim(t, k, 2))(i),
    "two_vmaps": lambda t, i: jax.vmap(jax.vmap(lambda k: t[k]))(i.reshape(2, 2)),
    "offsets_first": lambda t, i: lax.gather(
        t,
        i[:, None],
        lax.GatherDimensionNumbers(
            offset_dims=(0,), collapsed_slice_dims=(0,), start_index_map=(0,)
        ),
        (1, D),
    ),
    "not_collapsed": lambda t, i: lax.gather(
        t,
        i.reshape(2, 2, 1),
        lax.GatherDimensionNumbers(
            offset_dims=(0, 2), collapsed_slice_dims=(), start_index_map=(0,)
        ),
        (1, D),
    ),
    "gather_of_gather": lambda t, i: t[i][jnp.array([1, 1, 0])],
}


# The numbers of rows are the same after a step: of each kind of form some.
AFTER_A_STEP = ["fill", "beyond", "below", "clip_low", "dynamic_slice", "vmapped_slices"]
FORMS = [*((name, False) for name in ID_FORMS), *((name, True) for name in AFTER_A_STEP)]


def losses():
    """A loss for each form of ids, of the table or of a step."""

    def make(name, after_a_step):
        step = jnp.sin if after_a_step else lambda table: table
        return lambda table: (ID_FORMS[name](step(table), IDS) ** 3).sum()

    return {str(form): make(*form) for form in FORMS}


@functools.cache
def by_jax():
    """JAX's value and gradient of each; with them packed tables are compared, too."""
    return all_at_once({n: jax.value_and_grad(f) for n, f in losses().items()}, TABLE)


@pytest.fixture(scope="module")
def forms():
    ours = {name: js.value_and_grad(f) for name, f in losses().items()}
    return all_at_once(ours, TABLE), by_jax()


@pytest.mark.parametrize("name, after_a_step", FORMS)
def test_id_forms(name, after_a_step, forms):
    form = str((name, after_a_step))
    (value, grad), (wanted, wanted_grad) = (found[form] for found in forms)
    assert js.is_slices(grad)
    assert_close(grad, wanted_grad, rtol=1e-5)
    assert_close(value, wanted, rtol=1e-6)


def test_stop_gradient_is_no_use_at_all():
    def fun(table):
        stopped = lax.stop_gradient(table.astype(jnp.bfloat16))
        return (table[IDS] ** 2).sum() + stopped[IDS].sum() * (stopped > 9).any()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grad, wanted = gradients(fun, TABLE)
    assert js.is_slices(grad) and grad.indices.shape == IDS.shape
    assert_close(grad, wanted)


def test_what_leads_to_no_gradient_does_not_count():
    """Metrics in aux, predicates, prints: they may use the table as they like."""

    @jax.jit
    def show(table):  # a program without outputs, and one with outputs inside it
        jax.debug.callback(lambda x: None, jax.jit(lambda x: 2 * x)(table)[0])

    def fun(table, scale):
        rows = table[IDS]
        metrics = {
            "norm": jnp.sqrt((table**2).sum()),
            "seen": table[jnp.array([5])] * scale,
            "rows": lax.map(lambda i: table[i].sum(), IDS),
        }
        jax.debug.callback(lambda x: None, table.sum())
        show(table)
        positive = lax.cond(table[0, 0] > 0, lambda: 1.0, lambda: 2.0)
        return (rows * scale).sum() * positive * (table.max() > -9), metrics

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = fast_jit(js.value_and_grad(fun, argnums=(0, 1), has_aux=True))
        (value, aux), grads = ours(TABLE, SCALE)
    theirs = fast_jit(jax.value_and_grad(fun, argnums=(0, 1), has_aux=True))
    (wanted, wanted_aux), wanted_grads = theirs(TABLE, SCALE)
    assert js.is_slices(grads[0])
    np.testing.assert_array_equal(grads[0].indices, IDS)  # no row of the metrics
    assert_close((value, aux, grads), (wanted, wanted_aux, wanted_grads))
    # An outer derivative goes through the metrics all the same.
    outer = lambda grad: lambda t: grad(fun, has_aux=True)(t, SCALE)[1]["seen"].sum()  # noqa: E731
    outers = {"ours": jax.grad(outer(js.grad)), "theirs": jax.grad(outer(jax.grad))}
    found = all_at_once(outers, TABLE)
    assert_close(found["ours"], found["theirs"])


def test_a_bad_id_gives_no_gradient_to_the_steps_before_it():
    fun = lambda t, s: ((t * s)[IDS + 3] ** 2).sum()  # noqa: E731
    grads, wanted = gradients(fun, TABLE, SCALE, argnums=(0, 1))
    assert js.is_slices(grads[0])
    assert_close(grads, wanted)


def test_a_row_is_read_once_however_often_it_is_used():
    def fun(table):
        for _ in range(12):
            table = table + 0.1 * jnp.sin(table)
        table = jax.nn.softmax(jnp.nan_to_num(table))
        return (table[IDS] ** 2).sum()

    grad, wanted = gradients(fun, TABLE)
    assert grad.indices.shape == IDS.shape
    assert_close(grad, wanted, rtol=1e-4)


def test_what_is_needed_whole_is_computed_once():
    """Tracing stays linear where each step uses the one before twice.

    Once for the rows, once for the mean, once in the loop.
    """

    def fun(table):
        for _ in range(40):  # 2**40 ways lead through
            table = table + 0.1 * jnp.sin(table)
        total = lax.scan(lambda c, _: (c + table.mean(), None), 0.0, length=2)[0]
        return (table[IDS] ** 2).sum(), (table.mean(), total)

    both = {"ours": js.grad(fun, has_aux=True), "theirs": jax.grad(fun, has_aux=True)}
    found = all_at_once(both, TABLE)
    assert js.is_slices(found["ours"][0])
    assert_close(found["ours"], found["theirs"], rtol=1e-4)
    assert str(jax.make_jaxpr(js.grad(fun, has_aux=True))(TABLE)).count(" sin ") <= 3 * 40


def test_debug_nans_meets_no_nan_of_ours():
    with jax.debug_nans(True):
        fun = lambda t: jnp.take(jnp.tanh(t), IDS, axis=0).sum()  # noqa: E731
        assert_close(js.grad(fun)(TABLE), jax.grad(fun)(TABLE))


BRANCHES = {
    "cond": lambda t, b: jax.vmap(
        lambda k: lax.cond(
            k > 2, lambda: (t * 2)[k].sum(), lambda: jnp.take(t, k[None], 0).sum()
        )
    )(IDS),
    "scaled": lambda t, b: jax.vmap(
        lambda k: lax.cond(k > 2, lambda: ((t * b[0])[k] ** 2).sum(), lambda: 0.0)
    )(IDS),
    "switch": lambda t, b: jax.vmap(
        lambda k: lax.switch(
            k % 3,
            [
                lambda: jnp.sin(t)[k].sum(),
                lambda: t.at[k + 3].get(mode="fill", fill_value=0).sum() * b[k],
                lambda: (t[jnp.stack([k, k + 3])] ** 2).sum(),
            ],
        )
    )(IDS),
    "embedding_lookup": lambda t, b: jax.vmap(
        lambda k: lax.cond(
            k > 2, lambda: js.embedding_lookup(t, k, mode="clip").sum() * b[k], lambda: 0.0
        )
    )(IDS),
    "two_vmaps": lambda t, b: jax.vmap(
        jax.vmap(lambda k: lax.cond(k > 2, lambda: t[k].sum() * b[k], lambda: 0.0))
    )(IDS.reshape(2, 2)),
    "in_a_loop": lambda t, b: lax.scan(
        lambda c, k: (
            c
            + jax.vmap(
                lambda i: lax.cond(i > k, lambda: (t[i] ** 3).sum() * b[k], lambda: c)
            )(IDS).sum(),
            None,
        ),
        0.0,
        IDS,
    )[0],
    "a_branch_in_a_branch": lambda t, b: jax.vmap(
        lambda i: lax.cond(
            i > 0,
            lambda: jax.vmap(
                lambda k: lax.cond(
                    k > i, lambda: (t.reshape(V, 1, D)[1:][k, 0] * t[i]).sum(), lambda: b[k]
                )
            )(IDS).sum(),
            lambda: 0.0,
        )
    )(IDS),
    "ids_that_examples_share": lambda t, b: jax.vmap(
        lambda k: lax.cond(
            k > 2,
            lambda: (jnp.sin(t)[jnp.array([1, 4, -1])] ** 2).sum() * b[k],
            lambda: (t[jnp.arange(3)] ** 3).sum(),
        )
    )(IDS),
    "a_loop_in_a_branch": lambda t, b: jax.vmap(
        lambda i: lax.cond(
            i > 0,
            lambda: lax.scan(
                lambda c, k: (c * b[i] + jnp.sort(t, axis=1)[k][0], c), 0.0, IDS
            )[0],
            lambda: 0.0,
        )
    )(IDS),
}


@pytest.fixture(scope="module")
def in_a_branch():
    def make(step):
        def one(table, scale, k):
            yes = lambda: (step(table, scale)[k] ** 3).sum()  # noqa: E731
            return lax.cond(k > 2, yes, lambda: scale)

        return lambda table, scale: jax.vmap(lambda k: one(table, scale, k))(IDS).sum()

    return both({name: make(STEPS[name]) for name in IN_A_BRANCH}, TABLE, SCALE)


# One of each kind: a branch does not ask which step it is.
IN_A_BRANCH = ["scale", "reshape", "softmax", "window", "concatenate", "add_array", "mask"]


@pytest.mark.parametrize("step", IN_A_BRANCH)
def test_step_in_a_branch_for_each_example(step, in_a_branch):
    got, wanted = in_a_branch
    assert js.is_slices(got[step][0])
    assert_close(got[step], wanted[step], rtol=1e-5)


def test_a_branch_for_each_example_does_not_copy_the_table():
    rows, examples = 5_000, 16

    def fun(table, ids):
        def one(k):
            return lax.cond(
                k > 2, lambda: jnp.sin(table.reshape(rows, D, 1))[k].sum(), lambda: 0.0
            )

        return jax.vmap(one)(ids).sum()

    table = jax.ShapeDtypeStruct((rows, D), jnp.float32)
    ids = jax.ShapeDtypeStruct((examples,), jnp.int32)
    ours, plain = (
        jax.jit(grad(fun)).lower(table, ids).compile().memory_analysis().temp_size_in_bytes
        for grad in (js.grad, jax.grad)
    )
    assert ours < rows * D * 4
    assert plain > examples * rows * D * 4  # so that the line above can fail


def test_more_copies_than_int32_can_number_are_dense():
    """B * V rows beyond 2^31: the gradient is dense, never wrong."""

    def fun(table, ids):
        return jax.vmap(lambda k: lax.cond(k > 2, lambda: table[k].sum(), lambda: 0.0))(
            ids
        ).sum()

    table = jax.ShapeDtypeStruct((2**20, 1), jnp.float32)
    for count, kind in ((2**10, "sparse"), (2**11, "dense")):
        ids = jax.ShapeDtypeStruct((count,), jnp.int32)
        assert js.explain(fun)(table, ids).leaves[0].kind == kind


@pytest.fixture(scope="module")
def branches():
    def make(branch):
        return lambda table, bias: (branch(table, bias) ** 2).sum()

    functions = {name: make(branch) for name, branch in BRANCHES.items()}
    dense = functools.partial(js.grad, sparse=False)
    return both(functions, TABLE, TABLE[:, 0] * 2, wanted=dense)


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_for_each_example(name, branches):
    """JAX repeats the table for every example there, and selects."""
    got, wanted = branches
    assert js.is_slices(got[name][0])
    assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-4)


def test_named_for_a_checkpoint_policy():
    def fun(table):
        named = checkpoint_name(table, "table")
        return (checkpoint_name(named[IDS], "rows") ** 2).sum()

    policy = jax.checkpoint_policies.save_only_these_names("rows")
    for f in (fun, jax.checkpoint(fun, policy=policy)):
        grad, wanted = gradients(f, TABLE)
        assert js.is_slices(grad)
        assert_close(grad, wanted)


def test_a_checkpoint_guards_some_arguments():
    """The table may be one of them, or not; what is left is guarded as it was."""

    def make(prevent_cse):
        def fun(table, x):
            read = lambda table, x: (table[IDS] * x[0] + x[1]).sum()  # noqa: E731
            return jax.checkpoint(read, prevent_cse=prevent_cse)(table, x)

        return fun

    choices = [False, (True, False), (False, True), (True, (False, True))]
    functions = {str(prevent_cse): make(prevent_cse) for prevent_cse in choices}
    got, wanted = both(functions, TABLE, (np.float32(2), np.float32(3)))
    assert all(js.is_slices(of_table) for of_table, _ in got.values())
    assert_close(got, wanted)


def test_a_gradient_inside_the_function():
    """Its loops were made by JAX's own differentiation, not by lax.scan."""

    def fun(table):
        def inner(x):
            body = jax.checkpoint(lambda c, i: (jnp.tanh(c * x + table[i].sum()), None))
            return lax.scan(body, 0.0, IDS)[0]

        return jax.grad(inner)(1.1) ** 2

    grad, wanted = gradients(fun, TABLE)
    assert js.is_slices(grad)
    assert_close(grad, wanted, rtol=1e-4)


def test_a_loop_may_carry_the_table():
    def fun(table):
        def body(k, carry):
            total, table = carry
            return total + (table[IDS[k]] ** 2).sum(), table

        return lax.fori_loop(0, 4, body, (0.0, table))[0]

    grad, wanted = gradients(fun, TABLE)
    assert js.is_slices(grad)
    assert_close(grad, wanted)


@functools.cache
def random_lookup(num_rows, row):
    size = num_rows * int(np.prod(row))
    table = np.arange(size, dtype=np.float32).reshape(num_rows, *row)

    def fun(table, ids):
        return (jnp.cos(table)[ids] * table[ids]).sum() + (
            table[ids.reshape(-1)[0]] ** 2
        ).sum()

    return table, fast_jit(lambda *args: (js.grad(fun)(*args), jax.grad(fun)(*args)))


SHAPES = [(1, (), (4,)), (2, (1,), (2, 2)), (6, (), (1,)), (6, (2, 2), (2, 2))]


@examples(40)
@given(st.sampled_from(SHAPES), st.lists(st.integers(-9, 9), min_size=4, max_size=4))
def test_random_ids_and_shapes(shapes, ids):
    num_rows, row, shape = shapes
    ids = np.array(ids[: int(np.prod(shape))], np.int32).reshape(shape)
    table, both = random_lookup(num_rows, row)
    grad, wanted = both(table, ids)
    assert js.is_slices(grad) and grad.dense_shape == table.shape
    assert_close(grad, wanted, rtol=1e-4, atol=1e-5)
