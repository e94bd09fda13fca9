"""Check the fields of a request's JSON one by one.

Input: the object sent by a client, and the name of a field. Output: its value, or an
ApiError that names the field, the value and the valid values. null counts as absent.
"""

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

from mjax import checked_json
from mjax.generate.server.errors import ApiError, malformed, unsupported

_SHOWN_CHARS = 60

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields of OpenAI's API that do not change the tokens of an answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Unsupported fields, with the values at which they do not change the answer.

All except min_p and repetition_penalty, which other servers have, are OpenAI's:
parameters of the chat and completion endpoints in openai-python 3.54.
"""


def parse(body: bytes) -> dict[str, Any]:
    """Return the object of a request's body.

    Raises:
      ApiError: the body is not UTF-8, not JSON, or not an object.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise malformed(
            f"the body must be UTF-8, got byte 0x{body[error.start]:02x} at offset "
            f"{error.start}"
        ) from None
    try:
        value = checked_json.read(text, Any)
    except ValueError as error:
        raise malformed(f"the body must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise malformed(f"the body must be a JSON object, got {shown(value)}")
    return value


def check_names(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse unknown and unsupported fields.

    Raises:
      ApiError: 400 for an unknown field, 422 for one that would change the answer.
    """
    for name, value in given.items():
        if name in known or name in IGNORED:
            continue
        if name not in NEUTRAL:
            names = [*known, *IGNORED, *NEUTRAL]
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; remove it"
            raise malformed(
                f"unknown field {shown(name)}{hint}", name, "unknown_parameter"
            )
        neutral = NEUTRAL[name]
        if value is None or (not isinstance(value, bool) and value in neutral):
            continue
        rather = "".join(f", or give {shown(allowed)}" for allowed in neutral)
        raise unsupported(
            name,
            f"{name} is not supported by this server, got {shown(value)}; "
            f"remove it{rather}",
        )


def whole(
    given: Mapping[str, Any], name: str, *, least: int, most: int | None = None
) -> int | None:
    """Return a whole number; None if it is absent.

    Raises:
      ApiError: the value is something else or out of range.
    """
    value = given.get(name)
    if value is None:
        return None
    in_range = type(value) is int and value >= least and (most is None or value <= most)
    if not in_range:
        rule = f"at least {least}" if most is None else f"from {least} to {most}"
        raise _refused(name, f"a whole number {rule}", value)
    return value


def number(
    given: Mapping[str, Any],
    name: str,
    default: float,
    *,
    most: float,
    excludes_zero: bool = False,
) -> float:
    """Return a number from 0 to `most`; `default` if it is absent.

    Raises:
      ApiError: the value is something else or out of range, such as NaN.
    """
    value = given.get(name)
    if value is None:
        return default
    # Compare first: a huge whole number does not fit into a float.
    is_number = type(value) in (int, float) and 0 <= value <= most
    if not is_number or math.isnan(value) or (excludes_zero and value == 0):
        rule = f"above 0, at most {most:g}" if excludes_zero else f"from 0 to {most:g}"
        raise _refused(name, f"a number {rule}", value)
    return float(value)


def flag(given: Mapping[str, Any], name: str) -> bool:
    """Return true or false; false if it is absent.

    Raises:
      ApiError: the value is something else.
    """
    value = given.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _refused(name, "true or false", value)
    return value


def text(value: Any, name: str) -> str:
    """Return a text that UTF-8 can encode.

    Raises:
      ApiError: the value is something else, such as half a surrogate pair.
    """
    if not isinstance(value, str):
        raise _refused(name, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(value[error.start]):X} at character {error.start}"
        raise malformed(
            f"{name} must be text that UTF-8 can encode, got {found}", _field_of(name)
        ) from None
    return value


def _refused(name: str, rule: str, value: Any) -> ApiError:
    return malformed(f"{name} must be {rule}, got {shown(value)}", _field_of(name))


def _field_of(name: str) -> str:
    """Return the field of the request for a name such as stop[1]."""
    return name.partition("[")[0]


def shown(value: Any) -> str:
    """Return a value for a message, short and in ASCII."""
    if isinstance(value, list) and value:
        return f"a list of {len(value)}"
    if isinstance(value, dict) and len(value) > 1:
        return f"an object of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**_SHOWN_CHARS:
        return "a number of more than 60 digits"
    written = "null" if value is None else ascii(value)
    if isinstance(value, bool):
        written = written.lower()
    if len(written) > _SHOWN_CHARS:
        written = f"{written[:_SHOWN_CHARS]}..."
    return written
