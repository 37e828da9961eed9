"""Accumulators across processes: the same errors, no gradient by halves, no secret."""

import ast
import json
import multiprocessing
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_flags import quick_flags

import jslices as js
from jslices.accumulators import (
    CancelledError,
    ConditionalAccumulator,
    DeadlineExceededError,
    SparseConditionalAccumulator,
    UnavailableError,
    connect,
    serve,
)

ROOT = pathlib.Path(__file__).parent.parent
LONG = 300  # seconds; nothing here should take them, on a busy machine either

#: A worker process connects to where it is told and runs the code that it is sent.
WORKER = """
import json, sys, numpy as np, jslices as js
for line in sys.stdin:
    port, key, code = json.loads(line)
    client = js.accumulators.connect(("127.0.0.1", port), bytes.fromhex(key))
    exec(code)
    sys.stdout.flush()
"""


class Box:
    """Something else that is served."""

    def __init__(self):
        self.items = []

    def put(self, *, item):
        self.items.append(item)
        return len(self.items)

    def _hidden(self):
        return "secret"


@pytest.fixture
def served():
    sums = SparseConditionalAccumulator("float32", (6, 2), reduction_type="SUM")
    means = ConditionalAccumulator("float32", (2,))
    with serve({"sums": sums, "means": means, "box": Box()}) as server:
        yield server, sums, means


class Worker:
    """Another process."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def start(self, server, code):
        """Runs ``code`` there, with ``client``; returns when it is connected."""
        order = [
            server.address[1],
            server.authkey.hex(),
            "print('ready', flush=True)\n" + code,
        ]
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        assert self.answer() == "ready\n"

    def answer(self):
        return self.process.stdout.readline()

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def worker():
    """One process for several tests: to start it takes a second."""
    process = Worker()
    yield process
    process.kill()


def until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_same_methods_and_errors(served):
    server, sums, _ = served
    client = connect(server.address, server.authkey)
    remote, remote_means = client["sums"], client["means"]
    slices = js.IndexedSlices(jnp.ones((3, 2)), jnp.array([1, 1, 6]), (6, 2))
    remote.apply_indexed_slices_grad(slices)
    remote.apply_grad(jnp.array([5]), [[1.0, 2.0]], (6, 2), local_step=jnp.array(3))
    assert (remote.num_accumulated(), sums.num_accumulated()) == (2, 2)
    with pytest.raises(js.InvalidArgumentError, match="index is 6 exceeded 6"):
        remote.apply_grad([6], [[1.0, 2.0]])
    with pytest.raises(js.InvalidArgumentError, match="must be positive, but was 0"):
        remote.take_grad(0)
    with pytest.raises(js.InvalidArgumentError, match="pass size=2"):
        remote.take_indexed_slices_grad(1, size=1)
    with pytest.raises(DeadlineExceededError, match="2 have come"):
        remote.take_grad(3, timeout=0)
    taken = remote.take_indexed_slices_grad(2, size=3)
    np.testing.assert_array_equal(taken.indices, [1, 5, 6])
    np.testing.assert_array_equal(taken.values, [[2, 2], [1, 2], [0, 0]])
    assert remote.global_step() == 1
    remote.apply_grad("stale and not looked at", None)
    assert remote.num_stale() == 1
    remote.set_global_step(np.int64(7))
    assert sums.global_step() == 7

    remote_means.apply_grad(jnp.array([1.0, 2.0]))
    remote_means.apply_grad([3.0, 4.0], local_step=0)
    np.testing.assert_array_equal(remote_means.take_grad(2, timeout=LONG), [2, 3])
    with pytest.raises(TypeError, match="inside jit use the pure form"):
        jax.jit(remote_means.apply_grad)(jnp.ones(2))
    assert client["box"].put(item="a") == 1
    assert client["box"].put(item="b") == 2
    with pytest.raises(AttributeError):
        client["box"]._hidden()
    with pytest.raises(KeyError, match=r"'tables' is not served; there are \['box', 'm"):
        client["tables"]
    remote.close()
    with pytest.raises(CancelledError, match="ApplyGrad"):
        remote.apply_grad([0], [[1.0, 2.0]], None, 9)


def test_only_those_with_the_key_on_this_machine(served):
    server, *_ = served
    assert server.address[0] == "127.0.0.1" and len(server.authkey) == 32
    with pytest.raises(multiprocessing.AuthenticationError):
        connect(server.address, b"guessed")
    with serve({"box": Box()}) as other:
        assert other.authkey != server.authkey
    with pytest.raises(UnavailableError, match="nobody serves accumulators at"):
        connect(other.address, other.authkey)
    # Who connects and says nothing keeps nobody else out.
    with socket.create_connection(server.address):
        assert connect(server.address, server.authkey)["sums"].num_accumulated() == 0


def test_bad_arguments():
    for objects in ({}, {1: Box()}):
        with pytest.raises(js.InvalidArgumentError, match="serve wants objects by name"):
            serve(objects)
    with pytest.raises(js.InvalidArgumentError, match="authkey must be bytes, not str"):
        serve({"box": Box()}, authkey="secret")


def test_when_the_server_closes(served):
    server, sums, _ = served
    remote = connect(server.address, server.authkey)["sums"]
    remote.apply_grad([1], [[1.0, 2.0]])
    server.close()
    server.close()
    with pytest.raises(UnavailableError, match=r"nobody serves accumulators at .*refused"):
        remote.num_accumulated()
    assert sums.take_grad(1).indices == [1]  # goes on living here


def test_a_waiting_process_is_woken(served, worker):
    server, sums, _ = served
    worker.start(server, "print(client['sums'].take_grad(2).values.tolist())")
    until(lambda: sums.num_waiting())
    sums.apply_grad([1], [[1.0, 2.0]])
    sums.apply_grad([1], [[1.0, 3.0]])
    assert ast.literal_eval(worker.answer()) == [[2.0, 5.0]]


def test_closing_the_server_ends_a_waiting_process(served, worker):
    server, sums, _ = served
    code = """
