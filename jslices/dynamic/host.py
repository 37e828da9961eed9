"""Host-side map of ids, in memory or in a file; a batch reads only its own buckets."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices.dynamic.buckets import COUNTERS, WAYS, Part, buckets_of
from jslices.dynamic.ids import NOBODY, WideIds, is_padding
from jslices.dynamic.maps import IdMap


class Batch(NamedTuple):
    """What a call finds for ids ``[K]``, and what it changes; without a map nothing."""

    rows: np.ndarray  #: int64 ``[K]``, -1 for padding
    changed: Any = ()  #: int64, ascending, rows whose owner is another now, or gone
    numbers: Any = ()  #: int64 ``[8 n]``, ascending, the rows of the ids' n buckets
    entries: Any = ()  #: uint32 ``[8 n, width]``, of these rows
    sightings: Any = ()  #: int32 ``[n, 32]`` or ``[n, 0]``

    def entries_of(self, rows: np.ndarray) -> np.ndarray:
        """The entries of rows of these buckets; zeros for those that are shared."""
        entries = np.append(self.entries, np.zeros_like(self.entries[:1]), axis=0)
        return entries[np.searchsorted(self.numbers, rows)]  # type: ignore[no-any-return]


class HostIdMap:
    """A map whose arrays are entries uint32 ``[V, width]``, which the caller keeps.

    An entry is that of a row: the words of its owner, inverted, so that a row that never
    had one is zero; ``hits`` if they are counted; ``last``. ``sightings`` are kept here.
    """

    def __init__(self, like: IdMap) -> None:
        self._like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
        self.size = like.low.shape[0]
        self.width = 3 if like.hits is None else 4
        counters = 0 if like.sightings is None else COUNTERS
        self.sightings = np.zeros((self.size // WAYS, counters), np.int32)
        names = ("name", "shared", "policy", "after", "expire", "half_life")
        options = ", ".join(f"{name}={getattr(like, name)!r}" for name in names)
        self.made_by = f"dynamic.id_map({self.size}, {options})"  #: what to type.

    def run(
        self, call: str, ids: WideIds, entries: np.ndarray, step: int, later: Sequence[Any]
    ) -> Batch:
        """Run a method of :class:`Part` for ids ``[K]`` of NumPy; nothing changes here.

        ``later`` have ``rows`` with the entries that their ``batch`` says.
        """
        count = len(ids.low)
        room = 1 << max(0, count - 1).bit_length()  # each size is compiled
        ids = WideIds(*(np.pad(x, (0, room - count), constant_values=NOBODY) for x in ids))
        home: Any = buckets_of(ids, self._like.name, self.size // WAYS)
        buckets = np.unique(home)
        numbers = (buckets[:, None] * np.int64(WAYS) + np.arange(WAYS)).reshape(-1)
        by_bucket = entries[: self.size].reshape(-1, WAYS * self.width)
        old = by_bucket[buckets].reshape(-1, self.width)
        for step_before in later:
            both = np.intersect1d(numbers, step_before.rows, True)
            old[np.searchsorted(numbers, both)] = step_before.batch.entries_of(both)
        fill = lambda x, n: np.resize(x, (n * room, x.shape[1]))  # noqa: E731
        part = self.to_map(fill(old, WAYS), fill(self.sightings[buckets], 1), step)
        chosen = np.pad(buckets, (0, room - len(buckets)), "edge")
        with _on_the_host():
            new, rows = jax.device_get(_run(call, self._like, part, chosen, ids))
        hits = [] if new.hits is None else [new.hits]
        columns = ~new.low, ~new.high, *hits, new.last
        now = np.stack([x.view(np.uint32) for x in columns], 1)[: len(old)]
        changed = numbers[(old[:, :2] != now[:, :2]).any(1)]
        counters = np.zeros(0, np.int32) if new.sightings is None else new.sightings
        sightings = counters.reshape(room, self.sightings.shape[1])[: len(buckets)]
        return Batch(rows[:count].astype(np.int64), changed, numbers, now, sightings)

    def keep(self, batch: Batch, step: int) -> None:
        """Keep the sightings of a batch, that of step number ``step``."""
        if self._like.half_life is not None and step % self._like.half_life == 0:
            self.sightings >>= 1
        self.sightings[batch.numbers[::WAYS] // WAYS] = batch.sightings

    def to_map(self, entries: np.ndarray, sightings: np.ndarray, step: int) -> IdMap:
        """A copy of some entries as a map of NumPy's arrays."""
        low, high, *hits, last = entries.T
        arrays = {"low": ~low, "high": ~high, "last": last.astype(np.int32)}
        arrays["hits"] = hits[0].astype(np.int32) if hits else None
        arrays["sightings"] = sightings.flatten() if sightings.size else None
        arrays["step"] = np.asarray(step, np.int32)
        return dataclasses.replace(self._like, **arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(call: str, like: IdMap, part: IdMap, chosen: jax.Array, ids: WideIds) -> Any:
    """What a call does to some buckets, whose numbers ascend, and the rows in all."""
    bucket = buckets_of(ids, like.name, like.low.shape[0] // WAYS)
    bucket, own = jnp.searchsorted(chosen, bucket).astype(jnp.int32), ~is_padding(ids)
    new, place, _ = getattr(Part(part, 0, ids, bucket, own), call)()
    rows = chosen.at[place // WAYS].get(mode="clip") * WAYS + place % WAYS
    rows = jnp.where(place < 0, like._shared_rows(ids), rows)
    return new, jnp.where(own, rows, -1)


def _on_the_host() -> contextlib.AbstractContextManager[Any]:
    with contextlib.suppress(RuntimeError):  # where JAX was told to leave the CPU out
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    return contextlib.nullcontext()
