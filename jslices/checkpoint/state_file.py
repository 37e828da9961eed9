"""TensorFlow's ``checkpoint`` file: which checkpoint of a directory is the newest."""

import dataclasses
import logging
import os
import re
from collections.abc import Iterable, Sequence

from jslices._errors import NotFoundError
from jslices.checkpoint.files import Path, checkpoint_exists, write_text

_log = logging.getLogger("jslices.checkpoint")

_PATH, _PATHS = "model_checkpoint_path", "all_model_checkpoint_paths"
_TIMES, _PRESERVED = "all_model_checkpoint_timestamps", "last_preserved_timestamp"


@dataclasses.dataclass(frozen=True)
class CheckpointState:
    """What a state file says.

    Attributes:
      model_checkpoint_path: the newest checkpoint.
      all_model_checkpoint_paths: those that are kept, the oldest first.
      all_model_checkpoint_timestamps: when each was saved, in seconds since 1970; empty
        unless TensorFlow's ``CheckpointManager`` wrote the file.
      last_preserved_timestamp: as that class uses it; None if the file does not have it.
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str]
    all_model_checkpoint_timestamps: list[float] = dataclasses.field(default_factory=list)
    last_preserved_timestamp: float | None = None


def get_checkpoint_state(
    checkpoint_dir: Path, latest_filename: str | None = None
) -> CheckpointState | None:
    """What the state file of a directory says, written by this package or TensorFlow.

    Args:
      checkpoint_dir: the directory.
      latest_filename: the name of the state file; None means ``"checkpoint"``.

    Returns:
      A :class:`CheckpointState`, relative paths joined to ``checkpoint_dir``. None when
      there is no such file, or when it cannot be read (which is logged).

    Raises:
      ValueError: if it can be read but names no checkpoint.

    Example:
      >>> import tempfile, jslices as js
      >>> print(js.checkpoint.get_checkpoint_state(tempfile.mkdtemp()))
      None

    Source: ``tf.train.get_checkpoint_state``.
    """
    directory = os.fspath(checkpoint_dir)
    filename = _state_path(directory, latest_filename)
    try:
        with open(filename, "rb") as file:
            state = _state(parse_text(file.read()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s: %s; this state file is ignored", filename, error)
        return None
    if not state.model_checkpoint_path:
        raise ValueError(
            f"Invalid checkpoint state loaded from {filename}: it has no "
            "model_checkpoint_path. Remove the file, or write it anew with "
            "update_checkpoint_state"
        )
    return dataclasses.replace(
        state,
        model_checkpoint_path=os.path.join(directory, state.model_checkpoint_path),
        all_model_checkpoint_paths=[
            os.path.join(directory, path) for path in state.all_model_checkpoint_paths
        ],
    )


def latest_checkpoint(
    checkpoint_dir: Path, latest_filename: str | None = None
) -> str | None:
    """The newest checkpoint of a directory, to be given to ``Saver.restore``.

    Args:
      checkpoint_dir: the directory.
      latest_filename: the name of the state file; None means ``"checkpoint"``.

    Returns:
      The path that the state file names; None when there is no state file, or the
      checkpoint it names is not there (which is logged).

    Raises:
      ValueError: if the state file names no checkpoint at all.

    Example:
      >>> import os, tempfile, jax.numpy as jnp, jslices as js
      >>> directory = tempfile.mkdtemp()
      >>> path = os.path.join(directory, "model")
      >>> path = js.Saver().save({"w": jnp.ones(2)}, path, global_step=7)
      >>> os.path.basename(js.checkpoint.latest_checkpoint(directory))
      'model-7'

    Source: ``tf.train.latest_checkpoint``.
    """
    state = get_checkpoint_state(checkpoint_dir, latest_filename)
    if state is None:
        return None
    path = state.model_checkpoint_path
    if checkpoint_exists(path) or os.path.exists(path + ".index"):  # TensorFlow's own
        return path
    _log.error(
        "%s names the checkpoint %s, which is not there",
        _state_path(os.fspath(checkpoint_dir), latest_filename),
        path,
    )
    return None


def update_checkpoint_state(
    save_dir: Path,
    model_checkpoint_path: Path,
    all_model_checkpoint_paths: Sequence[str] | None = None,
    latest_filename: str | None = None,
    all_model_checkpoint_timestamps: Sequence[float] | None = None,
    last_preserved_timestamp: float | None = None,
) -> None:
    """Writes the state file of a directory, all of it or nothing.

    Args:
      save_dir: the directory. When it is relative, relative paths are rewritten to be
        relative to it.
      model_checkpoint_path: the newest checkpoint.
      all_model_checkpoint_paths: those that are kept, the oldest first. The newest is
        appended to them unless it is the last.
      latest_filename: the name of the state file; None means ``"checkpoint"``.
      all_model_checkpoint_timestamps: seconds since 1970, one for each path.
      last_preserved_timestamp: kept in the file as it is.

    Raises:
      RuntimeError: if the checkpoint's path is that of the state file.
      ValueError: if there are timestamps, but not one for each path.
      NotFoundError: (a ``FileNotFoundError``) if the directory does not exist.

    Example:
      >>> import tempfile, jslices as js
      >>> directory = tempfile.mkdtemp()
      >>> js.checkpoint.update_checkpoint_state(directory, "m-2", ["m-1"])
      >>> print(open(f"{directory}/checkpoint").read(), end="")
      model_checkpoint_path: "m-2"
      all_model_checkpoint_paths: "m-1"
      all_model_checkpoint_paths: "m-2"

    Source: ``tf.train.update_checkpoint_state``, which also appends to the caller's list.
    """
    directory = os.fspath(save_dir)
    newest = os.fspath(model_checkpoint_path)
    paths = [os.fspath(path) for path in all_model_checkpoint_paths or ()]
    if not paths or paths[-1] != newest:
        paths.append(newest)
    times = list(all_model_checkpoint_timestamps or ())
    if times and len(times) != len(paths):
        raise ValueError(
            f"there are {len(times)} timestamps for {len(paths)} checkpoints: {paths}"
        )
    if not os.path.isabs(directory):
        newest = _relative(newest, directory)
        paths = [_relative(path, directory) for path in paths]
    filename = _state_path(directory, latest_filename)
    if filename in (newest, os.path.join(directory, newest)):
        raise RuntimeError(
            f"Save path {newest!r} conflicts with path used for checkpoint state. "
            "Please use a different save path."
        )
    if not os.path.isdir(directory or "."):
        raise NotFoundError(f"the directory {directory!r} does not exist; create it first")
    state = CheckpointState(newest, paths, times, last_preserved_timestamp)
    write_text(filename, dump_text(_fields(state)))


def _state_path(directory: str, latest_filename: str | None) -> str:
    return os.path.join(directory, latest_filename or "checkpoint")


def _relative(path: str, directory: str) -> str:
    """A relative path as seen from ``directory``; an absolute one as it is."""
    return path if os.path.isabs(path) else os.path.relpath(path, directory or ".")


def _fields(state: CheckpointState) -> Iterable[tuple[str, str | float]]:
    yield _PATH, state.model_checkpoint_path
    yield from ((_PATHS, path) for path in state.all_model_checkpoint_paths)
    yield from ((_TIMES, time) for time in state.all_model_checkpoint_timestamps)
    if state.last_preserved_timestamp is not None:
        yield _PRESERVED, state.last_preserved_timestamp


def _state(fields: list[tuple[str, str | float]]) -> CheckpointState:
    kinds = {_PATH: str, _PATHS: str, _TIMES: float, _PRESERVED: float}
    values: dict[str, list[str | float]] = {name: [] for name in kinds}
    for name, value in fields:
        if not isinstance(value, kinds.get(name, ())):
            raise ValueError(f"it has the unexpected field {name}: {value!r}")
        values[name].append(value)
    if len(values[_PATH]) > 1 or len(values[_PRESERVED]) > 1:
        raise ValueError("a field that may occur once occurs twice")
    path, preserved = next(iter(values[_PATH]), ""), next(iter(values[_PRESERVED]), None)
    return CheckpointState(path, values[_PATHS], values[_TIMES], preserved)  # type: ignore[arg-type]


# --- the text form of protocol buffers, as far as this file uses it -------------------

_GAP = rb"(?:\s|\#[^\n]*+)*+"
_STRING = re.compile(rb'"((?:[^"\\\n]|\\.)*)"|' + rb"'((?:[^'\\\n]|\\.)*)'")
_STRING_OR_COMMENT = re.compile(_STRING.pattern + rb"|\#[^\n]*")
_FIELD = re.compile(
    rb"(?P<name>[A-Za-z_]\w*+)%(gap)b:?%(gap)b"
    rb"(?:(?P<strings>(?:(?:%(string)b)%(gap)b)+)|(?P<number>[-+]?[0-9.][0-9.eE+-]*)f?)"
    rb"%(gap)b(?:[,;]%(gap)b)?" % {b"gap": _GAP, b"string": _STRING.pattern}
)
_ESCAPE = re.compile(
    rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))",
    re.DOTALL,
)
_LETTERS = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))
_ESCAPED = {ord(k): v for k, v in zip("\n\r\t\"'\\", "nrt\"'\\", strict=True)}


def parse_text(text: bytes) -> list[tuple[str, str | float]]:
    """The fields of a flat message, in order.

    Raises:
      ValueError: if this is not the text of one.
    """
    fields: list[tuple[str, str | float]] = []
    start = re.match(_GAP, text)
    position = start.end() if start else 0
    while position < len(text):
        field = _FIELD.match(text, position)
        if field is None:
            raise ValueError(f"cannot read {text[position : position + 20]!r}")
        position = field.end()
        value: str | float
        if field["number"]:
            value = float(field["number"])
        else:  # strings that follow one another are one; paths need not be UTF-8
            parts = (a or b for a, b in _STRING_OR_COMMENT.findall(field["strings"]))
            unescaped = b"".join(_ESCAPE.sub(_unescaped, part) for part in parts)
            value = unescaped.decode("utf-8", "surrogateescape")
        fields.append((field["name"].decode(), value))
    return fields


def _unescaped(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, short, long, letter = match.groups()
    if octal or hexadecimal:
        return bytes([int(octal, 8) & 255 if octal else int(hexadecimal, 16)])
    if short or long:
        return chr(int(short or long, 16)).encode("utf-8", "surrogatepass")
    return bytes([_LETTERS.get(letter[0], letter[0])])


def dump_text(fields: Iterable[tuple[str, str | float]]) -> str:
    """``name: value`` lines. Bytes beyond ASCII are octal, as TensorFlow writes them."""
    return "".join(f"{name}: {_text(value)}\n" for name, value in fields)


def _text(value: str | float) -> str:
    if not isinstance(value, str):
        return repr(float(value)).removesuffix(".0")
    escaped = []
    for byte in value.encode("utf-8", "surrogateescape"):
        if byte in _ESCAPED:
            escaped.append("\\" + _ESCAPED[byte])
        else:
            escaped.append(chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}")
    return f'"{"".join(escaped)}"'
