"""The pages of docs are true: their code runs, and what it prints is what they show."""

import contextlib
import io
import linecache
import pathlib
import re
import subprocess
import sys

import jax
import pytest
import test_algebra
import test_bags
import test_clipping
import test_scatter
from helpers import slow_unless

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md"))]
PYTHON = [page for page in PAGES if "```python\n" in (DOCS / page).read_text()]
# Their code is run by other tests, as it needs more than JAX, or a process of its own.
ELSEWHERE = {
    "coming_from/graph_embeddings.md": "tests/test_coming_from.py",
    "coming_from/keras.md": "tests/test_keras.py",
    "coming_from/linear_models.md": "tests/test_coming_from.py",
    "coming_from/recommender_programs.md": "tests/test_coming_from.py",
    "coming_from/word_vectors.md": "tests/test_coming_from.py",
    "accelerators.md": "tests/test_devices.py",
    "jax_grad.md": "tests/test_experimental.py",
    "keras.md": "tests/test_keras.py",
    "models/equinox.md": "tests/test_model_pages.py",
    "models/haiku.md": "tests/test_model_pages.py",
    "models/linen.md": "tests/test_model_pages.py",
    "models/nnx.md": "tests/test_model_pages.py",
    "moving.md": "tests/test_moving.py",
    "trainers.md": "tests/test_trainers.py",
    "workers.md": "tests/test_accumulator_server.py",
}
ALONE = {"speed.md": "keep_memory is for the whole process"}
# More than a second each, or with libraries that the tests' extra lacks: in CI alone.
LONG = "clipping data_parallel differential_privacy faq frozen_rows host_tables"
LONG += " how_it_works keyed_tables language_models optax pytorch recipes sharding start"
LONG += " torchrec untouched_rows variables"
NEEDS = {"recommenders": "flax"}
TEXT = (DOCS / "operations.md").read_text()


def blocks(page):
    """Pairs of code and what it prints, None if the page does not show that."""
    pattern = r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?"
    return re.findall(pattern, (DOCS / page).read_text(), re.M | re.S)


def plain(text):
    """Without the sizes, whose unit may change, and what aligns them."""
    text = re.sub(r"[\d,.]+ ([KMG]?B)\b", "SIZE", text)
    return re.sub(r"[\s-]+", " ", text).strip()


@pytest.mark.parametrize(
    ["page"],
    slow_unless(
        [(page,) for page in sorted({*PYTHON} - {*ELSEWHERE} - {*ALONE})],
        lambda case: pathlib.Path(case[0]).stem not in {*LONG.split(), *NEEDS},
    ),
)
def test_code_runs(page, tmp_path, monkeypatch):
    """All blocks are one file, by whose name and lines explain and warnings speak."""
    monkeypatch.chdir(tmp_path)
    stem = pathlib.Path(page).stem
    if stem in NEEDS:
        pytest.importorskip(NEEDS[stem])
    name = f"{stem}.py"
    whole = "".join(code for code, _ in blocks(page)).splitlines(True)
    monkeypatch.setitem(linecache.cache, name, (len(whole), None, whole, name))
    names, line = {}, 0
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for code, shown in blocks(page):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * line + code, name, "exec"), names)
            line += code.count("\n")
            if shown:
                assert plain(out.getvalue()) == plain(shown)


@pytest.mark.slow
@pytest.mark.parametrize("page", ALONE)
def test_code_runs_in_a_process_of_its_own(page):
    code = "".join(code for code, _ in blocks(page))
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pages_have_code_and_none_is_left_out():
    assert len(PYTHON) >= 15 and {"start.md", "how_it_works.md", *ELSEWHERE} <= {*PYTHON}
    for page, where in ELSEWHERE.items():
        assert (DOCS / page).name in (ROOT / where).read_text()
    for page in PYTHON:
        fences = len(re.findall(r"^```python$", (DOCS / page).read_text(), re.M))
        assert len(blocks(page)) == fences


def test_every_exception_of_the_tests_is_listed():
    for module in (test_algebra, test_bags, test_scatter):
        assert module.DIFFERENCES
        for sentence in module.DIFFERENCES.values():
            assert f"| {sentence} |" in TEXT
    for _, sentence in test_clipping.SPECIAL.values():
        assert f"| {sentence} |" in TEXT
