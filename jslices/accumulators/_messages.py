"""Values as messages: a typed header in JSON, then arrays as they lie in memory.

Numbers, text, None, arrays, and lists, tuples and dicts of these, nothing else. Reading a
message makes values and calls nothing.
"""

import json
import math
import struct
from typing import Any

import jax
import numpy as np

_LENGTH = struct.Struct("<I")  # of the header


def pack(value: object) -> bytes:
    """The message of a value."""
    arrays: list[np.ndarray] = []
    header = json.dumps(_described(value, arrays)).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *arrays])  # type: ignore[list-item]


def unpack(message: bytes) -> Any:
    """The value of a message, with arrays of its own. NamedTuples have become tuples."""
    (length,) = _LENGTH.unpack_from(message)
    start = _LENGTH.size + length

    def build(described: dict[str, Any]) -> object:
        ((kind, content),) = described.items()
        if kind != "array":
            return {"tuple": tuple, "dict": dict}[kind](content)
        nonlocal start
        name, shape = content
        dtype, size = np.dtype(name), math.prod(shape)
        array = np.frombuffer(message, dtype, size, start) if size else np.empty(0, dtype)
        start += array.nbytes
        return array.reshape(shape).copy()

    return json.loads(message[_LENGTH.size : start].decode(), object_hook=build)


def _described(value: object, arrays: list[np.ndarray]) -> object:
    """The value in terms of JSON; appends its arrays."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        if array.dtype.kind in "?biufcV" and array.dtype.fields is None:  # V: bfloat16, ...
            dtype = array.dtype.newbyteorder("=")
            flat = np.ascontiguousarray(array, dtype).reshape(-1)
            arrays.append(flat.view(np.uint8))
            return {"array": [dtype.name, array.shape]}
    elif value is None or isinstance(value, bool | int | float | str):
        return value
    elif isinstance(value, list):
        return [_described(x, arrays) for x in value]
    elif isinstance(value, tuple):
        return {"tuple": [_described(x, arrays) for x in value]}
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _described(x, arrays)] for key, x in value.items()]}
    raise TypeError(
        f"{value!r} cannot be sent: numbers, text, None, arrays of numbers, and lists, "
        "tuples and dicts (whose keys are text) of these can"
    )
