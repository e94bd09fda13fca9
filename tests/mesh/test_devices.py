"""What a process may see of devices."""

import pytest

from mjax.mesh.devices import simulate_devices


def test_simulating_no_device_is_refused():
    with pytest.raises(ValueError, match=r"--simulate-devices must be .* got 0"):
        simulate_devices(0)
