"""The programs of TensorFlow's page "Sharing Variables", and the layers they use.

They are kept as text; ``import jslices.tf1 as tf`` is the only change.
TensorFlow's graph around them becomes ``tf.transform``.
"""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import all_at_once, fast_jit

import jslices as js
import jslices.tf1 as tf

KEY = jax.random.key(0)
IMAGE = np.random.default_rng(0).normal(size=(1, 6, 6, 3)).astype(np.float32)

FILTER = """
    def conv_relu(input, kernel_shape, bias_shape):
        weights = tf.get_variable("weights", kernel_shape,
            initializer=tf.random_normal_initializer())
        biases = tf.get_variable("biases", bias_shape,
            initializer=tf.constant_initializer(0.0))
        conv = tf.nn.conv2d(input, weights,
            strides=[1, 1, 1, 1], padding='SAME')
        return tf.nn.relu(conv + biases)

    def my_image_filter(input_images):
        with tf.variable_scope("conv1"):
            relu1 = conv_relu(input_images, [5, 5, 3, 4], [4])
        with tf.variable_scope("conv2"):
            return conv_relu(relu1, [5, 5, 4, 4], [4])
"""
PROBLEM = """
    def my_image_filter(input_images):
        conv1_weights = tf.Variable(tf.random_normal([5, 5, 3, 4]),
            name="conv1_weights")
        conv1_biases = tf.Variable(tf.zeros([4]), name="conv1_biases")
        conv1 = tf.nn.conv2d(input_images, conv1_weights,
            strides=[1, 1, 1, 1], padding='SAME')
        relu1 = tf.nn.relu(conv1 + conv1_biases)

        conv2_weights = tf.Variable(tf.random_normal([5, 5, 4, 4]),
            name="conv2_weights")
        conv2_biases = tf.Variable(tf.zeros([4]), name="conv2_biases")
        conv2 = tf.nn.conv2d(relu1, conv2_weights,
            strides=[1, 1, 1, 1], padding='SAME')
        return tf.nn.relu(conv2 + conv2_biases)
"""
DICTIONARY = """
    variables_dict = {
        "conv1_weights": tf.Variable(tf.random_normal([5, 5, 3, 4]),
            name="conv1_weights"),
        "conv1_biases": tf.Variable(tf.zeros([4]), name="conv1_biases"),
        "conv2_weights": tf.Variable(tf.random_normal([5, 5, 4, 4]),
            name="conv2_weights"),
        "conv2_biases": tf.Variable(tf.zeros([4]), name="conv2_biases"),
    }

    def my_image_filter(input_images, variables_dict):
        conv1 = tf.nn.conv2d(input_images, variables_dict["conv1_weights"],
            strides=[1, 1, 1, 1], padding='SAME')
        relu1 = tf.nn.relu(conv1 + variables_dict["conv1_biases"])
        conv2 = tf.nn.conv2d(relu1, variables_dict["conv2_weights"],
            strides=[1, 1, 1, 1], padding='SAME')
        return tf.nn.relu(conv2 + variables_dict["conv2_biases"])

    result1 = my_image_filter(image1, variables_dict)
    result2 = my_image_filter(image2, variables_dict)
"""
TWICE = """
    result1 = my_image_filter(image1)
    result2 = my_image_filter(image2)
"""
SHARED = """
    with tf.variable_scope("image_filters") as scope:
        result1 = my_image_filter(image1)
        scope.reuse_variables()
        result2 = my_image_filter(image2)
"""
NAMES = [
    f"image_filters/{conv}/{name}"
    for conv in ("conv1", "conv2")
    for name in ("weights", "biases")
]


def transformed(*texts):
    """A program as a transformed function of what it is given, for its two results."""
    program = compile("\n".join(map(textwrap.dedent, texts)), "snippet", "exec")

    def model(given):
        names = {"tf": tf, **given}
        exec(program, names)
        return names.get("result1"), names.get("result2")

    return tf.transform(model)


def run(*texts, **given):
    """Runs a program in ``init`` and ``apply``, and gives its results and variables."""
    model = transformed(*texts)
    # By default JAX adds a vector to an image, as TensorFlow does.
    with jax.numpy_rank_promotion("allow"):
        variables = fast_jit(model.init)(KEY, given)
        assert list(jax.eval_shape(model.init, KEY, given)) == list(variables)
        out, after = fast_jit(model.apply)(variables, given)
    jax.tree.map(np.testing.assert_array_equal, variables, after)
    return out, variables


def filtered(image, weights1, biases1, weights2, biases2):
    """The page's filter, by JAX alone."""
    for weights, biases in ((weights1, biases1), (weights2, biases2)):
        dimensions = ("NHWC", "HWIO", "NHWC")
        image = jax.lax.conv_general_dilated(
            image, weights, (1, 1), "SAME", dimension_numbers=dimensions
        )
        image = jnp.maximum(image + biases.reshape(1, 1, 1, -1), 0)
    return image


