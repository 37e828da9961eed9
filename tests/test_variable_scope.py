"""Scopes, names and sharing: TensorFlow's own examples, its numbers, its errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden

import jslices.tf1 as tf

KEY = jax.random.key(0)
SCOPES = golden("variable_scope")
PROGRAMS = golden("scope_programs")


def run(fn, *args):
    """What ``fn`` returns in ``apply``; it runs in ``init`` as well."""
    seen = []

    def keep(*args):
        seen.append(fn(*args))

    model = tf.transform(keep)
    model.apply(model.init(KEY, *args), *args)
    assert len(seen) == 2
    return seen[1]


def scope(name, **kwargs):
    """Opens a scope that holds one variable ``v``, and gives the scope."""
    with tf.variable_scope(name, **kwargs) as opened:
        tf.get_variable("v", [1])
    return opened


def test_scopes_name_operations_in_the_jaxpr():
    """The page's ``x.op.name``: in JAX the names are those of the program's profile."""

    def model():
        with tf.variable_scope("foo"), tf.name_scope("bar"):
            return tf.get_variable("v", [1]) + 1.0

    model = tf.transform(model)
    text = jax.jit(model.apply).lower(model.init(KEY)).as_text(debug_info=True)
    assert "foo/bar/add" in text


# --- TensorFlow's numbers -------------------------------------------------------------


def golden_nested():
    with tf.variable_scope("foo"), tf.variable_scope("bar"):
        return tf.get_variable("v", [1]).name


def golden_reopened():
    names = []
    for number in (0, 1):
        with tf.variable_scope("foo"):
            shared = tf.get_variable("v2" if number else "v", [1]).name
            names += [shared, tf.Variable(0.0, name="w").name]
    return names


def golden_captured():
    with tf.variable_scope("foo") as foo:
        pass
    with tf.variable_scope("other"), tf.variable_scope(foo) as again:
        shared, own = tf.get_variable("w", [1]), tf.Variable(0.0, name="Const")
        return [shared.name, own.name, again.name]


def golden_name_scope():
    with tf.name_scope("ns"):
        return tf.get_variable("v", [1]).name


def golden_default_name():
    names = []
    for _ in range(3):
        with tf.variable_scope(None, default_name="d") as d:
            names.append(d.name)
    return names


def golden_variable_first():
    tf.Variable(0.0, name="v")
    return tf.get_variable("v", [1]).name


def golden_two_variables():
    return [tf.Variable(0.0, name=name).name for name in (None, None, "a", "a")]


def golden_reuse_inherited():
    with tf.variable_scope("foo", reuse=True):
        with tf.variable_scope("bar") as bar:
            pass
        with tf.variable_scope("baz", reuse=False) as baz:
            return [bar.reuse, baz.reuse]


def golden_initializers():
    constant = tf.constant_initializer
    with tf.variable_scope("foo", initializer=constant(0.3)):
        v = tf.get_variable("v", [1])
        w = tf.get_variable("w", [1], initializer=constant(0.4))
        with tf.variable_scope("bar"):
            x = tf.get_variable("x", [1])
            with tf.variable_scope("baz", initializer=constant(0.5)):
                y = tf.get_variable("y", [1])
            z = tf.get_variable("z", [1])
    return [float(a[0]) for a in (v, w, x, y, z)]


REOPENED = "reopened scope: op names uniquified, get_variable names not"
GOLDEN = {
    "nested": golden_nested,
    REOPENED: golden_reopened,
    "captured scope opened inside other": golden_captured,
    "name_scope": golden_name_scope,
    "default_name": golden_default_name,
    "Variable v then get_variable v": golden_variable_first,
    "two Variables": golden_two_variables,
    "reuse inherited even with reuse=False": golden_reuse_inherited,
    "initializer inheritance v,w,bar/x,bar/baz/y,z": golden_initializers,
}
# What is compared instead, and why.
CONSTANT = "a constant is an operation, which has a name in TensorFlow and none in JAX"
DIFFERENCES = {
    REOPENED: (CONSTANT, lambda x: [name for name in x if "/c:0" not in name]),
    "name_scope": (CONSTANT, lambda x: x[0]),
}


def error_get_twice():
    tf.get_variable("v", [1])
    tf.get_variable("v", [1])


def error_reuse_missing():
    with tf.variable_scope("foo", reuse=True):
        tf.get_variable("v", [1])


def error_shape():
    tf.get_variable("v", [3, 2])
    tf.get_variable_scope().reuse_variables()
    tf.get_variable("v", [2, 3])


def error_dtype():
    tf.get_variable("v", [3, 2])
    tf.get_variable_scope().reuse_variables()
    tf.get_variable("v", [3, 2], jnp.int32)


def error_default_name():
    with tf.variable_scope(None, default_name="d", reuse=True):
        pass


ERRORS = {
    "get twice": error_get_twice,
    "reuse missing": error_reuse_missing,
    "reuse shape mismatch": error_shape,
    "reuse dtype mismatch": error_dtype,
    "no shape": lambda: tf.get_variable("v"),
    "const init + shape": lambda: tf.get_variable("v", [1], initializer=1.0),
    "reuse=1": lambda: scope("foo", reuse=1),
    "name_or_scope=1": lambda: scope(1),
    "default_name+reuse": error_default_name,
}


def test_every_golden_case_is_here():
    assert set(SCOPES) == set(GOLDEN) | set(ERRORS)


@pytest.mark.parametrize("case", GOLDEN)
def test_golden(case):
    _, compared = DIFFERENCES.get(case, ("", lambda x: x))
    assert run(GOLDEN[case]) == compared(SCOPES[case])


@pytest.mark.parametrize("case", ERRORS)
def test_golden_errors(case):
    """The same class, and TensorFlow's words, then more of them."""
    wanted = SCOPES[case]
    words = wanted["gist"].rstrip(".")
    with pytest.raises({"ValueError": ValueError, "TypeError": TypeError}[wanted["error"]],
                       match=re.escape(words)):  # fmt: skip
        tf.transform(ERRORS[case]).init(KEY)


