"""Handles, explicit state, and the helpers, against TensorFlow's numbers and NumPy."""

import copy
import pickle
import threading

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import golden

import jslices as js
import jslices.tf1 as tf
from jslices.errors import FailedPreconditionError, OutOfRangeError

KEY = jax.random.key(0)
ROWS = js.IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 1]))


def apply_once(fn, *args):
    model = tf.transform(fn)
    return model.apply(model.init(KEY, *args), *args)


# --- counting -------------------------------------------------------------------------

COUNTS = golden("count_up_to")
ERRORS = {"OutOfRangeError": OutOfRangeError}


@pytest.mark.parametrize("case", COUNTS)
def test_count_up_to_golden(case):
    init, limit, dtype = case.split()
    with jax.enable_x64(dtype == "int64"):
        start, stop = int(init[5:]), int(limit[6:])
        model = tf.transform(lambda: tf.Variable(start, dtype=dtype).count_up_to(stop))
        variables = model.init(KEY)
        jitted = jax.jit(model.apply)
        for wanted in COUNTS[case]["calls"]:
            before = int(variables["Variable"])
            if isinstance(wanted, dict):
                with pytest.raises(ERRORS[wanted["error"]], match=wanted["gist"]):
                    model.apply(variables)
                out, after = jitted(variables)  # which cannot raise
                assert out >= stop and int(after["Variable"]) == before
            else:
                out, variables = model.apply(variables)
                assert out == wanted and out.dtype == dtype
        assert variables["Variable"] == COUNTS[case]["final"]
        assert variables["Variable"].dtype == dtype


@pytest.mark.parametrize(
    "value, limit, error, words",
    [
        (0, 1.5, TypeError, "a Python int as limit"),
        (0, jnp.array(3), TypeError, "a Python int as limit"),
        (0, True, TypeError, "a Python int as limit"),
        (0.0, 3, TypeError, "wants an integer variable, this is float32"),
        ([0, 1], 3, ValueError, r"wants a scalar variable, this has \(2,\)"),
        (0, 2**40, ValueError, "is no int32"),
    ],
)
def test_count_up_to_refuses(value, limit, error, words):
    with pytest.raises(error, match=f"count_up_to of n:0.*{words}"):
        apply_once(lambda: tf.Variable(value, name="n").count_up_to(limit))


# --- assigning ------------------------------------------------------------------------


def test_assignments_are_in_the_order_of_the_program():
    def model(x):
        v = tf.Variable(jnp.zeros(2), name="v")
        before = v.value()
        added = v.assign_add(x)
        seen = v + 0
        v.assign_sub([1, 1])
        v.assign(v * 2)
        return before, added, seen, v.value()

    model = tf.transform(model)
    x = jnp.array([3.0, 4.0])
    variables = model.init(KEY, x)
    assert variables["v"].tolist() == [0, 0]  # init returns what variables begin with
    for apply in (model.apply, jax.jit(model.apply)):
        out, after = apply(variables, x)
        assert [a.tolist() for a in out] == [[0, 0], [3, 4], [3, 4], [4, 6]]
        assert after["v"].tolist() == [4, 6] and variables["v"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "initial, verb, value, error, words",
    [
        ([1.0, 2.0], "assign", [1.0], ValueError, r"assign to v:0.*the value \(1,\)"),
        ([1.0, 2.0], "assign", 1.0, ValueError, "nothing is broadcast"),
        ([1.0, 2.0], "assign_add", 1.0, ValueError, "assign_add to v:0 requires both"),
        ([1.0, 2.0], "assign_sub", np.ones(3, "f"), ValueError, "assign_sub to v:0"),
        (1.0, "assign", np.int32(1), TypeError, "v:0 wants float32, got an array of int32"),
        (1, "assign", 1.5, TypeError, "assign to v:0 wants int32, got 1.5"),
        (1, "assign_add", np.float32(1), TypeError, "assign_add to v:0 wants int32"),
        (1.0, "assign", True, TypeError, "assign to v:0 wants float32, got True"),
        (True, "assign", 1, TypeError, "assign to v:0 wants bool, got 1"),
        (True, "assign_add", True, TypeError, "assign_add to v:0 wants numbers"),
        (1.0, "assign", "a", TypeError, "cannot hold a string"),
        ([1.0], "scatter_sub", [1.0], ValueError, "scatter_sub to v:0 wants IndexedSlices"),
        ([1.0], "scatter_add", ROWS, ValueError, r"scatter_add to v:0.*of shape \(1,\)"),
        (1.0, "scatter_add", ROWS, ValueError, "scatter_add to v:0.*got a scalar"),
        (np.ones((2, 2), int), "scatter_mul", ROWS, TypeError, "for ref int32"),
        (np.ones((2, 2), "f"), "assign_add", js.IndexedSlices(ROWS.values, [0, 1], (3, 2)),
         ValueError, r"assign_add to v:0.*shape \(3, 2\) for ref of shape \(2, 2\)"),
    ],
)  # fmt: skip
def test_refused_assignments_name_the_variable_and_change_nothing(
    initial, verb, value, error, words
):
    def model():
        v = tf.Variable(initial, name="v")
        with pytest.raises(error, match=words):
            getattr(v, verb)(value)
        return v.value()

    np.testing.assert_array_equal(apply_once(model)[0], initial)