def test_a_filter_is_shared():
    results, variables = run(FILTER, SHARED, image1=IMAGE, image2=2 * IMAGE)
    assert list(variables) == NAMES
    for factor, result in zip((1, 2), results, strict=True):
        wanted = fast_jit(filtered)(factor * IMAGE, *variables.values())
        np.testing.assert_allclose(result, wanted, rtol=1e-5)
        assert (result > 0).any()


OWN = ["conv1_weights", "conv1_biases", "conv2_weights", "conv2_biases"]


@pytest.mark.parametrize("texts", [(PROBLEM, TWICE), (DICTIONARY,)])
def test_the_filters_with_variables_of_their_own(texts):
    """Two calls of the first make two sets of variables, a dictionary is one."""
    images = {"image1": IMAGE, "image2": 2 * IMAGE}
    results, variables = run(*texts, **images)
    sets = [OWN, [f"{name}_1" for name in OWN]] if PROBLEM in texts else [OWN, OWN]
    assert list(variables) == list(dict.fromkeys([*sets[0], *sets[1]]))
    for result, image, names in zip(results, images.values(), sets, strict=True):
        wanted = fast_jit(filtered)(image, *(variables[name] for name in names))
        np.testing.assert_allclose(result, wanted, rtol=1e-5)
        assert (result > 0).any()
    variables = {name: np.asarray(array) for name, array in variables.items()}
    weights = [variables[name] for name in variables if "weights" in name]
    for array in weights:  # 300 or 400 normal numbers, no two arrays the same ones
        assert abs(array.mean()) < 0.25 and 0.8 < array.std() < 1.2
    firsts = {float(array.ravel()[0]) for array in weights}
    assert len(firsts) == len(weights)
    assert not any(array.any() for name, array in variables.items() if "biases" in name)


@pytest.mark.parametrize("texts", [(PROBLEM, TWICE), (DICTIONARY,)])
def test_the_filters_are_trained(texts):
    model, images = transformed(*texts), {"image1": IMAGE, "image2": 2 * IMAGE}

    def loss(variables):
        out, _ = model.apply(variables, images)
        return sum(jnp.sum(x) for x in out)

    def by_jax(variables):
        first = [variables[name] for name in OWN]
        second = [variables[f"{name}_1" if PROBLEM in texts else name] for name in OWN]
        return jnp.sum(filtered(IMAGE, *first)) + jnp.sum(filtered(2 * IMAGE, *second))

    with jax.numpy_rank_promotion("allow"):
        variables = fast_jit(model.init)(KEY, images)
        grads = {"js": js.grad(loss), "jax": jax.grad(loss)}
        grads["wanted"] = lambda variables: jax.grad(by_jax)(dict(variables))
        found = all_at_once(grads, variables)
        for name, wanted in found["wanted"].items():
            assert np.any(wanted)
            for by in ("js", "jax"):
                got = found[by][name]
                np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-2)
        # What TensorFlow's programs do next.
        declared = model.abstract_init(images)
        again = fast_jit(lambda key: tf.initialize_all_variables(declared, key))(KEY)
    for name in variables:
        np.testing.assert_allclose(again[name], variables[name], rtol=1e-6)


def test_not_sharing_a_filter_is_an_error():
    with pytest.raises(ValueError, match=r"Variable conv1/weights already exists"):
        run(FILTER, TWICE, image1=IMAGE, image2=IMAGE)


SNIPPETS = {
    "nested scopes": """
        with tf.variable_scope("foo"):
            with tf.variable_scope("bar"):
                v = tf.get_variable("v", [1])
        assert v.name == "foo/bar/v:0"
    """,
    "reuse_variables": """
        with tf.variable_scope("foo"):
            v = tf.get_variable("v", [1])
            tf.get_variable_scope().reuse_variables()
            v1 = tf.get_variable("v", [1])
        assert v1 == v
    """,
    "reuse=True": """
        with tf.variable_scope("foo"):
            v = tf.get_variable("v", [1])
            assert v.name == "foo/v:0"
        with tf.variable_scope("foo", reuse=True):
            v1 = tf.get_variable("v", [1])
            v2 = tf.get_variable("v")
        assert v1 == v and v2 == v and v1 is v
    """,
    "reuse is inherited": """
        with tf.variable_scope("root"):
            assert tf.get_variable_scope().reuse == False
            with tf.variable_scope("foo"):
                assert tf.get_variable_scope().reuse == False
            with tf.variable_scope("foo", reuse=True):
                assert tf.get_variable_scope().reuse == True
                with tf.variable_scope("bar"):
                    assert tf.get_variable_scope().reuse == True
            assert tf.get_variable_scope().reuse == False
    """,
    "a captured scope": """
        with tf.variable_scope("foo") as foo_scope:
            v = tf.get_variable("v", [1])
        with tf.variable_scope(foo_scope):
            w = tf.get_variable("w", [1])
        with tf.variable_scope(foo_scope, reuse=True):
            v1 = tf.get_variable("v", [1])
            w1 = tf.get_variable("w", [1])
        assert v1 == v
        assert w1 == w
    """,
    "a captured scope jumps": """
        with tf.variable_scope("foo") as foo_scope:
            assert foo_scope.name == "foo"
        with tf.variable_scope("bar"):
            with tf.variable_scope("baz") as other_scope:
                assert other_scope.name == "bar/baz"
                with tf.variable_scope(foo_scope) as foo_scope2:
                    assert foo_scope2.name == "foo"
        assert tf.get_variable_scope().name == ""
    """,
    "initializers are inherited": """
        with tf.variable_scope("foo", initializer=tf.constant_initializer(0.4)):
            v = tf.get_variable("v", [1])
            assert v.eval() == 0.4
            w = tf.get_variable("w", [1], initializer=tf.constant_initializer(0.3))
            assert w.eval() == 0.3
            with tf.variable_scope("bar"):
                v = tf.get_variable("v", [1])
                assert v.eval() == 0.4
            with tf.variable_scope("baz", initializer=tf.constant_initializer(0.2)):
                v = tf.get_variable("v", [1])
                assert v.eval() == 0.2
    """,
    "names of scopes": """
        with tf.variable_scope("foo"):
            with tf.name_scope("bar"):
                v = tf.get_variable("v", [1])
                x = 1.0 + v
        assert v.name == "foo/v:0"
        assert x.shape == (1,)
    """,
}


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_of_the_page(snippet):
    if "eval()" not in SNIPPETS[snippet]:
        run(SNIPPETS[snippet])
        return
    # A value is a number only where nothing is traced.
    program = textwrap.dedent(SNIPPETS[snippet])
    model = tf.transform(lambda: exec(program, {"tf": tf}))
    _, variables = model.apply(model.init(KEY))
    assert [float(v[0]) for v in variables.values()] == pytest.approx([0.4, 0.3, 0.4, 0.2])


