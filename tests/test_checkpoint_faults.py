"""What goes wrong with disks and processes: a clear error, and nothing is lost."""

import contextlib
import errno
import json
import mmap
import os
import pathlib
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading

import jax
import numpy as np
import pytest
from kill_savers import write_shards
from safetensors.numpy import load_file, save_file

import jslices as js
import jslices.tf1 as tf
from jslices.checkpoint import DataLossError, NotFoundError, files
from jslices.checkpoint.archive import Archive
from jslices.checkpoint.tensors import CHUNK, Tensor, TensorFile, write_tensors

TESTS = pathlib.Path(__file__).parent
A = {"a": np.arange(1000.0), "b": np.ones((3, 2), np.float32)}
B = {"a": -np.arange(1000.0), "b": np.zeros((3, 2), np.float32)}


def assert_holds(path, variables):
    restored = js.Saver().restore(path)
    assert set(restored) == set(variables)
    for name, value in variables.items():
        np.testing.assert_array_equal(restored[name], value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kills"),
    [("steps", 100), ("shards", 40), ("deltas", 100), ("steps+shards", 20)],
)
def test_killed_processes(kind, kills, tmp_path):
    command = [sys.executable, TESTS / "kill_savers.py", tmp_path, kind, str(kills)]
    path = os.pathsep.join([str(TESTS.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    words = done.stdout.split()
    assert int(words[0]) == kills and int(words[2]) > kills // 10, done.stdout


def in_two_shards(prefix, variables):
    write_shards(prefix, variables, 2, whole=["b"])


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_process_ends_between_renames(renames, tmp_path, monkeypatch):
    prefix = tmp_path / "m"
    in_two_shards(prefix, A)
    replace, count = os.replace, [0]

    def ends(*paths):
        if count[0] == renames:
            raise KeyboardInterrupt
        count[0] += 1
        replace(*paths)

    monkeypatch.setattr(os, "replace", ends)
    if renames < 2:
        with pytest.raises(KeyboardInterrupt):
            in_two_shards(prefix, B)
    else:
        in_two_shards(prefix, B)
    monkeypatch.undo()
    assert_holds(prefix, B if renames else A)
    js.Saver().save(A, tmp_path / "other")  # puts in order what was left
    assert_holds(prefix, B if renames else A)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_process_ends_before_the_state_file_has_its_name(renames, tmp_path, monkeypatch):
    """The checkpoint and the state file that names it appear at once."""
    saver = js.Saver(max_to_keep=1)
    old, new = saver.save(A, tmp_path / "m", 0), str(tmp_path / "m-1")
    replace, count = os.replace, [0]

    def ends(*paths):
        if count[0] == renames:
            raise KeyboardInterrupt
        count[0] += 1
        replace(*paths)

    monkeypatch.setattr(os, "replace", ends)
    monkeypatch.setattr(os, "unlink", lambda _: None)  # nor does it tidy up
    with pytest.raises(KeyboardInterrupt):
        saver.save(B, tmp_path / "m", 1)
    monkeypatch.undo()
    newest = js.checkpoint.latest_checkpoint(tmp_path)
    assert newest == (new if renames else old)
    assert_holds(newest, B if renames else A)
    later = js.Saver(max_to_keep=1)
    later.recover_last_checkpoints([newest])
    later.save(A, tmp_path / "m", 2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "m-2"]


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    temporary = files.temporary_path(str(tmp_path / "n"), files.new_id())
    descriptor = files.open_new(temporary)
    js.Saver().save(A, tmp_path / "m")
    assert os.path.exists(temporary)
    os.close(descriptor)
    js.Saver().save(A, tmp_path / "m")
    assert not os.path.exists(temporary)


# --- disks ----------------------------------------------------------------------------


KILLED = """
import os, signal, sys
import jax
import numpy as np
import jslices as js
import jslices.tf1 as tf
saver = js.Saver(max_to_keep=1)
saver.save({"a": np.arange(25_000.0)}, sys.argv[1] + "/m", 0)
os.pwrite = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
saver.save({"a": np.arange(25_000.0)}, sys.argv[1] + "/m", 1)
"""


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk of its own with room for two checkpoints of 200 kB, but not for three."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", tmp_path]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"there is no command to mount a tmpfs: {error}")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.slow
def test_a_process_is_killed_on_a_disk_that_is_nearly_full(tiny_disk):
    command = [sys.executable, "-c", KILLED, tiny_disk]
    path = os.pathsep.join([str(TESTS.parent), *sys.path])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == -signal.SIGKILL
    assert len([name for name in os.listdir(tiny_disk) if name.endswith(".tmp")]) == 1
    assert os.statvfs(tiny_disk).f_bavail * os.statvfs(tiny_disk).f_frsize < 200_000
    saver = js.Saver(max_to_keep=1)
    saver.recover_last_checkpoints([js.checkpoint.latest_checkpoint(tiny_disk)])
    for step in range(2, 5):
        path = saver.save({"a": np.arange(25_000.0) + step}, tiny_disk / "m", step)
        assert sorted(os.listdir(tiny_disk)) == ["checkpoint", os.path.basename(path)]
        assert_holds(path, {"a": np.arange(25_000.0) + step})


@pytest.mark.parametrize("sharded", [False, True])
def test_room_that_a_killed_process_holds_is_freed_first(sharded, tmp_path, monkeypatch):
    """As above on a disk of which the size is only pretended."""
    reserve = os.posix_fallocate

    def reserve_if_there_is_room(descriptor, start, size):
        if size + sum(file.stat().st_size for file in tmp_path.iterdir()) > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve_if_there_is_room)
    saver = js.Saver(sharded=sharded)
    saver.save(A, tmp_path / "m", 0)
    temporary = files.temporary_path(str(tmp_path / "m-1"), files.new_id())
    descriptor = files.open_new(temporary)
    reserve(descriptor, 0, 9000)
    with pytest.raises(OSError, match=r"No space left on device; .*m-2 was not saved"):
        saver.save(B, tmp_path / "m", 2)  # somebody is still writing
    os.close(descriptor)
    assert_holds(saver.save(B, tmp_path / "m", 2), B)
    assert not os.path.exists(temporary)


