"""Keras 3 on JAX: row gradients in its own train step, the same as on dense gradients."""

import doctest
import importlib
import json
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import golden
from optimizers import FIRST, label

import jslices as js

keras = pytest.importorskip("keras", minversion="3")
jk = importlib.import_module("jslices.keras")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # The runs to compare with.
    pytest.mark.filterwarnings("ignore:.*the gradient is an array and moves all rows"),
]

layers = keras.layers
V, D, N = 50, 4, 96
RNG = np.random.default_rng(3)
X = (RNG.zipf(1.3, size=(N, 5)) % V).astype("int32")
Y = RNG.normal(size=(N, 1)).astype("float32")
RATE = 0.02
# Missed steps move its rows as those of Adam, by a program of a third of the size.
MOMENTUM = {"momentum": 0.9, "untouched": "exact"}
EXACT = {"untouched": "exact"}


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(0)
    with jax.numpy_rank_promotion("allow"):  # which Keras relies on
        yield
    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session()


def sequential(**embedding):
    table = layers.Embedding(V, D, **embedding)
    return keras.Sequential([table, layers.Flatten(), layers.Dense(1)])


def functional():
    """Two tables, one of them used twice, and a mask."""
    ids = keras.Input((5,), dtype="int32")
    shared = layers.Embedding(V, D, name="shared")
    rows = layers.Embedding(V, D, mask_zero=True, name="masked")(ids)
    rest = layers.Add()([shared(ids), shared(keras.ops.flip(ids, axis=1))])
    out = layers.Concatenate()([layers.SimpleRNN(3)(rows), layers.Flatten()(rest)])
    return keras.Model(ids, layers.Dense(1)(out))


@keras.saving.register_keras_serializable(package="tests")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = self.add_weight(shape=(V, D), initializer="normal", name="table")
        self.dropout, self.dense = layers.Dropout(0.2), layers.Dense(1)

    def build(self, shape):
        self.dense.build((None, D))
        super().build(shape)

    def call(self, ids, training=False):
        rows = keras.ops.take(self.table, ids, axis=0)
        return self.dense(self.dropout(keras.ops.mean(rows, axis=1), training=training))


MODELS = {"sequential": sequential, "functional": functional, "subclassed": Subclassed}


def fit(make, optimizer, rows, x=X, y=Y, compile_with=None, seed=1, **kwargs):
    """``(model, losses and metrics)`` of a few epochs."""
    keras.utils.set_random_seed(seed)
    model = make()
    if rows:
        assert jk.row_gradients(model) is model
    options = {"loss": "mse", "metrics": ["mae"], **(compile_with or {})}
    model.compile(optimizer=optimizer, **options)
    kwargs = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0, **kwargs}
    return model, model.fit(x, y, **kwargs).history


def lazy(**kwargs):
    """For what does not depend on missed steps: a program of half the size."""
    return jk.Optimizer(js.sgd, RATE, **kwargs)


def exact(rate=RATE, **kwargs):
    return jk.Optimizer(js.sgd, rate, **MOMENTUM, **kwargs)


@keras.saving.register_keras_serializable(package="tests")
def clipped(learning_rate, norm, dtype):
    """A function of a user, whose arguments Keras writes into files."""
    adam = js.adam(learning_rate, mu_dtype=dtype, untouched="exact")
    return js.optim.partition({"few": js.optim.chain(js.optim.clip(norm), adam)}, "few")


def assert_same(one, other, tolerance=1e-4):
    """Histories and weights of two runs."""
    (model, history), (wanted_model, wanted) = one, other
    assert history.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(
            history[name], wanted[name], rtol=tolerance, err_msg=name
        )
    for w, v in zip(model.get_weights(), wanted_model.get_weights(), strict=True):
        np.testing.assert_allclose(w, v, rtol=10 * tolerance, atol=10 * tolerance)


