"""Accumulators across processes: the same errors, no gradient by halves, no secret."""

import ast
import json
import os
import pathlib
import pickle
import re
import socket
import stat
import subprocess
import sys
import time
import types
from concurrent import futures

import grpc
import jax
import jax.numpy as jnp
import ml_dtypes
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
    address, token, code = json.loads(line)
    client = js.accumulators.connect(address, token)
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

    def echo(self, value):
        return value

    def leave(self):
        sys.exit("not from here")

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
        order = [server.address, server.token, "print('ready', flush=True)\n" + code]
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
    client = connect(server.address, server.token)
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
    with pytest.raises(RuntimeError, match="SystemExit: not from here"):
        client["box"].leave()
    with pytest.raises(AttributeError):
        client["box"]._hidden()
    with pytest.raises(KeyError, match=r"'tables' is not served; there are \['box', 'm"):
        client["tables"]
    remote.close()
    with pytest.raises(CancelledError, match="ApplyGrad"):
        remote.apply_grad([0], [[1.0, 2.0]], None, 9)


def test_bad_arguments():
    for objects in ({}, {1: Box()}):
        with pytest.raises(js.InvalidArgumentError, match="serve wants objects by name"):
            serve(objects)
    with pytest.raises(js.InvalidArgumentError, match="must be ASCII text, got bytes"):
        serve({"box": Box()}, token=b"secret")
    for address in (("127.0.0.1", 0), "socket", "127.0.0.1:http", None):
        for call in (serve, connect):
            if (address, call) != (None, serve):
                with pytest.raises(js.InvalidArgumentError, match="write 'unix:/path/of"):
                    call({"box": Box()}, address) if call is serve else call(address)
    for timeout in (None, 0.5, float("nan"), float("inf"), "1"):
        with pytest.raises(js.InvalidArgumentError, match="must be seconds, from 1 to 1,0"):
            connect("127.0.0.1:1", timeout=timeout)


def test_what_messages_hold(served):
    server, *_ = served
    echo = connect(server.address, server.token)["box"].echo
    values = [
        None,
        True,
        -(10**30),
        0.1,
        "\u00e4\x00",
        [],
        (1, [(), {}]),
        {"a": {"b": ("c",)}},
    ]
    assert echo(values) == values
    assert [type(x) for x in echo(values)] == [type(x) for x in values]
    arrays = [
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        jnp.ones((2, 0, 3), "bfloat16"),
        np.array([1.5, np.nan], ml_dtypes.float8_e4m3fn),
        np.array([True, False]),
        np.complex64(1j),
    ]
    for array, same in zip(arrays, echo(arrays), strict=True):
        assert same.dtype.name == array.dtype.name and same.flags.writeable
        assert same.shape == array.shape and str(same) == str(np.asarray(array))
    for value in (b"bytes", {1: 2}, {1}, np.array(["text"]), np.array([None]), Box()):
        with pytest.raises(TypeError, match="cannot be sent: numbers, text, None"):
            echo(value)


# --- who is answered ------------------------------------------------------------------


def raw(server, message=b"", method="/jslices.accumulators/1", token=None):
    """What gRPC says to a message; its error's code and text."""
    kinds = grpc.LocalConnectionType
    kind = kinds.UDS if server.address.startswith("unix:") else kinds.LOCAL_TCP
    metadata = [("authorization", f"Bearer {token}")] if token else None
    with grpc.secure_channel(
        server.address, grpc.local_channel_credentials(kind)
    ) as channel:
        try:
            return channel.unary_unary(method)(message, metadata=metadata, timeout=LONG)
        except grpc.RpcError as error:
            return error.code().name, error.details()


def test_a_port_answers_those_with_its_token():
    box = Box()
    with serve({"box": box}, "127.0.0.1:0") as server, serve({"box": box}) as other:
        assert re.fullmatch(r"127\.0\.0\.1:\d+", server.address) and len(server.token) == 64
        assert connect(server.address, server.token)["box"].put(item=1) == 1
        for token in ("", "guessed", server.token[:-1]):
            with pytest.raises(PermissionError, match="the token is missing, or another"):
                connect(server.address, token)
            assert raw(server, token=token)[0] == "UNAUTHENTICATED"
            assert (
                raw(server, method="/another/service", token=token)[0] == "UNAUTHENTICATED"
            )
        assert other.token == "" and connect(other.address)["box"].put(item=2) == 2
    with serve({"box": box}, "127.0.0.1:0") as again:
        assert again.token != server.token
    with pytest.raises(js.InvalidArgumentError, match="lets everybody in"):
        serve({"box": box}, "127.0.0.1:0", "")
    assert box.items == [1, 2]