@pytest.fixture
def small_disk():
    """No file may grow beyond 10 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full(tmp_path, small_disk):
    saver = js.Saver()
    path = saver.save(A, tmp_path / "m", 0)
    big = {**A, "a": np.zeros(2000)}
    for save in (saver.save, saver.save_delta, js.Saver(sharded=True).save):
        if save.__func__ is js.Saver.save_delta:
            big = {**A, "a": np.ones(2000)}
        with pytest.raises(OSError, match=r"m-1 was not saved, and what was saved before"):
            save(big, tmp_path / "m", 1)
    with pytest.raises(OSError, match=r"File too large; .* was not saved"):
        saver.save(big, path)  # in place of what is there
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "m-0"]
    assert js.checkpoint.latest_checkpoint(tmp_path) == path and saver.last_checkpoints == [
        path
    ]
    assert_holds(path, A)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate"])
def test_a_disk_that_fails_later(call, tmp_path, monkeypatch):
    saver = js.Saver()
    path = saver.save(A, tmp_path / "m", 0)

    def fails(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(
        OSError, match=r"No space left on device; .*m-1 was not saved"
    ) as info:
        saver.save(B, tmp_path / "m", 1)
    assert info.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "m-0"]
    assert_holds(js.checkpoint.latest_checkpoint(tmp_path), A)
    assert saver.last_checkpoints == [path]


@pytest.mark.parametrize("call", ["stat", "pwrite"])
@pytest.mark.parametrize("raised", [TimeoutError("too slow"), OSError(errno.EIO, "fails")])
def test_errors_stay_what_they_are(call, raised, tmp_path, monkeypatch):
    """Of a handler of signals, and of a disk that cannot say if a directory is there."""
    with monkeypatch.context() as patch, pytest.raises(type(raised), match=raised.args[-1]):
        patch.setattr(os, call, lambda *_, **__: (_ for _ in ()).throw(raised))
        js.Saver().save(B, tmp_path / "m", 1)
    assert os.listdir(tmp_path) == []


BIG = {"a": np.arange(3 * CHUNK // 4 + 1000, dtype=np.float32), "b": np.arange(7)}


def test_a_disk_that_fails_in_another_thread(tmp_path, monkeypatch):
    saver = js.Saver()
    saver.save(BIG, tmp_path / "m", 0)
    write, threads = os.pwrite, set()

    def fails(descriptor, data, place):
        threads.add(threading.get_ident())
        if place > 2 * CHUNK:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match=r"Input/output error; .*m-1 was not saved"):
        saver.save(BIG, tmp_path / "m", 1)
    assert threads - {threading.get_ident()}
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "m-0"]
    assert_holds(js.checkpoint.latest_checkpoint(tmp_path), BIG)


def test_a_failed_write_that_is_reported_once(tmp_path, monkeypatch):
    """To the fsync of another thread, while the file is being written, as Linux does."""
    saver = js.Saver(max_to_keep=1)
    saver.save(A, tmp_path / "m", 0)
    fsync, write, reported = os.fsync, os.pwrite, threading.Event()

    def fails_once(descriptor):
        if not reported.is_set():
            reported.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    def waits(*args):
        assert reported.wait(10)
        return write(*args)

    monkeypatch.setattr(os, "fsync", fails_once)
    monkeypatch.setattr(os, "pwrite", waits)
    with pytest.raises(OSError, match=r"Input/output error; .*m-1 was not saved"):
        saver.save(B, tmp_path / "m", 1)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "m-0"]
    assert_holds(js.checkpoint.latest_checkpoint(tmp_path), A)


def test_writes_that_are_short(tmp_path, monkeypatch):
    usual, write = js.Saver().save(BIG, tmp_path / "usual"), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:99_991], at))
    path = js.Saver().save(BIG, tmp_path / "m")
    assert_holds(path, BIG)
    assert os.path.getsize(path) == os.path.getsize(usual)


def test_blocks_of_any_size(tmp_path):
    """What comes in blocks is written as what comes whole: the same bytes and checksums."""
    whole = np.random.default_rng(0).integers(0, 256, 2 * CHUNK + 4321, np.uint8)

    def written(blocks):
        with open(tmp_path / "t", "wb+") as file:
            tensor = Tensor("uint8", whole.shape, lambda: blocks)
            write_tensors(file.fileno(), {"t": tensor}, {})
        np.testing.assert_array_equal(TensorFile(str(tmp_path / "t")).view("t"), whole)
        return (tmp_path / "t").read_bytes()

    wanted = written([whole])
    assert written([whole[:1], whole[1:1], whole[1:]]) == wanted
    for size in (1000, CHUNK - 1, CHUNK, CHUNK + 1):
        blocks = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert written(blocks) == wanted


@pytest.mark.parametrize("sharded", [False, True])
def test_no_room_for_the_state_file(sharded, tmp_path, monkeypatch):
    saver = js.Saver(max_to_keep=1, sharded=sharded)
    first = saver.save(A, tmp_path / "m", 0)
    before = sorted(os.listdir(tmp_path))

    def fails(descriptor, data, at, write=os.pwrite):
        if bytes(data).startswith(b"model_checkpoint_path"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match=r"m-1 was not saved, and what was saved be") as info:
        saver.save(B, tmp_path / "m", 1)
    assert info.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == before
    assert js.checkpoint.latest_checkpoint(tmp_path) == first
    assert saver.last_checkpoints == [first]
    assert_holds(first, A)


@pytest.mark.parametrize(("successes", "text"), [(0, "does not name it"), (1, "a power f")])
def test_what_fails_after_a_save_is_not_called_a_failed_save(
    successes, text, tmp_path, monkeypatch
):
    old = js.Saver().save(B, tmp_path / "old")
    fsync, count = os.fsync, [0]

    def fails(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            count[0] += 1
            if count[0] > successes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    said = r"Input/output error; .*m was saved and can be restored, but .*" + text
    with pytest.raises(OSError, match=said) as info:
        js.Saver().save(A, tmp_path / "m")
    assert info.value.errno == errno.EIO
    assert_holds(tmp_path / "m", A)
    newest = js.checkpoint.latest_checkpoint(tmp_path)
    assert newest == (str(tmp_path / "m") if successes else old)


def test_what_cannot_be_deleted_is_tried_again(tmp_path, monkeypatch, caplog):
    saver = js.Saver(max_to_keep=1)
    saver.save(A, tmp_path / "m", 0)
    remove = os.unlink

    def fails(path):
        if os.path.basename(path) == "m-0":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        remove(path)

    monkeypatch.setattr(os, "unlink", fails)
    saver.save(B, tmp_path / "m", 1)
    assert "could not be deleted" in caplog.text and "m-0" in caplog.text
    monkeypatch.undo()
    js.Saver().save(A, tmp_path / "n")  # the state file names what waits
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "m-1", "n"]


def test_a_disk_without_reservations(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", fails)
    assert_holds(js.Saver().save(A, tmp_path / "m"), A)


def test_a_state_file_that_cannot_be_written(tmp_path, monkeypatch):
    saver = js.Saver(max_to_keep=1)
    saver.save(A, tmp_path / "m", 0)
    replace = os.replace

    def fails(source, target):
        if os.path.basename(target) == "checkpoint":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    said = r"No space left .*m-1 was saved and can be restored, but .*/checkpoint was not "
    with pytest.raises(OSError, match=said + "written and does not name it") as info:
        saver.save(B, tmp_path / "m", 1)
    assert info.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert_holds(tmp_path / "m-1", B)
    assert_holds(js.checkpoint.latest_checkpoint(tmp_path), A)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs another user")
def test_a_directory_that_may_only_be_read():
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is hidden from others
        path = js.Saver().save(A, f"{directory}/m", 0)
        assert_holds(path, A)  # imports all there is, which another user may not
        os.chmod(directory, 0o555)
        try:
            os.seteuid(65534 if user == 0 else user)
            with pytest.raises(
                PermissionError, match=r"Permission denied; .*m-1 was not sa"
            ):
                js.Saver().save(B, f"{directory}/m", 1)
            assert_holds(path, A)
        finally:
            os.seteuid(user)
            os.chmod(directory, 0o755)
        assert sorted(os.listdir(directory)) == ["checkpoint", "m-0"]


# --- damage ---------------------------------------------------------------------------


def test_every_flipped_byte_is_noticed(tmp_path):
    path = js.Saver().save({"a": np.arange(4, dtype=np.int8), "b": 3}, tmp_path / "m")
    data = open(path, "rb").read()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        open(path, "wb").write(damaged)
        with pytest.raises(DataLossError, match=r"m is damaged: "):
            js.Saver().restore(path)


def test_every_truncation_is_noticed(tmp_path):
    path = js.Saver().save(A, tmp_path / "m")
    data = open(path, "rb").read()
    for length in [0, 1, 7, 8, 9, 100, 500, len(data) - 8000, len(data) - 1]:
        open(path, "wb").write(data[:length])
        with pytest.raises(DataLossError, match=r"m is damaged: its header cannot be read"):
            js.Saver().restore(path)
    open(path, "wb").write(data + b"x")
    with pytest.raises(DataLossError, match=r"m is damaged"):
        js.Saver().restore(path)
    open(path, "wb").write(data)
    assert_holds(path, A)


def test_damage_is_named_and_the_rest_can_be_read(tmp_path):
    path = js.Saver().save(A, tmp_path / "m")
    data = bytearray(open(path, "rb").read())
    data[-1] ^= 1  # narrow elements come last
    open(path, "wb").write(data)
    with pytest.raises(DataLossError, match=r"the checksum of 'b' does not match"):
        js.Saver().restore(path)
    np.testing.assert_array_equal(js.Saver().restore(path, {"a": A["a"]})["a"], A["a"])


@pytest.mark.parametrize("shard", [0, 1])
def test_damaged_and_missing_shards_are_named(shard, tmp_path):
    prefix = str(tmp_path / "m")
    in_two_shards(prefix, A)
    path = f"{prefix}-0000{shard}-of-00002"
    data = open(path, "rb").read()
    open(path, "wb").write(data[:-1])
    with pytest.raises(DataLossError, match=f"m-0000{shard}-of-00002 is damaged"):
        js.Saver().restore(prefix)
    os.unlink(path)
    expected = (NotFoundError, "m-00001-of-00002, one of 2 shards, is not there")
    if shard == 0:
        expected = (ValueError, "The passed save_path is not a valid checkpoint")
    with pytest.raises(expected[0], match=expected[1]):
        js.Saver().restore(prefix)


def test_a_shard_of_another_save(tmp_path):
    in_two_shards(tmp_path / "m", A)
    in_two_shards(tmp_path / "n", B)
    os.replace(tmp_path / "n-00001-of-00002", tmp_path / "m-00001-of-00002")
    with pytest.raises(
        DataLossError, match=r"m-00001-of-00002 belongs to another save than"
    ):
        js.Saver().restore(tmp_path / "m")


def test_a_state_file_that_names_a_missing_checkpoint(tmp_path, caplog):
    saver = js.Saver()
    paths = [saver.save(A, tmp_path / "m", i) for i in range(2)]
    os.unlink(paths[1])
    wanted = r"m-1', which is not there, where there are \['m-0'\]: .*update_checkpoint_st"
    with pytest.raises(DataLossError, match=wanted):
        js.checkpoint.latest_checkpoint(tmp_path)
    assert_holds(
        js.checkpoint.get_checkpoint_state(tmp_path).all_model_checkpoint_paths[0], A
    )
    os.unlink(paths[0])
    assert js.checkpoint.latest_checkpoint(tmp_path) is None
    assert "m-1', which is not there" in caplog.text


@pytest.mark.parametrize("saver", [js.Saver, tf.train.Saver])
def test_a_bit_of_a_state_file_that_flips_is_not_no_checkpoint(saver, tmp_path):
    folder = pathlib.Path(tempfile.mkdtemp(dir=tmp_path))  # not one bit from another's
    path, state = saver().save(A, folder / "m", 100), folder / "checkpoint"
    text, found = state.read_bytes(), 0
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        state.write_bytes(flipped)
        with contextlib.suppress(DataLossError):
            assert js.checkpoint.latest_checkpoint(folder) == path
            found += 1
    assert 0 < found < 8 * len(text)


@pytest.mark.parametrize(
    "start, kind",
    [
        (b"PK\3\4 not a checkpoint", r"a zip archive.*torch\.load"),
        (b"\x80\4\x95\3\1\1\1\1 a pickle", "a pickle of Python"),
        (b"\x93NUMPY\1\0 an array", r"an array of NumPy.*np\.load"),
        (b"GGUF\3\0\0\0 a model", r"a GGUF file.*gguf\.GGUFReader"),
        (b"\x89HDF\r\n\x1a\n weights", "an HDF5 file"),
        (b"PAR1 columns of it", "a Parquet file"),
        (b"\x1f\x8b\x08\0 packed", "a file compressed by gzip"),
        (b"3 2\nword vectors of it", "a file of word vectors.*load_word_vectors"),
        (b'{"weight_map": {}, ', "JSON; an index of safetensors"),
    ],
)
def test_something_else_altogether(tmp_path, start, kind):
    (tmp_path / "m").write_bytes(start * 99)
    with pytest.raises(DataLossError, match=f"m is no checkpoint of a Saver, but {kind}"):
        js.Saver().restore(tmp_path / "m")


def test_an_index_of_tensorflow_and_a_damaged_file(tmp_path):
    (tmp_path / "m").write_bytes(b"keys" * 99 + bytes.fromhex("57fb808b247547db"))
    with pytest.raises(DataLossError, match=r"m is no.*tf.train.load_checkpoint"):
        js.Saver().restore(tmp_path / "m")
    (tmp_path / "m").write_bytes(b"{\0\0\0\0\0\0\0{" + b" " * 99)  # 123 bytes of header
    with pytest.raises(DataLossError, match="m is damaged"):
        js.Saver().restore(tmp_path / "m")


def test_a_part_of_each_tensor_is_no_checkpoint(tmp_path):
    """As PyTorch's HuggingFaceStorageWriter writes on each of several processes."""
    offsets = json.dumps({"w": {"saved_offsets": [4, 0]}})
    tensors = {"w": np.ones((3, 2), np.float32)}
    path = tmp_path / "shard-00002-model-00001-of-00001.safetensors"
    save_file(tensors, path, {"format": "pt", "DCP_SHARDING_INFO": offsets})
    with pytest.raises(DataLossError, match=r"one of the parts.*consolidate_safetensors"):
        js.Saver().restore(path)


