"""Virtual devices for the benches that run JAX in their own process."""

from __future__ import annotations

import os

from tandem.home import home
from tandem_worker.devices import prepare_environment


def use_devices(count: int) -> None:
    """Set what XLA and jax read once: so many CPU devices, and executables kept in the data folder."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    prepare_environment(count)
    import jax

    jax.config.update("jax_compilation_cache_dir", str(home() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
