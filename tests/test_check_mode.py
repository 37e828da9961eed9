"""mode="check": the texts of the errors, at once and through checkify under jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jslices as js

TABLE = jnp.asarray(np.arange(10, dtype=np.float32).reshape(5, 2))
OPS = ("update", "add", "sub", "mul", "div", "min", "max")


@functools.cache
def checked(call):
    return jax.jit(checkify.checkify(call))


def says(call, *args, jit=True):
    """What ``call`` complains of, the same both ways; None if it does not."""
    try:
        call(*args)
        eager = None
    except IndexError as error:
        eager = str(error)
        assert isinstance(error, ValueError)
    if jit:
        error, _ = checked(call)(*args)
        traced = error.get()
        assert (traced or "").split(" (`check` failed)")[0] == (eager or "")
    return eager


def unchanged(call, ref, *args):
    """Under jit a bad index leaves all of ``ref`` as it was."""
    error, out = checked(call)(ref, *args)
    assert error.get() is not None
    np.testing.assert_array_equal(out, ref)


# --- lookups ----------------------------------------------------------------------------


LOOKUPS = {
    "embedding_lookup_sparse": js.embedding_lookup_sparse,
    "safe_embedding_lookup_sparse": js.safe_embedding_lookup_sparse,
    "and default": functools.partial(js.safe_embedding_lookup_sparse, default_id=3),
}


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_bags_name_the_place_of_the_user(lookup):
    name = getattr(lookup, "func", lookup).__name__
    # All forms become one before ids are checked: one lookup is traced with each.
    jit = lookup is js.embedding_lookup_sparse
    look = lambda i, m: lookup(TABLE, (i, m), mode="check")  # noqa: E731
    mask = jnp.array([[True, False], [True, True]])
    place = says(look, jnp.array([[1, 99], [2, 9]]), mask)
    assert place == f"{name}: ids[1, 1] = 9 is not in [0, 5)"
    assert says(look, jnp.array([[1, 99], [2, 4]]), mask) is None
    flat = lambda v: lookup(TABLE, (v, jnp.array([0, 2, 2]), 4), mode="check")  # noqa: E731
    text = says(flat, jnp.array([1, 2, 6]), jit=jit)
    assert text == f"{name}: ids[2] = 6 is not in [0, 5)"
    splits = lambda v: lookup(TABLE, (v, jnp.array([0, 1, 2])), mode="check")  # noqa: E731
    text = says(splits, jnp.array([1, 6, 99]), jit=jit)
    assert text == f"{name}: ids[1] = 6 is not in [0, 5)"
    wide = np.array([[1, 0], [2, 2**40]])
    text = says(look, wide, np.asarray(mask), jit=False)
    assert text == f"{name}: ids[1, 1] = {2**40} is not in [0, 5)"


def test_a_default_id_that_nothing_needs_or_all_do():
    safe = functools.partial(js.safe_embedding_lookup_sparse, default_id=3, mode="check")
    assert says(lambda i: safe(TABLE, i), jnp.array([[-1, -1], [-1, -1]])) is None
    assert says(lambda i: safe(TABLE, i), jnp.array([[-1, 2], [-7, 4]])) is None
    text = says(lambda i: safe(TABLE, i), jnp.array([[-1], [5]]))
    assert text == "safe_embedding_lookup_sparse: ids[1, 0] = 5 is not in [0, 5)"


def test_lists_of_traced_ids():
    one = lambda i: js.embedding_lookup(TABLE, [0, i], padding_id=0, mode="check")  # noqa: E731
    assert says(one, jnp.array(9)) == "embedding_lookup: ids[1] = 9 is not in [0, 5)"
    bag = lambda i: js.embedding_lookup_sparse(TABLE, [[0, i]], [[1, 2]], mode="check")  # noqa: E731
    text = "embedding_lookup_sparse: ids[0, 1] = 9 is not in [0, 5)"
    assert says(bag, jnp.array(9)) == text
    plain = js.embedding_lookup_sparse(TABLE, [[0, 4]], [[1, 2]])
    np.testing.assert_array_equal(bag(jnp.array(4)), plain)


# --- rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_scatters_and_apply_slices_speak_for_themselves(op):
    scatter = functools.partial(getattr(js, f"scatter_{op}"), mode="check")
    apply = functools.partial(js.apply_slices, op=op, mode="check")
    indices = jnp.asarray(np.array([1, 5], np.int32))
    rows = jnp.asarray(np.ones((2, 2), np.float32))
    text = says(scatter, TABLE, indices, rows)
    assert text == f"scatter_{op}: indices[1] = 5 is not in [0, 5)"
    unchanged(scatter, TABLE, indices, rows)
    slices = js.IndexedSlices(rows, indices, (5, 2))
    text = says(apply, TABLE, slices, jit=op == "mul")  # the scatter, by another name
    assert text == f"apply_slices(op='{op}'): slices.indices[1] = 5 is not in [0, 5)"
    if op == "mul":
        unchanged(apply, TABLE, slices)


def test_apply_slices_of_a_batch():
    indices = jnp.array([[0, 4], [1, -2]])
    batch = jax.vmap(lambda i: js.IndexedSlices(jnp.ones((2, 2)), i, (5, 2)))(indices)
    tables = jnp.stack([TABLE, TABLE])
    apply = functools.partial(js.apply_slices, mode="check")
    text = "apply_slices(op='add'): slices.indices[1, 1] = -2 is not in [0, 5)"
    assert says(apply, tables, batch) == text
    unchanged(apply, tables, batch)
    got = apply(tables[:1], batch[:1])
    np.testing.assert_array_equal(got[0], js.scatter_add(TABLE, [0, 4], 1.0))


def test_other_errors_of_apply_slices_name_it():
    slices = js.IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 5]), (5, 2))
    for ref, op, mode, text in [
        (
            TABLE.astype(jnp.bfloat16),
            "sub",
            "drop",
            r"^apply_slices\(op='sub'\) got slices float32\[2, 2\] for ref bfloat16\[5, 2\]"
            r": both must have one dtype, as nothing is cast: slices.astype\('bfloat16'\)",
        ),
        (
            TABLE.astype(bool),
            "mul",
            "drop",
            r"^apply_slices\(op='mul'\) cannot calc.* bool",
        ),
        (TABLE, "add", "wrap", r"^apply_slices\(mode='wrap'\): wanted \"fill\", "),
        (TABLE[:4], "add", "drop", r"^apply_slices\(op='add'\) got slices of an array of"),
        (1.0, "add", "drop", r"^apply_slices\(op='add'\) wants ref \[V, \*D\], got a sca"),
    ]:
        with pytest.raises((TypeError, ValueError), match=text):
            js.apply_slices(ref, slices, op, mode=mode)


# --- elements ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, indices, dtype, text",
    [
        ("add", [[0, 0], [1, 2]], "int32", "[1] = [1, 2]"),
        ("add", [[[0, 0], [-1, 1]]], "int32", "[0, 1] = [-1, 1]"),
        ("add", [[4], [5]], "int32", "[1] = [5]"),
        ("add", [4, 2], "int32", " = [4, 2]"),
        ("sub", [[0, 0], [-1, 1]], "int8", "[1] = [-1, 1]"),
        ("update", [[0, 0], [1, 2]], "int8", "[1] = [1, 2]"),
    ],
)
def test_elements_name_place_value_and_shape(op, indices, dtype, text):
    name = f"scatter_nd_{op}"
    call = functools.partial(getattr(js, name), updates=1.0, mode="check")
    at = jnp.array(indices, dtype)
    text = f"{name}: indices{text} does not index into shape [5, 2]"
    assert says(call, TABLE, at) == text
    unchanged(call, TABLE, at)


def test_good_elements_and_none():
    call = functools.partial(js.scatter_nd_update, updates=1.0, mode="check")
    assert says(call, TABLE, jnp.array([[0, 0], [4, 1]])) is None
    assert says(call, TABLE, jnp.zeros((0, 2), int)) is None


def test_elements_of_narrow_indices_are_left_alone():
    # The 255 that -1 would become in their own dtype is a row.
    call = functools.partial(js.scatter_nd_add, updates=1.0, mode="check")
    unchanged(call, jnp.ones((300, 2)), jnp.array([[255, 0], [1, 3]], jnp.uint8))
    unchanged(call, jnp.ones(300), jnp.array([[7], [-1]], jnp.int8))


@pytest.mark.parametrize("kind", [np.array, list])
def test_values_beyond_32_bits_are_named_as_given(kind):
    call = functools.partial(js.scatter_nd_add, updates=1.0, mode="check")
    indices = kind([[0, 0], [2**40, 1]])
    text = "scatter_nd_add: indices[1] = [1099511627776, 1] does not index into shape"
    assert says(lambda r: call(r, indices), TABLE, jit=False) == f"{text} [5, 2]"
    with pytest.raises(IndexError, match="1099511627776"):  # known while tracing
        jax.jit(lambda r: call(r, indices))(TABLE)
    np.testing.assert_array_equal(js.scatter_nd_add(TABLE, indices[1:], 1.0), TABLE)
    for scatter in (js.scatter_add, js.batch_scatter_update):
        with pytest.raises(IndexError, match=r"indices\[1\] = 1099511627776 is not in"):
            scatter(jnp.ones(5), kind([0, 2**40]), 1.0, mode="check")
