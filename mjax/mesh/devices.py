"""Set which devices this process sees; call it before anything touches a device."""

import os
from pathlib import Path

import jax


def simulate_devices(num_devices: int) -> None:
    """Make this process run on simulated CPU devices.

    Args:
      num_devices: devices of this process.
    Raises:
      ValueError: num_devices is less than 1.
      RuntimeError: a device has been touched already.
    """
    if num_devices < 1:
        raise ValueError(f"--simulate-devices must be at least 1, got {num_devices}")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_platforms", "cpu")


def load_plugin_without_gpu() -> None:
    """Let jax's CUDA plugin load without a GPU and without the libraries to run on one.

    Such a plugin only compiles (the `[plan]` extra). Without this call, jax prints an
    error about the missing cuDNN and does not load the plugin. With a GPU, or after a
    device has been touched, nothing changes.
    """
    # The files by which jax itself looks for a GPU (jax/_src/hardware_utils.py).
    drivers = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
    if not any(Path(path).exists() for path in drivers):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def keep_compiled_programs() -> None:
    """Store compiled programs in the user's cache folder, for the next start."""
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    jax.config.update("jax_compilation_cache_dir", str(cache_dir / "mjax" / "jax"))
    # Small programs too: a restart compiles a dozen of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
