"""The programs in examples/ do what they say, on small sizes."""

import functools
import gzip
import importlib.util
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

import jslices as js
from jslices.tables import StackedTables

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
SMALL = "--rows 40 --dim 4 --batch 128 --learning-rate 0.02 --decay 0.9 --every 20"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dlrm = example("dlrm")
chunked = example("chunked_cross_entropy")
hashes = example("ngram_hashes")


@pytest.fixture(autouse=True)
def _as_users_have_it():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.slow
def test_a_recommender_learns_and_goes_on_to_the_same_bits(tmp_path, capsys):
    command = f"{SMALL} --steps 40 --directory {tmp_path}".split()
    whole, found = dlrm.main(command)
    assert min(found.values()) > 0.65
    shown = capsys.readouterr().out
    js.checkpoint.update_checkpoint_state(tmp_path, str(tmp_path / "model-20"))
    again, _ = dlrm.main(command)
    assert "goes on after step 20" in (resumed := capsys.readouterr().out)
    last = lambda text: re.findall("step 40: .*|AUC .*", text)  # noqa: E731
    assert len(last(shown)) == 2 and last(shown) == last(resumed)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), whole, again)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("kind", ["plain", "gzip"])
def test_lines_of_criteo(tmp_path, kind):
    tables = StackedTables({f"C{n}": (10 * n, 2) for n in range(1, 27)})
    ints = ["1", "-2", "", *["7"] * 10]
    line = "\t".join(["1", *ints, "68fd1e64", "", *["0000000f"] * 24])
    other = "\t".join(["0", *[""] * 39])
    path = tmp_path / ("train.txt.gz" if kind == "gzip" else "train.txt")
    with (gzip.open if kind == "gzip" else open)(path, "wt") as file:
        file.write("\n".join([line] * 9 + [other]) + "\n")
    draw = dlrm.criteo(path, tables, 10, seed=0)
    clicks = draw(4, 0)
    assert clicks.clicked.tolist() == [True] * 4
    assert clicks.counts[0].tolist() == [1, 0, 0, *[7] * 10]
    assert clicks.ids.shape == (4, 26, 1) and not clicks.mask[:, 1].any()
    assert clicks.ids[0, 0, 0] == 0x68FD1E64 % 10 and clicks.ids[0, 2, 0] == 15
    held_out = draw(4, 0, held_out=True)
    assert not held_out.clicked.any() and not held_out.mask.any()
    assert jax.tree.all(jax.tree.map(np.array_equal, draw(4, 1), draw(4, 1)))
    assert len(dlrm.criteo(path, tables, 9, seed=0)(4, 0, held_out=True).ids) == 4


def small_run():
    tables = StackedTables({"a": (30, 2), "b": (5, 2)})
    params = dlrm.init(jax.random.key(0), tables, (4,), (4,))
    tx = dlrm.optimizer(params, 0.01)
    return tables, tx, dlrm.start(params, tx)


@pytest.mark.slow
def test_the_average_is_that_of_all_rows():
    tables, tx, run = small_run()
    step = dlrm.make_step(tables, tx, 0.8)
    draw = dlrm.synthetic(tables, 0)
    average = jax.tree.map(jnp.copy, run.params)
    decayed = jax.jit(lambda a, b: jax.tree.map(lambda x, y: 0.8 * x + 0.2 * y, a, b))
    for number in range(4):
        clicks = jax.tree.map(lambda x: x[None], draw(3, number))
        run, _ = step(run, clicks)
        average = decayed(average, run.params)
    assert (run.last < 4).any()
    assert_close(dlrm.averaged(run, 0.8), average, rtol=1e-5)


@pytest.mark.as_users
@pytest.mark.slow
def test_a_step_writes_rows_in_place():
    tables = StackedTables({"a": (40_000, 8), "b": (20_000, 8)})
    init = functools.partial(dlrm.init, tables=tables, bottom=(4,), top=(4,))
    params = jax.eval_shape(init, jax.random.key(0))
    tx = dlrm.optimizer(params, 0.01)
    run = jax.eval_shape(functools.partial(dlrm.start, tx=tx), params)
    clicks = jax.tree.map(lambda x: x[None], dlrm.synthetic(tables, 0)(8, 0))
    step = dlrm.make_step(tables, tx, 0.9)
    js.testing.assert_in_place(step, run, clicks)
    js.testing.assert_no_dense_temporary(step, run, clicks)


