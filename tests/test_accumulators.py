"""The blocking accumulators, one thread: TensorFlow's numbers, errors, steps, sharing."""

import copy
import logging
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import assert_close, golden
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import jslices as js
from jslices.accumulators import (
    CancelledError,
    ConditionalAccumulator,
    DeadlineExceededError,
    SparseConditionalAccumulator,
    serve,
)

GOLDEN = golden("sparse_conditional_accumulator")

# Deliberate differences. TensorFlow merges two lists as if they were sorted and unique;
# otherwise it returns duplicate rows, each with a count of its own. Ours are merged:
# equal to TensorFlow's as a sum, and as a mean where no row is divided by a wrong count.
MERGED = {
    "single_unsorted",
    "single_dup",
    "dup_then_one",
    "one_then_dup",
    "dup_both",
    "unsorted_then_sorted",
    "sorted_then_unsorted",
    "both_unsorted_same",
}
WRONG_COUNTS = MERGED - {"single_unsorted", "single_dup", "both_unsorted_same", "dup_both"}


def snapshot(accumulator):
    """Everything that it holds, copied."""
    turns = accumulator._turns
    return copy.deepcopy((vars(turns.store), turns.count, turns.step, turns.stale))


def assert_unchanged(accumulator, before):
    after = snapshot(accumulator)
    jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
    assert after[1:] == before[1:]


def play(accumulator, event):
    """Does what the event says; what came of it, in the words of the log."""
    try:
        match event["op"]:
            case "apply_grad":
                names = ("indices", "values", "grad_shape", "local_step")
                accumulator.apply_grad(*[event[name] for name in names])
                return "ok"
            case "take":
                return accumulator.take_grad(event["num_required"], timeout=0)
            case "num_accumulated":
                return accumulator.num_accumulated()
            case "set_global_step":
                return accumulator.set_global_step(event["value"])
    except js.InvalidArgumentError as error:
        return error
    except DeadlineExceededError:
        return f"would block (num_accumulated={accumulator.num_accumulated()})"


def as_dense(indices, values, shape):
    out = np.zeros(shape, values.dtype)
    np.add.at(out, indices, values)
    return out


@pytest.mark.parametrize("name", GOLDEN)
def test_equals_tensorflow(name):
    script = GOLDEN[name]
    accumulator = SparseConditionalAccumulator(
        script["dtype"], script["shape"], reduction_type=script["reduction_type"]
    )
    kind, mean = name.removeprefix("quirk ").split()[0], name.endswith("MEAN")
    for event in script["log"]:
        before = snapshot(accumulator)
        ours, theirs = play(accumulator, event), event.get("result")
        if isinstance(theirs, dict) and "error" in theirs:
            assert theirs["gist"] in str(ours)
            assert_unchanged(accumulator, before)
        elif not isinstance(theirs, dict):
            assert ours == theirs
        elif kind in MERGED:
            wanted = theirs["is"]
            assert ours.indices.tolist() == sorted(set(wanted["indices"].tolist()))
            if not (mean and kind in WRONG_COUNTS):
                shape = wanted["dense_shape"]
                np.testing.assert_allclose(
                    as_dense(ours.indices, ours.values, shape),
                    as_dense(wanted["indices"], wanted["values"], shape),
                    rtol=1e-6,
                )
        else:  # to the last bit
            np.testing.assert_array_equal(ours.indices, theirs["is"]["indices"])
            np.testing.assert_array_equal(ours.values, theirs["is"]["values"])
            np.testing.assert_array_equal(ours.shape, theirs["is"]["dense_shape"])
            assert ours.values.dtype == script["dtype"] and ours.shape.dtype == np.int64


@pytest.mark.parametrize("reduction, wanted", [("MEAN", [5, 2.5]), ("SUM", [10, 2.5])])
def test_duplicates_and_disorder_are_merged(reduction, wanted):
    accumulator = SparseConditionalAccumulator("float32", (9, 1), reduction_type=reduction)
    accumulator.apply_grad([7, 3, 7], [[1.0], [2.5], [2.0]])  # holds row 7 once: 3
    accumulator.apply_grad([7], [[7.0]])
    taken = accumulator.take_grad(1)
    np.testing.assert_array_equal(taken.indices, [3, 7])
    np.testing.assert_array_equal(taken.values.ravel(), wanted[::-1])