TWO = {
    "a second get_variable": ("already exists", """
        with tf.variable_scope("foo"):
            v = tf.get_variable("v", [1])
            v1 = tf.get_variable("v", [1])
    """),
    "reuse of nothing": ("does not exist", """
        with tf.variable_scope("foo", reuse=True):
            v = tf.get_variable("v", [1])
    """),
}  # fmt: skip


@pytest.mark.parametrize("snippet", TWO)
def test_errors_of_the_page(snippet):
    words, text = TWO[snippet]
    with pytest.raises(ValueError, match=words):
        run(text)


# --- tf.nn ----------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_conv2d_against_numpy(stride, padding):
    """TensorFlow's padding: as even as can be, the odd one behind."""
    rng = np.random.default_rng(0)
    image = rng.integers(-3, 4, (2, 7, 6, 2)).astype(np.float32)
    kernel = rng.integers(-3, 4, (3, 2, 2, 3)).astype(np.float32)
    sizes, window = np.array(image.shape[1:3]), np.array(kernel.shape[:2])
    if padding == "SAME":
        out = -(-sizes // stride)
        needed = np.maximum((out - 1) * stride + window - sizes, 0)
        padded = np.pad(image, [(0, 0), *((n // 2, n - n // 2) for n in needed), (0, 0)])
    else:
        out, padded = -(-(sizes - window + 1) // stride), image
    wanted = np.zeros((2, *out, 3), np.float32)
    for y, x in np.ndindex(*out):
        rows, columns = (
            slice(i * stride, i * stride + w) for i, w in zip((y, x), window, strict=True)
        )
        wanted[:, y, x] = np.einsum("bhwc,hwco->bo", padded[:, rows, columns], kernel)
    got = tf.nn.conv2d(image, kernel, [1, stride, stride, 1], padding)
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    turned = tf.nn.conv2d(
        image.transpose(0, 3, 1, 2), kernel, [1, 1, stride, stride], padding, "NCHW"
    )
    np.testing.assert_allclose(turned.transpose(0, 2, 3, 1), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strides": [1, 1]}, "four integers in the order NHWC"),
        ({"strides": [2, 1, 1, 1]}, "those of N and C being 1"),
        ({"strides": [1, 1, 2, 2]}, "those of N and C being 1"),
        ({"padding": "same"}, "'SAME' or 'VALID', not 'same'"),
        ({"data_format": "HWC"}, "data_format must be one of"),
    ],
)
def test_conv2d_refuses(change, words):
    arguments = {"strides": [1, 1, 1, 1], "padding": "SAME", **change}
    with pytest.raises(ValueError, match=words):
        tf.nn.conv2d(IMAGE, jnp.ones((3, 3, 3, 1)), **arguments)


def test_a_handle_in_either_place():
    def model():
        kernel = tf.Variable(jnp.ones((2, 2, 3, 1)))
        image = tf.Variable(IMAGE)
        return tf.nn.relu(tf.nn.conv2d(image, kernel, [1, 1, 1, 1], "SAME"))

    model = tf.transform(model)
    out, _ = model.apply(model.init(KEY))
    ones = jnp.ones((2, 2, 3, 1))
    wanted = jax.nn.relu(tf.nn.conv2d(IMAGE, ones, [1, 1, 1, 1], "SAME"))
    np.testing.assert_array_equal(out, wanted)
