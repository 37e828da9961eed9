"""What variables begin with by TensorFlow's names: random_normal, zeros and the like."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fast_jit

import jslices.tf1 as tf

KEY = jax.random.key(7)
DRAWN = {
    "random_normal": (tf.random_normal, tf.random_normal_initializer),
    "truncated_normal": (tf.truncated_normal, tf.truncated_normal_initializer),
    "random_uniform": (tf.random_uniform, tf.random_uniform_initializer),
}


def init(fn, *args):
    return tf.transform(fn).init(KEY, *args)


def equal(a, b):
    return bool(jnp.array_equal(a, b))


# --- drawing --------------------------------------------------------------------------


def test_statistics():
    def model():
        tf.Variable(tf.random_normal([20_000], 3.0, -2.0), name="normal")
        tf.Variable(tf.truncated_normal([20_000], 3.0, 2.0), name="truncated")
        tf.Variable(tf.random_uniform([20_000], -1, 5), name="uniform")
        tf.Variable(tf.random_uniform([20_000], -2, 3, "int32"), name="whole")

    drawn = jax.device_get(dict(fast_jit(tf.transform(model).init)(KEY)))
    wanted = {"normal": (3, 2), "truncated": (3, 2 * 0.8796), "uniform": (2, 6 / 12**0.5)}
    for name, (mean, std) in wanted.items():
        assert abs(drawn[name].mean() - mean) < 0.06 and abs(drawn[name].std() - std) < 0.05
    assert abs(drawn["truncated"] - 3).max() <= 4 < abs(drawn["normal"] - 3).max()
    assert -1 <= drawn["uniform"].min() and drawn["uniform"].max() < 5
    assert sorted(set(drawn["whole"].tolist())) == [-2, -1, 0, 1, 2]


@pytest.mark.parametrize("name", DRAWN)
def test_two_calls_differ_and_one_key_gives_one_value(name):
    draw, _ = DRAWN[name]

    def model():
        tf.Variable(draw([4]), name="a")
        tf.Variable(draw([4]), name="b")
        tf.Variable(draw([4]) - draw([4]), name="c")

    first, again = init(model), init(model)
    other = tf.transform(model).init(jax.random.key(8))
    for v in "abc":
        assert equal(first[v], again[v]) and not equal(first[v], other[v])
    assert len({tuple(first[v].tolist()) for v in "abc"}) == 3
    assert jnp.any(first["c"])  # the two draws of one variable differ as well


def test_a_value_depends_on_its_variable_and_on_no_other():
    def model(more):
        if more:
            tf.Variable(tf.random_normal([4]), name="another")
        tf.Variable(tf.random_normal([4]), name="v")

    assert equal(init(model, True)["v"], init(model, False)["v"])


def test_one_result_for_two_variables_is_drawn_once():
    """One session.run of both initializers runs TensorFlow's operation once."""

    def model():
        value = tf.random_normal([4])
        tf.Variable(value, name="a")
        tf.Variable(value, name="b")
        tf.Variable(value * 2 + value, name="c")
        tf.get_variable("d", initializer=value)

    model = tf.transform(model)
    for variables in (model.init(KEY), jax.jit(model.init)(KEY)):
        assert equal(variables["a"], variables["b"]) and equal(
            variables["a"], variables["d"]
        )
        np.testing.assert_allclose(variables["c"], 3 * variables["a"], rtol=1e-6)
    # However few are made again, and in whatever order.
    again = tf.initialize_variables(["b"], variables=model.abstract_init(), key=KEY)
    assert equal(again["b"], model.init(KEY)["b"])
    _, after = model.apply(dict(model.init(KEY)))
    again = tf.initialize_variables(["d"], variables=after, key=KEY)
    assert equal(again["d"], model.init(KEY)["d"])