@pytest.mark.parametrize(
    "initial, value, dtype",
    [
        (1.5, 2, "float32"), (1, 2, "int32"), (True, False, "bool"),
        (np.float64(1), np.float64(3), "float32"), (1.0, jnp.exp(1.0) * 0 + 2, "float32"),
        (jnp.ones((), jnp.bfloat16), 3.0, "bfloat16"), (jnp.int8(1), 5, "int8"),
    ],
)  # fmt: skip
def test_numbers_become_the_dtype(initial, value, dtype):
    def model():
        v = tf.Variable(initial, name="v")
        assert v.dtype == dtype
        return v.assign(value)

    out, variables = apply_once(model)
    assert out == value and out.dtype == dtype and variables["v"].dtype == dtype


def test_assigning_slices():
    def model(slices):
        v = tf.Variable(jnp.ones((3, 2)), name="v")
        v.assign_add(slices)
        v.assign_sub(slices * 3)
        with pytest.warns(js.DensificationWarning):
            tf.Variable(jnp.ones((3, 2)), name="w").assign(slices)

    slices = js.IndexedSlices(jnp.ones((3, 2)), jnp.array([1, 1, 9]), (3, 2))
    _, variables = apply_once(model, slices)
    assert variables["v"].tolist() == [[1, 1], [-3, -3], [1, 1]]
    assert variables["w"].tolist() == [[0, 0], [2, 2], [0, 0]]


STEPS = {
    "add": lambda old, row: old + row,
    "sub": lambda old, row: old - row,
    "mul": lambda old, row: old * row,
    "div": lambda old, row: np.trunc(old / row),
    "min": np.minimum,
    "max": np.maximum,
    "update": lambda old, row: row,
}
SCATTERS = tuple(STEPS)


def numpy_scatter(how, table, indices, values):
    """One after the other, as TensorFlow says; indices out of range are dropped."""
    table = table.copy()
    for i, row in zip(indices, values, strict=True):
        if 0 <= i < len(table):
            table[i] = STEPS[how](table[i], row)
    return table


def all_scatters(table, indices, values):
    outs = {}
    for how in SCATTERS:
        v = tf.Variable(table, name=how)
        outs[how] = getattr(v, f"scatter_{how}")(js.IndexedSlices(values, indices))
    return outs


SCATTER_MODEL = tf.transform(all_scatters)
SCATTER = jax.jit(lambda *args: SCATTER_MODEL.apply(SCATTER_MODEL.init(None, *args), *args))


@hypothesis.given(
    st.lists(st.integers(-3, 7), min_size=6, max_size=6),
    st.lists(st.integers(1, 5), min_size=12, max_size=12),
    st.lists(st.integers(-50, 50), min_size=10, max_size=10),
)
@examples(25)
def test_scatter_methods_against_numpy(indices, values, table):
    indices, values = np.array(indices, "i4"), np.array(values, "i4").reshape(6, 2)
    table = np.array(table, "i4").reshape(5, 2)
    outs, variables = SCATTER(table, indices, values)
    for how in SCATTERS:
        wanted = numpy_scatter(how, table, indices, values)
        np.testing.assert_array_equal(outs[how], wanted, err_msg=how)
        np.testing.assert_array_equal(variables[how], wanted)


