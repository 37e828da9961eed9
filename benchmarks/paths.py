"""How far it is through a step: files and functions of jslices that a trace enters.

    python benchmarks/paths.py

For each path: the files entered, the distinct functions called in them (comprehensions and
lambdas count, those of one function as one), and the changes of file, which are calls in
another file than the call of jslices before. Once for all files, and once without those of
vocabulary: to look up a word is no change of room. All counted in the second of two traces
under ``jax.jit``, V = 1e5, K = 1e4, D = 64. Then the lines of the package, names that a
search finds twice, and calls of ``id``. Nothing is compiled; it takes seconds.
"""

import ast
import collections
import os
import pathlib
import sys
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import jslices as js

PACKAGE = pathlib.Path(js.__file__).parent
DEVICES = 8
V, K, D = 100_000, 10_000, 64
LAZY, EXACT = "lazy Adam, update and apply_updates", "train_step of exact Adam"
FIGURES = ["files", "functions", "changes of file"]
VOCABULARY = (
    "_arguments _jax _place/boundary _rows/access _slices/entries _slices/parts "
    "_grad/origins _grad/walk optim/engine/numbers optim/engine/rule optim/engine/arguments"
).split()


class Calls:
    """For ``sys.setprofile``: which of our functions are called, one after another."""

    def __init__(self, without=()):
        self.files, self.functions, self.changes = set(), set(), 0
        self._last, self._without = None, {str(PACKAGE / f"{x}.py") for x in without}

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)):
            return
        if code.co_filename in self._without:
            return
        self.files.add(code.co_filename)
        self.functions.add((code.co_filename, code.co_qualname))
        self.changes += self._last not in (None, code.co_filename)
        self._last = code.co_filename


def figures_of(function, *args):
    """Those of a trace of ``function``, of all files and without vocabulary."""
    found = []
    jax.make_jaxpr(function)(*args)  # imports what is imported when used
    for calls in (Calls(), Calls(VOCABULARY)):

        def counted(*args, calls=calls):
            sys.setprofile(calls)
            try:
                return function(*args)
            finally:
                sys.setprofile(None)

        jax.clear_caches()
        jax.jit(counted).trace(*args)
        found += [len(calls.files), len(calls.functions), calls.changes]
    return found


def loss(params, ids, target):
    return jnp.mean((params["table"][ids] @ params["w"] - target) ** 2)


def arguments(split=None, whole=None):
    """``(params, ids, target)``, as shapes; table and batch split over devices."""

    def of(shape, dtype, sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = {"table": of((V, D), "float32", split), "w": of((D,), "float32", whole)}
    return params, of((K,), "int32", split), of((K,), "float32", split)


def stepped(tx, **options):
    def step(params, state, ids, target):
        grads = js.grad(loss, **options)(params, ids, target)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    return step


def paths():
    """``{path: figures}``."""
    params, *batch = arguments()
    lazy, exact = js.adam(1e-3), js.adam(1e-3, untouched="exact")
    state, exact_state = (jax.eval_shape(tx.init, params) for tx in (lazy, exact))
    grads = jax.eval_shape(js.grad(loss), params, *batch)

    def update(grads, state, params):
        updates, state = lazy.update(grads, state, params)
        return js.apply_updates(params, updates), state

    found = {
        "value_and_grad": figures_of(js.value_and_grad(loss), params, *batch),
        LAZY: figures_of(update, grads, state, params),
        EXACT: figures_of(js.train_step(loss, exact), params, exact_state, *batch),
    }
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,))
    shardings = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("x",), ()))
    with jax.set_mesh(mesh):
        split, *batch = arguments(*shardings)
        step = stepped(lazy, exchange={"table": js.Exchange("x")})
        found[f"Exchange step, {DEVICES} devices"] = figures_of(step, split, state, *batch)
    table, ids = params["table"], batch[0].update(sharding=None)
    found["embedding_lookup alone"] = figures_of(js.embedding_lookup, table, ids)
    return found


def lines_of(folder):
    return sum(file.read_text().count("\n") for file in folder.rglob("*.py"))


def defined_names(tree):
    """Of functions, classes and variables of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def sizes():
    """``{figure of the source: number}``."""
    trees = {
        file: ast.parse(file.read_text())
        for folder in ("_grad", "optim")
        for file in (PACKAGE / folder).rglob("*.py")
    }
    names = collections.Counter(
        name for tree in trees.values() for name in set(defined_names(tree))
    )
    identities = [
        node
        for file, tree in trees.items()
        if PACKAGE / "optim" in file.parents
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "id"
    ]
    return {
        "lines of the package": lines_of(PACKAGE),
        "lines of optim/engine": lines_of(PACKAGE / "optim/engine"),
        "names with several definitions in _grad and optim": sum(
            count > 1 for name, count in names.items() if name != "__all__"
        ),
        "calls of id() in optim": len(identities),
    }


def main():
    warnings.simplefilter("ignore", js.PerformanceHint)
    columns = [*FIGURES, *(f"{x} without vocabulary" for x in FIGURES)]
    print("| path |", " | ".join(columns), "|\n|---|" + "---:|" * len(columns))
    for path, figures in paths().items():
        print(f"| {path} |", " | ".join(f"{n:,}" for n in figures), "|")
    print()
    for name, figure in sizes().items():
        print(f"{name}: {figure:,}")


if __name__ == "__main__":
    main()
