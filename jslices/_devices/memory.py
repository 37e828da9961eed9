"""Keeping the memory of temporaries from one step to the next, on a CPU under Linux."""

import ctypes
import os
import platform
import re
import warnings

import jax
from jax._src import xla_bridge

from jslices._densify import current_user_line

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

#: From gradients of so many bytes on a step without kept memory takes about 1.5 times as
#: long as with it (1.2 to 2.1 over optimizers, widths and ids; V = 1e6 and 1e5).
HINT_BYTES = 16 * 10**6

_called = False
_hinted = False


class PerformanceHint(UserWarning):
    """A program is right, but one line would make it faster: the text says which.

    Issued at most once in a process, while a step is traced. Silence it with
    ``warnings.simplefilter("ignore", jslices.PerformanceHint)``.
    """


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


def hint_large_step(num_bytes: int) -> None:
    """Says, once in a process, what a large step on a CPU loses without kept memory.

    Silent below 16 MB, on accelerators, with any allocator but glibc's, after
    ``keep_memory()``, and with large pages. The warning points at the user's line.

    Args:
      num_bytes: of the values of the gradient, ``K * D * itemsize``.
    """
    global _hinted
    if _hinted or num_bytes < HINT_BYTES or memory_is_cheap():
        return
    if jax.default_backend() != "cpu" or platform.libc_ver()[0] != "glibc":
        return
    _hinted = True
    line = current_user_line()
    warnings.warn_explicit(
        f"this step has a gradient of {num_bytes / 1e6:.0f} MB, and the operating system "
        "maps the temporaries of such a step anew each time: it takes about 1.5 times as "
        "long as it could (1.2 to 2.1). Call jslices.keep_memory() at the start of the "
        "program, or run it with GLIBC_TUNABLES=glibc.malloc.hugetlb=1",
        PerformanceHint,
        filename=line.file,
        lineno=line.line,
    )
