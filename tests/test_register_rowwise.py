"""Primitives that users declare to act on each row by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, fast_jit
from jax import lax
from jax.extend.core import Primitive
from jax.extend.core.primitives import sin_p
from jax.interpreters import ad, batching, mlir

import jslices as js

V, D = 6, 4
RNG = np.random.default_rng(3)
TABLE = jax.device_put(RNG.normal(size=(V, D)).astype(np.float32))
MATRIX = RNG.normal(size=(D, V)).astype(np.float32)  # as tall as a table's row
IDS = np.array([4, 1, 4, 0])


def make(name, f):
    """A primitive that computes ``f``, with every rule of JAX's."""
    primitive = Primitive(name)

    def abstract(*avals, **params):
        out = jax.eval_shape(functools.partial(f, **params), *avals)
        return jax.core.ShapedArray(out.shape, out.dtype)

    def jvp(primals, tangents, **params):
        zeros = [
            jnp.zeros_like(x) if isinstance(t, ad.Zero) else t
            for x, t in zip(primals, tangents, strict=True)
        ]
        return jax.jvp(functools.partial(f, **params), tuple(primals), tuple(zeros))

    def batched(args, dims, **params):
        return jax.vmap(functools.partial(f, **params), dims)(*args), 0

    primitive.def_impl(f)
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(f, multiple_results=False))
    return primitive


def gradients(loss, *args):
    """Ours of all arguments, checked against JAX's."""
    argnums = tuple(range(len(args)))
    found = fast_jit(js.grad(loss, argnums))(*args)
    assert_close(found, fast_jit(jax.grad(loss, argnums))(*args))
    return found


def test_an_elementwise_primitive():
    softsign_p = make("softsign", lambda x: x / (1 + jnp.abs(x)))
    loss = lambda t: (softsign_p.bind(t * 2)[IDS] ** 2).sum()  # noqa: E731
    with pytest.warns(js.DensificationWarning, match="softsign at "):
        (grad,) = gradients(loss, TABLE)
    assert not js.is_slices(grad)
    js.register_rowwise(softsign_p)
    (grad,) = gradients(loss, TABLE)
    assert js.is_slices(grad) and grad.values.shape == (4, D)


def test_operands_that_broadcast():
    muladd_p = make("muladd", lambda x, y, z: x * y + z)
    js.register_rowwise(muladd_p)

    def loss(table, row, scale):
        return (muladd_p.bind(table, row[None], scale)[IDS] ** 2).sum()

    grads = gradients(loss, TABLE, MATRIX[:, 0], jnp.float32(0.3))
    assert [js.is_slices(g) for g in grads] == [True, False, False]
    both = gradients(lambda t: muladd_p.bind(t, t + 1, TABLE)[IDS].sum(), TABLE)
    assert js.is_slices(both[0]) and both[0].values.shape == (4, D)


@pytest.mark.parametrize("in_axes", [(0, None), [0, None]])
def test_an_operand_that_serves_all_rows(in_axes):
    """Not even if it is as tall as the table."""
    project_p = make("project", lambda x, w: jnp.tanh(x @ w))
    js.register_rowwise(project_p, in_axes=in_axes)
    table = np.asarray(TABLE)[:D]
    loss = lambda t, w: (project_p.bind(t, w)[IDS % D] ** 2).sum()  # noqa: E731
    grads = gradients(loss, table, MATRIX)
    assert [js.is_slices(g) for g in grads] == [True, False]
    # The other way round, all rows of the table are weights.
    (grad,) = gradients(lambda w: project_p.bind(table, w)[IDS % D].sum(), MATRIX)
    assert not js.is_slices(grad)


def test_a_rule_decides_by_the_parameters():
    shift_p = make("shift", lambda x, axis, by: jnp.roll(x, by, axis))
    seen = []

    @js.register_rowwise(shift_p)
    def rule(num_rows, params, x):
        seen.append((num_rows, x.shape, x.dtype.name))
        return None if params["axis"] == 0 else params

    (grad,) = gradients(lambda t: (shift_p.bind(t, axis=1, by=2)[IDS] ** 2).sum(), TABLE)
    assert js.is_slices(grad)
    assert set(seen) == {(V, (V, D), "float32"), (4, (V, D), "float32")}
    down = lambda t: (shift_p.bind(t, axis=0, by=2)[IDS] ** 2).sum()  # noqa: E731
    with pytest.warns(js.DensificationWarning, match="shift at "):
        (grad,) = gradients(down, TABLE)
    assert not js.is_slices(grad)
    assert callable(rule)


