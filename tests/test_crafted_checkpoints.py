"""Files with the right checksums that no Saver has written: refused, or read as they say.

Each is made from files that a Saver wrote, by changes to their JSON or their bytes, and
compared with what a plain reader of the format finds, to which every element must be given
exactly once.
"""

import copy
import json
import math
import random
import shutil
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kill_savers import write_shards

import jslices as js
from jslices.checkpoint import DataLossError, NotFoundError
from jslices.checkpoint.trees import named_leaves

DEEP = "@@deep@@"
STRANGE = [
    *(
        None,
        True,
        False,
        "",
        "x",
        "..",
        "/etc/x",
        "a\0b",
        "\ud800",
        DEEP,
        [],
        {},
        [[]],
        {"x": 1},
    ),
    *(-1, 0, 1, 2, 3, 2**31, 2**62, 2**63, 2**64, 10**400, 0.0, 1.5, -1e400, math.nan),
    *(
        [-1],
        [0],
        [1],
        [2**62, 4],
        [2**31] * 3,
        [1] * 70,
        [None],
        [1.0, 2],
        ["x"],
        [True, 2],
    ),
    *("float32", "float64", "int64", "uint8", "bool", "float8_e4m3fn", "F4", "F64", "BF16"),
    *(
        "<U1",
        "<U0",
        "<U999999999999",
        "|S3",
        "<M8[s]",
        "<M8[x]",
        "object",
        "O",
        "V8",
        "f4,f4",
    ),
    *(
        "(9,)f4",
        "finfo",
        "__doc__",
        "numpy",
        "jax",
        "key:",
        "key:foo",
        "key:rbg",
        "str",
        "int",
    ),
    *(["jax", "float64", [2, 2]], ["jax", "<U1", [2]], ["key:rbg", "uint32", [4]], ["int"]),
    *({"list": []}, {"dict": [["x", None]]}, {"tuple": "ab"}, {"slices": []}, {"set": []}),
]


# --- files as JSON and bytes ----------------------------------------------------------


def parse(path):
    """The header, what this package wrote about the file, and the data."""
    contents = path.read_bytes()
    size = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + size])
    return header, json.loads(header["__metadata__"]["jslices"]), contents[8 + size :]


def write(path, header, info, data, deep="[" * 100_000 + "]" * 100_000):
    """A file with the right checksums, whatever it holds."""
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict):
        metadata["jslices"] = json.dumps(info).replace(f'"{DEEP}"', deep)
        for name, tensor in header.items():
            try:
                start, stop = tensor["data_offsets"]
                checksum = zlib.crc32(data[start:stop])
            except (KeyError, TypeError, ValueError):
                continue
            metadata[f"crc32:{name}"] = f"{checksum:08x}"
        metadata["jslices.crc32"] = "0" * 8
    text = json.dumps(header, separators=(",", ":")).replace(f'"{DEEP}"', deep).encode()
    head = len(text).to_bytes(8, "little") + text
    mark = b'"jslices.crc32":"'
    before, _, after = head.partition(mark)
    if after:
        head = before + mark + f"{zlib.crc32(head):08x}".encode() + after[8:]
    path.write_bytes(head + data)


# --- changes --------------------------------------------------------------------------


