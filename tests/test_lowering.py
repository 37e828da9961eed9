"""What other platforms are given: the programs that scatters become on a GPU and a TPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_unless

import jslices as js

# Which is done here on purpose.
ELSEWHERE = "ignore:this program is compiled for a TPU"
pytestmark = pytest.mark.filterwarnings(ELSEWHERE)
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
platforms = pytest.mark.parametrize(
    ["platform"],
    slow_unless([(name,) for name in PLATFORMS], lambda case: case[0] in ("cpu", "tpu")),
)
OPS = ("update", "add", "sub", "mul", "div", "min", "max")
REF, IDS, ROWS = jnp.zeros((5, 2)), jnp.array([1, 1, 9, -1, 1]), jnp.ones((5, 2))
ELEMENTS = jnp.array([[1, 0], [1, 0], [9, 9]])
BATCH = jnp.zeros((3, 5, 2)), jnp.zeros((3, 4), int), jnp.ones((3, 4, 2))


def lower(platform, f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def attributes(text, name):
    """The attributes of every operation of that name, in order."""
    return re.findall(rf'"stablehlo\.{name}"\([^)]*\) <\{{(.*?)\}}> ', text, re.S)


UPDATES = {
    "scatter_update": (js.scatter_update, REF, IDS, ROWS),
    "clip": (functools.partial(js.scatter_update, mode="clip"), REF, IDS, ROWS),
    "one number": (lambda r, i: js.scatter_update(r, i, 1.0), REF, IDS),
    "vmap": (jax.vmap(js.scatter_update), *BATCH),
    "vmap of ids": (jax.vmap(js.scatter_update, (None, 0, 0)), BATCH[0][0], *BATCH[1:]),
    "batch_scatter_update": (js.batch_scatter_update, *BATCH),
    "scatter_nd_update": (js.scatter_nd_update, REF, ELEMENTS, jnp.ones(3)),
    "of rows": (js.scatter_nd_update, REF, ELEMENTS[:, :1], jnp.ones((3, 2))),
    "vmap of nd": (
        jax.vmap(js.scatter_nd_update, (None, 0, 0)),
        REF,
        jnp.stack([ELEMENTS] * 2),
        jnp.ones((2, 3)),
    ),
    "apply_slices": (
        functools.partial(js.apply_slices, op="update"),
        REF,
        js.IndexedSlices(ROWS, IDS, (5, 2)),
    ),
    "of a batch": (
        functools.partial(js.apply_slices, op="update"),
        BATCH[0],
        jax.vmap(lambda i, v: js.IndexedSlices(v, i, (5, 2)))(*BATCH[1:]),
    ),
}


@platforms
@pytest.mark.parametrize("name", UPDATES)
def test_the_last_write_wins_on_every_platform(name, platform):
    # XLA leaves the order of colliding writes open, so a platform could choose another
    # winner. Here it has no choice: no two writes collide, and what finds the last of the
    # duplicates is a stable sort.
    text = lower(platform, *UPDATES[name])
    scatters = attributes(text, "scatter")
    assert len(scatters) == text.count('"stablehlo.scatter"') > 0
    assert all("unique_indices = true" in scatter for scatter in scatters)
    sorts = attributes(text, "sort")
    assert len(sorts) == text.count('"stablehlo.sort"') > 0
    # One sorted operand needs no stability: equal ones cannot be told apart.
    operands = re.findall(r'"stablehlo\.sort"\(([^)]*)\)', text)
    for sort, given in zip(sorts, operands, strict=True):
        assert "is_stable = true" in sort or given.count("%") == 1


def test_such_a_program_could_collide_and_would_be_found():
    text = lower("cuda", lambda r, i, u: r.at[i].set(u), REF, IDS, ROWS)
    assert "unique_indices = false" in attributes(text, "scatter")[0]
    text = lower("cuda", lambda x: jax.lax.sort((x, x), is_stable=False, num_keys=1), IDS)
    assert "is_stable = false" in attributes(text, "sort")[0]


@platforms
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_every_operation_lowers_for_every_platform(platform, dtype):
    ref, rows = REF.astype(dtype), ROWS.astype(dtype)

    def every(ref, ids, rows):
        return [getattr(js, f"scatter_{op}")(ref, ids, rows) for op in OPS]

    text = lower(platform, every, ref, IDS, rows)
    for word in ("add", "multiply", "minimum", "maximum", "divide", "negate"):
        assert f"stablehlo.{word}" in text
    nd = lambda r, i, u: (js.scatter_nd_add(r, i, u), js.scatter_nd_sub(r, i, u))  # noqa: E731
    assert attributes(lower(platform, nd, ref, ELEMENTS, rows[:3, 0]), "scatter")
    slices = js.IndexedSlices(rows, IDS, (5, 2))
    every = lambda ref, s: [js.apply_slices(ref, s, op) for op in OPS]  # noqa: E731
    assert attributes(lower(platform, every, ref, slices), "scatter")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_lookups_and_losses_lower_for_every_platform(platform):
    def loss(table, bias, ids, key):
        rows = js.embedding_lookup(table, ids, max_norm=1.0, padding_id=0)
        bags = [
            js.safe_embedding_lookup_sparse(table, ids, None, combiner, 3)
            for combiner in ("mean", "sum", "sqrtn", "max")
        ]
        sampled = js.sampled_softmax_loss(table, bias, [0, 3], REF[:2], 3, 5, key=key)
        return rows.sum() + sum(bag.sum() for bag in bags) + sampled.sum()

    step = lambda *args: js.value_and_grad(loss, (0, 1))(*args)  # noqa: E731
    ids = jnp.array([[1, 2], [3, -1]])
    text = lower(platform, step, REF, jnp.zeros(5), ids, jax.random.key(0))
    assert "stablehlo.gather" in text and attributes(text, "sort")
    mask = lambda s: js.sparse_mask(s, [1, 4], size=3).coalesce()  # noqa: E731
    assert attributes(lower(platform, mask, js.IndexedSlices(ROWS, IDS, (5, 2))), "sort")


# --- size -------------------------------------------------------------------------------

V, D = 3_000_000, 1000  # 3e9 elements
TALL = jax.ShapeDtypeStruct((V, D), jnp.float32)
FEW = jax.ShapeDtypeStruct((4,), jnp.int32)
WIDE = jax.ShapeDtypeStruct((4, D), jnp.float32)
NUMBERS = jax.ShapeDtypeStruct((4,), jnp.float32)
SLICES = js.IndexedSlices.tree_unflatten((V, D), (WIDE, FEW))
LARGE = {
    **{f"scatter_{op}": (getattr(js, f"scatter_{op}"), TALL, FEW, WIDE) for op in OPS},
    **{
        f"apply_slices {op}": (
            functools.partial(js.apply_slices, op=op, mode="clip"),
            TALL,
            SLICES,
        )
        for op in OPS
    },
    **{
        name: (getattr(js, name), TALL, jax.ShapeDtypeStruct((4, 2), jnp.int32), NUMBERS)
        for name in ("scatter_nd_update", "scatter_nd_add", "scatter_nd_sub")
    },
    "batch_scatter_update": (
        js.batch_scatter_update,
        jax.ShapeDtypeStruct((1000, V), jnp.float32),
        jax.ShapeDtypeStruct((1000, 4), jnp.int32),
        jax.ShapeDtypeStruct((1000, 4), jnp.float32),
    ),
    "embedding_lookup": (js.embedding_lookup, TALL, FEW),
    "its gradient": (
        js.grad(lambda t, i: (js.embedding_lookup(t, i, padding_id=0) ** 2).sum()),
        TALL,
        FEW,
    ),
    "bags": (
        js.grad(lambda t, i: (js.safe_embedding_lookup_sparse(t, i[None]) ** 2).sum()),
        TALL,
        FEW,
    ),
    "coalesce": (js.IndexedSlices.coalesce, SLICES),
    "to_dense": (js.IndexedSlices.to_dense, SLICES),
    "sparse_mask": (lambda s, m: js.sparse_mask(s, m), SLICES, FEW),
}


@platforms
@pytest.mark.parametrize("name", LARGE)
def test_no_number_of_an_element_is_formed(name, platform):
    # Elements are numbered by (row, column), of which each fits into 32 bits.
    text = lower(platform, *LARGE[name])
    assert "3000000000" not in text
    assert re.search(r"tensor<(3000000x1000|1000x3000000)x", text) or name in (
        "coalesce",
        "sparse_mask",
    )


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_rows_beyond_32_bits_are_numbered_in_64(platform):
    with jax.enable_x64(True):
        ref = jax.ShapeDtypeStruct((3_000_000_000,), jnp.int8)
        ids = jax.ShapeDtypeStruct((4,), jnp.int64)
        rows = jax.ShapeDtypeStruct((4,), jnp.int8)
        for op in ("update", "add", "min"):
            text = lower(platform, getattr(js, f"scatter_{op}"), ref, ids, rows)
            assert "tensor<3000000000xi8>" in text and "tensor<4x1xi64>" in text
            assert "dense<-1294967296>" not in text  # 3e9 in 32 bits


def free_memory():
    try:
        lines = open("/proc/meminfo").read().splitlines()
    except OSError:
        return 0
    return next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable")) * 1024


NEEDS_8_GB = pytest.mark.skipif(free_memory() < 8e9, reason="needs 8 GB of free memory")


@pytest.mark.as_users
@pytest.mark.slow
@NEEDS_8_GB
def test_3e9_elements_for_real():
    last = V - 1

    def step(table, ids, rows):
        table = js.scatter_add(table, ids, rows)
        table = js.scatter_update(table, ids[:1], rows[:1] + 1)
        table = js.scatter_nd_add(table, [[last, D - 1], [V, 0]], [5, 7])
        table = js.scatter_nd_update(table, [[last, D - 2], [last, D - 2]], [9, 8])
        table = js.scatter_max(table, ids[1:2], 4 * rows[1:2])
        table = js.apply_slices(table, js.IndexedSlices(rows, ids, table.shape), "sub")
        return table, js.embedding_lookup(table, [last, 2_900_000, 5])

    ids, rows = jnp.array([last, 2_900_000, last]), jnp.ones((3, D), jnp.int8)
    table = jnp.zeros((V, D), jnp.int8)
    table, got = jax.jit(step, donate_argnums=0)(table, ids, rows)
    assert table.size == 3_000_000_000
    wanted = np.zeros((3, D), np.int8)
    wanted[0, D - 2 :], wanted[1] = [6, 5], 3
    np.testing.assert_array_equal(got, wanted)
    assert np.count_nonzero(np.asarray(table)) == np.count_nonzero(wanted)


@pytest.mark.as_users
@pytest.mark.slow
@NEEDS_8_GB
def test_3e9_rows_for_real():
    count = 3_000_000_000
    with jax.enable_x64(True):
        ids = np.array([count - 1, 5, count - 1, count, 2**31 + 7, 2**31 - 1, -1])
        step = lambda t, u: js.scatter_add(js.scatter_update(t, ids, u), ids[:2], u[:2])  # noqa: E731
        table = jnp.zeros(count, jnp.int8)
        table = jax.jit(step, donate_argnums=0)(table, jnp.arange(1, 8, dtype=jnp.int8))
        got = js.embedding_lookup(table, ids)
        assert got.tolist() == [4, 4, 4, -128, 5, 6, -128]
        assert np.count_nonzero(np.asarray(table)) == 4
        with pytest.raises(IndexError, match=r"= 3000000000 is not in \[0, 3000000000\)"):
            js.scatter_add(table, ids[3:4], np.int8(1), mode="check")
