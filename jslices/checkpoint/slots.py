"""The state of an optimizer from the slots of another library, and back.

PyTorch and TensorFlow keep the state of an optimizer variable by variable, in *slots*:
arrays with a name, most of them of the variable's shape. Here they are one tree for each
state array. ``slot_names`` says which slot is which array.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices import GradientTransformation
from jslices._slices.held import takes_held
from jslices._typing import Params, PyTree, State
from jslices.checkpoint import state_walk
from jslices.checkpoint.slot_names import LIBRARIES, NAMES, OTHERWISE, SQUARES
from jslices.checkpoint.trees import listed
from jslices.optim import AdadeltaState, SgdState
from jslices.optim.engine.clock import has_rows_behind

#: The dict of slots of one parameter.
Slots = Mapping[str, Any]

_MAX_COUNT = np.iinfo(np.int32).max


@takes_held()
def import_state(
    tx: GradientTransformation, params: Params, slots: PyTree, count: PyTree = None
) -> State:
    """A state of ``tx`` that continues where another library's optimizer stopped.

    Args:
      tx: an optimizer of jslices, or what combinators make of some, with the
        hyperparameters of the other one.
      params: the parameters, each ``[V, *D]``, with the values that belong to the slots.
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

        ``momentum1`` and ``momentum2`` of FBGEMM and TorchRec are ``mu`` and ``nu``, or the
        first is ``sum_of_squares``; the name of a table may stand before any name
        (``user.momentum1``, ``user.weight.momentum_1``), and a number a row be ``[V, 1]``.
        PyTorch's ``step`` may be among them. Without an ``ema``, the average that
        :func:`jslices.optim.params_ema` keeps begins at the parameter. An empty dict, or
        None: never stepped; the state is that of ``count`` steps without a gradient.
      count: how many steps were taken: a number; or numbers in the structure of ``params``
        or a prefix of it; or None, each is the ``step`` of its slots. PyTorch counts no
        step for a parameter without a gradient. An optimizer of jslices counts every step
        for all of its parameters, so parameters with other counts need their own
        optimizers, in :func:`jslices.optim.partition`. One that keeps no arrays gets the
        largest.

    Returns:
      A state like that of ``tx.init(params)``, in shapes, dtypes and placement, with
      ``count`` steps taken and the slots (copied) in its arrays. With ``untouched="exact"``
      no row is behind, as after ``tx.flush``.

    Raises:
      ValueError: if slots are missing, unknown, of other shapes or dtypes, if they hold NaN
        or negative means of squares, or complex ones (PyTorch squares real and imaginary
        parts apart, jslices absolute values), or were stepped more or less often than
        ``count`` or than one another, all of them in one message; if they mirror other
        parameters.
      TypeError: for an optimizer whose state jslices does not know, and for one in
        :func:`jslices.optim.multi_steps` or beside a transformation that takes no step
        without gradients, as most of Optax's do. The message says what to type instead.

    Cost: one pass over each slot and one copy; ``count`` empty steps on the scalars of the
    state, in one compiled loop, so that schedules are where they were. It is compiled
    with ``tx.flush``, which takes seconds for an exact optimizer of several tables. For a
    moment the state exists twice.

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
    if not hasattr(tx, "init"):
        raise TypeError(
            f"import_state(tx, params, slots, count): tx is {type(tx).__name__}, wanted an "
            "optimizer"
        )
    state = tx.init(params)
    walk = state_walk.walk_state(params, state)
    if walk.gathering:
        raise TypeError(
            "import_state: tx gathers the gradients of several calls (multi_steps), and no "
            "step without them is taken; fill the state of what it wraps: for "
            "tx = multi_steps(opt, ...) type tx.init(params)._replace(inner_opt_state="
            "import_state(opt, params, slots, count), gradient_step=jnp.int32(count))"
        )
    problems: list[str] = []
    slots_of_each = _slots_of_each(walk.tree, slots)
    counts = _counts_of_states(walk, params, slots_of_each, count, problems)
    each = walk.labels, walk.tree.flatten_up_to(params), walk.arrays, slots_of_each
    assigned = {
        number: x
        for parameter in zip(*each, strict=True)
        for number, x in _assigned(*parameter, problems).items()
    }
    if problems:
        raise ValueError(f"import_state: {listed(problems)}")
    after = state_walk.after_empty_steps(tx, params, state, counts, assigned)
    leaves, structure = jax.tree.flatten(after)
    old: list[Any] = jax.tree.leaves(state)
    del state, walk  # so that an old array goes as its slot comes
    for number, x in assigned.items():
        leaves[number], old[number] = state_walk.placed(x, old[number]), None
    return jax.tree.unflatten(structure, leaves)


