"""The site has every public name, and its tables and pictures are those of the commands.

That it builds, and that no link is broken, is a step of .ci/run.
"""

import functools
import importlib
import inspect
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

import jslices as js
import jslices.extend  # imported by itself, as the next one
import jslices.tables
import jslices.tf1 as tf

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text()
PAGES = sorted(DOCS.rglob("*.md"))


def resolve(path):
    """What a dotted path names; modules win only where nothing else is called so."""
    names = path.split(".")
    thing = importlib.import_module(names.pop(0))
    for name in names:
        # jslices.optim.adam is the function; the page says jslices.optim.adam.adam.
        again = inspect.isfunction(thing) and thing.__name__ == name
        if again:
            continue
        if not hasattr(thing, name):  # a module that is loaded when it is first used
            importlib.import_module(f"{thing.__name__}.{name}")
        thing = getattr(thing, name)
    return thing


LISTED = {
    path: None
    for page in sorted((DOCS / "api").glob("*.md"))
    for path in re.findall(r"^::: (\S+)", page.read_text(), re.M)
}


def test_functions_are_not_taken_for_their_modules():
    """The site reads source: there jslices.optim.adam is the module of that name."""
    for path in LISTED:
        if (ROOT / f"{path.replace('.', '/')}.py").exists():
            name = path.rpartition(".")[2]
            assert inspect.ismodule(resolve(path)), f"list {path}.{name}"


@functools.cache
def shown():
    """What the pages document, apart from Keras, which not everyone has."""
    return [resolve(path) for path in LISTED if not path.startswith("jslices.keras")]


