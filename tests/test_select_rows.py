"""Some rows of one array and the rest of another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fast_jit
from hypothesis import given, settings
from hypothesis import strategies as st

from jslices._rows.access import UNROLLED, leading, where_rows

SHAPES = [(7, 1), (7, 2), (7, 23), (7, 24), (7, 4, 3), (7,), (7, 0), (0, 4)]


def arrays(shapes, dtype):
    rng = np.random.default_rng(0)
    return [np.asarray(rng.normal(size=shape)).astype(dtype) for shape in shapes]


@fast_jit
def leading_of_each(count, many, rests):
    return [leading(rows, count, rest) for rows, rest in zip(many, rests, strict=True)]


@settings(deadline=None, max_examples=20)
@given(
    count=st.integers(-3, 12),
    dtype=st.sampled_from(["float32", "bool"]),
    with_rest=st.booleans(),
)
def test_against_numpy(count, dtype, with_rest):
    many, rests = arrays(SHAPES, dtype), arrays(SHAPES, dtype)
    if not with_rest:
        rests = [np.zeros_like(rows) for rows in many]
    taken = leading_of_each(
        np.int32(count), many, rests if with_rest else [None] * len(many)
    )
    for rows, rest, result in zip(many, rests, taken, strict=True):
        stop = max(0, min(count, len(rows)))
        assert result.dtype == rows.dtype
        np.testing.assert_array_equal(result, np.concatenate([rows[:stop], rest[stop:]]))


@pytest.mark.parametrize("length", [UNROLLED.start, UNROLLED.stop])
def test_what_is_left_out_may_be_nan(length):
    rows = np.ones((4, length), np.float32)
    rows[2:] = np.nan
    np.testing.assert_array_equal(fast_jit(leading)(rows, 2), np.nan_to_num(rows))


def test_derivatives_are_those_of_the_rows_taken():
    def total(rows, rest):
        return jnp.sum(leading(rows, jnp.int32(1), rest) * 2)

    ones = np.ones((3, 4), np.float32)
    rows, rest = map(np.asarray, fast_jit(jax.grad(total, (0, 1)))(ones, ones))
    np.testing.assert_array_equal(rows[:, 0], [2, 0, 0])
    np.testing.assert_array_equal(rest[:, 0], [0, 2, 2])


@fast_jit
def where_of_each(wanted, many, rests):
    each = zip(many, rests, strict=True)
    return [where_rows(wanted[: len(rows)], rows, rest) for rows, rest in each]


@settings(deadline=None, max_examples=20)
@given(
    bits=st.integers(0, 127),
    dtype=st.sampled_from(["float32", "bool"]),
    kind=st.sampled_from(["array", "row", "scalar"]),
)
def test_wanted_rows_against_numpy(bits, dtype, kind):
    wanted = np.array([bits >> row & 1 for row in range(7)], bool)
    row = {"array": lambda s: s, "row": lambda s: (1, *s[1:]), "scalar": lambda s: ()}[kind]
    many, rests = arrays(SHAPES, dtype), arrays(map(row, SHAPES), dtype)
    taken = where_of_each(wanted, many, rests)
    for rows, rest, result in zip(many, rests, taken, strict=True):
        tall = wanted[: len(rows)].reshape(-1, *(1,) * (rows.ndim - 1))
        assert result.dtype == rows.dtype
        np.testing.assert_array_equal(result, np.where(tall, rows, rest))


@pytest.mark.parametrize("length", [UNROLLED.start, UNROLLED.stop])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_rows_that_are_not_wanted_may_be_anything(length, bad):
    wanted, rows = np.array([True, False, True]), np.ones((3, length), np.float32)
    rows[1] = bad
    found = fast_jit(where_rows)(wanted, rows, np.float32(0))
    np.testing.assert_array_equal(found, np.where(wanted[:, None], rows, 0))
