"""Several real processes: trained and saved as by one, restored by any number of them."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import assert_close
from several_processes import PLACEMENTS, on_one_device

import jslices as js

SCRIPT = pathlib.Path(__file__).with_name("several_processes.py")


def run(count, devices, function, **arguments):
    """What each of ``count`` processes with so many devices reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices}"
    found = os.pathsep.join([os.getcwd(), *sys.path])
    environment = {**os.environ, "PYTHONPATH": found, "XLA_FLAGS": flags}
    command = [count, port, function, json.dumps(arguments)]
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(number), *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(count)
    ]
    try:
        said = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, said, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_two_processes_train_and_save_as_one(tmp_path):
    said = run(
        2, 2, "train_and_save", directory=str(tmp_path), placements=[*PLACEMENTS], steps=2
    )
    wanted, losses = on_one_device(2)
    assert said[0] == said[1]
    for placement in PLACEMENTS:
        np.testing.assert_allclose(said[0][placement], losses, rtol=1e-5)
        restored = js.Saver().restore(f"{tmp_path}/{placement}", wanted)
        assert_close(jax.device_get(restored), jax.device_get(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("count, devices", [(3, 1), (4, 1)])
def test_other_numbers_of_processes_restore_it(tmp_path, count, devices):
    run(2, 2, "train_and_save", directory=str(tmp_path), placements=["rows"], steps=2)
    names = [("rows", "rows"), ("rows", "columns"), ("rows", "replicated")]
    run(count, devices, "copy", directory=str(tmp_path), names=names)
    wanted, _ = on_one_device(2)
    for _, placement in names:
        path = f"{tmp_path}/rows-{placement}-{count}"
        restored = js.Saver().restore(path, wanted)
        assert_close(jax.device_get(restored), jax.device_get(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_leaves_of_all_kinds_are_written_once(tmp_path):
    first, second = run(2, 2, "all_kinds", directory=str(tmp_path))
    assert first["path"] == second["path"] and first["name"] == "process 0"
