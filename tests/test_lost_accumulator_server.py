"""Servers and clients that are frozen, killed, cut off or strange keep nobody waiting."""

import contextlib
import itertools
import multiprocessing
import operator
import os
import pathlib
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import slow_unless

from jslices.accumulators import (
    ConditionalAccumulator,
    DeadlineExceededError,
    SparseConditionalAccumulator,
    UnavailableError,
    connect,
    serve,
)

ROOT = pathlib.Path(__file__).parent.parent
LONG = 300  # seconds; nothing here should take them, on a busy machine either
TOKEN = "token"
SLACK = 10  # seconds that a busy machine may add

#: A process that serves until it is told to stop.
SERVER = """
import sys
from jslices.accumulators import ConditionalAccumulator, SparseConditionalAccumulator, serve
sums = SparseConditionalAccumulator("float32", reduction_type="SUM")
objects = {"sums": sums, "means": ConditionalAccumulator("float32")}
with serve(objects, sys.argv[1], "token") as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


class Server:
    """Another process that serves."""

    def __init__(self, address="127.0.0.1:0"):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.address = self.process.stdout.readline().strip()

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def elsewhere():
    """One server for several tests: to start it takes a second."""
    server = Server()
    yield server
    server.end()


@contextlib.contextmanager
def frozen(server):
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@pytest.fixture
def served():
    sums = SparseConditionalAccumulator("float32", reduction_type="SUM")
    with serve({"sums": sums}, "127.0.0.1:0", TOKEN) as server:
        yield server, sums


def until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Call(threading.Thread):
    """A call in a thread of its own, which has a connection of its own."""

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self.call = lambda: function(*args, **kwargs)
        self.start()

    def run(self):
        self.result = self.error = None
        began = time.monotonic()
        try:
            self.result = self.call()
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - began

    def ended(self):
        self.join(LONG)
        assert not self.is_alive()
        return self


def quick_but(cases, *slow):
    """Names as cases of a test, some of which are slow."""
    return slow_unless([(name,) for name in cases], lambda case: case[0] not in slow)


def assert_lost(call, address, timeout):
    """It ended in time and in an error that names the server and says what to do."""
    assert call.ended().seconds < timeout + SLACK
    assert isinstance(call.error, UnavailableError), call.error
    assert address in str(call.error)


# --- the server -----------------------------------------------------------------------


def test_no_call_waits_for_a_frozen_server(elsewhere):
    client = connect(elsewhere.address, TOKEN, timeout=1)
    sums, means = client["sums"], client["means"]
    large = np.ones((30_000, 250), "f4")  # 30 MB, more than a socket holds
    calls = [
        lambda: sums.take_grad(1, timeout=0),
        lambda: sums.take_indexed_slices_grad(1, timeout=0),
        lambda: sums.apply_grad(np.arange(30_000), large),
        lambda: sums.num_accumulated(),
        lambda: connect(elsewhere.address, TOKEN, timeout=1),
    ]
    barrier = threading.Barrier(len(calls) + 1)

    def when_frozen(call):
        sums.num_accumulated()  # so that this thread is connected
        barrier.wait(), barrier.wait()
        call()

    started = [Call(sums.take_grad, 1), *(Call(when_frozen, call) for call in calls)]
    barrier.wait()
    with frozen(elsewhere):
        barrier.wait()
        started += map(Call, calls)  # without a connection
        with pytest.raises(UnavailableError, match=r"it is gone, frozen"):
            means.apply_grad([1.0])
        for call in started:
            assert_lost(call, elsewhere.address, 1)
    # It goes on; what was given up was carried out wholly or not at all.
    means.apply_grad([3.0])
    assert means.take_grad(1, timeout=LONG).tolist() in ([3.0], [2.0])


@pytest.mark.slow
def test_no_call_waits_for_a_frozen_server_to_empty_a_unix_socket(tmp_path):
    server = Server(f"unix:{tmp_path}/socket")
    try:
        sums = connect(server.address, TOKEN, timeout=1)["sums"]
        with frozen(server):
            calls = [
                Call(sums.apply_grad, np.arange(30_000), np.ones((30_000, 25), "f4")),
                Call(sums.take_grad, 1),
                Call(sums.num_accumulated),
            ]
            for call in calls:
                assert_lost(call, server.address, 1 + 4)  # 3 MB
        assert sums.num_accumulated() in (0, 1)
    finally:
        server.end()


def test_who_waits_longer_than_the_timeout_is_kept_by_signs_of_life(elsewhere):
    means = connect(elsewhere.address, TOKEN, timeout=1)["means"]
    waits = Call(means.take_grad, 1)
    with pytest.raises(DeadlineExceededError, match="0 have come"):
        means.take_grad(1, timeout=1.5)
    means.apply_grad([1.0, 2.0], local_step=means.global_step())
    assert waits.ended().result.tolist() == [1, 2]
    assert waits.seconds > 1.5


@pytest.mark.slow
def test_a_killed_server():
    server = Server()
    try:
        sums = connect(server.address, TOKEN)["sums"]
        waits = Call(sums.take_grad, 1)
        assert sums.num_accumulated() == 0
    finally:
        server.end()
    assert_lost(waits, server.address, 0)
    calls = Call(sums.num_accumulated), Call(connect, server.address, TOKEN)
    for call in calls:
        assert_lost(call, server.address, 0)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "unix:socket"])
def test_stand_ins_find_a_server_that_was_started_again(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    objects = {"means": ConditionalAccumulator("float32")}
    with serve(objects, address, TOKEN) as server:
        means = connect(server.address, TOKEN)["means"]
        means.apply_grad([1.0])
    with pytest.raises(UnavailableError, match="no answer from"):
        means.num_accumulated()
    with serve(objects, server.address, TOKEN):
        assert means.num_accumulated() == 1
    with serve({"another": means}, server.address, TOKEN):
        with pytest.raises(KeyError, match="means"):
            means.num_accumulated()


@contextlib.contextmanager
def listening(converse):
    """The address of one who does ``converse(connection)`` with whoever connects."""

    def accept():
        with contextlib.suppress(OSError):
            while True:
                Call(converse, listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Call(accept)
        yield "{}:{}".format(*listener.getsockname())
        listener.shutdown(socket.SHUT_RDWR)


def trickle(end, data):
    for i in range(len(data)):
        end.sendall(data[i : i + 1])
        time.sleep(0.05)


SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # the first frame of HTTP/2, empty
STRANGERS = {
    "silent": lambda end: end.recv(1) and end.recv(1),
    "hangs up": lambda end: end.close(),
    "another protocol": lambda end: end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "greets and is silent": lambda end: end.sendall(SETTINGS) or time.sleep(5),
    "a huge frame": lambda end: end.sendall(SETTINGS + 3 * b"\xff" + bytes(6)),
    "slow": lambda end: trickle(end, 99 * SETTINGS),
}


@pytest.mark.parametrize(["how"], quick_but(STRANGERS, "slow"))
def test_who_listens_is_no_server(how):
    with listening(STRANGERS[how]) as address:
        assert_lost(Call(connect, address, TOKEN, timeout=1), address, 1)


def to(address):
    """A socket that is connected to ``"host:port"``."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


