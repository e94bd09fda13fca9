"""Links of Ethernet ports from LLDP, as reported by lldpd on each host.

Input: the output of `lldpcli show neighbors -f json` (or json0) of one host, or of one
switch that runs lldpd. Output: an `Observation` with one side of each link. If the text
is truncated, it is invalid JSON, and the observation reports this as a problem.

Source of the formats: lldpd/lldpd, src/client/json_writer.c, and examples of both in
test_lldpcli.py. `json0` writes all lists as lists, and text as {"value": text}. `json`
writes a list of one item as the item, and {"value": text} as the text. It also moves
the name out of an object: {"name": "eth0", "via": "LLDP"} becomes
{"eth0": {"via": "LLDP"}}.
"""

from typing import Any

from mjax import checked_json
from mjax.health.cluster.links import End, Observation, Sighting

MAX_BYTES = 16 * 2**20
"""Maximum size of a host's output. Far above the
200 kB of 64 interfaces with details."""


def read(text: bytes, node: str, source: str) -> Observation:
    """Return the links that one node reports.

    Args:
      text: output of lldpcli.
      node: host or switch; lldpcli does not print its name.
      source: name of the text in messages.
    """
    try:
        value = checked_json.read(text, dict[str, Any])
        interfaces = _interfaces(value)
        sightings = tuple(
            _sighting(name, fields, node, source) for name, fields in interfaces
        )
    except ValueError as error:
        problem = (
            f"{source} is not an output of lldpcli show neighbors -f json: {error}"
        )
        return Observation(
            source=source,
            fabric="ethernet",
            has_both_sides=False,
            problems=(problem,),
        )
    problems = () if sightings else (f"{source} names no neighbour of {node}",)
    return Observation(
        source=source,
        fabric="ethernet",
        sightings=sightings,
        has_both_sides=False,
        problems=problems,
    )


def _interfaces(value: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, fields) of each interface with a neighbour, from either format."""
    if "lldp" not in value:
        raise ValueError("the key lldp is absent")
    found = []
    for part in _items(value["lldp"]):
        for entry in _items(part.get("interface", [])):
            if isinstance(entry.get("name"), str):
                found.append((entry["name"], entry))
            else:  # {name: fields} of one or more interfaces
                found += [(name, _object(fields)) for name, fields in entry.items()]
    return found


def _sighting(name: str, fields: dict[str, Any], node: str, source: str) -> Sighting:
    chassis = _first(fields, "chassis", name)
    description = _text(chassis.get("name"))
    if not description and len(chassis) == 1 and "id" not in chassis:  # {name: fields}
        description = next(iter(chassis))
    port = _first(fields, "port", name)
    ports = [_text(port.get("id")), _text(port.get("descr"))]
    ports = [text for text in ports if text]
    if not description or not ports:
        raise ValueError(f"the neighbour of {name} has no name or no port")
    return Sighting(
        end=End(description=node, ports=(name,)),
        peer=End(description=description, ports=tuple(dict.fromkeys(ports))),
        state="Active",
        place=source,
    )


def _first(fields: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    found = _items(fields.get(key, []))
    if len(found) != 1:
        raise ValueError(f"{name} must have one {key}, got {len(found)}")
    return found[0]


def _items(value: Any) -> list[dict[str, Any]]:
    """Return a list of objects; a single object becomes a list of one."""
    return [_object(item) for item in (value if isinstance(value, list) else [value])]


def _object(value: Any) -> dict[str, Any]:
    return checked_json.check(value, dict[str, Any])


def _text(value: Any) -> str:
    """Unwrap a text from a list of one or an object; return "" if there is no text."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        value = value.get("value")
    return value if isinstance(value, str) else ""