try:
    client["sums"].take_grad(1)
except js.accumulators.UnavailableError as error:
    print(error)
"""
    worker.start(server, code)
    until(lambda: sums.num_waiting())
    server.close()
    assert "is gone" in worker.answer()
    until(lambda: not sums.num_waiting())


BUSY = """
while True:
    client["sums"].apply_grad(np.arange(6), np.ones((6, 2), "f4"), None, 10**9)
"""


@pytest.mark.slow
def test_a_killed_process_takes_nothing_and_applies_wholly_or_not_at_all(served):
    server, sums, means = served
    worker = Worker()
    try:
        code = """
import threading
threading.Thread(target=client["means"].take_grad, args=(1,), daemon=True).start()
"""
        worker.start(server, code + BUSY)
        until(lambda: means.num_waiting() and sums.num_accumulated() > 10)
    finally:
        worker.kill()
    means.apply_grad([1.0, 2.0])
    assert means.take_grad(1, timeout=LONG).tolist() == [1, 2]
    taken = sums.take_grad(10)
    assert len(set(taken.values.ravel().tolist())) == 1 and taken.values[0, 0] > 10


@pytest.mark.slow
def test_processes_apply_and_one_is_killed_while_it_does(served):
    server, sums, _ = served
    workers = Worker(), Worker()
    try:
        for worker in workers:
            worker.start(server, BUSY)
        until(lambda: sums.num_accumulated() > 50)
        workers[0].kill()
        count = sums.num_accumulated()
        until(lambda: sums.num_accumulated() > count + 50)  # the other goes on
    finally:
        workers[0].kill(), workers[1].kill()
    taken = sums.take_grad(100)
    assert len(set(taken.values.ravel().tolist())) == 1 and taken.values[0, 0] > 100


ONE = "--xla_force_host_platform_device_count=1"
TWO_TOPICS = "sun sky cloud rain wind storm ", "fork knife spoon plate cup bowl "


@pytest.mark.slow
def test_the_example_trains_as_well_as_one_process_though_a_worker_dies(tmp_path):
    rng = np.random.default_rng(0)
    text = [" ".join(rng.choice(t.split(), 8)) for t in TWO_TOPICS * 400]
    (tmp_path / "text.txt").write_text(" ".join(text))
    options = {
        "--text": tmp_path,
        "--words": 12,
        "--dim": 8,
        "--steps": 120,
        "--batch": 32,
        "--learning-rate": 0.02,
        "--kill-one-at": 40,
    }
    flat = [str(x) for pair in options.items() for x in pair]
    done = subprocess.run(
        [sys.executable, "examples/asynchronous_training.py", *flat, "--compare"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LONG,
        # One device is enough, and the program is run as from a checkout.
        env={**os.environ, "XLA_FLAGS": f"{quick_flags()} {ONE}", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "step 40: worker 0 is killed" in done.stdout
    before, together, alone = map(float, re.findall(r"loss[ \w]*: (\d+\.\d+)", done.stdout))
    assert alone < 0.75 * before
    assert together < alone + 0.03 * (before - alone)
    stale = re.search(r"dropped: (\d+) of near, (\d+) of far", done.stdout)
    assert stale and int(stale[1]) + int(stale[2]) > 0