class Network:
    """Passes on what a client and a server say, as long as ``pass_on`` says how."""

    def __init__(self, server):
        self.server = server
        self.through()

    def through(self):
        self.to_server = self.to_client = lambda end, data: end.sendall(data)

    def cut(self):
        self.to_server = self.to_client = lambda end, data: None

    def __call__(self, client):
        with client, to(self.server) as server:
            answers = Call(self.carry, server, client, "to_client")
            self.carry(client, server, "to_server")
            answers.ended()

    def carry(self, source, target, way):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                getattr(self, way)(target, data)
            target.shutdown(socket.SHUT_RDWR)


def test_a_network_that_is_cut_and_mended(served):
    server, sums = served
    network = Network(server.address)
    with listening(network) as address:
        remote = connect(address, TOKEN, timeout=1)["sums"]
        remote.set_global_step(7)
        network.cut()
        call = Call(remote.num_accumulated)
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="apply_grad was carried out or not"):
            remote.apply_grad([1], [[1.0]], None, 7)
        assert time.monotonic() - began < 1 + SLACK
        assert_lost(call, address, 1)
        network.through()
        remote.apply_grad([1], [[1.0]], None, 7)
        assert (remote.num_accumulated(), remote.global_step()) == (1, 7)
    assert sums.take_grad(1).values.tolist() == [[1.0]]


def test_a_late_answer_is_not_taken_for_that_to_the_next_call(served):
    server, _ = served
    network = Network(server.address)
    late = threading.Event()
    with listening(network) as address:
        remote = connect(address, TOKEN, timeout=1)["sums"]
        remote.set_global_step(7)

        def hold(end, data):
            late.wait(LONG)
            end.sendall(data)

        network.to_client = hold
        with pytest.raises(UnavailableError, match="global_step was carried out or not"):
            remote.global_step()
        network.through()
        late.set()
        assert remote.num_accumulated() == 0


