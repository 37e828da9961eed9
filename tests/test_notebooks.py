"""Every notebook runs from top to bottom."""

import pathlib
import sys

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel of this very Python, so that it sees the same packages."""
    import json

    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "tests",
        "language": "python",
    }
    place = tmp_path / "kernels" / "tests"
    place.mkdir(parents=True)
    (place / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    # Wherever the tests found jslices, the kernel must too.
    import jslices

    root = str(pathlib.Path(jslices.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", root)
    return "tests"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(p.name for p in FOLDER.glob("*.ipynb")))
def test_runs(name, kernel, tmp_path):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs"), f"{name} must be committed without outputs"
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name=kernel,
        resources={"metadata": {"path": tmp_path}},
    )
    client.execute()
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert pictures, f"{name} shows no plot"
