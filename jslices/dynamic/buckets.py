"""Buckets of rows: where ids are found, and whose row a new id takes."""

import dataclasses
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jslices.dynamic.ids import NOBODY, WORD, WideIds, hashed, is_padding

#: Rows of a bucket, in one of which an id is: a lookup reads one bucket.
WAYS = 8
#: Counters of a bucket for ids without a row.
COUNTERS = 4 * WAYS
#: A row number that no table has.
NO_ROW = np.iinfo(np.int32).max
#: The worth of an owner that is in the batch.
TAKEN = np.iinfo(np.int32).max


def hashed_for(use: str, name: str, ids: WideIds) -> jax.Array:
    """A hash of ids, another for each use in the map of each name: uint32."""
    return hashed(ids, zlib.crc32(f"{name}/{use}".encode()))


def buckets_of(ids: WideIds, name: str, count: int) -> jax.Array:
    return (hashed_for("bucket", name, ids) % WORD.type(count)).astype(jnp.int32)


class Changes(NamedTuple):
    """What changes in a part; see :class:`Admitted`."""

    fresh: jax.Array
    evicted: WideIds
    refused: jax.Array


class Part(NamedTuple):
    """The buckets of a map that one device has: all of them on one device.

    A *place* of an id is one in the arrays of this part, their size if it has none.
    """

    map: Any  #: an IdMap with the arrays of these buckets,
    number: Any  #: int32 ``[]``, which part it is,
    parts: int  #: of how many.

    @property
    def size(self) -> int:
        return self.map.low.shape[0]

    def owner(self, ids: WideIds) -> jax.Array:
        """The number of the part to which ids belong; that of parts for padding."""
        count = self.size // WAYS
        number = buckets_of(ids, self.map.name, count * self.parts) // count
        return jnp.where(is_padding(ids), self.parts, number)

    def find(self, ids: WideIds) -> tuple[Any, jax.Array, None]:
        return self.map, self._rows(self._places(ids, *self._buckets(ids))), None

    def evict(self, ids: WideIds) -> tuple[Any, jax.Array, None]:
        old, place = self.map, self._places(ids, *self._buckets(ids))
        low, high = (x.at[place].set(NOBODY, mode="drop") for x in (old.low, old.high))
        last = old.last.at[place].set(-1 - old.step, mode="drop")
        new = dataclasses.replace(old, low=low, high=high, last=last)
        return new, self._rows(place), None

    def admit(self, ids: WideIds) -> tuple[Any, jax.Array, Changes]:
        old, size, step = self.map, self.size, self.map.step + 1
        bucket, own = self._buckets(ids)
        place = self._places(ids, bucket, own)
        last, hits = self._seen(place, step)
        sightings, sighted = self._sighted(ids, bucket, own & (place == size), step)
        wanted = own & (sighted >= old.after)
        start = _Claims(
            *(old.low, old.high, last, hits, place),
            fresh=jnp.zeros_like(own),
            evicted=WideIds(*(jnp.full_like(x, NOBODY) for x in ids)),
            goes_on=jnp.any(wanted & (place == size)),
        )

        def claim(claims: _Claims) -> _Claims:
            return self._claim(claims, ids, bucket, wanted, sighted, step)

        end = lax.while_loop(lambda claims: claims.goes_on, claim, start)
        new = dataclasses.replace(
            old,
            **{"low": end.low, "high": end.high, "last": end.last, "hits": end.hits},
            **{"sightings": sightings, "step": step},
        )
        rows = self._rows(end.place)
        fresh = jnp.where(end.fresh, rows, NO_ROW)
        refused = jnp.sum(own & (rows < 0), dtype=jnp.int32)
        return new, rows, Changes(fresh, end.evicted, refused)

    def _rows(self, place: jax.Array) -> jax.Array:
        return jnp.where(place < self.size, self.number * self.size + place, -1)

    def _buckets(self, ids: WideIds) -> tuple[jax.Array, jax.Array]:
        """The bucket of this part to which an id belongs, and whether it does to any."""
        count = self.size // WAYS
        bucket = buckets_of(ids, self.map.name, count * self.parts) - self.number * count
        own = (bucket >= 0) & (bucket < count) & ~is_padding(ids)
        return jnp.where(own, bucket, 0), own

    def _places(self, ids: WideIds, bucket: jax.Array, own: jax.Array) -> jax.Array:
        owners = (_ways(x, bucket) for x in (self.map.low, self.map.high))
        low, high = (x == y[:, None] for x, y in zip(owners, ids, strict=True))
        is_it = low & high & own[:, None]
        place = bucket * WAYS + jnp.argmax(is_it, 1).astype(jnp.int32)
        return jnp.where(jnp.any(is_it, 1), place, self.size)

    def _seen(self, place: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``last`` and ``hits`` with owners that are seen in this step."""
        last, hits = self.map.last, self.map.hits
        if hits.size:
            if self.map.half_life is not None:
                used, seen = (
                    x.at[place].get(mode="fill", fill_value=0) for x in (hits, last)
                )
                hits = hits.at[place].set(self._aged(used, step - seen), mode="drop")
            hits = hits.at[place].add(1, mode="drop")
        return last.at[place].set(step, mode="drop"), hits

    def _aged(self, count: jax.Array, age: jax.Array) -> jax.Array:
        if self.map.half_life is None:
            return count
        return count >> jnp.minimum(age // self.map.half_life, 31)

    def _sighted(
        self, ids: WideIds, bucket: jax.Array, new: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The counters with this batch, and how often each id was seen."""
        counters = self.map.sightings
        if not counters.size:
            return counters, jnp.ones_like(bucket)
        if self.map.half_life is not None:
            counters = lax.cond(
                step % self.map.half_life == 0, lambda x: x >> 1, lambda x: x, counters
            )
        # Two different counters of its bucket.
        bits = hashed_for("sightings", self.map.name, ids)
        one = (bits % COUNTERS).astype(jnp.int32)
        two = (one + 1 + ((bits >> 8) % (COUNTERS - 1)).astype(jnp.int32)) % COUNTERS
        at = jnp.stack([bucket * COUNTERS + one, bucket * COUNTERS + two])
        counters = counters.at[jnp.where(new, at, counters.size)].add(1, mode="drop")
        return counters, jnp.min(counters.at[at].get(mode="promise_in_bounds"), 0)

    def _claim(
        self,
        claims: "_Claims",
        ids: WideIds,
        bucket: jax.Array,
        wanted: jax.Array,
        sighted: jax.Array,
        step: jax.Array,
    ) -> "_Claims":
        """One new id a bucket gets a row: that which comes first in the batch."""
        low, high, last, hits, place, fresh, evicted, _ = claims
        size, count = self.size, place.shape[0]
        worth = self._worth(last, hits, bucket, step)
        way = jnp.argmin(worth, 1).astype(jnp.int32)
        least = jnp.min(worth, 1)
        most: Any = {"never": 1, "tinylfu": jnp.maximum(sighted, 1)}.get(
            self.map.policy, TAKEN
        )
        may = wanted & (place == size) & (least < most)
        claimed = bucket * WAYS + way
        # Who is first in each cell of a small array; the more cells, the fewer try again.
        cells = 1 << (8 * count).bit_length()
        cell = jnp.where(may, claimed & (cells - 1), cells)
        here = jnp.arange(count, dtype=jnp.int32)
        winner = jnp.full(cells, count, jnp.int32).at[cell].min(here, mode="drop")
        winner = winner.at[cell].get(mode="fill", fill_value=count)
        same = [x == x.at[winner].get(mode="clip") for x in (claimed, *ids)]
        mine = may & same[0] & same[1] & same[2]
        first = mine & (winner == here)
        to = jnp.where(first, claimed, size)
        before = [x.at[to].get(mode="fill", fill_value=NOBODY) for x in (low, high)]
        # What is read is read before it is written, or XLA copies the arrays.
        low, high, last, hits, before, to = lax.optimization_barrier(
            (low, high, last, hits, before, to)
        )
        if hits.size:
            hits = hits.at[to].set(0, mode="drop")
            hits = hits.at[jnp.where(mine, claimed, size)].add(1, mode="drop")
        return _Claims(
            low=low.at[to].set(ids.low, mode="drop"),
            high=high.at[to].set(ids.high, mode="drop"),
            last=last.at[to].set(step, mode="drop"),
            hits=hits,
            place=jnp.where(mine, claimed, place),
            fresh=fresh | first,
            evicted=WideIds(
                *(jnp.where(first, x, y) for x, y in zip(before, evicted, strict=True))
            ),
            goes_on=jnp.any(first) & jnp.any(wanted & ~mine & (place == size)),
        )

    def _worth(
        self, last: jax.Array, hits: jax.Array, bucket: jax.Array, step: jax.Array
    ) -> jax.Array:
        """``[K, 8]``: below 1 for whose place is free; who is in the batch keeps it."""
        seen = _ways(last, bucket)
        if self.map.policy == "lru":
            worth = seen
        elif self.map.policy == "never":
            worth = jnp.ones_like(seen)
        else:
            worth = 1 + self._aged(_ways(hits, bucket), step - seen)
        if self.map.expire is not None:
            worth = jnp.where(step - seen > self.map.expire, 0, worth)
        worth = jnp.where(seen <= 0, -1, worth)
        return jnp.where(seen == step, TAKEN, worth)


class _Claims(NamedTuple):
    """The state of the loop in which new ids get rows."""

    low: jax.Array
    high: jax.Array
    last: jax.Array
    hits: jax.Array
    place: jax.Array  #: int32 ``[K]``
    fresh: jax.Array  #: bool ``[K]``
    evicted: WideIds
    goes_on: jax.Array


def _ways(x: jax.Array, bucket: jax.Array) -> jax.Array:
    """What an array has for each place of some buckets: ``[K, 8]``."""
    at = lambda b: lax.dynamic_slice(x, (b * WAYS,), (WAYS,))  # noqa: E731
    return jax.vmap(at)(bucket)
