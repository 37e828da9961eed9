"""Flags for XLA with which tests take half of the time. Import it before JAX starts."""

import importlib.metadata
import os

#: Half of the time of a compilation. It changes programs, too: see ``helpers.as_users``.
WITHOUT_FUSION_EMITTERS = "--xla_cpu_use_fusion_emitters=false"


def quick_flags():
    """Flags that save time on machine code, which here runs once.

    With JSLICES_AS_USERS=1 programs are those that users get: ``.ci/run`` does so for tests
    that are marked ``as_users``: they read programs, compare bits or run for long.
    """
    flags = ["--xla_force_host_platform_device_count=8"]
    if os.environ.get("JSLICES_AS_USERS", "0") == "0":
        flags += ["--xla_backend_optimization_level=0"]
        # With it devices may take independent collectives in different orders, and wait for
        # each other: seen of a step of a table on a mesh, with the other flags alone.
        flags += ["--xla_cpu_enable_concurrency_optimized_scheduler=false"]
        flags += ["--xla_cpu_parallel_codegen_split_count=1"]
        flags += ["--xla_llvm_disable_expensive_passes=true"]
        if importlib.metadata.version("jaxlib").startswith("0.10."):
            flags += [WITHOUT_FUSION_EMITTERS]  # where XLA does not know it, it aborts
    return " ".join(flags)