@takes_held()
def export_state(
    params: Params, state: State, names: str, tx: GradientTransformation | None = None
) -> PyTree:
    """The state of an optimizer as another library's slots: :func:`import_state` reversed.

    Args:
      params: the parameters.
      state: the state of the optimizer that steps them.
      names: the library whose names of slots to use: ``"torch"``, ``"tf1"``, ``"tf2"``
        (Keras 2 as well) or ``"keras"`` (Keras 3), as in the table of :func:`import_state`.
      tx: the optimizer, if it is an exact one: rows that are behind catch up. The slots
        are then those of ``tx.now(params, state)``, which are the parameters to export.

    Returns:
      A tree like ``params`` with a dict for each: from the name of a slot to its array, as
      it is in ``state``; PyTorch's ``step`` among them where PyTorch has one. An empty dict
      for a parameter that has no state. Averages of ``params_ema`` are in ``state.ema``.

    Raises:
      ValueError: for other names, for a state array that the library has no slot for (for
        squares of complex tables none has one), for the state of an exact optimizer in
        which rows are behind, without ``tx``, and for gradients that
        :func:`jslices.optim.multi_steps` has gathered for its next step.

    Cost: nothing; no array is copied. With ``untouched="exact"`` one pass over a number for
    each row; with ``tx`` that of ``tx.flush`` and a copy.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx, params = js.adagrad(0.1, 0.0), {"table": jnp.ones((3, 2))}
      >>> js.checkpoint.export_state(params, tx.init(params), "torch")["table"].keys()
      dict_keys(['step', 'sum'])

    Source: as for :func:`import_state`.
    """
    if names not in LIBRARIES:
        raise ValueError(f"export_state(names={names!r}): wanted one of {LIBRARIES}")
    walk = state_walk.walk_state(params, state)
    for gathering in walk.gathering:
        if (gathered := int(gathering.mini_step)) > 0:
            raise ValueError(
                f"export_state: {gathered} gradients wait in the state for the next step, "
                "and no slot can hold them; export it when mini_step is 0"
            )
    if any(map(has_rows_behind, walk.states)):
        if tx is None:
            raise ValueError(
                "export_state: rows are behind, as the state is of an exact optimizer; "
                "type export_state(params, state, names, tx), of tx.now(params, state), or "
                "params, state = tx.flush(params, state) before"
            )
        walk = state_walk.walk_state(params, tx.flush(params, state)[1])
    library = LIBRARIES.index(names)
    result = []
    for label, arrays in zip(walk.labels, walk.arrays, strict=True):
        slots = {}
        for array in arrays:
            if array.field == "ema":  # which no library keeps in a slot
                continue
            slot_names = NAMES[array.state].get(array.field)
            name = slot_names[library] if slot_names else None
            if name is None or _is_complex_square(array.field, array.value):
                raise ValueError(
                    f"export_state: the {array.field} of {array.state.__name__}{label} has "
                    f"no slot in {names}; take it from the state itself"
                )
            if names == "torch" and array.state is not SgdState:
                slots["step"] = walk.states[array.owner].count
            slots[name] = array.value
        result.append(slots)
    return walk.tree.unflatten(result)


# --- how many steps were taken --------------------------------------------------------


def _counts_of_states(
    walk: state_walk.Walk,
    params: Params,
    slots_of_each: Sequence[Slots],
    count: PyTree,
    problems: list[str],
) -> list[int]:
    """The steps that each optimizer in a state took; appends problems.

    Parameters that were never stepped, which have no slots, count only if their optimizer
    has no others.
    """
    steps = _steps_of_each(walk, params, slots_of_each, count, problems)
    stepped: list[dict[int, str]] = [{} for _ in walk.states]
    others: list[dict[int, str]] = [{} for _ in walk.states]
    columns = walk.labels, walk.arrays, slots_of_each, steps
    for label, arrays, slots, n in zip(*columns, strict=True):
        for array in arrays:
            if n is not None:
                (stepped if slots else others)[array.owner].setdefault(n, label)
    each = [one or other for one, other in zip(stepped, others, strict=True)]
    problems += [_conflict(one) for one in each if len(one) > 1]
    largest = max((n for n in steps if n is not None), default=0)
    return [max(one, default=largest) for one in each]