BAD_GRADIENTS = [
    (([3], [[1.0]]), "index of slice 0 exceeded limits of shape; index is 3 exceeded 3"),
    (([0, 1, 9], np.zeros((3, 1), "f4")), "index of slice 2 .* index is 9 exceeded 3"),
    (([[0]], [[1.0]]), r"Input indices should be vector but received shape: \[1,1\]"),
    (([0], 1.0), "Values cannot be 0-dimensional"),
    (([0, 1], [[1.0]]), "Expected 2 non-empty input values, got 1"),
    (([0], [[1.0, 2.0]]), "expected values dim 1 to be 1, got 2"),
    (([0], [1.0]), "expected values rank at least 2, got 1"),
    (([0], [[[1.0]]]), "expected values rank 2, got 3; the gradients since the last"),
    (([0], [[1.0]], (4, 1)), "expected shape dim 0 to be 3, got 4"),
    (([0], [[1.0]], (3,)), "expected shape rank at least 2, got 1"),
    (([0], [[1.0]], ()), "expected shape rank at least 2, got 0"),
    (([0.5], [[1.0]]), "wants integers, got float64.*from_optax"),
    (([0], np.zeros((1, 1))), r"dtype float32, got float64; cast.*astype\('float32'\)"),
    (([0], [[1.0], [2.0, 3.0]]), "grad_values is not an array"),
    (([0, [1]], [[1.0]]), "grad_indices is not an array"),
    (([0], [["a"]]), "grad_values holds no real numbers, but <U1"),
    (([0], [[1j]]), "grad_values holds no real numbers, but complex128"),
    (([0], [[1.0]], 3), r"apply_grad\(grad_shape=3\): a shape is a tuple of whole numbers"),
    ((np.array([2**63], "u8"), [[1.0]]), "beyond int64"),
    (([0], [[1.0]], None, "two"), "local_step wants a number, got 'two'"),
    # All misfits at once.
    (([[0]], np.zeros((1, 2))), r"vector.*dtype float32.*values dim 1 to be 1, got 2"),
]


@pytest.mark.parametrize("gradient, message", BAD_GRADIENTS)
def test_a_bad_gradient_changes_nothing(gradient, message):
    accumulator = SparseConditionalAccumulator("float32", (3, 1))
    accumulator.apply_grad([1, 2], [[1.0], [2.0]])
    before = snapshot(accumulator)
    with pytest.raises(js.InvalidArgumentError, match=message) as caught:
        accumulator.apply_grad(*gradient)
    assert isinstance(caught.value, ValueError)
    assert_unchanged(accumulator, before)


def test_the_comparison_of_states_can_fail():
    accumulator = SparseConditionalAccumulator("float32", (3, 1))
    accumulator.apply_grad([1], [[1.0]])
    before = snapshot(accumulator)
    accumulator.apply_grad([1], [[9.0]])
    with pytest.raises(AssertionError):
        assert_unchanged(accumulator, before)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0,), "Argument num_required must be positive, but was 0"),
        ((-1,), "must be positive, but was -1"),
        ((1.5,), "num_required wants a whole number, got 1.5"),
        (("1",), "num_required wants a whole number"),
    ],
)
@pytest.mark.parametrize("dense", [False, True])
def test_bad_takes_change_nothing(arguments, message, dense):
    kind = ConditionalAccumulator if dense else SparseConditionalAccumulator
    accumulator = kind("float32")
    accumulator.apply_grad(*([[1.0]] if dense else ([1], [[1.0]])))
    before = snapshot(accumulator)
    with pytest.raises(js.InvalidArgumentError, match=message):
        accumulator.take_grad(*arguments)
    with pytest.raises(js.InvalidArgumentError, match="timeout=-1"):
        accumulator.take_grad(1, timeout=-1)
    with pytest.raises(DeadlineExceededError, match="0 s for 2 gradients; 1 have come"):
        accumulator.take_grad(2, timeout=0)
    assert_unchanged(accumulator, before)


def test_stale_gradients_are_dropped_before_any_check():
    accumulator = SparseConditionalAccumulator("float32", (3, 1))
    accumulator.set_global_step(2)
    for gradient in [([0], [[1.0]]), *[bad[:3] for bad, _ in BAD_GRADIENTS]]:
        shape = gradient[2] if len(gradient) == 3 else None
        accumulator.apply_grad(*gradient[:2], shape, local_step=1)
    assert accumulator.num_accumulated() == 0
    assert accumulator.num_stale() == 1 + len(BAD_GRADIENTS)
    accumulator.apply_grad([0], [[1.0]], local_step=np.int64(7))  # a future one counts
    accumulator.apply_grad([0], [[1.0]], local_step=2.9)  # as TensorFlow casts: 2
    assert accumulator.num_accumulated() == 2 and accumulator.global_step() == 2


