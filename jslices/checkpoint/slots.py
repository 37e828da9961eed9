"""The state of an optimizer from what another library kept with its variables, and back.

PyTorch and TensorFlow keep the state of an optimizer variable by variable, in *slots*:
arrays with a name, most of them of the variable's shape. Here they are one tree for each
state array. ``slot_names`` says which slot is which array.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jslices._devices.layouts import laid_out_as
from jslices._jax import flatten
from jslices._rows.bounds import INT32_MAX
from jslices.checkpoint.slot_names import LIBRARIES, NAMES, OTHERWISE
from jslices.optim import SgdState
from jslices.optim._engine.checks import places
from jslices.optim._engine.protocol import GradientTransformation, is_leaf

#: What to type where one call can't fill the state.
BY_GROUP = (
    "call import_state for each optimizer of jslices alone, and put what it returns into "
    "tx.init(params): in a chain at its place, in a jslices.optim.partition at "
    "inner_states[label].inner_state, with jslices.optim.MaskedNode() in params and slots "
    "for the parameters of other labels"
)


class _Array(NamedTuple):
    """One state array of one parameter: where it is, and what is known of it."""

    part: int  #: which optimizer's state it belongs to.
    state: type
    field: str
    now: jax.Array

    @property
    def names(self) -> tuple[str, ...]:
        known = NAMES[self.state].get(self.field, ())
        return tuple(dict.fromkeys((self.field, *filter(None, known))))


def import_state(tx: GradientTransformation, params: Any, slots: Any, count: Any) -> Any:
    """The state of ``tx`` that goes on where another library's optimizer stopped.

    Args:
      tx: an optimizer of jslices, or what combinators make of some, with the
        hyperparameters of the other one.
      params: the parameters, each ``[V, *D]``, in the values that belong to the slots.
      slots: mirrors ``params``, with a dict for each parameter: from the name of a slot to
        its array, of any kind that NumPy takes. The names are those of the state arrays of
        jslices, or the other library's::

            state array         PyTorch          TF 1        TF 2         Keras 3
            mu of adam, adamw   exp_avg          Adam        m            momentum
            nu of adam, adamw   exp_avg_sq       Adam_1      v            velocity
            sum_of_squares      sum              Adagrad     accumulator  accumulator
            trace of sgd        momentum_buffer  Momentum
            nu of rmsprop       square_avg       RMSProp     rms          velocity
            mu of rmsprop       grad_avg         RMSProp_1   mg           average_gradient
            e_g of adadelta     square_avg       Adadelta    accum_grad   accumulated_grad
            e_x of adadelta     acc_delta        Adadelta_1  accum_var    accumulated_
                                                                          delta_var
            accum of ftrl                        Ftrl        accumulator  accumulator
            linear of ftrl                       Ftrl_1      linear       linear
            mu of lion                                                    momentum

        PyTorch's ``step`` may be among them. An empty dict, or None: never stepped; the
        state is that of ``tx.init`` after ``count`` steps without a gradient.
      count: how many steps were taken.

    Returns:
      What ``tx.init(params)`` would return, with ``count`` steps taken, shapes, dtypes and
      placement of its arrays likewise, and the slots (copied) in them. With
      ``untouched="exact"`` no row is behind, as after ``tx.flush``.

    Raises:
      ValueError: if slots are missing, unknown, of other shapes or dtypes, or were stepped
        more or less often than ``count``, all of them in one message; if they mirror other
        parameters.
      TypeError: for an optimizer whose state jslices does not know, and for one in
        :func:`jslices.optim.multi_steps` or beside a transformation that takes no step
        without gradients, as most of Optax's do. The message says what to type instead.

    Cost: one copy of each slot; ``count`` empty steps on the scalars of the state, in one
    compiled loop, so that schedules are where they were. For a moment the state is there
    twice.

    Example:
      >>> import jax.numpy as jnp, jslices as js, numpy as np
      >>> tx, params = js.adam(1e-3), {"table": jnp.ones((3, 2))}
      >>> moments = {"exp_avg": np.full((3, 2), 0.5, "float32"),
      ...            "exp_avg_sq": np.full((3, 2), 0.25, "float32")}
      >>> state = js.checkpoint.import_state(tx, params, {"table": moments}, count=7)
      >>> state.count, state.mu["table"][0]
      (Array(7, dtype=int32), Array([0.5, 0.5], dtype=float32))

    Source: the names are those of PyTorch 2.13, TensorFlow 2.21 and Keras 3.15, whose next
    step the tests compare with the next one here.
    """
    count = _checked_count(count)
    leaves, tree = flatten(params, is_leaf)
    state = tx.init(params)
    if _gathering(state):
        raise TypeError(
            "import_state: tx gathers the gradients of several calls (multi_steps), and no "
            "step without them is taken; fill the state of what it wraps: for "
            "tx = multi_steps(opt, ...) type tx.init(params)._replace(inner_opt_state="
            "import_state(opt, params, slots, count), gradient_step=jnp.int32(count))"
        )
    given = [_mapping(x) for x in _mirrored(tree, slots)]
    found: list[Mapping[tuple[int, str], Any]] = []
    wrong: list[str] = []
    for place, arrays, slot in zip(
        places(tree), _arrays_of_each(state, tree), given, strict=True
    ):
        found.append(_assigned(place, arrays, slot, count, wrong))
    if wrong:
        raise ValueError("import_state: " + "; ".join(wrong))
    state = _stepped(tx, params, state, count)

    def filled(index: int, part: Any) -> Any:
        changed = {}
        for field in part._fields:
            new = [arrays.get((index, field)) for arrays in found]
            if any(x is not None for x in new):
                column = tree.flatten_up_to(getattr(part, field))
                changed[field] = tree.unflatten(
                    [
                        old if x is None else _placed(x, old, p)
                        for x, old, p in zip(new, column, leaves, strict=True)
                    ]
                )
        return part._replace(**changed)

    return _map_parts(filled, state)


def export_state(params: Any, state: Any, names: str) -> Any:
    """The state of an optimizer as another library's slots: :func:`import_state` reversed.

    Args:
      params: the parameters.
      state: the state of the optimizer that steps them.
      names: whose names of slots: ``"torch"``, ``"tf1"``, ``"tf2"`` (Keras 2 as well) or
        ``"keras"`` (Keras 3), as in the table of :func:`import_state`.

    Returns:
      A tree like ``params`` with a dict for each: from the name of a slot to its array, as
      it is in ``state``; PyTorch's ``step`` among them where PyTorch has one. An empty dict
      for a parameter that has no state.

    Raises:
      ValueError: for other names, for a state array that the library has no slot for, for
        the state of an exact optimizer in which rows are behind, and for gradients that
        :func:`jslices.optim.multi_steps` has gathered for its next step.

    Cost: nothing; no array is copied. With ``untouched="exact"`` one pass over a number for
    each row.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx, params = js.adagrad(0.1, 0.0), {"table": jnp.ones((3, 2))}
      >>> js.checkpoint.export_state(params, tx.init(params), "torch")["table"].keys()
      dict_keys(['step', 'sum'])

    Source: as for :func:`import_state`.
    """
    if names not in LIBRARIES:
        raise ValueError(f"export_state(names={names!r}): wanted one of {LIBRARIES}")
    _, tree = flatten(params, is_leaf)
    for gathering in _gathering(state):
        if (gathered := int(gathering.mini_step)) > 0:
            raise ValueError(
                f"export_state: {gathered} gradients wait in the state for the next step, "
                "and no slot can hold them; export it when mini_step is 0"
            )
    parts = list(_parts(state))
    for part in parts:
        clock = getattr(part, "clock", None)
        if clock is not None and any(
            bool((x < part.count).any()) for x in jax.tree.leaves(clock.last)
        ):
            raise ValueError(
                "export_state: rows are behind, as the state is of an exact optimizer; "
                "type params, state = tx.flush(params, state) before"
            )
    which = LIBRARIES.index(names)
    result = []
    for place, arrays in zip(places(tree), _arrays_of_each(state, tree), strict=True):
        slots = {}
        for array in arrays:
            known = NAMES[array.state].get(array.field)
            name = known[which] if known else None
            if name is None:
                raise ValueError(
                    f"export_state: the {array.field} of {array.state.__name__}{place} has "
                    f"no slot in {names}; take it from the state itself"
                )
            if names == "torch" and array.state is not SgdState:
                slots["step"] = parts[array.part].count
            slots[name] = array.now
        result.append(slots)
    return tree.unflatten(result)


def _is_part(x: Any) -> bool:
    """Whether ``x`` is the state of one optimizer."""
    return type(x) in NAMES


def _parts(state: Any) -> Iterator[Any]:
    return filter(_is_part, jax.tree.leaves(state, is_leaf=_is_part))


def _gathering(state: Any) -> list[Any]:
    """The states of ``multi_steps``, or of ``optax.MultiSteps``, in it."""

    def gathers(x: Any) -> bool:
        return hasattr(x, "mini_step")

    return list(filter(gathers, jax.tree.leaves(state, is_leaf=gathers)))


def _map_parts(change: Callable[[int, Any], Any], state: Any) -> Any:
    leaves, tree = flatten(state, _is_part)
    numbers = iter(range(len(leaves)))
    return tree.unflatten([change(next(numbers), x) if _is_part(x) else x for x in leaves])


def _arrays_of_each(state: Any, tree: Any) -> list[list[_Array]]:
    """The state arrays of each parameter, whichever optimizer keeps them."""
    parts = list(_parts(state))
    if not parts:
        raise TypeError(
            "import_state and export_state know the states of jslices' own optimizers, got "
            f"{type(state).__name__}; for one of Optax, replace arrays in what "
            "tx.init(params) returns, by optax.tree.set(state, mu=...)"
        )
    result: list[list[_Array]] = [[] for _ in range(tree.num_leaves)]
    for number, part in enumerate(parts):
        for field in part._fields:
            column = getattr(part, field)
            if field in ("count", "clock") or column is None:
                continue
            for arrays, x in zip(result, tree.flatten_up_to(column), strict=True):
                if hasattr(x, "shape"):  # no MaskedNode: another optimizer's parameter
                    arrays.append(_Array(number, type(part), field, x))
    return result


def _whole(x: Any) -> int | None:
    """``x`` as a number of steps; None if it is none."""
    try:
        number = np.asarray(x)
        if number.ndim == 0 and number.dtype.kind in "iuf":
            whole = int(number)
            return whole if whole == number and 0 <= whole <= INT32_MAX else None
    except (TypeError, ValueError, OverflowError):  # no array, infinite or not a number
        pass
    return None


def _checked_count(count: Any) -> int:
    number = _whole(count)
    if number is None:
        raise ValueError(
            f"import_state(count={count!r}): wanted the number of steps taken, an integer "
            f"from 0 to {INT32_MAX}; PyTorch has it as step, TensorFlow as global_step or "
            "iterations"
        )
    return number


def _mirrored(tree: Any, slots: Any) -> list[Any]:
    try:
        return list(tree.flatten_up_to(slots))
    except ValueError as error:
        raise ValueError(
            "import_state(tx, params, slots, count): slots must mirror params, with a dict "
            f"of arrays for each parameter, None for what has no state; {error}"
        ) from error


def _mapping(slots: Any) -> Mapping[str, Any]:
    if slots is not None and not isinstance(slots, Mapping):
        raise TypeError(
            "import_state: slots must have a dict for each parameter, from the name of a "
            f"slot to its array, got {type(slots).__name__}; type "
            '{"exp_avg": array, "exp_avg_sq": array} for Adam of PyTorch'
        )
    return slots or {}


def _assigned(
    place: str,
    arrays: list[_Array],
    slots: Mapping[str, Any],
    count: int,
    wrong: list[str],
) -> dict[tuple[int, str], Any]:
    """Each slot at the state array that it goes to; appends what is wrong."""
    rest = {name: _array(x) for name, x in slots.items()}
    if not rest:
        return {}
    step = rest.pop("step", count)
    if (taken := _whole(step)) is None:
        wrong.append(
            f"the slot step{place} is {_short(step)}, wanted the number of steps taken, or "
            "leave it out of these slots"
        )
    elif taken != count:
        wrong.append(
            f"{taken} steps were taken{place}, and count={count}, which is one for all "
            "parameters: leave the step out of these slots if it does not matter, or give "
            "those that were stepped together an optimizer of their own; " + BY_GROUP
        )
    found = {}
    for array in arrays:
        names = [name for name in array.names if name in rest]
        if len(names) == 1:
            x = found[array.part, array.field] = rest.pop(names[0])
            wrong += _misfits(f"the slot {names[0]}{place}", x, array.now)
        else:
            came = " and ".join(names) or ", ".join(slots) or "nothing"
            wrong.append(
                f"{array.field}{place} wants one slot, named {' or '.join(array.names)}, "
                f"got {came}"
            )
    for name in rest:
        notes = [OTHERWISE.get(array.state, {}).get(name) for array in arrays]
        wanted = ", ".join(" or ".join(array.names) for array in arrays) or "none"
        help = next(filter(None, notes), f"it keeps {wanted}; leave this one out")
        wrong.append(f"the optimizer has no state for the slot {name}{place}: {help}")
    return found


def _array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else np.asarray(x)


def _short(x: Any) -> str:
    """What came in place of numbers, or of one number."""
    return str(x) if np.ndim(x) == 0 else f"an array {x.shape} of {x.dtype}"


def _misfits(what: str, x: Any, now: jax.Array) -> list[str]:
    """What is wrong with a slot that is to stand where ``now`` is."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "OSU":  # None among them
        return [
            f"{what} is {_short(x)}, wanted {now.shape} of {now.dtype}: give the array, or "
            "None instead of all slots of a parameter that was never stepped"
        ]
    if x.shape != now.shape:
        if x.shape == now.shape[::-1]:
            help = "transpose it, as the parameter was: x.T"
        elif x.ndim != now.ndim or x.shape[1:] != now.shape[1:]:
            help = "reshape it, as the parameter was"
        elif x.shape[0] > (rows := now.shape[0]):
            help = (
                f"take the rows that the parameter has, x[:{rows}] if they are the first, "
                "or give the parameter all of them"
            )
        else:
            help = (
                f"{rows - x.shape[0]} rows are missing: append them, for new rows as "
                "tx.init(params) has them, or give the parameter only the rows given here"
            )
        return [f"{what} has shape {x.shape}, wanted {now.shape}: {help}"]
    if x.dtype != now.dtype:
        help = f'type x.astype("{now.dtype}")'
        if jnp.issubdtype(x.dtype, jnp.floating):
            help += f', or jslices.optim.with_state_dtype(tx, "{x.dtype}")'
        return [f"{what} is {x.dtype}, and the state keeps {now.dtype}: {help}"]
    return []