STRANGE_ANSWERS = {
    "slow": trickle,
    "half": lambda end, data: end.sendall(data[: len(data) // 2]),
    "no message": lambda end, data: end.sendall(b"x" + data),
    "no answer": lambda end, data: end.sendall(data[:9] + bytes(len(data) - 9)),
    "greetings alone": lambda end, data: trickle(end, 100 * SETTINGS),
}


@pytest.mark.parametrize(["how"], quick_but(STRANGE_ANSWERS, "half", "greetings alone"))
def test_strange_answers(served, how):
    server, sums = served
    network = Network(server.address)
    sums.apply_grad(np.arange(100), np.ones((100, 1), "f4"))
    with listening(network) as address:
        remote = connect(address, TOKEN, timeout=1)["sums"]
        remote.num_stale()
        network.to_client = STRANGE_ANSWERS[how]
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=re.escape(address)):
            remote.take_grad(1, timeout=0)
        assert time.monotonic() - began < 1 + SLACK


@pytest.mark.slow
def test_no_gradient_is_lost_or_counted_twice_when_the_server_freezes_now_and_then():
    server, rng = Server(), np.random.default_rng(0)
    numbers, acknowledged, end = itertools.count(), [], time.monotonic() + 8

    def work():  # every gradient has a row of its own
        while time.monotonic() < end:
            row = next(numbers)
            with contextlib.suppress(UnavailableError):
                remote = connect(server.address, TOKEN, timeout=1)["sums"]
                remote.apply_grad([row], [[1.0]])
                acknowledged.append(row)

    try:
        workers = [Call(work) for _ in range(4)]
        while time.monotonic() < end:
            time.sleep(0.3 * rng.random())
            with frozen(server):
                time.sleep(rng.choice([0.1, 1.1]))
        for worker in workers:
            assert worker.ended().error is None
        taken = connect(server.address, TOKEN)["sums"].take_grad(1)
    finally:
        server.end()
    assert len(acknowledged) > 10 and set(acknowledged) <= set(taken.indices.tolist())
    assert np.all(taken.values == 1)


# --- the clients ----------------------------------------------------------------------


TAKER = """
import sys
from jslices.accumulators import connect
connect(*sys.argv[1:])["means"].take_grad(1)
"""


@pytest.mark.slow
def test_a_server_closes_though_a_frozen_client_reads_nothing():
    means = ConditionalAccumulator("float32")
    with serve({"means": means}, token=TOKEN) as server:
        command = [sys.executable, "-c", TAKER, server.address, TOKEN]
        client = subprocess.Popen(command, cwd=ROOT)
        try:
            until(means.num_waiting)
            os.kill(client.pid, signal.SIGSTOP)
            means.apply_grad(np.ones(5_000_000, "f4"))
            until(lambda: not means.num_waiting())
            began = time.monotonic()
            server.close()
            assert time.monotonic() - began < 5 + SLACK
        finally:
            client.kill()
            client.wait()


def test_silent_connections_hold_no_threads_and_keep_nobody_out(served):
    server, _ = served
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(to(server.address))
        assert connect(server.address, TOKEN)["sums"].num_accumulated() == 0
        assert threading.active_count() < before + 20


@pytest.mark.slow
def test_a_handshake_has_an_end(served):
    server, _ = served
    with to(server.address) as silent, to(server.address) as slow:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while True:
                trickle(slow, b"PRI ")
        while silent.recv(100):
            pass
        assert time.monotonic() - began < 10 + SLACK


def test_a_client_that_stalls_in_the_middle_of_a_gradient_holds_up_no_other(served):
    server, _ = served
    network = Network(server.address)
    with listening(network) as address:
        remote = connect(address, TOKEN)["sums"]
        remote.num_stale()
        network.to_server = lambda end, data: (end.sendall(data), network.cut())
        rows = np.arange(100_000)
        Call(remote.apply_grad, rows, np.ones((100_000, 10), "f4"))
        other = connect(server.address, TOKEN)["sums"]
        other.apply_grad([1], [[1.0]])
        assert other.take_grad(1, timeout=LONG).values.tolist() == [[1.0]]
        server.close()  # hangs up on both


def test_what_is_served_may_raise_and_return_anything():
    class Own(Exception):  # which no other module can find
        pass

    class Box:
        def raises(self):
            raise Own("a reason")

        def returns(self):
            return threading.Lock()

    with serve({"box": Box()}, token=TOKEN) as server:
        client = connect(server.address, TOKEN)
        box = client["box"]
        with pytest.raises(RuntimeError, match="Own: a reason"):
            box.raises()
        with pytest.raises(TypeError, match=r"lock object .* cannot be sent: numbers"):
            box.returns()
        with pytest.raises(TypeError, match="cannot be sent"):
            box.raises(threading.Lock())
        with pytest.raises(AttributeError, match="nothing"):
            box.nothing()
        assert server.address in repr(box)
        with pytest.raises(RuntimeError, match="only be shared"):
            pickle.dumps(client)  # the token stays here


@pytest.mark.slow
def test_a_fork_has_no_connection(served, monkeypatch):
    server, _ = served
    sums = connect(server.address, TOKEN)["sums"]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(RuntimeError, match="does not survive a fork: connect in the new"):
        sums.num_accumulated()


@pytest.mark.slow
def test_a_process_that_is_started_may_be_given_a_stand_in(served):
    server, sums = served
    remote = connect(server.address, TOKEN)["sums"]
    apply = operator.methodcaller("apply_grad", [1], [[1.0]])
    spawned = multiprocessing.get_context("spawn").Process(target=apply, args=(remote,))
    spawned.start()
    spawned.join()
    assert (spawned.exitcode, sums.num_accumulated()) == (0, 1)
