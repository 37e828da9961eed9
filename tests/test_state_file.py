"""TensorFlow's state file: read, written, and read by protocol buffers themselves."""

import json
import logging
import os

import pytest
from draws import examples
from helpers import golden
from hypothesis import given
from hypothesis import strategies as st

import jslices as js
from jslices.checkpoint import CheckpointState, NotFoundError
from jslices.checkpoint.tensors import TensorFile
from jslices.checkpoint.text_format import dump_text, parse_text


def write(directory, text):
    (directory / "checkpoint").write_bytes(
        text if isinstance(text, bytes) else text.encode()
    )


READABLE = [
    ('model_checkpoint_path: "/m"\n', "/m", []),
    ('model_checkpoint_path:"/m" all_model_checkpoint_paths: "/a"', "/m", ["/a"]),
    ("# words\nmodel_checkpoint_path: '/m'; # more\n", "/m", []),
    ('model_checkpoint_path: "/a" "b"\n"c"', "/abc", []),
    ('model_checkpoint_path # "x"\n: "/a" # "y"\n"b"', "/ab", []),
    (r'model_checkpoint_path: "/\303\251\x41\n\"\\\u00e9"', '/éA\n"\\é', []),
    ('model_checkpoint_path: "/é and space"', "/é and space", []),
    (
        'model_checkpoint_path: "/m"\nall_model_checkpoint_paths: "/m"\n'
        "all_model_checkpoint_timestamps: 1.7e9\nlast_preserved_timestamp: 1.5\n",
        "/m",
        ["/m"],
    ),
]


@pytest.mark.parametrize(("text", "path", "paths"), READABLE)
def test_readable(text, path, paths, tmp_path):
    write(tmp_path, text)
    state = js.checkpoint.get_checkpoint_state(tmp_path)
    assert state.model_checkpoint_path == path
    assert state.all_model_checkpoint_paths == paths


UNREADABLE = [
    "model_checkpoint_path: \n",
    "model_checkpoint_path",
    'model_checkpoint_path: "open\n',
    'strange_field: "x"\nmodel_checkpoint_path: "/m"',
    "model_checkpoint_path: 3",
    '"m"',
    'model_checkpoint_path: "a" all_model_checkpoint_paths 7',
    'model_checkpoint_path: "a" model_checkpoint_path: "b"',
    "3",
    "; ",
    "{}",
    b"\xff\xfe",
]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_damaged_file_is_not_no_file(text, tmp_path):
    write(tmp_path, text)
    for read in (js.checkpoint.get_checkpoint_state, js.checkpoint.latest_checkpoint):
        with pytest.raises(js.errors.DataLossError, match=r"is damaged: .* by its path"):
            read(tmp_path)


@pytest.mark.parametrize("text", ["", "# nothing\n", 'all_model_checkpoint_paths: "m"'])
def test_no_path_at_all_is_an_error(text, tmp_path):
    write(tmp_path, text)
    for function in (js.checkpoint.get_checkpoint_state, js.checkpoint.latest_checkpoint):
        with pytest.raises(
            ValueError, match=r"Invalid checkpoint state loaded from .*chec"
        ):
            function(tmp_path)


def test_absent(tmp_path, caplog):
    for directory in (tmp_path, tmp_path / "no"):
        assert js.checkpoint.get_checkpoint_state(directory) is None
        assert js.checkpoint.latest_checkpoint(directory) is None
    assert caplog.text == ""


