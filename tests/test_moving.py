"""States from PyTorch, TensorFlow and Keras go on here as they would have there, and back.

``golden/torch_slots.json`` and ``golden/tensorflow_slots.json`` hold what the two libraries
saved after five steps of a small model, by the lines that docs/moving.md shows, and the
parameters after one and after three more of their steps.
"""

import functools
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, golden, slow_unless
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import jslices as js
from jslices.checkpoint import export_state, import_state

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "moving.md"
TORCH, TENSORFLOW = golden("torch_slots"), golden("tensorflow_slots")
STEPS = 5
EXACT = {"untouched": "exact"}
# Several tests step with these: they are compiled once.
ADAM = js.adam(0.1, **EXACT)
ADAMW = js.adamw(0.1, weight_decay=0.05, weight_decay_mode="all", **EXACT)


def loss(params, ids, labels):
    return ((params["table"][ids] @ params["w"] - labels) ** 2).mean()


def under(arrays, prefix):
    return {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}


def turned(slots):
    """The slots of a Linear of PyTorch, which is the other way round."""
    return {name: x.T for name, x in slots.items()}


def check_goes_on(tx, params, state, batches, wanted, sparse=True):
    """Steps from ``state`` give the parameters that were ``wanted`` after some of them.

    Where ``sparse`` is false they are steps on arrays, which move every row at once.
    """
    step, flush = compiled(tx, sparse)
    for number, (ids, labels) in enumerate(batches, 1):
        params, state, _ = step(params, state, ids, labels)
        if number in wanted:
            assert_close(flush(params, state)[0], wanted[number], rtol=2e-5, atol=2e-6)


@functools.cache
def compiled(tx, sparse=True):
    """A step of an optimizer, and its flush."""
    step = js.train_step(loss, tx, sparse=None if sparse else False)
    return fast_jit(step), fast_jit(tx.flush) if tx.catches_up else tx.flush


def batches_of(arrays):
    return [(arrays[f"ids.{i}"], arrays[f"labels.{i}"]) for i in range(3)]


def in_ci(names, *quick):
    """All names; those that are not ``quick`` are slow."""
    return slow_unless([(name,) for name in names], lambda case: case[0] in quick)


FROM_TORCH = {
    "sparse_adam": js.adam(0.1, eps_hat=True),
    "adam": ADAM,
    "adamw": ADAMW,
    "adagrad": js.adagrad(0.1, initial_accumulator_value=0.0, eps=0.0),
    "sgd": js.sgd(0.1, momentum=0.9),
    "rmsprop": js.rmsprop(0.1, decay=0.99, eps_in_sqrt=False),
    "adadelta": js.adadelta(0.5, rho=0.9, eps=1e-6),
}
#: Those that are not exact here although PyTorch's move every row.
ON_ARRAYS = ("sgd", "rmsprop", "adadelta")


def torch_params(arrays, prefix="model."):
    return {
        "table": arrays[f"{prefix}table.weight"],
        "w": arrays[f"{prefix}out.weight"].T,
    }


def torch_slots(arrays):
    return {
        "table": under(arrays, "optimizer.0."),
        "w": turned(under(arrays, "optimizer.1.")),
    }


@pytest.mark.parametrize("name", in_ci(FROM_TORCH, "sparse_adam", "adam", "adagrad"))
def test_the_next_steps_are_those_of_torch(name):
    tx, arrays = FROM_TORCH[name], TORCH[name]
    params = torch_params(arrays)
    state = import_state(tx, params, torch_slots(arrays), STEPS)
    assert int(state.count) == STEPS
    wanted = {n: torch_params(arrays, f"after_{n}.") for n in (1, 3)}
    batches = batches_of(TORCH["batches"])
    check_goes_on(tx, params, state, batches, wanted, sparse=name not in ON_ARRAYS)


FROM_TENSORFLOW = {
    "adam": js.adam(0.1, eps_hat=True, **EXACT),  # TensorFlow 1's moves every row
    "adagrad": js.adagrad(0.1, eps=0.0),
    "momentum": js.sgd(0.1, momentum=0.9),
    "rmsprop": js.rmsprop(0.1, eps=1e-10, initial_scale=1.0),
    "rmsprop_momentum": js.rmsprop(0.1, eps=1e-10, initial_scale=1.0, momentum=0.9),
    "adadelta": js.adadelta(0.5, rho=0.95, eps=1e-8),
    "ftrl": js.ftrl(0.1),
}


def tensorflow_params(arrays, prefix=""):
    names = {"table": "words/embeddings", "w": "dense/kernel"}
    return {key: arrays[prefix + name] for key, name in names.items()}


@pytest.mark.parametrize("name", in_ci(FROM_TENSORFLOW, "adam", "momentum", "rmsprop"))
def test_the_next_steps_are_those_of_tensorflow_1(name):
    tx, arrays = FROM_TENSORFLOW[name], TENSORFLOW[name]
    params = tensorflow_params(arrays)
    slots = {
        "table": under(arrays, "words/embeddings/"),
        "w": under(arrays, "dense/kernel/"),
    }
    if name.startswith("rmsprop"):
        with pytest.raises(ValueError, match=r'RMSProp_1 at .*with momentum= pass "trace"'):
            import_state(tx, params, slots, arrays["global_step"])
        for each in slots.values():
            momentum = each.pop("RMSProp_1")
            if name == "rmsprop_momentum":
                each["trace"] = -momentum
    state = import_state(tx, params, slots, arrays["global_step"])
    assert int(state.count) == STEPS
    wanted = {n: tensorflow_params(arrays, f"after_{n}/") for n in (1, 3)}
    check_goes_on(tx, params, state, batches_of(TENSORFLOW["batches"]), wanted)
    if "beta2_power" in arrays:  # the page's way to count without a global step
        assert round(np.log(arrays["beta2_power"]) / np.log(0.999)) - 1 == STEPS


