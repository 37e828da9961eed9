"""Pages for those who come from other programs, on files and numbers that these wrote.

``tests/golden/coming_from``: what each release wrote is said on the page.
"""

import contextlib
import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fast_jit

import jslices as js

ROOT = pathlib.Path(__file__).parent
GOLDEN = ROOT / "golden" / "coming_from"
NUMBERS = json.loads((GOLDEN / "numbers.json").read_text())


@functools.cache
def names_of(page):
    """What the code of a page defines."""
    text = (ROOT.parent / "docs" / "coming_from" / page).read_text()
    names = {}
    with contextlib.chdir(GOLDEN), jax.numpy_dtype_promotion("standard"):
        for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
            exec(code, names)
    return names


# --- linear models ------------------------------------------------------------------------

BITS = 10


def test_vowpal_wabbit_goes_on_here():
    page, lines = names_of("linear_models.md"), (GOLDEN / "vw_examples.txt").read_text()
    before, after = (
        page["vw_model"]((GOLDEN / f"vw_{n}.txt").read_text(), BITS) for n in (100, 150)
    )
    tx, weights = page["tx"], jnp.array(before[0])
    slots = {"linear": before[1], "accumulator": before[2]}
    state = js.checkpoint.import_state(tx, weights, slots, count=100)
    step = fast_jit(js.train_step(page["loss"], tx))
    for line in lines.splitlines()[100:]:
        weights, state, _ = step(weights, state, *page["vw_example"](line, BITS))
    assert np.abs(weights - after[0]).max() < 2e-6
    np.testing.assert_allclose(state.linear, after[1], atol=1e-4)
    np.testing.assert_allclose(state.accum, after[2], rtol=1e-4)
    assert np.count_nonzero(after[2]) == 10  # each name at an index of its own


def test_the_ftrl_of_river_is_one_step_late():
    river = NUMBERS["river"]
    tx = js.ftrl(0.1, -0.5, 0.0, 0.01, 0.1 / 2, beta=1.0)
    weights = jnp.zeros(2)
    state, seen = tx.init(weights), []
    for g in river["gradients"]:
        grads = js.IndexedSlices(jnp.array(g, "f"), jnp.array([0, 1]), (2,))
        weights, state = tx.apply(grads, state, weights)
        seen.append(weights)
    np.testing.assert_allclose(seen[:-1], river["weights"][1:], atol=1e-6)
    assert np.abs(np.array(seen) - river["weights"]).max() > 0.05


# --- graphs -------------------------------------------------------------------------------


def pbg(scale, **settings):
    """How far ours ends from PyTorch-BigGraph, as a share of the largest movement."""
    facts = NUMBERS[f"pbg {scale}"]
    start, wanted = (np.array(facts[name], "f") for name in ("start", "after"))
    tx, table = js.rowwise_adagrad(0.1, **settings), jnp.array(start)
    state = tx.init(table)
    for ids, values in facts["steps"]:
        grads = js.IndexedSlices(jnp.array(values, "f"), jnp.array(ids), table.shape)
        table, state = tx.apply(grads, state, table)
    return np.abs(table - wanted).max() / np.abs(wanted - start).max(), state


def test_row_adagrad_of_pytorch_biggraph():
    for scale in ("1.0", "1e-08"):
        apart, state = pbg(scale, eps=1e-10)
        assert apart < 2e-6
        np.testing.assert_allclose(
            state.sum_of_squares, NUMBERS[f"pbg {scale}"]["sum"], rtol=1e-5
        )
    assert pbg("1e-08")[0] > 0.3


def test_its_complex_numbers_are_halves():
    facts = {k: np.array(x, "f") for k, x in NUMBERS["pbg complex"].items()}
    got = names_of("graph_embeddings.md")["rotated"](
        facts["x"], facts["real"], facts["imag"]
    )
    np.testing.assert_allclose(got, facts["y"], rtol=1e-5)


def test_transe_of_pykeen_normalizes_rows():
    facts = {k: np.array(x, "f") for k, x in NUMBERS["pykeen"].items() if k != "version"}
    touched = jnp.array([0, 1, 1])
    got = names_of("graph_embeddings.md")["unit_rows"](jnp.array(facts["mid"]), touched)
    np.testing.assert_allclose(got, facts["after"], rtol=1e-6)
    assert np.abs(facts["after"] - facts["mid"]).max() > 0.1


def dglke(step, state):
    """How far a step of one gather ends from DGL-KE, as a share of the largest movement."""
    facts = NUMBERS["dglke"]
    start, wanted = (np.array(facts[name], "f") for name in ("start", "after"))
    table = jnp.array(start)
    for gathers in facts["steps"]:
        for ids, values in gathers:
            grads = js.IndexedSlices(jnp.array(values, "f"), jnp.array(ids), table.shape)
            table, state = step(table, state, grads)
    apart = np.abs(table - wanted).max(1) / np.abs(wanted - start).max()
    return apart, state, np.array(facts["sum"], "f")


