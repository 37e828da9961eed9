"""Every notebook runs from top to bottom, and shows what its code shows today."""

import importlib.util
import pathlib
import re

import pytest
from forked import Origin

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)

NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("name", NAMES)


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(notebook):
    return [out for cell in notebook.cells for out in cell.get("outputs", [])]


def pictures(notebook):
    return [out for out in outputs(notebook) if "image/png" in out.get("data", {})]


@every_notebook
def test_shows_what_its_code_shows_today(name):
    notebook = read(name)
    stale = f"the outputs of {name} are stale: python notebooks/run.py {name}"
    assert notebook.metadata.get("code_digest") == run.digest(notebook), stale
    assert pictures(notebook), f"{name} shows no plot"
    for cell in notebook.cells:
        if pictures(nbformat.from_dict({"cells": [cell]})):
            alt = cell.metadata.get("alt", "")
            assert len(alt) > 40, f"no alt in metadata: {cell.source}"
    shown = str(outputs(notebook))
    assert "Traceback" not in shown
    assert not re.search(r"/(tmp|home|root|var|usr)/", shown), f"{name} shows a path"


def test_only_quick_sizes_may_change_without_a_run():
    def in_full(quick, whole):
        return run.in_full(f"%magic é\nn, é = {quick} if QUICK else {whole}, 'é'\nprint(n)")

    assert in_full("(1, 2)", "(3, 4)") == "#magic é\nn, é = (3, 4), 'é'\nprint(n)"
    assert in_full(1, 3) == in_full(2, 3) != in_full(1, 4)


@every_notebook
def test_installs_itself(name):
    assert read(name).cells[0].source == run.INSTALL, "python notebooks/run.py --frame"


@pytest.mark.parametrize("wheel", [True, False])
def test_installs_an_uploaded_wheel_or_the_checkout(wheel, tmp_path, monkeypatch):
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    asked = []
    shell.register_magic_function(asked.append, magic_name="pip")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    if wheel:
        (tmp_path / "jslices-9.9-py3-none-any.whl").touch()
    shell.run_cell(run.INSTALL).raise_error()
    place = "jslices-9.9-py3-none-any.whl" if wheel else ".."
    assert asked == [f'install -q "{place}[notebooks]"']


@every_notebook
def test_uses_public_names_only(name):
    code = "\n".join(c.source for c in read(name).cells if c.cell_type == "code")
    assert not re.search(r"\bjs\._|\bjslices\._|\bimport _|jslices\.\w+\._", code)


@every_notebook
def test_the_folder_shows_it(name):
    listed = (FOLDER / "README.md").read_text()
    assert f"]({name}.ipynb)" in listed
    assert f"(pictures/{name}.png)" in listed
    shown = (FOLDER / "pictures" / f"{name}.png").read_bytes()
    assert shown == run.cover(read(name)), f"python notebooks/run.py {name}"


@pytest.mark.slow
@pytest.mark.as_users  # its losses are compared to the bit
@pytest.mark.filterwarnings("ignore")
def test_runs_in_a_kernel(tmp_path, name="quickstart"):
    pytest.importorskip("flax")
    notebook = read(name)
    run.execute(notebook, str(tmp_path), quick=True)
    assert pictures(notebook), f"{name} shows no plot"


@pytest.fixture(scope="module")
def origin():
    with Origin("notebook_cells") as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "quickstart"])
def test_runs(name, origin, tmp_path):
    cells = [cell.source for cell in read(name).cells if cell.cell_type == "code"]
    if "from flax import" in str(cells):
        pytest.importorskip("flax")
    with origin.forked("run", cells=cells, folder=str(tmp_path)) as process:
        assert process.wait(timeout=600) == 0, process.errors()
        (shown,) = process.lines()
    assert int(shown), f"{name} shows no plot"