def both(make=sequential, optimizer=exact, **kwargs):
    """The same run with row gradients and with dense ones."""
    calls = {k: v for k, v in kwargs.items() if not callable(v) or k == "x"}
    made = {k: v for k, v in kwargs.items() if k not in calls}
    run = lambda rows: fit(  # noqa: E731
        make, optimizer(), rows, **calls, **{k: v() for k, v in made.items()}
    )
    found, wanted = run(True), run(False)
    assert_same(found, wanted)
    return found, wanted


def sees_rows(model):
    """Which variables have row gradients in the train step of ``model``."""

    def loss(values):
        out, _ = model.stateless_call(
            values, [v.value for v in model.non_trainable_variables], X
        )
        return keras.ops.mean(out)

    grads = jax.eval_shape(js.grad(loss), [v.value for v in model.trainable_variables])
    paths = [v.path for v in model.trainable_variables]
    return [path for path, g in zip(paths, grads, strict=True) if js.is_slices(g)]


# --- the same as dense ------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_exact_rows_are_as_dense_gradients(make):
    found, _ = both(make, validation_data=lambda: (X[:32], Y[:32]))
    assert len(sees_rows(found[0])) == (2 if make is functional else 1)


def test_exact_adam_is_that_of_keras():
    as_keras = {"eps": 1e-7, "eps_hat": True, **EXACT}
    (_, history), _ = both(optimizer=lambda: jk.Optimizer(js.adam, RATE, **as_keras))
    _, wanted = fit(sequential, keras.optimizers.Adam(RATE), False)
    np.testing.assert_allclose(history["loss"], wanted["loss"], rtol=1e-5)


def cells(page, start):
    """Pairs of code in the rows of a table of the documentation."""
    text = (pathlib.Path(__file__).parent.parent / "docs" / page).read_text()
    return re.findall(rf"^\| `({start}[^`]*)`[^|]* \| `([^`]*)` \|$", text, re.M)


OF_KERAS = cells("coming_from/keras.md", r"keras.optimizers.\w+\(")


def test_the_table_has_all_that_are_equal():
    names = [re.findall(r"[A-Z]\w+", theirs)[0] for theirs, _ in OF_KERAS]
    wanted = "Adam AdamW SGD SGD Adagrad RMSprop RMSprop Adadelta Lion"
    assert names == wanted.split()


@pytest.mark.parametrize("theirs, ours", OF_KERAS, ids=lambda code: code[:30])
def test_what_equals_an_optimizer_of_keras(theirs, ours):
    """The table of the documentation, and the error that tells what to type."""
    start = RNG.normal(size=(3, 2)).astype("float32")
    grads = RNG.normal(size=(4, 3, 2)).astype("float32")
    # Two rows that move alike, unless they do something in steps that they miss.
    start[1], grads[2:, 1] = start[0], grads[[0, 3], 0]
    grads[1:3, 0] = grads[:2, 1] = 0

    def steps(optimizer):
        optimizer.build([keras.Variable(start)])
        step, results = jax.jit(optimizer.stateless_apply), [start]
        state = [v.value for v in optimizer.variables]
        for g in grads:
            (p,), state = step(state, [g], [results[-1]])
            results.append(p)
        return np.array(results)

    wanted, found = steps(eval(theirs)), eval(ours)
    waits = np.array_equal(*wanted[-1, :2])
    model = jk.row_gradients(sequential())
    model.compile(eval(theirs), "mse")
    model.build((None, 5))
    with pytest.raises(ValueError, match=r"type .*, for the same losses") as error:
        model.train_on_batch(X, Y)
    told = eval(re.findall(r"jk.Optimizer\(.*?\)", str(error.value))[0])
    for optimizer in (found, told):
        assert optimizer.catches_up != waits
        np.testing.assert_allclose(steps(optimizer), wanted, rtol=1e-5, atol=1e-6)


def test_optimizers_round_others():
    def make(rate):
        rmsprop = js.rmsprop(rate, momentum=0.5, **EXACT)
        wide = js.optim.with_state_dtype(rmsprop, "float32")
        return js.optim.chain(js.optim.clip_by_global_norm(0.1), wide)

    both(optimizer=lambda: jk.Optimizer(make, 0.01))