@pytest.mark.parametrize("how", SCATTERS)
def test_scatter_golden(how):
    """A duplicate-free and a duplicated case of floats, by the rule of TensorFlow."""
    table, values = np.full((4, 3), 8.0, "f"), np.full((3, 3), 2.0, "f")
    model = tf.transform(lambda i: getattr(tf.Variable(table, name="v"), f"scatter_{how}")(
        js.IndexedSlices(values, i, (99, 3)), use_locking=True))  # fmt: skip
    for indices in ([0, 2, 3], [1, 1, 1]):
        indices = np.array(indices)
        out, _ = model.apply(model.init(KEY, indices), indices)
        np.testing.assert_allclose(out, numpy_scatter(how, table, indices, values))


def test_scatter_of_nothing():
    empty = js.IndexedSlices(jnp.zeros((0, 2)), jnp.zeros(0, int))
    for how in SCATTERS:
        for num_rows in (0, 3):
            v = jnp.ones((num_rows, 2))
            out, _ = apply_once(lambda v=v, how=how: getattr(
                tf.Variable(v), f"scatter_{how}")(empty))  # fmt: skip
            assert out.tolist() == v.tolist()


@pytest.mark.parametrize("how", ["add", "sub", "update"])
@pytest.mark.parametrize(
    "name", sorted(set(golden("scatter_nd")) - {"batch_scatter_update"})
)
def test_scatter_nd_golden(name, how):
    """The numbers of the functions, and the variable holds them afterwards."""
    case = golden("scatter_nd")[name]
    ref, indices, updates = case["ref"], case["indices"], case["updates"]

    def model():
        v = tf.Variable(ref, name="v")
        return getattr(v, f"scatter_nd_{how}")(indices, updates)

    out, variables = apply_once(model)
    wanted = case[f"scatter_nd_{how}"]
    if isinstance(wanted, dict):  # TensorFlow's error for an index out of range
        wanted = getattr(js, f"scatter_nd_{how}")(ref, indices, updates)
    np.testing.assert_allclose(out, wanted, rtol=1e-6)
    np.testing.assert_array_equal(variables["v"], out)


def test_batch_scatter_update():
    def model():
        v = tf.Variable(jnp.zeros((2, 3)), name="v")
        v.batch_scatter_update(([[0, 0], [2, 5]], [[1.0, 2.0], [3.0, 4.0]]))
        w = tf.Variable(jnp.zeros((3, 2)), name="w")
        w.batch_scatter_update(js.IndexedSlices(jnp.ones((2, 2)), jnp.array([2, 7])))

    _, variables = apply_once(model)
    assert variables["v"].tolist() == [[2, 0, 0], [0, 0, 3]]
    assert variables["w"].tolist() == [[0, 0], [0, 0], [1, 1]]


def test_sparse_read_and_read_value():
    def model():
        v = tf.Variable(jnp.arange(6.0).reshape(3, 2))
        order = tf.Variable([2, 0])
        return v.sparse_read(order), v.sparse_read([[1], [9]]), v.read_value()

    (rows, bad, whole), _ = apply_once(model)
    assert rows.tolist() == [[4, 5], [0, 1]] and whole.shape == (3, 2)
    assert (
        bad.shape == (2, 1, 2) and bad[0, 0].tolist() == [2, 3] and np.isnan(bad[1]).all()
    )


@pytest.mark.parametrize(
    "use, error, words",
    [
        (lambda v: v.scatter_nd_add([[0]], [1.0]), ValueError, r"\(1, 2\), or \(\) for"),
        (lambda v: v.scatter_nd_sub([0.5], 1.0), TypeError, "wants integer indices"),
        (lambda v: v.scatter_nd_update([[0]], jnp.ones((1, 2), int)), TypeError,
         r"one dtype.*astype\('float32'\)"),
        (lambda v: v.batch_scatter_update(3), ValueError, "wants IndexedSlices, got int; .*"
         r"a pair \(indices, updates\)"),
        (lambda v: v.batch_scatter_update(([[0]], [[1.0]])), ValueError, "same batch"),
        (lambda v: v.sparse_read([0.5]), TypeError, "integer"),
    ],
)  # fmt: skip
def test_refused_elements_name_the_variable_and_change_nothing(use, error, words):
    def model():
        v = tf.Variable(jnp.ones((3, 2)), name="mine")
        with pytest.raises(error, match=words) as caught:
            use(v)
        assert "to mine:0" in str(caught.value) or "embedding_lookup" in str(caught.value)

    _, variables = apply_once(model)
    assert (variables["mine"] == 1).all()


