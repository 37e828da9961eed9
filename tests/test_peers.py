"""What the pages call equal to another library is equal, and what they call apart is apart.

Pages about other libraries end with a table, ``theirs | here | release | difference``. Each
row is run: the code of its second cell beside what the library computed, as
``golden/make_peers.py`` wrote it down. The release is that of the numbers.
"""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import fast_jit, golden, slow_unless
from jax import lax

import jslices as js

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PEERS = golden("peers")
START, IDS, GRADS = PEERS["start"], PEERS["ids"].astype("int32"), PEERS["grads"]
RATE, DECAY = PEERS["rate"], PEERS["decay"]
HEADING = "## Equal to which release, to what\n"
FROM = (x for x in DOCS.glob("coming_from/*") if HEADING in x.read_text())
PAGES = ["moving.md", *sorted(f"coming_from/{x.name}" for x in FROM)]


def rows_of(page):
    """The rows of the table at the end of a page: four cells, without the code's marks."""
    _, _, end = (DOCS / page).read_text().partition(HEADING)
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \| (.*) \|$", end, re.M)
    return [(page, *(cell.replace("`", "") for cell in row)) for row in rows[1:]]


ROWS = [row for page in PAGES for row in rows_of(page)]


def evaluated(code, **names):
    return eval(
        code, {"js": js, "jax": jax, "optax": optax, "lr": RATE, "wd": DECAY} | names
    )


@functools.cache
def page_names(page, name=""):
    """What the Python of a page defines; for a function its imports and its block alone."""
    names = {}
    text = (DOCS / page).read_text()
    for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        if not (name and names) or f"def {name}(" in code:
            exec(code, names)
    return names


def apart(found, wanted, start=0.0):
    """The largest difference, as a share of the largest movement."""
    found, wanted = (np.asarray(x, "complex128") for x in (found, wanted))
    return np.abs(found - wanted).max() / np.abs(wanted - start).max()


def linear(params, ids, grads):
    """A loss whose gradient has these entries."""
    return (params["table"][ids] * grads).sum()


@functools.cache
def compiled(tx, loss=linear, as_array=False):
    """All steps of an optimizer, in one program."""
    step = js.train_step(loss, tx, sparse=False if as_array else None)

    def steps(params, ids, grads):
        def one(carry, batch):
            return step(*carry, *batch)[:2], None

        carry = params, tx.init(params)
        return tx.flush(*lax.scan(one, carry, (ids, grads))[0])[0]["table"]

    return fast_jit(steps)


def stepped(tx, start=START, ids=IDS, grads=GRADS, scale=1.0, **kwargs):
    params = {"table": jnp.asarray(start)}
    return np.asarray(compiled(tx, **kwargs)(params, ids, grads * np.float32(scale)))


def optimizer(runs, name):
    """Of an optimizer here beside one there, for all sizes of gradients; or of one size."""
    name, _, size = name.partition(", gradients of ")
    start = np.zeros_like(START) if name.endswith("rows of zeros") else START

    def of(code):
        tx = evaluated(code)
        for scale, wanted in runs[name].items():
            if not size or float(size) == float(scale):
                pair = stepped(tx, start, scale=float(scale)), wanted
                # Rows of zeros do not move there: a share of the movement here.
                yield apart(*(pair if wanted.any() else reversed(pair)), start)

    return lambda code: list(of(code))


def three_steps(code):
    ids, values = (PEERS["keras"][key] for key in ("ids", "values"))
    ids, values = np.tile(ids.astype("int32"), (3, 1)), np.tile(values, (3, 1, 1))
    start = np.ones((3, 1), np.float32)
    return stepped(evaluated(code), start, ids, values)[1:, 0]


def keras(there):
    key = re.sub(r", (IndexedSlices|the gradient as an array|rate 1)|=0.5", "", there)
    runs = PEERS["keras"][key]
    wanted = runs["slices" if "IndexedSlices" in there else "array"][1:]
    return lambda code: [apart(three_steps(code), wanted, 1.0)]


def tf1_adam(code):
    return [apart(three_steps(code), PEERS["tf1_adam"][1:], 1.0)]


def as_complex(params, ids, grads):
    rows = params["table"][ids]
    rows = lax.complex(rows[..., ::2], rows[..., 1::2])
    grads = lax.complex(grads[..., ::2], grads[..., 1::2])
    return (rows * grads.conj()).real.sum()


