"""The text form of protocol buffers, as far as TensorFlow's state file uses it."""

import re
from collections.abc import Iterable

_TOKEN = re.compile(
    rb"""\s+ | \#[^\n]* |
    (?P<name>[A-Za-z_]\w*) \s* :? |
    (?P<string>"(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*') |
    (?P<number>[-+]?[0-9.][0-9.eE+-]*f?) |
    (?P<end>[,;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(
    rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))",
    re.DOTALL,
)
_LETTERS = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))
_ESCAPED = {ord(k): v for k, v in zip("\n\r\t\"'\\", "nrt\"'\\", strict=True)}


def dump(fields: Iterable[tuple[str, str | float]]) -> str:
    """``name: value`` lines. Bytes beyond ASCII are octal, as TensorFlow has them."""
    return "".join(f"{name}: {_text(value)}\n" for name, value in fields)


def parse(text: bytes) -> list[tuple[str, str | float]]:
    """The fields of a flat message, in order.

    Raises:
      ValueError: if this is not the text of one.
    """
    fields: list[tuple[str, bytes | float | None]] = []
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ValueError(f"cannot read {text[position : position + 20]!r}")
        position = token.end()
        if token["name"]:
            if fields and fields[-1][1] is None:
                raise ValueError(f"{fields[-1][0]} has no value")
            fields.append((token["name"].decode(), None))
        elif token["string"] or token["number"]:
            name, value = fields.pop() if fields else ("", None)
            fields.append((name, _value(name, value, token)))
        elif token["end"] and (not fields or fields[-1][1] is None):
            raise ValueError("a separator without a field before it")
    if fields and fields[-1][1] is None:
        raise ValueError(f"{fields[-1][0]} has no value")
    return [(name, _decoded(value)) for name, value in fields]


def _value(name: str, value: bytes | float | None, token: re.Match[bytes]) -> bytes | float:
    if token["number"]:
        if not name or value is not None:
            raise ValueError(f"{token['number']!r} belongs to no field")
        return float(token["number"].rstrip(b"f"))
    string = _ESCAPE.sub(_unescaped, token["string"][1:-1])
    if value is None and name:
        return string
    if not isinstance(value, bytes):
        raise ValueError(f"{string!r} belongs to no field")
    return value + string  # strings that follow one another are one


def _decoded(value: bytes | float | None) -> str | float:
    if isinstance(value, bytes):  # as os.fsdecode: paths need not be UTF-8
        return value.decode("utf-8", "surrogateescape")
    assert value is not None
    return value


def _unescaped(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, short, long, letter = match.groups()
    if octal or hexadecimal:
        return bytes([int(octal, 8) & 255 if octal else int(hexadecimal, 16)])
    if short or long:
        return chr(int(short or long, 16)).encode("utf-8", "surrogatepass")
    return bytes([_LETTERS.get(letter[0], letter[0])])


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
