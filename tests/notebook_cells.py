"""The code of a notebook, run by ``test_notebooks.py`` in a process that is forked.

What notebooks import takes as long as what they do, so it is imported here.
"""

import contextlib
import json
import os

#: As in a Jupyter kernel; read when matplotlib is imported.
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"

import jax.numpy  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import optax  # noqa: F401
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import jslices.testing  # noqa: F401

for name in ("flax.nnx", "scipy.sparse", "sklearn.manifold", "sklearn.metrics"):
    with contextlib.suppress(ImportError):
        __import__(name)


def run(cells, folder):
    """Runs cells in a folder, and prints how many pictures they show."""
    os.environ |= {"QUICK": "1", "IPYTHONDIR": folder}
    os.chdir(folder)
    shell, pictures = InteractiveShell.instance(), 0
    for cell in cells:
        with capture_output() as shown:
            result = shell.run_cell(cell)
        result.raise_error()
        pictures += sum("image/png" in x.data for x in shown.outputs)
    print(json.dumps(pictures))