# --- the handle as an array -----------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda v: v + 1, lambda v: 1 - v, lambda v: v * v, lambda v: 2 / v,
        lambda v: v // 2,
        lambda v: 7 % v, lambda v: v**2, lambda v: 2.0**v, lambda v: -v, lambda v: abs(v),
        lambda v: v > 2, lambda v: v <= 2, lambda v: v @ v, lambda v: v[1], lambda v: v.T,
        lambda v: jnp.sum(v), lambda v: jnp.stack([v, v]), lambda v: jnp.ones((2, 2)) + v,
        lambda v: np.ones((2, 2), "f") * v, lambda v: jnp.einsum("ij,kj->ik", v, v),
        lambda v: jax.jit(lambda x: x * 2)(v), lambda v: jax.vmap(jnp.sum)(v),
        lambda v: jax.nn.softmax(v), lambda v: v.astype("int32"), lambda v: v.at[0].set(0),
        lambda v: js.embedding_lookup(v, [0, 1, 1]),
        lambda v: jnp.take(v, jnp.array([1]), 0),
        lambda v: np.asarray(v), lambda v: float(v[0, 0]), lambda v: round(v),
    ],
)  # fmt: skip
def test_a_handle_is_used_as_an_array(use):
    array = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    seen = []
    tf.transform(lambda: seen.append(use(tf.Variable(array)))).init(KEY)
    np.testing.assert_array_equal(seen[0], use(array))


@pytest.mark.parametrize("use", [len, iter, bool, lambda v: v.nonsense, lambda v: v._x])
def test_what_a_handle_is_not(use):
    def model():
        with pytest.raises((TypeError, AttributeError)):
            use(tf.Variable([1.0, 2.0]))

    tf.transform(model).init(KEY)


@pytest.mark.parametrize("name, instead", [
    ("scatter_nd_max", r"and the array it holds has none either; it has assign"),
    ("load", r"use assign\(value\) in the function, variables.replace\("),
    ("initializer", r"model.init\(key, ...\) makes all .*initialize_variables\(\[name\]"),
    ("initial_value", r"use initialized_value\(\)"),
    ("graph", r"the function given to tf.transform takes the place"),
])  # fmt: skip
def test_what_a_handle_lacks_is_said_of_the_handle(name, instead):
    def model():
        v = tf.Variable([1.0, 2.0])
        assert not hasattr(v, name)
        with pytest.raises(AttributeError, match=rf"a Variable has no '{name}'. {instead}"):
            getattr(v, name)

    tf.transform(model).init(KEY)


def test_op_has_the_name_without_a_number():
    def model():
        with tf.variable_scope("a"):
            v = tf.get_variable("v", [1])
        assert (v.op.name, v.name) == ("a/v", "a/v:0")

    tf.transform(model).init(KEY)


def test_assigning_without_validating_the_shape():
    def model():
        v = tf.Variable([1.0, 2.0], name="v")
        assert tf.assign(v, [3.0, 4.0], validate_shape=False).tolist() == [3, 4]
        words = (
            r"validate_shape=False: a variable keeps its shape \(2,\), the value has \(3,\)"
        )
        with pytest.raises(ValueError, match=rf"assign to v:0 with {words}; create"):
            tf.assign(v, [1.0, 2.0, 3.0], validate_shape=False)
        assert v.value().tolist() == [3, 4]

    tf.transform(model).init(KEY)


def test_description():
    def model():
        v = tf.Variable(np.zeros((2, 3), np.float32), name="a/v", collections=["mine"])
        assert repr(v) == "<tf.Variable 'a/v:0' shape=(2, 3) dtype=float32>"
        assert (v.name, v.shape, v.get_shape()) == ("a/v:0", (2, 3), (2, 3))
        assert v.dtype == np.float32 and v.ndim == 2 and v.trainable
        assert v != tf.Variable(v) and len({v, v}) == 1
        n = tf.Variable(3)
        n += 1  # as in TensorFlow: an array from here on
        assert isinstance(n, jax.Array) and int(n) == 4

    tf.transform(model).init(KEY)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: tf.Variable(), ValueError, "initial_value must be specified"),
        (lambda: tf.Variable("text"), TypeError, "cannot hold a string"),
        (lambda: tf.Variable(1.5, dtype="int32"), TypeError, "wants int32, got 1.5"),
        (lambda: tf.Variable(jnp.ones(2), dtype="int32"), TypeError, "wants int32"),
        (lambda: tf.Variable(0, name="a b"), ValueError, "'a b' is not a valid name"),
        (lambda: tf.Variable(0, collections="x"), ValueError, "list, tuple or set"),
    ],
)
def test_refused_variables(make, error, words):
    with pytest.raises(error, match=words):
        tf.transform(make).init(KEY)


