"""The library huggingface_hub, which is imported when a name is first used.

Input: environment variables of the library. Output: the library, its hub, and texts of
its errors without secrets.
"""

import importlib
import os
import pathlib
import re
from typing import Any

# User and password of a URL, and its query, which may contain a signature.
_SECRET = re.compile(r"(?<=://)[^/@\s]*@|\?[^\s'\"()]*")


def cache_dir_of(library: Any) -> pathlib.Path:
    """Return the cache of the library."""
    configured = os.environ.get("HF_HUB_CACHE")
    return pathlib.Path(configured or library.constants.HF_HUB_CACHE)


def import_library(repository: object) -> Any:
    """Import the library.

    Args:
      repository: what needs it, for the message.
    Raises:
      ValueError: it is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise ValueError(
            f"{repository} needs huggingface_hub; pip install 'mjax[hub]'"
        ) from None
    return huggingface_hub


def http_error_of(library: Any) -> type[Exception]:
    """Return the exception class of the library's HTTP client."""
    module = type(library.get_session()).__module__.partition(".")[0]
    return importlib.import_module(module).HTTPError


def endpoint_of(library: Any) -> str:
    """Return the address of the hub."""
    return os.environ.get("HF_ENDPOINT") or library.constants.ENDPOINT


def host_of(library: Any) -> str:
    """Return the address of the hub without secrets."""
    return _SECRET.sub("", endpoint_of(library))


def first_line(error: Exception) -> str:
    """Return the first line of an error's text without secrets."""
    text = (str(error) or type(error).__name__).strip().splitlines()[0]
    return _SECRET.sub("", text)