@pytest.mark.parametrize("title", PROGRAMS)
def test_programs_of_scopes(title):
    """Written for one question each, and random ones; the same text ran in TensorFlow."""
    case, seen = PROGRAMS[title], []

    def out(*what):
        seen.append(["AUTO_REUSE" if x is tf.AUTO_REUSE else x for x in what])

    def get(name, *args, **kwargs):
        try:
            out(tf.get_variable(name, *args, **kwargs).name)
        except (TypeError, ValueError) as error:
            out(type(error).__name__, str(error))

    def model():
        try:
            exec(case["program"], {"tf": tf, "out": out, "get": get})
        except (TypeError, ValueError) as error:
            out(type(error).__name__, str(error))

    tf.transform(model).init(KEY)
    assert len(seen) == len(case["seen"])
    for ours, theirs in zip(seen, case["seen"], strict=True):
        if str(theirs[0]).endswith("Error"):
            assert ours[0] == theirs[0] and theirs[1] in ours[1]
        else:
            assert ours == theirs


def test_a_name_with_a_slash_is_not_made_unique():
    def model():
        tf.Variable(0.0, name="a/")
        with pytest.raises(ValueError, match="there is a Variable a already"):
            tf.Variable(0.0, name="a/")

    run(model)


def test_names_come_back_from_a_checkpoint(tmp_path):
    def model():
        tf.get_variable("a>b", [1])
        tf.Variable(2.0, name=".c\\d")
        with tf.variable_scope("o"), tf.variable_scope(""), tf.variable_scope("_x"):
            tf.get_variable("-v", [1])

    variables = tf.transform(model).init(KEY)
    assert list(variables) == ["a>b", ".c\\d", "o//_x/-v"]
    saver = tf.train.Saver()
    path = saver.save(variables, tmp_path / "m")
    assert saver.restore(None, path) == dict(variables)
    again = saver.restore(jax.tree.map(jnp.zeros_like, variables), path)
    assert dict(again) == dict(variables)


# --- what else the catalogue says -----------------------------------------------------

AUTO = tf.AUTO_REUSE


