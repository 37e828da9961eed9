"""An optimizer of jslices as one of Keras: its state lives in Keras' variables."""

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax

from jslices import (
    GradientTransformation,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    is_slices,
    tree,
)
from jslices.keras.description import (
    described,
    learning_rates,
    made_from,
    with_learning_rate,
)

#: Options of Keras' optimizers that need a pass over the whole table, and what to do.
REFUSED = {
    "weight_decay": "type jslices.adamw(learning_rate, weight_decay=...), or jslices.lion",
    "use_ema": "an average of all weights reads the whole table at every step: leave it "
    "out, or train with keras.optimizers.Adam(use_ema=True) and without row_gradients",
    "gradient_accumulation_steps": "rows cannot be added up in arrays as large as the "
    "table: leave it out, and take larger batches in fit(batch_size=...)",
}
REFUSED["ema_momentum"] = REFUSED["ema_overwrite_frequency"] = REFUSED["use_ema"]


@keras.saving.register_keras_serializable(package="jslices")
class Optimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer of jslices for ``model.compile``.

    It takes IndexedSlices as gradients, which a model has after
    :func:`jslices.keras.row_gradients`, and arrays. Its state lives in variables of Keras,
    so that saving, loading and fitting again go on where they were.

    The learning rate may be set, ``optimizer.learning_rate = 1e-4``, as callbacks do, and
    nothing is compiled anew. With ``untouched="exact"``, rows that are behind then first do
    the steps that they missed at the old rate: all rows once for each change, so that for
    a rate which changes at every step a schedule is the better way.

    Args:
      tx: an optimizer of jslices, or what ``js.optim.chain`` and the like make of some,
        with one learning rate: a number, a schedule of the step (from 0), or one of
        ``keras.optimizers.schedules``. What it does to rows without gradient is said in its
        own docstring.
      clipnorm: clips each gradient by its norm, duplicates summed first.
      clipvalue: clips each element of a gradient.
      global_clipnorm: clips all gradients by their common norm.
      loss_scale_factor: multiplies the loss, and divides the gradients.
      name: of the optimizer, and before the names of its variables.

    Raises:
      TypeError: for what is no optimizer of jslices.
      ValueError: for several learning rates, or none; for options of Keras that would read
        whole tables at every step (``weight_decay``, ``use_ema``,
        ``gradient_accumulation_steps``): each says what to type instead.

    Example:
      >>> import jslices as js, jslices.keras as jk
      >>> optimizer = jk.Optimizer(js.adam(1e-3))
      >>> optimizer.learning_rate = 1e-4
      >>> round(float(optimizer.learning_rate.numpy()), 6)
      0.0001

    Source: ours; ``keras.optimizers.Adam`` and its like take dense gradients only.
    """

    def __init__(
        self,
        tx: GradientTransformation,
        *,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        loss_scale_factor: float | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        _refuse(options)
        rate = _learning_rate(tx)
        super().__init__(
            rate if callable(rate) else float(rate),
            clipnorm=clipnorm,
            clipvalue=clipvalue,
            global_clipnorm=global_clipnorm,
            loss_scale_factor=loss_scale_factor,
            name=name,
        )
        # Not an attribute of its own: Keras makes tuples anew to see whether variables are
        # in them, and this one is more than its fields.
        self._rows = _Rows(tx, settable=not callable(rate))

    @property
    def catches_up(self) -> bool:
        """Whether rows without gradient wait, and catch up before they are read."""
        return self._rows.tx.catches_up

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the variables of the state, for these variables of the model."""
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
        rows.variables, rows.names = list(variables), _names(variables)
        state = self._tx(self._rate()).init(self.values())
        leaves, rows.tree = jax.tree_util.tree_flatten_with_path(state)
        kept = [self._keep(_plain(jax.tree_util.keystr(path)), x) for path, x in leaves]
        rows.kept = kept
        if self.catches_up and rows.settable:
            rows.rate_of_missed = self._keep("rate_of_missed_steps", self._rate())

    def _keep(self, name: str, value: jax.Array) -> Any:
        variable = self.add_variable(value.shape, "zeros", value.dtype.name, name=name)
        variable.assign(jnp.copy(value))  # variables are donated, each on its own
        return variable

    # --- values, which in a train step are those of the step ----------------------------

    def named(self, values: Sequence[Any]) -> Mapping[str, Any]:
        """One value for each variable of the model, in their order, by their paths."""
        return collections.OrderedDict(zip(self._rows.names, values, strict=True))

    def values(self) -> Mapping[str, Any]:
        """The parameters as ``tx`` sees them."""
        return self.named([v.value for v in self._rows.variables])

    def _state(self) -> Any:
        return self._rows.tree.unflatten([v.value for v in self._rows.kept])

    def _assign(self, params: Mapping[str, Any], state: Any) -> None:
        for variable, value in zip(self._rows.variables, params.values(), strict=True):
            variable.assign(value)
        for variable, value in zip(self._rows.kept, jax.tree.leaves(state), strict=True):
            variable.assign(value)

    def _rate(self) -> Any:
        """The learning rate of the next step, float32 ``[]``; None if it is a schedule."""
        return self.learning_rate.value if self._rows.settable else None

    def _tx(self, rate: Any) -> GradientTransformation:
        tx: GradientTransformation = self._rows.tx
        return tx if rate is None else with_learning_rate(tx, jnp.asarray(rate))

    # --- a step -------------------------------------------------------------------------

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """A step: assigns the variables of the model and of the state.

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
        gradients = self._of_all(list(grads), trainable_variables)
        if self.loss_scale_factor is not None:
            scale = self.loss_scale_factor
            gradients = tree.map(lambda g: g / scale, gradients)
        tx = self._tx(self._rate())
        self._assign(*tx.apply(self._clipped(gradients), self._state(), self.values()))
        for variable in self._rows.variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable.value))
        self.iterations.assign_add(1)

    def _of_all(self, grads: list[Any], variables: Any) -> Mapping[str, Any]:
        """A gradient for each variable, slices put together again."""
        rows = self._rows
        if variables is not None:
            given = {id(v): g for v, g in zip(variables, grads, strict=True)}
            unknown = given.keys() - {id(v) for v in rows.variables}
            if unknown:
                names = [v.path for v in variables if id(v) in unknown]
                raise ValueError(f"the optimizer was built without {', '.join(names)}")
            grads = [given.get(id(v)) for v in rows.variables]
        if len(grads) != len(rows.variables):
            raise ValueError(
                f"the optimizer was built with {len(rows.variables)} variables, got "
                f"{len(grads)} gradients"
            )
        if rows.taken_apart is not None:
            grads = [
                whole.with_values(g) if is_slices(whole) else g
                for whole, g in zip(rows.taken_apart, grads, strict=True)
            ]
        return self.named(grads)

    @contextlib.contextmanager
    def taking_values_of(self, grads: Sequence[Any]) -> Iterator[list[Any]]:
        """The gradients with the ``values`` of IndexedSlices in their place.

        For an optimizer of Keras that stands around this one, tests gradients and scales
        them (LossScaleOptimizer), and then hands them on to :meth:`apply`.
        """
        self._rows.taken_apart = list(grads)
        try:
            yield [g.values if is_slices(g) else g for g in grads]
        finally:
            self._rows.taken_apart = None

    def _clipped(self, grads: Mapping[str, Any]) -> Any:
        if self.clipnorm:
            return tree.map(lambda g: clip_by_norm(g, self.clipnorm), grads)
        if self.clipvalue:
            limit = self.clipvalue
            return tree.map(lambda g: clip_by_value(g, -limit, limit), grads)
        if self.global_clipnorm:
            return clip_by_global_norm(grads, self.global_clipnorm)[0]
        return grads

    # --- rows that wait -----------------------------------------------------------------

    def catch_up(self, rows: Mapping[str, Any]) -> None:
        """Before a step: the rows that it reads do the steps they missed.

        All rows do, if the learning rate has changed since the last step.
        """
        for variable, ids in zip(self._rows.variables, rows.values(), strict=True):
            if ids is not None and variable.constraint is not None:
                raise ValueError(
                    f"{variable.path} has a constraint, which a dense optimizer applies "
                    'after every step that a row misses with untouched="exact": leave out '
                    'the constraint, or untouched="exact"'
                )
        whole = tuple(name for name, ids in rows.items() if ids is True)
        ids = self.named([None if ids is True else ids for ids in rows.values()])
        new, old = self._rate(), self._rate_of_missed()
        step = self._jitted("catch_up")
        self._assign(*step(old, new, ids, self.values(), self._state(), whole=whole))
        if old is not None:
            # As an array of its own, for the same reason.
            self._rows.rate_of_missed.assign(jnp.where(old != new, new, old))

    def flush(self) -> None:
        """Every row does the steps it missed, before the model is evaluated or saved."""
        now = self.iterations.value
        if not (self.catches_up and self.built) or self._rows.flushed_at is now:
            return
        flush = self._jitted("flush")
        self._assign(*flush(self.values(), self._state(), self._rate_of_missed()))
        self._rows.flushed_at = now

    def _rate_of_missed(self) -> Any:
        return self._rows.rate_of_missed.value if self._rows.settable else None

    def _jitted(self, name: str) -> Any:
        """Functions of arrays, compiled even where Keras runs without ``jit_compile``."""

        def catch_up(
            old: Any, new: Any, ids: Any, params: Any, state: Any, whole: Any
        ) -> tuple[Any, Any]:
            tx = self._tx(old)
            rows = self.named([True if k in whole else x for k, x in ids.items()])
            if old is not None:
                # A loop of one turn or none: a conditional would copy the tables.
                changed = (old != new).astype(jnp.int32)
                all_rows = lambda _, now: tx.flush(*now)  # noqa: E731
                params, state = lax.fori_loop(0, changed, all_rows, (params, state))
            return tx.catch_up(params, state, rows)

        def flush(params: Any, state: Any, rate: Any) -> tuple[Any, Any]:
            return self._tx(rate).flush(params, state)

        if not self._rows.jitted:
            self._rows.jitted = {
                "catch_up": jax.jit(catch_up, static_argnames="whole"),
                "flush": jax.jit(flush, donate_argnums=(0, 1)),
            }
        return self._rows.jitted[name]

    # --- what Keras asks of its optimizers ----------------------------------------------

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Refused: which variables decay is said by the optimizer of jslices."""
        raise ValueError(
            "weight decay is that of the optimizer of jslices: type "
            "jslices.adamw(learning_rate, mask=...)"
        )

    def get_config(self) -> dict[str, Any]:
        """What :meth:`from_config` makes the same optimizer of, without its state."""
        config = super().get_config()
        kept = ("name", "clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor")
        tx = self._rows.tx
        if self._rows.settable:
            tx = with_learning_rate(tx, config["learning_rate"])
        return {"tx": described(tx), **{key: config[key] for key in kept}}

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> "Optimizer":
        """The optimizer that :meth:`get_config` was asked of."""
        with keras.saving.CustomObjectScope(custom_objects or {}):
            return cls(**{**config, "tx": made_from(config["tx"])})


