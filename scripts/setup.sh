#!/usr/bin/env bash
# Set up hwgrpo in .venv: find a Python; scripts/setup_env.py then detects the hardware and installs the fitting torch.
#   bash scripts/setup.sh            the first run installs, later runs only check
#   bash scripts/setup.sh --help     the options
# HWGRPO_PYTHON=/path/to/python names the interpreter to use; the default is that of a complete .venv, without one or with
# --fresh the first suitable one on PATH.
set -euo pipefail
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV # an active environment of the caller must not leak into the new one

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Print the interpreter behind a virtual environment or shim: .venv itself may be active, and this may rebuild it.
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
if grep -qs '"inputs"' "$repo/.venv/hwgrpo-setup.json" && [[ " $* " != *" --fresh "* ]]; then
    earlier=$(sed -n 's/^executable = //p' "$repo/.venv/pyvenv.cfg" 2>/dev/null || true)
    [ -z "$earlier" ] || candidates=("$earlier" "${candidates[@]}") # first: the start of each candidate takes time
fi
[ -z "${HWGRPO_PYTHON:-}" ] || candidates=("$HWGRPO_PYTHON")

rejected=""
for name in "${candidates[@]}"; do
    if ! command -v "$name" >/dev/null 2>&1; then
        rejected+="  $name: not found"$'\n'
    elif output=$("$name" -c "$probe" 2>&1 </dev/null); then
        exec "$output" "$repo/scripts/setup_env.py" "$@"
    else
        rejected+="  $name: ${output%%$'\n'*}"$'\n'
    fi
done

{
    printf 'hwgrpo set-up: no usable Python. Tried:\n%s' "$rejected"
    printf 'Install Python 3.11 or newer with venv (Debian, Ubuntu: apt-get install python3 python3-venv), or name one:\n'
    printf '  HWGRPO_PYTHON=/path/to/python3.11 bash scripts/setup.sh\n'
} >&2
exit 1
