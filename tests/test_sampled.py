"""Sampled losses against their dense formulas; the sampler against its distribution."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, fast_jit, golden, numpy_array, slow_unless

import jslices as js

V, D, B, S = 30, 3, 4, 6
RNG = np.random.default_rng(0)
WEIGHTS, BIASES, INPUTS = (RNG.normal(size=n).astype("f") for n in [(V, D), V, (B, D)])
LABELS = np.array([[3, 7], [0, 0], [29, 1], [5, 3]], np.int32)
SAMPLED = np.array([3, 0, 11, 20, 29, 3], np.int32)
KEY = jax.random.key(0)
LOSSES = {"softmax": js.sampled_softmax_loss, "nce": js.nce_loss}


def chance(k):
    return np.log((k + 2) / (k + 1)) / np.log(V + 1)


def cross(x, z):
    return -z * jax.nn.log_sigmoid(x) - (1 - z) * jax.nn.log_sigmoid(-x)


def plain(name, weights, biases, labels, inputs, values, remove):
    """The losses by the formulas, on all classes."""
    sampled, of_true, of_sampled = values
    logits = inputs @ weights.T + biases[None]
    out = []
    for b in range(len(labels)):
        true = logits[b, labels[b]] - jnp.log(of_true[b])
        drawn = logits[b, sampled] - jnp.log(of_sampled)
        hit = (sampled[:, None] == labels[b][None]).any(1)
        keep = ~hit if remove else jnp.ones_like(hit)
        share = 1 / len(labels[b])
        if name == "softmax":
            total = jnp.exp(true).sum() + jnp.where(keep, jnp.exp(drawn), 0).sum()
            out.append(-(share * (true - jnp.log(total))).sum())
        else:
            lost = jnp.where(keep, cross(drawn, 0.0), 0).sum()
            out.append(cross(true, share).sum() + lost)
    return jnp.stack(out)


@pytest.mark.parametrize(
    "name, num_true, remove",
    [
        *((name, 2, remove) for name in LOSSES for remove in (False, True)),
        ("softmax", 1, True),
    ],
)
def test_value_and_gradients_are_those_of_the_formula(name, num_true, remove):
    labels = LABELS[:, :num_true]
    values = (SAMPLED, *((S * chance(x)).astype("f") for x in (labels, SAMPLED)))
    weight = np.arange(1, B + 1, dtype=np.float32)

    def ours(weights, biases, inputs):
        out = LOSSES[name](weights, biases, labels, inputs, S, V, num_true, values, remove)
        return (out * weight).sum(), out

    def theirs(weights, biases, inputs):
        out = plain(name, weights, biases, labels, inputs, values, remove)
        return (out * weight).sum(), out

    args = WEIGHTS, BIASES, INPUTS
    grads, out = fast_jit(js.grad(ours, (0, 1, 2), has_aux=True))(*args)
    wanted, expected = fast_jit(jax.grad(theirs, (0, 1, 2), has_aux=True))(*args)
    assert_close(out, expected, rtol=1e-4)
    assert js.is_slices(grads[0]) and js.is_slices(grads[1])
    assert grads[0].indices.shape == grads[1].indices.shape == (B * num_true + S,)
    for got, want in zip(grads, wanted, strict=True):
        assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_a_class_drawn_twice(name):
    """The first label is drawn twice: here both are left out, in TensorFlow the last.

    So ours is TensorFlow's loss of a sample that holds the class once. For the second
    label, which is drawn once, and with all hits counted, the losses are the same.
    """
    case = golden("sampled")
    twice, once = case["twice"], case["once"]
    values = twice["sampled"], twice["of_true"], twice["of_sampled"]
    given = case["weights"], case["biases"], case["labels"], case["inputs"], 4, 6, 1
    with_hits, without = (LOSSES[name](*given, values, remove) for remove in (False, True))
    key = f"{name} without hits"
    assert_close(with_hits, twice[f"{name} with hits"])
    assert_close(without, np.array([once[key][0], twice[key][1]]))
    assert abs(twice[key][0] - once[key][0]) > 0.1


def test_shards_keys_and_one_label():
    first, column = LABELS[:, 0], LABELS[:, :1]
    shards = [WEIGHTS[i::3] for i in range(3)], [BIASES[i::3] for i in range(3)]

    @fast_jit
    def every(key, other):
        loss = functools.partial(js.sampled_softmax_loss, num_sampled=S, num_classes=V)
        values = js.log_uniform_candidate_sampler(column, S, V, key=key)
        return {
            "whole": loss(WEIGHTS, BIASES, first, INPUTS, key=key),
            "column": loss(WEIGHTS, BIASES, column, INPUTS, key=key),
            "shards": loss(*shards, first, INPUTS, key=key),
            "another key": loss(WEIGHTS, BIASES, first, INPUTS, key=other),
            "a sample": loss(WEIGHTS, BIASES, first, INPUTS, sampled_values=values),
            "bad labels": loss(WEIGHTS, BIASES, np.array([1, V, -1, 2]), INPUTS, key=key),
        }

    losses = every(jax.random.key(7), jax.random.key(8))
    whole = losses["whole"]
    np.testing.assert_array_equal(whole, losses["column"])
    assert_close(losses["shards"], whole)
    assert_close(losses["a sample"], whole)
    assert (np.asarray(whole) != np.asarray(losses["another key"])).all()
    assert np.isnan(losses["bad labels"]).tolist() == [False, True, True, False]


def test_training_with_few_classes_learns_all():
    inputs, labels = np.eye(V, dtype=np.float32), np.arange(V)
    tx = js.adagrad(1.0)

    @fast_jit
    def train(params, key):
        def step(state, key):
            params, state = state
            loss = lambda p: js.sampled_softmax_loss(  # noqa: E731
                p["w"], p["b"], labels, inputs, 5, V, key=key
            ).mean()
            return tx.apply(js.grad(loss)(params), state, params), None

        keys = jax.random.split(key, 100)
        return jax.lax.scan(step, (params, tx.init(params)), keys)[0][0]

    params = {"w": np.zeros((V, V), np.float32), "b": np.zeros(V, np.float32)}
    params = jax.tree.map(np.asarray, train(params, jax.random.key(1)))
    full = inputs @ params["w"].T + params["b"]
    assert (full.argmax(1) == labels).mean() > 0.95


# --- the sampler ------------------------------------------------------------------------


def draws(unique, count, repeat=1000, classes=V):
    sample = lambda key: js.log_uniform_candidate_sampler(  # noqa: E731
        jnp.arange(classes), count, classes, key=key, unique=unique
    )
    return jax.jit(jax.vmap(sample))(jax.random.split(jax.random.key(3), repeat))


def test_draws_follow_the_distribution():
    sampled, expected, of_sampled = draws(False, 50, 2000)
    seen = np.bincount(np.asarray(sampled).ravel(), minlength=V) / sampled.size
    wanted = chance(np.arange(V))
    np.testing.assert_allclose(wanted.sum(), 1, rtol=1e-6)
    deviation = np.sqrt(wanted * (1 - wanted) / sampled.size)
    assert (np.abs(seen - wanted) < 5 * deviation).all()
    np.testing.assert_allclose(expected[0], 50 * wanted, rtol=1e-5)
    np.testing.assert_allclose(of_sampled[0], 50 * wanted[sampled[0]], rtol=1e-5)


@pytest.mark.parametrize("count", slow_unless([(1,), (12,)], (12,).__eq__))
def test_unique_draws_and_their_expected_counts(count):
    sampled, expected, of_sampled = draws(True, count)
    ordered = np.sort(sampled, 1)
    assert (ordered[:, 1:] != ordered[:, :-1]).all()
    assert ordered.min() >= 0 and ordered.max() < V
    # The expected counts of a draw depend on how long it was; on average they are right.
    seen = np.bincount(np.asarray(sampled).ravel(), minlength=V) / len(sampled)
    mean = np.asarray(expected).mean(0)
    assert np.abs(seen - mean).max() < 5 * 0.5 / np.sqrt(len(sampled)) + 0.02
    np.testing.assert_allclose(
        of_sampled[5], np.asarray(expected)[5][np.asarray(sampled)[5]], rtol=1e-6
    )


def test_all_classes_can_be_drawn():
    draw = js.log_uniform_candidate_sampler
    every, one = fast_jit(
        lambda key: (draw([0], 8, 8, key=key), draw([0], 3, 1, key=key, unique=False))
    )(KEY)
    assert sorted(every.sampled_candidates.tolist()) == list(range(8))
    assert one.sampled_candidates.tolist() == [0, 0, 0]
    np.testing.assert_allclose(one.true_expected_count, [3])


@pytest.mark.parametrize("classes", [10**6, 2**31 - 1])
def test_rare_classes_are_drawn_evenly(classes):
    drawn = js.log_uniform_candidate_sampler([0], 200_000, classes, key=KEY, unique=False)
    numbers = np.asarray(drawn.sampled_candidates).astype(np.int64)
    assert numbers.min() >= 0 and numbers.max() < classes
    # The logarithm of what log-uniform numbers are is uniform.
    spread = np.log(numbers + 1 + np.random.RandomState(0).rand(len(numbers)))
    histogram, _ = np.histogram(spread, 20, (0, np.log(classes + 1)))
    wanted = len(numbers) / 20
    assert np.abs(histogram[8:] - wanted).max() < 6 * np.sqrt(wanted)
    top = numbers[numbers > classes // 2]
    for bit in range(8):  # no low bit is stuck
        assert abs(((top >> bit) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(len(top))


@pytest.mark.parametrize(
    "keywords, text",
    [
        ({"num_sampled": 0}, "num_sampled=0, unique=True of 10 classes"),
        ({"num_sampled": 11}, "at most the number of classes if they are to be unique"),
        ({"range_max": 0}, r"range_max=0; it must be in \[1, 2\^31\)"),
        ({"range_max": 2**31}, "range_max=2147483648"),
    ],
)
def test_errors_of_the_sampler(keywords, text):
    keywords = {"num_sampled": 2, "range_max": 10, "key": KEY, **keywords}
    with pytest.raises(ValueError, match=text):
        js.log_uniform_candidate_sampler([0], **keywords)


@pytest.mark.parametrize("name", LOSSES)
def test_errors_of_the_losses(name):
    loss = LOSSES[name]
    with pytest.raises(ValueError, match=r"needs key=jax.random.key\(...\), a new"):
        loss(WEIGHTS, BIASES, LABELS[:, 0], INPUTS, S, V)
    with pytest.raises(ValueError, match=r"num_true=1\], got inputs \[4, 3\] and lab"):
        loss(WEIGHTS, BIASES, LABELS, INPUTS, S, V, key=KEY)
    with pytest.raises(TypeError, match=r"integer labels, got float32\[4\]"):
        loss(WEIGHTS, BIASES, LABELS[:, 0].astype(float), INPUTS, S, V, key=KEY)


def test_tables_and_samples_that_do_not_fit():
    def loss(weights=WEIGHTS, biases=BIASES, classes=V, **keywords):
        keywords = keywords or {"key": KEY}
        return js.nce_loss(weights, biases, LABELS[:, 0], INPUTS, S, classes, **keywords)

    shapes = r"wants weights \[V, D=3\] and biases \[V\], got weights"
    with pytest.raises(ValueError, match=rf"{shapes} \[30, 2\] and biases \[30\]"):
        loss(WEIGHTS[:, :2])
    with pytest.raises(ValueError, match=rf"{shapes} \[30, 3\] and biases \[30, 1\]"):
        loss(biases=BIASES[:, None])
    for tables in [(WEIGHTS, BIASES), ([WEIGHTS[:15], WEIGHTS[15:]], BIASES)]:
        with pytest.raises(ValueError, match=r"num_classes=31, but weights .* of 30 rows"):
            loss(*tables, 31)
    with pytest.raises(ValueError, match=r"num_classes=30, but weights .* of 29 rows"):
        loss(biases=BIASES[1:])
    count = np.ones(2, np.float32)
    with pytest.raises(ValueError, match=r"true_expected_count \[4, 1\], .*, got 2 of"):
        loss(sampled_values=([1, 2], count))
    with pytest.raises(ValueError, match=r"got the shapes \[2\], \[2\] and \[2\]"):
        loss(sampled_values=([1, 2], count, count))
    with pytest.raises(TypeError, match=r"integer sampled_values\[0\], got float32\[2\]"):
        loss(sampled_values=([1.0, 2], np.ones(4), count))
    with pytest.raises(TypeError, match=r"integer true_classes, got float32\[1\]"):
        js.log_uniform_candidate_sampler([0.5], 2, 10, key=KEY)
    # A class that 32 bits would cut to 1 stays none.
    beyond = np.array([2**32 + 1, 2])
    wide = fast_jit(lambda n: loss(sampled_values=(beyond, np.ones(4), n)))(count)
    assert np.isnan(wide).all()
    more = js.log_uniform_candidate_sampler(np.array([2**40]), 2, 10, key=KEY)
    assert more.true_expected_count.shape == (1,)


def test_labels_of_a_dtype_too_narrow_for_the_classes():
    table, bias = np.float32(np.mgrid[:1000, :2][0]), np.zeros(1000, np.float32)
    inputs = np.full((3, 2), 1e-3, np.float32)

    def loss(labels):
        labels = labels[:, None]
        sample = js.log_uniform_candidate_sampler(labels, 20, 1000, key=KEY, unique=False)
        return js.nce_loss(table, bias, labels, inputs, 20, 1000, sampled_values=sample)

    dtypes = ("int32", "uint8", "int8", "int16")
    every = fast_jit(lambda i: [loss(i.astype(dtype)) for dtype in dtypes])
    wanted, *others = every(np.array([3, 7, 100], np.int32))
    assert np.isfinite(wanted).all()
    for got in others:
        np.testing.assert_array_equal(got, wanted)


def test_an_empty_batch():
    loss = functools.partial(js.nce_loss, num_sampled=3, num_classes=20)
    tables = np.ones((20, 2), np.float32), np.zeros(20, np.float32)
    nothing = np.zeros((0, 1), np.int32), np.zeros((0, 2), np.float32)
    assert fast_jit(loss)(*tables, *nothing, key=KEY).shape == (0,)


# --- by counts --------------------------------------------------------------------------

COUNTS = np.array([5, 0, 1, 20, 3, 0, 1, 70], np.float32)


def by_counts(unique, count, repeat=1000, counts=COUNTS, **keywords):
    keywords = {"unigrams": counts, "unique": unique, **keywords}
    sample = lambda key: js.fixed_unigram_candidate_sampler(  # noqa: E731
        jnp.arange(len(counts)), count, len(counts), key=key, **keywords
    )
    return jax.jit(jax.vmap(sample))(jax.random.split(jax.random.key(3), repeat))


@pytest.mark.parametrize("distortion", [1.0, 0.5])
def test_draws_follow_the_counts(distortion):
    weights = COUNTS**distortion
    wanted = weights / weights.sum()
    sampled, expected, of_sampled = by_counts(False, 50, 500, distortion=distortion)
    seen = np.bincount(np.asarray(sampled).ravel(), minlength=8) / sampled.size
    deviation = np.sqrt(wanted * (1 - wanted) / sampled.size)
    assert (np.abs(seen - wanted) <= 5 * deviation).all()  # of no count: never
    np.testing.assert_allclose(expected[0], 50 * wanted, rtol=1e-5)
    np.testing.assert_allclose(of_sampled[0], 50 * wanted[sampled[0]], rtol=1e-5)


def test_unique_draws_by_counts():
    sampled, expected, of_sampled = map(np.asarray, by_counts(True, 3))
    ordered = np.sort(sampled, 1)
    assert (ordered[:, 1:] != ordered[:, :-1]).all()
    # How often each class is among three drawn one after the other, without the last ones.
    shares, wanted = COUNTS / COUNTS.sum(), np.zeros(8)
    for drawn in itertools.permutations(range(8), 3):
        one, two, three = shares[list(drawn)]
        wanted[list(drawn)] += one * two / (1 - one) * three / (1 - one - two)
    seen = np.bincount(sampled.ravel(), minlength=8) / len(sampled)
    assert (np.abs(seen - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / 1000)).all()
    # All are expected by the number of draws that it took, a whole one of three or more.
    tries = np.round(np.log1p(-expected[:, 0]) / np.log1p(-shares[0]))
    assert tries.min() >= 3
    np.testing.assert_allclose(expected, 1 - (1 - shares) ** tries[:, None], atol=1e-5)
    np.testing.assert_allclose(
        of_sampled, np.take_along_axis(expected, sampled, 1), rtol=1e-6
    )


def test_expected_counts_of_tensorflow():
    """TensorFlow 2.21, ``unique=False``, of four draws; shards number their own classes."""
    draw = functools.partial(
        js.fixed_unigram_candidate_sampler, num_sampled=4, key=KEY, unique=False
    )
    counts, classes = np.arange(1.0, 7.0), np.array([[0], [1], [2], [3], [5]])
    cases = [
        ({}, [0.190476, 0.380952, 0.571429, 0.761905, 1.142857]),
        ({"distortion": 0.5}, [0.369282, 0.522244, 0.639616, 0.738565, 0.904553]),
        ({"num_reserved_ids": 2, "unigrams": counts[:4]}, [0, 0, 0.4, 0.8, 1.6]),
        ({"distortion": 0.0}, [2 / 3] * 5),
    ]
    for keywords, wanted in cases:
        drawn = draw(classes, range_max=6, **{"unigrams": counts, **keywords})
        assert_close(drawn.true_expected_count, np.array(wanted, "f")[:, None])
        assert drawn.sampled_candidates.dtype == np.int32
    # The shard of the odd classes, whose counts are 2, 4 and 6.
    halves = {"num_shards": 2, "shard": 1, "unigrams": counts, "range_max": 3}
    drawn = draw(np.arange(3), **halves)
    assert_close(drawn.true_expected_count, np.array([2 / 3, 4 / 3, 2], "f"))
    assert draw([-1, 6], range_max=6, unigrams=counts).true_expected_count.tolist() == [
        0,
        0,
    ]


def test_rare_classes_are_drawn_by_their_counts():
    """A million classes, of which one has nearly all, and the others share the rest."""
    counts = np.ones(10**6, np.int64)
    counts[123_456] = 10**12
    draw = functools.partial(
        js.fixed_unigram_candidate_sampler, [0], 100_000, 10**6, key=KEY, unique=False
    )
    found = np.asarray(draw(unigrams=counts).sampled_candidates)
    assert (found == 123_456).mean() > 0.99
    counts[123_456] = 0
    counts[:1000] = 1000
    found = np.asarray(draw(unigrams=counts).sampled_candidates)
    assert not (found == 123_456).any()
    first, _ = np.histogram(found, 10, (0, 1000))
    others, _ = np.histogram(found, 10, (1000, 10**6))
    for seen in (first, others):
        assert np.abs(seen - 5000).max() < 6 * np.sqrt(5000)


def test_other_counts_compile_nothing():
    traced = []

    @jax.jit
    def step(key, counts, distortion):
        traced.append(1)
        return js.fixed_unigram_candidate_sampler(
            [[2]], 2, 8, key=key, unigrams=counts, distortion=distortion
        )

    first = step(KEY, COUNTS, 1.0)
    other = step(KEY, COUNTS[::-1].copy(), 0.5)
    assert len(traced) == 1
    assert first.true_expected_count[0, 0] != other.true_expected_count[0, 0]
    assert not set(other.sampled_candidates.tolist()) & {2, 6}
    # Too few classes that have a count: the places left hold none.
    few = step(KEY, np.eye(8, dtype="f")[3], 1.0)
    assert few.sampled_candidates.tolist() == [3, 8]
    assert step(KEY, np.zeros(8, "f"), 1.0).sampled_candidates.tolist() == [8, 8]


def test_a_loss_with_samples_by_counts():
    labels = LABELS[:, :1]
    counts = np.arange(V, dtype=np.float32)

    def loss(weights, counts):
        drawn = js.fixed_unigram_candidate_sampler(
            labels, S, V, key=KEY, unigrams=counts, distortion=0.75
        )
        return js.sampled_softmax_loss(
            weights, BIASES, labels, INPUTS, S, V, sampled_values=drawn
        ).sum()

    grads, by_count = fast_jit(js.grad(loss, (0, 1)))(WEIGHTS, counts + 1)
    assert js.is_slices(grads) and np.isfinite(grads.values).all()
    assert not numpy_array(by_count).any()


@pytest.mark.parametrize(
    "keywords, text",
    [
        ({"num_sampled": 0}, "num_sampled=0, unique=True of 8 classes"),
        ({"range_max": 9}, r"wants unigrams .*got \[8\] for range_max=9, num_shards=1, "),
        ({"num_reserved_ids": 1}, "num_reserved_ids=1, shard=0"),
        ({"unigrams": ()}, r"got \[0\] for range_max=8"),
        ({"num_shards": 2, "shard": 2}, "num_shards=2, .*shard=2"),
        ({"num_shards": 0}, "num_shards=0"),
        ({"unigrams": COUNTS - 1}, r"4 are above 0, 2 below; type unigrams.clip\(1\)"),
        (
            {"num_sampled": 7},
            "draw 7 classes, unique=True, and of the counts 6 are above 0",
        ),
        ({"unigrams": 0 * COUNTS, "unique": False}, "unique=False, .* 0 are above 0"),
    ],
)
def test_errors_of_the_sampler_by_counts(keywords, text):
    given = {"num_sampled": 2, "range_max": 8, "key": KEY, "unigrams": COUNTS}
    with pytest.raises(ValueError, match=text):
        js.fixed_unigram_candidate_sampler([0], **{**given, **keywords})
