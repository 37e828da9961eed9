"""Step counts of another library's optimizer, parameter by parameter."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jslices.checkpoint.state_walk import Walk
from jslices.extend import Params, PyTree

#: The dict of slots of one parameter.
Slots = Mapping[str, Any]

_MAX_COUNT = np.iinfo(np.int32).max


def counts_of_states(
    walk: Walk,
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
    for label, arrays, slots, n in zip(
        walk.labels, walk.arrays, slots_of_each, steps, strict=True
    ):
        for array in arrays:
            if n is not None:
                (stepped if slots else others)[array.owner].setdefault(n, label)
    each = [one or other for one, other in zip(stepped, others, strict=True)]
    problems += [_conflict(one) for one in each if len(one) > 1]
    largest = max((n for n in steps if n is not None), default=0)
    return [max(one, default=largest) for one in each]


def _steps_of_each(
    walk: Walk,
    params: Params,
    slots_of_each: Sequence[Slots],
    count: PyTree,
    problems: list[str],
) -> list[int | None]:
    """The steps of each parameter, or None if unknown; appends problems."""
    steps: list[int | None] = []
    counts = _spread(count, params, walk.tree.num_leaves)
    for label, slots, n in zip(walk.labels, slots_of_each, counts, strict=True):
        taken = _as_count(slots["step"]) if "step" in slots else n
        if "step" in slots and taken is None:
            problems.append(
                f"the slot step{label} is {short(slots['step'])}, wanted the number of "
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


def _spread(count: PyTree, params: Params, num_leaves: int) -> list[int | None]:
    """The count of each parameter, of a number or of a tree of them; None without."""
    if count is None:
        return [None] * num_leaves
    counts: list[int | None] = []

    def spread(x: ArrayLike | None, part: PyTree) -> None:
        n = 0 if x is None and part is None else _as_count(x)
        counts.extend([n] * len(jax.tree.leaves(part, is_leaf=_is_none)))

    try:
        jax.tree.map(spread, count, params, is_leaf=_is_none)
    except ValueError:
        counts = [None]
    if None in counts:
        raise ValueError(
            f"import_state(count={count!r}): wanted the number of steps taken, an integer "
            f"from 0 to {_MAX_COUNT}, or such numbers in the structure of params or a "
            "prefix of it; PyTorch has it as step, TensorFlow as global_step or iterations"
        )
    return counts


def _is_none(x: object) -> bool:
    return x is None


def _as_count(x: ArrayLike | None) -> int | None:
    """``x`` as a number of steps; None if it is not one."""
    try:
        array: Any = np.asarray(x)
        if array.ndim == 0 and array.dtype.kind in "iuf":
            count = int(array)
            return count if count == array and 0 <= count <= _MAX_COUNT else None
    except (TypeError, ValueError, OverflowError):  # no array, infinite or not a number
        pass
    return None


def as_array(x: ArrayLike | None) -> jax.Array | np.ndarray:
    return x if isinstance(x, jax.Array) else np.asarray(x)


def short(x: ArrayLike | None) -> str:
    """A number as it is, an array by its shape and dtype."""
    array = as_array(x)
    return str(x) if array.ndim == 0 else f"an array {array.shape} of {array.dtype}"