def test_area_under_the_curve():
    rng = np.random.default_rng(0)
    scores, clicked = rng.integers(0, 9, 50), rng.random(50) < 0.3
    pairs = scores[clicked][:, None] - scores[~clicked]
    expected = (pairs > 0).mean() + (pairs == 0).mean() / 2
    assert np.isclose(dlrm.auc(scores, clicked), expected)


# --- A cross-entropy over a large vocabulary ------------------------------------------


@pytest.mark.parametrize("chunk", [7, 10, 64])
def test_cross_entropy_in_chunks(chunk):
    rng = np.random.default_rng(0)
    hidden, words = rng.normal(size=(6, 3)), 3 * rng.normal(size=(20, 3))
    arrays = hidden.astype("float32"), words.astype("float32")
    targets = np.array([0, 19, 13, 14, -1, 13])

    def both(losses, dtype="float32"):
        def weighted(hidden, words):
            return losses(hidden, words, targets) @ jnp.arange(1.0, 7)

        return jax.jit(jax.value_and_grad(weighted, (0, 1)))(
            *(x.astype(dtype) for x in arrays)
        )

    in_chunks = functools.partial(chunked.cross_entropy, chunk=chunk)
    assert_close(both(in_chunks), both(chunked.plain), rtol=1e-5, atol=1e-6)
    value, grads = both(in_chunks, jnp.bfloat16)
    assert {x.dtype for x in grads} == {jnp.dtype("bfloat16")}
    assert_close(value, both(chunked.plain)[0], rtol=2e-2)
    assert not grads[0][4].any()


@pytest.mark.as_users
def test_cross_entropy_in_chunks_never_holds_all_logits():
    shapes = (256, 8), (50_001, 8), (256,)
    arrays = [jax.ShapeDtypeStruct(x, t) for x, t in zip(shapes, "ffi", strict=True)]

    def temporaries(losses):
        def mean(hidden, words, targets):
            return losses(hidden, words, targets).mean()

        step = jax.jit(jax.value_and_grad(mean, (0, 1))).lower(*arrays).compile()
        return step.memory_analysis().temp_size_in_bytes

    logits = 4 * 256 * 50_001
    in_chunks = functools.partial(chunked.cross_entropy, chunk=1000)
    assert temporaries(chunked.plain) >= logits
    assert temporaries(in_chunks) < logits / 10


# --- Hashes of n-grams ----------------------------------------------------------------

#: Rows of the tokens 0, 1, 4095, 4095 of 2 layers, 4 heads, 1,000,003 rows.
ROWS = """\
232307 346194 863418 507500
792749 976466 614160 163703
739596 40215 276090 42465
49526 31285 480314 372196
988817 281319 208702 194300
307314 657006 50687 563374
510182 904229 695302 552821
957506 375588 379006 33932
"""


def test_hashes_of_ngrams_are_these_numbers():
    tokens, stored = (
        np.array([[0, 1, 4095, 4095]]),
        np.loadtxt(io.StringIO(ROWS), dtype=int),
    )
    hashed = functools.partial(hashes.hashed_ngrams, layers=2, heads=4, num_rows=1_000_003)
    assert np.array_equal(hashed(tokens).reshape(8, 4), stored)
    assert np.array_equal(jax.jit(hashed)(jnp.asarray(tokens)), hashed(tokens))

    def by_big_numbers(table, tokens):
        state = table * hashes.SEED % 2**64
        for token in tokens:
            state = (state ^ token) * hashes.MULTIPLIER % 2**64
            state ^= state >> 32
        return (state * hashes.MULTIPLIER % 2**64 >> 32) * 1_000_003 >> 32

    before = [2**32 - 1] * 2 + tokens[0].tolist()
    for (table, position), row in np.ndenumerate(stored):
        length = hashes.NGRAMS[table % 2]
        read = before[position + 3 - length : position + 3]
        assert row == by_big_numbers(table + 1, read)


def test_hashes_of_ngrams_are_uniform_and_independent():
    pairs = np.stack(np.divmod(np.arange(40_000), 200), axis=1)
    first, second = hashes.hashed_ngrams(pairs, 2, 1, 4096)[:, 0, :, 1].astype(int)
    counts = np.bincount(first, minlength=4096)
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum() / 4095
    assert abs(chi_square - 1) < 6 * np.sqrt(2 / 4095)
    both = len(np.unique(first * 4096 + second))  # 47.6 pairs of pairs collide by chance
    assert 40_000 - 100 < both < 40_000
