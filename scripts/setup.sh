#!/usr/bin/env bash
# Set up hwgrpo in .venv: finds a Python, then scripts/setup_env.py finds the hardware and installs what fits it.
#   bash scripts/setup.sh            once; again it only checks
#   bash scripts/setup.sh --help     the options
# HWGRPO_PYTHON=/path/to/python names the interpreter to use; otherwise the first fitting one on PATH is taken.
set -euo pipefail
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV # what the caller's shell has active must not leak into the new environment

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Prints the interpreter behind a virtual environment or shim, because .venv itself may be the active one and get rebuilt.
probe='
import sys
if sys.version_info < (3, 11):
    sys.exit("is Python %d.%d, and hwgrpo needs 3.11 or newer" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("cannot make virtual environments (Debian, Ubuntu: apt-get install python%d.%d-venv)" % sys.version_info[:2])
print(getattr(sys, "_base_executable", None) or sys.executable)
'

candidates=(python3.13 python3.12 python3.11 python3 python)
[ -z "${HWGRPO_PYTHON:-}" ] || candidates=("$HWGRPO_PYTHON")

refused=""
for name in "${candidates[@]}"; do
    if ! command -v "$name" >/dev/null 2>&1; then
        refused+="  $name: not found"$'\n'
    elif answer=$("$name" -c "$probe" 2>&1 </dev/null); then
        exec "$answer" "$repo/scripts/setup_env.py" "$@"
    else
        refused+="  $name: ${answer%%$'\n'*}"$'\n'
    fi
done

{
    printf 'hwgrpo set-up: no usable Python. Looked for:\n%s' "$refused"
    printf 'Install Python 3.11 or newer with venv (Debian, Ubuntu: apt-get install python3 python3-venv), or name one:\n'
    printf '  HWGRPO_PYTHON=/path/to/python3.11 bash scripts/setup.sh\n'
} >&2
exit 1
