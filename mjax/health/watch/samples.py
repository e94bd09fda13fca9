"""Observations of one network port, and detections.

Types of observations: counters about once a second, windows sampled every few
milliseconds, step times. Counters have the names and units of the files in
/sys/class/infiniband/DEVICE/ports/PORT and /sys/class/net/INTERFACE; source: Linux,
Documentation/ABI/stable/sysfs-class-infiniband.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np
from jaxtyping import Float, UInt64

type Kind = Literal[
    "flap", "decay", "neighbour", "aperiodic", "other_period", "unlike_others"
]
ACTIVE = 4
"""Content of the file `state` of a port that passes traffic; source as above."""
WORD_BYTES = 4
"""Unit of port_xmit_data and port_rcv_data in bytes; source as above."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Port:
    """The properties of a port."""

    link_layer: Literal["InfiniBand", "Ethernet"]
    rate_gbit_per_s: float
    """Content of the file `rate`."""
    data_bytes_per_s: float
    """Payload rate of the wire in one direction."""
    data_counter_bits: Literal[32, 64]
    """Width in bits of port_xmit_data and port_rcv_data, which wrap to 0."""

    def __post_init__(self) -> None:
        for name in ("rate_gbit_per_s", "data_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} must be above 0, got {getattr(self, name)}: "
                    "read the file `rate` of the port while it is ACTIVE"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """All counters of a port at one time."""

    time_s: float
    counters: Mapping[str, int]
    """Counters by file name. A counter that the port does not have is absent."""
    state: int | None = None
    """Content of the file `state`: 1 DOWN, 2 INIT, 3 ARMED, 4 ACTIVE; None if not
    read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """The counter of sent bytes, read S times, a few milliseconds apart."""

    time_s: Float[np.ndarray, "S"]
    port_xmit_data: UInt64[np.ndarray, "S"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A training step as reported by the trainer."""

    end_s: float
    step_s: float


type Observation = Sample | Window | Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection:
    """A fault of a port."""

    kind: Kind
    onset_s: float
    """First time at which the evidence shows the fault."""
    until_s: float
    """Last time that the evidence covers: the time of the observation that led to the
    detection."""
    score: float
    """The decisive number divided by its threshold; at least 1."""
    evidence: str
    numbers: Mapping[str, float]
    """All numbers in the evidence, with the unit in the name."""


def seen_s(observation: Observation) -> float:
    """Return the time at which an observation is complete."""
    match observation:
        case Sample():
            return observation.time_s
        case Window():
            return float(observation.time_s[-1])
        case Step():
            return observation.end_s