def places(tree):
    """Every place in a JSON tree, as the container and the key."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in list(items):
        yield tree, key
        if isinstance(child, dict | list):
            yield from places(child)


def change(tree, rng):
    """Changes something somewhere, as programs and people would."""
    found = list(places(tree))
    container, key = rng.choice(found)
    other, other_key = rng.choice(found)
    value, again = container[key], copy.deepcopy(other[other_key])
    match rng.randrange(8):
        case 0 | 1 | 2:
            container[key] = copy.deepcopy(rng.choice(STRANGE))
        case 3:
            del container[key]
        case 4:
            container[key] = again
        case 5:
            other[other_key], container[key] = copy.deepcopy(value), again
        case 6 if isinstance(container, list):
            container.insert(rng.randrange(len(container) + 1), again)
        case 6:
            container[rng.choice(["x", "t", "structure", "delta", "rows", "/x"])] = again
        case 7 if type(value) is int:
            container[key] = value + rng.choice([-2, -1, 1, 2, 2**31])
        case 7:
            container[key] = rng.choice([[value], [value, value], {"dict": [["x", value]]}])


def craft(path, rng):
    header, info, data = parse(path)
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        match rng.randrange(10):
            case 0 if data:
                data[rng.randrange(len(data))] = rng.choice([0, 1, 2, 127, 128, 255])
            case 1:
                change({n: t for n, t in header.items() if n != "__metadata__"}, rng)
            case 2:
                change(header["__metadata__"], rng)
            case _:
                change(info, rng)
    write(path, header, info, bytes(data))


# --- a plain reader -------------------------------------------------------------------

SIZES = {"BOOL": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "C64": 8}
SIZES |= {f"{kind}{8 * n}": n for kind in "IU" for n in (1, 2, 4, 8)}


def wanted_bytes(directory, prefix, names=None):
    """The bytes of variables (None: of all), ``[*shape, itemsize]``."""
    paths = sorted(directory.glob(f"{prefix}-*-of-*")) or [directory / prefix]
    parsed = [parse(path) for path in paths]
    info = parsed[0][1]
    delta = info.get("delta") or {"rows": {}}
    out = {}
    for name in names or info["variables"]:
        _, dtype, shape = info["variables"][name]
        size = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
        if name in delta["rows"]:
            array = wanted_bytes(directory, delta["base"], [name])[name]
            _, rows = tensor(parsed[0], delta["rows"][name])
            _, values = tensor(parsed[0], name)
            width = math.prod(values.shape[1:])
            flat = array.reshape(-1, width)
            flat[rows.reshape(-1, 8).view(np.int64)[:, 0]] = values.reshape(-1, width)
        else:
            array, given = np.zeros((*shape, size), np.uint8), np.zeros(shape, int)
            for part in parsed:
                if name in part[1]["starts"]:
                    box, value = tensor(part, name)
                    array[box[: len(shape)]] = value.reshape(array[box[: len(shape)]].shape)
                    given[box[: len(shape)]] += 1
            assert (given == 1).all(), name
        out[name] = array
    return out


def tensor(parsed, name):
    """Where a tensor belongs, and its bytes, ``[*shape, itemsize]``."""
    header, info, data = parsed
    entry = header[name]
    start, stop = entry["data_offsets"]
    array = np.frombuffer(data[start:stop], np.uint8)
    array = array.reshape(*entry["shape"], SIZES[entry["dtype"]])
    places = zip(info["starts"][name], entry["shape"], strict=False)
    return tuple(slice(a, a + n) for a, n in places), array


def bytes_of(leaf):
    if isinstance(leaf, str):
        return leaf.encode()
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return leaf if isinstance(leaf, bytes) else np.asarray(leaf).tobytes()


# --- what was saved -------------------------------------------------------------------

FULL = {
    "t": jnp.arange(8.0).reshape(4, 2),
    "layers": jnp.arange(12.0).reshape(2, 3, 2),
    "numbers": np.arange(6, dtype=np.float32).reshape(2, 3),
    "complex": np.array([1, 2j], np.complex64),
    "half": jnp.ones((2, 2), jnp.bfloat16),
    "mask": np.array([True, False]),
    "words": np.array(["a", "bc"]),
    "key": jax.random.key(0),
    "slices": js.IndexedSlices(jnp.ones((2, 3)), jnp.array([1, 5]), (4, 3)),
    "nested": [1, (2.5, None, True), {7: 2j}],
    "text": "naïve",
    "bytes": b"\0\1",
    "empty": np.zeros((0, 4), np.float32),
}
ROWS = slice(1, 3)
SHARDED = {"t": np.arange(24, dtype=np.float32).reshape(6, 4), "w": np.arange(2)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of every kind; the prefix and the tree by the name of the directory."""
    directory = tmp_path_factory.mktemp("saved")
    for name in ("full", "shards", "delta"):
        (directory / name).mkdir()
    js.Saver().save(FULL, directory / "full" / "m")
    write_shards(directory / "shards" / "m", SHARDED, 3, whole=["w"])
    saver = js.Saver()
    saver.save(FULL, directory / "delta" / "m", 0)
    changed = {**FULL, "t": FULL["t"].at[1].set(9), "half": FULL["half"].at[1].set(9)}
    saver.save_delta(changed, directory / "delta" / "m", 1)
    changed["t"] = FULL["t"].at[jnp.array([0, 3])].set(7)
    changed["layers"] = FULL["layers"].at[1, 2].set(7)
    saver.save_delta(changed, directory / "delta" / "m", 2)
    return directory


KINDS = {"full": ("m", FULL), "shards": ("m", SHARDED), "delta": ("m-2", FULL)}


