"""Checks of the BMC's sensors (power, fans, temperature) and of its event log.

`ipmitool sdr elist` prints one sensor per line: name, number, status, entity, reading.
The status of a sensor with limits is ok, or one of lnc, lcr, lnr, unc, ucr, unr (lower
or upper; not critical, critical, not recoverable); ns means that it cannot be read, for
instance because the part is absent. For other sensors, the reading lists the states
that are set.

Source of the formats: ipmi_sdr_print_sensor_fc and ipmi_sel_print_std_entry of
https://github.com/ipmitool/ipmitool/blob/master/lib/ipmi_sdr.c
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

from mjax.health.check import check
from mjax.health.findings import (
    KEPT_TEXTS,
    MOST_NAMED,
    UnreadableError,
    Verdict,
    judge_each,
    quoted,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.sources import Command

_SDR = Command(("ipmitool", "sdr", "elist"))
_SEL = Command(("ipmitool", "sel", "elist"))
_SENSOR = re.compile(
    r"^(.{1,32}?) +\| ([0-9A-F]{2})h \| ([a-z]{2,3}) +\| +([0-9]{1,3})\. ?([0-9]{1,3})"
    r" \| ?(.*)$"
)
_READING = re.compile(r"^(-?[0-9]{1,9}(?:\.[0-9]{1,6})?) (degrees C|RPM)\b")
_STATUSES = ("ok", "ns", "lnc", "lcr", "lnr", "unc", "ucr", "unr")
_POWER_SUPPLY = 10  # entity_id_vals of ipmitool, lib/ipmi_strings.c
_BROKEN_SUPPLY = ("Failure", "lost", "out-of-range", "Predictive", "Config Error")
_EVENT = re.compile(
    r"^ *([0-9a-f]{1,4}) \| ([^|]{1,40}) \| ([^|]{1,40}) \| ([^|]{1,80})"
    r" \| ([^|]{1,120}) \| (Asserted|Deasserted)(?: \|.*)?$"
)
_RECORD = re.compile(r"^ *[0-9a-f]{1,4} \| ")
_SERIOUS = re.compile(
    r"uncorrectable|fatal|non-recoverable|critical (?:over|under)|"
    r"failure detected|ac lost|redundancy lost|power off.*fault|ierr|thermal trip",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensor:
    """A sensor, as a line of `sdr elist`."""

    name: str
    status: str
    entity: int
    instance: int
    reading: str

    @property
    def number(self) -> tuple[float, str] | None:
        """The number and the unit of the reading; None if it has no number."""
        found = _READING.match(self.reading)
        return (float(found[1]), found[2]) if found else None


@functools.lru_cache(KEPT_TEXTS)
def sensors(text: str) -> Sequence[Sensor]:
    """Return the sensors.

    Raises:
      UnreadableError: it is not an output of `ipmitool sdr elist`.
    """
    found = []
    for line in text.split("\n")[:-1]:
        match = _SENSOR.match(line)
        if match is None or match[3] not in _STATUSES:
            raise UnreadableError(f"expected a sensor, got {quoted(line)}")
        found.append(
            Sensor(
                name=match[1],
                status=match[3],
                entity=int(match[4]),
                instance=int(match[5]),
                reading=match[6].strip(),
            )
        )
    if not found or not text.endswith("\n"):
        raise UnreadableError("there is no sensor, or it ends early")
    return found


@check(
    "ipmi.limits",
    source=_SDR,
    action="Check the part named by the sensor; compare it with its neighbours.",
)
def limits(text: str, settings: Settings) -> Verdict:
    """No sensor of the BMC is outside its own limits."""
    del settings
    found = sensors(text)
    each = [
        (sensor.name, f"{sensor.reading} ({sensor.status})")
        for sensor in found
        if sensor.status not in ("ok", "ns")
    ]
    return judge_each(each, f"{len(each)} of {len(found)} sensors", "none")


@check(
    "ipmi.power_supplies",
    source=_SDR,
    action="Check its cable and its status light; replace it.",
)
def power_supplies(text: str, settings: Settings) -> Verdict:
    """Each power supply is present and works."""
    wanted = settings.expect.get("power_supplies")
    status = [
        sensor
        for sensor in sensors(text)
        if sensor.entity == _POWER_SUPPLY and "Presence detected" in sensor.reading
    ]
    if not status and wanted is None:
        return unknown("no sensor shows that a power supply is present")
    each = [
        (sensor.name, sensor.reading)
        for sensor in status
        if any(word in sensor.reading for word in _BROKEN_SUPPLY)
    ]
    has = len({sensor.instance for sensor in status})
    if wanted is not None and has != wanted:
        each.append(("", f"{has} power supplies, not {wanted}"))
    return judge_each(each, f"{has} power supplies", wanted if wanted else "all work")


def _measured(text: str, unit: str) -> Iterator[tuple[str, float]]:
    for sensor in sensors(text):
        if sensor.number is not None and sensor.number[1] == unit:
            yield sensor.name, sensor.number[0]


@check("ipmi.fans", source=_SDR, action="Replace the fan.")
def fans(text: str, settings: Settings) -> Verdict:
    """Each fan turns."""
    least = settings.limit("ipmi.fans", "min_rpm")
    found = [*_measured(text, "RPM")]
    if not found:
        return unknown("no sensor measures a fan")
    each = [(name, f"{rpm:.0f} RPM") for name, rpm in found if rpm < least]
    slowest = min(rpm for _, rpm in found)
    return judge_each(each, f"{slowest:.0f} RPM", f"at least {least:g} RPM")


@check(
    "ipmi.inlet",
    source=_SDR,
    action="Call the data centre; check the neighbours in the rack.",
)
def inlet(text: str, settings: Settings) -> Verdict:
    """The inlet air is not too warm."""
    most = settings.limit("ipmi.inlet", "max_c")
    words = settings.limit("ipmi.inlet", "words")
    found = [
        (name, celsius)
        for name, celsius in _measured(text, "degrees C")
        if any(word in name.lower() for word in words)
    ]
    if not found:
        return unknown("no sensor measures the inlet air")
    each = [(name, f"{celsius:.1f} C") for name, celsius in found if celsius > most]
    warmest = max(celsius for _, celsius in found)
    return judge_each(each, f"{warmest:.1f} C", f"at most {most:g} C")


@check(
    "ipmi.event_log",
    source=_SEL,
    action="Repair the named part, save the log, then `ipmitool sel clear`.",
)
def event_log(text: str, settings: Settings) -> Verdict:
    """The BMC's log has no serious event that is still open.

    An event is closed when the same sensor later reports its end. An event without an
    end (an uncorrectable error) stays open until the log is cleared, after the repair.
    An empty log gives no output.
    """
    del settings
    if text and not text.endswith("\n"):
        raise UnreadableError("it ends early")
    standing: dict[tuple[str, str], str] = {}
    num_events = 0
    for line in text.split("\n")[:-1]:
        match = _EVENT.match(line)
        if match is None:
            if _RECORD.match(line) is None:
                raise UnreadableError(f"expected an event, got {quoted(line)}")
            continue  # a vendor-specific record, or a time without date
        num_events += 1
        key = (match[4].strip(), match[5].strip())
        if match[6] == "Deasserted":
            standing.pop(key, None)
        elif _SERIOUS.search(key[1]):
            standing[key] = f"{match[2].strip()} {match[3].strip()}"
    each = [(sensor, f"{what} ({when})") for (sensor, what), when in standing.items()]
    return judge_each(each[:MOST_NAMED], f"{len(each)} of {num_events} events", "none")


CHECKS = (
    limits,
    power_supplies,
    fans,
    inlet,
    event_log,
)
