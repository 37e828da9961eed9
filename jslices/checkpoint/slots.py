"""The state of an optimizer from the slots of another library, and back.

PyTorch and TensorFlow keep the state of an optimizer variable by variable, in *slots*:
arrays with a name, most of them of the variable's shape. Here they are one tree for each
state array. ``slot_names`` says which slot is which array.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jslices import GradientTransformation
from jslices.checkpoint.slot_names import LIBRARIES, NAMES, OTHERWISE
from jslices.extend import Params, PyTree, State
from jslices.optim import SgdState

#: What to type where one call can't fill the state.
BY_GROUP = (
    "call import_state for each optimizer of jslices alone, and put what it returns into "
    "tx.init(params): in a chain at its place, in a jslices.optim.partition at "
    "inner_states[label].inner_state, with jslices.optim.MaskedNode() in params and slots "
    "for the parameters of other labels"
)

_MAX_COUNT = np.iinfo(np.int32).max

#: The dict of slots of one parameter.
Slots = Mapping[str, Any]


class _StateArray(NamedTuple):
    """A state array of one parameter."""

    owner: int  #: the number of the optimizer state that holds it.
    state: type  #: the type of that.
    field: str  #: its field there.
    value: jax.Array

    @property
    def names(self) -> tuple[str, ...]:
        """The names that its slot may have."""
        slots = NAMES[self.state].get(self.field, ())
        return tuple(dict.fromkeys((self.field, *filter(None, slots))))


def import_state(
    tx: GradientTransformation, params: Params, slots: PyTree, count: ArrayLike
) -> State:
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
    steps = _checked_count(count)
    state = tx.init(params)
    walk = _walk(params, state)
    if walk.gathering:
        raise TypeError(
            "import_state: tx gathers the gradients of several calls (multi_steps), and no "
            "step without them is taken; fill the state of what it wraps: for "
            "tx = multi_steps(opt, ...) type tx.init(params)._replace(inner_opt_state="
            "import_state(opt, params, slots, count), gradient_step=jnp.int32(count))"
        )
    problems: list[str] = []
    assigned: list[dict[tuple[int, str], jax.Array]] = []
    slots_of_each = [_checked_slots(x) for x in _flattened_up_to(walk.tree, slots)]
    for label, arrays, its_slots in zip(
        walk.labels, walk.arrays, slots_of_each, strict=True
    ):
        assigned.append(_assign(label, arrays, its_slots, steps, problems))
    if problems:
        raise ValueError("import_state: " + "; ".join(problems))

    def fill(number: int, part: Any) -> Any:
        columns = {}
        for field in part._fields:
            if not any((number, field) in each for each in assigned):
                continue
            column = walk.tree.flatten_up_to(getattr(part, field))
            columns[field] = walk.tree.unflatten(
                each.get((number, field), old)
                for each, old in zip(assigned, column, strict=True)
            )
        return part._replace(**columns)

    return _map_optimizer_states(fill, _after_empty_steps(tx, params, state, steps))


def export_state(params: Params, state: State, names: str) -> PyTree:
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
    walk = _walk(params, state)
    for gathering in walk.gathering:
        if (gathered := int(gathering.mini_step)) > 0:
            raise ValueError(
                f"export_state: {gathered} gradients wait in the state for the next step, "
                "and no slot can hold them; export it when mini_step is 0"
            )
    if any(map(_has_rows_behind, walk.states)):
        raise ValueError(
            "export_state: rows are behind, as the state is of an exact optimizer; "
            "type params, state = tx.flush(params, state) before"
        )
    library = LIBRARIES.index(names)
    result = []
    for label, arrays in zip(walk.labels, walk.arrays, strict=True):
        slots = {}
        for array in arrays:
            slot_names = NAMES[array.state].get(array.field)
            name = slot_names[library] if slot_names else None
            if name is None:
                raise ValueError(
                    f"export_state: the {array.field} of {array.state.__name__}{label} has "
                    f"no slot in {names}; take it from the state itself"
                )
            if names == "torch" and array.state is not SgdState:
                slots["step"] = walk.states[array.owner].count
            slots[name] = array.value
        result.append(slots)
    return walk.tree.unflatten(result)


# --- the tree of a state --------------------------------------------------------------


class _Walk(NamedTuple):
    """The parts of the state of an optimizer.

    Attributes:
      tree: the structure of the parameters.
      labels: where each parameter is, for messages: `` at ['table']``.
      states: the states of jslices' optimizers in it, in order.
      arrays: the state arrays of each parameter, whichever optimizer keeps them.
      gathering: the states of ``multi_steps``, or of ``optax.MultiSteps``, in it.
    """

    tree: Any
    labels: list[str]
    states: list[Any]
    arrays: list[list[_StateArray]]
    gathering: list[Any]


def _walk(params: Params, state: State) -> _Walk:
    """Lists the state arrays of each parameter.

    Raises:
      TypeError: for a state without one of jslices' optimizers.
    """
    tree: Any
    paths, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: x is None)
    labels = [f" at {jax.tree_util.keystr(path)}" if path else "" for path, _ in paths]
    states = _nodes(state, _is_optimizer_state)
    if not states:
        raise TypeError(
            "import_state and export_state know the states of jslices' own optimizers, got "
            f"{type(state).__name__}; for one of Optax, replace arrays in what "
            "tx.init(params) returns, by optax.tree.set(state, mu=...)"
        )
    arrays: list[list[_StateArray]] = [[] for _ in labels]
    for number, part in enumerate(states):
        for field, column in part._asdict().items():
            if field in ("count", "clock") or column is None:
                continue
            for its_arrays, x in zip(arrays, tree.flatten_up_to(column), strict=True):
                # A parameter of another optimizer has a node without leaves here.
                for array in jax.tree.leaves(x):
                    its_arrays.append(_StateArray(number, type(part), field, array))
    return _Walk(tree, labels, states, arrays, _nodes(state, _gathers_gradients))


def _nodes(state: State, is_node: Callable[[Any], bool]) -> list[Any]:
    return list(filter(is_node, jax.tree.leaves(state, is_leaf=is_node)))


def _is_optimizer_state(x: Any) -> bool:
    return type(x) in NAMES


def _gathers_gradients(x: Any) -> bool:
    return "mini_step" in getattr(type(x), "_fields", ())


def _has_rows_behind(part: Any) -> bool:
    if part._asdict().get("clock") is None:
        return False
    return any(bool((x < part.count).any()) for x in jax.tree.leaves(part.clock.last))


def _map_optimizer_states(change: Callable[[int, Any], Any], state: State) -> State:
    leaves, tree = jax.tree.flatten(state, is_leaf=_is_optimizer_state)
    states = iter(range(len(leaves)))
    changed = [change(next(states), x) if _is_optimizer_state(x) else x for x in leaves]
    return jax.tree.unflatten(tree, changed)


def _after_empty_steps(
    tx: GradientTransformation, params: Params, state: State, count: int
) -> State:
    """The state after ``count`` steps in which nothing had a gradient.

    They move schedules, and the clock of an exact optimizer, to where they were.
    """
    nothing = jax.tree.map(lambda _: None, params)
    has_flush = isinstance(tx, GradientTransformation)

    @jax.jit
    def steps(state: State, params: Params, count: jax.Array) -> State:
        state = lax.fori_loop(
            0, count, lambda _, now: tx.update(nothing, now, params)[1], state
        )
        return tx.flush(params, state)[1] if has_flush else state

    # Nothing is donated: what tx.init returns may hold the user's parameters themselves.
    try:
        return steps(state, params, jnp.int32(count))
    except (TypeError, ValueError) as error:
        raise TypeError(
            "import_state: a transformation in tx takes no step without gradients, as most "
            f"of Optax's do; {BY_GROUP}"
        ) from error


# --- slots and state arrays -----------------------------------------------------------


def _as_count(x: ArrayLike) -> int | None:
    """``x`` as a number of steps; None if it is not one."""
    try:
        array = np.asarray(x)
        if array.ndim == 0 and array.dtype.kind in "iuf":
            count = int(array)
            return count if count == array and 0 <= count <= _MAX_COUNT else None
    except (TypeError, ValueError, OverflowError):  # no array, infinite or not a number
        pass
    return None


def _checked_count(count: ArrayLike) -> int:
    steps = _as_count(count)
    if steps is None:
        raise ValueError(
            f"import_state(count={count!r}): wanted the number of steps taken, an integer "
            f"from 0 to {_MAX_COUNT}; PyTorch has it as step, TensorFlow as global_step or "
            "iterations"
        )
    return steps


def _flattened_up_to(tree: Any, slots: PyTree) -> list[Any]:
    try:
        return list(tree.flatten_up_to(slots))
    except ValueError as error:
        raise ValueError(
            "import_state(tx, params, slots, count): slots must mirror params, with a dict "
            f"of arrays for each parameter, None for what has no state; {error}"
        ) from error


def _checked_slots(slots: Slots | None) -> Slots:
    if slots is not None and not isinstance(slots, Mapping):
        raise TypeError(
            "import_state: slots must have a dict for each parameter, from the name of a "
            f"slot to its array, got {type(slots).__name__}; type "
            '{"exp_avg": array, "exp_avg_sq": array} for Adam of PyTorch'
        )
    return slots or {}


def _assign(
    label: str, arrays: Sequence[_StateArray], slots: Slots, count: int, problems: list[str]
) -> dict[tuple[int, str], jax.Array]:
    """The slots of one parameter as state arrays, by owner and field; appends problems."""
    rest = {name: _array(x) for name, x in slots.items()}
    if not rest:
        return {}
    step = rest.pop("step", np.asarray(count))
    if (taken := _as_count(step)) is None:
        problems.append(
            f"the slot step{label} is {_short(step)}, wanted the number of steps taken, or "
            "leave it out of these slots"
        )
    elif taken != count:
        problems.append(
            f"{taken} steps were taken{label}, and count={count}, which is one for all "
            "parameters: leave the step out of these slots if it does not matter, or give "
            "those that were stepped together an optimizer of their own; " + BY_GROUP
        )
    assigned = {}
    for array in arrays:
        names = [name for name in array.names if name in rest]
        if len(names) == 1:
            x = rest.pop(names[0])
            problem = _misfit(f"the slot {names[0]}{label}", x, array.value)
            if problem:
                problems.append(problem)
            else:
                assigned[array.owner, array.field] = _placed(x, array.value)
        else:
            received = " and ".join(names) or ", ".join(slots) or "nothing"
            problems.append(
                f"{array.field}{label} wants one slot, named {' or '.join(array.names)}, "
                f"got {received}"
            )
    for name in rest:
        notes = [OTHERWISE.get(array.state, {}).get(name) for array in arrays]
        slot_names = ", ".join(" or ".join(array.names) for array in arrays) or "none"
        help = next(filter(None, notes), f"it keeps {slot_names}; leave this one out")
        problems.append(f"the optimizer has no state for the slot {name}{label}: {help}")
    return assigned


def _array(x: ArrayLike) -> jax.Array | np.ndarray:
    return x if isinstance(x, jax.Array) else np.asarray(x)


def _short(x: jax.Array | np.ndarray) -> str:
    """A number as it is, an array by its shape and dtype."""
    return str(x) if np.ndim(x) == 0 else f"an array {x.shape} of {x.dtype}"


def _misfit(what: str, x: jax.Array | np.ndarray, old: jax.Array) -> str | None:
    """The reason why a slot cannot replace the state array ``old``; None if it can."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "OSU":  # None among them
        return (
            f"{what} is {_short(x)}, wanted {old.shape} of {old.dtype}: give the array, or "
            "None instead of all slots of a parameter that was never stepped"
        )
    if x.shape != old.shape:
        if x.shape == old.shape[::-1]:
            help = "transpose it, as the parameter was: x.T"
        elif x.ndim != old.ndim or x.shape[1:] != old.shape[1:]:
            help = "reshape it, as the parameter was"
        elif x.shape[0] > (rows := old.shape[0]):
            help = (
                f"take the rows that the parameter has, x[:{rows}] if they are the first, "
                "or give the parameter all of them"
            )
        else:
            help = (
                f"{rows - x.shape[0]} rows are missing: append them, for new rows as "
                "tx.init(params) has them, or give the parameter only the rows given here"
            )
        return f"{what} has shape {x.shape}, wanted {old.shape}: {help}"
    if x.dtype != old.dtype:
        help = f'type x.astype("{old.dtype}")'
        if jnp.issubdtype(x.dtype, jnp.floating):
            help += f', or jslices.optim.with_state_dtype(tx, "{x.dtype}")'
        return f"{what} is {x.dtype}, and the state keeps {old.dtype}: {help}"
    return None


def _placed(x: jax.Array | np.ndarray, old: Any) -> jax.Array:
    """A copy of ``x`` on the devices of ``old``, in its layout."""
    if not isinstance(x, jax.Array):
        x = np.array(x)  # on a CPU JAX keeps NumPy's memory, whatever may_alias says
    new = jax.device_put(x, old.sharding, may_alias=False)
    return new if new.format == old.format else jax.device_put(new, old.format)