def keras_rows(name):
    """An optimizer of Keras 3, which moves every row, and ours."""
    return {
        "Adam": (
            dict(learning_rate=0.1),
            js.adam(0.1, eps=1e-7, eps_hat=True, **EXACT),
        ),
        "AdamW": (dict(learning_rate=0.1, weight_decay=0.05), ADAMW),
        "Adagrad": (dict(learning_rate=0.1), js.adagrad(0.1)),
        "RMSprop": (dict(learning_rate=0.1), js.rmsprop(0.1, eps=1e-7)),
        "RMSprop centered": (
            dict(learning_rate=0.1, centered=True),
            js.rmsprop(0.1, eps=1e-7, centered=True),
        ),
        "Adadelta": (dict(learning_rate=0.5), js.adadelta(0.5, rho=0.95, eps=1e-7)),
        "Lion": (dict(learning_rate=0.01), js.lion(0.01, weight_decay=0.0)),
        "Ftrl": (
            dict(learning_rate=0.1, beta=0.5, l1_regularization_strength=0.01),
            js.ftrl(0.1, beta=0.5, l1_regularization_strength=0.01),
        ),
    }[name]


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    "Adam|AdamW|Adagrad|RMSprop|RMSprop centered|Adadelta|Lion|Ftrl".split("|"),
)
def test_the_next_steps_are_those_of_keras_3(name):
    keras = pytest.importorskip("keras", minversion="3")
    settings, tx = keras_rows(name)
    before = TORCH["adam"]
    with jax.numpy_rank_promotion("allow"):  # which Keras relies on
        theirs = getattr(keras.optimizers, name.split()[0])(**settings)
        there = torch_params(before)
        theirs.build([keras.Variable(there[name], name=name) for name in sorted(there)])
        paths = [v.path.partition("/")[2] for v in theirs.variables]
        kept = [v.value for v in theirs.variables]

        @fast_jit
        def step(params, kept, ids, labels):
            grads = jax.grad(loss)(params, ids, labels)
            both = ([tree[name] for name in sorted(tree)] for tree in (grads, params))
            new, kept = theirs.stateless_apply(kept, *both)
            return dict(zip(sorted(params), new, strict=True)), kept

        batches = batches_of(TORCH["batches"])
        for batch in batches:
            there, kept = step(there, kept, *batch)
        params, arrays = there, dict(zip(paths, map(np.asarray, kept), strict=True))
        wanted = {}
        for number, batch in enumerate(batches, 1):
            there, kept = step(there, kept, *batch)
            wanted[number] = there
    slots = {"table": under(arrays, "table_"), "w": under(arrays, "w_")}
    state = import_state(tx, params, slots, arrays["iteration"])
    check_goes_on(tx, params, state, batches, wanted, sparse=tx.catches_up)


CENTERED = {
    "torch": ("square_avg", "grad_avg", "momentum_buffer"),
    "tf1": ("RMSProp", "RMSProp_1", "RMSProp_2"),
    "tf2": ("rms", "mg", "momentum"),
    "keras": ("velocity", "average_gradient", "momentum"),
}


@pytest.mark.parametrize("names", CENTERED)
def test_centered_rmsprop_keeps_the_mean_gradient(names):
    params = {"table": jnp.ones((3, 2))}
    nu, mu, momentum = (0.5 * ones(3, 2), 0.25 * ones(3, 2), -ones(3, 2))
    of_nu, of_mu, of_momentum = CENTERED[names]
    slots = {"table": {of_nu: nu, of_mu: mu, of_momentum: momentum}}
    for centered in (False, True):
        tx = js.rmsprop(0.1, centered=centered)
        with pytest.raises(
            ValueError, match=rf'slot {of_momentum} at .*"trace": -'
        ) as error:
            import_state(tx, params, slots, 3)
        told = re.search(rf"slot {of_mu} at .*type centered=True", str(error.value))
        assert bool(told) == (not centered)
    del slots["table"][of_momentum]
    state = import_state(tx, params, slots, 3)
    assert (state.nu["table"] == 0.5).all() and (state.mu["table"] == 0.25).all()
    assert {of_nu, of_mu} <= {*export_state(params, state, names)["table"]}


def test_the_next_step_is_that_of_torchs_centered_rmsprop():
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.ones(3, 2))
    theirs = torch.optim.RMSprop([p], lr=0.1, centered=True, momentum=0.9)

    def step():
        p.grad = torch.arange(6.0).reshape(3, 2) - 2
        theirs.step()
        return p.detach().numpy().copy()

    params = {"table": step()}
    slots = {name: x.numpy().copy() for name, x in theirs.state[p].items()}
    slots["trace"] = -0.1 * slots.pop("momentum_buffer")
    tx = js.rmsprop(0.1, 0.99, eps_in_sqrt=False, centered=True, momentum=0.9)
    state = import_state(tx, params, {"table": slots}, 1)
    grads = {"table": jnp.arange(6.0).reshape(3, 2) - 2}
    after, _ = fast_jit(tx.apply)(grads, state, params)
    assert_close(after["table"], step(), rtol=2e-5, atol=2e-6)


# What is given back, in each library's names.
EVERY_STATE = {
    "adam": js.adam(0.1),
    "adam_exact": ADAM,
    "sgd_exact_with_a_schedule": js.sgd(
        optax.exponential_decay(0.1, 2, 0.9), momentum=0.9, **EXACT
    ),
    "adagrad": js.adagrad(0.1),
    "sgd": js.sgd(0.1),
    "momentum": js.sgd(0.1, momentum=0.9),
    "chain": js.optim.chain(js.optim.clip_by_global_norm(1.0), js.adam(0.1)),
    "partition": js.optim.partition(
        {"rows": js.sgd(0.1, momentum=0.9, **EXACT), "rest": js.adam(0.1)},
        {"table": "rows", "w": "rest"},
    ),
    "in_float32": js.optim.with_state_dtype(js.adam(0.1), "float32"),
}


@pytest.mark.parametrize(
    "name", in_ci(EVERY_STATE, "adam", "adam_exact", "partition", "in_float32")
)
def test_what_is_exported_is_imported(name):
    tx = EVERY_STATE[name]
    params = torch_params(TORCH["adam"])
    if name == "in_float32":
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    (step, flush), state = compiled(tx), tx.init(params)
    for ids, labels in batches_of(TORCH["batches"]):
        params, state, _ = step(params, state, ids, labels)
    params, state = flush(params, state)
    again = import_state(tx, params, export_state(params, state, "torch"), 3)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    is_clock = lambda x: hasattr(x, "log")  # noqa: E731
    jax.tree.map(
        lambda x, y: is_clock(x) or np.testing.assert_array_equal(x, y),
        *(again, state),
        is_leaf=is_clock,
    )
    both = (step(params, x, ids % 2, labels)[:2] for x in (state, again))
    both = (flush(*step(*x, ids, labels)[:2])[0] for x in both)
    jax.tree.map(functools.partial(assert_close, rtol=1e-6), *both)


