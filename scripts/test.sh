#!/usr/bin/env bash
# Set up when needed, with the developers' tools, then run tests by group.
#   bash scripts/test.sh                     every group but slow
#   bash scripts/test.sh unit learning       these groups
#   bash scripts/test.sh --all               every group, slow too
#   bash scripts/test.sh unit -- -k packing  what follows -- goes to pytest
#   bash scripts/test.sh --list              the groups and their folders
#   bash scripts/test.sh older_cpu           numeric tests once more, as on a processor without AVX512 or AVX2
set -uo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo" || exit 1

# A line per group: its name, how it runs, its folders below tests/. Groups that run "together" share one session of pytest
# with a worker per core, up to 4, and one more, since many of their tests wait; a group with its "own_process" has a session
# with a worker per core; those "alone" (timed, or in need of the whole machine) share one without workers. Tests marked
# slow run in the group slow only.
groups=$(<tests/groups.txt)

# What group older_cpu runs: tests whose numbers depend on the order in which a processor adds. Their bounds must hold on any.
numeric="\
families/test_families.py families/test_head.py kernels/test_token_loss.py kernels/test_logprob.py kernels/test_full_kl.py
kernels/test_npu_modules.py training/update/test_step_gradient.py training/update/test_work_not_done.py rollout/local/test_engine.py
rollout/local/test_lean_step.py models/test_shared_prefix_masks.py distributed/test_tensor_parallel.py
distributed/test_sharded_heads.py"

names() { while read -r name _; do echo "$name"; done <<<"$groups"; }

wanted=()
while [ $# -gt 0 ]; do
    case "$1" in
        --list) while read -r name _ folders; do echo "$name $folders"; done <<<"$groups"; exit 0 ;;
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
is_wanted() { [[ " ${wanted[*]} " == *" $1 "* ]]; }

bash scripts/setup.sh --dev || exit 1
export PATH="$repo/.venv/bin:$PATH" # tests call tools by name: torchrun, ninja
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE # without its bytecode each of some hundred processes compiles it

cores=$(.venv/bin/python -c 'import os; print(len(os.sched_getaffinity(0)))')
workers=$((cores < 4 ? cores : 4))

# Sets paths to the folders of wanted groups that run in this way: paths_of HOW [GROUP]. For slow, the folders of all groups.
paths_of() {
    paths=()
    local name how folders folder
    while read -r name how folders; do
        [[ $how == "$1" && $name == "${2:-$name}" ]] || continue
        is_wanted "$name" || [ "$selection" = slow ] || continue
        for folder in $folders; do
            [ ! -d "tests/$folder" ] || paths+=("tests/$folder")
        done
    done <<<"$groups"
}