def assert_refused_or_right(directory, kind):
    """Restores in several ways; returns how many of them gave values."""
    prefix, tree = KINDS[kind]
    ways = [{}, {"variables": tree}, {"variables": {"t": tree["t"]}}, {"rows": {"t": ROWS}}]
    count = 0
    for way in ways:
        try:
            restored = js.Saver().restore(directory / prefix, **way)
        except DataLossError as error:
            assert str(directory) in str(error)
            continue
        except (js.InvalidArgumentError, NotFoundError) as error:
            # Another dtype than is wanted, the name of a base that is not there, ...
            assert way or "narrower" in str(error) or "which is not there" in str(error)
            continue
        asked = named_leaves(way["variables"])[0] if "variables" in way else None
        wanted = wanted_bytes(directory, prefix, asked)
        if "rows" in way:
            wanted["t"] = wanted["t"][ROWS]
        names, leaves, _ = named_leaves(restored)
        found = {name: bytes_of(x) for name, x in zip(names, leaves, strict=True)}
        assert found == {name: array.tobytes() for name, array in wanted.items()}
        count += 1
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_is_right(kind, saved):
    assert assert_refused_or_right(saved / kind, kind) == 4


@pytest.mark.parametrize(("kind", "files"), [("full", 100), ("shards", 50), ("delta", 50)])
def test_crafted_files(kind, files, saved, tmp_path):
    refused, rng = 0, random.Random(kind)
    for number in range(files):
        directory = tmp_path / str(number)
        shutil.copytree(saved / kind, directory)
        path = rng.choice(sorted(directory.glob("m*")))
        craft(path, rng)
        refused += assert_refused_or_right(directory, kind) == 0
        shutil.rmtree(directory)
    assert files // 3 < refused < files


# --- one at a time --------------------------------------------------------------------


def edited(path, edit):
    """Writes a file anew after ``edit(header, info, data)``."""
    header, info, data = parse(path)
    data = bytearray(data)
    edit(header, info, data)
    write(path, header, info, bytes(data))


def test_pieces_are_held_to_their_description(tmp_path):
    path = js.Saver().save({"t": np.ones((2, 2), np.float32)}, tmp_path / "m")

    def edit(_, info, __):
        info["variables"]["t"] = ["numpy", "float64", [2, 2]]

    edited(tmp_path / "m", edit)
    with pytest.raises(
        DataLossError, match=r"m holds float32\[2, 2\] .* of 't', which is "
    ):
        js.Saver().restore(path)


@pytest.mark.parametrize("place", [[0, 0], [1, 0], [3, 0], [2, 1], [2**62, 0]])
def test_pieces_that_overlap_or_leave_a_hole(place, tmp_path):
    write_shards(tmp_path / "m", {"t": np.ones((6, 4))}, 3)

    def edit(_, info, __):
        info["starts"]["t"] = place

    edited(tmp_path / "m-00001-of-00003", edit)
    with pytest.raises(DataLossError, match=r"m does not hold every element of 't'.* once"):
        js.Saver().restore(tmp_path / "m")


@pytest.mark.parametrize("base", ["m-1", "m-2"])
def test_deltas_in_a_circle(base, saved, tmp_path):
    shutil.copytree(saved / "delta", tmp_path, dirs_exist_ok=True)
    base_id = parse(tmp_path / base)[1]["id"]
    edited(tmp_path / "m-1", lambda _, i, __: i["delta"].update(base=base, base_id=base_id))
    with pytest.raises(
        DataLossError, match=f"m-1 is a delta that builds on .*{base}, which"
    ):
        js.Saver().restore(tmp_path / "m-2")
    js.Saver().save(FULL, tmp_path / "m", 3)


@pytest.mark.parametrize("held", [["x"], [[]], [1], "t"])
def test_boxes_of_what_is_not_there(held, tmp_path):
    path = js.Saver().save({"t": np.ones((2, 2), np.float32)}, tmp_path / "m")
    edited(tmp_path / "m", lambda _, info, __: info.update(held=held))
    with pytest.raises(DataLossError, match=r"m cannot be read: .*(in boxes|'held')"):
        js.Saver().restore(path)


@pytest.mark.parametrize("depth", [50, 400, 900, 20_000])
def test_deep_structures(depth, tmp_path):
    name = "/".join(["0"] * depth)
    path = js.Saver().save({name: 1}, tmp_path / "m")
    header, info, data = parse(tmp_path / "m")
    info["structure"] = DEEP
    deep = '{"list":[' * depth + f'"{name}"' + "]}" * depth
    write(tmp_path / "m", header, info, data, deep)
    try:
        restored = js.Saver().restore(path)
    except DataLossError as error:
        assert depth > 50 and f"{path} cannot be read: its " in str(error)
        assert "is nested too deeply" in str(error)
    else:
        for _ in range(depth):
            (restored,) = restored
        assert restored == 1


