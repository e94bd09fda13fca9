"""The TensorStore specs of the arrays of a step on disk.

Input: folders, names and shapes. Output: specs for `tensorstore.open`. No file is
touched.
"""

from typing import Any

from etils import epath

from mjax.ckpt.host_copy import HostLeaf

STATE = "state"
"""Folder of the arrays, in that of the step."""


def spec(base: Any, name: str, value: HostLeaf) -> dict[str, Any]:
    """Describe a new array to TensorStore."""
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
    """Return the name of a folder that Orbax merges."""
    return f"ocdbt.process_{part}"


def kvstore(folder: epath.Path) -> Any:
    """Describe a folder to TensorStore: a URL, or a local path."""
    text = folder.as_posix()
    return f"{text}/" if "://" in text else {"driver": "file", "path": f"{text}/"}