def test_a_unix_socket_is_of_one_user(monkeypatch):
    with serve({"box": Box()}, token="both") as server:
        with pytest.raises(PermissionError, match="the token is missing"):
            connect(server.address)
        assert connect(server.address, "both")["box"].put(item=1) == 1
    with serve({"box": Box()}) as server:
        client = connect(server.address)
        path = server.address.removeprefix("unix:")
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
        for call in (client["box"].put, lambda item: connect(server.address)):
            with pytest.raises(PermissionError, match=f"belongs to user .*, not to {user}"):
                call(item=1)
    assert not os.path.exists(path)


def test_one_server_at_an_address(tmp_path):
    path = f"unix:{tmp_path}/socket"
    for address in ("127.0.0.1:0", path):
        with serve({"box": Box()}, address) as server:
            with pytest.raises(OSError, match=r"another server listens|it is in use"):
                serve({"box": Box()}, server.address)
            assert connect(server.address, server.token)["box"].put(item=1) == 1
    with socket.socket(socket.AF_UNIX) as left:  # by a server that was killed
        left.bind(f"{tmp_path}/socket")
    with serve({"box": Box()}, path) as server:
        assert connect(path)["box"].put(item=1) == 1
    for address in (f"unix:{tmp_path}/none/socket", f"unix:{tmp_path}/{'long' * 30}"):
        with pytest.raises(OSError, match=r"nothing can listen at .*: it is in use"):
            serve({"box": Box()}, address)


@pytest.mark.skipif(not socket.has_ipv6, reason="a Python without IPv6")
def test_addresses_of_ipv6():
    with serve({"box": Box()}, "[::1]:0") as server:
        assert server.address.startswith("[::1]:") and not server.address.endswith(":0")
        assert connect(server.address, server.token)["box"].put(item=1) == 1


def test_large_messages_and_other_versions_are_errors_that_say_so(served):
    server, *_ = served
    code, text = raw(server, method="/jslices.accumulators/2")
    assert code == "FAILED_PRECONDITION"
    assert "messages of version 1 are understood there, not /jslices.accumulators/2" in text
    small = [("grpc.max_receive_message_length", 1000)]
    large = np.zeros(1000)
    with serve({"box": Box()}, options=small) as server:
        echo = connect(server.address)["box"].echo
        with pytest.raises(
            js.InvalidArgumentError, match=r"larger.*; send fewer rows at o"
        ):
            echo(large)
        assert echo(1) == 1
    with serve({"box": Box()}) as server:
        box = connect(server.address, options=small)["box"]
        box.put(item=large)
        with pytest.raises(js.InvalidArgumentError, match="larger"):
            box.echo(large)
    sums = SparseConditionalAccumulator("float32")
    with serve({"sums": sums}) as server:
        remote = connect(server.address, options=small)["sums"]
        remote.apply_grad([1, 2, 3], np.ones((3, 100), "f4"))
        with pytest.raises(js.InvalidArgumentError, match="3 rows of 408 bytes are larger"):
            remote.take_grad(1)
        assert remote.num_accumulated() == 1  # nothing is lost


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_is_refused_and_does_not_run(served, tmp_path):
    server, *_ = served
    message = pickle.dumps(Trap(tmp_path / "trap"))
    head = len(message).to_bytes(4, "little")
    for sent in (message, head + message, (2).to_bytes(4, "little") + b"{}" + message):
        assert b"trap" not in (answer := raw(server, sent)) and b"Error" in answer
    # Nor does it in a client, whose server has been replaced.
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: message)
    handlers = [types.SimpleNamespace(service=lambda details: handler)]
    other = grpc.server(futures.ThreadPoolExecutor(1), handlers=handlers)
    local = grpc.local_server_credentials(grpc.LocalConnectionType.UDS)
    other.add_secure_port(f"unix:{tmp_path}/socket", local)
    other.start()
    with pytest.raises(UnavailableError, match="no answer from unix:"):
        connect(f"unix:{tmp_path}/socket")
    other.stop(None).wait()
    assert not (tmp_path / "trap").exists()
    pickle.loads(message).close()
    assert (tmp_path / "trap").exists()  # it would have


def test_nothing_in_the_package_unpickles():
    modules = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    package = pathlib.Path(js.__file__).parent
    for file in package.rglob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            names = [getattr(node, "module", None) or ""]
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            assert not modules & {name.partition(".")[0] for name in names}, file
        assert "allow_pickle=True" not in text, file