def of_complex_numbers(params, ids, grads):
    grads = lax.complex(grads[..., ::2], grads[..., 1::2])
    return (params["table"][ids] * grads.conj()).real.sum()


def complex_table(name):
    runs = PEERS["torch_complex"][name]

    def of(code):
        code, of_pairs, _ = code.partition(" of [V, 2 D]")
        if of_pairs:
            found = stepped(evaluated(code), loss=as_complex).view("complex64")
        else:
            found = stepped(
                evaluated(code), START.view("complex64"), loss=of_complex_numbers
            )
        return [apart(found, runs["complex"], START.view("complex64"))]

    return of


def with_optax(name):
    dense = js.from_optax(evaluated(name))

    def of(code):
        ours = evaluated(code)
        # Of SGD the movement of small gradients would be lost in the numbers themselves.
        for scale in (1.0,) if "sgd" in name else (1.0, 1e-2, 1e-4, 1e-6, 1e-8):
            wanted = stepped(dense, scale=scale, as_array=True)
            yield apart(stepped(ours, scale=scale), wanted, START)

    return lambda code: list(of(code))


def clip_grad_norm(code):
    grads = js.IndexedSlices(GRADS[0], IDS[0], START.shape)
    clipped = evaluated(code, grads=grads).to_dense()
    return [apart(clipped, PEERS["torch_clip_grad_norm"]["grad"])]


def max_norm(key):
    facts = PEERS["torch_max_norm"]
    table, ids = jnp.zeros((3, 2)).at[1].set(facts["row"]), jnp.array([1])

    def of(code):
        def read(table):
            return evaluated(code, table=table, ids=ids, rows=table[ids])

        found = read(table)[0]
        if key == "grad":
            found = js.grad(lambda table: read(table)[0, 0])(table).to_dense()[1]
        return [apart(found, facts[key])]

    return of


def pooled(code):
    facts, names = PEERS["torchrec"], page_names("coming_from/torchrec.md")
    bags = names["to_bags"](["user", "friend", "item"], facts["values"], facts["lengths"])
    found = evaluated(code, pooled=names["pooled"], params=facts["start"], bags=bags)
    assert list(found) == ["user", "friend", "item"]
    return [apart(found[key], facts["out"][key]) for key in found]


def moved_fused(code):
    """Three steps there, two here, from the state that was saved there."""
    facts, names = PEERS["torchrec"], page_names("coming_from/torchrec.md")
    bags = names["to_bags"](names["keys"], facts["values"], facts["lengths"])
    before, after = facts["after_3"], facts["after_5"]
    params = {name: jnp.asarray(x) for name, x in before["tables"].items()}
    slots = {name: {} for name in params}
    for name, x in before["slots"].items():
        slots[name.partition(".")[0]][name] = x
    tx = evaluated(code)
    state = js.checkpoint.import_state(tx, params, slots, count=3)

    def loss(params):
        return sum((x**2).sum() for x in names["pooled"](params, bags).values())

    step = fast_jit(js.train_step(loss, tx))
    for _ in range(2):
        params, state, _ = step(params, state)
    start = facts["start"]
    return [apart(params[name], after["tables"][name], start[name]) for name in params]


def out_of_range(code):
    """A step of SGD from zeros at the rate 1, by gradients of ones."""
    ids, names = jnp.array([2, 6]), page_names("coming_from/torchrec.md", "in_range")

    def loss(table):
        rows = evaluated(code, table=table, ids=ids, in_range=names["in_range"])
        return jnp.where(jnp.isnan(rows), 0.0, rows).sum()

    moved = -js.grad(loss)(jnp.zeros((6, 4))).to_dense()[:, 0]
    wanted = PEERS["fbgemm_bounds"]
    assert all((wanted[f"{mode} 6"] == wanted["WARNING 6"]).all() for mode in ("IGNORE",))
    return [apart(moved, wanted["WARNING 6"])]


def gradient_clipping(code):
    (wanted,) = PEERS["fbgemm"]["EXACT_SGD, gradient_clipping"].values()
    if code.startswith("js.optim"):
        return [
            apart(stepped(js.optim.chain(evaluated(code), js.sgd(RATE))), wanted, START)
        ]
    clipped = page_names("coming_from/torchrec.md", "clipped")["clipped"]

    def loss(params, ids, grads):
        rows = evaluated(code, table=params["table"], ids=ids, clipped=clipped)
        return (rows * grads).sum()

    return [apart(stepped(js.sgd(RATE), loss=loss), wanted, START)]


