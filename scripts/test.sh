#!/usr/bin/env bash
# Set up when needed, then run tests by group.
#   bash scripts/test.sh                     every group but slow
#   bash scripts/test.sh unit learning       these groups
#   bash scripts/test.sh --all               every group, slow too
#   bash scripts/test.sh unit -- -k packing  what follows -- goes to pytest
#   bash scripts/test.sh --list              the groups and their folders
#   bash scripts/test.sh older_cpu           numeric tests once more, as on a processor without AVX512 or AVX2
set -uo pipefail

# A group and its folders below tests/. Tests marked slow run in the group slow only, whatever folder they are in.
groups="\
unit algorithms backends bench config data models observe planning report rollout training
rewards rewards
kernels kernels peers
commands cli doctor
families families
interpreter interpreter
compile compile
gpu gpu
torch_npu torch_npu
lowering lowering
structure structure setup
distributed distributed
vllm vllm
simulated simulated_npu
plugin plugin
learning learning docs
resume resume
drill drill
perf perf
slow
older_cpu"

# What group older_cpu runs: tests whose numbers depend on the order in which a processor adds. Their bounds must hold on any.
numeric="\
families/test_families.py families/test_head.py kernels/test_token_loss.py kernels/test_logprob.py kernels/test_full_kl.py
kernels/test_npu_modules.py training/update/test_step_gradient.py training/update/test_work_not_done.py rollout/local/test_engine.py
rollout/local/test_lean_step.py models/test_shared_prefix_masks.py distributed/test_tensor_parallel.py
distributed/test_sharded_heads.py"

# Groups whose tests keep to themselves and to one core each: as many run at a time as there are cores, up to 4.
# Tests of the others start processes of their own, make something that all of them use, or are timed.
side_by_side="unit rewards kernels commands families interpreter compile structure learning"
slow_side_by_side="compile learning report vllm" # folders

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo" || exit 1

names() { while read -r name _; do echo "$name"; done <<<"$groups"; }
folders_of() { while read -r name folders; do [ "$name" != "$1" ] || echo "$folders"; done <<<"$groups"; }

wanted=()
while [ $# -gt 0 ]; do
    case "$1" in
        --list) echo "$groups"; exit 0 ;;
        --all) while read -r name; do wanted+=("$name"); done < <(names) ;;
        -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --) shift; break ;;
        *)
            if ! grep -qxF -- "$1" <<<"$(names)"; then
                echo "scripts/test.sh: there is no test group '$1'; the groups are: $(names | paste -sd ' ' -)" >&2
                exit 2
            fi
            wanted+=("$1")
            ;;
    esac
    shift
done
if [ ${#wanted[@]} -eq 0 ]; then
    while read -r name; do [[ $name == slow || $name == older_cpu ]] || wanted+=("$name"); done < <(names)
fi

bash scripts/setup.sh || exit 1
export PATH="$repo/.venv/bin:$PATH" # tests call tools by name: torchrun, ninja
unset PYTHONPATH PYTHONHOME

# Says why this machine has nothing that a group's tests could run on; fails where it has, and for any other group.
nothing_here() { [ "$1" = gpu ] && .venv/bin/python tests/gpu/accelerator.py; }

cores=$(.venv/bin/python -c 'import os; print(len(os.sched_getaffinity(0)))')
workers=$((cores < 4 ? cores : 4))

# Runs pytest on a group, or on a part of it: run NAME-OF-REPORT WORKERS ARGUMENTS...
run() {
    local report=$1 count=$2
    shift 2
    local beside=()
    local dist=worksteal
    # A file stays in one process: tests of a page of the documentation follow each other as its blocks do, and those
    # of vLLM share an engine.
    case $report in learning | slow-vllm) dist=loadfile ;; esac
    [ "$count" = 1 ] || beside=(-n "$count" --dist "$dist")
    .venv/bin/python -m pytest "$@" "${beside[@]}" --junitxml="$reports/$report.xml" </dev/null
}

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
trap 'exit 130' INT # otherwise Ctrl-C would only end the current group
status=0
empty=()
absent=()
summary=()
for group in "${wanted[@]}"; do
    paths=()
    for folder in $(folders_of "$group"); do
        [ ! -d "tests/$folder" ] || paths+=("tests/$folder")
    done
    count=1
    [[ " $side_by_side " != *" $group "* ]] || count=$workers
    echo
    echo "== $group =="
    began=$SECONDS
    code=5 # what pytest says when it found no test
    if [ "$group" = slow ]; then
        ignored=()
        codes=()
        for folder in $slow_side_by_side; do
            [ -d "tests/$folder" ] || continue
            run "slow-$folder" "$workers" "tests/$folder" -m slow "$@"
            codes+=($?)
            ignored+=("--ignore=tests/$folder")
        done
        run slow 1 tests "${ignored[@]}" -m slow "$@"
        code=$?
        for other in "${codes[@]}"; do
            case $other in
                0) [ "$code" -ne 5 ] || code=0 ;;
                5) ;;
                *) code=$other ;;
            esac
        done
    elif [ "$group" = older_cpu ]; then
        for file in $numeric; do paths+=("tests/$file"); done
        # torch without vector instructions; oneDNN and MKL without AVX512, in another order
        ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=COMPATIBLE \
            run "$group" "$workers" "${paths[@]}" -m "not slow" "$@"
        code=$?
    elif [ ${#paths[@]} -gt 0 ]; then
        run "$group" "$count" "${paths[@]}" -m "not slow" "$@"
        code=$?
    fi
    case $code in
        0) outcome=passed ;;
        5)
            if why=$(nothing_here "$group"); then
                outcome="nothing here"
                absent+=("nothing here for the group $group: $why")
            else
                outcome="no test ran"
                empty+=("$group")
            fi
            ;;
        *) outcome=failed; status=1 ;;
    esac
    summary+=("$(printf '%-12s %-12s %4d s' "$group" "$outcome" $((SECONDS - began)))")
done

echo
printf '%s\n' "${summary[@]}" "${absent[@]}"
# A group that ran nothing has proven nothing. Only a selection given after -- may leave some groups empty.
if [ ${#empty[@]} -gt 0 ] && { [ $# -eq 0 ] || [ ${#empty[@]} -eq ${#wanted[@]} ]; }; then
    echo "no test ran in: ${empty[*]}"
    status=1
fi
.venv/bin/python - "$reports" <<'END' || status=1
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

suites = [suite for report in Path(sys.argv[1]).glob("*.xml") for suite in ElementTree.parse(report).iter("testsuite")]
cases = [case for suite in suites for case in suite.iter("testcase")]
print("the slowest tests:")
for case in sorted(cases, key=lambda case: -float(case.get("time") or 0))[:20]:
    print(f"{float(case.get('time') or 0):8.1f} s  {case.get('classname')}::{case.get('name')}")
told = None
for case in cases:
    for what in (*case.iter("failure"), *case.iter("error")):  # once more, where the end of a long output is looked at
        why = [line[:300] for line in (what.get("message") or "").strip().splitlines()[-12:]]
        print(f"{what.tag} {case.get('classname')}::{case.get('name')}", *(why if why != told else []), sep="\n    ")
        told = why
total, failed, skipped = (sum(int(suite.get(key) or 0) for suite in suites) for key in ("tests", "failures", "skipped"))
errors = sum(int(suite.get("errors") or 0) for suite in suites)
print(f"{total - failed - errors - skipped} passed, {failed + errors} failed, {skipped} skipped")
END
exit $status
