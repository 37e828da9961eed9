"""What a user meets first: names, documentation, import."""

import ast
import importlib
import inspect
import os
import pathlib
import pickle
import pkgutil
import re
import subprocess
import sys

import pytest

import jslices as js
import jslices.tf1 as tf

PUBLIC = [name for name in js.__all__ if name != "optim"]
INDEX = pathlib.Path(__file__).parent.parent / "docs" / "api" / "index.md"
FORBIDDEN = ("optax", "chex", "flax", "keras", "matplotlib", "safetensors", "tqdm")
FORBIDDEN += ("jax.experimental.sparse",)


@pytest.mark.parametrize("name", PUBLIC)
def test_documented(name):
    thing = getattr(js, name)
    doc = inspect.getdoc(thing)
    assert doc and len(doc) > 40
    if inspect.isfunction(thing):
        assert "Example:" in doc and ">>>" in doc
        hints = inspect.get_annotations(thing)
        assert set(hints) == {*inspect.signature(thing).parameters, "return"}


def test_the_index_of_the_api_lists_the_public_names():
    rows = re.findall(r"^\| \[.*\]\((\w+\.md)\) \| (.*) \|$", INDEX.read_text(), re.M)
    assert {page for page, _ in rows} == {p.name for p in INDEX.parent.glob("*.md")} - {
        INDEX.name
    }
    named = re.findall(r"`(\w+)`", " ".join(names for _, names in rows))
    assert sorted(named) == sorted(js.__all__)


#: The modules that programs import.
MODULES = ("accumulators", "checkpoint", "dynamic", "errors", "extend", "optim")
MODULES += ("retrieval", "tables", "testing", "tf1", "tf1.dtypes")
MODULES += ("tf1.initializers", "tf1.nn", "tf1.random", "tf1.sparse", "tf1.train", "tree")


@pytest.mark.parametrize("name", ["jslices", *(f"jslices.{name}" for name in MODULES)])
def test_modules_show_what_is_public_and_nothing_else(name):
    module = importlib.import_module(name)
    shown = {name: getattr(module, name) for name in dir(module)}
    assert sorted(module.__all__) == [*shown]
    modules = {name for name, thing in shown.items() if inspect.ismodule(thing)}
    assert name in ("jslices", "jslices.tf1") or not modules
    homes = {name: getattr(thing, "__module__", "jslices") for name, thing in shown.items()}
    foreign = {name for name, home in homes.items() if not home.startswith("jslices")}
    assert foreign <= {"Schedule"}  # a type


def test_tensorflow_has_a_module_of_its_own():
    moved = ("Variable", "get_variable", "zeros", "random_normal", "transform", "nn")
    for name in (*moved, "ones_initializer", "initializers", "ConditionalAccumulator"):
        assert not hasattr(js, name) and name in tf.__all__
    assert all(hasattr(tf, name) for name in tf.__all__)


def exceptions():
    """Every error and warning that a module of jslices defines for its users."""
    for module in pkgutil.walk_packages(js.__path__, "jslices."):
        if re.search(r"demo|bench|__main__|keras|experimental", module.name):
            continue
        for name, thing in vars(importlib.import_module(module.name)).items():
            error = inspect.isclass(thing) and issubclass(thing, Exception)
            if error and thing.__module__ == module.name and not name.startswith("_"):
                yield name


def test_every_exception_is_public():
    found = set(exceptions())
    assert found <= {*js.__all__, *vars(js.errors)}
    assert {"IdOutOfRangeError", "DensificationWarning", "DataLossError"} <= found


@pytest.mark.parametrize("name", [n for n in tf.__all__ if inspect.isfunction(vars(tf)[n])])
def test_tensorflow_functions_are_documented(name):
    doc = inspect.getdoc(vars(tf)[name])  # the module names the source of all
    assert ">>>" in doc or re.search(r":\w+:`jslices\.|``jax\.", doc)


@pytest.mark.parametrize("name", ["grad", "value_and_grad"])
def test_signatures_are_those_of_jax(name):
    import jax

    theirs = list(inspect.signature(getattr(jax, name)).parameters)
    ours = list(inspect.signature(getattr(js, name)).parameters)
    assert ours[:5] == theirs[:5] and ours[5:] == ["sparse", "exchange"]