@pytest.mark.parametrize(
    "outer, inner, result",
    [
        (None, None, False),
        (None, False, False),
        (None, True, True),
        (None, AUTO, AUTO),
        (True, None, True),
        (True, False, True),
        (True, AUTO, AUTO),
        (AUTO, None, AUTO),
        (AUTO, False, AUTO),
        (AUTO, True, True),
    ],
)
def test_reuse_is_inherited(outer, inner, result):
    def model():
        with tf.variable_scope("a", reuse=outer), tf.variable_scope("b", reuse=inner) as b:
            assert b.reuse == result

    run(model)


@pytest.mark.parametrize("kept, given, result", [
    (True, None, True), (True, False, True), (False, True, True), (False, None, False),
])  # fmt: skip
def test_reopening_an_object_keeps_its_reuse(kept, given, result):
    def model():
        with tf.variable_scope("jump", reuse=kept) as jump:
            pass
        with tf.variable_scope("elsewhere", reuse=True):
            with tf.variable_scope(jump, reuse=given) as again:
                assert again.reuse == result and again is not jump

    run(model)


def test_reuse_variables_lasts_to_the_end_of_its_block():
    def model():
        with tf.variable_scope("a") as a:
            with tf.variable_scope("b") as b:
                b.reuse_variables()
            assert not a.reuse
            with tf.variable_scope("b") as anew:
                assert not anew.reuse
            with tf.variable_scope(b) as again:
                assert again.reuse

    run(model)


def test_auto_reuse_creates_then_shares():
    def model():
        with tf.variable_scope("a", reuse=AUTO):
            first = tf.get_variable(
                "v",
                [2],
            )
            assert tf.get_variable("v") is first and tf.get_variable("v", [None]) is first

    run(model)
    assert repr(AUTO) == "AUTO_REUSE"


def test_a_path_is_the_same_as_nesting():
    def model():
        with tf.variable_scope("a/b"):
            v = tf.get_variable("v", [1])
        with tf.variable_scope("a", reuse=True):
            assert tf.get_variable("b/v") is v
            with tf.variable_scope("b"):
                assert tf.get_variable("v") is v

    run(model)


def test_an_exception_leaves_the_scope():
    def model():
        with pytest.raises(ZeroDivisionError):
            with tf.variable_scope("a"), tf.variable_scope("b"):
                _ = 1 / 0
        assert tf.get_variable_scope().name == ""
        return tf.get_variable("v", [1]).name

    assert run(model) == "v:0"


def test_what_was_refused_keeps_no_name():
    def model():
        for make in (
            lambda: tf.get_variable("v", [1], initializer=lambda *_: jnp.zeros(3)),
            lambda: tf.get_variable("v", [1], collections="x"),
            lambda: tf.Variable(0, name="v", collections="x"),
        ):
            with pytest.raises(ValueError):
                make()
        assert tf.get_variable("v", [1]).name == "v:0"

    tf.transform(model).init(KEY)


def test_scope_defaults_are_inherited():
    def model():
        with tf.variable_scope("a", dtype=jnp.bfloat16, regularizer=jnp.sum) as a:
            assert tf.get_variable("v", [2]).dtype == jnp.bfloat16
            a.set_initializer(tf.ones_initializer)
            with tf.variable_scope("b", dtype=jnp.int32, regularizer=lambda x: None):
                assert tf.get_variable("v", [2]).value().tolist() == [1, 1]
                assert tf.get_variable("w", [2], jnp.float32).dtype == jnp.float32
        return len(tf.get_collection("regularization_losses"))

    assert run(model) == 1


def test_default_name_counts_within_its_scope():
    def model():
        names = []
        for _ in range(2):
            with tf.variable_scope("a"):
                for _ in range(2):
                    with tf.variable_scope(None, default_name="d") as d:
                        names.append(d.name)
        return names

    assert run(model) == ["a/d", "a/d_1"] * 2


