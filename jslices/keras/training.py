"""Keras' train step, with row gradients."""

from collections.abc import Mapping
from typing import Any

import jax
import keras

from jslices import GradientTransformation, optim
from jslices import train_step as whole_step
from jslices._typing import Params, PyTree, State
from jslices.keras.optimizer import Optimizer

#: What does the same as an optimizer of Keras: arguments that follow the learning rate.
SAME = {
    "SGD": ', momentum={momentum}, nesterov={nesterov}, untouched="exact"',
    "Adagrad": ", initial_accumulator_value={initial_accumulator_value}, eps={epsilon}",
    "RMSprop": ", decay={rho}, eps={epsilon}, centered={centered}, momentum={momentum}, "
    'untouched="exact"',
    "Adadelta": ', rho={rho}, eps={epsilon}, untouched="exact"',
    "Lion": ', b1={beta_1}, b2={beta_2}, weight_decay={weight_decay}, untouched="exact"',
    "Adam": ', b1={beta_1}, b2={beta_2}, eps={epsilon}, eps_hat=True, untouched="exact"',
}
SAME["AdamW"] = SAME["Adam"] + ", weight_decay={weight_decay}"
#: Options of Keras that are here as well, and those that are not, or not everywhere.
KEPT = "clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor"
NOT_HERE = "amsgrad", "weight_decay", "use_ema", "gradient_accumulation_steps"


