"""The pure accumulators: TensorFlow's numbers, a simple model, jit, scan and vmap."""

import contextlib
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import assert_close, dense, fast_jit, golden
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from jax import lax

import jslices as js
from jslices.accumulators import dense_accumulator

GOLDEN = golden("sparse_conditional_accumulator")

# Deliberate differences, besides those of the blocking form (which merges as this does):
# "no shape": the state has a static size, so the shape of a row must be known.
# "errors": row numbers cannot raise under jit, so a bad one is an empty entry, as in all
# of jslices; and rows have exactly the declared shape.
# "quirk negative_index": an empty entry is dropped and not returned.
# "dtype float16": summed in float32 and rounded once; within one step of it.
# Means of rows that TensorFlow returns twice, each divided by a count of its own.
NOT_PLAYED = {
    "no shape",
    "errors",
    "quirk dup_then_one MEAN",
    "quirk one_then_dup MEAN",
    "quirk unsorted_then_sorted MEAN",
    "quirk sorted_then_unsorted MEAN",
}


# An accumulator is static: these are compiled once for each one and each size of gradient.
apply_grad = fast_jit(lambda accumulator, *args: accumulator.apply_grad(*args))
take_grad = fast_jit(lambda accumulator, *args: accumulator.take_grad(*args))


@pytest.mark.parametrize("name", [name for name in GOLDEN if name not in NOT_PLAYED])
def test_equals_tensorflow(name):
    script = GOLDEN[name]
    wide = script["dtype"] == "float64"
    shape = tuple(script["shape"])
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        accumulator = js.accumulators.sparse_accumulator(
            script["dtype"], shape, 4 if shape[0] is None else 6, script["reduction_type"]
        )
        state = accumulator.init()
        for event in script["log"]:
            state = play(accumulator, state, event, name)


def play(accumulator, state, event, name):
    match event["op"]:
        case "apply_grad":
            shape = None if accumulator.shape[0] is None else accumulator.shape
            # Filled up with empty entries to one size, so that little is compiled.
            missing = 3 - len(event["indices"])
            indices = np.append(event["indices"], np.full(missing, -1))
            room = np.ones((missing, *event["values"].shape[1:]), event["values"].dtype)
            values = np.concatenate([event["values"], room])
            grad = js.IndexedSlices(values, indices, shape)
            state, _ = apply_grad(accumulator, state, grad, event["local_step"])
        case "set_global_step":
            return accumulator.set_global_step(state, event["value"])
        case "num_accumulated":
            assert accumulator.num_accumulated(state) == event["result"]
        case "take":
            new, slices = take_grad(accumulator, state, event["num_required"])
            if isinstance(event["result"], str):
                assert "would block" in event["result"]
                chex.assert_trees_all_equal(new, state)
                assert not dense(slices).any()
                return state
            wanted = event["result"]["is"]
            rows = np.unique(wanted["indices"][wanted["indices"] >= 0])
            np.testing.assert_array_equal(slices.indices[: len(rows)], rows)
            total = np.zeros((rows.max() + 1, *wanted["values"].shape[1:]))
            kept = wanted["indices"] >= 0
            np.add.at(total, wanted["indices"][kept], wanted["values"][kept])
            np.testing.assert_allclose(
                slices.values[: len(rows)].astype(float),
                total[rows],
                **({"atol": 5e-4} if "float16" in name else {"rtol": 2e-6}),
            )
            return new
    return state


# --- against a simple model -------------------------------------------------------------

ROWS, CAPACITY, IDS = 7, 4, 3


