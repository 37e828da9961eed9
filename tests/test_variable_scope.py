"""Scopes, names and sharing: TensorFlow's own examples, its numbers, its errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden

import jslices as js

KEY = jax.random.key(0)
SCOPES = golden("variable_scope")


def run(fn, *args):
    """What ``fn`` returns in ``apply``; it runs in ``init`` as well."""
    seen = []

    def keep(*args):
        seen.append(fn(*args))

    model = js.transform(keep)
    model.apply(model.init(KEY, *args), *args)
    assert len(seen) == 2
    return seen[1]


def scope(name, **kwargs):
    """Opens a scope that holds one variable ``v``, and gives the scope."""
    with js.variable_scope(name, **kwargs) as opened:
        js.get_variable("v", [1])
    return opened


def test_scopes_name_operations_in_the_jaxpr():
    """The page's ``x.op.name``: in JAX the names are those of the program's profile."""

    def model():
        with js.variable_scope("foo"), js.name_scope("bar"):
            return js.get_variable("v", [1]) + 1.0

    model = js.transform(model)
    text = jax.jit(model.apply).lower(model.init(KEY)).as_text(debug_info=True)
    assert "foo/bar/add" in text


# --- TensorFlow's numbers -------------------------------------------------------------


def golden_nested():
    with js.variable_scope("foo"), js.variable_scope("bar"):
        return js.get_variable("v", [1]).name


def golden_reopened():
    names = []
    for number in (0, 1):
        with js.variable_scope("foo"):
            shared = js.get_variable("v2" if number else "v", [1]).name
            names += [shared, js.Variable(0.0, name="w").name]
    return names


def golden_captured():
    with js.variable_scope("foo") as foo:
        pass
    with js.variable_scope("other"), js.variable_scope(foo) as again:
        return [js.get_variable("w", [1]).name, again.original_name_scope, again.name]


def golden_name_scope():
    with js.name_scope("ns"):
        return js.get_variable("v", [1]).name


def golden_default_name():
    names = []
    for _ in range(3):
        with js.variable_scope(None, default_name="d") as d:
            names.append(d.name)
    return names


def golden_variable_first():
    js.Variable(0.0, name="v")
    return js.get_variable("v", [1]).name


def golden_two_variables():
    return [js.Variable(0.0, name=name).name for name in (None, None, "a", "a")]


def golden_reuse_inherited():
    with js.variable_scope("foo", reuse=True):
        with js.variable_scope("bar") as bar:
            pass
        with js.variable_scope("baz", reuse=False) as baz:
            return [bar.reuse, baz.reuse]


def golden_initializers():
    constant = js.constant_initializer
    with js.variable_scope("foo", initializer=constant(0.3)):
        v = js.get_variable("v", [1])
        w = js.get_variable("w", [1], initializer=constant(0.4))
        with js.variable_scope("bar"):
            x = js.get_variable("x", [1])
            with js.variable_scope("baz", initializer=constant(0.5)):
                y = js.get_variable("y", [1])
            z = js.get_variable("z", [1])
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
    "captured scope opened inside other": (
        f"{CONSTANT}; the name scope it is in is compared",
        lambda x: [name.replace("Const:0", "") for name in x],
    ),
    "name_scope": (CONSTANT, lambda x: x[0]),
}


def error_get_twice():
    js.get_variable("v", [1])
    js.get_variable("v", [1])


def error_reuse_missing():
    with js.variable_scope("foo", reuse=True):
        js.get_variable("v", [1])


def error_shape():
    js.get_variable("v", [3, 2])
    js.get_variable_scope().reuse_variables()
    js.get_variable("v", [2, 3])


def error_dtype():
    js.get_variable("v", [3, 2])
    js.get_variable_scope().reuse_variables()
    js.get_variable("v", [3, 2], jnp.int32)


def error_default_name():
    with js.variable_scope(None, default_name="d", reuse=True):
        pass


ERRORS = {
    "get twice": error_get_twice,
    "reuse missing": error_reuse_missing,
    "reuse shape mismatch": error_shape,
    "reuse dtype mismatch": error_dtype,
    "no shape": lambda: js.get_variable("v"),
    "const init + shape": lambda: js.get_variable("v", [1], initializer=1.0),
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
    """The same class, and TensorFlow's words with our module's name, then more of them."""
    wanted = SCOPES[case]
    words = wanted["gist"].replace("tf.", "js.").rstrip(".")
    with pytest.raises({"ValueError": ValueError, "TypeError": TypeError}[wanted["error"]],
                       match=re.escape(words)):  # fmt: skip
        js.transform(ERRORS[case]).init(KEY)


# --- what else the catalogue says -----------------------------------------------------

AUTO = js.AUTO_REUSE


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
        with js.variable_scope("a", reuse=outer), js.variable_scope("b", reuse=inner) as b:
            assert b.reuse == result

    run(model)


@pytest.mark.parametrize("kept, given, result", [
    (True, None, True), (True, False, True), (False, True, True), (False, None, False),
])  # fmt: skip
def test_reopening_an_object_keeps_its_reuse(kept, given, result):
    def model():
        with js.variable_scope("jump", reuse=kept) as jump:
            pass
        with js.variable_scope("elsewhere", reuse=True):
            with js.variable_scope(jump, reuse=given) as again:
                assert again.reuse == result and again is not jump

    run(model)


def test_reuse_variables_lasts_to_the_end_of_its_block():
    def model():
        with js.variable_scope("a") as a:
            with js.variable_scope("b") as b:
                b.reuse_variables()
            assert not a.reuse
            with js.variable_scope("b") as anew:
                assert not anew.reuse
            with js.variable_scope(b) as again:
                assert again.reuse

    run(model)


def test_auto_reuse_creates_then_shares():
    def model():
        with js.variable_scope("a", reuse=AUTO):
            first = js.get_variable(
                "v",
                [2],
            )
            assert js.get_variable("v") is first and js.get_variable("v", [None]) is first

    run(model)
    assert repr(AUTO) == "AUTO_REUSE"


def test_a_path_is_the_same_as_nesting():
    def model():
        with js.variable_scope("a/b"):
            v = js.get_variable("v", [1])
        with js.variable_scope("a", reuse=True):
            assert js.get_variable("b/v") is v
            with js.variable_scope("b"):
                assert js.get_variable("v") is v

    run(model)


def test_an_exception_leaves_the_scope():
    def model():
        with pytest.raises(ZeroDivisionError):
            with js.variable_scope("a"), js.variable_scope("b"):
                _ = 1 / 0
        assert js.get_variable_scope().name == ""
        return js.get_variable("v", [1]).name

    assert run(model) == "v:0"


def test_what_was_refused_keeps_no_name():
    def model():
        for make in (
            lambda: js.get_variable("v", [1], initializer=lambda *_: jnp.zeros(3)),
            lambda: js.get_variable("v", [1], collections="x"),
            lambda: js.Variable(0, name="v", collections="x"),
        ):
            with pytest.raises(ValueError):
                make()
        assert js.get_variable("v", [1]).name == "v:0"

    js.transform(model).init(KEY)


def test_scope_defaults_are_inherited():
    def model():
        with js.variable_scope("a", dtype=jnp.bfloat16, regularizer=jnp.sum) as a:
            assert js.get_variable("v", [2]).dtype == jnp.bfloat16
            a.set_initializer(js.ones_initializer)
            with js.variable_scope("b", dtype=jnp.int32, regularizer=lambda x: None):
                assert js.get_variable("v", [2]).value().tolist() == [1, 1]
                assert js.get_variable("w", [2], jnp.float32).dtype == jnp.float32
        return len(js.get_collection("regularization_losses"))

    assert run(model) == 1


def test_default_name_counts_within_its_scope():
    def model():
        names = []
        for _ in range(2):
            with js.variable_scope("a"):
                for _ in range(2):
                    with js.variable_scope(None, default_name="d") as d:
                        names.append(d.name)
        return names

    assert run(model) == ["a/d", "a/d_1"] * 2


def test_original_name_scope_is_unique():
    def model():
        with js.variable_scope("a") as one:
            pass
        with js.variable_scope("a") as two:
            pass
        with js.variable_scope("") as root, js.name_scope(one.original_name_scope) as again:
            return [one.original_name_scope, two.original_name_scope, root.name, again]

    assert run(model) == ["a/", "a_1/", "", "a/"]


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: js.get_variable(3, [1]), TypeError, "must be a string, got 3"),
        (lambda: js.get_variable("a b", [1]), ValueError, "'a b' is not a valid name"),
        (lambda: js.get_variable("v", [None]), ValueError, r"must be fully defined"),
        (lambda: js.get_variable("v", [-1]), ValueError, "must not be negative"),
        (lambda: js.get_variable("v", 1.5), TypeError, "must be ints"),
        (lambda: js.get_variable("v", initializer=js.zeros_initializer()), ValueError,
         r"\(v\) must be fully defined, but instead was <unknown>"),
        (lambda: js.get_variable("v", dtype="int32", initializer=1.0), ValueError,
         "Initializer type 'float32' and explicit dtype 'int32'"),
        (lambda: js.get_variable("v", initializer="a"), TypeError, "cannot hold a string"),
        (lambda: js.get_variable("v", [2], initializer="ones"), ValueError,
         "If initializer is a constant, do not specify shape"),
        (lambda: js.get_variable("v", [2], collections="abc"), ValueError,
         "must be a list, tuple or set"),
        (lambda: js.get_variable("v", [2], initializer=lambda k, s, d: jnp.zeros(3)),
         ValueError, r"initializer of v gave shape \(3,\), wanted \(2,\)"),
        (lambda: js.get_variable("v", [2], initializer=lambda *_: jnp.zeros(2, "int8")),
         ValueError, "initializer of v gave int8, wanted float32"),
        (lambda: js.get_variable("v", [2], "int32", js.random_normal_initializer()),
         TypeError, "makes floats, got dtype int32"),
        (lambda: js.variable_scope(None).__enter__(), TypeError, "must be a string"),
    ],
)  # fmt: skip
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        js.transform(call).init(KEY)


@pytest.mark.parametrize(
    "shape, wanted", [(3, (3,)), ((2, 3), (2, 3)), ([], ()), (np.array([2]), (2,))]
)
def test_shapes(shape, wanted):
    assert run(lambda: js.get_variable("v", shape).shape) == wanted


@pytest.mark.parametrize("constant, dtype", [
    (1.5, "float32"), (2, "int32"), (True, "bool"), ([[1.0, 2.0]], "float32"),
    (np.arange(3, dtype=np.int8), "int8"),
])  # fmt: skip
def test_a_constant_gives_shape_and_dtype(constant, dtype):
    def model():
        v = js.get_variable("v", initializer=constant)
        assert v.dtype == dtype and v.shape == np.shape(constant)
        np.testing.assert_array_equal(v, constant)
        js.get_variable_scope().reuse_variables()
        assert js.get_variable("v", initializer=constant) is v

    run(model)


def test_the_default_initializer_is_glorot_uniform_or_zeros():
    def model():
        w = js.get_variable("w", [300, 500])
        bound = (6 / 800) ** 0.5
        assert bound * 0.99 < abs(w[...]).max() < bound
        assert not js.get_variable("n", [2], jnp.int32).value().any()

    js.transform(model).init(KEY)


def test_a_value_depends_on_key_and_name_alone():
    def one():
        js.get_variable("a", [3])
        js.get_variable("b", [3])

    two = js.transform(lambda: js.get_variable("b", [3]).value())
    variables = js.transform(one).init(KEY)
    np.testing.assert_array_equal(variables["b"], two.init(KEY)["b"])
    assert (variables["a"] != variables["b"]).all()
    assert (two.init(jax.random.key(1))["b"] != variables["b"]).all()


@pytest.mark.parametrize("call", [
    lambda: js.get_variable("v", [1]), lambda: js.Variable(0), js.get_variable_scope,
    lambda: scope("a"), js.all_variables, lambda: js.get_collection("variables"),
    lambda: js.name_scope("a").__enter__(),
])  # fmt: skip
def test_outside_of_a_function(call):
    with pytest.raises(RuntimeError, match="outside of a transformed function"):
        call()
