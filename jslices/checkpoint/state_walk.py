"""States of jslices' optimizers within the state of any transformation."""

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jslices import GradientTransformation, IndexedSlices
from jslices._typing import Params, State
from jslices.checkpoint.slot_names import FUSED, NAMES


class StateArray(NamedTuple):
    """A state array of one parameter."""

    owner: int  #: the number of the optimizer state that holds it.
    state: type  #: the type of that.
    field: str  #: its field there.
    number: int  #: of the array among the leaves of the whole state.
    value: jax.Array

    @property
    def names(self) -> tuple[str, ...]:
        """The names that its slot may have."""
        slots = NAMES[self.state].get(self.field, ())
        fused = FUSED.get(self.state, {}).get(self.field, ())
        return tuple(dict.fromkeys((self.field, *filter(None, slots), *fused)))


class Walk(NamedTuple):
    """The parts of the state of an optimizer."""

    tree: Any  #: the structure of the parameters.
    labels: list[str]  #: where each parameter is, for messages: `` at ['table']``.
    states: list[Any]  #: those of jslices' optimizers in it, in order.
    arrays: list[list[StateArray]]  #: of each parameter, whichever optimizer keeps them.
    gathering: list[Any]  #: the states of ``multi_steps``, or of ``optax.MultiSteps``.


def walk_state(params: Params, state: State) -> Walk:
    """Lists the state arrays of each parameter."""
    tree: Any
    paths, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: x is None)
    labels = [f" at {jax.tree_util.keystr(path)}" if path else "" for path, _ in paths]
    leaves, structure = jax.tree.flatten(state)
    numbered = optimizer_states(jax.tree.unflatten(structure, range(len(leaves))))
    if not numbered:
        raise TypeError(
            "import_state and export_state know the states of jslices' own optimizers, got "
            f"{type(state).__name__}; for a lazy one of Optax, replace arrays in what "
            "tx.init(params) returns, by optax.tree.set(state, mu=...)"
        )
    arrays: list[list[StateArray]] = [[] for _ in labels]
    for owner, part in enumerate(numbered):
        for field, column in part._asdict().items():
            if field in ("count", "clock") or column is None:
                continue
            for its_arrays, x in zip(arrays, tree.flatten_up_to(column), strict=True):
                # A parameter of another optimizer has a node without leaves here.
                for number in jax.tree.leaves(x):
                    array = StateArray(owner, _kind(part), field, number, leaves[number])
                    its_arrays.append(array)
    gathering = _nodes(state, lambda x: "mini_step" in getattr(x, "_fields", ()))
    return Walk(tree, labels, optimizer_states(state), arrays, gathering)


def optimizer_states(state: State) -> list[Any]:
    """The states of jslices' optimizers in ``state``, in order."""
    return _nodes(state, _is_optimizer_state)


def _nodes(state: State, is_node: Callable[[Any], bool]) -> list[Any]:
    return list(filter(is_node, jax.tree.leaves(state, is_leaf=is_node)))


def _is_optimizer_state(x: Any) -> bool:
    return _kind(x) in NAMES


def _kind(x: Any) -> type:
    """The type of a state, whether it keeps an average of the parameters or not."""
    return getattr(type(x), "without_average", type(x))


def _with_logs(state: State, *of: State) -> State:
    """``state`` with the logs ``of`` another one, or with empty ones."""
    is_clock = lambda x: hasattr(x, "log")  # noqa: E731

    def changed(x: Any, *of: Any) -> Any:
        if not is_clock(x):
            return x
        return x._replace(log=of[0].log if of else jax.tree.map(lambda y: y[:, :0], x.log))

    return jax.tree.map(changed, state, *of, is_leaf=is_clock)


def after_empty_steps(
    tx: GradientTransformation,
    params: Params,
    state: State,
    counts: Sequence[int],
    replaced: Container[int],
) -> State:
    """The state after so many steps of each optimizer without any gradient.

    They move schedules, and the clock of an exact optimizer, to where they were. Leaves
    that are ``replaced`` afterwards are not computed, and zeros ``[]`` here.
    """
    nothing: Any = jax.tree.map(lambda _: None, params)
    if nothing is None and params is not None:  # a single array, whose None is refused
        nothing = IndexedSlices(params[:0], np.zeros(0, np.int32), params.shape)
    has_flush = isinstance(tx, GradientTransformation)

    @jax.jit
    def steps(state: State, params: Params, count: jax.Array) -> State:
        begin, one = _with_logs(state), lambda _, now: tx.update(nothing, now, params)[1]
        # No row is behind then, so that a log need know nothing of these steps.
        state = _with_logs(lax.fori_loop(0, count, one, begin), state)
        state = tx.flush(params, state)[1] if has_flush else state
        numbers, zero = itertools.count(), jnp.zeros(())
        return jax.tree.map(lambda x: zero if next(numbers) in replaced else x, state)

    # Nothing is donated: what tx.init returns may hold the user's parameters themselves.
    try:
        after = {count: steps(state, params, jnp.int32(count)) for count in {*counts}}
        return _merged(after, counts)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "import_state: a transformation in tx takes no step without gradients, as most "
            "of Optax's do; call import_state for each optimizer of jslices alone, and put "
            "what it returns into tx.init(params): in a chain at its place, in a "
            "jslices.optim.partition at inner_states[label].inner_state, with "
            "jslices.optim.MaskedNode() in params and slots for the parameters of other "
            "labels"
        ) from error


def _merged(after: Mapping[int, State], counts: Sequence[int]) -> State:
    """Each optimizer's state after as many steps as it took.

    Everything else in the state belongs to the optimizer whose path in it is nearest.
    """
    flat = {
        count: jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_optimizer_state)
        for count, state in after.items()
    }
    pairs, tree = flat[counts[0]]
    owners = [path for path, x in pairs if _is_optimizer_state(x)]

    def nearest(path: tuple[Any, ...]) -> int:
        shared = [
            sum(1 for _ in itertools.takewhile(lambda keys: keys[0] == keys[1], pair))
            for pair in (zip(path, owner, strict=False) for owner in owners)
        ]
        return max(zip(shared, counts, strict=True))[1]

    merged = [flat[nearest(path)][0][i][1] for i, (path, _) in enumerate(pairs)]
    return jax.tree.unflatten(tree, merged)


def placed(x: jax.Array | np.ndarray, like: Any) -> Any:
    """A copy of ``x`` where ``like`` is, in its layout, and committed if it is."""
    if not isinstance(like, jax.Array):
        return np.array(x)
    old: Any = like
    frees = not old.committed and getattr(x, "committed", False)
    if frees or not isinstance(x, jax.Array):
        x = np.array(x)  # on a CPU JAX keeps NumPy's memory, whatever may_alias says
    # Arrays that are committed anew would make the next step compile anew.
    new: Any = jax.device_put(x, old.sharding if old.committed else None, may_alias=False)
    return new if new.format == old.format else jax.device_put(new, old.format)
