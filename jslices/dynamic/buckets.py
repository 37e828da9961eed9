"""Buckets of rows: where ids are found, and whose row a new id takes."""

import dataclasses
import functools
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
        bucket, own = self._buckets(ids)
        place = self._places(ids, bucket, own)
        new = self._seen(place)
        new, sighted = self._sighted(new, ids, bucket, own & (place == self.size))
        wanted = own & (sighted >= new.after)
        evicted = WideIds(*(jnp.full_like(x, NOBODY) for x in ids))
        claims = (
            new,
            place,
            jnp.zeros_like(own),
            evicted,
            jnp.any(wanted & (place == self.size)),
        )
        new, place, is_fresh, evicted, _ = lax.while_loop(
            lambda claims: claims[-1],
            functools.partial(self._claim, ids, bucket, wanted, sighted),
            claims,
        )
        rows = self._rows(place)
        fresh = jnp.where(is_fresh, rows, NO_ROW)
        refused = jnp.sum(own & (rows < 0), dtype=jnp.int32)
        return new, rows, Changes(fresh, evicted, refused)

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

    def _seen(self, place: jax.Array) -> Any:
        """The map in the next step, in which some owners are seen."""
        old, step, hits, seen = self.map, self.map.step + 1, self.map.hits, 0
        if hits.size:
            used, seen = (
                x.at[place].get(mode="fill", fill_value=0) for x in (hits, old.last)
            )
            hits = hits.at[place].set(self._aged(used, step - seen), mode="drop")
            hits = hits.at[place].add(1, mode="drop")
        # The new value depends on the old one, or XLA keeps both arrays.
        last = old.last.at[place].set(jnp.maximum(step, seen), mode="drop")
        return dataclasses.replace(old, last=last, hits=hits, step=step)

    def _aged(self, count: jax.Array, age: jax.Array) -> jax.Array:
        return count >> jnp.minimum(age // (self.map.half_life or 2**30), 31)

    def _sighted(
        self, new: Any, ids: WideIds, bucket: jax.Array, without: jax.Array
    ) -> tuple[Any, jax.Array]:
        """The map that counts ids without a row, and how often each was seen."""
        counters = new.sightings
        if not counters.size:
            return new, jnp.ones_like(bucket)
        if new.half_life is not None:
            counters = lax.cond(
                new.step % new.half_life == 0, lambda x: x >> 1, lambda x: x, counters
            )
        # Two different counters of its bucket.
        bits = hashed_for("sightings", new.name, ids)
        one = (bits % COUNTERS).astype(jnp.int32)
        two = (one + 1 + ((bits >> 8) % (COUNTERS - 1)).astype(jnp.int32)) % COUNTERS
        at = jnp.stack([bucket * COUNTERS + one, bucket * COUNTERS + two])
        counters = counters.at[jnp.where(without, at, counters.size)].add(1, mode="drop")
        sighted = jnp.min(counters.at[at].get(mode="promise_in_bounds"), 0)
        return dataclasses.replace(new, sightings=counters), sighted

    def _claim(
        self,
        ids: WideIds,
        bucket: jax.Array,
        wanted: jax.Array,
        sighted: jax.Array,
        claims: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """One new id a bucket gets a row: that which comes first in the batch."""
        old, place, is_fresh, evicted, _ = claims
        size, count = self.size, place.shape[0]
        worth = self._worth(old, bucket)
        least, way = jnp.min(worth, 1), jnp.argmin(worth, 1).astype(jnp.int32)
        most = {"never": jnp.int32(1), "tinylfu": jnp.maximum(sighted, 1)}
        may = wanted & (place == size) & (least < most.get(old.policy, jnp.int32(TAKEN)))
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
        before = [x.at[to].get(mode="fill", fill_value=NOBODY) for x in (old.low, old.high)]
        hits = old.hits
        if hits.size:
            hits = hits.at[to].set(0, mode="drop")
            hits = hits.at[jnp.where(mine, claimed, size)].add(1, mode="drop")
        new = dataclasses.replace(
            old,
            low=old.low.at[to].set(ids.low, mode="drop"),
            high=old.high.at[to].set(ids.high, mode="drop"),
            last=old.last.at[to].set(old.step, mode="drop"),
            hits=hits,
        )
        gone = (jnp.where(first, x, y) for x, y in zip(before, evicted, strict=True))
        place = jnp.where(mine, claimed, place)
        goes_on = jnp.any(first) & jnp.any(wanted & (place == size))
        return new, place, is_fresh | first, WideIds(*gone), goes_on

    def _worth(self, old: Any, bucket: jax.Array) -> jax.Array:
        """``[K, 8]``: below 1 for whose place is free; who is in the batch keeps it."""
        seen = _ways(old.last, bucket)
        age = old.step - seen
        if old.hits.size:
            worth = 1 + self._aged(_ways(old.hits, bucket), age)
        else:
            worth = jnp.ones_like(seen) if old.policy == "never" else seen
        if old.expire is not None:
            worth = jnp.where(age > old.expire, 0, worth)
        worth = jnp.where(seen <= 0, -1, worth)
        return jnp.where(age == 0, TAKEN, worth)


def _ways(x: jax.Array, bucket: jax.Array) -> jax.Array:
    """What an array has for each place of some buckets: ``[K, 8]``."""
    at = lambda b: lax.dynamic_slice(x, (b * WAYS,), (WAYS,))  # noqa: E731
    return jax.vmap(at)(bucket)