@pytest.mark.slow
def test_a_state_that_has_taken_more_steps_than_a_log_has_columns():
    """It goes on as dense Optax: rows miss steps after those, and schedules are there."""
    rate, count = optax.cosine_decay_schedule(0.1, 40_000), 20_000
    options = {"weight_decay": 0.1, "b1": 0.8}
    exact = js.adamw(rate, **options, untouched="exact")
    tx, dense = js.optim.params_ema(exact, 0.99), optax.adamw(rate, **options)
    rng = np.random.default_rng(2)
    params = {"table": ones(6, 2), "other": ones(6, 2)}
    mu, nu = (
        {name: rng.uniform(0.5, 1, (6, 2)).astype("f4") for name in params} for _ in "12"
    )
    slots = {"table": {"mu": mu["table"], "nu": nu["table"]}, "other": None}
    mu["other"] = nu["other"] = np.zeros((6, 2), np.float32)
    state = import_state(tx, params, slots, count)
    np.testing.assert_array_equal(state.ema["other"], params["other"])
    step = fast_jit(js.train_step(lambda p, ids: (p["table"] + p["other"])[ids].sum(), tx))
    theirs = optax.tree.set(dense.init(params), mu=mu, nu=nu, count=jnp.int32(count))
    mine, wanted = params, params
    for ids in ([0, 1], [0, 2], [3, 0], [2, 0]):
        mine, state, _ = step(mine, state, jnp.array(ids))
        grads = jnp.zeros((6, 2)).at[jnp.array(ids)].add(1)
        updates, theirs = dense.update({"table": grads, "other": grads}, theirs, wanted)
        wanted = optax.apply_updates(wanted, updates)
    mine, _ = tx.flush(mine, state)
    jax.tree.map(functools.partial(assert_close, rtol=1e-6), mine, wanted)


@pytest.mark.parametrize("names", ["tf1", "tf2", "keras"])
def test_names_of_tensorflow(names):
    params = {"table": jnp.ones((3, 2))}
    for tx in (js.adam(0.1), js.adagrad(0.1), js.adadelta(0.1), js.ftrl(0.1)):
        state = tx.init(params)
        slots = export_state(params, state, names)
        assert not {*slots["table"]} & {"step", *type(state)._fields} - {"linear"}
        again = import_state(tx, params, slots, 0)
        jax.tree.map(np.testing.assert_array_equal, again, state)


FUSED = {
    # As TorchRec shards them, as its fused optimizer and its own classes name them.
    "sharded": ("rowwise_adagrad", {"sum_of_squares": "user.momentum1"}),
    "fused": ("rowwise_adagrad", {"sum_of_squares": "user.weight.momentum_1"}),
    "unfused": ("rowwise_adagrad", {"sum_of_squares": "sum"}),
    "elements": ("adagrad", {"sum_of_squares": "t.momentum1"}),
    "adam": ("adam", {"mu": "t.momentum1", "nu": "t.momentum2"}),
    "by row": (
        "adam",
        {"mu": "exp_avg", "nu": "exp_avg_sq", "row_counts": "row_counter"},
    ),
    "lamb": ("lamb", {"mu": "t.weight.momentum_1", "nu": "t.weight.momentum_2"}),
    "partial": ("partial_rowwise_adam", {"mu": "exp_avg", "nu": "exp_avg_sq"}),
}


