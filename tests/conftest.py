"""Settings for all tests, made before JAX starts."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes single examples slow, and that says nothing about the code.
hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _forget_shown_warnings():
    """Every test sees a warning as if for the first time."""
    from jslices import _densify

    _densify._registry.clear()
    yield
