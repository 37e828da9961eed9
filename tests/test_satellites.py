"""What is built around the core uses what it makes public, and what is listed here."""

import ast
import graphlib
import pathlib

import pytest

import jslices as js

ROOT = pathlib.Path(js.__file__).parent
SATELLITES: tuple[str, ...] = (
    *("accumulators", "checkpoint", "_host_table", "tf1", "keras", "tables"),
    *("dynamic", "experimental"),
    *("retrieval", "bench", "demo"),
)
#: Whole modules that anyone may import from.
PUBLIC_MODULES = (
    *("accumulators", "checkpoint", "checkpoint.boxes", "checkpoint.files", "extend"),
    *("dynamic", "dynamic.host", "errors", "experimental", "_proof.cost", "_proof.targets"),
    *("keras", "optim", "tables", "testing", "tf1", "tree"),
)
#: What satellites share of the core beside these, without a promise.
SHARED = {
    "_arguments": "Number OneOf",
    "_densify": "current_user_line human_bytes warn_at_line",
    "_grad.explain": "Explanation",
    "_install": "install_command",
    "_jax": "called_by_any_jax_operator",
    "_lookup.bags": "as_bags",
    "_lookup.embedding": "is_padding",
    "_lookup.mark": "mark_table",
    "_names": "public",
    "_place.boundary": "explicit_mesh like_first on_any_mesh",
    "_place.hints": "hint_once",
    "_place.placement": "Placement on_each_device placement_at_hand",
    "_rows.access": "canonical_indices empty_index index_dtype",
    "_rows.ids": "as_ids check_mode refuse_bad_ids settle",
    "_rows.rounding": "key_bits round_rows",
    "_rows.sums": "sort_ids sum_dtype",
    "_slices": "Stacked check_slices opened rows_at",
    "_slices.held": "held_where is_held takes_held unheld",
    "_typing": "Params PyTree State",
    "checkpoint.state_walk": "optimizer_states",
    "optim.engine.clock": "OLD_CLOCK OTHER_NUMBERS RowClock by_row has_rows_behind"
    " map_clocks short_logs with_columns",
    "optim.engine.missed": "LONG_LOG",
}


def imports(source: str) -> set[str]:
    """What a module imports of jslices, without ``jslices.`` in front."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError("jslices imports by absolute names")
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {n.removeprefix("jslices.") for n in names if n.startswith("jslices.")}


def is_public(name: str) -> bool:
    """True for a public module, a name in it, one of ``jslices`` itself, and one shared."""
    module, _, attribute = name.rpartition(".")
    if attribute in SHARED.get(module, "").split():
        return True
    if name in PUBLIC_MODULES or not module:
        return name in (*PUBLIC_MODULES, *js.__all__)
    return module in PUBLIC_MODULES and not attribute.startswith("_")


def private_imports(satellite: str) -> set[str]:
    path = ROOT / satellite
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    names = set().union(*(imports(file.read_text()) for file in files))
    own = f"{satellite}."
    return {n for n in names if not is_public(n) and not f"{n}.".startswith(own)}


@pytest.mark.parametrize("satellite", SATELLITES)
def test_satellites_import_what_is_public(satellite):
    assert not private_imports(satellite)


def test_nothing_is_shared_that_no_satellite_imports():
    files = [x for s in SATELLITES for x in ROOT.glob(f"{s}/**/*.py")]
    files += [x for s in SATELLITES for x in ROOT.glob(f"{s}.py")]
    used = set().union(*(imports(file.read_text()) for file in files))
    assert {f"{home}.{name}" for home in SHARED for name in SHARED[home].split()} <= used


def test_private_imports_are_recognised():
    source = "import jslices._rows.ids\nfrom jslices._slices import IndexedSlices\n"
    source += "from jslices import IndexedSlices, _rows\nfrom jslices.optim import adam\n"
    private = {name for name in imports(source) if not is_public(name)}
    assert private == {"_rows", "_rows.ids", "_slices.IndexedSlices"}


def folder_graph() -> dict[str, set[str]]:
    """From each file or folder of the package to those that it imports from."""
    graph: dict[str, set[str]] = {}
    for file in ROOT.rglob("*.py"):
        own = file.relative_to(ROOT).with_suffix("").parts[0]
        if own not in ("__init__", "__main__"):
            firsts = {name.split(".")[0] for name in imports(file.read_text())}
            graph.setdefault(own, set()).update(firsts - {own})
    return graph


def test_folders_import_each_other_without_cycles():
    graph = folder_graph()
    assert {"_place", "_jax"} <= graph["_rows"] | graph["_slices"]
    graphlib.TopologicalSorter(graph).prepare()
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"_place": {"_slices"}}).prepare()


#: From below; see CONTRIBUTING.
LAYERS = (
    *("_place", "_rows", "_slices", "_lookup", "_scatter", "_exchange", "_grad", "optim"),
)


def file_graph() -> dict[str, set[str]]:
    """From each file of the layers to those files that it imports from."""
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file
        for layer in LAYERS
        for file in (ROOT / layer).rglob("*.py")
    }
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    graph = {}
    for name, file in files.items():
        found = imports(file.read_text())
        graph[name] = {x if x in files else x.rpartition(".")[0] for x in found} & set(
            files
        )
    return graph


def test_layers_import_those_below():
    for file, others in file_graph().items():
        above = LAYERS[LAYERS.index(file.split(".")[0]) + 1 :]
        assert not {x for x in others if x.split(".")[0] in above}, file


def test_files_of_layers_import_each_other_without_circles():
    graph = file_graph()
    assert {"_grad.api", "optim.adam", "optim.engine.rule"} <= set(graph)
    graphlib.TopologicalSorter(graph).prepare()