def public(module):
    """The names of a module that are its own: no imports, and no modules."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    return [n for n in names if not inspect.ismodule(getattr(module, n))]


@pytest.mark.parametrize(
    "module",
    [js, js.optim, js.checkpoint, js.accumulators, js.testing, js.errors, jslices.extend],
    ids=str,
)
def test_every_public_name_has_a_place(module):
    for name in public(module):
        thing = getattr(module, name)
        if name != "Schedule":  # an alias of a type
            assert any(thing is one for one in shown()), name


def test_modules_have_a_place():
    modules = {n for n in js.__all__ if inspect.ismodule(getattr(js, n))}
    assert {f"jslices.{name}" for name in modules} <= {*LISTED}


def test_keras_has_a_place():
    source = (ROOT / "jslices" / "keras" / "__init__.py").read_text()
    names = re.findall(r'"(\w+)"', source[source.index("__all__") :])
    assert names and all(f"jslices.keras.{name}" in LISTED for name in names)


def test_names_of_tensorflow_have_a_place():
    page = (DOCS / "api" / "tf1.md").read_text()
    for name in tf.__all__:
        listed = {f"jslices.tf1.{name}", f"jslices.tf1.{name}.{name}"} & {*LISTED}
        assert listed or re.search(rf"`{name}[`.]", page), name


def test_names_in_the_text_exist():
    """``js.clip`` in a sentence or a table is a name, on every page."""
    count = 0
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for code in re.findall(r"`([^`]+)`", text):
            for path in re.findall(r"(?<![\w.\"/])(?:js|jslices)((?:\.\w+)+)", code):
                if not path.startswith((".keras", ".md", "._")):
                    resolve(f"jslices{path}")
                    count += 1
    assert count > 100


def test_every_notebook_is_listed():
    page = (DOCS / "notebooks.md").read_text()
    listed = re.findall(r"\(notebooks/(\w+)\.md\)", page)
    assert sorted(listed) == sorted(path.stem for path in ROOT.glob("notebooks/*.ipynb"))


def test_pages_and_navigation_agree():
    linked = re.findall(r"([\w/]+\.md)$", CONFIG[CONFIG.index("\nnav:") :], re.M)
    pages = [str(page.relative_to(DOCS)) for page in PAGES]
    pages += [f"notebooks/{path.stem}.md" for path in ROOT.glob("notebooks/*.ipynb")]
    assert sorted(linked) == sorted(pages)


def test_guarantees_name_tests():
    sources = (path.read_text() for path in pathlib.Path(__file__).parent.glob("*.py"))
    tests = {
        name for text in sources for name in re.findall(r"^def (test_\w+)", text, re.M)
    }
    lines = re.findall(r"^\|.*\| (.+) \|$", (DOCS / "guarantees.md").read_text(), re.M)
    proofs = [re.findall(r"`(\w+)`", line) for line in lines if line != "test"]
    assert len(proofs) > 20 and all(names and {*names} <= tests for names in proofs)


#: An address of the package, or its name where pip would ask a registry for it.
ADDRESS = re.compile(
    r"\w+://[^\s\"'`)]*\bjslices\b|pip install (?:(?:-\S+|\"[^\"]*\") )*[\"']?jslices\b"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_file_names_an_address_that_is_not_ours():
    """Whoever registers it serves code to our users."""
    files = [*ROOT.glob("*.*"), *ROOT.glob(".github/**/*.yml"), *PAGES, *DOCS.rglob("*.py")]
    for folder in ("jslices", "notebooks", "benchmarks", "examples", "findings", "tests"):
        files += [*(ROOT / folder).rglob("*.[pim]*"), *(ROOT / folder).rglob("*.sh")]
    texts = {x: x.read_text() for x in files if re.match(r"\.(?!pyc|png)", x.suffix)}
    assert len(texts) > 400
    ours = PROJECT["urls"]["Repository"] or "(none)"
    for path, text in texts.items():
        for found in ADDRESS.finditer(text.replace('\\"', '"')):
            assert found[0].startswith(ours), f"{path}: {found[0]}"


def test_addresses_are_recognised():
    for name in ("jslices", "jslices[keras]"):
        assert ADDRESS.search(f"pip install -q {name}")
        assert ADDRESS.search(f'%pip install "{name} @ git')
    assert ADDRESS.search("://".join(["https", "example.org/someone/jslices/blob/main"]))
    assert not ADDRESS.search('pip install ".[demo]" && python -m jslices')


def test_lines_that_install_name_extras_that_there_are():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
    sources = [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")]
    sources += (ROOT / "jslices").rglob("*.py")
    text = "\n".join(path.read_text() for path in [*pages, *sources])
    lists = re.findall(r"pip install [^\n`]*[\"']\.\[([\w,]+)\]", text)
    named = ",".join(lists).split(",")
    assert len(named) > 12 and {*named} <= {*PROJECT["optional-dependencies"]}


def test_numbers_of_the_version_agree():
    assert f"version = {{{js.__version__}}}" in (DOCS / "cite.md").read_text()
    assert f"\nversion: {js.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.slow
def test_pictures_and_tables_are_those_of_the_command(tmp_path):
    for part in ("docs", "benchmarks/results"):
        shutil.copytree(ROOT / part, tmp_path / part)
    drawn = {path.name for path in (DOCS / "figures").glob("*.svg")}
    for path in (tmp_path / "docs" / "figures").glob("*.svg"):
        path.unlink()
    made = re.compile(r"(<!-- made by .*?-->\n).*?(<!-- end -->)", re.S)
    pages = {name: tmp_path / "docs" / name for name in ("speed.md", "keyed_tables.md")}
    for page in pages.values():
        assert made.search(page.read_text())
        page.write_text(made.sub(r"\1\2", page.read_text()))
    subprocess.run([sys.executable, tmp_path / "docs" / "figures" / "draw.py"], check=True)
    assert {path.name for path in (tmp_path / "docs" / "figures").glob("*.svg")} == drawn
    assert len(drawn) == 12
    for name, page in pages.items():
        assert page.read_text() == (DOCS / name).read_text()
    used = {
        name for p in PAGES for name in re.findall(r"figures/([\w-]+\.svg)", p.read_text())
    }
    assert used == drawn


def test_pictures_have_both_colours():
    for page in PAGES:
        text = page.read_text()
        light = re.findall(r"figures/([\w-]+)-light\.svg#gh-light-mode-only", text)
        dark = re.findall(r"figures/([\w-]+)-dark\.svg#gh-dark-mode-only", text)
        assert light == dark