def loaded_after(*statements):
    """What is loaded after each of the statements, which one new process runs in turn."""
    code = "; ".join(f"{line}; print(*sys.modules)" for line in statements)
    run = [sys.executable, "-c", f"import sys; {code}"]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    return [set(line.split()) for line in out.splitlines()]


@pytest.mark.slow
def test_import_brings_nothing_but_jax_and_numpy():
    loaded, with_optax = loaded_after("import jslices", "import optax")
    assert not [name for name in FORBIDDEN if name in loaded]
    assert "jslices.optim.adam" in loaded
    assert "optax" in with_optax  # the test can fail


SATELLITES = ("_proof", "accumulators", "checkpoint", "testing", "tf1")
SATELLITES += ("_host_table", "dynamic")
IMPORTED_BY_THEMSELVES = ("bench", "demo", "keras", "retrieval", "tables")


@pytest.mark.slow
def test_satellites_load_when_they_are_used():
    steps = {
        "import jslices as js; js.adam(1e-3); js.value_and_grad(abs)": set(),
        "js.testing": {"testing", "_proof"},
        "from jslices import Saver": {"testing", "_proof", "checkpoint"},
        "import jslices.tf1 as tf": {*SATELLITES} - {"_host_table", "dynamic"},
        "from jslices import *": {*SATELLITES},
    }
    for loaded, satellites in zip(loaded_after(*steps), steps.values(), strict=True):
        names = (*SATELLITES, *IMPORTED_BY_THEMSELVES)
        assert {name for name in names if f"jslices.{name}" in loaded} == satellites


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts a process for each name")
def test_names_of_satellites_may_be_the_first():
    """Imported alone, in a process that has JAX and nothing of jslices."""
    script = """
import os, sys
import jax
for name in sys.argv[1:]:
    if not os.fork():
        exec(f"from jslices import {name}")
        os._exit(0)
    if os.wait()[1]:
        sys.exit(name)
"""
    modules = {name: inspect.getmodule(getattr(js, name)).__name__ for name in js.__all__}
    lazy = [n for n, m in modules.items() if m.split(".")[1:2] in [[s] for s in SATELLITES]]
    assert len(lazy) > 5
    subprocess.run([sys.executable, "-c", script, "grad", *lazy], check=True)


def test_lazy_names_are_those_of_their_modules():
    assert {*js.__all__} <= {*dir(js)}
    assert pickle.loads(pickle.dumps(js.Saver)) is js.Saver is js.checkpoint.Saver
    with pytest.raises(AttributeError, match="'jslices' has no attribute 'nothing'"):
        js.nothing  # noqa: B018


#: The tests that call what has no public name, and why.
PRIVATE = {
    "conftest.py": "forgets which warnings were shown, which users must not",
    "test_coalesce.py": "sorts what coalesce may number by other means",
    "test_elsewhere.py": "sums by rows of a TPU, in float32 to the bit",
    "test_train_step.py": "runs on a CPU what is traced for a TPU",
    "test_row_loops.py": "reads rows by other means for some lengths of rows alone",
    "test_satellites.py": "an example of what it refuses",
    "test_host_table.py": "logs of few steps, which a run of seconds fills",
    "test_host_table_faults.py": "a log of few steps, and a full disk as it is written",
}


def private_names(source):
    """Names of jslices with an underscore in front, but for `_proof`, imported or read."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {*re.findall(r"from (jslices[\w.]*) import", node.value)}
    of_jslices = [re.fullmatch(r"(?:jslices|js|tf)\.([\w.]+)", name) for name in names]
    return [m[0] for m in of_jslices if m and re.search(r"(?:^|\.)_(?!_|proof)", m[1])]


def test_tests_use_public_names():
    here = pathlib.Path(__file__).parent
    private = {p.name for p in here.glob("*.py") if private_names(p.read_text())}
    assert private <= {*PRIVATE}


def test_private_names_are_recognised():
    private = ["import jslices._rows", "from jslices import _rows", "js._slices.x", "js._x"]
    assert all(map(private_names, private))
    # A program in a text, not written here as one that this test would notice.
    assert private_names(repr("from jslices._{} import y".format("rows")))
    assert not private_names("from jslices.__main__ import main; js.optim.adam(0.1)")
