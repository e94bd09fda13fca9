#!/bin/sh
# Print the path of a Python that can host the project's environment.
#
# Usage: scripts/find_python.sh [PYTHON]
#
# With an argument only that one is considered. Otherwise, in this order: python3.12 and
# newer anywhere on PATH, python3, the versions of pyenv, what uv knows. A candidate
# counts if it starts (a shim of pyenv may exist and refuse), is new enough, and has the
# modules that venv and pip need (Debian packs venv apart; a Python built without
# OpenSSL's headers lacks ssl).

set -u

probe='
import sys
if sys.version_info < (3, 12):
    sys.exit("is Python %d.%d.%d, older than 3.12" % tuple(sys.version_info[:3]))
try:
    import ensurepip, ssl, venv
except ImportError as error:
    sys.exit("lacks a module: %s" % error)
print(sys.executable)
'
refused=""

# try FILE: if FILE is a Python that will do, print its path and leave.
try() {
    if [ -d "$1" ]; then
        answer="is a folder; give the python in it"
    elif ! command -v "$1" >/dev/null 2>&1; then
        answer="there is no such program"
    elif answer=$("$1" -c "$probe" 2>&1); then
        printf '%s\n' "$answer"
        exit 0
    fi
    # The last line is the reason: the probe's own, or that of a shim that refuses.
    refused="$refused  $1: $(printf '%s\n' "$answer" | tail -n 1)
"
}

# try_path NAME: try every NAME on PATH, for the first may be a shim that refuses.
try_path() {
    old_ifs=$IFS
    IFS=:
    for dir in $PATH; do
        IFS=$old_ifs
        [ -x "$dir/$1" ] && try "$dir/$1"
    done
    IFS=$old_ifs
}

# fail WHERE: say what is missing and how to get it.
fail() {
    cat >&2 <<MESSAGE
mjax needs Python 3.12 or newer, with its modules venv, ensurepip and ssl.
$1:
${refused:-  none
}Install a newer one; the system's own can stay:
  uv python install 3.12       (https://docs.astral.sh/uv)
  pyenv install 3.12           (https://github.com/pyenv/pyenv)
  apt install python3.12 python3.12-venv       (where the system has it)
If you have one that is not in this list, give its path: make env PYTHON=/path/to/python3.12
MESSAGE
    exit 1
}

if [ -n "${1:-}" ]; then
    try "$1"
    fail "PYTHON=$1 cannot be used"
fi
for name in python3.12 python3.13 python3.14 python3; do
    try_path "$name"
done
for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3; do
    [ -x "$candidate" ] && try "$candidate"
done
if command -v uv >/dev/null 2>&1; then
    found=$(uv python find --system '>=3.12' 2>/dev/null) && try "$found"
fi
fail "None was found on PATH, in pyenv or in uv; these cannot be used"