def test_lazy_rows_stay():
    model, _ = fit(sequential, jk.Optimizer(js.adam, RATE), True, x=X[:16], y=Y[:16])
    keras.utils.set_random_seed(1)
    before = sequential()
    before.build((None, 5))
    untouched = np.setdiff1d(np.arange(V), X[:16])
    table, start = model.get_weights()[0], before.get_weights()[0]
    np.testing.assert_array_equal(table[untouched], start[untouched])
    assert np.abs(table - start).max() > 0.01


def test_sparse_says_which_gradients_are_rows():
    def loss(sparse):
        model = jk.row_gradients(sequential(), sparse=sparse)
        model.compile(exact(), "mse", metrics=["mae"])
        return model.train_on_batch(X[:16], Y[:16])[0]

    with pytest.raises(js.DenseUseError, match="kernel"):
        loss(True)
    tables = lambda path, leaf: True if "embeddings" in path[0].key else None  # noqa: E731
    assert np.isfinite(loss(tables))


def test_the_model_of_the_golden_numbers():
    """TensorFlow's IndexedSlices and two steps of SGD, from its weights."""
    data = golden("seed_model")["blog"]
    model = keras.Sequential([layers.Embedding(10, 4), layers.Flatten(), layers.Dense(1)])
    model.build((None, 5))
    model.set_weights([data["embeddings"], data["kernel"], data["bias"]])
    jk.row_gradients(model).compile(jk.Optimizer(js.sgd, 0.1), "mse")

    def loss(values):
        out, _ = model.stateless_call(values, [], data["data"])
        return keras.ops.mean((out - data["target"]) ** 2)

    for step in data["steps"]:
        grads = js.grad(loss)([v.value for v in model.trainable_variables])
        wanted = step["grad_embeddings"]["is"]
        np.testing.assert_array_equal(grads[0].indices, wanted["indices"])
        np.testing.assert_allclose(grads[0].values, wanted["values"], rtol=1e-5, atol=1e-6)
        assert grads[0].dense_shape == tuple(wanted["dense_shape"])
        model.reset_metrics()  # older releases of Keras go on with the mean
        value = model.train_on_batch(data["data"], data["target"])
        np.testing.assert_allclose(value, step["loss"], rtol=1e-5)
        after = (step["embeddings_after"], step["kernel_after"], step["bias_after"])
        for w, v in zip(model.get_weights(), after, strict=True):
            np.testing.assert_allclose(w, v, rtol=1e-5, atol=1e-6)


# --- what fit can do --------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer, how",
    [(lazy, {"jit_compile": False}), (exact, {"steps_per_execution": 2})],
    ids=["operation by operation", "two steps in a program"],
)
def test_ways_to_run(optimizer, how):
    def run(rows, **how):
        options = {"metrics": [], **how}
        return fit(sequential, optimizer(), rows, compile_with=options, epochs=1)

    assert_same(run(True, **how), run(False))


def test_weights_of_samples_and_classes():
    """Also in metrics, beside losses of layers, and in a last batch that is shorter."""
    n, labels = slice(40), (Y > 0).astype("float32")

    def make():
        dense = layers.Dense(1, activity_regularizer="l2", kernel_regularizer="l1")
        return keras.Sequential([layers.Embedding(V, D), layers.Flatten(), dense])

    def run(rows, **weights):
        weighted = {"weighted_metrics": ["mse"]}
        return fit(make, lazy(), rows, X[n], labels[n], weighted, **weights)

    found = run(True, class_weight={0: 1.0, 1: 3.0})
    assert_same(found, run(False, sample_weight=1 + 2 * labels[n, 0]))


def batches(n=6):
    for i in range(n):
        part = slice(16 * (i % 6), 16 * (i % 6 + 1))
        yield X[part], Y[part]


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return X[16 * i : 16 * (i + 1)], Y[16 * i : 16 * (i + 1)]


def test_fit_from_generators_and_datasets():
    wanted = fit(sequential, exact(), False)
    how = {"y": None, "batch_size": None, "steps_per_epoch": 6}
    for source in (batches(18), Sequence()):
        assert_same(fit(sequential, exact(), True, source, **how), wanted)