def test_initial_values():
    def model(x):
        a = tf.Variable(x, name="a")
        tf.Variable(a.initialized_value() * 2, name="b")
        tf.Variable(a, name="copy")
        tf.Variable(lambda: np.ones(2, np.float32), name="c")
        tf.Variable(lambda key: jax.random.normal(key, (3,)), name="d")
        tf.Variable([x[0], 1.0], name="e")
        tf.Variable(1, name="f", dtype=jnp.float32)
        tf.Variable(tf.ones_initializer()(None, [2]), name="g")

    x = jnp.array([1.0, 2.0])
    variables = tf.transform(model).init(KEY, x)
    assert list(variables) == ["a", "b", "copy", "c", "d", "e", "f", "g"]
    assert variables["b"].tolist() == [2, 4] and variables["e"].tolist() == [1, 1]
    assert variables["d"].std() > 0 and variables["f"].dtype == np.float32
    # Nothing is shared with the caller, nor between variables: all may be donated.
    jax.jit(lambda v: jax.tree.map(lambda x: x + 1, v), donate_argnums=0)(variables)
    assert x.tolist() == [1, 2]


# --- handles that leak ----------------------------------------------------------------


def leak():
    kept = []
    model = tf.transform(lambda: kept.append(tf.get_variable("v", [2])))
    variables = model.init(KEY)
    model.apply(variables)
    return kept


@pytest.mark.parametrize("use", [
    lambda v: v.value(), lambda v: v + 1, lambda v: v.assign([1, 2]), lambda v: jnp.sum(v),
    lambda v: v.initialized_value(), lambda v: v.scatter_sub(ROWS),
    lambda v: v.eval(), lambda v: v[0],
])  # fmt: skip
@pytest.mark.parametrize("which, run", [(0, "init"), (1, "apply")])
def test_a_handle_that_leaked(use, which, run):
    v = leak()[which]
    with pytest.raises((RuntimeError, ValueError), match="v:0") as caught:
        use(v)
    if not isinstance(caught.value, ValueError):
        assert f"v:0 was used outside of the {run} that made it" in str(caught.value)
    assert "v:0" in repr(v)  # which a debugger may call


def test_a_handle_from_one_run_in_another():
    old = leak()[1]
    with pytest.raises(RuntimeError, match="was used outside of the apply that made it"):
        apply_once(lambda: old + tf.get_variable("v", [2]))


def test_returning_a_handle():
    model = tf.transform(lambda: {"out": tf.get_variable("v", [2])})
    with pytest.raises(ValueError, match=r"returned the Variable v:0 itself.*leak"):
        model.apply(model.init(KEY))


INNER = {
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(), None), 0.0, None, length=2),
    "jit": lambda f: jax.jit(f)(),
    "vmap": lambda f: jax.vmap(lambda x: x + f())(jnp.ones(2)),
    "grad": lambda f: jax.grad(lambda x: x * f())(1.0),
    "cond": lambda f: jax.lax.cond(jnp.array(True), f, lambda: 0.0),
    "checkpoint": lambda f: jax.checkpoint(f)(),
}


@pytest.mark.parametrize("how", INNER)
def test_inner_transformations_may_read_but_not_write(how):
    def reading():
        v = tf.Variable(1.0, name="v")
        INNER[how](lambda: v * 2)

    def assigning():
        v = tf.Variable(1.0, name="v")
        INNER[how](lambda: v.assign_add(1.0))

    def creating():
        INNER[how](lambda: tf.Variable(1.0, name="v") * 2)

    apply_once(reading)
    with pytest.raises(RuntimeError, match="assign_add to v:0 inside of a scan, cond"):
        apply_once(assigning)
    with pytest.raises(RuntimeError, match="v would be created inside of a scan, cond"):
        apply_once(creating)


def test_a_copy_cannot_be_assigned():
    def model():
        v = tf.Variable(1.0, name="v")
        jax.jit(lambda w: w.assign(2.0))(v)

    with pytest.raises(RuntimeError, match="assign to v:0 on a copy"):
        apply_once(model)