def _steps_of_each(
    walk: state_walk.Walk,
    params: Params,
    slots_of_each: Sequence[Slots],
    count: PyTree,
    problems: list[str],
) -> list[int | None]:
    """The steps of each parameter, or None if unknown; appends problems."""
    steps: list[int | None] = []
    counts = _spread(count, params, walk.tree)
    for label, slots, n in zip(walk.labels, slots_of_each, counts, strict=True):
        taken = _as_count(slots["step"]) if "step" in slots else n
        if "step" in slots and taken is None:
            problems.append(
                f"the slot step{label} is {_short(slots['step'])}, wanted the number of "
                "steps taken, or leave it out of these slots"
            )
        elif taken is None and slots:
            problems.append(f"there is no step in the slots{label}: give the count")
        elif n not in (None, taken):
            problems.append(
                f"{taken} steps were taken{label}, and count={n}: leave count out, or give "
                "one for each parameter"
            )
        steps.append(taken)
    if not problems and all(n is None for n in steps):
        problems.append("there is no step in any slots: give the count")
    return steps


def _conflict(labels: Mapping[int, str]) -> str:
    taken = " and ".join(f"{n} steps were taken{label}" for n, label in labels.items())
    groups = ", ".join(f"{n}: opt" for n in labels)
    return (
        f"{taken}, and the optimizer of both corrects its means by one count: give those "
        "that were stepped together one of their own, tx = "
        f"jslices.optim.partition({{{groups}}}, labels) where labels are the steps of each "
        f"parameter; or leave the step out of the slots, and count={max(labels)} is for all"
    )


def _spread(count: PyTree, params: Params, tree: Any) -> list[int | None]:
    """The count of each parameter, of a number or of a tree of them; None without."""
    if count is None:
        return [None] * tree.num_leaves
    counts: list[int | None]
    try:
        numbered = tree.unflatten(range(tree.num_leaves))  # None among params is a leaf
        each = tree.flatten_up_to(jax.tree.broadcast(count, numbered, lambda n: n is None))
        pairs = zip(each, tree.flatten_up_to(params), strict=True)
        counts = [0 if n is None and x is None else _as_count(n) for n, x in pairs]
    except ValueError:
        counts = [None]
    if None in counts:
        raise ValueError(
            f"import_state(count={count!r}): wanted the number of steps taken, an integer "
            f"from 0 to {_MAX_COUNT}, or such numbers in the structure of params or a "
            "prefix of it; PyTorch has it as step, TensorFlow as global_step or iterations"
        )
    return counts


def _as_count(x: ArrayLike | None) -> int | None:
    """``x`` as a number of steps; None if it is not one."""
    # No array, infinite or not a number.
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        array: Any = np.asarray(x)
        if array.ndim == 0 and array.dtype.kind in "iuf":
            count = int(array)
            return count if count == array and 0 <= count <= _MAX_COUNT else None
    return None


# --- slots and state arrays -----------------------------------------------------------


def _slots_of_each(tree: Any, slots: PyTree) -> list[Slots]:
    try:
        each = tree.flatten_up_to(slots)
    except ValueError as error:
        help, _, value = str(error).partition(", value: ")  # which prints whole arrays
        if value:
            help += (
                f", got a {type(slots).__name__}: type jax.tree.structure(params)."
                "unflatten([...]) with the dicts in the order of jax.tree.leaves(params)"
            )
        keys = slots.keys() if isinstance(slots, Mapping) else ()
        if "param_groups" in keys or (keys and all(isinstance(k, int) for k in keys)):
            help = (
                "they are those of PyTorch's state_dict, which numbers parameters in the "
                'order of model.parameters(): type {"table": state_dict["state"][0], ...}'
            )
        raise ValueError(
            "import_state(tx, params, slots, count): slots must mirror params, with a dict "
            f"of arrays for each parameter, None for what has no state; {help}"
        ) from error
    for x in each:
        if x is not None and not isinstance(x, Mapping):
            raise TypeError(
                "import_state: slots must have a dict for each parameter, from the name of "
                f"a slot to its array, got {type(x).__name__}; type "
                '{"exp_avg": array, "exp_avg_sq": array} for Adam of PyTorch'
            )
    return [x or {} for x in each]