def hostile(path, tensors, info=None):
    """A sound safetensors file, with names of the writer's choice."""
    header = {
        n: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i, n in enumerate(tensors)
    }
    if info is not None:
        header["__metadata__"] = info
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * len(tensors))


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "..", "a\0b"])
def test_hostile_names(name, tmp_path):
    (tmp_path / "d").mkdir()
    hostile(tmp_path / "d" / "m", ["fine", name])
    with pytest.raises(ValueError, match=r"d/m variables cannot have the names"):
        js.Saver().restore(tmp_path / "d" / "m")
    assert os.listdir(tmp_path) == ["d"] and os.listdir(tmp_path / "d") == ["m"]


def test_dtypes_of_other_tools(tmp_path):
    """What NumPy does not have is named; the rest of the file can be read."""
    hostile(tmp_path / "m", ["a", "b"])
    contents = (tmp_path / "m").read_bytes().replace(b'"U8"', b'"F8_E8M0"', 1)
    size = int.from_bytes(contents[:8], "little") + len("F8_E8M0") - len("U8")
    (tmp_path / "m").write_bytes(size.to_bytes(8, "little") + contents[8:])
    with pytest.raises(TypeError, match=r"'a' in .*m has the dtype F8_E8M0, which NumPy"):
        js.Saver().restore(tmp_path / "m")
    restored = js.Saver().restore(tmp_path / "m", {"b": np.zeros(1, np.uint8)})
    np.testing.assert_array_equal(restored["b"], [0])