NO_VALUES = [
    (np.array([True, False]), b"\x07\0", "bools that are neither 0 nor 1"),
    (np.array(["ab"]), b"\xff" * 8, "characters that Unicode does not have"),
    ("naïve", b"\xff" * 6, "codec can't decode byte"),
]


@pytest.mark.parametrize(("value", "contents", "text"), NO_VALUES)
def test_bytes_that_stand_for_no_value(value, contents, text, tmp_path):
    js.Saver().save({"a": value, "b": 1}, tmp_path / "m")

    def edit(header, _, data):
        start, stop = header["a"]["data_offsets"]
        data[start:stop] = contents

    edited(tmp_path / "m", edit)
    with pytest.raises(DataLossError, match=f"'a' in .*m cannot be read: .*{text}"):
        js.Saver().restore(tmp_path / "m")
    assert js.Saver().restore(tmp_path / "m", {"b": 0}) == {"b": 1}


@pytest.mark.parametrize("rows", [[-1], [4], [1, 1], [2, 0], [2**62]])
def test_row_numbers_of_a_delta(rows, tmp_path):
    saver = js.Saver()
    saver.save({"t": np.zeros((4, 2))}, tmp_path / "m", 0)
    new, touched = np.zeros((4, 2)), {"t": list(range(len(rows)))}
    new[touched["t"]] = 1
    saver.save_delta({"t": new}, tmp_path / "m", 1, touched=touched)

    def edit(header, _, data):
        start, stop = header["t@rows"]["data_offsets"]
        data[start:stop] = np.array(rows, np.int64).tobytes()

    edited(tmp_path / "m-1", edit)
    with pytest.raises(
        DataLossError, match=r"m-1 holds rows of 't' out of order or beyond"
    ):
        js.Saver().restore(tmp_path / "m-1")


def test_strange_names_of_files(tmp_path):
    path = js.Saver().save({"a": 1}, tmp_path / "m")
    for name in ("m-00000-of-00000", "m-00001-of-00002", "m-00000-of-00001x", ".m.tmp"):
        shutil.copy(path, tmp_path / name)
    assert js.Saver().restore(path) == {"a": 1}
    shutil.copy(path, tmp_path / "n-00000-of-00002")
    with pytest.raises(DataLossError, match=r"n-00000-of-00002 calls itself shard 0 of 1"):
        js.Saver().restore(tmp_path / "n")


# --- state files ----------------------------------------------------------------------

WORDS = [
    *("model_checkpoint_path", "all_model_checkpoint_paths", "to_be_deleted", "saved_as"),
    *(
        ": ",
        '"',
        "'",
        "\\",
        "#",
        "\n",
        "# to_be_deleted: ",
        "\\000",
        "\\777",
        "\\U00110000",
    ),
    *(
        "\\ud800",
        "..",
        "/",
        "m-1",
        "a" * 5000,
        "1e999",
        "nan",
        "-",
        "{",
        "}",
        "\r",
        "\x00",
        "é",
    ),
]


def test_crafted_state_files(tmp_path):
    rng, saver = random.Random(0), js.Saver(max_to_keep=1)
    saver.save({"t": np.zeros((4, 2))}, tmp_path / "m", 0)
    saver.save_delta({"t": np.ones((4, 2))}, tmp_path / "m", 1)
    text, found = (tmp_path / "checkpoint").read_text(), 0
    assert "# to_be_deleted" in text
    for _ in range(500):
        crafted = text
        for _ in range(rng.choice([1, 1, 2, 5])):
            start = rng.randrange(len(crafted) + 1)
            stop = start + rng.choice([0, 0, 1, 10, 100])
            crafted = crafted[:start] + rng.choice(WORDS) + crafted[stop:]
        (tmp_path / "checkpoint").write_text(crafted)
        try:
            path = js.checkpoint.latest_checkpoint(tmp_path)
        except ValueError as error:
            said = "Invalid checkpoint state loaded", "is damaged: ", "which is not there"
            assert str(tmp_path) in str(error) and any(x in str(error) for x in said)
        else:
            assert js.Saver().restore(path)["t"].shape == (4, 2)
            found += 1
    assert 50 < found < 450
    js.Saver().save({"a": 1}, tmp_path / "new")  # takes over what a crafted file says
    assert js.Saver().restore(tmp_path / "m-1")["t"].sum() == 8
