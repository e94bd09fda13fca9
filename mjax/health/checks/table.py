"""All checks, in the order in which they are shown."""

from collections.abc import Mapping
from types import MappingProxyType

from mjax.health.check import Check
from mjax.health.checks import memory

CHECKS: tuple[Check, ...] = (*memory.CHECKS,)

BY_NAME: Mapping[str, Check] = MappingProxyType({c.name: c for c in CHECKS})