def test_relative_paths_are_joined_and_absolute_ones_kept(tmp_path, monkeypatch):
    write(tmp_path, 'model_checkpoint_path: "m-2" all_model_checkpoint_paths: "/x/m-1"')
    state = js.checkpoint.get_checkpoint_state(tmp_path)
    assert state.model_checkpoint_path == str(tmp_path / "m-2")
    assert state.all_model_checkpoint_paths == ["/x/m-1"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m-2").write_text("")
    assert js.checkpoint.latest_checkpoint(".") == "./m-2"


def test_a_missing_checkpoint_is_logged(tmp_path, caplog):
    write(tmp_path, 'model_checkpoint_path: "m-2"')
    with caplog.at_level(logging.ERROR):
        assert js.checkpoint.latest_checkpoint(tmp_path) is None
    assert "names the checkpoint" in caplog.text and "m-2" in caplog.text


@pytest.mark.parametrize("file", ["m", "m-00000-of-00003", "m.index"])
def test_what_counts_as_a_checkpoint(file, tmp_path):
    (tmp_path / file).write_text("")
    write(tmp_path, 'model_checkpoint_path: "m"')
    assert js.checkpoint.latest_checkpoint(tmp_path) == str(tmp_path / "m")


def test_other_state_files(tmp_path):
    js.checkpoint.update_checkpoint_state(tmp_path, "/m", latest_filename="other")
    assert js.checkpoint.get_checkpoint_state(tmp_path) is None
    assert (
        js.checkpoint.get_checkpoint_state(tmp_path, "other").model_checkpoint_path == "/m"
    )


def test_relative_directories_are_taken_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("d")
    js.checkpoint.update_checkpoint_state("d", "d/m-2", ["d/m-1", "/abs", "d/m-2"])
    paths = (tmp_path / "d/checkpoint").read_text().splitlines()[1:]
    assert [line.split()[1] for line in paths] == ['"m-1"', '"/abs"', '"m-2"']


@pytest.mark.parametrize("case", golden("state_file"))
def test_paths_as_tensorflow_writes_and_reads_them(case, tmp_path, monkeypatch):
    """``D`` stands for the current directory."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("sub")

    def here(path):
        return path.replace("D", str(tmp_path))

    directory, newest = here(case["save_dir"]), here(case["model_checkpoint_path"])
    paths = [here(path) for path in case["all_model_checkpoint_paths"] or ()]
    state_file = os.path.abspath(os.path.join(directory, "checkpoint"))
    relative = os.path.relpath(newest, directory or ".") if directory == "sub" else newest
    if os.path.abspath(os.path.join(directory, relative)) == state_file:
        # TensorFlow compares the two as text, and may write a file that names itself.
        with pytest.raises(RuntimeError, match="conflicts with path used for checkpoint"):
            js.checkpoint.update_checkpoint_state(directory, newest, paths)
        return
    js.checkpoint.update_checkpoint_state(directory, newest, paths)
    with open(state_file) as file:
        assert file.read() == here(case["text"])
    state = js.checkpoint.get_checkpoint_state(directory)
    read = [state.model_checkpoint_path, *state.all_model_checkpoint_paths]
    assert read == [here(path) for path in case["read"]]


def test_errors_of_update(tmp_path):
    with pytest.raises(NotFoundError, match=r"the directory '.*/no' does not exist"):
        js.checkpoint.update_checkpoint_state(tmp_path / "no", "m")
    for path in ("checkpoint", str(tmp_path / "checkpoint")):
        with pytest.raises(RuntimeError, match=r"conflicts with path used for checkpoint"):
            js.checkpoint.update_checkpoint_state(tmp_path, path)
    with pytest.raises(ValueError, match=r"1 timestamps for 2 checkpoints"):
        js.checkpoint.update_checkpoint_state(tmp_path, "m", ["a", "m"], None, [1.0])
    assert os.listdir(tmp_path) == []


def test_timestamps(tmp_path):
    js.checkpoint.update_checkpoint_state(
        tmp_path, "/m", ["/a", "/m"], None, [1.5, 2e9], 1.0
    )
    state = js.checkpoint.get_checkpoint_state(tmp_path)
    assert state == CheckpointState("/m", ["/a", "/m"], [1.5, 2e9], 1.0)


def doomed(directory, *names):
    """A state file that says what waits for deletion, as a process leaves it that ends."""
    saver, paths = js.Saver(max_to_keep=1), {}
    for name in names:
        paths[name] = saver.save({"a": 1}, directory / name, write_state=False)
    saver.save({"a": 1}, directory / "base")
    saver.save_delta({"a": 2}, directory / "delta")
    text = (directory / "checkpoint").read_text()
    (note,) = [line for line in text.splitlines() if line.startswith("#")]
    base_id = note.split('"')[3]
    ids = {name: TensorFile(path).metadata["jslices"] for name, path in paths.items()}
    notes = [
        note.replace("base", n).replace(base_id, json.loads(i)["id"])
        for n, i in ids.items()
    ]
    write(directory, text + "".join(f"{note}\n" for note in notes))
    return text


def test_what_waits_for_deletion_goes_when_somebody_saves(tmp_path):
    text = doomed(tmp_path, "x", "y", "Übung")
    assert js.checkpoint.latest_checkpoint(tmp_path) == str(tmp_path / "delta")
    js.Saver().save({"a": 3}, tmp_path / "y")  # was waiting, and is not any more
    assert sorted(os.listdir(tmp_path)) == ["base", "checkpoint", "delta", "y"]
    note = text.splitlines()[-1]
    assert note in (tmp_path / "checkpoint").read_text()  # the base still waits
    js.checkpoint.update_checkpoint_state(tmp_path, tmp_path / "y")
    assert note in (tmp_path / "checkpoint").read_text()


def test_comments_go_with_another_file(tmp_path):
    """A file that is cut can have zeros at its end after a power failure."""
    doomed(tmp_path, "x")
    with open(tmp_path / "checkpoint") as before:
        js.Saver(max_to_keep=1).save({"a": 3}, tmp_path / "base")
        assert "#" not in (tmp_path / "checkpoint").read_text()
        assert "to_be_deleted" in before.read()


def test_only_what_was_meant_is_deleted(tmp_path):
    inside = tmp_path / "d"
    inside.mkdir()
    text = doomed(inside, "x", "changed")
    notes = (inside / "checkpoint").read_text()
    js.Saver().save({"a": 4}, inside / "changed", write_state=False)
    outside = js.Saver().save({"a": 5}, tmp_path / "m", write_state=False)
    save_id = json.loads(TensorFile(outside).metadata["jslices"])["id"]
    (inside / "text").write_text("words")
    strange = [
        f'# to_be_deleted: "../m" saved_as: "{save_id}"',
        f'# to_be_deleted: "{outside}" saved_as: "{save_id}"',
        f'# to_be_deleted: "text" saved_as: "{save_id}"',
        '# to_be_deleted: "text" saved_as: ""',
        '# to_be_deleted: "text"',
        "# to_be_deleted: 7 saved_as: 7",
        '# to_be_deleted: "a\\000b" saved_as: "0"',
        '# to_be_deleted: ".." saved_as: "0"',
        '# to_be_deleted: "" saved_as: "0"',
        '# to_be_deleted: "open',
        "# to_be_deleted: ",
    ]
    write(inside, notes + "".join(f"{line}\n" for line in strange))
    assert notes.startswith(text)
    js.Saver().save({"a": 3}, inside / "new")
    left = ["base", "changed", "checkpoint", "delta", "new", "text"]
    assert sorted(os.listdir(inside)) == left
    assert os.path.exists(outside)


def test_recovering_what_is_no_checkpoint_does_not_delete_it(tmp_path):
    (tmp_path / "letter").write_text("words")
    write(tmp_path, f'model_checkpoint_path: "{tmp_path}/letter"')
    saver = js.Saver(max_to_keep=1)
    saver.recover_last_checkpoints([js.checkpoint.latest_checkpoint(tmp_path)])
    for step in range(3):
        saver.save({"a": 1}, tmp_path / "m", step)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "letter", "m-2"]


def protobuf_state():
    """TensorFlow's message, made with protocol buffers."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="checkpoint_state.proto", package="tensorflow", syntax="proto3"
    )
    message = file.message_type.add(name="CheckpointState")
    fields = [("model_checkpoint_path", 1, 9, 1), ("all_model_checkpoint_paths", 2, 9, 3)]
    fields += [("all_model_checkpoint_timestamps", 3, 1, 3)]
    fields += [("last_preserved_timestamp", 4, 1, 1)]
    for name, number, kind, label in fields:
        message.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName("tensorflow.CheckpointState")
    return message_factory.GetMessageClass(found)


