"""Files that are either complete or not there, and JSON without NaN.

Without jax: modules that run before the flags are known use these functions too.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that is either complete or not there."""
    text = json.dumps(without_nonfinite(content), indent=2, allow_nan=False)
    write_atomically(path, text + "\n")


def without_nonfinite(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with null for NaN and infinity, which `nonfinite` names."""
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
    """Write a text file, and rename it into its place."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