def row_gradients(model: keras.Model, *, sparse: PyTree = None) -> keras.Model:
    """Give a Keras model a train step in which looked-up tables get row gradients.

    Every trainable array ``[V, *D]`` that the model only looks up
    (``keras.layers.Embedding``, ``keras.ops.take`` along the first axis) then has
    IndexedSlices for a gradient: the rows of the batch. Everything else in ``fit`` and
    ``train_on_batch`` is Keras' own. ``compile`` then needs an :class:`Optimizer`.

    With an ``untouched="exact"`` optimizer the rows of a batch catch up before they are
    read, and all rows where Keras hands the state over: at the end of an epoch, before
    validation, and when a callback reads ``self.model``.

    Args:
      model: a functional, sequential or subclassed model, built or not, compiled or not.
      sparse: as in :func:`jslices.value_and_grad`, of variables by their paths.

    Returns:
      ``model`` itself, changed in place. Class, summary and files do not change: a model
      that is loaded, cloned or pickled is a plain one; call ``row_gradients`` again.

    Raises:
      TypeError: if ``model`` is not a Keras model.
      ValueError: for a model whose class has a ``train_step`` of its own; where Keras uses
        Flax NNX; and, when training starts, for an optimizer of Keras.

    Example:
      >>> import keras, jslices as js, jslices.keras as jk, numpy as np
      >>> model = keras.Sequential([keras.layers.Embedding(1000, 4), keras.layers.Flatten(),
      ...                           keras.layers.Dense(1)])
      >>> model = jk.row_gradients(model)
      >>> model.compile(jk.Optimizer(js.adam, 1e-2), loss="mse")
      >>> ids = np.array([[3, 9], [9, 7]], "int32")
      >>> labels = np.array([[0.0], [1.0]], "float32")
      >>> history = model.fit(ids, labels, epochs=50, verbose=0)
      >>> history.history["loss"][-1] < 0.1
      True

    Cost: that of :func:`jslices.train_step`. An exact optimizer reads and writes the tables
    whenever Keras hands the state over, and so in every call of ``train_on_batch``.

    Source: https://github.com/keras-team/keras/issues/18420 asks Keras for it.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"row_gradients wants a Keras model, got {model!r}")
    cls = type(model)
    if cls.train_step is not keras.Model.train_step:
        raise ValueError(
            f"{cls.__name__} has a train_step of its own, which row_gradients would "
            "replace: type jslices.value_and_grad for jax.value_and_grad in it, and "
            "compile with jk.Optimizer of a lazy optimizer; or, for an exact one, write "
            "compute_loss in place of train_step"
        )
    if keras.config.is_nnx_enabled():
        raise ValueError(
            "Keras' NNX mode trains by the train_step of the class, not of the model: set "
            "the environment variable KERAS_NNX_ENABLED=0"
        )

    def step(state: State, data: PyTree) -> tuple[PyTree, State]:
        return train_step(model, state, data, sparse)

    def make_train_function(force: bool = False) -> None:
        optimizer_of(model)  # refuses before Keras hands over anything
        cls.make_train_function(model, force)

    def jax_state_sync() -> None:
        cls.jax_state_sync(model)
        optimizer = inner(model.optimizer) if model.compiled else None
        # Without a state nothing was handed over: the first step has failed.
        if isinstance(optimizer, Optimizer) and getattr(model, "_jax_state", None):
            optimizer.flush()

    model.train_step = step
    model.make_train_function = make_train_function
    model.jax_state_sync = jax_state_sync
    model.train_function = None  # a plain train step may be compiled
    return model


def train_step(
    model: keras.Model, state: State, data: PyTree, sparse: PyTree
) -> tuple[PyTree, State]:
    """The train step, ``(state, data) -> (logs, state)``, a pure function of arrays."""
    trainable, non_trainable, optimizer_variables, metrics = state
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    outer, optimizer = model.optimizer, optimizer_of(model)

    def loss(variables: Mapping[str, jax.Array]) -> tuple[jax.Array, PyTree]:
        args = list(variables.values()), non_trainable, metrics, x, y, sample_weight
        return model.compute_loss_and_updates(  # type: ignore[no-any-return]
            *args, training=True, optimizer_variables=optimizer_variables
        )

    def scope_of(params: Params, state: State) -> keras.StatelessScope:
        mapping = [
            *zip(model.trainable_variables, params.values(), strict=True),
            *zip(outer.variables, state, strict=True),
        ]
        return keras.StatelessScope(state_mapping=mapping)

    def catch_up(params: Params, state: State, rows: PyTree) -> tuple[Params, State]:
        with scope_of(params, state) as scope:
            optimizer.catch_up(rows)
        now = scope.get_current_value
        values = optimizer.by_path([now(v) for v in model.trainable_variables])
        return values, [now(v) for v in outer.variables]

    def apply(
        grads: PyTree, state: State, params: Params, key: None = None
    ) -> tuple[Params, State]:
        values = list(params.values())
        with optimizer.values_of(list(grads.values())) as arrays:
            new, state = outer.stateless_apply(state, arrays, values)
        return optimizer.by_path(new), state

    def unused(*_: Any) -> Any:
        raise NotImplementedError("a whole step calls apply alone")

    catching_up = catch_up if optimizer.catches_up else None
    tx = GradientTransformation(unused, unused, catching_up, apply=apply)
    step = whole_step(loss, tx, has_aux=True, sparse=sparse, jit=False)
    params, state, _, aux = step(optimizer.by_path(trainable), optimizer_variables)
    unscaled_loss, y_pred, non_trainable, metrics = aux
    args = metrics, unscaled_loss, x, y, y_pred, sample_weight
    logs, metrics = model._update_metrics_variables(*args)
    return logs, (list(params.values()), non_trainable, state, metrics)


def optimizer_of(model: keras.Model) -> Optimizer:
    """The optimizer of jslices that a model was compiled with."""
    optimizer = inner(model.optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} takes no row gradients: type "
            f"{replacement(optimizer or keras.optimizers.Adam())}"
        )
    return optimizer


def replacement(optimizer: keras.optimizers.Optimizer) -> str:
    """What to type in place of an optimizer of Keras, and whether it does the same."""
    config, name = optimizer.get_config(), type(optimizer).__name__
    name = "AdamW" if name == "Adam" and config["weight_decay"] else name
    ours = name.lower() if hasattr(optim, name.lower()) else "adam"
    arguments = SAME.get(name, "")
    lost = [x for x in NOT_HERE if config.get(x) and x not in arguments]
    rate = config["learning_rate"]
    rate = f"{rate:g}" if isinstance(rate, float) else "schedule"
    kept = "".join(f", {x}={config[x]}" for x in KEPT if config.get(x))
    config["momentum"] = config.get("momentum") or None
    config["weight_decay"] = config.get("weight_decay") or 0.0
    typed = f"js.{ours}, {rate}{arguments.format(**config)}{kept}"
    effect = "for the same losses" if arguments and not lost else "the nearest that is here"
    return f"model.compile(jk.Optimizer({typed}), ...), {effect}"


def inner(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer inside the LossScaleOptimizer that Keras puts around it for float16."""
    return getattr(optimizer, "inner_optimizer", optimizer)
