"""Settings for all tests, made before JAX starts."""

import ctypes
import gc
import os
import pathlib
import platform
import shutil
import sys
import tempfile
import threading

from cpu_seconds import CpuSeconds
from draws import examples
from quick_flags import quick_flags

# Fewer heaps: each thread that compiles would otherwise keep one of its own.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")  # its default is TensorFlow
os.environ["XLA_FLAGS"] = f"{quick_flags()} {os.environ.get('XLA_FLAGS', '')}"

import hypothesis
import jax
import pytest
from jax._src import pjit
from jax._src.interpreters import mlir, pxla
from jax._src.lib.mlir import ir

jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes single examples slow, and that says nothing about the code. Who asks for
# more programs than the tests draw gets others each time, but for CI.
hypothesis.settings.register_profile(
    "default",
    examples(30),  # of 100; more find nothing that new numbers the next time do not
    deadline=None,
    derandomize="JSLICES_PROGRAMS" not in os.environ or "CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")

# Many tests trace anew what XLA has compiled for another one, or for another worker of
# pytest-xdist: what it compiles is kept for the session, or in the folder that
# JSLICES_COMPILED names, for the next one. Processes that tests start do not take part, as
# some are killed in the middle of something.
KEPT = "jslices_compiled"
#: From so many bytes on a worker forgets what was compiled, between any two tests.
ROOM = 8 * 10**8
#: And again after so many more.
GROWTH = 2 * 10**8


def pytest_configure(config):
    if jax.__version_info__ < (0, 11):
        mlir.make_ir_context = ReusedContext(mlir.make_ir_context)
    if hasattr(config, "workerinput"):
        folder = config.workerinput[KEPT]
    elif folder := os.environ.get("JSLICES_COMPILED"):
        pass
    else:
        folder = tempfile.mkdtemp(prefix=KEPT)
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.jslices_compiled = folder
    config.pluginmanager.register(ForgetWhatNoLongerFits())
    if file := os.environ.get("JSLICES_CPU_SECONDS"):
        config.pluginmanager.register(CpuSeconds(file))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput[KEPT] = node.config.jslices_compiled


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """No test has a doctest, and to look for them takes a second."""
    return [found for found in (yield) if type(found) is pytest.Module]


@pytest.fixture(autouse=True)
def _forget_shown_warnings():
    """Every test sees a warning as if for the first time."""
    from jslices import _densify

    _densify._registry.clear()
    yield


@pytest.fixture(scope="module", autouse=True)
def _forget_what_was_lowered():
    """Two thirds of what a program holds, and read by its compilation alone."""
    yield
    forget_what_was_lowered()


class ReusedContext(threading.local):
    """A context for ten programs one after another, as later releases of JAX have it.

    To make one takes a fifth of what a program of one operation does. A program that is
    compiled while another one is lowered (the noise of a key) has its own.
    """

    programs = 10

    def __init__(self, make):
        self.make = make
        self.left = 0

    def __call__(self):
        if ir.Context.current is not None:
            return self.make()
        if not self.left:
            self.context, self.left = self.make(), self.programs
        self.left -= 1
        return self.context


class ForgetWhatNoLongerFits:
    """A worker's memory stays small: what is needed again is read from the folder.

    A plugin, as fixtures of this file do not reach the doctests of the package.
    """

    room = ROOM

    def pytest_collection_finish(self):
        """What was imported stays, so that the garbage collector need not look at it."""
        jax.clear_caches()
        gc.collect()
        give_back()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)

    def pytest_runtest_logfinish(self):
        if resident_bytes() < self.room:
            return
        forget_what_was_lowered()
        if resident_bytes() > 0.8 * self.room:
            jax.clear_caches()
            gc.collect()
            give_back()
            # What stays is that of libraries: to forget after every test frees no more.
            self.room = max(ROOM, resident_bytes() + GROWTH)


def forget_what_was_lowered():
    """Without JAX's other caches, the programs themselves among them."""
    for function in (pjit._pjit_lower, pxla._cached_lowering_to_hlo):
        function.cache_clear()
    give_back()


def give_back():
    """What was freed goes back to the system."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes():
    """What this process holds; 0 where nothing tells."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
