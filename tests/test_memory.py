"""keep_memory: page faults of large steps, counted in processes of their own."""

import os
import pathlib
import platform
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

import jslices as js

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
PROGRAM = """
import functools, resource, sys
import jslices as js
import jax, jax.numpy as jnp
tx = js.adagrad(0.1)
loss = lambda table, ids: (table[ids] ** 2).mean()
@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(table, state, ids):
    grads = js.grad(loss)(table, ids)
    updates, state = tx.update(grads, state, table)
    return js.apply_updates(table, updates), state
table = jnp.ones((200_000, 64))
state, ids = tx.init(table), jnp.arange(int(sys.argv[1])) % 70_000
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
counts = []
for _ in range(12):
    before = faults()
    table, state = jax.block_until_ready(step(table, state, ids))
    counts.append(faults() - before)
print("faults", sorted(counts[6:])[3])
"""


def faults(kept, ids=120_000):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ids)],
        capture_output=True,
        text=True,
        check=True,
        env=environment | {"JSLICES_KEEP_MEMORY": kept},
    )
    return int(re.search(r"faults (\d+)", done.stdout)[1])


@pytest.mark.slow
@glibc
def test_a_large_step_makes_no_page_faults():
    kept = faults("1")
    assert kept < 500
    assert faults("", 20_000) < 50  # as a step keeps what it needs
    setting = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if setting.exists() and "[always]" not in setting.read_text():
        assert faults("0") > 20 * max(kept, 50)


@glibc
def test_too_late():
    jnp.ones(1)
    with pytest.raises(RuntimeError, match=r"came after JAX had started.*at the start of"):
        js.keep_memory()


def test_other_allocators(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(RuntimeError, match=r"glibc's malloc, which this .* leave it out"):
        js.keep_memory()


def imported(before, value):
    return subprocess.run(
        [sys.executable, "-c", f"{before}; import jslices"],
        capture_output=True,
        text=True,
        env={**os.environ, "JSLICES_KEEP_MEMORY": value},
    ).stderr


@glibc
@pytest.mark.slow
def test_a_variable_that_comes_too_late_or_is_misspelt_is_told():
    late = imported("import jax; jax.devices()", "1")
    assert re.search(r"Hint: JSLICES_KEEP_MEMORY=1 has no effect.*start of", late)
    wrong = imported("pass", "yes")
    assert "ValueError: JSLICES_KEEP_MEMORY is 'yes'; set it to 1, or to 0" in wrong


#: In a process for each of the arguments, forked before JAX starts, one after another.
HINT = """
import os, platform, sys, warnings
import jax, jax.numpy as jnp, jslices as js
for how in sys.argv[1:]:
    if not os.fork():
        break
    assert os.wait()[1] == 0
else:
    sys.exit()
if how == "keep":
    js.keep_memory()
if how == "other":
    platform.libc_ver = lambda: ("", "")
tx, table = js.sgd(0.1), jax.ShapeDtypeStruct((10**8, 4), jnp.float32)
def update(table, values, indices):
    rows = js.IndexedSlices(values, indices, table.shape)
    return tx.update(rows, tx.init(table), table)
def step(num_rows):
    values = jax.ShapeDtypeStruct((num_rows, 4), jnp.float32)
    indices = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(update, table, values, indices)
    return [w for w in caught if issubclass(w.category, js.PerformanceHint)]
small, first, second = step(1_874_999), step(1_875_000), step(10**7)
print(how, len(small), len(first), len(second))
for w in first:
    print(w.filename, w.lineno, w.message)
"""


def hints(*how, **environment):
    done = subprocess.run(
        [sys.executable, "-c", HINT, *how],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout


@glibc
@pytest.mark.slow
def test_a_large_step_is_told_once_where_kept_memory_would_help():
    said = hints("default", "keep", "other")
    assert re.search(
        r"default 0 1 0\n<string> 17 .*gradient of 30 MB.*half as long again.*"
        r"jslices\.keep_memory\(\) at the start.*JSLICES_KEEP_MEMORY=1 in the environment",
        said,
    )
    assert "keep 0 0 0" in said and "other 0 0 0" in said
    assert "variable 0 0 0" in hints("variable", JSLICES_KEEP_MEMORY="1")
    assert "pages 0 0 0" in hints("pages", GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
