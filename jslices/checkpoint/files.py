"""Atomic files, their locks, and the paths of the files of a checkpoint.

A file is written under a temporary name, flushed and renamed. While it is written it is
locked by its process, so that the files of killed processes are recognised and cleaned up.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator

#: A path, as functions take it.
Path = str | os.PathLike[str]

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<id>[0-9a-f]{24})\.tmp", re.DOTALL)
_SHARD = re.compile(
    r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>(?!00000)\d{5})", re.DOTALL
)


#: What files of other kinds begin with, and what reads them.
OTHER_KINDS = {
    b"PK\3\4": "a zip archive, as .npz, .pt, .distcp and .keras are; read it with np.load, "
    "torch.load, torch.distributed.checkpoint or keras.saving",
    b"\x80": "a pickle of Python; read it with the library that wrote it",
    b"\x93NUMPY": "an array of NumPy; read it with np.load(path, mmap_mode='r')",
    b"GGUF": "a GGUF file; read it with gguf.GGUFReader",
    b"\x89HDF": "an HDF5 file, as .h5 is; read it with h5py",
    b"PAR1": "a Parquet file; read it with pyarrow.parquet.read_table",
    b"\x1f\x8b\x08": "a file compressed by gzip; read word vectors with load_word_vectors",
    b"\xba\x16\x4f\x2f": "a model of fastText; its vectors are in the .vec file "
    "beside it, or model.get_word_vector(word) for each of model.get_words()",
    b"{": "JSON; an index of safetensors files is read by jslices.Saver().restore",
}
#: A table of LevelDB ends so, as does the index of TensorFlow's checkpoints.
_LEVELDB = bytes.fromhex("57fb808b247547db")
_WORD_VECTORS = re.compile(rb"\d{1,12} \d{1,6}\n")
#: Sizes of a table and of n-grams, hashes and their seed, and marks of a word's ends.
_FLORET = re.compile(rb"(\d{1,12} ){6}\S+ \S+\n")


def other_kind(head: bytes, tail: bytes = b"") -> str:
    """What a file of another kind is, by its first and last bytes, and what reads it."""
    if tail.endswith(_LEVELDB):
        return "the index of a TensorFlow checkpoint; read it with tf.train.load_checkpoint"
    if _WORD_VECTORS.match(head):
        return "a file of word vectors; read it with jslices.checkpoint.load_word_vectors"
    if _FLORET.match(head):
        return (
            "a table of floret, of hashed pieces of words; read its rows with "
            "np.loadtxt(path, skiprows=1)[:, 1:]"
        )
    if head[4:9] == b"\0\0\0\0{":  # the size of a header, and the header: a damaged one
        return ""
    return next((OTHER_KINDS[x] for x in OTHER_KINDS if head.startswith(x)), "")


#: Errors of paths at which there can be nothing.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Give errors of a descriptor the path of its file.

    What a handler of signals raises stays as it is: a TimeoutError is an OSError, too.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = path
        raise


# --- writing --------------------------------------------------------------------------


def new_id() -> str:
    """Make an id for one save; of two ids the later one sorts last."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


def temporary_path(path: str, save_id: str) -> str:
    """The path at which a file is written before it gets its name."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{save_id}.tmp")


def temporaries_of(path: str) -> list[tuple[str, str]]:
    """List the temporary files of a path, and the ids of their saves; newest first."""
    directory, name = os.path.split(path)
    entries = map(_TEMPORARY.fullmatch, os.listdir(directory or "."))
    ids = sorted((e["id"], e.string) for e in entries if e and e["name"] == name)
    return [(os.path.join(directory, entry), save_id) for save_id, entry in ids[::-1]]


def open_new(path: str) -> int:
    """Create a file, which is locked for as long as it is open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    # No process cleans up between the two steps and sees a file without a lock.
    with directory_lock(os.path.dirname(path), exclusive=False):
        descriptor = os.open(path, flags, 0o666)
        _try_lock(descriptor)
    return descriptor


@contextlib.contextmanager
def replacing(path: str) -> Iterator[int]:
    """A new file, locked, that takes the place of ``path`` unless the block raises."""
    temporary = temporary_path(path, new_id())
    descriptor = open_new(temporary)
    try:
        with naming(path):
            yield descriptor
        os.replace(temporary, path)  # while it is open, and so locked
    except BaseException:
        remove(temporary)
        raise
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes, in several calls on a disk that fills up, for example."""
    while data:
        size = os.pwrite(descriptor, data, offset)
        data, offset = data[size:], offset + size


def write_and_flush(descriptor: int, text: str) -> None:
    """Write a new small file and flush it to the disk."""
    write_at(descriptor, memoryview(text.encode("ascii")), 0)
    os.fsync(descriptor)


def shorten(path: str, text: str, suffix: str) -> None:
    """Cut a suffix off a small file, unless another process has replaced it.

    It is replaced: a power failure after a cut can leave zeros at the end.
    """
    with contextlib.suppress(OSError):  # then the longer one stays
        with open(path, "rb") as file:
            if file.read() != (text + suffix).encode("ascii"):
                return
        with replacing(path) as descriptor:
            write_and_flush(descriptor, text)


def sync_directory(directory: str) -> None:
    """Flush the names in a directory, so that they survive a power failure."""
    descriptor = os.open(directory or ".", os.O_RDONLY)
    try:
        with naming(directory or "."):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    """Delete a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_family(family: list[str]) -> None:
    """Delete the files of a checkpoint; the first one, which identifies it, goes last."""
    for path in reversed(family):
        remove(path)