def test_a_lower_step_is_logged_and_set(caplog):
    accumulator = ConditionalAccumulator("float32")
    with caplog.at_level(logging.WARNING, "jslices.accumulators"):
        accumulator.set_global_step(5)
        accumulator.set_global_step(jnp.array(5))
        assert not caplog.records
        accumulator.set_global_step(2)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "smaller value" in record.getMessage()
    assert accumulator.global_step() == 2
    accumulator.apply_grad([1.0], local_step=2)
    accumulator.apply_grad([1.0], local_step=1)
    assert accumulator.num_accumulated() == 1


def test_slices_in_and_out():
    accumulator = SparseConditionalAccumulator(jnp.float32, (6, 2))
    table = jnp.arange(12.0).reshape(6, 2)
    slices = js.grad(lambda t: (t[jnp.array([4, 1, 4])] ** 2).sum())(table)
    accumulator.apply_indexed_slices_grad(slices)
    # Coalesced slices end in empty entries, index 6; so does what nothing was looked up of.
    accumulator.apply_indexed_slices_grad(slices.coalesce(5), local_step=3)
    taken = accumulator.take_indexed_slices_grad(2)
    assert taken.indices.dtype == jnp.int32 and taken.dense_shape == (6, 2)
    assert_close(taken, slices)
    empty = js.IndexedSlices(jnp.ones((2, 2)), jnp.array([-1, 2**31 - 1]))
    accumulator.apply_indexed_slices_grad(empty, local_step=1)
    assert accumulator.num_accumulated() == 1
    taken = accumulator.take_indexed_slices_grad(1, size=3)
    np.testing.assert_array_equal(taken.indices, [6, 6, 6])
    assert taken.values.shape == (3, 2) and not taken.values.any()


def test_takes_of_many_sizes_get_a_hint_and_of_one_size_none():
    accumulator = SparseConditionalAccumulator("float32", (90, 1))

    def take(rows, size=None):
        step, values = accumulator.global_step(), np.ones((rows, 1), np.float32)
        accumulator.apply_grad(np.arange(rows), values, local_step=step)
        return accumulator.take_indexed_slices_grad(1, size=size)

    for rows in (3, 4, 5, 4, 3):
        assert take(rows).indices.size == rows
    said = r"4 numbers of rows were taken, \[3, 4, 5, 33\], .*\(num_required, size=64\)"
    with pytest.warns(js.PerformanceHint, match=said):
        take(33)
    jitted = jax.jit(js.IndexedSlices.to_dense)
    for rows in (6, 7, 8, 9):
        assert jitted(take(rows, size=64)).sum() == rows
    assert jitted._cache_size() == 1


def test_slices_that_do_not_fit():
    accumulator = SparseConditionalAccumulator("float32", (6, 1))
    row, before = jnp.ones((1, 1)), snapshot(accumulator)
    with pytest.raises(TypeError, match="a dense gradient goes to a jslices"):
        accumulator.apply_indexed_slices_grad(row)
    for slices, message in [
        # Elsewhere such an index is dropped; here a wrong id is told, as in TensorFlow.
        (js.IndexedSlices(row, jnp.array([7]), (6, 1)), "index is 7 exceeded 6"),
        (js.IndexedSlices(row, jnp.array([0]), (7, 1)), "dim 0 to be 6, got 7"),
        (
            jax.tree.map(lambda x: jnp.ones(x.shape), js.IndexedSlices(row, [1])),
            "from_optax",
        ),
        (
            jax.vmap(lambda i: js.IndexedSlices(row, i, (6, 1)))(jnp.zeros((2, 1), int)),
            r"received shape: \[2,1\]",
        ),
    ]:
        with pytest.raises(js.InvalidArgumentError, match=message):
            accumulator.apply_indexed_slices_grad(slices)
    assert_unchanged(accumulator, before)
    with pytest.raises(TypeError, match="inside jit use the pure form"):
        jax.jit(lambda x: accumulator.apply_grad([0], x))(row)
    with pytest.raises(TypeError, match="lives on the host"):
        jax.jit(accumulator.apply_indexed_slices_grad)(js.IndexedSlices(row, [0]))
    assert_unchanged(accumulator, before)


def test_a_taker_that_cannot_hold_it_takes_nothing():
    accumulator = SparseConditionalAccumulator("float32")
    accumulator.apply_grad([5, 2**40], [[1.0], [2.0]])
    before = snapshot(accumulator)
    with pytest.raises(js.InvalidArgumentError, match="row 1099511627776 needs 64-bit"):
        accumulator.take_indexed_slices_grad(1)
    with pytest.raises(js.InvalidArgumentError, match=r"2 rows have been .* pass size=2"):
        with jax.enable_x64(True):
            accumulator.take_indexed_slices_grad(1, size=1)
    assert_unchanged(accumulator, before)
    with jax.enable_x64(True):
        taken = accumulator.take_indexed_slices_grad(1)
    assert taken.dense_shape is None and taken.indices.tolist() == [5, 2**40]


