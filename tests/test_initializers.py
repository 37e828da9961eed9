"""Initializers: what they give against theory, and against TensorFlow's statistics."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fast_jit, golden

import jslices.tf1 as tf

KEY = jax.random.key(7)
GOLDEN = golden("initializers")
STATISTICS = {k: v for k, v in GOLDEN.items() if "[" in k}

MAKERS = {
    "random_normal(0,1)": tf.random_normal_initializer(),
    "random_normal(2,.5)": tf.random_normal_initializer(2.0, 0.5),
    "truncated_normal(0,1)": tf.truncated_normal_initializer(),
    "truncated_normal(1,.1)": tf.truncated_normal_initializer(1.0, 0.1),
    "random_uniform(default)": tf.random_uniform_initializer(),
    "random_uniform(-2,3)": tf.random_uniform_initializer(-2, 3),
    "uniform_unit_scaling(1)": tf.uniform_unit_scaling_initializer(),
    "uniform_unit_scaling(1.43)": tf.uniform_unit_scaling_initializer(1.43),
    "glorot_uniform": tf.glorot_uniform_initializer(),
    "glorot_normal": tf.glorot_normal_initializer(),
    "variance_scaling(fan_in,truncated)": tf.variance_scaling_initializer(),
    "variance_scaling(2,fan_out,uniform)": tf.variance_scaling_initializer(
        2.0, "fan_out", "uniform"
    ),
}
# One of each class: what its arguments do is seen in the statistics.
RANDOM = {type(init): init for init in [*MAKERS.values(), tf.orthogonal_initializer()]}


def maker_and_shape(case):
    name, _, shape = case.partition(" [")
    return MAKERS[name], tuple(int(n) for n in shape.rstrip("]").split(","))


@pytest.fixture(scope="module")
def statistics():
    """What the initializers of all cases draw, in one program."""
    made = {case: maker_and_shape(case) for case in STATISTICS}
    draw = fast_jit(lambda key: {c: init(key, shape) for c, (init, shape) in made.items()})
    return draw(KEY)


@pytest.mark.parametrize("case", STATISTICS)
def test_statistics_are_tensorflows(case, statistics):
    """Mean and deviation within five standard errors of theory; the bound never passed."""
    wanted = STATISTICS[case]
    name, shape = case.partition(" [")[0], maker_and_shape(case)[1]
    drawn = np.asarray(statistics[case], np.float64)
    size, std = drawn.size, wanted["analytic_std"]
    low, high, middle = bounds(wanted["analytic_abs_bound"])
    middle = {"random_normal(2,.5)": 2.0}.get(name, middle)
    assert drawn.shape == shape
    assert abs(drawn.mean() - middle) < 5 * std / math.sqrt(size)
    assert abs(drawn.std() - std) < 5 * std / math.sqrt(size)
    if low is not None:
        assert low <= drawn.min() < low + (high - low) * 20 / size**0.5
        assert high >= drawn.max() > high - (high - low) * 20 / size**0.5
    # TensorFlow's own draw is as close to the theory: the two are of one distribution.
    assert abs(drawn.std() - wanted["std"]) < 10 * std / math.sqrt(size)


def bounds(described):
    """Lowest, highest and middle value, from the notes of the golden file."""
    special = {"1+-0.2": (0.8, 1.2), "[0,1)": (0, 1), "[-2,3)": (-2, 3)}
    if described is None:
        return None, None, 0.0
    low, high = special.get(described) or (-described, described)
    slack = 1e-6 * (high - low)
    return low - slack, high + slack, (low + high) / 2


def test_the_golden_file_has_nothing_else():
    assert set(GOLDEN) == {"_note", "constant", *STATISTICS}
    assert {k.partition(" [")[0] for k in STATISTICS} == set(MAKERS)


CONSTANTS = {
    "0 default": ((), (2, 2)), "3": ((3,), (2, 2)), "list exact": (([1, 2, 3, 4],), (2, 2)),
    "list short repeats last": (([1, 2],), (2, 3)), "scalar shape": ((7,), ()),
}  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN["constant"])
def test_constants_are_tensorflows(case):
    wanted = GOLDEN["constant"][case]
    if isinstance(wanted, dict):
        with pytest.raises(ValueError, match=wanted["gist"]):
            tf.constant_initializer([1, 2, 3, 4, 5])(KEY, (2, 2))
        return
    args, shape = CONSTANTS[case]
    out = tf.constant_initializer(*args)(KEY, shape, jnp.float32)
    np.testing.assert_array_equal(out, wanted)
    assert out.dtype == wanted.dtype


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: tf.constant_initializer(3.7)(KEY, (2,), "int32"), TypeError, "would"),
        (lambda: tf.constant_initializer([])(KEY, (2,)), ValueError, "got no values"),
        (lambda: tf.constant_initializer("a")(KEY, (2,)), TypeError, "hold a string"),
        (lambda: tf.constant_initializer([1, 2], verify_shape=True)(KEY, (3,)), TypeError,
         r"expected shape \(3,\)"),
        (lambda: tf.zeros_initializer()(KEY, None), ValueError, "needs a shape, got None"),
        (lambda: tf.random_uniform_initializer(0)(KEY, (2,), "int32"), ValueError,
         "needs minval < maxval, got 0 and None"),
        (lambda: tf.random_uniform_initializer(3, 3)(KEY, (2,), "int32"), ValueError,
         "needs minval < maxval"),
        (lambda: tf.orthogonal_initializer()(KEY, (3,)), ValueError, "two axes or more"),
        (lambda: tf.variance_scaling_initializer(0, "fan", "cauchy"), ValueError,
         "scale must be positive, got 0; mode must be .* distribution must be one"),
    ],
)  # fmt: skip
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


INITIALIZERS = [tf.random_normal_initializer(), tf.zeros_initializer(), tf.ones_initializer]


@pytest.mark.parametrize(
    "call, shape, dtype",
    [
        (lambda init: init([2, 3]), (2, 3), "float32"),
        (lambda init: init((2, 3), jnp.bfloat16), (2, 3), "bfloat16"),
        (lambda init: init([2], dtype="float16", partition_info=None), (2,), "float16"),
        (lambda init: init(5), (5,), "float32"),
        (lambda init: init(tf.shape([[1, 2]])), (1, 2), "float32"),
        (lambda init: init(shape=[2]), (2,), "float32"),
    ],
)
def test_the_order_of_tensorflow(call, shape, dtype):
    """A shape first; random numbers are drawn as those of ``tf.random_normal``."""

    def model():
        for init in INITIALIZERS:
            value = call(init)
            assert value.shape == shape and value.dtype == dtype
            tf.Variable(value)
        tf.Variable(lambda: call(INITIALIZERS[0]), name="within")

    variables = tf.transform(model).init(KEY)
    drawn, zeros, ones, within = variables.values()
    assert not zeros.any() and (ones == 1).all()
    assert drawn.any() and within.any() and (drawn != within).any()
    with pytest.raises(
        ValueError, match=r"got no key; call init\(jax.random.key\(0\), shape"
    ):
        call(INITIALIZERS[0])


def shape_and_dtype(init, *args):
    """Those of the result, which is traced and not computed."""
    out = jax.eval_shape(lambda key: init(key, *args), KEY)
    return out.shape, out.dtype


@pytest.mark.parametrize("init", RANDOM.values(), ids=repr)
def test_keys_and_dtypes(init):
    """One key, one result; another key, another one; no key, an error; bfloat16 works."""
    one, two = init(KEY, (3, 4)), init(jax.random.key(8), (3, 4))
    np.testing.assert_array_equal(one, init(KEY, [3, 4]))
    assert (one != two).all() and one.dtype == jnp.float32
    if not isinstance(init, tf.orthogonal_initializer):
        for shape, dtype in (((3, 4), "bfloat16"), ((0, 4), "float32"), ((), "float32")):
            assert shape_and_dtype(init, shape, dtype) == (shape, dtype)
        assert shape_and_dtype(init, 5) == ((5,), "float32")
    if not isinstance(init, tf.random_uniform_initializer):
        with pytest.raises(TypeError, match="makes floats, got dtype int32"):
            init(KEY, (3, 4), "int32")
    with pytest.raises(ValueError, match=f"{type(init).__name__} draws random numbers"):
        init(None, (3, 4))
    again = type(init)(**init.get_config())
    assert again == init and hash(again) == hash(init)
    seeded = type(init)(**{**init.get_config(), "seed": 3})
    np.testing.assert_array_equal(seeded(None, (3, 4)), seeded(KEY, (3, 4)))
    assert seeded != init


def test_under_jit_they_give_the_same():
    init = tf.truncated_normal_initializer()
    jitted = jax.jit(init, static_argnums=1)(KEY, (3, 4))
    np.testing.assert_allclose(init(KEY, (3, 4)), jitted, rtol=1e-6)


def test_truncated_means_drawn_again():
    """Clipping would pile values up at the ends."""
    drawn = tf.truncated_normal_initializer()(KEY, (200_000,))
    assert np.mean(np.abs(drawn) > 1.99) < 0.002
    assert np.unique(drawn).size > 150_000


@functools.partial(jax.jit, static_argnums=2)
def uniform(low, high, dtype):
    return tf.random_uniform_initializer(low, high, dtype=dtype)(KEY, (50_000,))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("low, high", [(0, 1), (1000, 1001), (-2, 3), (5, 5)])
def test_uniform_never_reaches_maxval(low, high, dtype):
    drawn = np.asarray(uniform(low, high, dtype))
    low, high = np.asarray([low, high], dtype)  # which bfloat16 may round to one value
    assert (drawn >= low).all() and ((drawn < high).all() or low == high)


def test_uniform_of_a_flipped_range():
    drawn = np.asarray(tf.random_uniform_initializer(3.0, -2.0)(KEY, (1000,)))
    assert -2 < drawn.min() < -1.9 and 2.9 < drawn.max() <= 3


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8"])
def test_uniform_integers(dtype):
    drawn = tf.random_uniform_initializer(3, 7, dtype=dtype)(KEY, (1000,))
    assert drawn.dtype == dtype and np.unique(drawn).tolist() == [3, 4, 5, 6]


def test_mean_and_deviation_may_be_arrays():
    init = tf.random_normal_initializer(jnp.array(3.0), jnp.array(0.0))
    assert init(KEY, (2,)).tolist() == [3, 3]
    mirrored = tf.random_normal_initializer(stddev=-1.0)(KEY, (5,))
    np.testing.assert_array_equal(mirrored, -tf.random_normal_initializer()(KEY, (5,)))


def test_variance_scaling_is_that_of_jax():
    cases = [
        ((4, 3), "fan_in", "normal", "truncated_normal"),
        ((4, 3), "fan_out", "untruncated_normal", "normal"),
        ((3, 3, 2, 4), "fan_avg", "uniform", "uniform"),
        ((3, 3, 2, 4), "fan_out", "truncated_normal", "truncated_normal"),
    ]

    @fast_jit
    def both(key):
        return [
            (
                tf.variance_scaling_initializer(2.0, mode, ours)(key, shape),
                jax.nn.initializers.variance_scaling(2.0, mode, theirs)(key, shape),
            )
            for shape, mode, ours, theirs in cases
        ]

    for made, wanted in both(KEY):
        np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("mode", ["fan_in", "fan_out", "fan_avg"])
def test_fans_of_a_vector_are_its_length(mode):
    drawn = tf.variance_scaling_initializer(1.0, mode, "uniform")(KEY, (10_000,))
    assert abs(drawn.std() - 0.01) < 5e-4 * 0.2 and np.abs(drawn).max() <= 3**0.5 * 0.01


def test_orthogonal():
    """Square, wide, high, and of more axes than two."""
    shapes = [(4, 4), (3, 6), (6, 3), (2, 3, 5)]
    init = tf.orthogonal_initializer(2.0)
    drawn = fast_jit(lambda key: [init(key, shape) for shape in shapes])(KEY)
    for made, shape in zip(drawn, shapes, strict=True):
        assert made.shape == shape
        q = np.asarray(made).reshape(-1, shape[-1])
        gram = q.T @ q if q.shape[0] >= q.shape[1] else q @ q.T
        np.testing.assert_allclose(gram, 4 * np.eye(len(gram)), atol=1e-5)


@pytest.mark.parametrize(
    "cls, value", [(tf.zeros_initializer, 0), (tf.ones_initializer, 1)]
)
def test_zeros_and_ones_in_all_spellings(cls, value):
    """TensorFlow 1's class, its first releases' function, and JAX's function."""
    for made in (
        cls()(KEY, (2,), "int32"), cls("int32")(KEY, [2]), cls(dtype="int32")(None, 2),
        cls(KEY, (2,), "int32"), cls(KEY, shape=(2,), dtype="int32"),
    ):  # fmt: skip
        assert made.tolist() == [value] * 2 and made.dtype == jnp.int32
    for initializer in (cls, cls()):
        model = tf.transform(lambda i=initializer: tf.get_variable("v", [2], initializer=i))
        assert model.init(KEY)["v"].tolist() == [value] * 2


