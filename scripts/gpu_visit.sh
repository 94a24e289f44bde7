#!/usr/bin/env bash
# Collect everything about a machine with an NVIDIA or AMD GPU in one go: parity with fp64, facts, where a step's time
# goes, tests, hardware record, sanitizer, speed of the kernels.
#   bash scripts/gpu_visit.sh OUT                  every item but `real`; logs and results go to the folder OUT
#   bash scripts/gpu_visit.sh OUT parity bench-A   these items, to stay below a limit per command
#   bash scripts/gpu_visit.sh --minutes 15 OUT     the most valuable items that fit in 15 minutes; also with items named
#   bash scripts/gpu_visit.sh --dry OUT            every item on a CPU with tiny sizes: it measures nothing
#   bash scripts/gpu_visit.sh --list               the items in order of value, with their expected seconds and limits
# OUT.tar.gz has all results in one file and is written after each item, as are OUT/summary.md, which is for people, and
# OUT/steps.tsv: a line per item with exit code, seconds, log and result, to which later calls append. After an item
# that fails or times out the next one runs. Exits with 1 if an item of this call failed.
# An item that measures speed runs only where the last item parity in OUT has passed: the speed of wrong numbers is not
# reported. tests, fused and sanitizer need pytest, which `bash scripts/setup.sh --dev` installs.
#   PYTHON=...      the interpreter (default .venv/bin/python, else python3)
#   PACKAGES=...    a folder of packages that the interpreter lacks, added to PYTHONPATH
#   SHAPES="A B C"  shapes of `hwgrpo bench kernels`, each an item bench-SHAPE; includes the fp64 check and other libraries
#   WORKERS=4       processes of an item with tests, where pytest-xdist is installed
#   REPEAT=5        rounds of `hwgrpo bench kernels`
#   LIMIT=540       time limit of every item, in seconds, in place of its own
#   COMMIT=SHA      the commit of this copy, if it is not a git checkout; the item record writes it into its file
#   SMOLLM2=...     for the item real: the folder that scripts/fetch_smollm2.py makes
#   GSM8K=...       for the item real: the folder that `hwgrpo data gsm8k` makes
set -uo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in
    "" | -h | --help) sed -n '2,25s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
python=${PYTHON:-$repo/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
export PYTHONPATH="$repo:$repo/backends:$repo/kernels:$repo/scripts${PACKAGES:+:$PACKAGES}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$python" "$repo/scripts/gpu_visit_runner.py" "$@"