def test_original_name_scope_is_unique():
    def model():
        with tf.variable_scope("a") as one:
            pass
        with tf.variable_scope("a") as two:
            pass
        with tf.variable_scope("") as root, tf.name_scope(one.original_name_scope) as again:
            return [one.original_name_scope, two.original_name_scope, root.name, again]

    assert run(model) == ["a/", "a_1/", "", "a/"]


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: tf.get_variable(3, [1]), TypeError, "must be a string, got 3"),
        (lambda: tf.get_variable("a b", [1]), ValueError, "'a b' is not a valid name"),
        (lambda: tf.get_variable("v", [None]), ValueError, r"must be fully defined"),
        (lambda: tf.get_variable("v", [-1]), ValueError, "must not be negative"),
        (lambda: tf.get_variable("v", 1.5), TypeError, "must be ints"),
        (lambda: tf.get_variable("v", initializer=tf.zeros_initializer()), ValueError,
         r"\(v\) must be fully defined, but instead was <unknown>"),
        (lambda: tf.get_variable("v", dtype="int32", initializer=1.0), ValueError,
         "Initializer type 'float32' and explicit dtype 'int32'"),
        (lambda: tf.get_variable("v", initializer="a"), TypeError, "cannot hold a string"),
        (lambda: tf.get_variable("v", [2], initializer="ones"), ValueError,
         "If initializer is a constant, do not specify shape"),
        (lambda: tf.get_variable("v", [2], collections="abc"), ValueError,
         "must be a list, tuple or set"),
        (lambda: tf.get_variable("v", [2], initializer=lambda k, s, d: jnp.zeros(3)),
         ValueError, r"initializer of v gave shape \(3,\), wanted \(2,\)"),
        (lambda: tf.get_variable("v", [2], initializer=lambda *_: jnp.zeros(2, "int8")),
         ValueError, "initializer of v gave int8, wanted float32"),
        (lambda: tf.get_variable("v", [2], "int32", tf.random_normal_initializer()),
         TypeError, "makes floats, got dtype int32"),
        (lambda: tf.variable_scope(None).__enter__(), TypeError, "must be a string"),
        (lambda: tf.variable_scope(None, "d").__enter__(), ValueError,
         "got 'd'; type default_name='d'"),
    ],
)  # fmt: skip
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        tf.transform(call).init(KEY)


@pytest.mark.parametrize(
    "shape, wanted", [(3, (3,)), ((2, 3), (2, 3)), ([], ()), (np.array([2]), (2,))]
)
def test_shapes(shape, wanted):
    assert run(lambda: tf.get_variable("v", shape).shape) == wanted


@pytest.mark.parametrize("constant, dtype", [
    (1.5, "float32"), (2, "int32"), (True, "bool"), ([[1.0, 2.0]], "float32"),
    (np.arange(3, dtype=np.int8), "int8"),
])  # fmt: skip
def test_a_constant_gives_shape_and_dtype(constant, dtype):
    def model():
        v = tf.get_variable("v", initializer=constant)
        assert v.dtype == dtype and v.shape == np.shape(constant)
        np.testing.assert_array_equal(v, constant)
        tf.get_variable_scope().reuse_variables()
        assert tf.get_variable("v", initializer=constant) is v

    run(model)


def test_the_default_initializer_is_glorot_uniform_or_zeros():
    def model():
        w = tf.get_variable("w", [300, 500])
        bound = (6 / 800) ** 0.5
        assert bound * 0.99 < np.abs(w[...]).max() < bound
        assert not tf.get_variable("n", [2], jnp.int32).value().any()

    tf.transform(model).init(KEY)


def test_a_value_depends_on_key_and_name_alone():
    def one():
        tf.get_variable("a", [3])
        tf.get_variable("b", [3])

    two = tf.transform(lambda: tf.get_variable("b", [3]).value())
    variables = tf.transform(one).init(KEY)
    np.testing.assert_array_equal(variables["b"], two.init(KEY)["b"])
    assert (variables["a"] != variables["b"]).all()
    assert (two.init(jax.random.key(1))["b"] != variables["b"]).all()


@pytest.mark.parametrize("call", [
    lambda: tf.get_variable("v", [1]), lambda: tf.Variable(0), tf.get_variable_scope,
    lambda: scope("a"), tf.all_variables, lambda: tf.get_collection("variables"),
    lambda: tf.name_scope("a").__enter__(),
])  # fmt: skip
def test_outside_of_a_function(call):
    with pytest.raises(RuntimeError, match="outside of a transformed function"):
        call()
