"""No state has an array without elements: Orbax 0.12.8 saves none.

"Cannot save arrays with zero size". Those of earlier versions had some, and go on.
"""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import fast_jit, numpy_tree, slow_unless
from hypothesis import given
from hypothesis import strategies as st
from optimizers import ALL, make

import jslices as js
from jslices import dynamic

optim = js.optim
V, D = 9, 3
RNG = np.random.default_rng(0)
PARAMS = {
    k: RNG.normal(size=shape).astype("f")
    for k, shape in {"table": (V, D), "w": (D,), "unread": (4,)}.items()
}
IDS = jnp.array([1, 3, 1])
STEPS = np.array([[1, 3, 1], [0, 1, 2], [5, 3, 1], [1, 1, 8]])


def loss(params, ids):
    return ((params["table"][ids] @ params["w"] - 1) ** 2).mean()


SHAPES = jax.eval_shape(js.grad(loss), PARAMS, IDS)
EXACT = {"untouched": "exact"}
EVERY = dict.fromkeys(PARAMS, True)
WRAPPERS = {
    "chain": lambda tx: optim.chain(optim.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optim.masked(tx, EVERY),
    "partition": lambda tx: optim.partition({0: tx, 1: tx}, {**EVERY, "w": False}),
    "freeze_rows": lambda tx: optim.freeze_rows(
        tx, {**dict.fromkeys(PARAMS), "table": np.arange(V) < 2}
    ),
    "multi_steps": lambda tx: optim.multi_steps(tx, 2, SHAPES),
    "with_state_dtype": lambda tx: optim.with_state_dtype(tx, "bfloat16"),
    "params_ema": lambda tx: optim.params_ema(tx, 0.9),
}


def without_elements(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, x in leaves if 0 in jnp.shape(x)]


@examples(120)
@given(
    case=st.sampled_from(ALL),
    exact=st.booleans(),
    wrappers=st.lists(st.sampled_from([*WRAPPERS]), max_size=2),
)
def test_states_of_all_optimizers_in_all_wrappers(case, exact, wrappers):
    name, kwargs = case
    try:
        tx = make(js, name, 0.1, {**kwargs, **(EXACT if exact else {})})
        for wrapper in wrappers:
            tx = WRAPPERS[wrapper](tx)
        state = jax.eval_shape(tx.init, PARAMS)
    except (TypeError, ValueError):  # these do not go together
        return
    assert without_elements(state) == []


TRAINED = {
    "average of a lazy optimizer": lambda: optim.params_ema(js.adam(0.1), 0.9),
    "an array without gradient": lambda: optim.multi_steps(js.adam(0.1), 2, SHAPES),
    "both, exact": lambda: optim.multi_steps(js.rmsprop(0.1, **EXACT), 2, SHAPES),
    "rows that only fade": lambda: js.adadelta(0.1, **EXACT),
    "a mask": lambda: js.sgd(0.1, weight_decay=0.1, mask={**EVERY, "w": False}, **EXACT),
}


@functools.cache
def step_of(tx):
    return fast_jit(js.train_step(loss, tx))


def some_steps(tx, params, state, ids):
    for each in ids:
        params, state, _ = step_of(tx)(params, state, each)
    return params, state


def orbax():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("orbax.checkpoint")


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, *map(numpy_tree, (got, wanted)))


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("manager", [False, True])
def test_orbax_saves_them_and_training_goes_on(kind, manager, tmp_path):
    ocp, tx = orbax(), TRAINED[kind]()
    params = jax.tree.map(jnp.asarray, PARAMS)
    tree = some_steps(tx, params, tx.init(params), STEPS[:1])
    assert without_elements(tree) == []
    if manager:
        with ocp.CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(3, args=ocp.args.StandardSave(tree))
            checkpoints.wait_until_finished()
            restored = checkpoints.restore(3, args=ocp.args.StandardRestore(tree))
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "a", tree)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "a", tree)
    assert_same(restored, tree)
    assert_same(some_steps(tx, *restored, STEPS[1:]), some_steps(tx, *tree, STEPS[1:]))


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [{}, {"policy": "lfu"}, {"after": 2}, {"policy": "tinylfu"}]
)
def test_orbax_saves_maps_of_ids(options, tmp_path):
    ids = dynamic.id_map(20, **options)
    for batch in ([2**40, 7], [7, 2**50]):
        ids, _ = ids.admit(dynamic.wide_ids(batch))
    with orbax().StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ids", ids)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "ids", ids)
    assert_same(restored, ids)