def weighted_mean(code):
    facts = PEERS["fbgemm_mean"]
    page = page_names("coming_from/torchrec.md", "mean_by_count")
    names = {
        "table": jnp.arange(24.0).reshape(6, 4),
        "ids": jnp.asarray(facts["ids"], "int32"),
        "splits": jnp.array([0, 2]),
        "weights": jnp.asarray(facts["weights"], "float32"),
        "mean_by_count": page["mean_by_count"],
    }
    return [apart(evaluated(code, **names), facts["out"])]


FACTS = {
    "tf.compat.v1.train.AdamOptimizer": tf1_adam,
    "clip_grad_norm_, the gradient": clip_grad_norm,
    "max_norm, what is read": max_norm("read"),
    "max_norm, the gradient": max_norm("grad"),
    "sum bags of a KeyedJaggedTensor, a table of two features": pooled,
    "FusedEmbeddingBagCollection with RowWiseAdagrad, moved after three of five steps": (
        moved_fused
    ),
    "EXACT_SGD, an id out of range": out_of_range,
    "EXACT_SGD, gradient_clipping": gradient_clipping,
    "weighted PoolingMode.MEAN": weighted_mean,
}


def claim(theirs):
    """The function of the code of ours that tells how far it is from theirs."""
    if theirs in FACTS:
        return FACTS[theirs]
    library, _, name = theirs.partition(" ")
    if library == "FBGEMM":
        runs = PEERS["fbgemm"] | PEERS["fbgemm_formula"]
        return optimizer(runs, name)
    if library == "complex":
        return complex_table(name.partition("(")[0])
    if theirs.startswith("torch.optim."):
        return optimizer(PEERS["torch"], theirs.removeprefix("torch.optim."))
    if theirs.startswith("optax."):
        return with_optax(theirs)
    return keras(re.sub(r"^(tf\.)?keras\.optimizers\.", "", theirs))


# Those of L2 and of Optax itself are lazy on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:train_step got jslices.from_optax")

QUICK = (
    "EXACT_ADAGRAD",
    "clip_grad_norm_",
    "max_norm",
    "weighted",
    "EXACT_SGD",
)


@pytest.mark.parametrize(
    "page, theirs, ours, release, difference",
    slow_unless(ROWS, lambda row: any(word in row[1] for word in QUICK)),
    ids=str,
)
def test_a_row_of_the_pages(page, theirs, ours, release, difference):
    found = claim(theirs)(ours)
    bound = re.fullmatch(r"(\*\*apart\*\*, )?([\d.e-]+)", difference)
    if bound[1]:  # the sentence must be able to fail
        assert found[0] == pytest.approx(float(bound[2]), abs=0.0051), found
    else:
        assert max(found) <= float(bound[2]), found
    library, _, version = release.partition(" ")
    if release == "formula":
        assert (
            "not supported in CPU" in PEERS["fbgemm_on_a_cpu"][theirs.split()[1].strip(",")]
        )
    elif library != "optax":
        assert version == (PEERS["versions_torch"] | PEERS["versions_keras"])[library]


def test_no_page_and_no_row_is_left_out():
    assert {page for page, *_ in ROWS} == {*PAGES}
    for page in PAGES:
        _, _, end = (DOCS / page).read_text().partition(HEADING)
        assert len(rows_of(page)) == len(re.findall(r"^\|", end, re.M)) - 2
        assert "## " not in end  # it is the last part of the page
    named = {theirs for _, theirs, *_ in ROWS}
    assert {*FACTS} <= named
    for kind, prefix in {"fbgemm": "FBGEMM ", "torch": "torch.optim."}.items():
        wanted = {prefix + name for name in PEERS[kind]} - {
            "FBGEMM EXACT_SGD, gradient_clipping"
        }
        assert wanted <= named
    assert {f"FBGEMM {name}" for name in PEERS["fbgemm_formula"]} <= named


def text_of(page):
    """A page without line breaks and marks of code."""
    return " ".join((DOCS / page).read_text().replace("`", "").split())