def _stepped(tx: Any, params: Any, state: Any, count: int) -> Any:
    """The state after ``count`` steps in which nothing had a gradient.

    These are what moves schedules, and the clock of an exact optimizer, to where they were.
    """
    nothing = jax.tree.map(lambda _: None, params)
    flush = getattr(tx, "flush", lambda params, state: (params, state))

    def stepped(state: Any, params: Any, count: jax.Array) -> Any:
        state = lax.fori_loop(
            0, count, lambda _, now: tx.update(nothing, now, params)[1], state
        )
        return flush(params, state)[1]

    # Nothing is donated: what tx.init returns may hold the user's parameters themselves.
    try:
        return jax.jit(stepped)(state, params, jnp.int32(count))
    except (TypeError, ValueError) as error:
        raise TypeError(
            "import_state: a transformation in tx takes no step without gradients, as most "
            f"of Optax's do; {BY_GROUP}"
        ) from error


def _placed(x: Any, like: Any, param: Any) -> Any:
    """A copy of ``x`` where ``like`` is, and laid out as it."""
    if not isinstance(x, jax.Array):
        x = np.array(x)  # on a CPU JAX keeps NumPy's memory, whatever may_alias says
    return laid_out_as(param, jax.device_put(x, like.sharding, may_alias=False))
