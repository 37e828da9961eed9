"""Optimizers of jslices as optimizers of Keras: their state lives in Keras' variables."""

import collections
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np

import jslices as js
from jslices import GradientTransformation, is_slices
from jslices._arguments import Number
from jslices._densify import warn_at_line
from jslices._typing import PyTree, State

#: A value for each variable of the model, in their order, by their paths.
ByPath: TypeAlias = Mapping[str, Any]
Paths: TypeAlias = tuple[str, ...]
#: A learning rate, float32 ``[]``; None if it cannot be set.
Rate: TypeAlias = Any

# Keras looks up the names of a file in its register: the class below, and these functions.
register = keras.saving.register_keras_serializable(package="jslices")
for make in vars(js.optim).values():
    if inspect.isfunction(make) and "learning_rate" in inspect.signature(make).parameters:
        register(make)

#: Options of Keras' optimizers that need a pass over the whole table, and the advice.
REFUSED = {
    "weight_decay": "type jslices.adamw(learning_rate, weight_decay=...), or jslices.lion",
    "use_ema": "an average of all weights reads the whole table at every step: pass, in "
    "place of jslices.adam, a function of the rate that returns "
    "jslices.optim.params_ema(jslices.adam(rate), decay); fit ends with the averages",
    "gradient_accumulation_steps": "rows cannot be added up in arrays as large as the "
    "table: leave it out, and take larger batches in fit(batch_size=...)",
}
REFUSED["ema_momentum"] = REFUSED["ema_overwrite_frequency"] = REFUSED["use_ema"]


