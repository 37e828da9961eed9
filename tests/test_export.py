"""``jax.export`` with sizes that stay open: of the batch, and of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import all_at_once, assert_close, slow_unless
from jax import export, lax
from optimizers import FIRST, THREE

import jslices as js

ROWS, BATCH = export.symbolic_shape("rows, batch")
F32, I32 = jnp.float32, jnp.int32
TABLES = [np.linspace(-1, 1, n * 4, dtype=np.float32).reshape(n, 4) for n in (7, 40)]
IDS = [np.array([3, 3, 1, 6, -1], np.int32), np.arange(30, dtype=np.int32) * 7 % 45]


def read(t, ids):
    return t[ids]


def normalized(t, ids):
    return (t / (1 + jnp.abs(t).sum(1, keepdims=True)))[ids]


def looped(t, ids):
    return lax.scan(lambda total, i: (total + t[i].sum(), None), 0.0, ids)[0]


def bags(t, ids):
    return js.embedding_lookup_sparse(t, ids[:, None], combiner="sum")


def two_tables(t, ids):
    return js.embedding_lookup([t, 2 * t], ids)


def below_another(t, ids):
    return jnp.concatenate([t, jnp.ones((1, 4))])[ids]


def exported(fun, num_rows, count):
    shapes = jax.ShapeDtypeStruct((num_rows, 4), F32), jax.ShapeDtypeStruct((count,), I32)
    return export.export(jax.jit(fun))(*shapes).call


FORMS = [read, normalized, looped, bags, two_tables, below_another, js.embedding_lookup]


@pytest.mark.parametrize(
    "form",
    slow_unless([(form,) for form in FORMS], lambda case: case[0] in (looped, bags)),
    ids=lambda form: form.__name__,
)
def test_gradients(form):
    def fun(t, ids):
        value, grad = js.value_and_grad(lambda t: (form(t, ids) ** 2).sum())(t)
        return value, grad.indices, grad.to_dense()

    anything = exported(fun, ROWS, BATCH)
    for table, ids in zip(TABLES, IDS, strict=True):
        any_batch = exported(fun, len(table), BATCH)
        ways = {"wanted": fun, "both open": anything, "batch open": any_batch}
        found = all_at_once(ways, table, ids)
        assert_close(found["both open"], found["wanted"])
        assert_close(found["batch open"], found["wanted"])


def step_of(name, kwargs):
    tx = getattr(js, name)(**{"learning_rate": 0.1, **kwargs})

    def step(t, ids):
        grad = js.grad(lambda t: jnp.cos(t[ids]).sum())(t)
        updates, state = tx.update(grad, tx.init(t), t)
        return js.apply_updates(t, updates), state, grad.coalesce().to_dense()

    return step


CASES = [(*case, {}) for case in FIRST if case[0] != "adafactor"]
CASES += [("adam", {}, {"untouched": "exact"})]


@pytest.mark.parametrize(
    "name, kwargs, more", slow_unless(CASES, lambda case: case[:2] in THREE or case[2])
)
def test_steps(name, kwargs, more):
    step = step_of(name, {**kwargs, **more})
    ways = {"wanted": step, "open": exported(step, ROWS, BATCH)}
    found = all_at_once(ways, TABLES[0], IDS[0])
    assert_close(found["open"], found["wanted"])


def test_a_plan_of_open_sizes():
    grad = js.IndexedSlices(
        *(jax.ShapeDtypeStruct((BATCH, *row), d) for row, d in [((4,), F32), ((), I32)]),
        (ROWS, 4),
    )
    plan = js.adam(0.1).plan(grad, jax.ShapeDtypeStruct((ROWS, 4), F32))
    assert plan.way == "together"
    assert str(plan).startswith("batch entries are stepped all together")


@pytest.mark.parametrize("donate", [False, True])
def test_a_donated_step_is_donated_again_where_it_is_called(donate):
    """``exported.call`` copies its arguments, as docs/jax_grad.md says."""
    tx = js.adam(0.1)

    def step(table, state, ids):
        return tx.apply(js.grad(lambda t: read(t, ids).sum())(table), state, table)

    table, ids = jnp.asarray(TABLES[1]), jnp.asarray(IDS[0])
    arguments = table, tx.init(table), ids
    exported = export.export(jax.jit(step, donate_argnums=(0, 1)))(*arguments)
    again = jax.jit(exported.call, donate_argnums=(0, 1) if donate else ())
    memory = again.lower(*arguments).compile().memory_analysis()
    arrays = jax.tree.leaves(arguments[:2])
    assert memory.alias_size_in_bytes == donate * sum(x.nbytes for x in arrays)
    (again if donate else exported.call)(*arguments)
    assert [x.is_deleted() for x in arrays] == [donate] * len(arrays)