def test_complex_numbers_as_other_tools_have_them(tmp_path):
    tree = {"a": np.array([1 + 2j, 3], np.complex64), "b": np.array([4 - 1j])}
    saved = load_file(js.Saver().save(tree, tmp_path / "own"))
    np.testing.assert_array_equal(saved["a"], tree["a"])
    assert saved["b"].dtype == np.uint8  # safetensors has no complex128
    save_file({"a": tree["a"]}, tmp_path / "theirs")
    restored = js.Saver().restore(tmp_path / "theirs")["a"]
    assert isinstance(restored, jax.Array)
    np.testing.assert_array_equal(restored, tree["a"])


def test_pages_of_one_tensor_are_released_at_a_time(tmp_path, monkeypatch):
    """Those of the whole file, for each tensor, would take quadratic time."""
    count, released = 50, []

    class Map(mmap.mmap):
        def madvise(self, _, start=0, length=None):
            released.append(len(self) if length is None else length)

    monkeypatch.setattr(mmap, "mmap", Map)
    tree = {f"t{i}": np.zeros(5000, np.float32) for i in range(count)}
    path = js.Saver().save({**tree, "z": np.zeros(0)}, tmp_path / "m")
    js.Saver().restore(path)
    assert len(released) == count and sum(released) < 2 * os.path.getsize(path)