def test_what_counts_as_a_step():
    """The sentence about ``iter``: pass your own count."""
    counts = PEERS["fbgemm_iter"]
    assert counts["EXACT_ROWWISE_ADAGRAD"] == {"3 steps": 3, "and a forward": 4}
    for name in ("EXACT_ADAGRAD", "EXACT_SGD"):
        assert set(counts[name].values()) == {0}
    slots = PEERS["torchrec"]["after_3"]["slots"]
    assert set(slots) == {"user.weight.momentum_1", "item.weight.momentum_1"}  # no step
    assert "three steps and one evaluation as 4" in text_of("moving.md")
    with pytest.raises(ValueError, match="count"):  # none is made up
        table = {"t": jnp.ones((6, 4))}
        slots = {"t": {"momentum1": np.ones((6), np.float32)}}
        js.checkpoint.import_state(js.rowwise_adagrad(0.1), table, slots)


def test_names_and_eps_of_torchrec():
    facts, page = PEERS["torchrec"], text_of("coming_from/torchrec.md")
    assert facts["unfused"] == {"step": [], "sum": [6, 1]}
    assert facts["eps"] == [1e-8] and facts["eps_of_the_class"] == 1e-10
    assert "RowWiseAdagrad has 1e-10" in page and "FBGEMM's 1e-8" in page
    params = {"user": jnp.ones((6, 4))}
    named = ("user.weight.momentum_1", (6,)), ("user.momentum1", (6,)), ("sum", (6, 1))
    for name, shape in named:
        assert name in page
        slots = {"user": {name: np.full(shape, 0.5, np.float32)}}
        state = js.checkpoint.import_state(js.rowwise_adagrad(0.1), params, slots, 3)
        assert state.sum_of_squares["user"].tolist() == [0.5] * 6 and state.count == 3


def test_bounds_and_ids_that_were_never_seen():
    bounds = PEERS["fbgemm_bounds"]
    raised = {key for key, value in bounds.items() if isinstance(value, str)}
    assert raised == {"FATAL 6", "FATAL -1", "FATAL -2", "WARNING -1", "IGNORE -1"}
    for key in bounds.keys() - raised:
        assert bounds[key].tolist() == [-1, 0, -1, 0, 0, 0], key
    facts = PEERS["torchrec"]
    assert facts["mch"].tolist() == [4, 5, 6, 7, 7]  # both of the last two: the last row
    assert facts["mpzch"].tolist() == [0, 5, 6]  # the owner of row 6 is 1006
    with pytest.raises(IndexError):
        js.embedding_lookup(jnp.ones((6, 4)), [2, -1], mode="check")


def test_clipping_of_weighted_bags_is_that_of_fbgemm():
    loss = page_names("coming_from/torchrec.md", "bag_loss")["bag_loss"]
    moved = -js.grad(loss)(jnp.zeros((6, 4))).to_dense()[:, 0]
    np.testing.assert_array_equal(moved, PEERS["fbgemm_clipped_bags"])


def test_keras_on_tensorflow_squares_entries():
    """The numbers of the pages on Keras, and which optimizers they are true of."""
    runs = {k: v for k, v in PEERS["keras"].items() if isinstance(v, dict)}
    moved = {key: apart(x["slices"][1:2], x["array"][1:2], 1.0) for key, x in runs.items()}
    same = {key for key, share in moved.items() if share < 1e-6}
    assert same == {"SGD", "SGD, momentum"}
    assert min(share for key, share in moved.items() if key not in same) > 0.1
    for page in ("coming_from/keras.md", "coming_from/tensorflow.md"):
        text = text_of(page)
        for key in {key.partition(",")[0] for key in runs.keys() - same} - {"SGD"}:
            assert key in text
        assert f"{runs['Adam']['slices'][1]:.4f} there" in text
        assert f"{runs['Adam']['array'][1]:.4f} here" in text