def test_train_on_batch_and_evaluate_agree_with_dense():
    results = []
    for rows in (True, False):
        keras.utils.set_random_seed(1)
        model = sequential()
        if rows:
            jk.row_gradients(model)
        model.compile(exact(), "mse", metrics=["mae"])
        logs = [model.train_on_batch(x, y) for x, y in batches()]
        evaluated = model.evaluate(X, Y, verbose=0)
        results.append((logs, evaluated, model.predict(X, verbose=0)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results
    )


# --- learning rates ---------------------------------------------------------------------


def test_learning_rate_scheduler_without_compiling_again():
    traced = []

    def loss(y, p):
        traced.append(1)
        return keras.losses.mean_squared_error(y, p)

    def callbacks():
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (1 + epoch) ** 2)
        ]

    def options():
        return {"loss": loss}

    (model, history), _ = both(callbacks=callbacks, epochs=4, compile_with=options)
    assert np.isclose(history["learning_rate"][-1], 0.05 / 16)
    traced.clear()
    model.optimizer.learning_rate = 1e-3
    model.fit(X, Y, batch_size=16, verbose=0)
    assert not traced


def test_reduce_on_plateau_and_rates_that_change_in_every_batch():
    class Decay(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate *= 0.95

    plateau = dict(factor=0.1, patience=1, min_delta=10.0)
    found, _ = both(
        callbacks=lambda: [Decay(), keras.callbacks.ReduceLROnPlateau("loss", **plateau)],
        epochs=4,
    )
    # 18 batches before the last epoch, and two epochs that were no better.
    assert np.isclose(found[1]["learning_rate"][-1], RATE * 0.95**24 * 0.1**2)


def test_schedules():
    """Of Keras, and a function of the step."""
    rate = keras.optimizers.schedules.CosineDecay(0.05, 12)
    found = fit(sequential, exact(rate), True)
    wanted = fit(sequential, exact(lambda step: rate(step)), False)
    assert_same(found, wanted)
    for model, _ in (found, wanted):
        learning_rate = model.optimizer.learning_rate
        np.testing.assert_allclose(learning_rate, rate(18), rtol=1e-5, atol=1e-8)
        with pytest.raises(TypeError, match="not settable"):
            model.optimizer.learning_rate = 0.1


def test_an_integer_learning_rate():
    optimizer = exact(1)
    assert float(optimizer.learning_rate) == 1.0
    fit(sequential, optimizer, True, epochs=1)


# --- saving, loading, stopping ----------------------------------------------------------


@pytest.mark.parametrize("make", [functional, Subclassed])
def test_saving_loading_and_fitting_again(make, tmp_path):
    model, _ = fit(make, exact(), True, epochs=2)
    path = str(tmp_path / "model.keras")
    model.optimizer.learning_rate = RATE
    model.save(path)
    loaded = jk.row_gradients(keras.models.load_model(path))
    assert isinstance(loaded, type(model)) and isinstance(loaded.optimizer, jk.Optimizer)
    for one, other in zip(
        loaded.optimizer.variables, model.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(one, other)
    rest, wanted = (
        each.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        for each in (loaded, model)
    )
    if make is not Subclassed:  # which draws its dropout anew
        assert_same((loaded, rest), (model, wanted))


def test_weights_files(tmp_path):
    model, _ = fit(sequential, exact(), True)
    path = str(tmp_path / "all.weights.h5")
    model.save_weights(path)
    other, _ = fit(sequential, exact(), True, epochs=1, seed=7)
    other.load_weights(path)
    for one, two in zip(other.variables, model.variables, strict=True):
        np.testing.assert_array_equal(one, two)
    one = other.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history
    two = model.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history
    assert one == two


def test_checkpoints_and_early_stopping(tmp_path):
    names = iter("ab")

    def callbacks():
        path = tmp_path / f"{next(names)}-{{epoch}}.keras"
        return [
            keras.callbacks.ModelCheckpoint(str(path), save_freq=4),
            keras.callbacks.EarlyStopping(
                "val_loss", patience=0, min_delta=10.0, restore_best_weights=True
            ),
        ]

    (_, history), _ = both(
        callbacks=callbacks, epochs=5, validation_data=lambda: (X[:32], Y[:32])
    )
    assert len(history["loss"]) == 2  # of five
    mine, wanted = (keras.models.load_model(str(tmp_path / f"{k}-1.keras")) for k in "ab")
    for w, v in zip(mine.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(w, v, rtol=1e-3, atol=1e-4)


def test_rows_are_caught_up_wherever_weights_are_read():
    seen = {True: [], False: []}

    class Look(keras.callbacks.Callback):
        def __init__(self, rows):
            super().__init__()
            self.rows = rows

        def on_train_batch_end(self, batch, logs=None):
            if batch % 4 == 3:
                seen[self.rows].append(self.model.get_weights()[0])

    for rows in (True, False):
        fit(sequential, exact(), rows, callbacks=[Look(rows)])
    for w, v in zip(seen[True], seen[False], strict=True):
        np.testing.assert_allclose(w, v, rtol=1e-3, atol=1e-4)
    assert len(seen[True]) == 3


def test_a_loaded_model_without_row_gradients_trains_densely(tmp_path):
    model, _ = fit(sequential, exact(), True, epochs=2)
    model.save(str(tmp_path / "m.keras"))
    plain = keras.models.load_model(str(tmp_path / "m.keras"))
    says = r"embedding/embeddings: the gradient is an array.*model = jk.row_gradients"
    with pytest.warns(js.DensificationWarning, match=says):
        one = plain.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history
    two = model.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history
    np.testing.assert_allclose(one["loss"], two["loss"], rtol=1e-4)


@keras.saving.register_keras_serializable(package="tests")
def halved(step):
    return 0.5 ** (1 + step)


def again(optimizer):
    """As it comes out of a file."""
    description = json.dumps(keras.saving.serialize_keras_object(optimizer))
    made = keras.saving.deserialize_keras_object(json.loads(description))
    assert made.get_config() == optimizer.get_config()
    return made


def test_configs_of_own_functions():
    optimizer = jk.Optimizer(
        clipped, 0.1, norm=1.0, dtype=jnp.bfloat16, clipnorm=2.0, name="clipped"
    )
    optimizer.learning_rate = 0.25
    made = again(optimizer)
    assert made.name == "clipped" and made.clipnorm == 2.0 and made.catches_up
    assert float(made.learning_rate) == 0.25
    by_name = {"clipped": clipped}  # as load_model(custom_objects=...) passes them
    config = optimizer.get_config()
    assert jk.Optimizer.from_config(config, by_name).name == "clipped"


@pytest.mark.parametrize("name, kwargs", FIRST, ids=label)
def test_configs_of_every_optimizer(name, kwargs):
    made = again(jk.Optimizer(getattr(js, name), **{"learning_rate": 0.1, **kwargs}))
    assert round(float(made.learning_rate), 6) == 0.1


def test_configs_of_schedules():
    for rate in (halved, keras.optimizers.schedules.CosineDecay(0.5, 12)):
        made = again(jk.Optimizer(js.sgd, rate))
        np.testing.assert_allclose(made.learning_rate, rate(0))


def test_an_optimizer_that_is_made(tmp_path):
    """It steps, and says what to type where Keras asks how it was made."""
    tx = js.optim.partition({"a": js.adam(0.1), "b": js.sgd(RATE, **MOMENTUM)}, "b")
    found = fit(sequential, jk.Optimizer(tx), True)
    assert_same(found, fit(sequential, exact(), True))
    model, _ = found
    hint = r"type jk.Optimizer\(js.adam, learning_rate=1e-3\)"
    with pytest.raises(ValueError, match=hint):
        float(model.optimizer.learning_rate)
    with pytest.raises(ValueError, match=hint):
        model.optimizer.learning_rate = 0.1
    with pytest.raises(ValueError, match=hint + r".*save_weights\(path\)"):
        model.save(str(tmp_path / "m.keras"))
    fit(sequential, jk.Optimizer(js.adafactor), True, epochs=1)  # has a rate of its own
    with pytest.raises(ValueError, match=hint):
        float(jk.Optimizer(js.adafactor).learning_rate)


# --- mixed precision --------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    found, wanted = (fit(sequential, exact(), rows) for rows in (True, False))
    tolerance = 1e-3 if policy.startswith("mixed") else 1e-2  # roundings in 16 bits
    np.testing.assert_allclose(found[1]["loss"], wanted[1]["loss"], rtol=tolerance)
    scales = isinstance(found[0].optimizer, keras.optimizers.LossScaleOptimizer)
    assert scales == (policy == "mixed_float16")


def test_loss_scales_skip_what_is_not_finite(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model, _ = fit(sequential, exact(), True, epochs=1)
    scale, weights = float(model.optimizer.dynamic_scale), model.get_weights()
    steps = int(model.optimizer.iterations)
    model.train_on_batch(X[:16], np.full((16, 1), np.inf, "float32"))
    assert float(model.optimizer.dynamic_scale) == scale / 2
    assert int(model.optimizer.iterations) == steps
    for w, v in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(w, v)
    model.train_on_batch(X[:16], Y[:16])
    assert int(model.optimizer.iterations) == steps + 1
    model.save(str(tmp_path / "m.keras"))
    loaded = keras.models.load_model(str(tmp_path / "m.keras"))
    assert float(loaded.optimizer.dynamic_scale) == scale / 2


# --- options of Keras' optimizers -------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        {"clipvalue": 0.01, "loss_scale_factor": 64.0},
        {"clipnorm": 0.05},
        {"global_clipnorm": 0.1},
    ],
    ids=str,
)
def test_options_that_rows_can_honour(option):
    wanted = fit(sequential, keras.optimizers.SGD(RATE, **option), False)
    assert_same(fit(sequential, lazy(**option), True), wanted)


@pytest.mark.parametrize(
    "option, hint",
    [
        ({"weight_decay": 0.1}, r"js?lices\.adamw"),
        ({"use_ema": True}, "returns jslices.optim.params_ema"),
        ({"gradient_accumulation_steps": 2}, "batch_size"),
    ],
)
def test_options_that_are_refused(option, hint):
    with pytest.raises(ValueError, match=hint):
        exact(**option)
    with pytest.raises(ValueError, match=hint):
        jk.Optimizer(js.sgd(RATE), **option)


def test_averages_are_put_into_the_model_as_by_keras():
    def averaged(rate):
        return js.optim.chain(js.optim.clip(9.0), js.optim.params_ema(js.sgd(rate), 0.5))

    found = fit(sequential, jk.Optimizer(averaged, RATE), True)
    theirs = keras.optimizers.SGD(RATE, use_ema=True, ema_momentum=0.5)
    assert_same(found, fit(sequential, theirs, False))  # 18 steps forget the start
    model, history = found
    names = [v.path for v in model.optimizer.variables]
    assert sum("ema" in name for name in names) == len(model.trainable_variables)
    again = model.fit(X, Y, batch_size=16, verbose=0).history
    assert again["loss"][0] < history["loss"][0]


def test_an_option_that_the_optimizer_takes():
    """Weight decay is an argument of AdamW, and none of Keras' where it is zero."""
    decays = jk.Optimizer(js.adamw, RATE, weight_decay=0.5)
    variable = keras.Variable(np.ones((4, 1), "float32"))
    rows = js.IndexedSlices(jnp.zeros((1, 1)), jnp.array([3]), (4, 1))
    decays.apply([rows], [variable])
    np.testing.assert_allclose(variable.numpy().ravel(), [1, 1, 1, 1 - RATE * 0.5])
    lazy(weight_decay=0.0, use_ema=False)


def test_refusals():
    with pytest.raises(TypeError, match="no option 'speed'"):
        jk.Optimizer(js.sgd(RATE), speed=3)
    with pytest.raises(TypeError, match=r"no option 'learning_rate'.*\(js.adam, "):
        jk.Optimizer(js.sgd(RATE), 0.1)
    with pytest.raises(TypeError, match="'speed'; it takes learning_rate, momentum"):
        exact(speed=3)
    with pytest.raises(TypeError, match="missing a required argument: 'learning_rate'"):
        jk.Optimizer(js.adam)
    for tx in (keras.optimizers.Adam(), optax.adam(0.1), lambda: optax.adam(0.1)):
        with pytest.raises(TypeError, match=r"js.adam\(1e-3\), or a function that"):
            jk.Optimizer(tx)
    with pytest.raises(ValueError, match="mask="):
        exact().exclude_from_weight_decay(var_names=["bias"])
    with pytest.raises(TypeError, match="wants a Keras model"):
        jk.row_gradients(layers.Embedding(3, 2))

    class Own(keras.Model):
        def train_step(self, state, data):
            return {}, state

    with pytest.raises(ValueError, match=r"Own has a train_step .*value_and_grad"):
        jk.row_gradients(Own())


class WithStep(keras.Model):
    """With a train step as in Keras' guides."""

    def __init__(self, value_and_grad):
        super().__init__()
        self.table, self.dense = layers.Embedding(V, D), layers.Dense(1)
        self.value_and_grad = value_and_grad

    def call(self, ids):
        return self.dense(keras.ops.mean(self.table(ids), axis=1))

    def train_step(self, state, data):
        variables, others, optimizer_variables, metrics = state
        x, y = data

        def loss(variables):
            y_pred, _ = self.stateless_call(variables, others, x)
            return self.compute_loss(x, y, y_pred)

        value, grads = self.value_and_grad(loss)(variables)
        variables, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, grads, variables
        )
        return {"loss": value}, (variables, others, optimizer_variables, metrics)


def test_a_train_step_of_ones_own():
    def table(optimizer, value_and_grad=js.value_and_grad):
        make = lambda: WithStep(value_and_grad)  # noqa: E731
        model, _ = fit(make, optimizer, False, X[:32], Y[:32], {"metrics": []}, epochs=1)
        return model.get_weights()[0]

    adam = lambda **kwargs: jk.Optimizer(js.adam, RATE, eps=1e-7, eps_hat=True, **kwargs)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error", js.DensificationWarning)
        rows = table(adam())
    with pytest.raises(
        ValueError, match=r"catch up .* lazy optimizer.* write compute_loss"
    ):
        table(adam(untouched="exact"))
    with pytest.warns(js.DensificationWarning, match=r"value_and_grad in a train_step"):
        all_rows = table(adam(), jax.value_and_grad)
    with pytest.warns(js.DensificationWarning, match=r"jslices\.keras\.Optimizer for"):
        wanted = table(keras.optimizers.Adam(RATE))
    np.testing.assert_allclose(all_rows, wanted, rtol=1e-4, atol=1e-6)
    assert np.abs(rows - wanted).max() > RATE / 4


def test_a_compute_loss_of_ones_own():
    """What the errors offer, for exact optimizers."""

    class Weighted(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
            return keras.ops.mean(keras.ops.abs(y - y_pred) * (1.0 + x[:, :1]))

    both(lambda: Weighted([layers.Embedding(V, D), layers.Flatten(), layers.Dense(1)]))


def test_an_optimizer_of_keras_is_refused_before_anything_is_done():
    model = jk.row_gradients(sequential())
    model.compile("adam", "mse")
    model.build((None, 5))
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"Adam takes no row gradients.*jk.Optimizer"):
        model.fit(X, Y, verbose=0)
    for w, v in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(w, v)


def test_constraints():
    def make():
        return sequential(embeddings_constraint="non_neg")

    both(make, lambda: jk.Optimizer(js.adagrad, 0.1))
    with pytest.raises(ValueError, match="has a constraint"):
        fit(make, exact(), True)


def test_a_regularizer_makes_the_gradient_dense_and_says_so():
    def make():
        table = layers.Embedding(9000, D, embeddings_regularizer="l2", name="words")
        return keras.Sequential([table, layers.Flatten(), layers.Dense(1)])

    with pytest.warns(js.DensificationWarning, match="words/embeddings"):
        found = fit(make, lazy(), True)
    assert_same(found, fit(make, lazy(), False))


def test_frozen_rows():
    def make(rate):
        return js.optim.freeze_rows(js.sgd(rate), lambda rows: rows < 2)

    optimizer = jk.Optimizer(make, 0.5)
    variable = keras.Variable(np.zeros((4, 1), "float32"))
    optimizer.learning_rate = 1.0
    rows = js.IndexedSlices(jnp.ones((2, 1)), jnp.array([1, 3]), (4, 1))
    optimizer.apply([rows], [variable])
    assert variable.numpy().ravel().tolist() == [0, 0, 0, -1]


def test_the_optimizer_alone():
    """A step of a loop of one's own takes slices and arrays."""
    variables = [keras.Variable(np.ones((4, 1), "float32")), keras.Variable(np.ones(2))]
    optimizer = jk.Optimizer(js.sgd, 0.5)
    rows = js.IndexedSlices(jnp.ones((2, 1)), jnp.array([3, 3]), (4, 1))
    optimizer.apply([rows, jnp.ones(2)], variables)
    np.testing.assert_allclose(variables[0], [[1], [1], [1], [0]])
    optimizer.apply_gradients([(rows, variables[0])])
    np.testing.assert_allclose(variables[0], [[1], [1], [1], [-1]])
    np.testing.assert_allclose(variables[1], [0.5, 0.5])
    with pytest.raises(ValueError, match="built without"):
        optimizer.apply([jnp.ones(())], [keras.Variable(1.0)])
    with pytest.raises(ValueError, match="2 variables, got 1"):
        optimizer.apply([rows])
    waits = exact()
    waits.build(variables)
    waits.catch_up(waits.by_path([jnp.array([3]), None]))
    waits.apply([rows, jnp.ones(2)])
    np.testing.assert_allclose(variables[0].numpy()[3], -1 - 2 * RATE, rtol=1e-6)
    with pytest.raises(ValueError, match="rows have to catch up"):
        waits.apply([rows, jnp.ones(2)])


def test_steps_are_in_place():
    large = 200_000
    model = jk.row_gradients(
        keras.Sequential([layers.Embedding(large, 8), layers.Flatten(), layers.Dense(1)])
    )
    model.compile(exact(), "mse")
    model.build((None, 5))
    model.optimizer.build(model.trainable_variables)
    state = model._get_jax_state(True, True, True, True)
    js.testing.assert_in_place(model.train_step, state, (X[:16], Y[:16]), donate_argnums=0)


# --- documentation ----------------------------------------------------------------------


@pytest.mark.parametrize("module", [jk.optimizer, jk.training], ids=lambda m: m.__name__)
def test_doctests(module):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    results = doctest.testmod(module, optionflags=flags)
    assert results.attempted and not results.failed


def test_other_backends_are_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(ImportError, match=r"not numpy: set .* KERAS_BACKEND=jax"):
        importlib.reload(jk)


@pytest.mark.parametrize("name, count", [("keras.md", 6), ("coming_from/keras.md", 1)])
def test_the_page_runs(name, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = pathlib.Path(__file__).parent.parent / "docs" / name
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert len(blocks) == count
    names = {"__name__": "page"}
    for block in blocks:
        exec(block, names)


def test_the_first_program_has_the_losses_of_keras():
    page = pathlib.Path(__file__).parent.parent / "docs" / "keras.md"
    ours = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)[0]
    theirs = ours.replace("jk.row_gradients(model)", "model")
    theirs = re.sub(
        r"jk.Optimizer\(.*?\n\)", "keras.optimizers.Adam(1e-2)", theirs, flags=re.S
    )
    assert theirs.count("jk.") == 0

    def losses(code):
        keras.utils.set_random_seed(0)
        names = {"__name__": "page"}
        exec(code, names)
        return names["history"].history["loss"]

    np.testing.assert_allclose(losses(ours), losses(theirs), rtol=1e-5)
