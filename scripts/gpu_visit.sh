#!/usr/bin/env bash
# Collect everything about a machine with an NVIDIA or AMD GPU in one go: parity with fp64, facts, tests, hardware
# record, sanitizer, speed.
#   bash scripts/gpu_visit.sh OUT                  every step; logs and results go to the folder OUT
#   bash scripts/gpu_visit.sh OUT parity bench-A   these steps, to stay below a limit per command
#   bash scripts/gpu_visit.sh --list               the steps
# After a step that fails or times out the next one runs. OUT/steps.tsv has a line per step: its exit code, seconds
# and log; it is written as each step ends, and a later call appends to it. Exits with 1 if a step of this call failed.
# A bench-SHAPE runs only where the last step parity in OUT has passed: the speed of wrong numbers is not reported.
# The steps tests and sanitizer need pytest, which `bash scripts/setup.sh --dev` installs.
#   PYTHON=...      the interpreter (default .venv/bin/python, else python3)
#   PACKAGES=...    a folder of packages that the interpreter lacks, added to PYTHONPATH
#   SHAPES="A B C"  shapes of `hwgrpo bench kernels`, each a step bench-SHAPE; includes the fp64 check and other libraries
#   WORKERS=4       processes of a step with tests, where pytest-xdist is installed
#   REPEAT=5        rounds of `hwgrpo bench kernels`
#   LIMIT=540       time limit of a step, in seconds
#   COMMIT=SHA      the commit of this copy, if it is not a git checkout; the step record writes it into its file
set -uo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
read -ra shapes <<<"${SHAPES:-A B C}"
steps=(parity facts kernels tests record sanitizer "${shapes[@]/#/bench-}")
case "${1:-}" in
    --list) printf '%s\n' "${steps[@]}"; exit 0 ;;
    "" | -*) sed -n '2,17p' "$0" | cut -c3- >&2; exit 2 ;;
esac
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd)
shift
[ $# -eq 0 ] || steps=("$@")

python=${PYTHON:-$repo/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
export PYTHONPATH="$repo:$repo/backends:$repo/kernels${PACKAGES:+:$PACKAGES}"
export HF_HUB_OFFLINE=1
cd "$repo" || exit 1

facts() {
    date -u
    git rev-parse HEAD 2>/dev/null || echo "not a git checkout"
    uname -a
    for tool in nvidia-smi rocm-smi compute-sanitizer; do command -v "$tool" || echo "$tool: not installed"; done
    if command -v nvidia-smi >/dev/null; then nvidia-smi; fi
    "$python" -c '
import importlib.metadata as metadata, sys
print("python", sys.version)
for name in ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy", "trl", "verl"):
    try: print(name, metadata.version(name))
    except metadata.PackageNotFoundError: print(name, "not installed")'
    "$python" -m hwgrpo detect --probe
}

parity() {
    local code=0
    "$python" -m hwgrpo parity model.dtype=float32 --save "$out/parity.safetensors" || code=1
    "$python" -m hwgrpo parity || code=1
    "$python" -m hwgrpo parity --families || code=1
    return $code
}

has_parity() {
    [ "$(awk -F'\t' '$1 == "parity" { code = $2 } END { print code }' "$out/steps.tsv" 2>/dev/null)" = 0 ] && return
    echo "the step parity has not passed in $out: run \`bash scripts/gpu_visit.sh $out parity\` and mend what differs"
    return 6
}

pytest_in() {
    local workers=()
    "$python" -c "import xdist" 2>/dev/null && workers=(-n "${WORKERS:-4}")
    "$python" -m pytest -q -p no:cacheprovider "${workers[@]}" --junitxml="$out/$1.xml" "${@:2}"
}

run_step() {
    case "$1" in
        parity) parity ;;
        facts) facts ;;
        kernels) "$python" -m hwgrpo kernels ;;
        tests) pytest_in tests tests/gpu -k "not test_sanitizer" ;;
        record) "$python" scripts/record_hardware.py --out "$out/hardware" ${COMMIT:+--commit "$COMMIT"} ;;
        sanitizer)
            # without it pytest would skip the tests and exit with 0
            command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed"; return 5; }
            pytest_in sanitizer tests/gpu -k test_sanitizer
            ;;
        bench-*)
            has_parity || return
            "$python" -m hwgrpo bench kernels --shape "${1#bench-}" --repeat "${REPEAT:-5}" --json "$out/$1.json"
            ;;
        *) echo "scripts/gpu_visit.sh: unknown step '$1'; --list prints the steps"; return 2 ;;
    esac
}

if [ -n "${VISIT_STEP:-}" ]; then # called by itself, under the limit
    run_step "$VISIT_STEP"
    exit
fi

if [[ " ${steps[*]} " == *" tests "* || " ${steps[*]} " == *" sanitizer "* ]] && ! "$python" -c "import pytest" >/dev/null 2>&1; then
    echo "scripts/gpu_visit.sh: $python has no pytest, which the steps tests and sanitizer need: run" \
        "\`bash scripts/setup.sh --dev\`, or name other steps" >&2
    exit 2
fi

status=0
for step in "${steps[@]}"; do
    echo "== $step =="
    began=$SECONDS
    # Without --foreground, timeout also ends the processes that the step started.
    VISIT_STEP=$step timeout --kill-after=15 "${LIMIT:-540}" bash "$0" "$out" >"$out/$step.log" 2>&1 </dev/null
    code=$?
    tail -n 25 "$out/$step.log"
    printf '%s\t%d\t%d s\t%s\n' "$step" "$code" $((SECONDS - began)) "$step.log" >>"$out/steps.tsv"
    [ $code -eq 0 ] || status=1
done

echo
echo "step, exit code (124 and 137: time limit; 5: no test to run here; 6: no parity), time, log in $out"
cat "$out/steps.tsv"
exit $status