def test_numbers_in_sentences():
    """Those of rows in the midst of the pages, which the last tables do not repeat."""
    mean = ", ".join(f"{x:.0f}" for x in PEERS["fbgemm_mean"]["out"][0])
    grad = ", ".join(f"{x:.0f}" for x in PEERS["torch_max_norm"]["grad"])
    pytorch = text_of("coming_from/pytorch.md")
    assert (
        f"number of ids: [{mean}]" in pytorch and f"[{grad}] at the row [3, 4]" in pytorch
    )
    assert f"[{mean}] there and [6, 7, 8, 9]" in text_of("coming_from/torchrec.md")
    read = functools.partial(js.embedding_lookup, max_norm=1.0)
    ours = js.grad(lambda t: read(t, jnp.array([0]))[0, 0])(jnp.array([[3.0, 4.0]]))
    np.testing.assert_allclose(ours.values[0], [0.128, -0.096], rtol=1e-5)
    assert "[0.128, -0.096]" in pytorch
    shares = {
        theirs: float(x[11:]) for _, theirs, _, _, x in ROWS if x.startswith("**apart")
    }
    moving = text_of("moving.md")
    for name in ("Adagrad", "Adam", "RMSprop", "Adadelta"):
        (share,) = (x for key, x in shares.items() if key.startswith(f"complex {name}("))
        assert re.search(rf"{name} {share:.2f}\b", moving)
    assert f"{shares['FBGEMM PARTIAL_ROWWISE_LAMB']:.2f} of the movement apart" in moving
    l2 = "optax.chain(optax.add_decayed_weights(wd), optax.adam(lr))"
    for share in (x[11:] for _, theirs, _, _, x in ROWS if theirs == l2):
        for page in ("coming_from/optax.md", "coming_from/pytorch.md", "moving.md"):
            assert re.search(rf"\b{share} of (the movement|it) apart", text_of(page))
    for theirs in ("torch.optim.SGD, momentum", "EXACT_SGD, gradient_clipping"):
        assert f"{shares[theirs]:.2f} of the movement apart" in pytorch


def test_complex_squares_are_refused():
    params = {"table": jnp.ones((6, 2), "complex64")}
    slots = {"exp_avg": np.ones((6, 2), "complex64")}
    slots = {"table": {**slots, "exp_avg_sq": slots["exp_avg"] * (1 + 1j)}}
    with pytest.raises(ValueError, match=r"complex64.*x\.view"):
        js.checkpoint.import_state(js.adam(0.1), params, slots, 3)


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
def test_beside_torchrec_itself():
    """Random jagged tensors through both, a table of two features, ten steps."""
    torch = pytest.importorskip("torch")
    torchrec = pytest.importorskip("torchrec")
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    names, rng = page_names("coming_from/torchrec.md"), np.random.default_rng(0)
    keys, sizes = ["user", "friend", "item"], {"user": 6, "item": 8}
    start = {k: rng.normal(size=(n, 4)).astype("float32") for k, n in sizes.items()}
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=4,
            feature_names=[key for key in keys if names["TABLE_OF"][key] == name],
        )
        for name, rows in sizes.items()
    ]
    theirs = FusedEmbeddingBagCollection(
        tables=configs,
        optimizer_type=torchrec.optim.RowWiseAdagrad,
        optimizer_kwargs={"lr": RATE},
    )
    weight = "embedding_bags.{}.weight".format
    theirs.load_state_dict({weight(k): torch.tensor(x) for k, x in start.items()})

    def loss(params, bags):
        return sum((x**2).sum() for x in names["pooled"](params, bags).values())

    tx = js.rowwise_adagrad(RATE)
    params = {name: jnp.asarray(x) for name, x in start.items()}
    state, step = tx.init(params), fast_jit(js.train_step(loss, tx))
    for number in range(10):
        lengths = rng.integers(0, 4, (3, 5))
        counts = lengths.sum(1)
        values = np.concatenate(
            [rng.integers(0, n, c) for n, c in zip((6, 6, 8), counts, strict=True)]
        )
        kjt = torchrec.KeyedJaggedTensor.from_lengths_sync(
            keys=keys, values=torch.tensor(values), lengths=torch.tensor(lengths.ravel())
        )
        out = theirs(kjt).values()
        (wanted := (out**2).sum()).backward()
        arrays = kjt.values().numpy(), kjt.lengths().numpy()
        bags = names["to_bags"](kjt.keys(), *arrays, room=15)
        params, state, value = step(params, state, bags)
        np.testing.assert_allclose(value, float(wanted), rtol=1e-5)
        if number == 4:  # what was saved there goes on here
            slots = {}
            for each in theirs.fused_optimizer().state_dict()["state"].values():
                for name, x in each.items():
                    slots[name.partition(".")[0]] = {name: x.detach().numpy().copy()}
            there = {k: theirs.state_dict()[weight(k)].numpy().copy() for k in sizes}
            params = {name: jnp.asarray(x) for name, x in there.items()}
            state = js.checkpoint.import_state(tx, params, slots, count=5)
    for name, x in params.items():
        there = theirs.state_dict()[weight(name)].detach().numpy()
        assert apart(x, there, start[name]) < 2e-6
