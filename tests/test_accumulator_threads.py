"""The blocking accumulators under many threads: totals, turns, and nobody forgotten."""

import contextlib
import random
import threading
import time

import numpy as np
import pytest

from jslices.accumulators import (
    CancelledError,
    ConditionalAccumulator,
    DeadlineExceededError,
    SparseConditionalAccumulator,
)

LONG = 120  # seconds; nothing here should take one
NEVER_STALE = 10**9


def start(*functions):
    """Runs each in a thread; returns a function that joins them and raises their errors."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()

    def finish():
        end = time.monotonic() + LONG
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads), "somebody hangs"
        if errors:
            raise errors[0]

    return finish


def until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("dense", [False, True])
def test_forty_appliers_and_eight_takers_lose_nothing(dense):
    rows, width, each = 50, 3, 100
    if dense:
        sums = ConditionalAccumulator("float64", (rows, width), reduction_type="SUM")
    else:
        sums = SparseConditionalAccumulator("float64", (rows, width), reduction_type="SUM")
    applied, taken = np.zeros((40, rows, width)), np.zeros((8, rows, width))
    counts, done = [0] * 8, threading.Event()

    def applier(number):
        rng = np.random.default_rng(number)

        def run():
            for _ in range(each):
                indices = rng.integers(0, rows, 5)
                values = rng.integers(-9, 9, (5, width)).astype(float)
                gradient = np.zeros((rows, width))
                np.add.at(gradient, indices, values)
                applied[number] += gradient
                if dense:
                    sums.apply_grad(gradient, NEVER_STALE)
                else:
                    sums.apply_grad(indices, values, None, NEVER_STALE)

        return run

    def taker(number):
        def run():
            while not done.is_set():
                with contextlib.suppress(DeadlineExceededError):
                    keep(number, sums.take_grad(1 + number, timeout=0.02))

        return run

    def keep(number, gradient):
        counts[number] += 1
        if dense:
            taken[number] += gradient
        else:
            taken[number][gradient.indices] += gradient.values

    takers = start(*map(taker, range(8)))
    start(*map(applier, range(40)))()
    done.set()
    takers()
    if sums.num_accumulated():
        keep(0, sums.take_grad(1))
    np.testing.assert_array_equal(applied.sum(axis=0), taken.sum(axis=0))
    assert sums.global_step() == sum(counts) > 0
    assert sums.num_accumulated() == sums.num_stale() == 0


def test_forty_appliers_then_one_take():
    """As in TensorFlow: the mean of forty, exactly, whoever came first."""
    mean = SparseConditionalAccumulator("float64", (40, 1))

    def applier(i):
        return lambda: mean.apply_grad([0, i], [[float(i)], [1.0]] if i else [[0.0], [0.0]])

    join = start(*map(applier, range(40)))
    taken = mean.take_grad(40, timeout=LONG)
    join()
    np.testing.assert_array_equal(taken.indices, np.arange(40))
    assert taken.values[0] == sum(range(40)) / 40 and (taken.values[1:] == 1).all()


def test_ten_waiting_takes_get_one_gradient_each_in_turn():
    mean, got = SparseConditionalAccumulator("float32", (20, 1)), []
    joins = []
    for i in range(10):
        joins.append(start(lambda i=i: got.append((i, mean.take_grad(1).values.item()))))
        until(lambda i=i: mean.num_waiting() == i + 1)
    for step in range(10):
        mean.apply_grad([0], [[float(step)]], local_step=step)
        until(lambda step=step: mean.global_step() == step + 1)
    for join in joins:
        join()
    assert sorted(got) == [(i, float(i)) for i in range(10)]


def test_first_come_first_served():
    """A taker of one waits behind a taker of three, though one gradient is there."""
    mean, served = ConditionalAccumulator("float32"), []
    first = start(lambda: served.append(("three", mean.take_grad(3, timeout=LONG))))
    until(lambda: mean.num_waiting() == 1)
    second = start(lambda: served.append(("one", mean.take_grad(1, timeout=LONG))))
    until(lambda: mean.num_waiting() == 2)
    mean.apply_grad([1.0])
    mean.apply_grad([2.0])
    time.sleep(0.05)
    assert not served and mean.num_accumulated() == 2
    mean.apply_grad([6.0])
    first()
    assert served == [("three", 3.0)]
    mean.apply_grad([5.0], local_step=1)
    second()
    assert served[1] == ("one", 5.0)


def test_who_gives_up_lets_the_next_one_through():
    mean, served = ConditionalAccumulator("float32"), []
    gone = threading.Event()
    mean.apply_grad([4.0])

    def impatient():
        with pytest.raises(DeadlineExceededError, match=r"0\.5 s for 3 gradients; 1 have"):
            mean.take_grad(3, timeout=0.5)
        gone.set()

    first = start(impatient)
    until(lambda: mean.num_waiting() == 1 or gone.is_set())  # if that was not seen
    second = start(lambda: served.append(mean.take_grad(1, timeout=LONG)))
    first()
    second()
    assert served == [4.0]


@pytest.mark.parametrize(
    "kind",
    [ConditionalAccumulator, SparseConditionalAccumulator],
)
def test_close_wakes_all_who_wait(kind):
    closing, woken = kind("float32"), []

    def wait():
        with pytest.raises(CancelledError, match="TakeGrad operation was cancelled"):
            closing.take_grad(1)
        woken.append(1)

    join = start(*[wait] * 5)
    until(lambda: closing.num_waiting() == 5)
    closing.close()
    join()
    assert len(woken) == 5 and closing.num_waiting() == 0
    closing.close()
    gradient = [[1.0]] if kind is ConditionalAccumulator else [[0], [1.0]]
    with pytest.raises(CancelledError, match="ApplyGrad operation was cancelled"):
        closing.apply_grad(*gradient)
    with pytest.raises(CancelledError, match="TakeGrad"):
        closing.take_grad(1, timeout=0)
    assert closing.num_accumulated() == 0  # still to be asked


@pytest.mark.parametrize("seed", range(3))
def test_no_waiter_is_ever_lost(seed):
    """Takers with random needs and patience, appliers with random delays."""
    sums = SparseConditionalAccumulator("float64", (4, 1), reduction_type="SUM")
    served, finished = [0] * 8, threading.Event()

    def applier(number):
        rng = random.Random(100 * seed + number)

        def run():
            while not finished.is_set():
                time.sleep(rng.random() * 0.002)
                sums.apply_grad([rng.randrange(4)], [[1.0]], local_step=NEVER_STALE)

        return run

    def taker(number):
        rng = random.Random(900 * seed + number)

        def run():
            while served[number] < 15:
                time.sleep(rng.random() * 0.002)
                patience = rng.choice([None, 0, 0.001, 0.01])
                with contextlib.suppress(DeadlineExceededError):
                    sums.take_grad(rng.randrange(1, 6), timeout=patience)
                    served[number] += 1

        return run

    appliers = start(*map(applier, range(6)))
    try:
        start(*map(taker, range(8)))()
    finally:
        finished.set()
    appliers()
    assert sums.global_step() == 8 * 15 and sums.num_waiting() == 0


def test_a_shared_name_is_shared_by_threads():
    def applier():
        mine = SparseConditionalAccumulator("float32", shared_name="of threads")
        mine.apply_grad([1], [[1.0]])

    ours = SparseConditionalAccumulator(
        "float32", shared_name="of threads", reduction_type="MEAN"
    )
    start(*[applier] * 20)()
    assert ours.num_accumulated() == 20
    assert ours.take_grad(20).values == 1