# Runs pytest once: run NAME WORKERS ARGUMENTS...
run() {
    local name=$1 count=$2
    shift 2
    local beside=()
    if [ "$count" -gt 1 ]; then
        # What stays with one worker: tests/support/processes/groups.py. Files with slow tests begin first, each kind in the
        # order of groups.txt, so that no worker is left alone with a long one.
        beside=(-n "$count" --dist loadgroup)
        [[ $name != together* && $name != older_cpu ]] || beside=(-n "$count" --dist loadfile --no-loadscope-reorder)
    fi
    echo
    echo "== $name =="
    .venv/bin/python -m pytest "$@" "${beside[@]}" --junitxml="$reports/$name.xml" </dev/null
    local code=$?
    [ $code -eq 0 ] || [ $code -eq 5 ] || status=1 # 5: no test found
}

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
trap 'exit 130' INT # otherwise Ctrl-C would only end the current session
status=0
# Where everything is wanted, slow tests run with the others: they share what takes long to start.
selections=("not slow")
! is_wanted slow || selections+=(slow)
[ ${#wanted[@]} -lt "$(names | wc -l)" ] || selections=("slow or not slow")
for selection in "${selections[@]}"; do
    name_of_part=
    [ "$selection" != slow ] || name_of_part=-slow
    paths_of together
    [ ${#paths[@]} -eq 0 ] || run "together$name_of_part" "$((workers + 1))" "${paths[@]}" -m "$selection" "$@"
    while read -r name how _; do
        [ "$how" = own_process ] || continue
        paths_of own_process "$name"
        [ ${#paths[@]} -eq 0 ] || run "$name$name_of_part" "$workers" "${paths[@]}" -m "$selection" "$@"
    done <<<"$groups"
    paths_of alone
    [ ${#paths[@]} -eq 0 ] || run "alone$name_of_part" 1 "${paths[@]}" -m "$selection" "$@"
done
if is_wanted older_cpu; then
    paths=()
    for file in $numeric; do paths+=("tests/$file"); done
    # torch without vector instructions; oneDNN and MKL without AVX512, in another order
    ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=COMPATIBLE \
        run older_cpu "$workers" "${paths[@]}" -m "not slow" "$@"
fi

# Why this machine has nothing that the group gpu could run on; empty where it has.
no_gpu=""
! is_wanted gpu || no_gpu=$(.venv/bin/python tests/gpu/accelerator.py) || no_gpu=""
selected=$(($# > 0)) NO_GPU=$no_gpu .venv/bin/python - "$reports" "${wanted[@]}" <<'END' || status=1
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path


lines = [line.split() for line in Path("tests/groups.txt").read_text().splitlines()]
group_of = {folder: name for name, _, *folders in lines for folder in folders}


def group(report, case):
    """Return the group that ran a test."""
    if report == "older_cpu":
        return report
    if report.endswith("-slow") or any(each.get("name") == "slow" for each in case.iter("property")):
        return "slow"
    module = case.get("classname") or case.get("name")  # the name where collection failed
    return group_of.get(module.split(".")[1])


folder, *wanted = sys.argv[1:]
suites, groups = [], defaultdict(list)
for report in sorted(Path(folder).glob("*.xml")):
    for suite in ElementTree.parse(report).iter("testsuite"):
        suites.append(suite)
        for case in suite.iter("testcase"):
            groups[group(report.stem, case)].append(case)
cases = [case for suite in suites for case in suite.iter("testcase")]
seconds = lambda case: float(case.get("time") or 0)
wrong = lambda case: [*case.iter("failure"), *case.iter("error")]
reasons = lambda case: [each.get("message") or "no reason given" for each in case.iter("skipped")]

print()
empty, why = [], os.environ["NO_GPU"]
for name in wanted:
    outcome = "failed" if any(map(wrong, groups[name])) else "passed"
    if not groups[name]:
        outcome = "nothing here" if name == "gpu" and why else "no test ran"
        empty += [name] if outcome == "no test ran" else []
    elif all(map(reasons, groups[name])):
        outcome = "not run"
    print(f"{name:<12} {outcome:<12} {sum(map(seconds, groups[name])):5.0f} s of tests")
if why and not groups["gpu"]:
    print(f"nothing here for the group gpu: {why}")
for reason, count in Counter(reason for case in cases for reason in reasons(case)).items():
    print(f"not run: {count} tests: {reason}" if count > 1 else f"not run: 1 test: {reason}")
# A group that ran nothing has proven nothing. Only a selection given after -- may leave some groups empty.
unproven = empty and (os.environ["selected"] == "0" or len(empty) == len(wanted))
if unproven:
    print("no test ran in:", *empty)
print("the slowest tests:")
for case in sorted(cases, key=lambda case: -seconds(case))[:20]:
    print(f"{seconds(case):8.1f} s  {case.get('classname')}::{case.get('name')}")
told = None
for case in cases:
    for what in wrong(case):  # once more, where the end of a long output is looked at
        reason = [line[:300] for line in (what.get("message") or "").strip().splitlines()[-12:]]
        print(f"{what.tag} {case.get('classname')}::{case.get('name')}", *(reason if reason != told else []), sep="\n    ")
        told = reason
total, failed, skipped, errors = (
    sum(int(suite.get(key) or 0) for suite in suites) for key in ("tests", "failures", "skipped", "errors")
)
print(f"{total - failed - errors - skipped} passed, {failed + errors} failed, {skipped} skipped")
sys.exit(bool(unproven))
END
exit $status
