"""Runs notebooks from top to bottom and stores what they show.

    python notebooks/run.py                      # all of them
    python notebooks/run.py quickstart           # some of them
    python notebooks/run.py --quick quickstart   # small and fast; stores nothing
    python notebooks/run.py --frame              # runs nothing: the first cell has changed

What all notebooks share is written into them here: the first cell, which installs the
package where it is missing. A digest of the
code is stored beside the outputs, so that a test can say when they are stale. The picture
of the cell tagged ``cover`` (or the first one) also goes into pictures/, for README.md.
What a picture shows, for those who cannot see it, is ``alt`` in the metadata of its cell.
"""

import argparse
import ast
import base64
import hashlib
import itertools
import json
import os
import pathlib
import re
import sys
import tempfile

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent

INSTALL = """\
# Installs jslices and what this notebook needs where it is missing: from the checkout that
# it is in, or on Colab from a wheel that you upload (`pip wheel --no-deps .` makes one).
import glob
import importlib.util

if importlib.util.find_spec("jslices") is None:
    place = next(iter(glob.glob("jslices-*.whl")), "..")
    %pip install -q "{place}[notebooks]"\
"""


def digest(notebook: nbformat.NotebookNode) -> str:
    """Of the code cells after the first: changes where outputs may."""
    code = [in_full(cell.source) for cell in notebook.cells[1:] if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]


def in_full(source: str) -> str:
    """The code without its quick sizes: ``40 if QUICK else 300`` becomes ``300``."""
    code = re.sub("(?m)^%", "#", source).encode()  # lines of IPython are not Python
    firsts = list(itertools.accumulate(map(len, code.splitlines(True)), initial=0))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.IfExp) and ast.unparse(node.test) == "QUICK":
            first = firsts[node.lineno - 1] + node.col_offset
            last = firsts[node.orelse.lineno - 1] + node.orelse.col_offset
            code = code[:first] + b"\0" * (last - first) + code[last:]
    return code.replace(b"\0", b"").decode()


def execute(notebook: nbformat.NotebookNode, folder: str, quick: bool) -> None:
    """Runs all cells in `folder` by this very Python, so that it sees the same packages."""
    with tempfile.TemporaryDirectory() as place:
        kernel = pathlib.Path(place, "kernels", "python3")
        kernel.mkdir(parents=True)
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (kernel / "kernel.json").write_text(
            json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
        )
        client = nbclient.NotebookClient(
            notebook,
            timeout=600 if quick else None,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        settings = {
            "JUPYTER_PATH": place,
            "PYTHONPATH": str(ROOT),
            "QUICK": str(int(quick)),
        }
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            client.execute()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                output["data"].pop("text/plain", None)  # what no one sees: a repr


def cover(notebook: nbformat.NotebookNode) -> bytes:
    """The picture that stands for the notebook, a PNG."""
    tagged = [c for c in notebook.cells if "cover" in c.metadata.get("tags", ())]
    for cell in tagged or notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                return base64.b64decode(output["data"]["image/png"])
    raise ValueError("the notebook shows no picture")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="without .ipynb; all if none is given")
    parser.add_argument("--quick", action="store_true", help="small sizes; stores nothing")
    parser.add_argument("--frame", action="store_true", help="only what all share")
    args = parser.parse_args()
    for name in args.names or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        path = FOLDER / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        notebook.cells[0].source = INSTALL
        if args.frame:
            nbformat.write(notebook, path)
            continue
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, folder, args.quick)
        print(f"{name}: ran")
        if not args.quick:
            notebook.metadata = {
                "kernelspec": {
                    "display_name": "Python 3",
                    "language": "python",
                    "name": "python3",
                },
                "language_info": {"name": "python"},
                "code_digest": digest(notebook),
            }
            nbformat.write(notebook, path)
            pictures = FOLDER / "pictures"
            pictures.mkdir(exist_ok=True)
            (pictures / f"{name}.png").write_bytes(cover(notebook))


if __name__ == "__main__":
    main()
