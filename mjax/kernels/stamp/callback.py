"""Append a row by a call to the host, on CPU.

XLA calls the handler through its foreign function interface (FFI), by name. So a
compiled step with stamps can be serialized and loaded, unlike a step with a
`jax.pure_callback`, which holds a Python function of its process.

Source: xla/ffi/api/c_api.h of jaxlib 0.11.2, version 0.4 of the interface.
"""

import ctypes
import time

import jax
from jaxtyping import Array, Int32, PyTree

UNIT_NS = 2**8
_TARGET = "mjax_stamp"
_API_VERSION = (0, 4)


class _Extension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension: a question of XLA instead of a call."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    )


class _Metadata(ctypes.Structure):
    """The first fields of XLA_FFI_Metadata, which the handler fills in."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("version_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("version", ctypes.c_int * 2),
    )


class _Buffer(ctypes.Structure):
    """XLA_FFI_Buffer."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.POINTER(ctypes.c_int32)),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class _Buffers(ctypes.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Frame(ctypes.Structure):
    """The first fields of XLA_FFI_CallFrame."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
    )


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
def _append(frame) -> None:
    """Copy the log with one more row. An argument is the log, the next one the tag."""
    called = frame.contents
    if called.extension:
        asked = ctypes.cast(called.extension.contents.metadata, _METADATA)
        asked.contents.version[:] = _API_VERSION
        return
    log, tag = (called.arguments.buffers[at].contents for at in range(2))
    rows = called.results.buffers[0].contents.data
    num_rows = log.dims[0]
    ctypes.memmove(rows, log.data, num_rows * 2 * ctypes.sizeof(ctypes.c_int32))
    rows[0] += 1
    at = 2 * min(rows[0], num_rows - 1)
    # A C integer keeps the lowest bits.
    rows[at], rows[at + 1] = tag.data[0], time.monotonic_ns() // UNIT_NS


_METADATA = ctypes.POINTER(_Metadata)
# At import, because a process that loads a step does not trace it.
jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_append), platform="cpu")


def append(
    log: Int32[Array, "rows 2"], tag: Int32[Array, "1"], values: PyTree
) -> Int32[Array, "rows 2"]:
    """Return the log with one more row, written after each value's first element."""
    first = [leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(values)]
    return jax.ffi.ffi_call(_TARGET, jax.typeof(log))(log, tag, *first)
