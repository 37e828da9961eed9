"""The blocks of docs/trainers.md in the trainers of others, those that are installed."""

import pathlib
import warnings

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.interop


@pytest.fixture
def trainers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import trainers

    return trainers


NAMES = ["kauldron", "levanter", "numpyro", "penzai", "recml_keras", "recml_linen", "tunix"]


def test_each_trainer_is_here(trainers):
    assert sorted(trainers.TRAINERS) == NAMES


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_the_trainer(trainers, name, monkeypatch):
    make, library = trainers.TRAINERS[name]
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(library, exc_type=ImportError)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            difference, _ = trainers.compared(make, 2_000)
    assert difference < 1e-5