def test_a_header_without_its_checksum_is_damaged(tmp_path):
    hostile(tmp_path / "m", ["a"], {"jslices": "{}"})
    with pytest.raises(DataLossError, match=r"m is damaged"):
        js.Saver().restore(tmp_path / "m")


@pytest.mark.parametrize(
    "name", ["with space", "Übung-模型", "quo'te\"s", "[a-z]*?", "%s{}"]
)
def test_odd_paths(name, tmp_path):
    directory = tmp_path / name
    directory.mkdir()
    saver = js.Saver(max_to_keep=1)
    saver.save(A, directory / name, 1)
    saver.save(A, directory / name, 2)
    path = saver.save_delta(B, directory / name, 3)
    assert (
        js.checkpoint.latest_checkpoint(directory) == path == str(directory / f"{name}-3")
    )
    assert sorted(os.listdir(directory)) == sorted(["checkpoint", f"{name}-2", f"{name}-3"])
    assert_holds(path, B)
    in_two_shards(directory / name, A)
    assert_holds(directory / name, A)


# --- several at once ------------------------------------------------------------------


def test_savers_in_one_directory(tmp_path):
    """Threads stand for processes: a lock belongs to an open file, not to a process."""
    errors, both = [], str(tmp_path / "both")

    def work(name):
        try:
            saver = js.Saver(max_to_keep=2)
            for step in range(10):
                saver.save({"a": np.full(500, step)}, tmp_path / name, step)
                in_two_shards(both, {"a": np.full(1000, step), "b": A["b"]})
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("x", "y")]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if files.checkpoint_exists(both):
            array = js.Saver().restore(both)["a"]
            assert (array == array[0]).all()
    assert not errors
    assert_holds(js.checkpoint.latest_checkpoint(tmp_path), {"a": np.full(500, 9)})
    assert len(os.listdir(tmp_path)) == 4 + 2 + 1
    assert Archive(both).read("a")[0] == 9