def test_threads_do_not_share():
    """Each thread has a stack of its own: scopes and handles do not cross."""
    errors, barrier = [], threading.Barrier(4)

    def model(number):
        with tf.variable_scope(f"scope{number}"):
            barrier.wait(timeout=30)
            v = tf.get_variable("v", initializer=float(number))
            barrier.wait(timeout=30)
            assert tf.get_variable_scope().name == f"scope{number}"
            return v.assign_add(1.0)

    def work(number):
        try:
            out, variables = apply_once(lambda: model(number))
            assert out == number + 1 and list(variables) == [f"scope{number}/v"]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_thread_within_a_run_is_outside_of_it():
    caught = []

    def attempt(use):
        try:
            use()
        except RuntimeError as error:
            caught.append(str(error))

    def model():
        v = tf.get_variable("v", [2])
        for use in (v.value, tf.get_variable_scope):
            thread = threading.Thread(target=attempt, args=(use,))
            thread.start()
            thread.join()

    tf.transform(model).init(KEY)
    assert "or into another thread" in caught[0] and "A new thread is outside" in caught[1]


def test_transforms_nest():
    inner = tf.transform(lambda x: tf.get_variable("w", initializer=2.0) * x)

    def outer(x):
        w = tf.get_variable("w", initializer=3.0)
        y, _ = inner.apply(inner.init(KEY, x), x * w)
        return y + w

    out, variables = apply_once(outer, 1.0)
    assert out == 9 and list(variables) == ["w"]


# --- the state ------------------------------------------------------------------------


def example(x, training=True):
    with tf.variable_scope("foo"):
        w = tf.get_variable("w", [2, 3])
    n = tf.Variable(0, name="n", trainable=False, collections=["counts"])
    if training:
        n.assign_add(1)
    return x @ w


MODEL, X = tf.transform(example), jnp.ones((4, 2))


def test_variables_are_a_mapping_and_a_pytree():
    variables = MODEL.init(KEY, X)
    assert list(variables) == list(variables.keys()) == ["foo/w", "n"]
    assert variables["foo/w:0"] is variables["foo/w"] and "n" in variables
    assert repr(variables) == "Variables(foo/w: float32[2, 3], n: int32[] not trainable)"
    with pytest.raises(KeyError, match="no variable 'v'; there are: foo/w, n"):
        variables["v"]
    assert all(not x.weak_type for x in variables.values())
    paths = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(variables)
    ]
    assert paths == ["['foo/w']", "['n']"]
    again = jax.tree.map(lambda x: x, variables)
    assert jax.tree.structure(again) == jax.tree.structure(variables)
    # Two runs, eager or compiled, make one structure: nothing is compiled twice for it.
    assert jax.tree.structure(jax.jit(MODEL.init)(KEY, X)) == jax.tree.structure(variables)
    assert jax.tree.structure(MODEL.apply(variables, X)[1]) == jax.tree.structure(variables)


def test_variables_pickle_and_copy():
    variables = MODEL.init(KEY, X)
    for again in (pickle.loads(pickle.dumps(variables)), copy.deepcopy(variables)):
        assert jax.tree.structure(again) == jax.tree.structure(variables)
        np.testing.assert_array_equal(again["foo/w"], variables["foo/w"])
    with pytest.raises(ValueError, match="computed inside of the function"):
        tf.initialize_all_variables(again, KEY)


def test_weak_types_become_strong():
    def ones(key, shape, dtype):
        return jnp.full(shape, 1.0)

    model = tf.transform(lambda: tf.get_variable("v", [2], initializer=ones).value())
    variables = model.init(KEY)
    assert not variables["v"].weak_type
    out, after = model.apply({"v": [1.0, 2.0]})
    assert not out.weak_type and after["v"].dtype == jnp.float32


def test_partitions_and_unions():
    variables = MODEL.init(KEY, X)
    assert list(variables.trainable) == ["foo/w"] and list(variables.non_trainable) == ["n"]
    assert list(variables.collection("counts")) == ["n"]
    assert variables.infos[1].collections == ("counts",)
    assert variables.infos[0].collections == ("variables", "trainable_variables")
    for union in (variables.trainable | variables.non_trainable,
                  variables.non_trainable | variables.trainable):  # fmt: skip
        assert list(union) == ["foo/w", "n"]
        assert jax.tree.structure(union) == jax.tree.structure(variables)
    changed = variables.replace({"n:0": jnp.array(7)})
    assert changed["n"] == 7 and variables["n"] == 0
    with pytest.raises(KeyError, match=r"no variables m; there are: foo/w, n"):
        variables.replace({"m": 1})
    assert dict(variables | {"new": 3})["new"] == 3


