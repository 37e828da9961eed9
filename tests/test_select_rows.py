"""Some rows of one array and the rest of another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fast_jit
from hypothesis import given, settings
from hypothesis import strategies as st

from jslices._rows.access import UNROLLED, leading, where_rows

LEADING, WHERE_ROWS = fast_jit(leading), fast_jit(where_rows)
SHAPES = [(7, 1), (7, 2), (7, 23), (7, 24), (7, 4, 3), (7,), (7, 0), (0, 4)]


@settings(deadline=None, max_examples=40)
@given(
    shape=st.sampled_from(SHAPES),
    count=st.integers(-3, 12),
    dtype=st.sampled_from(["float32", "bool"]),
    with_rest=st.booleans(),
)
def test_against_numpy(shape, count, dtype, with_rest):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=shape).astype(dtype)
    rest = rng.normal(size=shape).astype(dtype) if with_rest else np.zeros(shape, dtype)
    given_rest = jnp.asarray(rest) if with_rest else None
    stop = max(0, min(count, shape[0]))
    expected = np.concatenate([rows[:stop], rest[stop:]])
    result = LEADING(jnp.asarray(rows), jnp.int32(count), given_rest)
    assert result.dtype == rows.dtype
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("length", [UNROLLED.start, UNROLLED.stop])
def test_what_is_left_out_may_be_nan(length):
    rows = jnp.full((4, length), jnp.nan).at[:2].set(1.0)
    np.testing.assert_array_equal(
        leading(rows, jnp.int32(2)), jnp.zeros_like(rows).at[:2].set(1.0)
    )


def test_derivatives_are_those_of_the_rows_taken():
    def total(rows, rest):
        return jnp.sum(leading(rows, jnp.int32(1), rest) * 2)

    rows, rest = jax.grad(total, (0, 1))(jnp.ones((3, 4)), jnp.ones((3, 4)))
    np.testing.assert_array_equal(rows[:, 0], [2, 0, 0])
    np.testing.assert_array_equal(rest[:, 0], [0, 2, 2])


@settings(deadline=None, max_examples=40)
@given(
    shape=st.sampled_from(SHAPES),
    bits=st.integers(0, 127),
    dtype=st.sampled_from(["float32", "bool"]),
    rest=st.sampled_from(["array", "row", "scalar"]),
)
def test_wanted_rows_against_numpy(shape, bits, dtype, rest):
    rng = np.random.default_rng(0)
    wanted = np.array([bits >> row & 1 for row in range(shape[0])], bool)
    rows = rng.normal(size=shape).astype(dtype)
    others = {"array": shape, "row": (1, *shape[1:]), "scalar": ()}[rest]
    rest = np.asarray(rng.normal(size=others)).astype(dtype)
    tall = wanted.reshape(-1, *(1,) * (len(shape) - 1))
    result = WHERE_ROWS(jnp.asarray(wanted), jnp.asarray(rows), jnp.asarray(rest))
    assert result.dtype == rows.dtype
    np.testing.assert_array_equal(result, np.where(tall, rows, rest))


@pytest.mark.parametrize("length", [UNROLLED.start, UNROLLED.stop])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_rows_that_are_not_wanted_may_be_anything(length, bad):
    wanted = jnp.array([True, False, True])
    rows = jnp.ones((3, length)).at[1].set(bad)
    np.testing.assert_array_equal(
        where_rows(wanted, rows, jnp.float32(0)), jnp.ones((3, length)).at[1].set(0)
    )