def test_empty_entries_of_a_table_beyond_int32():
    accumulator = SparseConditionalAccumulator("float32", (2**40, 1))
    accumulator.apply_grad([5], [[1.0]])
    taken = accumulator.take_indexed_slices_grad(1, size=2)
    assert taken.indices.tolist() == [5, -1] and taken.dense_shape == (2**40, 1)


def test_what_is_given_can_be_written_over():
    accumulator = SparseConditionalAccumulator("float32", (3, 1))
    dense = ConditionalAccumulator("float32")
    indices, values = np.array([1]), np.ones((1, 1), np.float32)
    accumulator.apply_grad(indices, values)
    dense.apply_grad(values)
    indices[:], values[:] = 2, 7
    assert accumulator.take_grad(1).values == 1
    mine = dense.take_grad(1)
    assert mine == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits(dtype):
    accumulator = SparseConditionalAccumulator(jnp.dtype(dtype), (3,))
    # Within a gradient: summed in float32, rounded once (256 + 1 + 1 = 258 in bfloat16).
    accumulator.apply_grad([1, 1, 1], jnp.array([256, 1, 1], dtype))
    taken = accumulator.take_grad(1)
    assert taken.values.dtype == dtype and taken.values == 258
    # Numbers without a dtype take on that of the accumulator.
    accumulator.apply_grad([1], [0.1], local_step=1)
    assert accumulator.take_grad(1).values == jnp.array(0.1, dtype)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("int32",), "SparseConditionalAccumulator.dtype='int32'.*floating dtype"),
        (("nonsense",), "floating dtype"),
        (("float32", 3), "shape=3.*a tuple of whole numbers"),
        (("float32", (2.5,)), "a tuple of whole numbers"),
        (("float32", (-2,)), "a tuple of whole numbers"),
        (("float32", None, None, "n", "mean"), '.mean.*: wanted "MEAN" or "SUM"'),
    ],
)
def test_bad_constructors(arguments, message):
    with pytest.raises(js.InvalidArgumentError, match=message):
        SparseConditionalAccumulator(*arguments)


def test_a_shared_name():
    one = SparseConditionalAccumulator("float32", (3, 1), shared_name="a name")
    two = SparseConditionalAccumulator("float32", (3, 1), shared_name="a name")
    private = SparseConditionalAccumulator("float32", (3, 1), shared_name="")
    dense = ConditionalAccumulator("float32", (3, 1), shared_name="a name")
    one.apply_grad([1], [[4.0]])
    counts = [x.num_accumulated() for x in (one, two, private, dense)]
    assert counts == [1, 1, 0, 0]
    with pytest.raises(js.InvalidArgumentError, match="exists with dtype, shape and"):
        SparseConditionalAccumulator("float16", (3, 1), shared_name="a name")
    assert two.take_grad(1).values == 4 and one.global_step() == 1
    two.close()
    with pytest.raises(CancelledError):
        one.apply_grad([1], [[4.0]])
    fresh = SparseConditionalAccumulator("float16", shared_name="a name")
    assert fresh.global_step() == 0
    del fresh  # and the name lives no longer than those who use it
    assert SparseConditionalAccumulator("float64", shared_name="a name").dtype == "f8"


@pytest.mark.parametrize("shape", [None, (), [], np.array([])])
def test_an_empty_shape_of_rows_is_not_known(shape):
    accumulator = SparseConditionalAccumulator("float32", shape)
    accumulator.apply_grad([100], [[1.0, 2.0]])
    assert accumulator.shape is None
    np.testing.assert_array_equal(accumulator.take_grad(1).shape, [-1, 2])


def test_what_it_says_of_itself():
    accumulator = SparseConditionalAccumulator("float32", [None, 2], name="mine")
    accumulator.apply_grad([1], [[1.0, 2.0]])
    assert accumulator.name == "mine" and accumulator.shape == (None, 2)
    assert repr(accumulator) == (
        "SparseConditionalAccumulator(float32, shape=[None, 2], MEAN, 1 accumulated, "
        "step 0)"
    )
    for send in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=r"accumulators\.serve"):
            send(accumulator)
    with pytest.raises(js.InvalidArgumentError, match="objects by name"):
        serve({})


# --- dense ------------------------------------------------------------------------------


