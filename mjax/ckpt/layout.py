"""The TensorStore specs of the arrays of a step on disk.

Input: folders, names and shapes. Output: specs for `tensorstore.open`. No file is
opened.
"""

from typing import Any

from etils import epath

from mjax.ckpt.host_copy import HostLeaf

STATE = "state"
"""Name of the folder of the arrays, in the folder of the step."""


def spec(base: Any, name: str, value: HostLeaf) -> dict[str, Any]:
    """Return the TensorStore spec of a new array."""
    return {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": base, "path": name},
        "dtype": value.leaf.dtype,
        "metadata": {
            "shape": value.leaf.shape,
            "chunks": [max(1, size) for size in value.chunk],
            "compressor": None,
        },
    }


def part_dir(part: int) -> str:
    """Return the name of the folder of one process's part, which Orbax merges."""
    return f"ocdbt.process_{part}"


def kvstore(folder: epath.Path) -> Any:
    """Return the TensorStore spec of a folder, given by URL or local path."""
    text = folder.as_posix()
    return f"{text}/" if "://" in text else {"driver": "file", "path": f"{text}/"}
