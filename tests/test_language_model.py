"""The language model of examples/ngram_memory.py, resumed, and on the host."""

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

SMALL = "--quick --steps 9 --stop 8 --every 4 --files 10"


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


@pytest.mark.slow
@pytest.mark.parametrize("where", ["--dtype bfloat16", "--host"])
def test_a_language_model_goes_on_to_the_same_bits(tmp_path, where):
    command = f"{SMALL} {where} --directory {tmp_path}".split()
    whole, losses = ngram_memory.main(command)
    js.checkpoint.update_checkpoint_state(tmp_path, str(tmp_path / "model-4"))
    again, last = ngram_memory.main(command)
    assert losses[8] == last[8] < losses[4] and list(last) == [8]
    same = jax.tree.map(lambda a, b: bool((a == b).all()), whole.run, again.run)
    assert jax.tree.all(same)


@pytest.mark.slow
def test_memories_learn_alike_wherever_they_are():
    losses = {}
    for how in ("lazy_adam", "lazy_adam --host", "dense_adam", "exact_adam"):
        training, held_out = ngram_memory.main(
            f"{SMALL} --rows 2e4 --optimizer {how}".split()
        )
        losses[how] = np.array([*held_out.values()])
    assert_close(losses["lazy_adam --host"], losses["lazy_adam"], rtol=1e-5)
    assert_close(losses["exact_adam"], losses["dense_adam"], rtol=1e-5)
    assert (losses["lazy_adam"] != losses["dense_adam"]).any()
    tokens = np.zeros((4, 33), np.int32)
    step = jax.jit(training.stepped, donate_argnums=0)
    js.testing.assert_in_place(step, training.run, tokens)
    js.testing.assert_no_dense_temporary(step, training.run, tokens)
