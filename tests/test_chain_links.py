"""Links of Optax before exact optimizers, in every wrapper: dense results, or a refusal.

By hand and in ``train_step``. The oracle is the same chain on dense gradients.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, slow_unless

import jslices as js

pytestmark = pytest.mark.filterwarnings("ignore")  # that a lifted link is lazy
V, D = 9, 2
RNG = np.random.default_rng(0)
START = {"t": RNG.normal(size=(V, D)).astype("f"), "w": np.ones(D, "f")}
IDS = np.array([[0, 3, 3], [1, 0, 7], [8, 2, 7], [3, 5, 0]])
LATER = optax.linear_schedule(1.0, 0.2, 4)

#: What leaves rows without gradient alone, and what does not.
HARMLESS = {
    "identity": optax.identity(),
    "clip": optax.clip(0.5),
    "clip_by_global_norm": optax.clip_by_global_norm(0.5),
    "scale": optax.scale(0.5),
    "scale_by_schedule": optax.scale_by_schedule(LATER),
    "scale_by_sign": optax.scale_by_sign(),
    "scale_by_rss": optax.scale_by_rss(),
    "zero_nans": optax.zero_nans(),
}
MOVERS = {
    "add_decayed_weights": optax.add_decayed_weights(0.1),
    "add_noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "apply_every": optax.apply_every(2),
    "ema": optax.ema(0.9),
    "keep_params_nonnegative": optax.keep_params_nonnegative(),
    "scale_by_adam": optax.scale_by_adam(),
    "scale_by_amsgrad": optax.scale_by_amsgrad(),
    "scale_by_adadelta": optax.scale_by_adadelta(),
    "scale_by_belief": optax.scale_by_belief(),
    "scale_by_lion": optax.scale_by_lion(),
    "scale_by_rms": optax.scale_by_rms(),
    "scale_by_stddev": optax.scale_by_stddev(),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "scale_by_yogi": optax.scale_by_yogi(),
    "sgd with momentum": optax.sgd(0.1, 0.9),
    "trace": optax.trace(0.9),
}
OPTIMIZERS = {
    "sgd": (js.sgd, {}),
    "sgd with momentum": (js.sgd, {"momentum": 0.9}),
    "sgd with decay": (js.sgd, {"weight_decay": 0.5, "mask": {"t": True, "w": False}}),
    "adagrad": (js.adagrad, {}),
    "rowwise_adagrad": (js.rowwise_adagrad, {}),
    "rowwise_adagrad with decay": (js.rowwise_adagrad, {"weight_decay": 0.5}),
    "adam": (js.adam, {}),
}
optim, chain = js.optim, js.optim.chain
LABELS = {"t": "table", "w": "rest"}
WRAPPERS = {
    "chain": chain,
    "behind clipping": lambda link, tx: chain(optim.clip(9.0), link, tx),
    "links together": lambda link, tx: chain(chain(link, optim.scale(1.0)), tx),
    "partition": lambda link, tx: optim.partition(
        {"table": chain(link, tx), "rest": chain(link, tx)}, LABELS
    ),
    "before partition": lambda link, tx: chain(
        link, optim.partition({"table": tx, "rest": tx}, LABELS)
    ),
    "masked": lambda link, tx: optim.masked(chain(link, tx), True),
    "before masked": lambda link, tx: chain(link, optim.masked(tx, True)),
    "multi_steps": lambda link, tx: optim.multi_steps(chain(link, tx), 1, SHAPES),
    "before multi_steps": lambda link, tx: chain(link, optim.multi_steps(tx, 1, SHAPES)),
    "freeze_rows": lambda link, tx: optim.freeze_rows(chain(link, tx), NONE_FROZEN),
    "before freeze_rows": lambda link, tx: chain(link, optim.freeze_rows(tx, NONE_FROZEN)),
    "before an optimizer in float32": lambda link, tx: chain(
        link, optim.with_state_dtype(tx, "float32")
    ),
}
NONE_FROZEN = {"t": np.zeros(V, bool), "w": None}
REFUSED = "moves rows without gradient|does not treat each row|cannot lift"


def loss(params, ids):
    return ((params["t"][ids] @ params["w"] - 1) ** 2).sum()


SHAPES = jax.eval_shape(js.grad(loss), START, IDS[0])


def by_hand(tx, params, state, ids):
    params, state = tx.catch_up(params, state, {"t": ids, "w": None})
    return tx.apply(js.grad(loss)(params, ids), state, params)


def in_train_step(tx, params, state, ids):
    return js.train_step(loss, tx)(params, state, ids)[:2]


def on_rows(tx, step):
    """The parameters after all steps, compiled."""

    @fast_jit
    def run(params):
        one = lambda carry, ids: (step(tx, *carry, ids), None)  # noqa: E731
        return tx.flush(*jax.lax.scan(one, (params, tx.init(params)), IDS)[0])[0]

    return run(START)


@functools.cache
def on_dense(link, optimizer):
    make, options = OPTIMIZERS[optimizer]
    tx = optax.chain(link, make(0.1, **options))

    @fast_jit
    def run(params):
        def one(carry, ids):
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params, ids), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(one, (params, tx.init(params)), IDS)[0][0]

    return run(START)


def exact(optimizer):
    make, options = OPTIMIZERS[optimizer]
    return make(0.1, untouched="exact", **options)


STEPS = by_hand, in_train_step


@pytest.mark.parametrize(
    "optimizer, wrapper",
    slow_unless(
        [(x, y) for x in OPTIMIZERS for y in WRAPPERS],
        lambda case: case in (("sgd", "chain"), ("adagrad", "before partition")),
    ),
)
def test_a_link_that_moves_rows_is_refused(optimizer, wrapper):
    turn = (list(OPTIMIZERS).index(optimizer) + list(WRAPPERS).index(wrapper)) // 2 % 2
    for n, link in enumerate(list(MOVERS.values())[turn::2]):
        tx = WRAPPERS[wrapper](js.from_optax(link), exact(optimizer))
        step = functools.partial(STEPS[n % 2], tx)
        with pytest.raises(ValueError, match=REFUSED):
            jax.eval_shape(step, START, tx.init(START), IDS[0])


ROTATED = [
    (x, y, list(WRAPPERS)[(i + 3 * j) % len(WRAPPERS)])
    for i, x in enumerate(HARMLESS)
    for j, y in enumerate(OPTIMIZERS)
]
QUICK = ("zero_nans", "sgd with decay"), ("scale_by_rss", "sgd")


@pytest.mark.parametrize(
    "link, optimizer, wrapper", slow_unless(ROTATED, lambda case: case[:2] in QUICK)
)
def test_one_that_does_not_gives_the_dense_result(link, optimizer, wrapper):
    wanted = on_dense(HARMLESS[link], optimizer)
    tx = WRAPPERS[wrapper](js.from_optax(HARMLESS[link]), exact(optimizer))
    step = STEPS[ROTATED.index((link, optimizer, wrapper)) % 2]
    assert_close(on_rows(tx, step), wanted, 1e-5, 1e-6)


def test_what_an_exact_link_precedes_must_leave_rows_alone_too():
    sgd, trace = exact("sgd"), js.from_optax(optax.trace(0.9))
    after = functools.partial(by_hand, chain(sgd, trace))
    with pytest.raises(ValueError, match=REFUSED):
        jax.eval_shape(after, START, chain(sgd, trace).init(START), IDS[0])
    halved = chain(sgd, optim.scale(0.5))
    assert_close(on_rows(halved, by_hand), on_rows(js.sgd(0.05), by_hand), 1e-6, 1e-6)
    lazy = functools.partial(by_hand, chain(trace, js.sgd(0.1)))  # nobody typed exact
    jax.eval_shape(lazy, START, chain(trace, js.sgd(0.1)).init(START), IDS[0])
    with pytest.raises(ValueError, match=r"jslices\.sgd\(rate, weight_decay=w, untouched"):
        before = functools.partial(by_hand, chain(trace, sgd))
        jax.eval_shape(before, START, chain(trace, sgd).init(START), IDS[0])


def test_measures_may_come_after_an_exact_optimizer():
    """They see what a step adds to the rows that it reads."""
    links = optim.clip(0.5), exact("sgd with decay"), optax.snapshot("n", js.global_norm)
    measured, plain = chain(*links), chain(*links[:2])

    def one(carry, ids):
        (before, _), (other, state) = (
            tx.catch_up(*x, {"t": ids, "w": None})
            for tx, x in zip((measured, plain), carry, strict=True)
        )
        params, new = in_train_step(measured, *carry[0], ids)
        other = by_hand(plain, other, state, ids)
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, params, before))
        return ((params, new), other), (new[2].measurement["n"], moved)

    @fast_jit
    def run(params):
        start = tuple((params, tx.init(params)) for tx in (measured, plain))
        (mine, other), norms = jax.lax.scan(one, start, IDS)
        return measured.flush(*mine)[0], plain.flush(*other)[0], norms

    params, wanted, (told, moved) = run(START)
    assert_close(params, wanted, 1e-6, 1e-6)
    assert_close(told, moved, 1e-5, 1e-6)


@pytest.mark.parametrize(
    "link", [optim.scale(0.5), optim.clip(0.1), js.from_optax(optax.trace(0.9))]
)
def test_what_else_comes_after_one_that_rows_catch_up_by_is_refused(link):
    tx = chain(exact("adam"), link)
    with pytest.raises(ValueError, match=r"must be the last of a chain.*measures"):
        jax.eval_shape(functools.partial(by_hand, tx), START, tx.init(START), IDS[0])