@pytest.mark.parametrize("name", DRAWN)
def test_a_seed_gives_the_same_numbers_everywhere(name):
    draw, initializer = DRAWN[name]
    outside = draw([4], seed=3)
    assert equal(outside, initializer(seed=3)(None, [4])) and jnp.any(outside)

    def model():
        tf.Variable(draw([4], seed=3), name="a")
        tf.Variable(lambda: draw([4], seed=3), name="b")
        tf.Variable(draw([4], seed=4), name="other")
        return draw([4], seed=3), jnp.sum(draw([4], seed=3))

    model = tf.transform(model)
    variables = model.init(None)  # nothing needs a key
    (same, total), _ = jax.jit(model.apply)(variables)
    for array in (variables["a"], variables["b"], same):
        np.testing.assert_allclose(array, outside, rtol=1e-6)
    np.testing.assert_allclose(total, outside.sum(), rtol=1e-5)
    assert not equal(variables["other"], outside)


def test_a_name_that_is_made_unique_draws_its_own():
    def model():
        tf.Variable(tf.random_normal([4]), name="v")
        tf.get_variable("v", initializer=tf.random_normal([4]))

    variables = init(model)
    assert list(variables) == ["v", "v_1"]
    assert not equal(variables["v"], variables["v_1"])


# --- staying lazy ---------------------------------------------------------------------


def test_apply_draws_nothing():
    def model(x):
        w = tf.Variable(tf.random_normal([4]) * 0.1 + 1, name="w")
        return x @ w

    model, x = tf.transform(model), jnp.ones((1, 4))
    variables = model.init(KEY, x)
    assert "random_bits" in str(jax.make_jaxpr(model.init)(KEY, x))
    program = str(jax.make_jaxpr(model.apply)(variables, x))
    assert "random" not in program and "threefry" not in program
    out, after = model.apply(variables, x)
    np.testing.assert_allclose(out, x @ variables["w"])
    assert equal(after["w"], variables["w"])