@pytest.mark.parametrize("one_column", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_names_of_fbgemm_and_torchrec(name, one_column):
    """What is a number a row may be a column, and nothing else."""
    optimizer, names = FUSED[name]
    kwargs = {"bias_correction": "row"} if "row_counts" in names else {}
    tx, params = getattr(js, optimizer)(0.1, **kwargs), {"table": jnp.ones((4, 3))}
    empty = tx.init(params)
    arrays = {k: np.asarray(getattr(empty, k)["table"]) for k in names}
    arrays = {k: (x + i + 1).astype(x.dtype) for i, (k, x) in enumerate(arrays.items())}
    slots = {names[k]: x[..., None] if one_column else x for k, x in arrays.items()}
    if one_column and any(x.ndim > 1 for x in arrays.values()):
        with pytest.raises(ValueError, match=r"shape \(4, 3, 1\), wanted \(4, 3\)"):
            import_state(tx, params, {"table": slots}, 7)
        slots = {names[k]: x[..., None] if x.ndim == 1 else x for k, x in arrays.items()}
    state = import_state(tx, params, {"table": slots}, 7)
    assert state.count == 7
    for field, x in arrays.items():
        np.testing.assert_array_equal(getattr(state, field)["table"], x)
    field = next(iter(names))
    twice = {"table": slots | {field: arrays[field]}}
    with pytest.raises(ValueError, match=f"{field} at .*wants one slot.* and {field}"):
        import_state(tx, params, twice, 7)


COMPLEX = {  # the squares of each, by PyTorch's and Keras' names and by ours
    "adam": (js.adam(0.1), {"nu": "exp_avg_sq"}, {"mu": "exp_avg"}),
    "adagrad": (js.adagrad(0.1), {"sum_of_squares": "sum"}, {}),
    "rmsprop": (js.rmsprop(0.1), {"nu": "velocity"}, {}),
    "adadelta": (js.adadelta(0.1), {"e_g": "square_avg", "e_x": "acc_delta"}, {}),
    "rows": (js.rowwise_adagrad(0.1), {"sum_of_squares": "t.momentum1"}, {}),
    "partial": (js.partial_rowwise_adam(0.1), {"nu": "exp_avg_sq"}, {"mu": "exp_avg"}),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_squares_of_complex_tables_are_refused(name):
    tx, squares, others = COMPLEX[name]
    params = {"table": jnp.ones((3, 2), "complex64")}
    state = tx.init(params)
    like = lambda k: np.asarray(getattr(state, k)["table"])  # noqa: E731
    rest = {slot: like(k) + (1 + 2j) for k, slot in others.items()}
    rest = {slot: x.astype("complex64") for slot, x in rest.items()}
    real = {k: (like(k).real + 0.5).astype("complex64") for k in squares}
    apart = {k: (x + 0.25j).astype("complex64") for k, x in real.items()}
    message = r'is complex64, as PyTorch squares .*x.view\("float32"\).*rows\[..., ::2\]'
    for names in (squares, {k: k for k in squares}):
        for arrays in (real, apart):
            slots = {names[k]: x for k, x in arrays.items()} | rest
            if names is not squares and (arrays is real or name == "adadelta"):
                got = import_state(tx, params, {"table": slots}, 3)  # a state of ours
                for k, x in arrays.items():
                    np.testing.assert_array_equal(getattr(got, k)["table"], x)
                continue
            for p in (params, {"table": params["table"].real}):
                with pytest.raises(ValueError, match=message):
                    import_state(tx, p, {"table": slots}, 3)
    with pytest.raises(ValueError, match=r"has no slot in torch; take it from the state"):
        export_state(params, state, "torch")


def test_what_is_told_of_complex_tables_is_pytorchs_adam():
    """The table of real numbers, by the formula of PyTorch on real and imaginary parts."""
    rng = np.random.default_rng(1)
    draw = lambda: rng.normal(size=(3, 2)) + 1j * rng.normal(size=(3, 2))  # noqa: E731
    table, m, w = (draw().astype("complex64") for _ in range(3))
    v = np.abs(draw().real) + 1j * np.abs(draw().real)
    v = v.astype("complex64")
    real = {"exp_avg": m.view("float32"), "exp_avg_sq": v.view("float32")}
    tx, params = js.adam(0.1), {"table": table.view("float32")}
    state = import_state(tx, params, {"table": real}, 5)

    def loss(params):  # of w.conj() * rows, whose gradient in PyTorch's sense is w
        rows = params["table"][jnp.arange(3)]
        rows = jax.lax.complex(rows[..., ::2], rows[..., 1::2])
        return (w.conj() * rows).real.sum()

    new, _ = tx.apply(js.grad(loss)(params), state, params)
    m = 0.9 * m + 0.1 * w
    v = 0.999 * v + 0.001 * (w.real**2 + 1j * w.imag**2)
    m, v = m / (1 - 0.9**6), v / (1 - 0.999**6)
    step = m.real / (np.sqrt(v.real) + 1e-8) + 1j * m.imag / (np.sqrt(v.imag) + 1e-8)
    wanted = (table - 0.1 * step).astype("complex64")
    assert_close(np.asarray(new["table"]).view("complex64"), wanted, 1e-5, 1e-6)


def test_a_parameter_that_was_never_stepped_starts_anew():
    """PyTorch has no state for it."""
    params, arrays = torch_params(TORCH["adagrad"]), TORCH["adagrad"]
    tx = js.adagrad(0.1, initial_accumulator_value=0.5)
    for nothing in (None, {}):
        slots = {"table": under(arrays, "optimizer.0."), "w": nothing}
        total = import_state(tx, params, slots, STEPS).sum_of_squares
        assert (total["w"] == 0.5).all()
        np.testing.assert_array_equal(total["table"], arrays["optimizer.0.sum"])


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
def test_a_single_array_is_as_one_in_a_tree(untouched):
    table, slots = ones(5, 2), {"m": 0.5 * ones(5, 2), "v": 0.25 * ones(5, 2)}
    clip, adam = js.optim.clip_by_global_norm(1.0), js.adam(0.1, untouched=untouched)
    tx = js.optim.chain(clip, adam)
    for its_slots in (slots, None):
        state = import_state(tx, table, its_slots, 7)
        in_tree = import_state(tx, {"table": table}, {"table": its_slots}, 7)
        both = jax.tree.leaves(state), jax.tree.leaves(in_tree)
        jax.tree.map(np.testing.assert_array_equal, *both)
        tx.apply(js.grad(lambda t: t[jnp.array([1])].sum())(table), state, table)


MEMORY = """
import resource, sys
import jax.numpy as jnp, numpy as np, jslices as js
def imported(rows):
    params, array = {"table": jnp.ones((rows, 128))}, np.ones((rows, 128), "float32")
    slots = {"table": {"m": array, "v": array}}
    state = js.checkpoint.import_state(js.adam(0.1), params, slots, 7)
    return state.nu["table"].block_until_ready(), array
def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
imported(3)
before = peak()
array = imported(250_000)[1]
print((peak() - before) / array.nbytes)
"""


@pytest.mark.slow
def test_a_state_is_imported_in_twice_its_memory():
    """Beside the parameters and the slots, which are one array here."""
    peak = subprocess.check_output([sys.executable, "-c", MEMORY], text=True)
    assert float(peak) < 1 + 1 + 2 * 2 + 0.5


def test_slots_are_placed_as_their_parameters_are():
    rows = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    params = {"table": jax.device_put(jnp.ones((16, 2)), rows)}
    slots = {"table": {"m": np.ones((16, 2), "float32"), "v": np.ones((16, 2), "float32")}}
    state = import_state(js.adam(0.1), params, slots, 3)
    assert state.mu["table"].sharding.is_equivalent_to(rows, 2)


def test_slots_are_copied():
    """The state may be donated, and the slots belong to others."""
    params, mean = {"table": jnp.ones((3, 2))}, jnp.full((3, 2), 0.5)
    state = import_state(js.sgd(0.1, 0.9), params, {"table": {"momentum_buffer": mean}}, 3)
    jax.jit(lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0)(state)
    assert (mean == 0.5).all()


def test_slots_of_numpy_are_copied():
    """On a CPU JAX would keep memory that starts at a multiple of 64 bytes."""
    memory = np.full(32, 0.5, "float32")
    mean = memory[-memory.ctypes.data % 64 // 4 :][:6].reshape(3, 2)
    slots = {"table": {"momentum_buffer": mean}}
    state = import_state(js.sgd(0.1, 0.9), {"table": jnp.ones((3, 2))}, slots, 3)
    mean[:] = 9
    assert (state.trace["table"] == 0.5).all()


def test_parameters_that_a_state_keeps_stay():
    """``init`` may return the parameters themselves, which belong to the user."""
    keep = js.GradientTransformation(lambda p: p, lambda g, s, p=None: (g, s))
    params = {"table": jnp.ones((3, 2))}
    tx, slots = js.optim.chain(keep, js.sgd(0.1, 0.9)), {"table": {"trace": ones(3, 2)}}
    state = import_state(tx, params, slots, 3)
    assert (params["table"] == 1).all() and (state[0]["table"] == 1).all()


LEFT_OUT = object()


def slots_with(**changes):
    """Slots of the SparseAdam that was saved, some of them changed or left out."""
    slots = torch_slots(TORCH["sparse_adam"])
    slots["table"] |= changes
    slots["table"] = {k: x for k, x in slots["table"].items() if x is not LEFT_OUT}
    return slots


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


WRONG = {
    "fewer rows": (
        dict(exp_avg=ones(4, 3)),
        r"the slot exp_avg at \['table'\] has shape \(4, 3\), wanted \(6, 3\): 2 rows are "
        r"missing: import it with a parameter of the rows given here, then .*resize_rows",
    ),
    "more rows": (
        dict(exp_avg_sq=ones(8, 3)),
        r"exp_avg_sq at .* shape \(8, 3\), wanted \(6, 3\): take the rows that the "
        r"parameter has, x\[:6\] if they are the first",
    ),
    "transposed": (dict(exp_avg=ones(3, 6)), r"\(3, 6\), wanted \(6, 3\): transpose it"),
    "another row": (dict(exp_avg=ones(6, 2)), r"\(6, 2\), wanted \(6, 3\): reshape it"),
    "another dtype": (
        dict(exp_avg=ones(6, 3, dtype="float16")),
        r'is float16, and the state keeps float32: type x.astype\("float32"\), or '
        r'jslices.optim.with_state_dtype\(tx, "float16"\)',
    ),
    "integers": (
        dict(exp_avg=ones(6, 3, dtype="int32")),
        r'is int32, and the state keeps float32: type x.astype\("float32"\)$',
    ),
    "None": (
        dict(exp_avg=None),
        r"exp_avg at \['table'\] is None, wanted \(6, 3\) of float32: give the array",
    ),
    "objects": (
        dict(exp_avg=np.array([None, None])),
        r"exp_avg at \['table'\] is an array \(2,\) of object, wanted \(6, 3\) of float32",
    ),
    "missing": (
        dict(exp_avg_sq=LEFT_OUT),
        r"nu at \['table'\] wants one slot, named nu or exp_avg_sq or Adam_1 or v or "
        r"velocity or momentum2 or momentum_2, got step, exp_avg",
    ),
    "twice": (dict(m=ones(6, 3)), r"mu at .* wants one slot.*got exp_avg and m"),
    "unknown": (
        dict(max_exp_avg_sq=ones(6, 3)),
        r"no state for the slot max_exp_avg_sq at \['table'\]: it keeps mu or .*leave this",
    ),
    "another step": (
        dict(step=np.float32(7)),
        r"7 steps were taken at \['table'\], and count=5: leave count out, or give one for",
    ),
    "steps of rows": (
        dict(step=ones(2)),
        r"the slot step at \['table'\] is an array \(2,\) of float32, wanted the number of",
    ),
    "NaN": (
        dict(exp_avg=ones(6, 3) * np.array([[1], [1], [np.nan], [1], [1], [1]], "float32")),
        r"the slot exp_avg at \['table'\] has 3 elements that are NaN, first in row 2: t",
    ),
    "negative": (
        dict(exp_avg_sq=jnp.ones((6, 3)).at[4, 1].set(-1e-30)),
        r"exp_avg_sq at \['table'\] has 1 elements that are negative, first in row 4:",
    ),
    "no step": (
        dict(step=None),
        r"step at \['table'\] is None, wanted the number of steps",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_told(name):
    changes, message = WRONG[name]
    params = torch_params(TORCH["sparse_adam"])
    with pytest.raises(ValueError, match=f"^import_state: .*{message}"):
        import_state(js.adam(0.1), params, slots_with(**changes), STEPS)


def test_all_that_does_not_fit_is_told_at_once():
    slots = slots_with(exp_avg=ones(4, 3), exp_avg_sq=LEFT_OUT)
    with pytest.raises(ValueError, match=r"exp_avg at .*; nu at .*wants one slot"):
        import_state(js.adam(0.1), torch_params(TORCH["sparse_adam"]), slots, STEPS)


def test_other_errors_of_import_state():
    params = {"table": jnp.ones((3, 2))}
    start = functools.partial(import_state, js.adam(0.1), params)
    for count in (
        -1,
        2.5,
        [3],
        [[1], 2],
        True,
        {"table": -1},
        "x",
        np.inf,
        np.float32(2**31),
        1j,
    ):
        with pytest.raises(ValueError, match=r"wanted the number of steps taken, an int"):
            start({"table": {}}, count)
    with pytest.raises(ValueError, match="slots must mirror params, with a dict of arrays"):
        start({"other": {}}, 1)
    for saved in ({0: {}}, {"state": {0: {}}, "param_groups": []}):
        with pytest.raises(ValueError, match=r'type \{"table": state_dict\["state"\]\[0\]'):
            start(saved, 1)
    with pytest.raises(TypeError, match=r"tx is dict, wanted an optimizer"):
        import_state(params, js.adam(0.1), {"table": {}}, 1)
    nothing = {"table": {"momentum_buffer": None}}
    assert import_state(js.sgd(0.1), params, nothing, 1).count == 1
    with pytest.raises(TypeError, match=r"a dict for each parameter.*got Array|ndarray"):
        start({"table": np.ones((3, 2))}, 1)
    with pytest.raises(TypeError, match=r"jslices' own optimizers.*optax.tree.set"):
        import_state(optax.adam(0.1), params, {"table": {"mu": ones(3, 2)}}, 1)
    with pytest.raises(ValueError, match=r"shape \(5,\), wanted \(\): reshape it"):
        import_state(js.sgd(0.1, 0.9), {"b": jnp.ones(())}, {"b": {"trace": ones(5)}}, 1)
    with pytest.raises(ValueError, match=r'pass "trace": -x / learning_rate'):
        slots = {"table": {"momentum": ones(3, 2)}}
        import_state(js.sgd(0.1, momentum=0.9), params, slots, 1)


def test_errors_of_export_state():
    params = torch_params(TORCH["adam"])
    with pytest.raises(ValueError, match=r"names='jax'\): wanted one of \('torch', 'tf1'"):
        export_state(params, ADAM.init(params), "jax")
    with pytest.raises(
        ValueError, match=r"sum_of_squares of RowwiseAdagrad.*no slot in tor"
    ):
        export_state(params, js.rowwise_adagrad(0.1).init(params), "torch")
    step, flush = compiled(ADAM)
    batch = batches_of(TORCH["batches"])[0]
    params, state, _ = step(params, ADAM.init(params), *batch)
    with pytest.raises(ValueError, match=r"rows are behind.*tx.flush\(params, state\)"):
        export_state(params, state, "torch")
    export_state(*flush(params, state), "torch")


@pytest.mark.parametrize("name", ["chain", "partition"])
def test_what_one_call_can_not_fill_is_filled_by_several(name):
    """Beside transformations of Optax."""
    ours, none = js.sgd(0.1, 0.9), js.optim.MaskedNode()
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
    slots = {"a": {"trace": ones(3, 2)}, "b": {"trace": ones(2)}}
    masked = params | {"b": none}, slots | {"b": none}
    if name == "chain":
        tx = js.optim.chain(optax.zero_nans(), ours)
    else:
        labels = {"a": "rows", "b": "rest"}
        tx = js.optim.partition({"rows": ours, "rest": optax.adam(0.1)}, labels)
        slots["b"] = None
    message = "no step without gradients, as most of Optax"
    with pytest.raises(TypeError, match=message) as error:
        import_state(tx, params, slots, 7)
    assert "inner_states[label].inner_state" in str(error.value)
    state = tx.init(params)
    if name == "chain":
        filled = (state[0], import_state(ours, params, slots, 7))
    else:
        rows = state.inner_states["rows"]
        rows = rows._replace(inner_state=import_state(ours, *masked, 7))
        filled = state._replace(inner_states=state.inner_states | {"rows": rows})
    updates, after = tx.update(jax.tree.map(jnp.zeros_like, params), filled, params)
    assert_close(updates["a"], jnp.full((3, 2), -0.09))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert 8 in [count for _, count in optax.tree.get_all_with_path(after, "count")]


def skipping_sparse_adam(grads, p, lr=0.1, b1=0.9, b2=0.999):
    """What PyTorch's SparseAdam saves, and the table, where some gradients are None."""
    step, mean, square = 0, np.zeros_like(p), np.zeros_like(p)
    for g in grads:
        if g is None:
            continue
        step, (rows, values) = step + 1, g
        mean[rows] += (1 - b1) * (values - mean[rows])
        square[rows] += (1 - b2) * (values**2 - square[rows])
        size = lr * np.sqrt(1 - b2**step) / (1 - b1**step)
        p[rows] -= size * mean[rows] / (np.sqrt(square[rows]) + 1e-8)
    slots = {"step": np.float32(step), "exp_avg": mean, "exp_avg_sq": square}
    return p, {name: x.astype("float32") for name, x in slots.items()}


@pytest.mark.parametrize("count", [None, {"a": 5, "b": 3}])
def test_tables_that_were_skipped_in_some_steps(count):
    """SparseAdam counts the steps of each table: 5 and 3 of 5."""
    rng, rows = np.random.default_rng(0), np.array([1, 2])
    run = {
        name: [(rows, 1e-6 * rng.normal(size=(2, 2))) for _ in range(7)] for name in "ab"
    }
    run["b"][1] = run["b"][3] = None
    start = {name: rng.normal(size=(4, 2)) for name in run}
    saved = {name: skipping_sparse_adam(g[:5], start[name] + 0) for name, g in run.items()}
    params = {name: jnp.asarray(p, jnp.float32) for name, (p, _) in saved.items()}
    slots = {name: x for name, (_, x) in saved.items()}
    rate = optax.constant_schedule(0.1)
    opt = js.optim.chain(js.optim.clip(1.0), js.adam(rate, eps_hat=True))
    with pytest.raises(
        ValueError, match=r"^import_state: 5 steps .* at \['a'\] and 3"
    ) as e:
        import_state(opt, params, slots, count)
    (advice,) = re.findall(r"tx = (jslices.*?, labels\))", str(e.value))
    tx = eval(advice, {"jslices": js, "opt": opt, "labels": {"a": 5, "b": 3}})
    state = import_state(tx, params, slots, count)
    assert [int(state.inner_states[n].inner_state[1].count) for n in (5, 3)] == [5, 3]
    step = fast_jit(tx.apply)
    for i in (5, 6):
        values = {name: jnp.asarray(g[i][1], jnp.float32) for name, g in run.items()}
        grads = {n: js.IndexedSlices(v, rows, (4, 2)) for n, v in values.items()}
        params, state = step(grads, state, params)
    for name, g in run.items():
        wanted, after = skipping_sparse_adam(g, start[name] + 0)
        assert_close(params[name], wanted.astype("float32"), rtol=2e-5, atol=2e-6)
        assert export_state(params, state, "torch")[name]["step"] == after["step"]


def test_steps_that_are_not_there():
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
    slots = {"a": {"trace": ones(3, 2)}, "b": {"trace": ones(2), "step": 2}}
    with pytest.raises(
        ValueError, match=r"no step in the slots at \['a'\]: give the count"
    ):
        import_state(js.sgd(0.1, 0.9), params, slots)
    with pytest.raises(ValueError, match=r"no step in any slots: give the count"):
        import_state(js.sgd(0.1, 0.9), params, {"a": {}, "b": None})
    state = import_state(js.sgd(0.1, 0.9), params, slots | {"a": None})
    assert state.count == 2


def test_what_is_nearest_to_an_optimizer_counts_with_it():
    """A schedule of Optax's; plain SGD, which keeps no arrays, counts as the largest."""
    halved = js.from_optax(optax.scale_by_schedule(lambda n: 0.5))
    both = js.optim.chain(halved, js.sgd(0.1, 0.9))
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2), "c": jnp.ones(2)}
    tx = js.optim.partition(
        {"a": both, "b": both, "c": js.sgd(0.1)}, {n: n for n in params}
    )
    slots = {"a": {"trace": ones(3, 2)}, "b": {"trace": ones(2)}, "c": {}}
    state = import_state(tx, params, slots, {"a": 4, "b": 7, "c": 7})
    counts = optax.tree.get_all_with_path(state, "count")
    assert [int(n) for _, n in counts] == [4, 4, 7, 7, 7]


def test_multi_steps_is_filled_from_within():
    opt, params, ids = js.adagrad(0.1), {"table": jnp.ones((3, 2))}, jnp.array([1])
    slots, count = {"table": {"sum": np.full((3, 2), 0.5, "float32")}}, 4
    grads = {"table": js.IndexedSlices(jnp.ones((1, 2)), ids, (3, 2))}
    tx = js.optim.multi_steps(opt, 2, grads)
    with pytest.raises(TypeError, match=r"import_state: tx gathers") as error:
        import_state(tx, params, slots, count)
    (advice,) = re.findall(r"type (tx\.init.*)", str(error.value))
    state = eval(advice, globals() | locals())
    inner = import_state(opt, params, slots, count)
    wanted, _ = fast_jit(opt.apply)(grads, inner, params)
    step = fast_jit(tx.apply)
    between, state = step(grads, state, params)
    with pytest.raises(ValueError, match=r"1 gradients wait .* when mini_step is 0"):
        export_state(between, state, "torch")
    after, state = step(grads, state, between)
    assert_close(after, wanted)
    assert state.gradient_step == count + 1
    assert export_state(after, state, "torch")["table"]["step"] == count + 1


@pytest.mark.parametrize("name", ["adam_exact", "chain", "partition", "rows"])
def test_optax_tree_on_states(name):
    tx = js.rowwise_adagrad(0.1) if name == "rows" else EVERY_STATE[name]
    params = jax.tree.map(jnp.array, torch_params(TORCH["adam"]))
    state = tx.init(params)
    marked = optax.tree.map_params(
        tx, lambda x: "of a parameter", state, transform_non_params=lambda x: "other"
    )
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    for (_, count), (_, mark) in zip(
        optax.tree.get_all_with_path(state, "count"),
        optax.tree.get_all_with_path(marked, "count"),
        strict=True,
    ):
        assert count == 0 and mark == "other"
    marks = jax.tree.leaves(optax.tree.set(marked, count="other"))
    arrays = jax.tree.leaves(state)
    rows = [x.ndim > 0 and x.shape[0] == 6 for x in arrays]
    assert {m for m, big in zip(marks, rows, strict=True) if big} == {"of a parameter"}
    assert optax.tree.size(state) == sum(x.size for x in arrays)
    zeros = optax.tree.zeros_like(state)
    assert jax.tree.structure(zeros) == jax.tree.structure(state)


def test_optax_tree_on_row_gradients_is_as_the_page_says():
    grads = {"table": js.IndexedSlices(jnp.ones((1, 2)), [1], (3, 2))}
    trees = optax.tree
    for refused in (
        lambda: trees.add(grads, grads),
        lambda: trees.scale(2.0, grads),
        *(functools.partial(f, grads) for f in (trees.sum, trees.max, trees.norm)),
        lambda: trees.cast(grads, "bfloat16"),
    ):
        with pytest.raises(
            TypeError, match=r"row numbers of IndexedSlices.*: type jslices"
        ):
            refused()
    tx, params = js.from_optax(optax.ema(0.9)), {"table": jnp.ones((3, 2))}
    updates, _ = jax.eval_shape(tx.update, grads, tx.init(params), params)
    assert js.is_slices(updates["table"])


# The page.

BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
(
    FROM_TORCH_THERE,
    FILES,
    FROM_TORCH_HERE,
    MANY_TABLES_THERE,
    MANY_TABLES,
    FBGEMM,
    FROM_TENSORFLOW_THERE,
    FROM_TENSORFLOW_HERE,
    MOD_SHARDS,
    GROW,
    REORDER,
    SPREAD,
    TO_TORCH_HERE,
    TO_TORCH_THERE,
    ORBAX,
    ORBAX_PLACED,
    OPTAX_TREE,
    AVERAGES,
) = BLOCKS


def run(*blocks, **names):
    names |= {"functools": functools, "jax": jax, "jnp": jnp, "js": js, "np": np}
    names |= {"optax": optax}
    for block in blocks:
        exec(block, names)
    return names


def test_the_page_moves_states(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file(TORCH["adam"], "torch.safetensors")
    np.savez("tensorflow.npz", **TENSORFLOW["adam"])
    found = run(FROM_TORCH_HERE)
    wanted = {n: torch_params(TORCH["adam"], f"after_{n}.") for n in (1, 3)}
    batches = batches_of(TORCH["batches"])
    check_goes_on(found["tx"], found["params"], found["state"], batches, wanted)

    found = run(FROM_TORCH_HERE, FROM_TENSORFLOW_HERE)
    wanted = {n: tensorflow_params(TENSORFLOW["adam"], f"after_{n}/") for n in (1, 3)}
    batches = batches_of(TENSORFLOW["batches"])
    check_goes_on(found["tx"], found["params"], found["state"], batches, wanted)

    found = run(FROM_TORCH_HERE, GROW, REORDER, TO_TORCH_HERE, OPTAX_TREE)
    assert load_file("ours.safetensors")["optimizer.0.exp_avg"].shape == (1006, 3)
    assert found["state"].count == 0 and found["scale"].shape == (1006, 3)


@pytest.mark.slow
def test_the_page_runs_as_pasted_without_the_other_libraries(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = {FROM_TORCH_THERE, MANY_TABLES_THERE, FROM_TENSORFLOW_THERE, TO_TORCH_THERE}
    names = {}
    for block in BLOCKS:
        if block not in {*there, ORBAX, ORBAX_PLACED}:
            exec(block, names)
    assert all("import torch" in x or ".torch" in x or "tensorflow" in x for x in there)
    assert names["rowwise_state"].count == names["dlrm_state"].count == 1000
    tables, state = names["dlrm"]["tables"], names["dlrm_state"].sum_of_squares["tables"]
    np.testing.assert_array_equal(tables, state)
    assert len(tables.addressable_shards) == len(state.addressable_shards) == 8


@pytest.mark.parametrize("height", [8, 9, 11, 3])
def test_the_page_joins_shards(height):
    """TensorFlow's mod shards of any height, as the lookup reads them."""
    table = np.random.default_rng(0).normal(size=(height, 2)).astype("float32")
    shards = [table[s::4] for s in range(4)]
    joined = run(MOD_SHARDS)["from_mod_shards"](shards)
    np.testing.assert_array_equal(joined, table)
    if height > 3:
        ids = np.arange(height)
        read = fast_jit(lambda shards: js.embedding_lookup(shards, ids))
        np.testing.assert_array_equal(read(shards), joined)


def test_the_page_parts_a_partitioned_variable():
    """As TensorFlow 2.21.0 reads a "mod" table of 11 rows in 4 parts, `tf.train.Saver`'s.

    ``tf.compat.v1.fixed_size_partitioner(4)`` made parts of 3, 3, 3 and 2 rows.
    """
    array = np.array([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7])[:, None]  # the id of each row
    assert "from_mod_shards(np.array_split(array, n))" in PAGE.read_text()
    table = run(MOD_SHARDS)["from_mod_shards"](np.array_split(array, 4))
    np.testing.assert_array_equal(table[:, 0], np.arange(11))


def test_the_page_writes_arrays_of_numpy(tmp_path, monkeypatch):
    """Which may be transposed; safetensors 0.8.0 writes their memory as it is."""
    monkeypatch.chdir(tmp_path)
    params = {"table": np.ones((4, 3), "f"), "w": np.arange(6, dtype="f").reshape(3, 2)}
    tx = js.sgd(0.1)
    run(TO_TORCH_HERE, tx=tx, params=params, state=tx.init(params))
    written = load_file("ours.safetensors")
    np.testing.assert_array_equal(written["model.out.weight"], params["w"].T)


def test_the_page_resizes_spread_tables():
    spread = {v: np.asarray(js.spread_ids(np.arange(v), v)) for v in (16, 24)}
    assert (spread[16] != spread[24][:16]).any()
    old, fresh = np.zeros((16, 1), np.float32), np.full((24, 1), -1, np.float32)
    old[spread[16], 0] = np.arange(16)
    rows, tx = {"t": run(SPREAD)["spread_rows"](16, 24)}, js.sgd(0.1)
    state = tx.init({"t": old})
    new, _ = js.checkpoint.resize_rows(tx, {"t": old}, state, {"t": fresh}, rows)
    by_id = np.asarray(new["t"])[spread[24], 0]
    np.testing.assert_array_equal(by_id, [*range(16), *[-1] * 8])


def test_the_page_averages_rows():
    found = run(AVERAGES)
    average = found["state"].ema["table"]
    assert np.abs(average - found["params"]["table"]).max() > 0.1


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
def test_the_page_saves_with_orbax(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    tx = EVERY_STATE["sgd_exact_with_a_schedule"]
    params = jax.tree.map(jnp.array, torch_params(TORCH["adam"]))
    step, _ = compiled(tx)
    batches = batches_of(TORCH["batches"])
    params, state, _ = step(params, tx.init(params), *batches[0])  # rows are behind
    found = run(ORBAX, params=params, state=state, directory=tmp_path)
    placed = run(ORBAX_PLACED, **found)["restored"]
    assert all(len(x.devices()) == jax.device_count() for x in jax.tree.leaves(placed))
    jax.tree.map(np.testing.assert_array_equal, placed, found["tree"])
    assert jax.tree.structure(found["restored"]) == jax.tree.structure(found["tree"])
    jax.tree.map(np.testing.assert_array_equal, found["restored"], found["tree"])
    again, state_again = found["restored"]["params"], found["restored"]["state"]
    for batch in batches[1:]:
        params, state, _ = step(params, state, *batch)
        again, state_again, _ = step(again, state_again, *batch)
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("sparse", [False, True])
def test_the_page_with_torch_itself(sparse, tmp_path, monkeypatch):
    """There and back again: it goes on as if it had been there all the time."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(6, 3, sparse=sparse)
            self.out = torch.nn.Linear(3, 2, bias=False)

    def optimizer_of(model):
        if sparse:
            return torch.optim.Adagrad(model.parameters(), lr=0.1)
        return torch.optim.Adam(model.parameters(), lr=0.1)

    def steps(model, optimizer, batches):
        for ids, labels in batches:
            optimizer.zero_grad()
            out = model.out(model.table(torch.tensor(ids).long()))
            ((out - torch.tensor(labels)) ** 2).mean().backward()
            optimizer.step()

    batches = batches_of(TORCH["batches"])
    model = Model()
    optimizer = optimizer_of(model)
    steps(model, optimizer, batches)
    made = FROM_TORCH_THERE[FROM_TORCH_THERE.index("tensors = ") :]
    imported = "from safetensors.torch import save_file\nimport torch\n"
    run(imported + made, model=model, optimizer=optimizer)

    here = FROM_TORCH_HERE
    if sparse:
        here = here.replace(
            'js.adam(1e-1, untouched="exact")', "js.adagrad(0.1, 0.0, eps=0.0)"
        )
    found = run(here)
    params, state, tx = found["params"], found["state"], found["tx"]
    step = fast_jit(js.train_step(loss, tx))
    for batch in batches:
        params, state, _ = step(params, state, *batch)
    run(TO_TORCH_HERE, params=params, state=state, tx=tx)

    other = Model()
    run(TO_TORCH_THERE, model=other, optimizer=(there := optimizer_of(other)))
    steps(other, there, batches)
    steps(model, optimizer, [*batches, *batches])
    assert_close(as_arrays(other), as_arrays(model), rtol=2e-5, atol=2e-6)


def as_arrays(model):
    return {name: x.numpy() for name, x in model.state_dict().items()}
