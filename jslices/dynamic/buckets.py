"""Buckets of rows: where ids are found, and whose row a new id takes."""

import dataclasses
import functools
import operator
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
#: A row number that no table has, and the worth of an owner that is in the batch.
NO_ROW = TAKEN = np.iinfo(np.int32).max


def buckets_of(ids: WideIds, name: str, count: int) -> jax.Array:
    return (hashed(ids, f"{name}/bucket") % WORD.type(count)).astype(jnp.int32)


class Part(NamedTuple):
    """The buckets of a map that one device has, all on one device, and ids ``[n]``.

    A *place* of an id is one in the arrays of this part, their size if it has none. Every
    method returns the part, the rows of the ids or -1, and other results.
    """

    map: Any  #: an IdMap with the arrays of these buckets.
    start: Any  #: int32 ``[]``, the row of the first place.
    ids: WideIds
    bucket: jax.Array  #: of each id, 0 where it belongs to another part.
    own: jax.Array  #: bool, whether it belongs to this one.

    @classmethod
    def of(cls, map: Any, ids: WideIds, number: Any = 0, parts: int = 1) -> "Part":
        count = map.low.shape[0] // WAYS
        bucket = buckets_of(ids, map.name, count * parts) - number * count
        own = (bucket >= 0) & (bucket < count) & ~is_padding(ids)
        return cls(map, number * count * WAYS, ids, jnp.where(own, bucket, 0), own)

    def find(self) -> tuple[Any, jax.Array, Any]:
        return self.map, self._rows(self._places()), ()

    def evict(self) -> tuple[Any, jax.Array, Any]:
        place = self._places()
        new = _owned(self.map, place, WideIds(NOBODY, NOBODY), -1 - self.map.step)
        return new, self._rows(place), ()

    def admit(self) -> tuple[Any, jax.Array, Any]:
        place = self._places()
        new, sightings = self._sighted(self._seen(place), place)
        part = self._replace(own=self.own & (sightings >= new.after))
        nobody = WideIds(*(jnp.full_like(x, NOBODY) for x in self.ids))
        waits = jnp.any(part._waits(place))
        claims = new, place, jnp.zeros_like(self.own), nobody, waits
        claim = functools.partial(part._claim, sightings)
        claims = lax.while_loop(lambda claims: claims[-1], claim, claims)
        new, place, is_fresh, evicted, _ = claims
        rows = self._rows(place)
        refused = jnp.sum(self._waits(place), dtype=jnp.int32)
        return new, rows, (jnp.where(is_fresh, rows, NO_ROW), evicted, refused)

    def _rows(self, place: jax.Array) -> jax.Array:
        return jnp.where(place < self.map.low.shape[0], self.start + place, -1)

    def _places(self) -> jax.Array:
        owners = (_ways(x, self.bucket) for x in (self.map.low, self.map.high))
        low, high = (x == y[:, None] for x, y in zip(owners, self.ids, strict=True))
        is_it = low & high & self.own[:, None]
        place = self.bucket * WAYS + jnp.argmax(is_it, 1).astype(jnp.int32)
        return jnp.where(jnp.any(is_it, 1), place, self.map.low.shape[0])

    def _waits(self, place: jax.Array) -> jax.Array:
        """Which ids of this part have no place."""
        return self.own & (place == self.map.low.shape[0])

    def _seen(self, place: jax.Array) -> Any:
        """The map in the next step, in which some owners are seen."""
        old, step, hits, seen = self.map, self.map.step + 1, self.map.hits, 0
        if hits is not None:
            at = lambda x: x.at[place].get(mode="fill", fill_value=0)  # noqa: E731
            used, seen = at(hits), at(old.last)
            hits = hits.at[place].set(self._aged(used, step - seen), mode="drop")
            hits = hits.at[place].add(1, mode="drop")
        # The new value depends on the old one, or XLA keeps both arrays.
        last = old.last.at[place].set(jnp.maximum(step, seen), mode="drop")
        return dataclasses.replace(old, last=last, hits=hits, step=step)

    def _aged(self, count: jax.Array, age: jax.Array) -> jax.Array:
        return count >> jnp.minimum(age // (self.map.half_life or 2**30), 31)

    def _sighted(self, new: Any, place: jax.Array) -> tuple[Any, jax.Array]:
        """The map that counts ids without a row, and how often each was seen."""
        counters = new.sightings
        if counters is None:
            return new, jnp.ones_like(place)
        if new.half_life is not None:
            halves = new.step % new.half_life == 0
            counters = lax.cond(halves, lambda x: x >> 1, lambda x: x, counters)
        # Two different counters of its bucket.
        bits = hashed(self.ids, f"{new.name}/sightings")
        one = (bits % COUNTERS).astype(jnp.int32)
        two = (one + 1 + ((bits >> 8) % (COUNTERS - 1)).astype(jnp.int32)) % COUNTERS
        at = jnp.stack([self.bucket * COUNTERS + x for x in (one, two)])
        counted = jnp.where(self._waits(place), at, counters.size)
        counters = counters.at[counted].add(1, mode="drop")
        sightings = jnp.min(counters.at[at].get(mode="promise_in_bounds"), 0)
        return dataclasses.replace(new, sightings=counters), sightings

    def _claim(self, sightings: jax.Array, claims: tuple[Any, ...]) -> tuple[Any, ...]:
        """One new id a bucket gets a row: that which comes first in the batch."""
        old, place, is_fresh, evicted, _ = claims
        size, count = old.low.shape[0], place.shape[0]
        worth = self._worth(old)
        least, way = jnp.min(worth, 1), jnp.argmin(worth, 1).astype(jnp.int32)
        most: dict[str, Any] = {"never": 1, "tinylfu": jnp.maximum(sightings, 1)}
        may = self._waits(place) & (least < most.get(old.policy, TAKEN))
        claimed = self.bucket * WAYS + way
        # Who is first in each cell of a small array; the more cells, the fewer try again.
        cells = 1 << (8 * count).bit_length()
        cell = jnp.where(may, claimed & (cells - 1), cells)
        here = jnp.arange(count, dtype=jnp.int32)
        winner = jnp.full(cells, count, jnp.int32).at[cell].min(here, mode="drop")
        winner = winner.at[cell].get(mode="fill", fill_value=count)
        same = (x == x.at[winner].get(mode="clip") for x in (claimed, *self.ids))
        mine = functools.reduce(operator.and_, same, may)
        first = mine & (winner == here)
        to = jnp.where(first, claimed, size)
        before = [x.at[to].get(mode="fill", fill_value=NOBODY) for x in (old.low, old.high)]
        new = _owned(old, to, self.ids, old.step)
        if old.hits is not None:
            hits = old.hits.at[to].set(0, mode="drop")
            hits = hits.at[jnp.where(mine, claimed, size)].add(1, mode="drop")
            new = dataclasses.replace(new, hits=hits)
        gone = (jnp.where(first, x, y) for x, y in zip(before, evicted, strict=True))
        place = jnp.where(mine, claimed, place)
        goes_on = jnp.any(first) & jnp.any(self._waits(place))
        return new, place, is_fresh | first, WideIds(*gone), goes_on

    def _worth(self, old: Any) -> jax.Array:
        """``[n, 8]``: below 1 for whose place is free; who is in the batch keeps it."""
        seen = _ways(old.last, self.bucket)
        age = old.step - seen
        if old.hits is not None:
            worth = 1 + self._aged(_ways(old.hits, self.bucket), age)
        else:
            worth = jnp.ones_like(seen) if old.policy == "never" else seen
        if old.expire is not None:
            worth = jnp.where(age > old.expire, 0, worth)
        worth = jnp.where(seen <= 0, -1, worth)
        return jnp.where(age == 0, TAKEN, worth)


def _owned(old: Any, place: jax.Array, ids: WideIds, last: jax.Array) -> Any:
    """The map in which ids own some places, and were last seen then."""
    put = lambda x, new: x.at[place].set(new, mode="drop")  # noqa: E731
    low, high = map(put, (old.low, old.high), ids)
    return dataclasses.replace(old, low=low, high=high, last=put(old.last, last))


def _ways(x: jax.Array, bucket: jax.Array) -> jax.Array:
    """What an array has for each place of some buckets: ``[n, 8]``."""
    at = lambda b: lax.dynamic_slice(x, (b * WAYS,), (WAYS,))  # noqa: E731
    return jax.vmap(at)(bucket)