class Model(RuleBasedStateMachine):
    """Any sequence of operations, against a dictionary; both forms, jitted."""

    @initialize(reduction=st.sampled_from(["MEAN", "SUM"]))
    def make(self, reduction):
        self.accumulator = js.accumulators.sparse_accumulator(
            "float32", (ROWS, 2), CAPACITY, reduction
        )
        self.state = self.accumulator.init()
        self.mean, self.step, self.overflow = reduction == "MEAN", 0, 0
        self.held, self.count = {}, 0

    @rule(rows=st.lists(st.integers(-2, ROWS + 2), max_size=IDS), ahead=st.integers(-1, 1))
    def apply(self, rows, ahead):
        rows = rows + [ROWS] * (IDS - len(rows))  # filled up with empty entries
        values = np.arange(2.0 * IDS, dtype=np.float32).reshape(-1, 2) + self.count
        grad = js.IndexedSlices(values, np.array(rows), (ROWS, 2))
        before = self.state
        self.state, accepted = apply_grad(
            self.accumulator, self.state, grad, self.step + ahead
        )
        present = {row for row in rows if 0 <= row < ROWS}
        fits = len(present | set(self.held)) <= CAPACITY
        assert accepted == (fits and ahead >= 0)
        if ahead >= 0 and not fits:
            self.overflow += 1
        if not accepted:  # all or nothing
            chex.assert_trees_all_equal(
                self.state._replace(overflow=before.overflow), before
            )
            return
        self.count += 1
        for row in present:
            total = sum(v for r, v in zip(rows, values, strict=True) if r == row)
            self.held.setdefault(row, []).append(total)

    @rule(step=st.integers(0, 4))
    def jump(self, step):
        self.state = self.accumulator.set_global_step(self.state, step)
        self.step = step

    @rule(num_required=st.integers(1, 3))
    def take(self, num_required):
        ready = self.count >= num_required
        assert self.accumulator.ready(self.state, num_required) == ready
        before = self.state
        self.state, slices = take_grad(self.accumulator, self.state, num_required)
        assert slices.values.shape == (CAPACITY, 2) and slices.dense_shape == (ROWS, 2)
        if not ready:
            chex.assert_trees_all_equal(self.state, before)
            assert (slices.indices == ROWS).all() and not slices.values.any()
            return
        wanted = np.full(CAPACITY, ROWS)
        wanted[: len(self.held)] = sorted(self.held)
        np.testing.assert_array_equal(slices.indices, wanted)
        if self.overflow:
            assert np.isnan(slices.values).all()
        else:
            for row, value in zip(sorted(self.held), slices.values, strict=False):
                given = self.held[row]
                share = sum(given) / (len(given) if self.mean else 1)
                np.testing.assert_allclose(value, share, rtol=1e-6)
            assert not slices.values[len(self.held) :].any()
        self.held, self.count, self.overflow = {}, 0, 0
        self.step += 1

    @invariant()
    def counts_agree(self):
        assert self.accumulator.num_accumulated(self.state) == self.count
        assert self.accumulator.global_step(self.state) == self.step
        assert self.state.overflow == self.overflow


TestModel = Model.TestCase
TestModel.settings = settings(examples(30), stateful_step_count=12)


# --- overflow ---------------------------------------------------------------------------


def slices_of(*rows, num_rows=9):
    """Four entries; -1 is an empty one."""
    values = jnp.arange(1.0, 5.0)[:, None]
    return js.IndexedSlices(values, np.array(rows, np.int32), (num_rows, 1))


def test_overflow_is_reported_and_nothing_is_lost():
    accumulator = js.accumulators.sparse_accumulator("float32", (9, 1), capacity=3)
    grad = slices_of(5, 2, -1, -1)
    state, accepted = apply_grad(accumulator, accumulator.init(), grad, 0)
    assert accepted
    full, accepted = apply_grad(accumulator, state, slices_of(2, 3, 4, -1), 0)
    assert not accepted and full.overflow == 1
    chex.assert_trees_all_equal(full._replace(overflow=state.overflow), state)
    with pytest.raises(ValueError, match=r"1 gradients were refused .* capacity=3"):
        accumulator.take_grad(full, 1)
    _, slices = take_grad(accumulator, full, 1)
    assert np.isnan(slices.values).all()
    # Once it has been seen and the gradient kept, one goes on.
    cleared = full._replace(overflow=jnp.int32(0))
    state, slices = take_grad(accumulator, cleared, 1)
    np.testing.assert_array_equal(slices.indices, [2, 5, 9])
    # A take that is not ready yet says nothing of it.
    assert take_grad(accumulator, full, 2)[0].overflow == 1
    # A stale gradient does not overflow.
    state, accepted = apply_grad(accumulator, state, slices_of(1, 2, 3, 4), 0)
    assert not accepted and state.overflow == 0


# --- transformations --------------------------------------------------------------------

V, D = 1000, 4
RNG = np.random.default_rng(3)
TABLE = jnp.asarray(RNG.normal(size=(V, D)), jnp.float32)
IDS_OF = jnp.asarray(RNG.integers(0, 12, (5, 6)), jnp.int32)


def loss(table, ids):
    return (table[ids] ** 2).sum()


