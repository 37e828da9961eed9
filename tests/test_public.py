"""What a user meets first: names, documentation, import."""

import inspect
import subprocess
import sys

import pytest

import jslices as js

PUBLIC = sorted(name for name in vars(js) if not name.startswith("_") and name != "optim")
FORBIDDEN = ("optax", "chex", "flax", "matplotlib", "safetensors", "tqdm")
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


@pytest.mark.parametrize("name", ["grad", "value_and_grad"])
def test_signatures_are_those_of_jax(name):
    import jax

    theirs = list(inspect.signature(getattr(jax, name)).parameters)
    ours = list(inspect.signature(getattr(js, name)).parameters)
    assert ours[:5] == theirs[:5] and ours[5:] == ["sparse"]


def loaded_by(statement):
    code = f"{statement}; import sys; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(out.stdout.split())


def test_import_brings_nothing_but_jax_and_numpy():
    loaded = loaded_by("import jslices")
    assert not [name for name in FORBIDDEN if name in loaded]
    assert "jslices.optim.adam" in loaded


def test_the_import_test_can_fail():
    assert "optax" in loaded_by("import jslices, optax")
