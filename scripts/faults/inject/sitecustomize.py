"""Let a rank fail from within: its folder goes on PYTHONPATH, see `launch_faults`.

Python imports this module when it starts. In a process that writes a progress word a
thread then waits for `<progress file>.fault`, whose text names what is to happen.
"""

import ctypes
import os
import threading
import time
from pathlib import Path

_POLL_S = 0.01
_VARIABLE = "MJAX_PROGRESS_FILE"


def _happen(what: str) -> None:
    main = threading.main_thread().ident
    match what:
        case "exception":
            error = ctypes.py_object(RuntimeError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), error)
        case "sleep":
            ctypes.pythonapi.Py_AddPendingCall(_SLEEP, None)
        case "hold the lock":
            while True:  # a signal ends each sleep
                ctypes.PyDLL(None).sleep(3600)
        case _:
            os._exit(int(what.removeprefix("exit ")))


def _wait() -> None:
    while _VARIABLE not in os.environ:
        time.sleep(_POLL_S)
    path = Path(f"{os.environ[_VARIABLE]}.fault")
    while not path.exists():
        time.sleep(_POLL_S)
    _happen(path.read_text())


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _SLEEP(_: object) -> int:
    while True:
        time.sleep(3600)


def _begin() -> None:
    threading.Thread(target=_wait, daemon=True).start()


def _setsid() -> None:
    """Begin in a rank that was forked: it calls this before it gets its variables."""
    _of_the_system()
    _begin()


_of_the_system, os.setsid = os.setsid, _setsid
if _VARIABLE in os.environ:
    _begin()
