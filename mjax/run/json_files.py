"""Write files atomically, and JSON without NaN.

Does not import jax, because modules that run before the flags are parsed use it.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(without_nonfinite(content), indent=2, allow_nan=False)
    write_atomically(path, text + "\n")


def without_nonfinite(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row in which NaN and infinity are replaced by null.

    The additional field `nonfinite` maps each replaced field to its value, as text. A
    row without such values is returned as it is.
    """
    for value in row.values():
        if isinstance(value, float) and not math.isfinite(value):
            break
    else:
        return row
    bad = {
        name: str(value)
        for name, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    return {**row, **dict.fromkeys(bad), "nonfinite": bad}


def write_atomically(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it.

    Raises:
      OSError: the file cannot be written; no temporary file stays.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        # An error of a write names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error