@pytest.mark.parametrize("as_utf8", [False, True])
def test_protocol_buffers_read_ours_and_we_read_theirs(as_utf8, tmp_path):
    State = protobuf_state()
    from google.protobuf import text_format

    for path in ("/a b/m-1", "/Übung/模型-1", '/quo"te\\\n\t\x01\x7f', "m'1"):
        paths, times = [path, path + "2"], [0.5, 1.7e9]
        js.checkpoint.update_checkpoint_state(
            tmp_path, path, paths[::-1], None, times, 3.25
        )
        read = text_format.Parse((tmp_path / "checkpoint").read_text(), State())
        assert read.model_checkpoint_path == path
        assert list(read.all_model_checkpoint_paths) == paths[::-1]
        assert list(read.all_model_checkpoint_timestamps) == times
        theirs = text_format.MessageToString(read, as_utf8=as_utf8)
        write(tmp_path, theirs)
        state = js.checkpoint.get_checkpoint_state(tmp_path)
        assert state.model_checkpoint_path == os.path.join(tmp_path, path)
        assert state.all_model_checkpoint_timestamps == times
        if not as_utf8:
            assert state.last_preserved_timestamp == 3.25


def test_protocol_buffers_read_what_waits_for_deletion(tmp_path):
    State = protobuf_state()
    from google.protobuf import text_format

    doomed(tmp_path, 'quo"te', "Übung")
    text = (tmp_path / "checkpoint").read_text()
    read = text_format.Parse(text, State())
    assert text.count("#") == 3
    assert list(read.all_model_checkpoint_paths) == ["delta"]


@examples(200)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(allow_nan=False))
def test_any_text_comes_back(text, number):
    fields = [("a", text), ("b", number), ("a", "")]
    if number in (float("inf"), float("-inf")):
        return
    assert parse_text(dump_text(fields).encode()) == fields


@examples(200)
@given(st.binary())
def test_any_bytes_are_read_or_refused(data):
    try:
        parse_text(data)
    except ValueError:
        pass


def test_paths_that_are_not_utf8(tmp_path):
    path = os.fsdecode(b"/caf\xe9/m")
    js.checkpoint.update_checkpoint_state(tmp_path, path)
    assert js.checkpoint.get_checkpoint_state(tmp_path).model_checkpoint_path == path
