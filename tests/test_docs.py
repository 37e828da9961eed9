"""docs/operations.md is true: its code runs, it lists the exceptions the tests make."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import test_algebra
import test_bags
import test_scatter

import jslices as js

TEXT = (pathlib.Path(__file__).parent.parent / "docs" / "operations.md").read_text()


def test_code_runs():
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
    exec(block, {"functools": functools, "jax": jax, "jnp": jnp, "js": js})


def test_every_exception_of_the_tests_is_listed():
    for module in (test_algebra, test_bags, test_scatter):
        assert module.DIFFERENCES
        for sentence in module.DIFFERENCES.values():
            assert f"| {sentence} |" in TEXT
