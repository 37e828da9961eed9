"""The language model of examples/ngram_memory.py, resumed, and on the host."""

import functools
import importlib
import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from helpers import assert_close

import jslices as js

pytest.importorskip("flax")
ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / "examples"))
ngram_memory = importlib.import_module("ngram_memory")
# To look through the standard library takes as long as to train.
ngram_memory.read_text = functools.cache(ngram_memory.read_text)

SMALL = "--quick --steps 9 --stop 8 --every 4 --files 10 --rows 5e3"


@pytest.fixture(autouse=True)
def _as_users_have_it():
    with jax.numpy_rank_promotion("allow"):
        yield


def test_tables_of_the_page_are_the_stored_results():
    pytest.importorskip("optax")
    sys.path.append(str(ROOT / "benchmarks"))
    language_model = importlib.import_module("language_model")

    text = language_model.PAGE.read_text()
    results = json.loads(language_model.RESULTS.read_text())
    assert language_model.page(text, results) == text
    losses = {
        name: np.array([list(curve.values())[-1] for curve in each["losses"].values()])
        for name, each in results["losses"].items()
        if isinstance(each, dict)
    }
    noise = np.std(losses["dense_adam"], ddof=1)
    assert losses["rowwise_adagrad"].mean() < losses["dense_adam"].mean() + noise
    state = {name: results["losses"][name]["state_bytes"] for name in losses}
    assert state["rowwise_adagrad"] * 64 <= state["dense_adam"]


@functools.cache
def trained(optimizer):
    """The training with tables in the memory of the device, and its losses."""
    training, losses = ngram_memory.main(f"{SMALL} --optimizer {optimizer}".split())
    return training, np.array([*losses.values()])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["--dtype bfloat16", "--host --optimizer lazy_adam"])
def test_a_language_model_goes_on_to_the_same_bits(tmp_path, where):
    command = f"{SMALL} {where} --directory {tmp_path}".split()
    whole, losses = ngram_memory.main(command)
    js.checkpoint.update_checkpoint_state(tmp_path, str(tmp_path / "model-4"))
    again, last = ngram_memory.main(command)
    assert losses[8] == last[8] < losses[4] and list(last) == [8]
    same = jax.tree.map(lambda a, b: bool((a == b).all()), whole.run, again.run)
    assert jax.tree.all(same)
    if "--host" in where:
        assert_close(np.array([*losses.values()]), trained("lazy_adam")[1], rtol=1e-5)


@pytest.mark.slow
def test_an_exact_memory_learns_as_a_dense_one():
    (_, lazy), (_, dense) = trained("lazy_adam"), trained("dense_adam")
    training, exact = trained("exact_adam")
    assert_close(exact, dense, rtol=1e-5)
    assert (lazy != dense).any()
    tokens = np.zeros((4, 33), np.int32)
    step = jax.jit(training.stepped, donate_argnums=0)
    js.testing.assert_in_place(step, training.run, tokens)
    js.testing.assert_no_dense_temporary(step, training.run, tokens)