def test_dense_mean_and_sum():
    for reduction, wanted in [("MEAN", [2, 3]), ("SUM", [4, 6])]:
        accumulator = ConditionalAccumulator("float32", (2,), reduction_type=reduction)
        accumulator.apply_grad([1.0, 2.0])
        accumulator.apply_grad(jnp.array([3.0, 4.0]), local_step=5)
        accumulator.apply_grad([9.0, 9.0], local_step=-1)
        taken = accumulator.take_grad(2)
        np.testing.assert_array_equal(taken, np.array(wanted, np.float32))
        assert (accumulator.num_accumulated(), accumulator.global_step()) == (0, 1)
        accumulator.apply_grad("stale, so nobody looks at it")


def test_a_dense_scalar():
    accumulator = ConditionalAccumulator("float32", ())
    accumulator.apply_grad(1.0)
    accumulator.apply_grad(np.float32(2))
    taken = accumulator.take_grad(1)
    assert isinstance(taken, np.ndarray) and taken.shape == () and taken == 1.5


@pytest.mark.parametrize(
    "shape, gradient, message",
    [
        ((2,), [1.0], r"Shape mismatch: expected \[2\], got \[1\]"),
        ((None, 2), [1.0, 2.0], r"expected \[\?,2\], got \[2\]"),
        ((), [[1.0, 2.0]], r"expected \[\], got \[1,2\]"),
        (None, [1.0, 2.0, 3.0], r"expected \[2\], got \[3\]; the gradients since"),
        ((2,), np.zeros(2), r"dtype float32, got float64; cast them: grad.astype"),
    ],
)
def test_dense_misfits_change_nothing(shape, gradient, message):
    accumulator = ConditionalAccumulator("float32", shape)
    first = {(None, 2): (3, 2), (): ()}.get(shape, 2)
    accumulator.apply_grad(np.ones(first, np.float32))
    before = snapshot(accumulator)
    with pytest.raises(js.InvalidArgumentError, match=message):
        accumulator.apply_grad(gradient)
    assert_unchanged(accumulator, before)


# --- against a simple model -------------------------------------------------------------

ROWS = 6


class Model(RuleBasedStateMachine):
    """Any sequence of operations, against a dictionary of lists."""

    @initialize(reduction=st.sampled_from(["MEAN", "SUM"]))
    def make(self, reduction):
        self.ours = SparseConditionalAccumulator(
            "float64", (ROWS, 2), reduction_type=reduction
        )
        self.mean, self.held, self.count, self.step = reduction == "MEAN", {}, 0, 0

    @rule(rows=st.lists(st.integers(0, ROWS - 1), max_size=5), ahead=st.integers(-2, 2))
    def apply(self, rows, ahead):
        values = np.arange(2.0 * len(rows)).reshape(-1, 2) + self.count
        self.ours.apply_grad(rows, values, (ROWS, 2), self.step + ahead)
        if ahead < 0:
            return
        self.count += 1
        for row in set(rows):
            total = sum(v for r, v in zip(rows, values, strict=True) if r == row)
            self.held.setdefault(row, []).append(total)

    @rule(rows=st.lists(st.integers(ROWS, 9), min_size=1, max_size=2), late=st.booleans())
    def apply_out_of_range(self, rows, late):
        gradient = rows, np.ones((len(rows), 2))
        if late:
            self.ours.apply_grad(*gradient, local_step=self.step - 1)
            return
        before = snapshot(self.ours)
        with pytest.raises(js.InvalidArgumentError):
            self.ours.apply_grad(*gradient, local_step=self.step)
        assert_unchanged(self.ours, before)

    @rule(step=st.integers(0, 5))
    def jump(self, step):
        self.ours.set_global_step(step)
        self.step = step

    @rule(num_required=st.integers(0, 3))
    def take(self, num_required):
        before = snapshot(self.ours)
        if not 1 <= num_required <= self.count:
            with pytest.raises((js.InvalidArgumentError, TimeoutError)):
                self.ours.take_grad(num_required, timeout=0)
            assert_unchanged(self.ours, before)
            return
        taken = self.ours.take_grad(num_required)
        np.testing.assert_array_equal(taken.indices, sorted(self.held))
        for row, value in zip(taken.indices, taken.values, strict=True):
            given = self.held[row]
            wanted = sum(given) / (len(given) if self.mean else 1)
            np.testing.assert_allclose(value, wanted, rtol=1e-12)
        self.held, self.count = {}, 0
        self.step += 1

    @invariant()
    def counts_agree(self):
        assert self.ours.num_accumulated() == self.count
        assert self.ours.global_step() == self.step


TestModel = Model.TestCase
TestModel.settings = settings(examples(60), stateful_step_count=20)