def test_micro_batches_in_a_scan():
    accumulator = js.accumulators.sparse_accumulator("float32", (V, D), 16)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(table, batches):
        def accumulate(state, ids):
            return accumulator.apply_grad(state, js.grad(loss)(table, ids))

        state, accepted = lax.scan(accumulate, accumulator.init(), batches)
        state, slices = accumulator.take_grad(state, len(batches))
        return js.apply_updates(table, -0.1 * slices), slices, accepted, state

    lowered = step.lower(TABLE, IDS_OF)
    compiled = lowered.compile({"xla_backend_optimization_level": 0})
    wanted = sum(np.asarray(jax.grad(loss)(TABLE, ids)) for ids in IDS_OF)
    holders = sum(np.isin(np.arange(V), ids).astype(float) for ids in IDS_OF)
    wanted = wanted / np.maximum(holders, 1)[:, None]
    new, slices, accepted, state = compiled(jnp.array(TABLE), IDS_OF)
    assert accepted.all() and slices.values.shape == (16, D)
    assert_close(slices, jnp.asarray(wanted, jnp.float32))
    assert_close(new, jnp.asarray(TABLE - 0.1 * wanted, jnp.float32))
    assert accumulator.global_step(state) == 1 and state.num_accumulated == 0
    # The table is the only array of V rows, and it is updated in place.
    text = compiled.as_text()
    assert "input_output_alias={ {0}: (0" in text
    makers = re.findall(rf"= f32\[{V},{D}\]\S* (\S+?)\(", text)
    assert makers and not {"broadcast", "copy", "add", "concatenate"} & set(makers)


def test_a_step_whenever_enough_have_come():
    """Take in every round of a scan; what is not ready yet changes nothing."""
    accumulator = js.accumulators.sparse_accumulator("float32", (V, D), 16)

    def round_(carry, ids):
        table, state = carry
        grad = js.grad(loss)(table, ids)
        state, _ = accumulator.apply_grad(state, grad, accumulator.global_step(state))
        state, slices = accumulator.take_grad(state, 2)
        return (js.apply_updates(table, -0.1 * slices), state), slices.indices

    run = fast_jit(lambda carry, ids: lax.scan(round_, carry, ids)[0])
    table, state = run((TABLE, accumulator.init()), IDS_OF)
    wanted = np.array(TABLE)
    for one, two in (IDS_OF[:2], IDS_OF[2:4]):
        grads = [np.asarray(jax.grad(loss)(jnp.asarray(wanted), ids)) for ids in (one, two)]
        holders = sum(np.isin(np.arange(V), ids).astype(np.float32) for ids in (one, two))
        wanted = wanted - np.float32(0.1) * sum(grads) / np.maximum(holders, 1)[:, None]
    assert_close(table, jnp.asarray(wanted))
    assert (int(state.global_step), int(state.num_accumulated)) == (2, 1)


def test_many_accumulators_under_vmap():
    accumulator = js.accumulators.sparse_accumulator("float32", (9, 1), 4)
    rows = jnp.array([[1, 1, 8], [9, -1, 3], [4, 5, 6]])
    steps = jnp.array([0, 1, -1])

    def round_(state, rows, step):
        grad = js.IndexedSlices(jnp.ones((3, 1)), rows, (9, 1))
        state, accepted = accumulator.apply_grad(state, grad, step)
        return accumulator.take_grad(state, 1), accepted

    states = jax.vmap(lambda _: accumulator.init())(steps)
    many = fast_jit(jax.vmap(round_))(states, rows, steps)
    one = fast_jit(round_)
    one_by_one = [one(accumulator.init(), *each) for each in zip(rows, steps, strict=True)]
    chex.assert_trees_all_equal(many, jax.tree.map(lambda *x: jnp.stack(x), *one_by_one))
    np.testing.assert_array_equal(many[1], [True, True, False])
    np.testing.assert_array_equal(many[0][1].indices[0], [1, 8, 9, 9])


def test_the_accumulator_passes_through_jit():
    accumulator = js.accumulators.sparse_accumulator("float32", (9, 1), 4)
    state = jax.jit(lambda a: a.init())(accumulator)
    assert accumulator == js.accumulators.sparse_accumulator("float32", [9, 1], 4)
    assert jax.jit(lambda a, s: a.ready(s, 1))(accumulator, state) == False  # noqa: E712


def hundred_times(accumulator, grad):
    """A hundred equal gradients, and what is taken then."""

    @fast_jit
    def run(grad):
        def add(state, _):
            return accumulator.apply_grad(state, grad)[0], None

        state, _ = lax.scan(add, accumulator.init(), length=100)
        return accumulator.take_grad(state, 100)[1]

    return run(grad)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_summed_in_float32(dtype):
    grad = js.IndexedSlices(jnp.array([41.0, 0.25], dtype), jnp.array([3, 3]), (9,))
    slices = hundred_times(js.accumulators.sparse_accumulator(dtype, (9,), 2, "SUM"), grad)
    # In 16 bits 2048 + 1 is 2048.
    assert slices.dtype == dtype and slices.values[0] == jnp.array(4125.0, dtype)
    total = hundred_times(dense_accumulator(dtype, (), "SUM"), jnp.array(41.25, dtype))
    assert total == jnp.array(4125.0, dtype)


