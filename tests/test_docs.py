"""The pages of docs are true: their code runs, and what is excepted is listed."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
import test_algebra
import test_bags
import test_clipping
import test_scatter

import jslices as js
import jslices.tf1 as tf

DOCS = pathlib.Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "operations.md").read_text()


@pytest.mark.parametrize(
    "page, count",
    [
        ("operations.md", 1),
        ("variables.md", 3),
        ("optimizers.md", 2),
        ("sharding.md", 6),
        ("host_tables.md", 3),
        ("recommenders.md", 3),
    ],
)
def test_code_runs(page, count):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert len(blocks) == count
    names = {"functools": functools, "jax": jax, "jnp": jnp, "js": js, "tf": tf}
    for block in blocks:
        exec(block, names)


def test_every_exception_of_the_tests_is_listed():
    for module in (test_algebra, test_bags, test_scatter):
        assert module.DIFFERENCES
        for sentence in module.DIFFERENCES.values():
            assert f"| {sentence} |" in TEXT
    for _, sentence in test_clipping.SPECIAL.values():
        assert f"| {sentence} |" in TEXT
