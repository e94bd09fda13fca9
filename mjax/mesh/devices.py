"""Set the devices of this process. Call it before any code touches a device."""

import os
from pathlib import Path

import jax


def simulate_devices(num_devices: int) -> None:
    """Make this process run on simulated CPU devices.

    Args:
      num_devices: devices of this process.
    Raises:
      ValueError: num_devices is less than 1.
      RuntimeError: a device is already in use.
    """
    if num_devices < 1:
        raise ValueError(f"--simulate-devices must be at least 1, got {num_devices}")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_platforms", "cpu")


def load_plugin_without_gpu() -> None:
    """Let jax load its CUDA plugin on a machine without a GPU or its libraries.

    There the plugin can only compile (the `[plan]` extra). Without this call, jax
    prints an error about the missing cuDNN and does not load the plugin. With a GPU, or
    after jax has initialised its devices, nothing changes.
    """
    # jax itself looks for a GPU by these files (jax/_src/hardware_utils.py).
    drivers = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
    if not any(Path(path).exists() for path in drivers):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def keep_compiled_programs() -> None:
    """Store compiled programs in the user's cache folder, for the next start."""
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    jax.config.update("jax_compilation_cache_dir", str(cache_dir / "mjax" / "jax"))
    # Store small programs too: a restart compiles a dozen of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