ARRAY = np.arange(1.0, 5.0, dtype=np.float32)
OPERATORS = {
    "number * value": lambda v: 0.1 * v,
    "value ** number": lambda v: v**2,
    "numpy * value": lambda v: ARRAY * v,
    "numpy number * value": lambda v: np.sqrt(2.0) * v,
    "array + value": lambda v: jnp.asarray(ARRAY) + v,
    "array - value": lambda v: jnp.asarray(ARRAY) - v,
    "array / value": lambda v: jnp.asarray(ARRAY) / v,
    "array @ value": lambda v: jnp.asarray(ARRAY) @ v,
    "value @ array": lambda v: v @ jnp.asarray(ARRAY),
    "array < value": lambda v: (jnp.asarray(ARRAY) - 2) < v,
    "abs and neg": lambda v: -abs(v),
    "index": lambda v: v[1:],
    "astype": lambda v: v.astype("bfloat16"),
    "reshape": lambda v: v.reshape(4, 1),
    "value // number": lambda v: v // 0.5,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    """The same as of the array, in init; and a variable of that shape in apply."""

    def model():
        value = tf.random_normal([4])
        assert value.shape == value.get_shape() == (4,) and value.ndim == 1
        lazy = OPERATORS[name](value)
        tf.Variable(value, name="plain")
        tf.Variable(lazy, name="v")
        return lazy.shape, lazy.dtype

    model = tf.transform(model)
    variables = model.init(KEY)
    wanted = OPERATORS[name](variables["plain"])
    np.testing.assert_allclose(
        np.asarray(variables["v"], "f"), np.asarray(wanted, "f"), rtol=1e-6
    )
    assert variables["v"].dtype == wanted.dtype
    (shape, dtype), after = model.apply(variables)
    assert shape == wanted.shape and dtype == wanted.dtype
    assert equal(after["v"], variables["v"])


def test_with_the_value_of_another_variable():
    def model():
        w = tf.Variable(tf.random_normal([4], stddev=2.0), name="w")
        tf.Variable(w.initialized_value() * 2, name="twice")
        tf.Variable(w.initialized_value() + tf.random_normal([4]), name="near")
        tf.Variable(w + tf.random_normal([4]), name="nearer")

    model = tf.transform(model)
    variables = model.init(KEY)
    assert equal(variables["twice"], 2 * variables["w"])
    for name in ("near", "nearer"):
        assert 0 < np.abs(variables[name] - variables["w"]).min() < 3
    assert not equal(variables["near"], variables["nearer"])
    _, after = model.apply(variables.replace({"w": jnp.zeros(4)}))
    assert equal(after["twice"], variables["twice"])
    # What an array went into is not remembered; it says how to have it again.
    with pytest.raises(ValueError, match=r"twice, near, nearer was computed.*model\.init"):
        tf.initialize_all_variables(variables, KEY)


def test_any_function_within_a_function():
    def model():
        tf.Variable(lambda: jnp.abs(tf.random_normal([4])), name="a")
        tf.Variable(lambda key: jax.random.normal(key, [4]) * tf.ones([4]), name="b")
        value = tf.random_normal([4])
        tf.Variable(lambda: jnp.concatenate([value, -value]), name="c")
        other = tf.random_normal([4])
        tf.Variable(lambda: other + tf.random_normal([4]) - value, name="d")

    model = tf.transform(model)
    variables = model.init(KEY)
    assert (variables["a"] > 0).all() and equal(variables["c"][:4], -variables["c"][4:])
    again = tf.initialize_all_variables(model.abstract_init(), KEY)
    for name in variables:
        assert equal(again[name], variables[name])


@pytest.mark.parametrize(
    "use",
    [
        lambda x: jnp.abs(tf.random_normal([3])),
        lambda x: jnp.concatenate([tf.random_normal([3]), x]),
        lambda x: tf.Variable(x).assign(tf.random_normal([3])),
        lambda x: jnp.sum(x + tf.random_normal([3])),
        lambda x: tf.Variable([tf.random_normal([3])]),
        lambda x: np.asarray(tf.random_normal([3])),
        lambda x: tf.random_normal([3]).sum(),
        lambda x: jax.jit(jnp.sin)(tf.random_normal([3])),
    ],
)
@pytest.mark.parametrize("phase", ["init", "apply"])
def test_use_as_an_array_says_what_to_type(use, phase):
    model, words = (
        tf.transform(use),
        r"random_normal.*tf\.Variable\(lambda: \.\.\.\).*seed=",
    )
    with pytest.raises(RuntimeError, match=words) as raised:
        if phase == "init":
            model.init(KEY, jnp.ones(3))
        else:
            model.apply({"Variable": jnp.ones(3)}, jnp.ones(3))
    assert "jax.random.normal(key, ...)" in str(raised.value)


def test_returned_it_is_an_error_or_an_array():
    model = tf.transform(lambda: {"noise": tf.random_uniform([2])})
    with pytest.raises(RuntimeError, match=r"random_uniform.*jax\.random\.uniform"):
        model.apply(model.init(KEY))
    out, _ = tf.transform(lambda: {"noise": tf.random_uniform([2], seed=1)}).apply({})
    assert isinstance(out["noise"], jax.Array)


@pytest.mark.parametrize("name", DRAWN)
def test_outside_of_functions(name):
    with pytest.raises(RuntimeError, match=rf"{name} was called outside.*or pass seed="):
        DRAWN[name][0]([3])


def test_an_inner_model_draws_with_its_own_key():
    inner = tf.transform(lambda: tf.Variable(tf.random_normal([3]), name="w"))

    def model():
        tf.Variable(lambda: inner.init(KEY)["w"], name="v")

    assert equal(init(model)["v"], inner.init(KEY)["w"])


def test_no_key():
    model = tf.transform(lambda: tf.Variable(tf.random_normal([3])) + 0)
    with pytest.raises(
        ValueError, match=r"random_normal draws.*jax\.random\.key\(0\) to init"
    ):
        model.init(None)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: tf.random_normal([2], dtype="int32"), TypeError,
         "random_normal makes floats, got dtype int32"),
        (lambda: tf.truncated_normal([2], dtype="int8"), TypeError,
         "truncated_normal makes floats, got dtype int8"),
        (lambda: tf.random_uniform([2], dtype="int32"), ValueError,
         "random_uniform of int32 needs minval < maxval, got 0 and None"),
        (lambda: tf.random_uniform([2], 3, 3, dtype="int32"), ValueError, "got 3 and 3"),
        (lambda: tf.random_normal([-1]), ValueError, "shape of random_normal must not be"),
        (lambda: tf.random_normal([None, 2]), TypeError, "shape of random_normal must be"),
        (lambda: tf.zeros([1.5]), TypeError, "shape of zeros must be ints"),
        (lambda: tf.ones([-2]), ValueError, "shape of ones must not be negative"),
        (lambda: tf.constant([1, 2, 3], shape=[2]), ValueError, "Too many elements"),
        (lambda: tf.constant(3.7, "int32"), TypeError, "cannot make int32"),
        (lambda: tf.constant("a"), TypeError, "cannot hold a string"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("phase", ["init", "apply"])
def test_refusals(call, error, words, phase):
    model = tf.transform(call)
    with pytest.raises(error, match=words):
        model.init(KEY) if phase == "init" else model.apply({})


def test_another_dtype_for_the_variable():
    model = tf.transform(
        lambda: tf.Variable(tf.random_normal([2]), name="v", dtype="int32")
    )
    for run in (lambda: model.init(KEY), lambda: model.apply({"v": jnp.zeros(2, "int32")})):
        with pytest.raises(
            TypeError, match=r"value of v wants int32, got an array of float32"
        ):
            run()


# --- constants ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made, wanted, dtype",
    [
        (lambda: tf.zeros([2, 1]), [[0], [0]], "float32"),
        (lambda: tf.zeros(2, "bool"), [False, False], "bool"),
        (lambda: tf.ones((2,), "bfloat16"), [1, 1], "bfloat16"),
        (lambda: tf.constant(2), 2, "int32"),
        (lambda: tf.constant(2.5, shape=[2]), [2.5, 2.5], "float32"),
        (lambda: tf.constant([1, 2], "float32", [2, 2]), [[1, 2], [2, 2]], "float32"),
        (lambda: tf.constant([[1], [2]]), [[1], [2]], "int32"),
        (lambda: tf.constant(True), True, "bool"),
    ],
)
def test_constants(made, wanted, dtype):
    assert isinstance(made(), jax.Array) and made().dtype == dtype
    np.testing.assert_array_equal(made(), jnp.asarray(wanted, dtype))
    model = tf.transform(lambda: tf.Variable(made(), name="v").value())
    variables = model.init(None)
    again = tf.initialize_all_variables(model.abstract_init(), KEY)
    for v in (variables["v"], again["v"], model.apply(variables)[0]):
        assert equal(v, made()) and v.dtype == dtype


def test_an_array_is_remembered_only_as_itself():
    def model():
        zeros = tf.zeros([3])
        tf.Variable(zeros + 1, name="computed")
        tf.Variable(zeros, name="zeros")
        tf.Variable(tf.constant(jnp.ones(2)), name="of_an_array")

    variables = init(model)
    for name in ("computed", "of_an_array"):
        with pytest.raises(ValueError, match=f"the initial value of {name} was computed"):
            tf.initialize_variables([name], variables=variables)
    assert not tf.initialize_variables(["zeros"], variables=variables)["zeros"].any()


def test_mean_may_be_an_array():
    def model(mean):
        tf.Variable(tf.random_normal([4], mean, 0.0), name="v")

    variables = jax.jit(tf.transform(model).init)(KEY, jnp.float32(2.5))
    assert variables["v"].tolist() == [2.5] * 4
    with pytest.raises(ValueError, match="computed inside of the function"):
        tf.initialize_all_variables(variables, KEY)  # and no tracer leaks