# --- locks ----------------------------------------------------------------------------


@contextlib.contextmanager
def directory_lock(directory: str, exclusive: bool) -> Iterator[None]:
    """Lock a directory while files of a checkpoint get their names or are opened."""
    descriptor = os.open(directory or ".", os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def clean(directory: str, is_published: Callable[[str, str, str], bool]) -> None:
    """Delete the temporary files of killed processes. The directory must be locked.

    Those of a completed save get their names instead; ``is_published`` tells which are,
    from the path of a temporary file, its final path and the id of its save.
    """
    for entry in os.listdir(directory or "."):
        temporary = _TEMPORARY.fullmatch(entry)
        path = os.path.join(directory, entry)
        if temporary and is_abandoned(path):
            final = os.path.join(directory, temporary["name"])
            if is_published(path, final, temporary["id"]):
                sync_directory(directory)  # what it belongs to keeps its name
                os.replace(path, final)
            else:
                remove(path)


def is_abandoned(path: str) -> bool:
    """True for a temporary file whose process has ended."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return _try_lock(descriptor)
    finally:
        os.close(descriptor)


# --- the files of a checkpoint --------------------------------------------------------


def shard_path(prefix: str, number: int, count: int) -> str:
    """TensorFlow's name of one shard."""
    return f"{prefix}-{number:05d}-of-{count:05d}"


def first_shard(path: str) -> str | None:
    """The path of shard 0 of the same checkpoint; None if this is not a shard's path."""
    shard = _SHARD.fullmatch(path)
    return shard and shard_path(shard["prefix"], 0, int(shard["count"]))


def unsharded_in(directory: str) -> list[str]:
    """List the files in a directory that are neither temporary nor shards."""
    entries = [
        os.path.join(directory, entry)
        for entry in os.listdir(directory or ".")
        if not _TEMPORARY.fullmatch(entry) and not _SHARD.fullmatch(entry)
    ]
    return [path for path in entries if os.path.isfile(path)]


def _mode(path: str) -> int:
    """What is at a path; 0 for nothing. A disk that fails is not an answer."""
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
    except ValueError:  # no name of a file has a NUL in it
        pass
    return 0


def families(prefix: str) -> list[list[str]]:
    """List the sets of files that a path may mean: one file, or some shards."""
    families = [[prefix]] if stat.S_ISREG(_mode(prefix)) else []
    directory, name = os.path.split(prefix)
    try:
        entries = sorted(os.listdir(directory or "."))
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        entries = []
    for entry in entries:
        shard = _SHARD.fullmatch(entry)
        if shard and shard["prefix"] == name and int(shard["number"]) == 0:
            count = int(shard["count"])
            families.append([shard_path(prefix, i, count) for i in range(count)])
    return families


def checkpoint_exists(prefix: str) -> bool:
    return bool(families(prefix))


def checkpoint_path(
    path: Path, step: int | None, latest_filename: str | None, pad: bool, sharded: bool
) -> str:
    """The path of a new checkpoint, with its step, if it can be saved there."""
    prefix = os.fspath(path)
    if not isinstance(prefix, str):
        raise TypeError(f"path must be a str, not {type(prefix).__name__}")
    directory, name = os.path.split(prefix)
    state = latest_filename or "checkpoint"
    if not name:
        raise ValueError(f"{prefix!r} is not the path of a checkpoint; it ends in no name")
    if os.path.dirname(state):
        raise ValueError(f"'latest_filename' must not contain path components: {state}")
    if step is not None:
        prefix += f"-{step:08d}" if pad else f"-{step:d}"
    if os.path.basename(prefix) == state and not sharded:
        raise ValueError(
            f"'latest_filename' collides with 'save_path': {state!r} and {prefix!r}"
        )
    if not stat.S_ISDIR(_mode(directory or ".")):
        raise ValueError(
            f"Parent directory of {prefix} doesn't exist, can't save. Type os.makedirs("
            f"{os.path.dirname(prefix)!r}) before"
        )
    if stat.S_ISDIR(_mode(prefix)):
        raise ValueError(f"{prefix} is a directory; give the path of a file")
    return prefix