def test_short_names():
    names = [n for n in tf.__all__ if inspect.isclass(getattr(tf, n))]
    long = [n for n in names if n.endswith("_initializer")]
    assert len(long) == 11
    for name in long:
        short = getattr(tf.initializers, name.removesuffix("_initializer"))
        assert short is getattr(tf, name)


def test_flax_takes_them():
    linen = pytest.importorskip("flax.linen")
    embed = linen.Embed(9, 4, embedding_init=tf.random_uniform_initializer(2.0, 3.0))
    table = np.asarray(embed.init(KEY, jnp.array([0]))["params"]["embedding"])
    assert table.shape == (9, 4) and 2 <= table.min() and table.max() < 3


def test_get_variable_takes_those_of_jax():
    init = jax.nn.initializers.he_normal()
    variables = tf.transform(lambda: tf.get_variable("w", [3, 4], initializer=init)).init(
        KEY
    )
    assert variables["w"].shape == (3, 4)


@pytest.mark.parametrize(
    "init",
    [
        tf.random_normal_initializer(),
        tf.random_uniform_initializer(-1, 1),
        tf.truncated_normal_initializer(),
        tf.glorot_uniform_initializer(),
        tf.uniform_unit_scaling_initializer(),
        tf.orthogonal_initializer(),
    ],
)
def test_bfloat16_is_drawn_in_float32(init):
    """JAX draws 128 different numbers in bfloat16."""
    drawn = init(KEY, (200, 100), jnp.bfloat16)
    assert drawn.dtype == jnp.bfloat16
    wide = np.asarray(init(KEY, (200, 100)))
    np.testing.assert_allclose(np.asarray(drawn, np.float32), wide, rtol=2**-8)
    assert np.unique(np.asarray(drawn, np.float32)).size > 1000


