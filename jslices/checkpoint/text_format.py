"""The text form of protocol buffers, as far as TensorFlow's state file uses it."""

import re
from collections.abc import Iterable

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
    """Parse the fields of a flat message, in order; ValueError if it is none."""
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
    """Write ``name: value`` lines, bytes beyond ASCII in octal as TensorFlow does."""
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