@register
class Optimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer of jslices for ``model.compile``.

    It takes arrays and IndexedSlices as gradients; a model has the latter after
    :func:`jslices.keras.row_gradients`. Its state is kept in variables of Keras, so after
    saving and loading ``fit`` goes on where it was.

    The learning rate may be set, ``optimizer.learning_rate = 1e-4``, as callbacks do, and
    nothing is compiled anew. With ``untouched="exact"``, rows do each step that they missed
    at the rate that it had.

    Args:
      tx: the function that makes the optimizer, such as ``js.adam``, or one of your own,
        ``tx(learning_rate, **arguments)``; register that with
        ``keras.saving.register_keras_serializable`` to save models. Or a finished
        optimizer: its learning rate can be neither read nor set, and it cannot be written
        into a ``.keras`` file. The docstring of each optimizer says what happens to rows
        without gradient.
      learning_rate: the first argument of the function: a number, a schedule of the step
        (from 0), or one of ``keras.optimizers.schedules``; None leaves it out.
      clipnorm: clips each gradient by its norm, duplicates summed first.
      clipvalue: clips each element of a gradient.
      global_clipnorm: clips all gradients by their common norm.
      loss_scale_factor: multiplies the loss, and divides the gradients.
      name: of the optimizer, and before the names of its variables.
      **arguments: the other arguments of the function, by their names.

    Raises:
      TypeError: if ``tx`` is not an optimizer of jslices.
      ValueError: for options of Keras that would read whole tables at every step
        (``weight_decay``, ``use_ema``, ``gradient_accumulation_steps``), unless the
        function takes an argument of that name. It says what to type instead.

    Example:
      >>> import jslices as js, jslices.keras as jk
      >>> optimizer = jk.Optimizer(js.adam, 1e-3, untouched="exact")
      >>> optimizer.learning_rate = 1e-4
      >>> round(float(optimizer.learning_rate.numpy()), 6)
      0.0001

    Source: ours; ``keras.optimizers.Adam`` and its like take dense gradients only.
    """

    def __init__(
        self,
        tx: Callable[..., GradientTransformation] | GradientTransformation,
        learning_rate: Any = None,
        *,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        loss_scale_factor: float | None = None,
        name: str | None = None,
        **arguments: Any,
    ) -> None:
        limits = {
            "clipnorm": clipnorm,
            "clipvalue": clipvalue,
            "global_clipnorm": global_clipnorm,
        }
        for argument, limit in limits.items():
            if limit is not None:
                Number(at_least=0).check("jk.Optimizer", argument, limit)
        if loss_scale_factor is not None:
            Number(above=0).check("jk.Optimizer", "loss_scale_factor", loss_scale_factor)
        arguments = _without_refused(tx, arguments)
        made = _made(tx, learning_rate, arguments)
        options = {**limits, "loss_scale_factor": loss_scale_factor, "name": name}
        super().__init__(_rate_for_keras(learning_rate), **options)
        # Compiled even if Keras runs without `jit_compile`.
        caught_up = jax.jit(self._caught_up, static_argnames="whole")
        flush = lambda rate, *values: self._tx(rate).flush(*values)  # noqa: E731
        flushed = jax.jit(flush, donate_argnums=(1, 2))
        self._rows = _Rows(made, tx, learning_rate, arguments, caught_up, flushed)
        self.catches_up = made.catches_up  #: whether rows without gradient wait

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make the variables of the state, for these variables of the model."""
        if self.built:
            return
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(
                    f"{variable.path} is overwritten with its gradient (float8): such "
                    "models are trained with Keras' own optimizers"
                )
        super().build(variables)
        rows = self._rows
        rows.variables, rows.paths = list(variables), _paths(variables)
        state = self._tx(self._rate()).init(self.values())
        leaves, rows.tree = jax.tree_util.tree_flatten_with_path(state)
        rows.state = [
            self._new_variable(jax.tree_util.keystr(path), leaf) for path, leaf in leaves
        ]

    def _new_variable(self, name: str, value: jax.Array) -> keras.Variable:
        name = "".join(c if c.isalnum() else "_" for c in name).strip("_")  # as Keras wants
        variable = self.add_variable(value.shape, "zeros", value.dtype.name, name=name)
        variable.assign(jnp.copy(value))  # variables are donated, each on its own
        return variable

    # --- values; in a train step those of the step --------------------------------------

    def by_path(self, values: Sequence[PyTree]) -> ByPath:
        """Values for the variables of the model, by their paths."""
        return collections.OrderedDict(zip(self._rows.paths, values, strict=True))

    def values(self) -> ByPath:
        """The parameters as ``tx`` sees them."""
        return self.by_path([v.value for v in self._rows.variables])

    def _state(self) -> State:
        return self._rows.tree.unflatten([v.value for v in self._rows.state])

    def _assign(self, params: ByPath, state: State) -> None:
        variables = [*self._rows.variables, *self._rows.state]
        values = [*params.values(), *jax.tree.leaves(state)]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def _rate(self) -> Rate:
        """The learning rate of the next step."""
        return self.learning_rate.value if self._rows.settable else None

    def _tx(self, rate: Rate) -> GradientTransformation:
        rows = self._rows
        return rows.tx if rate is None else rows.make(jnp.asarray(rate), **rows.arguments)

    # --- a step -------------------------------------------------------------------------

    def apply(
        self,
        grads: Sequence[PyTree],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """A step: assign the variables of the model and of the state.

        ``grads`` are arrays or IndexedSlices, one for each variable that the optimizer was
        built with, or for each of ``trainable_variables``; None leaves a variable as it is.
        """
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "the optimizer does not know the variables yet: type "
                    "optimizer.build(model.trainable_variables)"
                )
            self.build(list(trainable_variables))
        gradients = self._all_gradients(list(grads), trainable_variables)
        if self.loss_scale_factor is not None:
            gradients = js.tree.map(lambda g: g / self.loss_scale_factor, gradients)
        tx = self._tx(self._rate())
        args = self._clipped(gradients), self._state(), self.values()
        self._assign(*tx.apply(*args))
        for variable in self._rows.variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable.value))
        self.iterations.assign_add(1)
        self._rows.current = False

    def _all_gradients(
        self, grads: list[PyTree], variables: Sequence[keras.Variable] | None
    ) -> ByPath:
        """A gradient or None for each variable, slices put together again."""
        rows = self._rows
        if variables is not None:
            by_id = {id(v): g for v, g in zip(variables, grads, strict=True)}
            built = {id(v) for v in rows.variables}
            unknown = [v.path for v in variables if id(v) not in built]
            if unknown:
                raise ValueError(f"the optimizer was built without {', '.join(unknown)}")
            grads = [by_id.get(id(v)) for v in rows.variables]
        if len(grads) != len(rows.variables):
            raise ValueError(
                f"the optimizer was built with {len(rows.variables)} variables, got "
                f"{len(grads)} gradients"
            )
        if rows.whole_gradients is not None:
            grads = [
                whole.with_values(g) if is_slices(whole) else g
                for whole, g in zip(rows.whole_gradients, grads, strict=True)
            ]
        elif not any(map(is_slices, grads)):
            pairs = zip(rows.variables, grads, strict=True)
            tables = [v.path for v, g in pairs if v.name == "embeddings" and g is not None]
            if tables:
                warn_at_line(
                    f"{', '.join(tables)}: the gradient is an array and moves all rows, "
                    "even of a lazy optimizer: type model = jk.row_gradients(model), also "
                    "after loading; js.value_and_grad in a train_step of your own"
                )
        elif self.catches_up and not rows.current:
            raise ValueError(
                'rows have to catch up before they are read (untouched="exact", or '
                "params_ema), and in a train_step of your own they do not: take a lazy "
                "optimizer, jk.Optimizer(js.adam, 1e-3); or write compute_loss in place of "
                "train_step, and type model = jk.row_gradients(model)"
            )
        return self.by_path(grads)

    @contextlib.contextmanager
    def values_of(self, grads: Sequence[PyTree]) -> Iterator[list[jax.Array | None]]:
        """The gradients with the ``values`` of IndexedSlices in their place.

        For a LossScaleOptimizer around this one, which tests and scales arrays, and then
        passes them to :meth:`apply`.
        """
        self._rows.whole_gradients = list(grads)
        try:
            yield [g.values if is_slices(g) else g for g in grads]
        finally:
            self._rows.whole_gradients = None

    def _clipped(self, grads: ByPath) -> ByPath:
        if self.clipnorm:
            return js.tree.map(lambda g: js.clip_by_norm(g, self.clipnorm), grads)
        if self.clipvalue:
            limit = self.clipvalue
            return js.tree.map(lambda g: js.clip_by_value(g, -limit, limit), grads)
        if self.global_clipnorm:
            return js.clip_by_global_norm(grads, self.global_clipnorm)[0]
        return grads

    # --- rows that wait -----------------------------------------------------------------

    def catch_up(self, rows: ByPath) -> None:
        """Before a step, let the rows that it reads do the steps they missed."""
        self._refuse_constraints(rows)
        self._rows.current = True
        whole = tuple(name for name, ids in rows.items() if ids is True)
        ids = self.by_path([None if ids is True else ids for ids in rows.values()])
        args = self._rate(), self.values(), self._state(), ids
        is_traced = any(isinstance(x, jax.core.Tracer) for x in args[1].values())
        catch_up = self._caught_up if is_traced else self._rows.caught_up
        self._assign(*catch_up(*args, whole=whole))

    def _refuse_constraints(self, rows: ByPath) -> None:
        for variable, ids in zip(self._rows.variables, rows.values(), strict=True):
            if ids is not None and variable.constraint is not None:
                raise ValueError(
                    f"{variable.path} has a constraint, which a dense optimizer applies "
                    'after every step that a row misses with untouched="exact": leave out '
                    'the constraint, or untouched="exact"'
                )

    def flush(self) -> None:
        """Let all rows do the steps they missed, before the model is evaluated or saved."""
        now = self.iterations.value
        if not (self.catches_up and self.built) or self._rows.flushed_at is now:
            return
        self._assign(*self._rows.flushed(self._rate(), self.values(), self._state()))
        self._rows.flushed_at, self._rows.current = now, True

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """At the end of ``fit``, let the variables be the averages of ``params_ema``."""
        if not self.built or self.iterations._value is None:
            return  # the first step has failed
        self.flush()
        variables = dict(zip(self._rows.paths, self._rows.variables, strict=True))
        averaged = lambda x: hasattr(x, "ema") and hasattr(x, "clock")  # noqa: E731
        for part in jax.tree.leaves(self._state(), is_leaf=averaged):
            for path, mean in part.ema.items() if averaged(part) else ():
                if isinstance(mean, jax.Array):  # partition leaves out the others
                    variables[path].assign(jnp.copy(mean))

    def _caught_up(
        self, rate: Rate, params: ByPath, state: State, ids: ByPath, whole: Paths
    ) -> tuple[ByPath, State]:
        """``params`` and ``state`` with the rows ``ids`` up to date, all of ``whole``."""
        rows = self.by_path([True if k in whole else x for k, x in ids.items()])
        return self._tx(rate).catch_up(params, state, rows)

    # --- what Keras requires of its optimizers ------------------------------------------

    def exclude_from_weight_decay(self, *args: object, **kwargs: object) -> None:
        """Raise a ValueError: the optimizer of jslices says which variables decay."""
        raise ValueError(
            "weight decay is that of the optimizer of jslices: type "
            "jslices.adamw(learning_rate, mask=...)"
        )

    def get_config(self) -> dict[str, Any]:
        """Plain data to make the optimizer from, without its state."""
        rows, rate = self._rows, self._rows.learning_rate
        if rows.make is rows.tx:
            raise ValueError(
                "an optimizer that jk.Optimizer did not make cannot be written into a "
                "file: type jk.Optimizer(js.adam, learning_rate=1e-3), or "
                "model.save_weights(path)"
            )
        names = ("name", "clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor")
        config = {
            "tx": rows.make,
            "learning_rate": float(self.learning_rate) if rows.settable else rate,
            **{name: getattr(self, name) for name in names},
            **rows.arguments,
        }
        return {
            name: np.dtype(x).name
            if isinstance(x, np.dtype | type)
            else keras.saving.serialize_keras_object(x)
            for name, x in config.items()
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> "Optimizer":
        """The inverse of :meth:`get_config`."""

        def deserialize(x: Any) -> Any:
            if isinstance(x, str):  # Keras would look it up among the custom objects
                return x
            return keras.saving.deserialize_keras_object(x, custom_objects)

        return cls(**{name: deserialize(x) for name, x in config.items()})


@dataclasses.dataclass
class _Rows:
    """Attributes that Keras need not track."""

    tx: GradientTransformation
    make: Any  #: the function that made it; itself if it came finished
    learning_rate: Any  #: as passed: a number, a schedule, or None
    arguments: Mapping[str, Any]  #: of ``make``, beside the learning rate
    caught_up: Callable[..., tuple[ByPath, State]]
    flushed: Callable[..., tuple[ByPath, State]]
    variables: list[keras.Variable] = dataclasses.field(default_factory=list)
    paths: list[str] = dataclasses.field(default_factory=list)
    state: list[keras.Variable] = dataclasses.field(default_factory=list)
    tree: Any = None  #: the structure of the state
    flushed_at: jax.Array | None = None  #: ``iterations`` when no row was behind
    whole_gradients: list[PyTree] | None = None  #: those that a step has taken apart
    current: bool = False  #: rows have caught up since the last step

    @property
    def settable(self) -> bool:
        """Whether callbacks may set the learning rate."""
        return self.learning_rate is not None and not callable(self.learning_rate)


class Schedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A function of the step as a schedule of Keras."""

    def __init__(self, function: Callable[[jax.Array], jax.Array]) -> None:
        super().__init__()
        self.function = function

    def __call__(self, step: jax.Array) -> jax.Array:
        return self.function(jnp.asarray(step))


class _UnknownRate:
    """A learning rate that only the optimizer knows; Keras calls it, or assigns to it."""

    def __call__(self, *_: Any) -> NoReturn:
        raise ValueError(
            "jk.Optimizer did not get the learning rate, and can neither read nor set it: "
            "type jk.Optimizer(js.adam, learning_rate=1e-3)"
        )

    assign = __call__


def _without_refused(tx: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse options that need a dense step, unless ``tx`` takes them."""
    takes = inspect.signature(tx).parameters if callable(tx) else {}
    arguments = {k: x for k, x in options.items() if k not in REFUSED or k in takes}
    for name, value in options.items():
        if value and name not in arguments:
            raise ValueError(f"jk.Optimizer(..., {name}={value!r}): {REFUSED[name]}")
    return arguments


def _made(tx: Any, rate: Any, arguments: Mapping[str, Any]) -> GradientTransformation:
    """The optimizer that ``tx`` makes, or is."""
    if isinstance(tx, GradientTransformation):
        for name in arguments if rate is None else ("learning_rate", *arguments):
            raise TypeError(
                f"jk.Optimizer has no option {name!r} for an optimizer that is made: type "
                "jk.Optimizer(js.adam, learning_rate=1e-3, ...)"
            )
        return tx
    made = tx
    if callable(tx):
        made = tx(**arguments) if rate is None else tx(rate, **arguments)
    if not isinstance(made, GradientTransformation):
        raise TypeError(
            "jk.Optimizer wants an optimizer of jslices, such as js.adam(1e-3), or a "
            f"function that makes one, such as js.adam, got {made!r}"
        )
    return made


def _rate_for_keras(rate: Any) -> Any:
    if rate is None:
        return _UnknownRate()
    schedules = keras.optimizers.schedules.LearningRateSchedule
    if callable(rate):
        return rate if isinstance(rate, schedules) else Schedule(rate)
    return float(rate)


def _paths(variables: Sequence[keras.Variable]) -> list[str]:
    """The paths of variables, numbered where two are equal."""
    paths = [variable.path for variable in variables]
    times = [paths[: i + 1].count(path) for i, path in enumerate(paths)]
    return [x if n == 1 else f"{x}:{n}" for x, n in zip(paths, times, strict=True)]