def test_devices_that_draw_their_own_rows():
    """As docs/sharding.md says: what scales by the shape takes them for the whole table."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("x", None)
    inits = {
        "normal": tf.random_normal_initializer(stddev=0.1),
        "seeded": tf.random_normal_initializer(seed=1),
        "glorot": tf.glorot_uniform_initializer(),
        "glorot of JAX": jax.nn.initializers.glorot_uniform(),
    }

    def own_rows(key):
        key = jax.random.fold_in(key, jax.lax.axis_index("x"))
        return {name: init(key, (1_000, 64), jnp.float32) for name, init in inits.items()}

    draw = fast_jit(jax.shard_map(own_rows, mesh=mesh, in_specs=jax.P(), out_specs=rows))
    for impl in ("threefry2x32", "rbg"):
        found = draw(jax.random.key(0, impl=impl))
        parts = {name: np.split(np.asarray(x), 8) for name, x in found.items()}
        assert np.std(parts["normal"]) == pytest.approx(0.1, rel=0.01)
        same = {name: np.array_equal(x[0], x[1]) for name, x in parts.items()}
        assert [name for name in same if same[name]] == ["seeded"]
        for name in ("glorot", "glorot of JAX"):
            of_all = (2 / (8_000 + 64)) ** 0.5
            assert np.std(parts[name]) / of_all == pytest.approx(2.75, rel=0.01)