def test_wide_row_numbers_of_a_table_of_unknown_size():
    with jax.enable_x64(True):
        accumulator = js.accumulators.sparse_accumulator("float64", (None, 1), 3)
        grad = js.IndexedSlices(np.ones((3, 1)), np.array([2**40, -1, 2**40]))
        state, _ = apply_grad(accumulator, accumulator.init(), grad, 0)
        _, slices = take_grad(accumulator, state, 1)
    assert slices.dense_shape is None
    assert slices.indices.tolist() == [2**40, 2**63 - 1, 2**63 - 1]
    assert slices.values.ravel().tolist() == [2, 0, 0]


@pytest.mark.parametrize("reduction, wanted", [("MEAN", 2.0), ("SUM", 4.0)])
def test_the_dense_form(reduction, wanted):
    accumulator = dense_accumulator("float32", (2,), reduction)

    @jax.jit
    def run(grads, steps):
        state, accepted = lax.scan(
            lambda state, x: accumulator.apply_grad(state, *x),
            accumulator.init(),
            (grads, steps),
        )
        return state, accepted, accumulator.take_grad(state, 2)

    grads = jnp.array([[1.0, 1.0], [jnp.nan, 5.0], [3.0, 3.0]])
    before, accepted, (after, mean) = run(grads, jnp.array([0, -1, 4]))
    np.testing.assert_array_equal(accepted, [True, False, True])
    np.testing.assert_array_equal(mean, [wanted, wanted])
    assert (int(after.num_accumulated), int(after.global_step)) == (0, 1)
    same, nothing = take_grad(accumulator, before, 3)
    chex.assert_trees_all_equal(same, before)
    assert not nothing.any()


# --- errors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": "int32"}, r"sparse_accumulator\(dtype='int32'\)"),
        ({"dtype": "float64"}, r"needs jax.config.update\('jax_enable_x64', True\)"),
        ({"shape": None}, "its state has a static size; give"),
        ({"shape": (9, None)}, "where V alone may be None"),
        ({"capacity": 0}, r"capacity=0\): it must be a whole number from 1"),
        ({"capacity": 2.5}, r"capacity=2\.5"),
        ({"reduction_type": "max"}, 'wanted "MEAN" or "SUM"'),
    ],
)
def test_bad_arguments(change, message):
    good = {"dtype": "float32", "shape": (9, 1), "capacity": 4, "reduction_type": "SUM"}
    with pytest.raises(js.InvalidArgumentError, match=message):
        js.accumulators.sparse_accumulator(**{**good, **change})


@pytest.mark.parametrize("jit", [False, True])
def test_bad_gradients(jit):
    accumulator = js.accumulators.sparse_accumulator("float32", (9, 1), 4)
    state = accumulator.init()
    call = jax.jit(accumulator.apply_grad) if jit else accumulator.apply_grad
    row = jnp.ones((1, 1))
    good = js.IndexedSlices(row, [1], (9, 1))
    for grad, message in [
        (js.IndexedSlices(row, [1], (8, 1)), "expected shape dim 0 to be 9, got 8"),
        (js.IndexedSlices(jnp.ones((1, 2)), [1]), "expected values dim 1 to be 1, got 2"),
        (js.IndexedSlices(jnp.ones((1, 1, 1)), [1]), "expected values rank 2, got 3"),
        (good.astype("bfloat16"), "expected values of dtype float32, got bfloat16; cast"),
    ]:
        with pytest.raises(js.InvalidArgumentError, match=message):
            call(state, grad)
    with pytest.raises(TypeError, match="dense_accumulator"):
        call(state, row)
    with pytest.raises(TypeError, match=r"jslices\.tree\.map"):
        call(state, jax.tree.map(lambda x: x * 0.5, good))
    for number in (0, -1):
        with pytest.raises(js.InvalidArgumentError, match="must be positive"):
            jax.jit(lambda s, n=number: accumulator.take_grad(s, n))(state)
    with pytest.raises(js.InvalidArgumentError, match=r"expected \[2\], got \[3\]"):
        dense_accumulator("float32", (2,)).apply_grad(None, jnp.ones(3))
    with pytest.raises(js.InvalidArgumentError, match="static size"):
        dense_accumulator("float32", (2, None))