def split_rows(num_rows, params, x):
    sizes = params["sizes"]
    return None if sizes[0] != x.shape[0] else {"sizes": (num_rows, *sizes[1:])}


def test_a_rule_for_parameters_that_mention_the_rows():
    resize_p = make("resize", lambda x, sizes: x.reshape(sizes))
    assert js.register_rowwise(resize_p, split_rows) is split_rows

    def loss(table, sizes):
        return (resize_p.bind(table, sizes=sizes)[IDS // 2] ** 2).sum()

    (grad,) = gradients(functools.partial(loss, sizes=(V, 2, 2)), TABLE)
    assert js.is_slices(grad)
    with pytest.warns(js.DensificationWarning, match="resize at "):
        (grad,) = gradients(functools.partial(loss, sizes=(2 * V, 2)), TABLE)
    assert not js.is_slices(grad)


def test_anywhere_in_a_program_and_needed_whole():
    cube_p = make("cube", lambda x: x**3)
    js.register_rowwise(cube_p)

    def loss(table):
        table = jax.jit(cube_p.bind)(table)
        body = lambda c, i: (c + table[i].sum(), None)  # noqa: E731
        total = lax.scan(jax.checkpoint(body), 0.0, IDS)[0]
        return total + jax.vmap(lambda i: table[i].sum())(IDS).sum(), table.max()

    grad, aux = js.grad(loss, has_aux=True)(TABLE)
    wanted, wanted_aux = fast_jit(jax.grad(loss, has_aux=True))(TABLE)
    assert js.is_slices(grad)
    assert_close((grad, aux), (wanted, wanted_aux))


def test_in_a_branch_for_each_example_it_is_dense_and_right():
    """JAX repeats the table there; what a rule says of that nobody knows."""
    square_p = make("squared", lambda x: x**2)
    js.register_rowwise(square_p)

    def loss(table):
        def one(k):
            yes = lambda: square_p.bind(table)[k].sum()  # noqa: E731
            return lax.cond(k > 2, yes, lambda: 0.0)

        return jax.vmap(one)(IDS).sum()

    gradients(loss, TABLE)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda p: js.register_rowwise(jnp.sin), TypeError, "wants a jax.extend.core.Prim"),
        (lambda p: js.register_rowwise("sin"), TypeError, "got 'sin'"),
        (lambda p: js.register_rowwise(sin_p), ValueError, r"\(sin\).* has a rule already"),
        (lambda p: js.register_rowwise(p, 3), TypeError, r"rule=3\): a rule is a function"),
        (lambda p: js.register_rowwise(p)(None), TypeError, "a rule is a function"),
        (lambda p: js.register_rowwise(p, in_axes=1), TypeError, "in_axes=1"),
        (lambda p: js.register_rowwise(p, in_axes=(0, "a")), TypeError, "must be 0"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(Primitive("some"))


def test_registering_twice():
    primitive = Primitive("once")
    js.register_rowwise(primitive)
    with pytest.raises(ValueError, match="register each primitive once"):
        js.register_rowwise(primitive, split_rows)


def test_wrong_uses_are_named():
    total_p = make("total", lambda x: x.sum(0))
    js.register_rowwise(total_p)
    with pytest.raises(ValueError, match=r"of 6 rows it makes an array float32\[4\]"):
        js.grad(lambda t: total_p.bind(t)[jnp.array([0])].sum())(TABLE)
    plus_p = make("plus", lambda x, y: x + y)
    js.register_rowwise(plus_p, in_axes=(0,))
    with pytest.raises(ValueError, match=r"in_axes=\(0,\), for 1 operand.* applied to 2"):
        js.grad(lambda t: plus_p.bind(t, t)[IDS].sum())(TABLE)
    keep_p = make("keep", lambda x, rows: x[:rows] * 1.0)
    js.register_rowwise(keep_p)  # without a rule for the parameter that mentions rows
    with pytest.raises(ValueError, match=r"register_rowwise\(keep, rule\)"):
        js.grad(lambda t: keep_p.bind(t, rows=V)[IDS.repeat(3)].sum())(TABLE)