def test_gathers_of_dglke_are_steps_of_their_own():
    gather_step = names_of("graph_embeddings.md")["gather_step"]
    apart, sums, wanted = dglke(lambda *of: gather_step(*of, 0.1), jnp.zeros(6))
    assert apart.max() < 1e-6
    np.testing.assert_allclose(sums, wanted, rtol=1e-6)
    tx = js.rowwise_adagrad(0.1, eps=1e-10)
    apart, *_ = dglke(
        lambda table, *of: tx.apply(*of[::-1], table)[:2], tx.init(jnp.zeros((6, 3)))
    )
    assert apart[[0, 1, 2, 5]].max() < 1e-6  # no gather has them twice
    assert apart[[3, 4]].min() > 0.1


def test_rotate_of_dglke_scales_its_phases():
    facts = dict(NUMBERS["dglke"]["rotate"])
    gamma, wanted = facts.pop("gamma"), facts.pop("scores")
    rows = {name: jnp.array(x, "f") for name, x in facts.items()}
    got = names_of("graph_embeddings.md")["rotate"](**rows, gamma=gamma)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


# --- recommenders -------------------------------------------------------------------------


def test_atomic_files_of_recbole_have_its_numbers():
    page, facts = names_of("recommender_programs.md"), NUMBERS["recbole"]
    inter, items = (
        page["atomic"]((GOLDEN / f"mini.{kind}").read_text()) for kind in ("inter", "item")
    )
    for field in ("user_id", "item_id"):
        known = {"[PAD]": 0}
        page["numbered"](inter[field], known)
        assert [*known] == facts["tokens"][field]
    known = {"[PAD]": 0}
    tags = [page["numbered"](x.split(" "), known).tolist() for x in items["tags"]]
    assert [*known] == facts["tokens"]["tags"] and tags == facts["tags"][1:]
    assert all(facts["row0"])


def test_columns_of_criteo_have_keys_of_their_own():
    fields = ["0", *[""] * 13, "000000ff", "000000ff", *[""] * 24]
    labels, counts, keys = names_of("recommender_programs.md")["criteo"](
        ["\t".join(fields)]
    )
    assert labels.tolist() == [0] and not counts.any() and counts.shape == (1, 13)
    assert keys.to_int64()[0, :3].tolist() == [255, 2**32 + 255, -1]


def test_factors_of_implicit_rank_as_there():
    facts = {k: np.array(x) for k, x in NUMBERS["implicit"].items()}
    users, items = facts["users"].astype("f"), facts["items"].astype("f")
    assert (users[:, -1] == 1).all() and items.shape[1] == 4  # of three factors
    scores, ids = names_of("recommender_programs.md")["ranked"](users, items, 3)
    np.testing.assert_array_equal(ids, facts["ids"])
    np.testing.assert_allclose(scores, facts["scores"], rtol=1e-5)


@pytest.mark.parametrize("build, bound", [("with SSE", 2e-4), ("without", 1e-6)])
def test_libffm_goes_on_here(build, bound):
    page, facts = names_of("recommender_programs.md"), NUMBERS["libffm"][build]
    before, after = (
        page["ffm_model"](bytes.fromhex(x), facts["align"]) for x in facts["models"]
    )
    loss = functools.partial(page["ffm_loss"], num_fields=3, decay=0.01)
    step, table = js.train_step(loss, page["ffm"]), jnp.array(before[0])
    state = page["ffm_state"](table, before[1])
    example = np.array([1, 3, 5]), np.arange(3), np.array([1, 0.5, 2], "f"), 1.0
    for _ in range(2):
        table, state, _ = step(table, state, *example)
    moved = np.abs(after[0] - before[0]).max()
    np.testing.assert_allclose(table, after[0], rtol=0, atol=bound * moved)
    np.testing.assert_allclose(state.sum_of_squares, after[1], rtol=1e-5)


# --- word vectors -------------------------------------------------------------------------


def test_a_table_of_floret_says_what_it_is():
    path = GOLDEN / "vectors.floret"
    with pytest.raises(
        js.errors.DataLossError, match=r"it is a table of floret.*skiprows=1"
    ):
        js.checkpoint.load_word_vectors(path)
    table = names_of("word_vectors.md")["floret_table"](path)
    assert table.shape == (20, 3) and table.dtype == np.float32
    np.testing.assert_allclose(table[17], [-0.17729, 0.16731, -0.13257])
    words, vectors = js.checkpoint.load_word_vectors(GOLDEN / "vectors.vec")
    assert "apple" in words and vectors.shape == (8, 3)


def test_a_classifier_of_fasttext_says_what_to_type(tmp_path):
    for name in ("model.bin", "model.ftz"):
        (tmp_path / name).write_bytes(b"\xba\x16\x4f\x2f\x0c\0\0\0\n")
        with pytest.raises(
            js.errors.DataLossError, match=r"\.vec .*or model\.get_word_vector"
        ):
            js.checkpoint.load_word_vectors(tmp_path / name)


def test_model2vec_divides_by_the_number_of_tokens():
    facts = NUMBERS["model2vec"]
    table, weights = (jnp.array(facts[name], "f") for name in ("vectors", "weights"))
    ids = jnp.array([facts["ids"], facts["ids"]]).at[1, 2:].set(-1)
    got = names_of("word_vectors.md")["encoded"](table, weights, ids)
    np.testing.assert_allclose(got[0], facts["encoded"], rtol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(got, axis=1), 1, rtol=1e-6)
    two = np.array(facts["ids"][:2])
    wanted = weights[two] @ table[two]
    np.testing.assert_allclose(got[1], wanted / np.linalg.norm(wanted), rtol=1e-5)