# --- states of earlier versions -----------------------------------------------------------


def as_before(state):
    """With arrays without elements where there are none now."""

    def has_clock(x):
        return getattr(x, "clock", None) is not None

    def changed(x):
        if not has_clock(x):
            return x
        log = tuple(jnp.zeros((0, 1)) if y is None else y for y in x.clock.log)
        return x._replace(clock=x.clock._replace(log=log))

    state = jax.tree.map(changed, state, is_leaf=has_clock)
    if hasattr(state, "acc_grads"):
        one = js.IndexedSlices(jnp.zeros((0,)), jnp.zeros(0, jnp.int32), (4,))
        stacked = jax.tree.map(lambda x: jnp.stack([x, x]), one)
        state = state._replace(acc_grads={**state.acc_grads, "unread": stacked})
    assert without_elements(state)
    return state


@pytest.mark.parametrize(
    ["kind"], slow_unless([(kind,) for kind in TRAINED], ("a mask",).__eq__)
)
def test_states_of_before_go_on_in_memory_and_from_files(kind, tmp_path):
    tx = TRAINED[kind]()
    params = jax.tree.map(jnp.asarray, PARAMS)
    params, state = some_steps(tx, params, tx.init(params), STEPS[:1])
    wanted = some_steps(tx, params, state, STEPS[1:])
    old = as_before(state)
    got = some_steps(tx, params, old, STEPS[1:])
    assert jax.tree.structure(got[1]) == jax.tree.structure(old)  # as loops want it
    flush = fast_jit(tx.flush)
    assert_same(flush(*got)[0], flush(*wanted)[0])
    path = js.Saver().save({"params": params, "state": old}, tmp_path / "m")
    restored = js.Saver().restore(path, {"params": params, "state": state})
    assert_same((restored["params"], restored["state"]), (params, state))
    if not hasattr(state, "acc_grads"):  # which resize_rows refuses between two steps
        saved = js.Saver().restore(path)
        resized = js.checkpoint.resize_rows(tx, *saved.values(), saved["params"])
        assert_same(some_steps(tx, *resized, STEPS[1:]), wanted)


def test_maps_of_before_are_restored(tmp_path):
    ids, _ = dynamic.id_map(20).admit(dynamic.wide_ids([2**40, 7]))
    old = {k: getattr(ids, k) for k in ("low", "high", "last", "step")}
    old |= {"hits": jnp.zeros(0, jnp.int32), "sightings": jnp.zeros(0, jnp.int32)}
    path = js.Saver().save({"ids": old}, tmp_path / "m")
    assert_same(js.Saver().restore(path, {"ids": dynamic.id_map(20)})["ids"], ids)


def test_files_of_host_tables_of_before_are_refused_with_what_to_type(tmp_path):
    """Which name the log that has no elements."""
    path, tx = tmp_path / "table.rows", js.rmsprop(0.1, **EXACT)
    with js.HostTable((20, 2), tx, path) as table:
        table.read([3])
    whole = path.read_bytes()
    magic, head, rest = whole.split(b"\n", 2)
    about = json.loads(head)
    assert not any("log" in name for name, *_ in about["shared"])
    about["shared"].append(["clock/log/0", "float32", [0, 1]])
    old = json.dumps(about).encode()
    path.write_bytes(magic + b"\n" + old + b"\n" + rest[len(old) - len(head) :])
    with pytest.raises(js.InvalidArgumentError, match="was made by an earlier version"):
        js.HostTable((20, 2), tx, path)
    path.write_bytes(whole)
    js.HostTable((20, 2), tx, path).close()