class _Rows:
    """What the optimizer keeps that is none of Keras' business."""

    def __init__(self, tx: GradientTransformation, settable: bool) -> None:
        self.tx, self.settable = tx, settable
        self.variables: list[Any] = []  #: those of the model
        self.names: list[str] = []  #: their paths
        self.kept: list[Any] = []  #: those of the state
        self.tree: Any = None  #: its structure
        self.rate_of_missed: Any = None  #: the learning rate that the last step had
        self.flushed_at: Any = None  #: the value of ``iterations`` when no row was behind
        self.taken_apart: list[Any] | None = None
        self.jitted: dict[str, Any] = {}


@keras.saving.register_keras_serializable(package="jslices")
class Schedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A function of the step as a schedule of Keras."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def __call__(self, step: Any) -> Any:
        return self.function(jnp.asarray(step))

    def get_config(self) -> dict[str, Any]:
        return {"function": keras.saving.serialize_keras_object(self.function)}


def _learning_rate(tx: Any) -> Any:
    """The one learning rate: a number, or a schedule of Keras."""
    if not isinstance(tx, GradientTransformation):
        raise TypeError(
            f"jk.Optimizer wants an optimizer of jslices, such as js.adam(1e-3), got {tx!r}"
        )
    rates = learning_rates(tx)
    if not rates or rates[0] is None or any(rate is not rates[0] for rate in rates[1:]):
        same = all(not callable(r) and r == rates[0] for r in rates) if rates else False
        if not same or rates[0] is None:
            raise ValueError(
                "jk.Optimizer wants one learning rate, which it can read and callbacks can "
                f"set, got {rates or 'none'}: type jk.Optimizer(js.adam(1e-3)), or "
                "js.optim.chain(..., js.adam(1e-3))"
            )
    rate = rates[0]
    if callable(rate) and not isinstance(
        rate, keras.optimizers.schedules.LearningRateSchedule
    ):
        return Schedule(rate)
    return rate


def _refuse(options: dict[str, Any]) -> None:
    """Refuses options that are set and that only a dense step could honour."""
    for name, value in options.items():
        if name not in REFUSED:
            raise TypeError(f"jk.Optimizer has no option {name!r}")
        if value:
            raise ValueError(f"jk.Optimizer(..., {name}={value!r}): {REFUSED[name]}")


def _names(variables: Sequence[Any]) -> list[str]:
    """The paths of variables, numbered where two have the same."""
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for variable in variables:
        seen[variable.path] += 1
        again = seen[variable.path]
        names.append(variable.path if again == 1 else f"{variable.path}:{again}")
    return names


def _plain(path: str) -> str:
    """A key path as a name that Keras takes."""
    return "".join(c if c.isalnum() else "_" for c in path).strip("_")
