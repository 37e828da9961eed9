"""scatter_* against TensorFlow's numbers, a loop in numpy, and dense gradients."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import all_at_once, fast_jit, golden
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify

import jslices as js

OPS = ("update", "add", "sub", "mul", "div", "min", "max")
SCATTER = {op: getattr(js, f"scatter_{op}") for op in OPS}
ND = {
    "update": js.scatter_nd_update,
    "add": js.scatter_nd_add,
    "sub": js.scatter_nd_sub,
}

#: Where TensorFlow gives something else on purpose; docs/operations.md says why.
DIFFERENCES = {
    f"{dtype} {op}": "they work for every dtype with an order"
    for dtype in ("int8", "int16", "uint8", "uint16", "uint32", "uint64")
    for op in ("min", "max")
}


def step(op, old, new):
    """One step of the loop that a scatter stands for."""
    if op == "div" and np.issubdtype(old.dtype, np.integer):
        wide, divisor = old.astype(object), new.astype(object)
        all_bits = -1 if old.dtype.kind == "i" else np.iinfo(old.dtype).max
        truncate = lambda a, b: (  # noqa: E731
            all_bits if b == 0 else abs(a) // abs(b) * (-1) ** ((a < 0) != (b < 0))
        )
        return np.vectorize(truncate, otypes=[object])(wide, divisor).astype(old.dtype)
    return {
        "update": lambda a, b: b,
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "min": np.minimum,
        "max": np.maximum,
    }[op](old, new)


def loop(op, ref, indices, updates, mode="drop"):
    """What a scatter means, by the plainest loop."""
    out = np.array(ref)
    updates = np.broadcast_to(updates, (*indices.shape, *ref.shape[1:]))
    for k in np.ndindex(indices.shape):
        i = int(indices[k])
        i = min(max(i, 0), len(out) - 1) if mode == "clip" else i
        if 0 <= i < len(out):
            out[i] = step(op, out[i], updates[k])
    return out


# --- TensorFlow -------------------------------------------------------------------------


@functools.cache
def compiled(ops):
    return fast_jit(lambda *args: {op: SCATTER[op](*args) for op in ops})


def scatter_all(ops, *args):
    return compiled(ops)(*args)


def padded(indices, updates, size=6):
    """Flat, and filled up with indices that drop."""
    count = size - indices.size
    if updates.shape:
        updates = updates.reshape(indices.size, *updates.shape[indices.ndim :])
        zeros = np.ones((count, *updates.shape[1:]), updates.dtype)
        updates = np.concatenate([updates, zeros])
    return np.append(indices.ravel(), np.full(count, -1, indices.dtype)), updates


def check_golden(name, case, updates, theirs):
    ref, indices = case["ref"], case["indices"]
    ops = []
    # Indices of every shape meet rows of one shape; for other rows, and for one number
    # instead of updates, they are flattened and padded, so that less is compiled.
    shaped = name.startswith(("tail[2] ", "dtype")) and updates.shape
    for op in OPS:
        wanted = theirs.get(f"scatter_{op}", {"error": "not tried"})
        fails = wanted["error"] if isinstance(wanted, dict) else None
        if fails == "InvalidArgumentError":
            with pytest.raises(IndexError) as info:
                SCATTER[op](ref, indices, updates, mode="check")
            assert wanted["gist"] in str(info.value)
        elif fails and f"{name.split()[-1]} {op}" not in DIFFERENCES:
            with pytest.raises(TypeError):  # complex numbers have no order
                SCATTER[op](ref, indices, updates)
            continue
        ops.append(op)
    args = (indices, updates) if shaped else padded(indices, updates)
    for op, got in scatter_all(tuple(ops), ref, *args).items():
        wanted = theirs[f"scatter_{op}"]
        if isinstance(wanted, dict):
            # By default a bad index drops; the good ones, also those after it, are done.
            wanted = loop(op, ref, indices, updates)
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        half = wanted.dtype == np.float16  # the compiler may round sums of these once
        np.testing.assert_allclose(got, wanted, rtol=2e-3 if half else 1e-6)


@pytest.mark.parametrize("name", golden("scatter"))
def test_equals_tensorflow(name):
    case = golden("scatter")[name]
    with jax.enable_x64("64" in name):
        check_golden(name, case, case["updates"], case["out"])
        for key in case:
            if key.startswith("scalar_update") and case[key]:
                check_golden(name, case, np.float32(key.split("_")[-1]), case[key])


@pytest.mark.parametrize("name", golden("scatter_nd"))
def test_nd_equals_tensorflow(name):
    case = golden("scatter_nd")[name]
    ref, indices, updates = case["ref"], case["indices"], case["updates"]
    if name == "batch_scatter_update":
        got = js.batch_scatter_update(ref, indices, updates)
        np.testing.assert_array_equal(got, case["out"])
        return
    for op, scatter in ND.items():
        wanted = case[f"scatter_nd_{op}"]
        if "error" in wanted if isinstance(wanted, dict) else False:
            text = wanted["gist"].replace("4,3", "4, 3")
            with pytest.raises(IndexError) as info:
                scatter(ref, indices, updates, mode="check")
            assert text in str(info.value)
            kept = [i for i, at in enumerate(indices) if ((at >= 0) & (at < (4, 3))).all()]
            got = scatter(ref, indices, updates)
            np.testing.assert_array_equal(got, scatter(ref, indices[kept], updates[kept]))
            assert kept or (np.asarray(got) == ref).all()
        else:
            np.testing.assert_allclose(scatter(ref, indices, updates), wanted, rtol=1e-6)
            zeros = jnp.zeros((4, 3))
            np.testing.assert_allclose(
                js.scatter_nd_add(zeros, indices, updates),
                case["scatter_nd(shape 4,3)"],
                rtol=1e-6,
            )


# --- a loop in numpy --------------------------------------------------------------------

CASES = [((2, 2), (), "uint8", "drop"), ((4,), (2,), "float32", "clip")]


@examples(20)
@given(st.data())
@pytest.mark.parametrize("op", OPS)
def test_means_what_a_loop_means(op, data):
    shape, row, dtype, mode = data.draw(st.sampled_from(CASES))
    low = 0 if dtype == "uint8" else -4
    numbers = st.integers(low, 6)
    count = int(np.prod(shape))
    indices = data.draw(st.lists(st.integers(-2, 6), min_size=count, max_size=count))
    indices = np.array(indices, np.int32).reshape(shape)
    one = data.draw(st.booleans())
    size = 1 if one else count * int(np.prod(row))
    updates = data.draw(st.lists(numbers, min_size=size, max_size=size))
    if op == "div" and dtype == "float32":
        updates = [x or 1 for x in updates]
    updates = np.array(updates, dtype).reshape(() if one else (*shape, *row))
    size = 5 * int(np.prod(row))
    ref = data.draw(st.lists(numbers, min_size=size, max_size=size))
    ref = np.array(ref, dtype).reshape(5, *row)
    wanted = loop(op, ref, indices, updates, mode)
    got = SCATTER[op](ref, indices, updates, mode=mode)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert got.dtype == ref.dtype


@examples(30)
@given(st.data())
@pytest.mark.parametrize("op", ND)
def test_nd_means_what_a_loop_means(op, data):
    depth = data.draw(st.integers(1, 3))
    shape = (3, 2, 2)
    index = st.lists(st.integers(-1, 3), min_size=depth, max_size=depth)
    indices = np.array(data.draw(st.lists(index, min_size=4, max_size=4)), np.int32)
    updates = np.arange(4 * int(np.prod(shape[depth:])), dtype=np.float32) + 1
    updates = updates.reshape(4, *shape[depth:])
    wanted = np.arange(12, dtype=np.float32).reshape(shape)
    got = ND[op](wanted, indices, updates)
    for at, row in zip(indices, updates, strict=True):
        if ((at >= 0) & (at < shape[:depth])).all():
            wanted[tuple(at)] = step(op, wanted[tuple(at)], row)
    np.testing.assert_array_equal(got, wanted)


def test_an_integer_division_by_zero_is_survived():
    lowest = np.array([np.iinfo(np.int32).min], np.int32)
    cases = {
        "several": (np.int32([7, -7, 5, 5]), [0, 1, 3], np.int32([0, 0, 2])),
        "small": (np.uint8([7]), 0, np.uint8(0)),
        "lowest": (lowest, 0, -1),
        "floats": (np.ones(2, np.float32), 1, 0.0),
        # Truncated one after the other, though the product of the divisors overflows.
        "tiny": (np.int8([100]), [0, 0], np.int8(20)),
    }
    refs = {name: ref for name, (ref, *_) in cases.items()}
    divided = fast_jit(
        lambda refs: {n: js.scatter_div(refs[n], *cases[n][1:]) for n in cases}
    )(refs)
    np.testing.assert_array_equal(divided["several"], [-1, -1, 5, 2])
    np.testing.assert_array_equal(divided["small"], [255])
    np.testing.assert_array_equal(divided["lowest"], lowest)
    assert np.isinf(divided["floats"]).tolist() == [False, True]
    np.testing.assert_array_equal(divided["tiny"], [0])


def test_bool_can_be_replaced_and_nothing_else():
    ref = jnp.zeros(3, bool)
    np.testing.assert_array_equal(js.scatter_update(ref, 1, True), [False, True, False])
    with pytest.raises(TypeError, match="scatter_add cannot calculate with bool"):
        js.scatter_add(ref, 1, True)
    with pytest.raises(TypeError, match="complex numbers have no order"):
        js.scatter_max(jnp.zeros(3, jnp.complex64), 1, 1.0)


def test_batches():
    ref = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    indices = np.array([[0, 2, 0], [1, -1, 9]])
    updates = -np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    wanted = np.stack([loop("update", *x) for x in zip(ref, indices, updates, strict=True)])
    update = js.batch_scatter_update

    @fast_jit
    def every(ref, indices, updates):
        one = update(ref[0], indices[0], updates[0])
        return update(ref, indices, updates), update(ref, indices, 7), one

    batch, sevens, one = map(np.asarray, every(ref, indices, updates))
    np.testing.assert_array_equal(batch, wanted)
    assert (sevens[0, 0] == 7).all() and (sevens[1, 2] == ref[1, 2]).all()
    np.testing.assert_array_equal(one, wanted[0])
    with pytest.raises(IndexError, match=r"indices\[1, 1\] = -1 is not in \[0, 3\)"):
        js.batch_scatter_update(ref, indices, updates, mode="check")
    with pytest.raises(ValueError, match=r"of the same batch \*B, got ref \[2, 3, 4\]"):
        js.batch_scatter_update(ref, np.zeros((3, 1), int), updates)


def test_vmap_and_scan():
    rng = np.random.default_rng(0)
    refs = rng.normal(size=(3, 5, 2)).astype(np.float32)
    indices = np.array([[0, 4, 0], [1, -1, 7], [2, 2, 2]], np.int32)
    updates = rng.normal(size=(3, 3, 2)).astype(np.float32) + 3

    @fast_jit
    def every(refs, indices, updates):
        def both(scatter):
            step = lambda ref, x: (scatter(ref, *x), None)  # noqa: E731
            final, _ = jax.lax.scan(step, refs[0], (indices, updates))
            return jax.vmap(scatter)(refs, indices, updates), final

        return {op: both(SCATTER[op]) for op in OPS}

    args = refs, indices, updates
    for op, (batch, final) in every(*args).items():
        wanted = [loop(op, *x) for x in zip(*args, strict=True)]
        np.testing.assert_allclose(batch, wanted, rtol=1e-5)
        steps = zip(args[1], args[2], strict=True)
        wanted = functools.reduce(
            lambda ref, x, op=op: loop(op, ref, *x), steps, args[0][0]
        )
        np.testing.assert_allclose(final, wanted, rtol=1e-5)


# --- gradients --------------------------------------------------------------------------


def dense_form(op, ref, indices, updates):
    """A scatter without a scatter: one row after the other by masks."""
    rows = jnp.arange(ref.shape[0]).reshape(-1, *(1,) * (ref.ndim - 1))
    for index, update in zip(indices, updates, strict=True):
        new = {
            "update": lambda a, b: jnp.broadcast_to(b, a.shape),
            "add": jnp.add,
            "sub": jnp.subtract,
            "mul": jnp.multiply,
            "div": jnp.divide,
            "min": jnp.minimum,
            "max": jnp.maximum,
        }[op](ref, update[None])
        ref = jnp.where(rows == index, new, ref)
    return ref


def test_gradients_are_those_of_the_dense_form():
    ours, plain = {}, {}
    for op in OPS:
        ours[op], plain[op] = gradients_of(op)
    found, wanted = all_at_once(ours), all_at_once(plain)
    for op in OPS:
        (grads, tangent), (wanted_grads, wanted_tangent) = found[op], wanted[op]
        for a, b in zip(grads, wanted_grads, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(tangent, wanted_tangent, rtol=1e-4)


def gradients_of(op):
    """Functions that give them: of the scatter, and of the dense form."""
    rng = np.random.default_rng(2)
    ref, updates, weight = (
        (rng.normal(size=(rows, 2)) + shift).astype(np.float32)
        for rows, shift in [(5, 4), (6, 4), (5, 0)]
    )
    indices = np.array([3, 1, 3, -1, 9, 3])
    if op == "mul":
        updates[0, 0] = updates[1] = 0
    ours = lambda r, u: (SCATTER[op](r, indices, u) * weight).sum()  # noqa: E731
    plain = lambda r, u: (dense_form(op, r, indices, u) * weight).sum()  # noqa: E731

    def both_ways(f):
        run = lambda *x: (jax.grad(f, (0, 1))(*x), jax.jvp(f, x, x)[1])  # noqa: E731
        return lambda: run(ref, updates)

    return both_ways(ours), both_ways(plain)


def test_gradient_of_nd_update():
    ref, updates = np.ones((3, 2), np.float32), np.float32([2, 3, 4])
    indices = np.array([[0, 1], [2, 0], [0, 1]])
    f = lambda r, u: (js.scatter_nd_update(r, indices, u) ** 2).sum()  # noqa: E731
    of_ref, of_updates = fast_jit(jax.grad(f, (0, 1)))(ref, updates)
    np.testing.assert_array_equal(of_ref, [[2, 0], [2, 2], [0, 2]])
    np.testing.assert_array_equal(of_updates, [0, 6, 8])


def test_a_scatter_into_a_table_is_a_dense_use_and_named():
    def loss(table):
        changed = js.scatter_div(table, [1], 3.0)  # this line
        return (changed[jnp.array([0, 1])] ** 2).sum() + table[jnp.array([2])].sum()

    table = jnp.arange(10.0).reshape(5, 2)
    with pytest.warns(js.DensificationWarning, match="# this line"):
        gradient = fast_jit(js.grad(loss))(table)
    np.testing.assert_array_equal(gradient, fast_jit(jax.grad(loss))(table))


def test_rows_beside_one_that_was_replaced():
    def loss(table):
        changed = js.scatter_update(table, [1], 3.0)
        return (changed[jnp.array([0, 1])] ** 2).sum() + table[jnp.array([2])].sum()

    table = jnp.arange(10.0).reshape(5, 2)
    gradient = fast_jit(js.grad(loss))(table)
    assert js.is_slices(gradient)
    np.testing.assert_array_equal(gradient.to_dense(), fast_jit(jax.grad(loss))(table))


def test_a_scatter_alone_looks_nothing_up():
    # No row of the table is read by the user, so no row gradient is missed.
    table, ids = np.arange(1, 11, dtype=np.float32).reshape(5, 2), np.array([1, 3, 1])
    updates = np.full((3, 2), 3, np.float32)
    loss = lambda op: lambda t, u: (SCATTER[op](t, ids, u) ** 2).sum()  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, theirs = (
            {op: grad(loss(op), (0, 1)) for op in OPS} for grad in (js.grad, jax.grad)
        )
        both = fast_jit(
            lambda *x: [{op: f(*x) for op, f in by.items()} for by in (ours, theirs)]
        )
        got, wanted = both(table, updates)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert not any(js.is_slices(x) for pair in got.values() for x in pair)


@pytest.mark.parametrize("nd", [False, True])
def test_no_two_writes_of_an_update_meet(nd):
    # XLA leaves the order of colliding writes open; so none may collide on any backend.
    call = js.scatter_nd_update if nd else js.scatter_update
    ids = jnp.array([1, 1, 9, 9, 1])[:, None] if nd else jnp.array([1, 1, 9, 9, 1])
    text = jax.jit(call).lower(jnp.zeros(4), ids, jnp.arange(5.0)).as_text()
    scatter = text[text.rindex("stablehlo.scatter") :]
    assert "unique_indices = true" in scatter[: scatter.index("({")]
    np.testing.assert_array_equal(call(jnp.zeros(4), ids, jnp.arange(5.0)), [0, 4, 0, 0])


# --- in place ---------------------------------------------------------------------------


def test_in_place_with_donation():
    shape = (100_000, 8)
    cases = [*((op, "float32") for op in OPS), ("add", "int32"), ("div", "int32")]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(refs, indices, rows):
        return [
            SCATTER[op](ref, indices, rows.astype(dtype))
            for (op, dtype), ref in zip(cases, refs, strict=True)
        ]

    args = [jnp.ones(shape, dtype) for _, dtype in cases], np.zeros(16, np.int32)
    args = *args, np.ones((16, 8), np.float32)
    memory = step.lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes == len(cases) * 100_000 * 8 * 4
    assert memory.temp_size_in_bytes < 100_000
    places = [ref.unsafe_buffer_pointer() for ref in args[0]]
    out = step(*args)
    assert all(ref.is_deleted() for ref in args[0])
    assert [x.unsafe_buffer_pointer() for x in out] == places


# --- apply_slices -----------------------------------------------------------------------


def test_apply_slices():
    ref = np.arange(10, dtype=np.float32).reshape(5, 2) + 1
    values = np.arange(8, dtype=np.float32).reshape(4, 2) + 1
    indices = np.array([3, 0, 3, -1])
    every = jax.jit(lambda ref, s: {op: js.apply_slices(ref, s, op) for op in OPS})
    for shape in [(5, 2), None]:
        slices = js.IndexedSlices(values, indices, shape)
        for op, got in every(ref, slices).items():
            wanted = loop(op, ref, indices, values)
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
    many = jax.vmap(lambda v: js.IndexedSlices(v, indices, (5, 2)))(
        np.stack([values, 2 * values])
    )
    for op, got in every(np.stack([ref, ref]), many).items():
        np.testing.assert_allclose(got[1], loop(op, ref, indices, 2 * values), rtol=1e-6)


def test_apply_slices_default_adds_and_checks():
    slices = js.IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 5]), (5, 2))
    ref = jnp.zeros((5, 2))
    np.testing.assert_array_equal(js.apply_slices(ref, slices), slices.to_dense())
    with pytest.raises(IndexError, match=r"indices\[1\] = 5 is not in \[0, 5\)"):
        js.apply_slices(ref, slices, mode="check")
    with pytest.raises(ValueError, match=r"op='plus'\): wanted .add"):
        js.apply_slices(ref, slices, "plus")
    with pytest.raises(ValueError, match=r"shape \(5, 2\) for ref of shape \(6, 2\)"):
        js.apply_slices(jnp.zeros((6, 2)), slices)
    with pytest.raises(TypeError, match=r"wants IndexedSlices, got .*scatter_add"):
        js.apply_slices(ref, ref)
    with pytest.raises(TypeError, match="nothing is cast"):
        js.apply_slices(ref.astype(jnp.bfloat16), slices)
    with pytest.raises(TypeError, match="not row numbers any more"):
        js.apply_slices(ref, jax.tree.map(lambda x: jnp.zeros(x.shape), slices))


# --- arguments --------------------------------------------------------------------------

REF = jnp.zeros((4, 2))


@pytest.mark.parametrize(
    "args, error, text",
    [
        ((jnp.float32(1), 0, 1.0), ValueError, r"wants ref \[V, \*D\], got a scalar"),
        ((REF, [0.5], 1.0), TypeError, r"integer indices, got float32\[1\]; cast them"),
        ((REF, [True], 1.0), TypeError, r"integer indices, got bool\[1\]"),
        (
            (REF, [0, 1], jnp.ones((2, 3))),
            ValueError,
            r"got updates float32\[2, 3\] for ref float32\[4, 2\]: updates.shape must be "
            r"indices.shape \+ the row shape = \(2, 2\), or \(\) for a scalar, not \(2, ",
        ),
        ((REF, [0, 1], jnp.ones(2)), ValueError, r"= \(2, 2\), or \(\)"),
        ((REF, [0], jnp.ones((1,))), ValueError, r"= \(1, 2\), or \(\)"),
        (
            (REF, [0], jnp.ones((1, 2), jnp.int32)),
            TypeError,
            r"one dtype, as nothing is cast: updates.astype\('float32'\)",
        ),
        ((REF.astype(int), [0], 1.5), TypeError, r"updates.astype\('int32'\)"),
        (
            (js.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (4, 2)), [0], 1.0),
            TypeError,
            r"wants an array to change, got IndexedSlices.*to_dense\(\)",
        ),
    ],
)
def test_errors(args, error, text):
    for op in OPS:
        with pytest.raises(error, match=text) as info:
            SCATTER[op](*args)
        assert str(info.value).startswith(f"scatter_{op} ")


def test_errors_of_nd():
    with pytest.raises(ValueError, match=r"1 <= d <= 2, .*got indices \[1, 3\]"):
        js.scatter_nd_add(REF, [[0, 0, 0]], 1.0)
    with pytest.raises(ValueError, match=r"for rows: indices\[..., None\]"):
        js.scatter_nd_add(REF, 0, 1.0)
    with pytest.raises(ValueError, match=r"scatter_nd_add got updates .*= \(1, 2\)"):
        js.scatter_nd_add(REF, [[0]], jnp.ones((1, 3)))


@pytest.mark.parametrize("keyword", ["name", "use_locking", "validate_indices"])
def test_keywords_of_a_graph_are_refused_and_named(keyword):
    for call in (*SCATTER.values(), *ND.values(), js.batch_scatter_update):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
            call(REF, [[0]], 1.0, **{keyword: None})
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
        js.embedding_lookup(REF, [0], **{keyword: None})


def test_what_is_no_array_is_named():
    slices = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (4, 2))
    for op, scatter in SCATTER.items():
        for args, text in [
            ((None, [0], 1.0), "wants an array to change, got None"),
            ((REF, [0], None), "wants updates as an array or a number, got None"),
            ((REF, [0], "a"), "wants updates as an array or a number, got 'a'"),
            ((REF, None, 1.0), "wants integer indices, got None"),
            ((REF, [0], slices), r"as an array, got IndexedSlices.*apply_slices\(ref, sl"),
            ((REF, slices, 1.0), r"integer indices, got IndexedSlices.*: slices.indices"),
            ((REF.astype("uint8"), [0], 300), "must fit into the dtype of ref, uint8"),
            ((REF.astype("uint8"), [0], [[300, 0]]), "must fit into the dtype of ref, ui"),
        ]:
            with pytest.raises(TypeError, match=f"^scatter_{op} .*{text}"):
                scatter(*args)


def test_rows_of_no_elements():
    ref, rows = jnp.zeros((3, 0)), jnp.zeros((2, 0))
    for scatter in SCATTER.values():
        assert scatter(ref, [0, -1], rows).shape == (3, 0)
    for scatter in ND.values():
        assert scatter(ref, [[0], [2]], rows).shape == (3, 0)
    slices = js.IndexedSlices(rows, [0, 1], (3, 0))
    assert js.apply_slices(ref, slices, "update").shape == (3, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_product_of_narrow_divisors_does_not_overflow(dtype):
    # 300 * 300 is beyond float16.
    got = js.scatter_div(jnp.full(3, 90, dtype), [1, 1], jnp.array([300, 300], dtype))
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), [90, 1e-3, 90], rtol=1e-2)


def test_numbers_and_lists_take_the_dtype():
    half = js.scatter_add(jnp.zeros((2, 2), jnp.bfloat16), [0], [[1, 2.5]])
    assert half.dtype == jnp.bfloat16 and half[0, 1] == 2.5
    assert js.scatter_add(REF, 1, 3)[1, 0] == 3
    assert js.scatter_add(np.zeros(3, np.float32), [], []).shape == (3,)
    assert js.scatter_update(jnp.zeros((0, 2)), [], jnp.zeros((0, 2))).shape == (0, 2)
    assert js.scatter_add(jnp.zeros((0, 2)), [0], 1.0, mode="clip").shape == (0, 2)


def test_check_under_jit():
    scatter = functools.partial(js.scatter_add, mode="check")
    checked = jax.jit(checkify.checkify(scatter), donate_argnums=0)
    error, out = checked(jnp.ones(3), jnp.array([[0, 2]]), jnp.ones((1, 2)))
    assert error.get() is None
    np.testing.assert_array_equal(out, [2, 1, 2])
    error, out = checked(jnp.ones(3), jnp.array([[0, -2]]), jnp.ones((1, 2)))
    assert "scatter_add: indices[0, 1] = -2 is not in [0, 3)" in error.get()
    np.testing.assert_array_equal(out, [1, 1, 1])  # nothing at all was written
    nd = checkify.checkify(jax.jit(functools.partial(js.scatter_nd_add, mode="check")))
    error, out = nd(jnp.ones((2, 2)), jnp.array([[0, 0], [1, 2]]), jnp.ones(2))
    assert "indices[1] = [1, 2] does not index into shape [2, 2]" in error.get()
    np.testing.assert_array_equal(out, np.ones((2, 2)))
