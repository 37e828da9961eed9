"""The protocol of an optimizer, which is Optax's, and adding updates to parameters."""

import dataclasses
import functools
import inspect
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef

from jslices._arguments import check_array
from jslices._densify import warn_at_line
from jslices._grad.now import Missed, as_now
from jslices._jax import flatten, is_staged, is_traced, takes_tables
from jslices._place import boundary, donated
from jslices._place.hints import hint_dense
from jslices._rows import access, rounding
from jslices._rows.sums import add_rows
from jslices._slices import IndexedSlices, Stacked, check_slices, each_shard, is_slices
from jslices._slices.held import takes_held, unheld
from jslices._slices.slices import deduplicated, rows_at, slices_of
from jslices._typing import Gradients, Key, Leaf, Params, PyTree, State
from jslices.errors import InvalidArgumentError
from jslices.optim.engine.clock import flushed, is_without_clocks, map_clocks
from jslices.optim.engine.now import current_reading, reading

_OF_ANOTHER = (
    "got parameters or the state of an optimizer whose rows may be behind "
    '(untouched="exact"), and by {} none catches up: take the optimizer that stepped them; '
    "or to go on with this one params, _ = tx.flush(params, state) of that one, and "
    "tx.init(params) of this one"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateOfRows:
    """The state of an array ``[U, *D]`` of some rows of a table, and which they are.

    A transformation that goes by row numbers takes it in place of the state alone.
    """

    state: Any  #: of ``tx.init`` for the array.
    numbers: Any  #: ``[U]``, of its rows in the table; None if they are not known.
    num_rows: int = dataclasses.field(metadata={"static": True})  #: V, of the table.

    def renumbered(self, f: Any) -> Any:
        """What is said of the table's rows, of those of the array; a number stays."""
        by_row = callable(f) or jnp.ndim(f)
        if self.numbers is None or not by_row:
            return None if by_row else f
        dtype = access.index_dtype(self.num_rows, np.dtype(np.int32))
        rows = self.numbers.astype(dtype)
        if not callable(f):
            return jnp.asarray(f).at[rows].get(mode="fill", fill_value=0)
        return lambda at: f(rows.at[at].get(mode="fill", fill_value=self.num_rows))


#: What optimizers of TensorFlow and PyTorch, and Flax's TrainState, call by other names.
_INSTEAD = {
    "apply_gradients": "params, state = tx.apply(grads, state, params)",
    "compute_gradients": "value, grads = jslices.value_and_grad(loss)(params, *batch)",
    "zero_grad": "nothing: each gradient is a new value",
} | dict.fromkeys(
    ("minimize", "step"),
    "step = jslices.train_step(loss, tx), and then "
    "params, state, value = step(params, state, *batch)",
)


class GradientTransformation:
    """A pair of pure functions in Optax's protocol, and what rows need besides.

    It unpacks as a pair, ``init, update = tx``, and Optax's combinators take it.

    To write an optimizer, describe it by a rule and let ``transformation`` make this
    (CONTRIBUTING.md); or give ``init`` and ``update``, which suffice where no row is ever
    behind.

    To wrap one, ``tx.replace(update=..., apply=...)``: of what you replace

    - ``update`` and ``apply`` come together: ``apply`` adds what ``update`` returns;
    - ``init`` and what reads its state come together;
    - ``catch_up`` and ``flush`` move rows to where the next step expects them, and pass
      ``params`` and ``state`` through as they pass through your step; :meth:`now` is read
      through your ``catch_up``;
    - ``of_rows`` is due where you go by row numbers: from it a ``HostTable`` gets the same
      for the rows that are on the device.

    Args:
      init: (Optax's pair) ``init(params) -> state``.
      update: ``update(grads, state, params=None, **extra_args) -> (updates, state)``, with
        extra arguments as Optax has them (``value=loss`` for ``reduce_on_plateau``), of
        which each transformation takes those that it names. ``grads`` mirrors
        ``params``, with an IndexedSlices where the gradient is sparse, None where there
        is none; so do the updates, which :func:`jslices.apply_updates` (or, without None,
        ``optax.apply_updates``) adds. In a program these have as many entries as the
        gradients, so that ``lax.cond`` may choose between them (``apply_if_finite``).
      catch_up: (for rows, as all that follow) see :meth:`catch_up`.
      flush: the same for all rows; None for ``catch_up`` of all of them.
      apply: a step in one call; None for ``update`` and then ``apply_updates``.
      plan: see :meth:`plan`.
      check: called before each part, with its name and its arguments: it raises before a
        step, where values are there to tell, what a program cannot.
      of_rows: see :meth:`of_rows`; None for what does not go by row numbers.
      averaged: see :func:`jslices.optim.params_ema`; None for all but optimizers.
      exact: whether ``untouched="exact"`` holds, also where no row is ever behind.

    Example:
      >>> import jslices as js
      >>> init, update = js.sgd(0.1)
      >>> js.adam(0.1, untouched="exact").catches_up
      True
      >>> import jax.numpy as jnp
      >>> tx, params = js.sgd(0.5), jnp.zeros((5, 1))
      >>> grads = js.IndexedSlices(jnp.ones((2, 1)), jnp.array([3, 3]), (5, 1))
      >>> params, state = tx.apply(grads, tx.init(params), params)
      >>> params.ravel()
      Array([ 0.,  0.,  0., -1.,  0.], dtype=float32)
    """

    def __init__(
        self,
        init: Callable[[Params], State],
        update: Callable[..., tuple[Gradients, State]],
        catch_up: Callable[[Params, State, PyTree], tuple[Params, State]] | None = None,
        flush: Callable[[Params, State], tuple[Params, State]] | None = None,
        apply: Callable[..., tuple[Params, State]] | None = None,
        plan: Callable[..., PyTree] | None = None,
        check: Callable[..., None] | None = None,
        of_rows: Callable[[StateOfRows], "GradientTransformation"] | None = None,
        averaged: Callable[[float], "GradientTransformation"] | None = None,
        exact: bool = False,
    ) -> None:
        parts = {"init": init, "update": update, "catch_up": catch_up, "flush": flush}
        parts |= {"apply": apply, "plan": plan, "check": check}
        self._parts: dict[str, Any] = {**parts, "of_rows": of_rows, "averaged": averaged}
        self._parts["exact"] = exact
        self.init = takes_held()(takes_tables()(init))
        self._plan, self.averaged = plan, averaged
        self.check: Any = check
        names = ("update", "apply", "catch_up", "flush")
        own = map(self._accepting_extra_args, names)
        self.update, step, self._catch_up, self._flush = own
        in_full = self._accepting_extra_args("update", fits=False)
        self._step = step or apply_from_update(in_full)
        #: Whether it goes by row numbers, or by how many rows there are.
        self.goes_by_row = of_rows is not None
        #: Whether rows without gradient are to end where a dense optimizer moves them.
        self.exact = exact or self.catches_up
        # Bound once, so that jax.jit(tx.apply) finds its program again.
        vars(self).update(apply=self.apply, catch_up=self.catch_up, flush=self.flush)

    call: str | None = None  #: that made it, if known

    def __repr__(self) -> str:
        return self.call or object.__repr__(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            here = f"; type {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"an optimizer has no {name!r}{here}", name=name, obj=self)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Pose as a transformation of Optax once it is imported: its combinators ask."""
        own = type(self)
        return getattr(sys.modules.get("optax"), "GradientTransformationExtraArgs", own)

    def replace(self, **parts: PyTree) -> "GradientTransformation":
        """The same with other parts, by the names of the arguments."""
        other_step = {"update", "apply"} & parts.keys()
        lost = ["of_rows", "averaged"] if other_step else ["averaged"] * ("init" in parts)
        return GradientTransformation(**{**self._parts, **dict.fromkeys(lost), **parts})

    def of_rows(self, rows: Any = StateOfRows(None, None, 0)) -> "GradientTransformation":
        """The same for an array of these rows, or of new ones, whichever they are."""
        of_rows = self._parts["of_rows"]
        return self if of_rows is None else of_rows(rows).replace(of_rows=None)

    def _accepting_extra_args(self, name: str, fits: bool = True) -> Any:
        """A part that drops keyword arguments which it does not declare, as in Optax.

        In a program ``update`` ``fits``: its slices have as many entries as the gradient's.
        """
        if (part := self._parts[name]) is None:
            return None
        parameters = inspect.signature(part).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

        @takes_held(like={"apply": 2, "catch_up": 0}.get(name), part=0)
        @takes_tables(like={"apply": 2}.get(name, 0), part=0)
        @functools.wraps(part)
        def checked_part(
            grads: PyTree, state: State, *args: PyTree, **extra_args: PyTree
        ) -> Any:
            if isinstance(state, StateOfRows):
                step = getattr(self.of_rows(state), name)
                result = step(grads, state.state, *args, **extra_args)
                return result[0], dataclasses.replace(state, state=result[1])
            if self.goes_by_row and (caller := extra_args.get("without_numbers")):
                raise InvalidArgumentError(
                    f"{caller} cannot tell freeze_rows, scale with a function, nor "
                    "clip_by_block_rms the rows of the table: put them outside of it, in "
                    "jslices.optim.chain(jslices.from_optax(tx), jslices.optim.scale(f))"
                )
            if name in ("update", "apply"):
                grads = _looked_at(grads, "without_numbers" in extra_args)
                if any(map(is_slices, jax.tree.leaves(grads, is_leaf=is_leaf))):
                    if name == "apply":
                        args = donated.changed(args[0]), *args[1:]
                    state = donated.changed(state, args if name == "apply" else ())
                if self.catches_up and "at_now" not in extra_args:
                    extra_args |= _taken_now(grads)
            if self.check is not None:
                part_name = "now" if current_reading() else name
                self.check(part_name, grads, state, *args, **extra_args)
            named = {k: x for k, x in extra_args.items() if takes_any or k in parameters}
            result = part(grads, state, *args, **named)
            if name != "update" or not (fits and is_staged()):
                return result
            return jax.tree.map(_fitted, result[0], grads, is_leaf=is_leaf), *result[1:]

        return checked_part

    def as_programs(self) -> "GradientTransformation":
        """The same, compiled as a whole outside of ``jax.jit`` as well.

        Extra arguments of ``update`` are left out.
        """
        names = ("update", "apply", "catch_up", "flush")
        steps = {name: self._parts[name] for name in names if self._parts[name]}
        steps = {name: boundary.one_program(x) for name, x in steps.items()}
        own = {name: self._parts[name] for name in ("of_rows", "averaged", "exact")}
        return self.replace(**own, **steps)

    def __iter__(self) -> Iterator[Callable[..., PyTree]]:
        return iter((self.init, self.update))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Callable[..., PyTree]:
        return (self.init, self.update)[number]

    def apply(
        self,
        grads: Gradients,
        state: State,
        params: Params,
        key: Key | None = None,
        **extra_args: PyTree,
    ) -> tuple[Params, State]:
        """``update`` and :func:`jslices.apply_updates` in one call, with the same result.

        Parameters of the shapes and dtypes that came, duplicates summed before the step,
        out-of-range ids dropped, rows that no id names neither read nor written. In place
        where ``params`` and ``state`` are donated *in this order* (JAX pairs donated
        arguments with results as they come; ``jax.jit(tx.apply, donate_argnums=(1, 2))``
        copies all of them): ``jax.jit(lambda p, s, g: tx.apply(g, s, p),
        donate_argnums=(0, 1))``. With ``key``, parameters of 16 bits are
        rounded stochastically, and their gradients are float32 from the start, so that
        updates are, too: nothing is lost before it is added. The dtypes of the state stay.
        ``extra_args`` are those of ``update``.

        Raises:
          ValueError: without params, or with slices of an array of another shape.
          TypeError: for a key that is none.
        """
        refuse_nothing("tx.apply", grads, params)
        refuse_alone("tx.apply", grads, params)
        if params is None and grads is not None:
            raise ValueError(
                "tx.apply steps the parameters, but these are None: "
                "params, state = tx.apply(grads, state, params)"
            )
        if key is None:
            return self._step(grads, state, params, **extra_args)
        rounding.key_bits(key, "tx.apply")  # before anything is done
        return self._step(grads, state, params, key, **extra_args)

    @property
    def catches_up(self) -> bool:
        """Whether rows have to catch up before they are read."""
        return self._catch_up is not None

    def catch_up(self, params: Params, state: State, ids: PyTree) -> tuple[Params, State]:
        """``(params, state)`` with the rows that are about to be read up to date.

        For ``untouched="exact"``; other optimizers return what they got. ``ids`` mirrors
        ``params``: integers of any shape for a table, out-of-range ones being dropped; None
        for what needs nothing, True for all rows of it.
        """
        if self._catch_up is None:
            return params, state
        return self._catch_up(params, state, ids)

    def flush(self, params: Params, state: State) -> tuple[Params, State]:
        """The same for every row, before parameters are saved."""
        params = plain_of(self, params, state)
        if self._flush is not None:
            return self._flush(params, state)  # type: ignore[no-any-return]
        params, state = self.catch_up(params, state, jax.tree.map(lambda p: True, params))
        return params, map_clocks(flushed, state)

    def now(self, params: Params, state: State) -> Params:
        """The parameters after the steps that their rows missed; nothing is written.

        Args:
          params: the parameters.
          state: the state of this optimizer.

        Returns:
          A tree like ``params``, with the values that ``flush`` gives. In a function that
          jslices differentiates or evaluates (:func:`jslices.value_and_grad`,
          :func:`jslices.train_step`, :func:`jslices.eval_step`) rows alone are computed
          where rows alone are read. Its derivative is that of ``params``: a gradient taken
          at these is one for ``tx.apply``, which then does the missed steps of its rows.
          Those of a lazy optimizer are ``params`` themselves.

        An array that is used as a whole, so that its gradient is an array, has to catch up
        before such a step if it has missed some: ``tx.catch_up`` with True.

        Cost: where rows are read, ``K * D`` elements of the parameter and of each state
        array; as a whole that of ``flush``.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> tx, table = js.sgd(1.0, 0.5, untouched="exact"), jnp.zeros((3, 1))
          >>> loss = lambda table, state, ids: tx.now(table, state)[ids].sum()
          >>> state = tx.init(table)
          >>> for ids in jnp.array([[0], [1]]):
          ...     grads = js.grad(loss)(table, state, ids)
          ...     table, state = tx.apply(grads, state, table)
          >>> table.ravel(), tx.now(table, state).ravel()
          (Array([-1., -1.,  0.], dtype=float32), Array([-1.5, -1. ,  0. ], dtype=float32))
        """
        now, _ = self.now_with(params, state, caught_up=False)
        mine = {id(x) for x in jax.tree.leaves(params) if isinstance(x, jax.Array)}
        if not self.exact or is_traced() or mine.isdisjoint(map(id, jax.tree.leaves(now))):
            return now
        # A step consumes the parameters, and these are to stay.
        return jax.tree.map(lambda x: jnp.copy(x) if id(x) in mine else x, now)

    def now_with(
        self, params: Params, state: State, caught_up: bool
    ) -> tuple[Params, list[bool]]:
        """:meth:`now`, and of each parameter whether it is read by rows.

        One that is not, of an optimizer that knows no views, is the whole. ``caught_up``:
        whether the caller lets whatever is read as a whole catch up before.
        """
        params = plain_of(self, params, state)
        if self._catch_up is None:
            return params, [True] * len(jax.tree.leaves(params))
        every = jax.tree.map(lambda p: True, params)
        with reading(caught_up) as here:
            now, _ = self._catch_up(params, state, every)
        leaves, tree = flatten(params)
        pairs = list(zip(leaves, tree.flatten_up_to(now), strict=True))
        views = set(map(id, here.views))
        by_rows = [new is old or id(new) in views for old, new in pairs]
        stop = lax.stop_gradient  # the derivative is that of p
        whole = lambda p, now: p if caught_up else as_now(_REPLACED, p, stop(now), ())  # noqa: E731
        of_pair = zip(pairs, by_rows, strict=True)
        return tree.unflatten([x[1] if rows else whole(*x) for x, rows in of_pair]), by_rows

    def plan(self, grads: Gradients, params: Params, platform: str | None = None) -> PyTree:
        """For every gradient that is IndexedSlices how its rows are stepped.

        A :class:`Plan` to print; None for the others, and where a transformation does not
        tell. Shapes and dtypes suffice:
        ``tx.plan(jax.eval_shape(js.grad(loss), params, batch), params)``. ``platform`` is
        ``"cpu"``, ``"gpu"`` or ``"tpu"``; None means that of the default device. (For
        ``apply`` with a key, pass gradients in float32.)
        """
        if self._plan is None:
            return jax.tree.map(lambda g: None, grads, is_leaf=is_leaf)
        return self._plan(*unheld((grads, params)), platform)


def refuse_nothing(call: str, grads: Gradients, params: PyTree) -> None:
    """Refuse None for all gradients, unless there is no parameter."""
    if grads is None and jax.tree.leaves(params):
        raise TypeError(
            f"{call} got None for all gradients, where None stands for those of single "
            "parameters; pass what js.grad or js.value_and_grad returned"
        )


def refuse_alone(call: str, grads: Gradients, params: PyTree) -> None:
    """Refuse slices where parameters are a tree, and a pair where they are none."""
    if isinstance(grads, IndexedSlices) and isinstance(params, dict | list | tuple):
        raise TypeError(
            f"{call} got {grads} alone, where parameters are a {type(params).__name__}; "
            "pass the whole tree that js.grad or js.value_and_grad returned, or the one "
            "array as parameters"
        )
    if type(grads) is not tuple or len(grads) != 2 or params is None:
        return
    trees = [flatten(x, is_leaf)[1] for x in (params, grads, *grads)]
    if trees[0] != trees[1] and trees[0] in trees[2:]:
        raise TypeError(
            f"{call} got a pair, and one part of it has the structure of the parameters; "
            "unpack it: value, grads = jslices.value_and_grad(loss)(params, ...), or "
            "updates, state = tx.update(grads, state, params)"
        )


def plain_of(tx: GradientTransformation, params: Params, state: State = ()) -> Params:
    """The parameters out of boxes; no rows may be behind where none catch up."""
    plain = unheld(params)
    is_held = plain is not params and not tx.exact
    if is_held or not (tx.catches_up or is_without_clocks(state)):
        raise ValueError(_OF_ANOTHER.format(tx))
    return plain


#: Parameters that are there as a whole, in place of the old ones.
_REPLACED = Missed(*[lambda p, now, _: now.astype(p.dtype)] * 2)


def _taken_now(grads: Gradients) -> dict[str, PyTree]:
    """For ``update`` and ``apply``: which gradients were taken at ``tx.now``, if any."""
    leaves, tree = flatten(grads, is_leaf=is_leaf)
    flags = [None if g is None else is_slices(g) and g.facts.at_now for g in leaves]
    return {"at_now": tree.unflatten(flags)} if any(flags) else {}


def _looked_at(grads: Gradients, in_part: bool) -> Gradients:
    """The gradients; with a warning if complex ones are those of JAX, not conjugated."""
    masked = lambda x: isinstance(x, tuple) and not x  # noqa: E731
    leaves = jax.tree.leaves(grads, is_leaf=lambda x: is_leaf(x) or masked(x))
    if not (in_part or any(isinstance(g, IndexedSlices | tuple) for g in leaves)):
        hint_dense(leaves)
    if any(isinstance(g, IndexedSlices) and g.facts.unconjugated for g in leaves):
        warn_at_line(
            "JAX's gradient of complex numbers goes uphill in their imaginary parts: it is "
            "the conjugate of what a step follows. Type grads = jslices.tree.map(lambda g: "
            "g.conj(), grads) before tx.apply or tx.update",
            category=UserWarning,
        )
        return jax.tree.map(lambda x: x, grads)  # which forgets it
    return grads


def apply_from_update(
    update: Callable[..., tuple[Any, Any]],
) -> Callable[..., tuple[Any, Any]]:
    """``apply`` as ``update`` followed by ``apply_updates``."""

    def apply(
        grads: Gradients,
        state: State,
        params: Params,
        key: Key | None = None,
        **extra_args: PyTree,
    ) -> tuple[Any, Any]:
        updates, state = widening(update, key)(grads, state, params, **extra_args)
        return apply_updates(params, updates, key), state

    return apply


def _fitted(update: Leaf, grad: Leaf) -> Leaf:
    """An update of as many entries as the gradient, if these suffice for its rows."""
    if not (isinstance(update, IndexedSlices) and isinstance(grad, IndexedSlices)):
        return update
    placement = update.facts.placement if update.is_placed else None
    shards = placement.shards if placement else 1
    count, held = (x.values.shape[0] // shards for x in (grad, update))
    if held == count or (update.facts.named or held) > count:
        return update

    def fitted(u: IndexedSlices) -> IndexedSlices:
        at, empty = jnp.arange(count), access.empty_index(u.num_rows, u.indices.dtype)
        if held > count and placement:  # of all rows
            at, _ = access.kept_positions(u.indices < empty, count, "update")
        elif held > count:
            at = deduplicated(grad).indices
        values = rows_at(u.values, at, fill_value=0)
        indices = rows_at(u.indices, at, fill_value=empty)
        return slices_of(values, indices, u.dense_shape, u.facts)

    return each_shard(fitted, update) if placement else fitted(update)


def widening(
    update: Callable[..., tuple[Any, Any]], key: Key | None
) -> Callable[..., tuple[Any, Any]]:
    """``update``; with a key, on gradients in float32 where parameters are of 16 bits.

    The updates are then float32 as well, and the state keeps its dtypes.
    """
    if key is None:
        return update

    def wide(g: Leaf, p: jax.Array) -> Any:
        if g is None or not rounding.is_narrow(jnp.result_type(p)):
            return g
        return g.astype(jnp.float32) if rounding.is_narrow(g.dtype) else g

    def restored(old: Any, new: Any) -> Any:
        narrow = rounding.is_narrow(jnp.result_type(old))
        return new.astype(old.dtype) if narrow else new

    def widened(
        grads: Gradients, state: State, params: Params, **extra_args: PyTree
    ) -> tuple[Any, Any]:
        grads = jax.tree.map(wide, grads, params, is_leaf=is_leaf)
        updates, new = update(grads, state, params, **extra_args)
        return updates, jax.tree.map(restored, state, new)

    return widened


@takes_held(like=0)
@takes_tables(like=0)
@boundary.one_program
@boundary.on_any_mesh(boundary.like_first)
def apply_updates(params: Params, updates: Any, key: Key | None = None) -> Any:
    """``params`` plus ``updates``, in place where ``params`` are donated.

    With ``key``, parameters of 16 bits (bfloat16, float16) are added to in float32 and
    rounded *stochastically*: to one of the two neighbours, with the probabilities that make
    the mean right. An update too small for nearest rounding, which loses it in every step,
    then counts in the mean. Other parameters get the same bits as without a key.

    Args:
      params: a pytree of arrays.
      updates: the same tree with, for each array ``[V, *D]``, an array of that shape, an
        IndexedSlices of it, or None (the array then stays). Of any dtype: to lose nothing,
        of float32, which updates of a bfloat16 gradient are not. ``tx.apply`` with a key
        sees to it.
      key: None, or a key of ``jax.random`` (typed, or old uint32), another in each step.

    Returns:
      The new parameters, each in the dtype it had. Rows that an IndexedSlices does not
      name are neither read nor written; duplicates add; out-of-range indices drop. With a
      key a row is rounded once, after its duplicates are summed, by random bits that follow
      from the key, the path of the array in the tree, the number of the row and the place
      in it: the same for any order of the rows, with dense updates, on every platform. A
      finite number becomes infinite only where nearest rounding makes it so.

    Raises:
      ValueError: for slices of an array of another shape.
      TypeError: for slices whose indices a foreign ``tree.map`` has changed; for a key that
        is none.

    Cost: one scatter of ``U * D`` elements per IndexedSlices. With a key, for parameters of
    16 bits, also a sort of U integers and a quarter of a hash for each element; for dense
    updates up to two float32 arrays of that size.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> params = {"table": jnp.zeros((4, 1)), "w": jnp.ones(2)}
      >>> rows = js.IndexedSlices(jnp.array([[5.0]]), jnp.array([2]), (4, 1))
      >>> js.apply_updates(params, {"table": rows, "w": None})["table"].ravel()
      Array([0., 0., 5., 0.], dtype=float32)

      Of an update of a quarter of the gap between two numbers of bfloat16, nearest rounding
      leaves nothing, and stochastic rounding a quarter in the mean:

      >>> import jax
      >>> ones = jnp.ones(10_000, jnp.bfloat16)
      >>> quarter = jnp.full(10_000, 2**-9)
      >>> js.apply_updates(ones, quarter).astype("float32").mean() - 1
      Array(0., dtype=float32)
      >>> moved = js.apply_updates(ones, quarter, jax.random.key(0)).astype("float32")
      >>> ((moved.mean() - 1) * 2**9).round(1)
      Array(1., dtype=float32)

    Source: ``optax.apply_updates``, which gives the same result on these updates (but takes
    no None, and no key).
    """
    refuse_alone("apply_updates", updates, params)
    bits = None if key is None else rounding.key_bits(key, "apply_updates")
    leaves, tree = flatten(updates, is_leaf=is_leaf)
    if any(map(is_slices, leaves)):
        params = donated.changed(params)

    def added(path: str, update: Leaf, param: Leaf) -> Leaf:
        moved = update is not None and param is not None
        if bits is None or not moved or not rounding.is_narrow(jnp.result_type(param)):
            return add_update(path, update, param)
        # By its name, as parts of the tree may be stepped apart (jslices.optim.partition).
        name = zlib.crc32(path.removeprefix(" at ").encode())
        return add_update(path, update, param, rounding.fold_in(bits, name))

    return tree.unflatten(map(added, paths_of(tree), leaves, tree.flatten_up_to(params)))


def paths_of(tree: PyTreeDef) -> list[str]:
    """`` at ['table']`` for each leaf of ``tree``; nothing for a tree that is a leaf."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree.unflatten(range(tree.num_leaves)))
    return [f" at {jax.tree_util.keystr(path)}" if path else "" for path, _ in paths]


def is_leaf(x: Leaf) -> bool:
    """True for what stands in a tree of gradients where the parameters have an array."""
    return x is None or isinstance(x, IndexedSlices)


def refuse_stacked(params: Params) -> None:
    """Refuse tables in one array, for an optimizer that does not step row by row."""
    is_stacked = lambda x: isinstance(x, Stacked)  # noqa: E731
    for x in jax.tree.leaves(params, is_leaf=is_stacked):
        if is_stacked(x) and jax.tree.leaves(x.tables):
            raise ValueError(
                "this optimizer keeps means of the columns of an array, which the tables "
                f"of {list(x.tables)} would share; leave them apart (where= of "
                "stack_tables), or give them another optimizer (partition)"
            )


def has_no_rows(x: Leaf) -> bool:
    """True for the gradient of an array into which no gradient comes."""
    return isinstance(x, IndexedSlices) and x.indices.shape == (0,)


def add_update(
    path: str,
    update: Leaf,
    param: jax.Array,
    bits: rounding.KeyBits | None = None,
    number: Callable[[jax.Array], jax.Array] = lambda rows: rows,
) -> Any:
    """One array plus its update; ``number(rows)`` are the rows that random bits go by."""
    if update is None or has_no_rows(update) or param is None or is_float0(update):
        return param
    check_kinds(path, update, param)
    if not isinstance(update, IndexedSlices):
        if jnp.shape(update) not in ((), jnp.shape(param)):
            raise _misfit(path, f"an array of shape {jnp.shape(update)}", param)
        if bits is not None:
            return rounding.add_rounding(jnp.asarray(param), jnp.asarray(update), bits)
        return jnp.asarray(param + update).astype(jnp.asarray(param).dtype)
    param = jnp.asarray(param)
    check_slices(update)
    axes, shape = update.row_axes, update.dense_shape or param.shape
    rows = (*shape[:axes], *update.values.shape[update.indices.ndim :])
    if param.shape != rows or update.indices.ndim != 1:
        raise _misfit(path, update, param)
    placement = update.facts.placement
    if placement is not None and update.is_placed:

        def add(rows: IndexedSlices, param: jax.Array, number: Any) -> Any:
            return add_update(path, rows, param, bits, number)

        return each_shard(add, update, param, with_numbers=True)
    height = update.num_rows if update.facts.distinct and placement is None else None
    room = access.room_for_distinct(update.values.shape[0], height)
    how = update.indices[:room], update.values[:room], update.facts.distinct
    if bits is None:
        return boundary.row_major_array(add_rows(param, *how))
    return boundary.row_major_array(rounding.add_rows_rounding(param, *how, bits, number))


def is_float0(x: Leaf) -> bool:
    """Whether it is JAX's gradient of integers, which holds nothing."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


def refuse_slices(path: str, param: Leaf) -> None:
    """Refuse parameters that are gradients."""
    if isinstance(param, IndexedSlices):
        raise TypeError(
            f"the parameter{path} is {param}, as gradients are; the order is "
            "tx.apply(grads, state, params), tx.update(grads, state, params) and "
            "apply_updates(params, updates)"
        )


def check_width(name: str, dtype: np.dtype) -> None:
    """Refuse floats of 8 bits, which neither moments nor steps fit into."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 2:
        raise TypeError(
            f"{name} is {dtype}, in which most steps are lost and moments overflow; keep "
            "the table in bfloat16, where tx.apply(grads, state, params, key) rounds "
            f'stochastically, or in jslices.HostTable(..., stored="{dtype}")'
        )


def check_kinds(name: str, update: Leaf, param: jax.Array) -> None:
    """Reject non-arrays, and updates that the parameter's dtype would truncate."""
    if isinstance(update, IndexedSlices):
        new = update.dtype
    else:
        check_array(f"apply_updates: an update{name}", update, "an array or IndexedSlices")
        new = jnp.result_type(update)
    refuse_slices(name, param)
    check_array(f"apply_updates: a parameter{name}", param)
    old = jnp.result_type(param)
    for kind in (jnp.complexfloating, jnp.inexact):
        if jnp.issubdtype(new, kind) and not jnp.issubdtype(old, kind):
            raise TypeError(
                f"the update{name} is {new}, and the parameter {old}, which cannot hold "
                "it: no step would move it as it should. Leave it out of what is trained "
                "(its gradient is None then), or make it floating before tx.init(params)"
            )


def shardings_of_step(
    grads: Gradients, state: State, params: Params, *rest: Any, adds: bool = False
) -> Any:
    """How results of ``update`` are split over devices; those of ``apply`` if it adds."""
    del rest
    values = lambda g: g.values if isinstance(g, IndexedSlices) else g  # noqa: E731
    first = params if adds else jax.tree.map(values, grads, is_leaf=is_leaf)
    return boundary.shardings_of((first, state))


def left_to_xla(tree: PyTree, state: State) -> PyTree:
    """Drop the placement of slices of replicated tables whose state is split.

    Without a placement XLA sends the rows of the state that a step reads; with it each
    device would step all of them, and be sent the whole state.
    """
    arrays = jax.tree.leaves(state)

    def unplaced(g: Leaf) -> Leaf:
        placement = g.facts.placement if isinstance(g, IndexedSlices) else None
        if placement is None or placement.rows or not any(map(boundary.split_rows, arrays)):
            return g
        return g.with_facts(g.facts._replace(placement=None))

    return jax.tree.map(unplaced, tree, is_leaf=is_leaf)


def _misfit(path: str, update: Leaf, param: jax.Array) -> ValueError:
    return ValueError(
        f"cannot add {update} to a parameter of shape {jnp.shape(param)}{path}; the "
        "shapes must be equal"
    )
