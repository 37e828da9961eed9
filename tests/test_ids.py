"""What an id out of range means, in every mode; tables beyond 32 bits."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify

import jslices as js
from jslices.tables import StackedTables

# --- strings ----------------------------------------------------------------------------


@pytest.mark.interop
def test_strings_are_tensorflows_integers():
    """What the page says; TensorFlow 2.21.0 and Keras 3.15.1 gave these numbers."""
    farmhash = pytest.importorskip("farmhash")
    page = pathlib.Path(__file__).parent.parent / "docs" / "coming_from" / "tensorflow.md"
    codes = re.findall(r"`(\[[^`]*farmhash[^`]*\])`", page.read_text())
    words = ["hello", "world", "jax", "caf\u00e9", "the", "of"]
    names = {"farmhash": farmhash, "words": words, "n": 3, "row": {"the": 0, "of": 1}}
    names["ids"] = [3, 7, 12345, -4]
    found = [eval(code, dict(names)) for code in codes]
    assert found == [
        [296, 598, 51, 587, 354, 61],
        [921, 88, 728, 770],
        [755, 155, 142, 261, 137, 199],
        [1, 1, 0, 2, 3, 4],
    ]


@pytest.mark.parametrize("ids", [["hello"], np.array(["hello", "of"]), np.array([b"of"])])
def test_strings_are_refused(ids):
    for call in (js.check_ids, lambda x, _: js.embedding_lookup(jnp.ones((5, 2)), x)):
        with pytest.raises(
            TypeError, match=r"[US]\d\[.\]; jslices.dynamic gives .*farmhash"
        ):
            call(ids, 5)


# --- check_ids --------------------------------------------------------------------------


@given(
    ids=st.lists(st.integers(-3, 7), max_size=8),
    dtype=st.sampled_from(["int8", "int32", "int64", "uint8", "uint64"]),
    kind=st.sampled_from(["list", "numpy", "jax"]),
)
def test_check_ids_means_what_a_loop_means(ids, dtype, kind):
    if dtype.startswith("u"):
        ids = [abs(i) for i in ids]
    given_ids = ids if kind == "list" else np.array(ids, dtype)
    given_ids = jnp.asarray(given_ids) if kind == "jax" else given_ids
    bad = [(k, i) for k, i in enumerate(ids) if not 0 <= i < 5]
    if bad:
        with pytest.raises(IndexError) as info:
            js.check_ids(given_ids, 5)
        place, value = bad[0]
        assert str(info.value) == f"check_ids: ids[{place}] = {value} is not in [0, 5)"
    else:
        assert js.check_ids(given_ids, 5) is given_ids


def test_check_ids_sees_numbers_that_32_bits_cut():
    ids = np.array([0, 2**32 + 3])
    with pytest.raises(IndexError, match=r"ids\[1\] = 4294967299 is not in \[0, 5\)"):
        js.check_ids(ids, 5)
    with pytest.raises(ValueError, match=r"ids = -1 is not in"):  # it is both
        js.check_ids(-1, 5)
    assert js.check_ids(np.array(2**40), 2**41) == 2**40
    for bad, got in [
        (1.5, "float32"),
        ([True], "bool"),
        (["a"], "<U1"),
        ([None], "object"),
    ]:
        with pytest.raises(TypeError, match=f"integer ids, got {got}"):
            js.check_ids(bad, 5)


def test_check_ids_needs_a_number_of_rows():
    for wrong in (None, 2.5, "5", (5, 2)):
        with pytest.raises(TypeError, match=r"num_rows as an int, got .*table.shape\[0\]"):
            js.check_ids([1], wrong)
    assert js.check_ids([1], np.int64(2)) == [1]
    with pytest.raises(TypeError, match="check_ids wants integer ids, got None"):
        js.check_ids(None, 2)


def test_check_ids_under_jit():
    checked = checkify.checkify(jax.jit(lambda ids: js.check_ids(ids, 300)))
    for dtype in (jnp.int32, jnp.uint8, jnp.int8):
        assert checked(jnp.array([[1, 100]], dtype))[0].get() is None
    error, out = checked(jnp.array([[1, 2], [3, 300]]))
    assert "check_ids: ids[1, 1] = 300 is not in [0, 300)" in error.get()
    assert out.shape == (2, 2)
    error, _ = checked(jnp.array([[-5]], jnp.int8))
    assert "ids[0, 0] = -5" in error.get()
    with pytest.raises(ValueError, match="not functionalized"):  # JAX tells what to do
        jax.jit(lambda ids: js.check_ids(ids, 3))(jnp.array([1]))


# --- modes ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
@pytest.mark.parametrize("kind", [np.array, jnp.array])
def test_every_mode_of_a_write(kind, dtype):
    high = kind([0, 200 if dtype.startswith("u") else 100], dtype)
    ref = jnp.zeros(3)
    for mode, wanted in {
        "drop": [1, 0, 0],
        "fill": [1, 0, 0],
        "clip": [1, 0, 1],
    }.items():
        got = js.scatter_add(ref, high, 1.0, mode=mode)
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(
            jax.jit(functools.partial(js.scatter_add, mode=mode))(ref, high, 1.0), wanted
        )
    good = js.scatter_add(ref, kind([0, 2], dtype), 1.0, mode="promise_in_bounds")
    np.testing.assert_array_equal(good, [1, 0, 1])
    with pytest.raises(IndexError, match=r"scatter_add: indices\[1\] = (100|200) is not"):
        js.scatter_add(ref, high, 1.0, mode="check")
    if not dtype.startswith("u"):
        low = kind([-1, -128], dtype)
        np.testing.assert_array_equal(js.scatter_add(ref, low, 1.0), [0, 0, 0])
        got = js.scatter_add(ref, low, 1.0, mode="clip")
        np.testing.assert_array_equal(got, [2, 0, 0])


def test_64_bit_numbers_stay_out_of_range():
    table, wide = jnp.arange(5.0), np.array([2**32 + 3, -(2**32) + 3, 3])
    np.testing.assert_array_equal(js.embedding_lookup(table, wide), [np.nan, np.nan, 3])
    got = js.embedding_lookup(table, wide, mode="clip")
    np.testing.assert_array_equal(got, [4, 0, 3])
    np.testing.assert_array_equal(js.scatter_add(table, wide, 1.0), [0, 1, 2, 4, 4])
    huge = np.array([2**63 + 1], np.uint64)
    np.testing.assert_array_equal(js.scatter_add(table, huge, 1.0), table)
    grads = js.grad(lambda table, ids: js.embedding_lookup(table, ids).sum())(table, wide)
    np.testing.assert_array_equal(grads.to_dense(), [0, 0, 0, 1, 0])
    tables = StackedTables({"a": (2,), "b": (3,)})
    np.testing.assert_array_equal(tables.rows(wide[[0, 0]]), [5, 5])


def test_reads_and_writes_know_the_same_modes():
    for mode in ("fill", "drop", "clip", "promise_in_bounds", "check"):
        assert js.embedding_lookup(jnp.ones(3), [1], mode=mode) == 1
        assert js.scatter_add(jnp.ones(3), [1], 1.0, mode=mode)[1] == 2
    for call in (js.scatter_add, js.scatter_nd_add, js.batch_scatter_update):
        with pytest.raises(ValueError, match=r"\(mode='wrap'\): wanted \"fill\", "):
            call(jnp.ones(3), [[1]], 1.0, mode="wrap")


# --- size -------------------------------------------------------------------------------


def test_too_many_rows_for_32_bits():
    table = jax.ShapeDtypeStruct((2**31, 1), jnp.int8)
    ids, rows = (
        jax.ShapeDtypeStruct((2,), jnp.int32),
        jax.ShapeDtypeStruct((2, 1), jnp.int8),
    )
    for call in (
        lambda: jax.eval_shape(js.scatter_update, table, ids, rows),
        lambda: jax.eval_shape(
            lambda t, i: js.embedding_lookup([t], i, padding_id=0), table, ids
        ),
        lambda: jax.eval_shape(js.embedding_lookup, table, ids),
    ):
        with pytest.raises(ValueError, match=r"2147483648 rows needs 64-bit .*enable_x64"):
            call()
    last = jax.ShapeDtypeStruct((2**31 - 1, 1), jnp.int8)
    assert jax.eval_shape(js.scatter_update, last, ids, rows).shape == last.shape
    assert jax.eval_shape(js.embedding_lookup, last, ids).shape == (2, 1)
    with jax.enable_x64(True):
        text = jax.jit(js.scatter_update).lower(table, ids, rows).as_text()
        assert "tensor<2147483648x1xi8>" in text and "tensor<2x1xi64>" in text
