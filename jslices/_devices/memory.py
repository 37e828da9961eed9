"""Keeping the memory of temporaries from one step to the next, on a CPU under Linux."""

import ctypes
import os
import platform
import re

from jax._src import xla_bridge

# From glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8

#: Of gradients of so many bytes each further array counts: with four of them a step needs
#: 16 MB and more, which ``malloc`` may take from the operating system each time, depending
#: on what the process freed before. Then a step with 1e4 ids of 128 takes 0.7 to 0.9 of the
#: time with one array, else as long; with 2.6 MB it takes 1.06 of the time where it does
#: not (medians; docs/speed.md).
LARGE = 4 * 10**6
#: What is larger ``malloc`` takes from the operating system each time.
MAPPED = 2**25
#: Rows of fewer bytes are not worth what is done to have one array less.
SHORT = 128

_called = False


def is_large(num_rows: int, row_bytes: int) -> bool:
    """Whether a gradient is better summed and updated where it is."""
    return row_bytes >= SHORT and num_rows * row_bytes >= LARGE


def is_mapped(num_bytes: int) -> bool:
    """Whether a temporary of so many bytes costs a page fault for each of its pages."""
    return num_bytes > MAPPED and not memory_is_cheap()


def memory_is_cheap() -> bool:
    """Whether the process was told to keep what it frees, or to use large pages."""
    large_pages = re.search(r"malloc\.hugetlb=[12]", os.environ.get("GLIBC_TUNABLES", ""))
    return _called or large_pages is not None


def keep_memory() -> None:
    """Lets this process keep memory that it has freed, so that large steps run faster.

    XLA:CPU allocates the temporaries of a program at each execution. What is larger than 32
    MB, glibc's ``malloc`` takes from the operating system every time and gives back after
    it, and the step then waits for tens of thousands of page faults. After this call freed
    memory stays with the process and, from the first dozen steps on, is used again. At
    V = 1e6, D = 128 and 1e5 ids a step of Adam makes 13,800 page faults without it and none
    with it, and takes half to four fifths of the time; steps whose gradients are
    below 4 MB do not change.

    Call it once, at the start of the program: before JAX computes anything. It holds for
    the whole process, for NumPy and other libraries as well: what they free is no longer
    given back before the process ends, so the most that was ever in use stays taken.

    The same without a line of code: ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python
    train.py``, which makes the pages larger instead.

    Raises:
      RuntimeError: if JAX has started its devices, as its threads then have their memory
        already; or if the allocator is not glibc's.

    Example:
      >>> import jslices as js
      >>> js.keep_memory()  # doctest: +SKIP
      >>> import jax.numpy as jnp

    Source: the parameters of ``mallopt`` in the manual of glibc. TensorFlow and PyTorch
    bring allocators of their own for this.
    """
    if platform.libc_ver()[0] != "glibc":
        raise RuntimeError(
            f"keep_memory() sets glibc's malloc, which this {platform.system()} does not "
            "have; leave it out"
        )
    # Private, and only a courtesy: without it a late call would do nothing, in silence.
    started = getattr(xla_bridge, "backends_are_initialized", lambda: False)
    if started():
        raise RuntimeError(
            "keep_memory() came after JAX had started its devices; call it at the start of "
            "the program, before the first array is made"
        )
    mallopt = ctypes.CDLL(None).mallopt
    # No mapping for single arrays, nothing given back, and one heap for all threads: those
    # of others are limited to 64 MB, beyond which arrays are mapped again.
    for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1)):
        if not mallopt(parameter, value):
            raise RuntimeError(f"mallopt({parameter}, {value}) was refused")
    global _called
    _called = True