def test_apply_takes_any_mapping_and_keeps_what_it_does_not_know():
    variables = MODEL.init(KEY, X)
    plain = {
        "other": jnp.ones(1),
        "n:0": np.int32(4),
        "foo/w": np.asarray(variables["foo/w"]),
    }
    out, after = MODEL.apply(plain, X)
    np.testing.assert_allclose(out, MODEL.apply(variables, X)[0])
    assert list(after) == ["foo/w", "n", "other"] and after["n"] == 5
    assert list(after.trainable) == ["foo/w", "other"]
    kept = MODEL.apply(variables | {"other": jnp.ones(1)}, X, training=False)[1]
    assert kept["n"] == 0 and kept["other"] == 1


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"n": 1}, ValueError, "foo/w is not among those given to apply, which are"),
        ({"foo/w": jnp.ones((3, 2)), "n": 1}, ValueError, r"foo/w has shape \(2, 3\)"),
        ({"foo/w": jnp.ones((2, 3), int), "n": 1}, ValueError, "foo/w has dtype float"),
        ({"foo/w": jnp.ones((2, 3)), "n": 1.5}, ValueError, "Variable n has dtype int32"),
        (jnp.ones(3), TypeError, "apply wants the variables first"),
    ],
)  # fmt: skip
def test_apply_refuses(given, error, words):
    with pytest.raises(error, match=words):
        MODEL.apply(given, X)


def test_another_precision_may_be_given():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MODEL.init(KEY, X).trainable)
    out, after = MODEL.apply(half | {"n": 0}, X.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16 and after["foo/w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("call", [
    lambda: tf.transform(3), lambda: MODEL.init(0, X), lambda: MODEL.init("key", X),
])  # fmt: skip
def test_transform_refuses(call):
    with pytest.raises(TypeError, match=r"wants a (function|PRNG key first)"):
        call()


def test_no_key_where_nothing_is_random():
    assert tf.transform(lambda: tf.Variable(1)).init(None)["Variable"] == 1
    with pytest.raises(ValueError, match="draws random numbers and got no key"):
        MODEL.init(None, X)


def test_apply_scans_maps_and_donates():
    variables = MODEL.init(KEY, X)

    def body(state, x):
        out, state = MODEL.apply(state, x)
        return state, out.sum()

    after, _ = jax.lax.scan(body, variables, jnp.ones((5, 4, 2)))
    assert after["n"] == 5
    many = jax.vmap(MODEL.init, (0, None))(jax.random.split(KEY, 3), X)
    outs, after = jax.vmap(MODEL.apply, (0, None))(many, X)
    assert outs.shape == (3, 4, 3) and after["n"].tolist() == [1, 1, 1]
    traces = []

    def counted(variables, x):
        traces.append(x)
        return MODEL.apply(variables, x)

    step = jax.jit(counted, donate_argnums=0)
    table = variables["foo/w"].unsafe_buffer_pointer()
    _, after = step(variables, X)
    assert variables["foo/w"].is_deleted()
    assert after["foo/w"].unsafe_buffer_pointer() == table  # in place
    assert step(after, X)[1]["n"] == 2
    assert len(traces) == 1  # one compilation for all steps


# --- declared, and the helpers --------------------------------------------------------


def test_abstract_init_declares():
    shape = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    old = jax.random.PRNGKey(0)
    for args in ((KEY, X), (KEY, shape), (KEY, X, False), (X,), (None, X), (old, X)):
        declared = MODEL.abstract_init(*args)
        assert jax.tree.structure(declared) == jax.tree.structure(MODEL.init(KEY, X))
        assert declared["foo/w"] == jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert "foo/w: float32[2, 3] not initialised" in repr(declared)
    huge = tf.transform(lambda: tf.get_variable("t", [10**9, 64]).shape)
    assert huge.abstract_init(KEY)["t"].shape == (10**9, 64)
    assert js.adam(1e-3) and list(declared.trainable) == ["foo/w"]