PAGE = (ROOT / "docs" / "workers.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the key and certificate that the page makes, here for localhost."""
    folder = tmp_path_factory.mktemp("certificates")
    (command,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
    command = command.replace("DNS:chief", "DNS:localhost")
    subprocess.run(command, shell=True, check=True, capture_output=True, cwd=folder)
    return folder


@pytest.fixture
def certificates(folder):
    return tuple((folder / f"chief.{kind}").read_bytes() for kind in ("key", "pem"))


def test_the_page_of_workers(folder, monkeypatch):  # workers.md
    monkeypatch.chdir(folder)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        block = block.replace('"0.0.0.0:5000"', '"localhost:0"')
        exec(block.replace('"chief:5000"', "server.address"), names)
        names["server"].close()
    assert names["grad"].indices[:2].tolist() == [3, 5]


def test_certificates_and_a_token(certificates):
    _, certificate = certificates
    theirs = grpc.ssl_server_credentials([certificates])
    mine = grpc.ssl_channel_credentials(certificate)
    with serve({"box": Box()}, "localhost:0", credentials=theirs) as server:
        client = connect(server.address, server.token, credentials=mine)
        assert client["box"].put(item=1) == 1
        with pytest.raises(PermissionError, match="the token is missing"):
            connect(server.address, credentials=mine)
        for others in (None, grpc.ssl_channel_credentials()):  # it is sent no token
            with pytest.raises(UnavailableError, match="no answer from localhost"):
                connect(server.address, server.token, credentials=others)


def test_certificates_of_clients(certificates):
    key, certificate = certificates
    theirs = grpc.ssl_server_credentials([certificates], certificate, True)
    with serve({"box": Box()}, "localhost:0", "", credentials=theirs) as server:
        mine = grpc.ssl_channel_credentials(certificate, key, certificate)
        assert connect(server.address, credentials=mine)["box"].put(item=1) == 1
        without = grpc.ssl_channel_credentials(certificate)
        with pytest.raises(UnavailableError, match="no answer from localhost"):
            connect(server.address, credentials=without)


@pytest.mark.slow
def test_without_grpc_the_server_says_what_to_install():
    code = """
import sys
sys.modules["grpc"] = None
import jslices as js
mean = js.accumulators.SparseConditionalAccumulator("float32")
for name, argument in ("serve", {"mean": mean}), ("connect", "h:1"):
    try:
        getattr(js.accumulators, name)(argument)
    except ImportError as error:
        print(error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=LONG)
    assert done.stdout.count('pip install ".[serve]"') == 2, done.stderr


# --- threads and processes ------------------------------------------------------------


def test_forty_appliers_and_eight_takers_lose_nothing():
    sums = SparseConditionalAccumulator("float32", (6, 1), reduction_type="SUM")
    with serve({"sums": sums}) as server:
        remote = connect(server.address, timeout=LONG)["sums"]
        with futures.ThreadPoolExecutor(48) as pool:
            takers = [pool.submit(remote.take_grad, 20) for _ in range(8)]
            applied = [
                pool.submit(remote.apply_grad, [i % 6], [[1.0]], None, 10**9)
                for _ in range(5)
                for i in range(40)
            ]
            for apply in applied:
                apply.result()
            while not all(taker.done() for taker in takers):
                remote.apply_grad([0], [[1.0]], None, 10**9)
                applied.append(None)
        total = sum(taker.result().values.sum() for taker in takers)
        if remote.num_accumulated():
            total += remote.take_grad(1).values.sum()
    assert total == len(applied)


def test_when_the_server_closes(served):
    server, sums, _ = served
    remote = connect(server.address, server.token)["sums"]
    remote.apply_grad([1], [[1.0, 2.0]])
    server.close()
    server.close()
    with pytest.raises(UnavailableError, match=r"no answer from .*: it is gone"):
        remote.num_accumulated()
    assert sums.take_grad(1).indices == [1]  # goes on living here


@pytest.mark.slow
def test_a_waiting_process_is_woken(served, worker):
    server, sums, _ = served
    worker.start(server, "print(client['sums'].take_grad(2).values.tolist())")
    until(lambda: sums.num_waiting())
    sums.apply_grad([1], [[1.0, 2.0]])
    sums.apply_grad([1], [[1.0, 3.0]])
    assert ast.literal_eval(worker.answer()) == [[2.0, 5.0]]


@pytest.mark.slow
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
    until(lambda: not means.num_waiting())  # gRPC says a moment later that it is gone
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