def _assigned(
    label: str,
    param: jax.Array,
    arrays: Sequence[state_walk.StateArray],
    slots: Slots,
    problems: list[str],
) -> dict[int, Any]:
    """The slots of one parameter by the numbers of state arrays; appends problems."""
    if not slots:
        begun = (array for array in arrays if array.field == "ema")
        return {x.number: param.astype(x.value.dtype) for x in begun}
    rest = {name: _as_array(x) for name, x in slots.items() if name != "step"}
    assigned: dict[int, Any] = {}
    for array in arrays:
        names = [name for name in rest if name.rpartition(".")[2] in array.names]
        if array.field == "ema" and not names:  # an average that begins
            assigned[array.number] = param.astype(array.value.dtype)
        elif len(names) == 1:
            (name,) = names
            what, x, old = f"the slot {name}{label}", rest.pop(name), array.value
            if x.shape == (*old.shape, 1) and old.ndim < param.ndim:  # a number a row
                x = x[..., 0]
            problem = (
                _complex_squares(what, x, array, name == array.field)
                or _misfit(what, x, old)
                or _invalid_values(what, x, array.field)
            )
            problems += [problem] if problem else []
            assigned[array.number] = x
        else:
            received = " and ".join(names) or ", ".join(slots) or "nothing"
            problems.append(
                f"{array.field}{label} wants one slot, named {' or '.join(array.names)}, "
                f"got {received}"
            )
    for name, x in rest.items():
        if x.dtype == object and x.ndim == 0 and x.item() is None:
            continue  # PyTorch saves None for the momentum of an SGD without momentum
        notes = [OTHERWISE.get(array.state, {}).get(name) for array in arrays]
        slot_names = ", ".join(" or ".join(array.names) for array in arrays) or "none"
        help = next(filter(None, notes), f"it keeps {slot_names}; leave this one out")
        problems.append(f"the optimizer has no state for the slot {name}{label}: {help}")
    return assigned


def _is_complex_square(field: str, x: jax.Array | np.ndarray) -> bool:
    return field in SQUARES and jnp.iscomplexobj(x)


def _complex_squares(
    what: str, x: jax.Array | np.ndarray, array: state_walk.StateArray, ours: bool
) -> str | None:
    """Why squares in a complex slot are other ones than ours; None if they are not."""
    if not _is_complex_square(array.field, x):
        return None
    # Under our name they are real in effect; but Adadelta's, which are not of sizes.
    if ours and (array.state is AdadeltaState or not bool(x.imag.any())):
        return None
    return (
        f"{what} is {x.dtype}, as PyTorch squares real and imaginary parts apart, and "
        "jslices absolute values: train the table of real numbers, [V, 2 D], type "
        f'x.view("{x.real.dtype}") for the parameter and all of its slots, and make rows '
        "complex after the lookup, jax.lax.complex(rows[..., ::2], rows[..., 1::2])"
    )


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
                f"{rows - x.shape[0]} rows are missing: import it with a parameter of the "
                "rows given here, then jslices.checkpoint.resize_rows"
            )
        return f"{what} has shape {x.shape}, wanted {old.shape}: {help}"
    if x.dtype != old.dtype:
        help = f'type x.astype("{old.dtype}")'
        has_dtype = jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype
        if has_dtype and jnp.issubdtype(x.dtype, jnp.floating):
            help += f', or jslices.optim.with_state_dtype(tx, "{x.dtype}")'
        return f"{what} is {x.dtype}, and the state keeps {old.dtype}: {help}"
    return None


def _invalid_values(what: str, x: jax.Array | np.ndarray, field: str) -> str | None:
    """The reason why training cannot continue from a slot; None if it can."""
    xp: Any = jnp if isinstance(x, jax.Array) else np
    for bad, kind, help in (
        (xp.isnan(x), "NaN", "training had failed: take an earlier checkpoint"),
        (x < 0, "negative", "it is of squares: are two slots exchanged?"),
    ):
        if (kind == "NaN" or field in SQUARES) and bool(bad.any()):
            row = int(xp.argmax(bad)) // max(math.prod(x.shape[1:]), 1)
            number = int(bad.sum())
            return (
                f"{what} has {number} elements that are {kind}, first in row {row}: {help}"
            )
    return None


def _as_array(x: ArrayLike | None) -> jax.Array | np.ndarray:
    return x if isinstance(x, jax.Array) else np.asarray(x)


def _short(x: ArrayLike | None) -> str:
    """A number as it is, an array by its shape and dtype."""
    array = _as_array(x)
    return str(x) if array.ndim == 0 else f"an array {array.shape} of {array.dtype}"