def test_reading_what_is_only_declared():
    declared = MODEL.abstract_init(KEY, X)
    with pytest.raises(FailedPreconditionError, match="uninitialized value n"):
        MODEL.apply(declared, X)

    def model():
        n = tf.Variable(5, name="n")
        assert tf.report_uninitialized_variables() == ["n"]
        assert tf.report_uninitialized_variables([n]) == ["n"]
        with pytest.raises(FailedPreconditionError, match="uninitialized value n"):
            tf.assert_variables_initialized()
        with pytest.raises(FailedPreconditionError):
            n.assign_add(1)
        with pytest.raises(FailedPreconditionError):
            n.count_up_to(9)
        assert n.initialized_value() == 5
        n.assign(7)  # which needs no old value
        return n.initialized_value()

    model = tf.transform(model)
    out, variables = model.apply({"n": jax.ShapeDtypeStruct((), jnp.int32)})
    assert out == 7 and variables["n"] == 7


def test_helpers_on_explicit_state():
    variables, declared = MODEL.init(KEY, X), MODEL.abstract_init(KEY, X)
    assert tf.report_uninitialized_variables(variables) == []
    assert tf.report_uninitialized_variables(declared) == ["foo/w", "n"]
    partly = declared.replace({"n": jnp.array(3)})
    assert tf.report_uninitialized_variables(partly) == ["foo/w"]
    assert tf.assert_variables_initialized(variables) is variables
    assert tf.assert_variables_initialized({}) is None
    with pytest.raises(FailedPreconditionError, match="uninitialized value foo/w, n;"):
        tf.assert_variables_initialized(declared)
    for start in (declared, MODEL.apply(variables, X)[1]):
        again = tf.initialize_all_variables(start, KEY)
        jax.tree.map(np.testing.assert_array_equal, again, variables)
    some = tf.initialize_variables(["n:0"], variables=declared, key=KEY)
    assert tf.report_uninitialized_variables(some) == ["foo/w"] and some["n"] == 0
    assert tf.initialize_variables([], variables=variables).keys() == variables.keys()
    assert list(variables.collection("variables")) == ["foo/w"]  # "n" is in "counts" only
    compiled = jax.jit(tf.initialize_all_variables)(variables, KEY)
    jax.tree.map(np.testing.assert_array_equal, compiled, variables)


def test_helpers_inside():
    def model():
        tf.get_variable("a", [1])
        tf.get_variable("b", [1], trainable=False)
        tf.get_variable("ab", [1], collections=[])
        names = (
            [v.name for v in tf.all_variables()],
            [v.name for v in tf.trainable_variables()],
        )
        assert [v.name for v in tf.all_variables(scope="a")] == ["a:0"]
        assert tf.report_uninitialized_variables() == []
        assert tf.assert_variables_initialized()
        return names

    assert apply_once(model)[0] == (["a:0", "b:0"], ["a:0", "ab:0"])


@pytest.mark.parametrize(
    "call, error, words",
    [
        (
            lambda v: tf.initialize_variables("n", variables=v),
            TypeError,
            "wants a list of names",
        ),
        (lambda v: tf.initialize_variables(3), TypeError, "wants a list of names"),
        (
            lambda v: tf.initialize_variables(["m"], variables=v),
            KeyError,
            "no variable 'm'",
        ),
        (lambda v: tf.initialize_all_variables({}, KEY), TypeError, "wants the Variables"),
        (lambda v: tf.all_variables(3), TypeError, "wants a scope, a string, got int"),
        (lambda v: tf.report_uninitialized_variables(3), TypeError, "wants the Variables"),
    ],
)
def test_helpers_refuse(call, error, words):
    with pytest.raises(error, match=words):
        call(MODEL.init(KEY, X))


def test_computed_initial_values_are_only_made_by_init():
    variables = tf.transform(lambda x: tf.Variable(x, name="v")).init(KEY, X)
    with pytest.raises(ValueError, match=r"initial value of v was computed .* model\.init"):
        tf.initialize_all_variables(variables, KEY)


def test_errors_are_pythons_own_too():
    assert issubclass(OutOfRangeError, IndexError)
    assert issubclass(FailedPreconditionError, RuntimeError)


def test_helpers_take_variables_in_the_order_of_functions():
    model = tf.transform(lambda: [tf.Variable(1.0), tf.Variable(2, trainable=False)])
    variables = model.init(None)
    assert list(tf.trainable_variables(variables)) == ["Variable"]
    assert [*tf.all_variables(variables)] == [*variables]
    moved = variables.replace({"Variable": jnp.float32(7)})
    again = tf.initialize_variables(moved, ["Variable"], None)
    assert again["Variable"] == tf.initialize_variables(["Variable"], "", moved)["Variable"]
    assert again["Variable"] == 1
