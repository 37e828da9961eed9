"""The memory that the measurement needs, before any of it is taken."""

from pathlib import Path

import jax
import jax.numpy as jnp

from jslices._bench.sizes import ID_BYTES, Sizes
from jslices._bench.ways import ALL_ROWS, way_of

MEMINFO = Path("/proc/meminfo")
USABLE = 0.9  # of what is available: other programs go on needing some
BATCHES = 16
#: The size of each of the two arrays by which the bandwidth is measured.
COPY_BYTES = 1 << 27


def needed_by_rows(sizes: Sizes, platform: str) -> int:
    """Table, state, ids, and at most so many bytes of temporaries, with row gradients."""
    kept = sizes.table_bytes + sizes.state_bytes + BATCHES * sizes.ids * ID_BYTES
    # In float32 even where the table is not.
    temporaries = 6 * sizes.ids * (sizes.dim * 4 + ID_BYTES)
    if way_of(sizes, platform) == ALL_ROWS:
        temporaries += 4 * sizes.rows * (sizes.dim * 4 + ID_BYTES)
    elif platform == "cpu" and jnp.dtype(sizes.dtype).itemsize < 4:
        # XLA:CPU scatters in float32: it widens what it scatters into, all of it.
        temporaries += 2 * (sizes.table_bytes + sizes.state_bytes)
    return kept + temporaries


def needed_by_dense(sizes: Sizes) -> int:
    """The same with dense gradients: a gradient and an update of the table's size."""
    kept = sizes.table_bytes + sizes.state_bytes
    return kept + 2 * sizes.rows * sizes.dim * 4 + 2 * sizes.ids * sizes.dim * 4


def available(device: jax.Device) -> int | None:
    """Bytes that can still be taken, or None where nothing tells."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int((stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * USABLE)
    if device.platform != "cpu" or not MEMINFO.exists():
        return None
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * USABLE)
    return None


def largest_rows(sizes: Sizes, platform: str, room: int) -> int:
    """The most rows with which row gradients fit into ``room`` bytes; 0 if none do."""
    low, high = 0, sizes.rows
    while high - low > 1:
        middle = (low + high) // 2
        fits = needed_by_rows(sizes.but(rows=middle), platform) <= room
        low, high = (middle, high) if fits else (low, middle)
    return low
