"""IdMap: which id owns which row of a table, for ids of any size that come and go."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jslices import Exchange, InvalidArgumentError
from jslices._arguments import Number, OneOf
from jslices._place.boundary import on_any_mesh
from jslices._typing import State
from jslices.checkpoint.state_walk import optimizer_states
from jslices.dynamic.buckets import COUNTERS, NO_ROW, WAYS, Part, buckets_of
from jslices.dynamic.devices import exchange_of, on_each_part
from jslices.dynamic.ids import NOBODY, WORD, WideIds, hashed, is_padding
from jslices.errors import FailedPreconditionError

Policy = Literal["lru", "lfu", "tinylfu", "never"]


class Admitted(NamedTuple):
    """What :meth:`IdMap.admit` found and changed; a pytree."""

    rows: jax.Array  #: int32 ``[*K]``, the row to look up for each id.
    found: jax.Array  #: bool ``[*K]``, which ids own it; the others share rows.
    #: int32 ``[K]``, rows that have a new owner, each once, for
    #: :func:`jslices.checkpoint.reset_rows`; elsewhere ``2**31 - 1``, which no table has.
    fresh: jax.Array
    evicted: WideIds  #: ``[K]``, who owned the rows in ``fresh`` before, or padding.
    refused: jax.Array  #: int32 ``[]``, how many entries are ids that got no row.


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["low", "high", "last", "hits", "sightings", "step"],
    meta_fields=["name", "policy", "shared", "after", "expire", "half_life"],
)
@dataclasses.dataclass(frozen=True)
class IdMap:
    """Which id owns which row of a table ``[V, *D]``; :func:`id_map` makes it.

    A pytree of integers, for ``jit``, ``scan``, donation, checkpoints. S rows have owners
    or are free; row S and those after it are shared by ids without a row.
    """

    low: jax.Array  #: uint32 ``[S]``, of the owner.
    high: jax.Array  #: uint32 ``[S]``
    #: int32 ``[S]``, the last step that saw the owner; at most 0 without one, when it is
    #: the step of its eviction, negated.
    last: jax.Array
    hits: jax.Array | None  #: int32 ``[S]``, how often it was seen, if a policy asks.
    sightings: jax.Array | None  #: int32, counts of ids without a row, 32 a bucket.
    step: jax.Array  #: int32 ``[]``, calls of ``admit``.
    name: str  #: this and what follows: see :func:`id_map`.
    policy: Policy
    shared: int
    after: int
    expire: int | None
    half_life: int | None

    @property
    def num_rows(self) -> int:
        """V, the rows that its table needs: S and those that are shared."""
        return self.low.shape[0] + self.shared

    def find(
        self, ids: WideIds, *, exchange: Exchange | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The rows of some ids; nothing changes. For serving and evaluation.

        Args:
          ids: ``[*K]``, from :func:`wide_ids`.
          exchange: as in :meth:`admit`.

        Returns:
          ``(rows, found)``: int32 ``[*K]``, and bool ``[*K]``, which ids own theirs.
          The others share the last rows of the table; padding reads the first of these.

        Raises:
          TypeError: for ids that :func:`wide_ids` did not make.
          InvalidArgumentError: for an ``exchange`` along an axis that the map's mesh does
            not have, or on which devices have no whole buckets.

        Cost: reads ``16 K`` integers.
        """
        _, rows, found, _ = self._run(Part.find, ids, exchange)
        return rows, found

    def admit(
        self, ids: WideIds, *, exchange: Exchange | None = None, check: bool = False
    ) -> tuple["IdMap", Admitted]:
        """The rows of some ids, in a step that trains them; new ids get rows.

        A new id takes a free row of its bucket of 8 or that of the least worthy owner. Who
        is in the batch keeps its row. Equal ids get the same row, never two ids one row;
        the result depends on nothing but the arguments. A row in ``fresh`` has its former
        owner's values and optimizer state: begin it anew *before* the gradient is taken,
        or what the id gets is worse than a shared row.

        Args:
          ids: ``[*K]``, from :func:`wide_ids`. Padding reads the first shared row and is
            never admitted.
          exchange: for a map that is split over the devices of a mesh, along the axis of
            ``js.Exchange(axis)``, as the table is: ids are sent to the devices that have
            their buckets. On Explicit axes the type tells.
          check: raise if ids got no row; under ``jit`` by ``jax.experimental.checkify``.

        Returns:
          The map after this step, and :class:`Admitted`.

        Raises:
          TypeError: for ids that :func:`wide_ids` did not make.
          FailedPreconditionError: with ``check``, for ids that were refused.

        Cost: of known ids, reads ``16 K`` integers and writes K to ``3 K``; of n new ones a
        loop with a turn for each new id of the fullest bucket, mostly two, which reads
        ``8 K`` and writes 3 for each. In place where the map is donated. On N devices k
        ids each: two integers are sent for each id, and one comes back.
        """
        new, rows, found, changes = self._run(Part.admit, ids, exchange)
        out = Admitted(rows, found, *changes)
        if check:
            _refuse(out.refused)
        return new, out

    def evict(
        self, ids: WideIds, *, exchange: Exchange | None = None
    ) -> tuple["IdMap", jax.Array]:
        """Takes their rows from some ids, if they have any.

        Args, errors and cost are those of :meth:`find`, and K are written to each array.

        Returns:
          ``(map, rows)``: int32 ``[*K]``, the rows that are free now, each as often as
          its id came, and ``2**31 - 1`` for ids without one. Their values stay until they
          are reset or have new owners.
        """
        new, rows, found, _ = self._run(Part.evict, ids, exchange)
        return new, jnp.where(found, rows, NO_ROW)

    def export(self, since: int = 0, state: State = None) -> tuple[np.ndarray, np.ndarray]:
        """All ids with their rows, for a server or an index; on the host.

        Args:
          since: a step: only rows that were seen, or lost their owner, after it.
          state: that of the optimizer of the table. Under ``untouched="exact"`` rows that
            nobody has seen move, too: then all rows with an owner are given, and those that
            lost theirs after ``since``. Leave it out only for a lazy optimizer.

        Returns:
          ``(ids, rows)``: int64 ``[n]`` and int32 ``[n]``, by rows: ``table[rows]`` are the
          vectors of ``ids``. With ``since`` it is what a server has to change: it sets
          those rows with their ids, and drops rows whose id is -1, which have no owner
          any more. Who owned rows before: ``Admitted.evicted``.

        Under ``untouched="exact"`` vectors are ``tx.now(params, state)["table"][rows]``;
        fewer rows are those that ``js.Saver().save_delta`` finds after ``tx.flush``.

        Raises:
          FailedPreconditionError: for an array of which this process has only a part.

        Cost: reads the map.
        """
        if not getattr(self.low, "is_fully_addressable", True):
            raise FailedPreconditionError(
                "export: this process has only a part of the map; gather it first: "
                "jax.experimental.multihost_utils.process_allgather(ids, tiled=True)"
            )
        last = np.asarray(self.last)
        changed = last > since if since <= 0 else np.abs(last) > since
        if any(getattr(x, "clock", None) is not None for x in optimizer_states(state)):
            changed |= last > 0
        rows = np.flatnonzero(changed)
        ids = WideIds(*(np.asarray(x)[rows] for x in (self.low, self.high)))
        return ids.to_int64(), rows.astype(np.int32)

    def check(self, table: Any) -> None:
        """Raises if this is not the map of a table, or its arrays are another map's.

        For maps that were restored: that every owner is in its bucket tells. Maps of
        different names place ids differently.

        Args:
          table: ``[V, *D]``, or a shape.

        Raises:
          InvalidArgumentError: for a table with fewer rows; arrays of another map.

        Cost: reads the map.
        """
        height = getattr(table, "shape", table)[0]
        if height < self.num_rows:
            raise InvalidArgumentError(
                f"the map {self.name!r} has {self.num_rows} rows and the table {height}; "
                "make the table with ids.num_rows rows, or take its own map"
            )
        ids = WideIds(self.low, self.high)
        home = buckets_of(ids, self.name, self.low.shape[0] // WAYS)
        here = jnp.arange(self.low.shape[0], dtype=jnp.int32) // WAYS
        wrong = int(jnp.sum((home != here) & ~is_padding(ids)))
        if wrong:
            raise InvalidArgumentError(
                f"the map {self.name!r} has {wrong} ids in places that are not theirs: its "
                "arrays are those of another map, or of one with another name; restore "
                "each map under its own name"
            )

    def __repr__(self) -> str:
        return (
            f"IdMap({self.low.shape[0]} rows and {self.shared} shared, "
            f"policy={self.policy!r}{self.name and f', name={self.name!r}'})"
        )

    def _run(self, call: Any, ids: Any, exchange: Exchange | None) -> Any:
        _check(call.__name__, ids)
        return _run(call, exchange_of(self.low, exchange), self, ids)

    def _shared_rows(self, ids: WideIds) -> jax.Array:
        """Rows for ids that own none: the first for padding."""
        number = hashed(ids, f"{self.name}/shared") % WORD.type(self.shared)
        number = jnp.where(is_padding(ids), 0, number.astype(jnp.int32))
        return self.low.shape[0] + number


def id_map(
    num_rows: int,
    *,
    name: str = "",
    policy: Policy = "lru",
    after: int = 1,
    expire: int | None = None,
    half_life: int | None = None,
    shared: int = 1,
    devices: int = 1,
    sharding: jax.NamedSharding | None = None,
) -> IdMap:
    """An empty map from ids to the rows of a table.

    Rows are in buckets of 8; an id can be only in the one that its hash names. With half as
    many ids as rows one in 120 finds its bucket full, with as many one in 7: give twice the
    rows where nothing shall be evicted.

    Args:
      num_rows: rows for ids; rounded up so that buckets of 8 on each device are whole.
      name: that of the table; maps of different names place ids differently, so that one
        that was taken for another is found out by :meth:`IdMap.check`.
      policy: whose row a new id takes when its bucket is full. ``"lru"``: that of the owner
        that was not seen for longest. ``"lfu"``: of the one seen least often.
        ``"tinylfu"``: the same, if the new id was seen more often. ``"never"``: nobody's.
      after: an id gets a row when it is seen for this time, as counted by two counters of
        its bucket, which others may share: a count is never too low.
      expire: None, or the number of steps after which an owner that was not seen loses its
        row to any new id, in every policy.
      half_life: None, or the number of steps in which sightings count half; for
        ``"lfu"``, ``"tinylfu"`` and ``after``.
      shared: rows that ids without a row share, by their hash; at least 1.
      devices: what the number of buckets can be divided by, to split the map over devices;
        4096 leaves room for later.
      sharding: None, or where to split it over the devices of a mesh, as the table is:
        ``jax.NamedSharding(mesh, jax.P("x"))``. No device has the whole map.

    Returns:
      An :class:`IdMap`. The table needs ``ids.num_rows`` rows.

    Raises:
      InvalidArgumentError: for numbers that are too small, more than ``2**31 - 2`` rows, an
        unknown policy.

    Cost: 12 bytes a row; 4 more where sightings of owners are counted, and 16 more where
    those of others are.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> from jslices import dynamic
      >>> tx, ids = js.adagrad(0.1), dynamic.id_map(1000)
      >>> params = {"table": jnp.zeros((ids.num_rows, 2))}
      >>> @jax.jit
      ... def step(ids, params, state, batch):
      ...     ids, out = ids.admit(batch)
      ...     reset = {"table": out.fresh}, {"table": jnp.zeros(2)}
      ...     params, state = js.checkpoint.reset_rows(tx, params, state, *reset)
      ...     loss = lambda p: (p["table"][out.rows] - 1.0).sum()
      ...     params, state = tx.apply(js.grad(loss)(params), state, params)
      ...     return ids, params, state, out
      >>> batch = dynamic.wide_ids([2**40, 7, 2**40])
      >>> ids, params, state, out = step(ids, params, tx.init(params), batch)
      >>> out.found
      Array([ True,  True,  True], dtype=bool)
      >>> known, rows = ids.export()
      >>> sorted(known.tolist())
      [7, 1099511627776]
      >>> ids.find(dynamic.wide_ids([7, 8]))[1]
      Array([ True, False], dtype=bool)

    Source: the dynamic embeddings of TensorFlow Recommenders Addons and HugeCTR, whose
    tables are outside of the program; here a map is a value like any other. Buckets as in
    a set-associative cache; TinyLFU by Einziger, Friedman and Manes (2017).
    """
    OneOf("lru", "lfu", "tinylfu", "never").check("id_map", "policy", policy)
    counts = {"num_rows": num_rows, "after": after, "shared": shared, "devices": devices}
    spans = {"expire": expire, "half_life": half_life}
    for argument, x in (counts | {n: x for n, x in spans.items() if x is not None}).items():
        Number(at_least=1, integer=True).check("id_map", argument, x)
    buckets = -(-num_rows // (WAYS * devices)) * devices
    size = buckets * WAYS
    if size + shared >= NO_ROW:
        raise InvalidArgumentError(
            f"id_map({num_rows}): a table has at most 2**31 - 2 rows; take several maps"
        )
    full = functools.partial(jnp.full, device=sharding)
    zeros = functools.partial(full, fill_value=0, dtype=jnp.int32)
    hits = zeros(size) if policy in ("lfu", "tinylfu") else None
    counted = after > 1 or policy == "tinylfu"
    sightings = zeros(buckets * COUNTERS) if counted else None
    owners = full(size, NOBODY), full(size, NOBODY), zeros(size)
    arrays = *owners, hits, sightings, jnp.zeros((), jnp.int32)
    return IdMap(*arrays, name, policy, shared, after, expire, half_life)  # type: ignore[arg-type]


def _types(_call: Any, _exchange: Any, whole: IdMap, ids: WideIds) -> Any:
    """Of results on Explicit axes: rows are where the ids are, changes where the map is."""
    of_map, of_ids = (jax.typeof(x.low).sharding for x in (whole, ids))
    if of_ids.mesh.empty:  # on one device, as everything that does not say where
        of_ids = jax.NamedSharding(of_map.mesh, jax.P())
    return of_map, of_ids, of_ids, of_map


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
@on_any_mesh(_types)
def _run(call: Any, exchange: Exchange | None, whole: IdMap, ids: WideIds) -> Any:
    """A method of :class:`Part`, wherever the buckets are."""
    flat = WideIds(*(x.reshape(-1) for x in ids))
    if exchange is None:
        new, rows, changes = call(Part.of(whole, flat))
    else:
        new, rows, changes = on_each_part(call, whole, flat, exchange)
    found = rows >= 0
    rows = jnp.where(found, rows, whole._shared_rows(flat))
    return new, *(x.reshape(ids.low.shape) for x in (rows, found)), changes


def _refuse(refused: jax.Array) -> None:
    message = (
        "{refused} ids of a batch got no row: their buckets are full, or they wait "
        "for more sightings; make the map with more rows"
    )
    if isinstance(refused, jax.core.Tracer):
        checkify.check(refused == 0, message, refused=refused)
    elif int(refused):
        raise FailedPreconditionError(message.format(refused=int(refused)))


def _check(caller: str, ids: Any) -> None:
    words = [getattr(x, "dtype", None) for x in ids] if isinstance(ids, WideIds) else []
    if words != [WORD, WORD] or ids.low.shape != ids.high.shape:
        got = f"{ids.dtype}{[*ids.shape]}" if hasattr(ids, "dtype") else type(ids).__name__
        raise TypeError(
            f"{caller} wants the ids that wide_ids makes, got {got}; type "
            f"ids.{caller}(dynamic.wide_ids(...)), or pass wide_ids(...) to the jitted step"
        )
