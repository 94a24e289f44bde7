#!/usr/bin/env bash
# Change the sources in one small way after another ("mutants") and print those that no test notices. Not a part of CI.
#   bash scripts/mutate.sh hwgrpo/algorithms/kl.py      a file or folder of hwgrpo/algorithms, ragged.py, values.py or the kernels
#   bash scripts/mutate.sh hwgrpo/algorithms/kl.py 10   10 % of its mutants, the same ones each time
#   bash scripts/mutate.sh hwgrpo/algorithms/kl.py 100 tests/algorithms/test_kl.py -k estimators   these arguments of pytest
#   bash scripts/mutate.sh --executed kernels/hwgrpo_kernels 1 tests/parity/test_parity.py -k rounding
#                                                       1 % of the mutants on lines in functions that these tests execute
#   bash scripts/mutate.sh                              all of them, with the default tests of each: days
# Each mutant starts pytest anew and ends with the first test that fails. The mutants are made in a copy of the working tree;
# the tool, cosmic-ray, is installed into .venv-mutation. (mutmut is faster, but skips decorated classes and functions, thus
# all dataclasses and Triton kernels.)
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
python=$repo/.venv/bin/python
tool=$repo/.venv-mutation/bin

executed=
if [ "${1:-}" = --executed ]; then
    executed=yes
    shift
fi
case "${1:-}" in
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    "") sources=(hwgrpo/algorithms hwgrpo/ragged.py hwgrpo/values.py kernels/hwgrpo_kernels) ;;
    *) sources=("${1%/}") ;;
esac
percent=${2:-100}
tests=("${@:3}")
if [[ ! $percent =~ ^[1-9][0-9]?$|^100$ ]]; then
    echo "scripts/mutate.sh: '$percent' is no percentage from 1 to 100" >&2
    exit 2
fi
if [ ! -x "$python" ]; then
    echo "scripts/mutate.sh: run 'bash scripts/setup.sh --dev' first" >&2
    exit 2
fi

# Prints the tests of a source, a line per run of pytest: first the file of its name, which finds most mutants.
tests_of() {
    local folder own
    case "$1" in
        hwgrpo/algorithms*) folder=tests/algorithms ;;
        hwgrpo/ragged.py | hwgrpo/values.py) folder=tests/training/test_ragged.py ;;
        kernels/hwgrpo_kernels*) folder=tests/kernels ;;
        *) echo "scripts/mutate.sh: name the tests of $1 after the percentage" >&2; return 2 ;;
    esac
    own=$folder/test_$(basename "$1" .py).py
    [ ! -f "$own" ] || echo "$own"
    echo "$folder"
}
pytest() { # prints the command: pytest ARGUMENTS...
    printf '%q ' "$python" -m pytest -x -q -p no:cacheprovider -m "not slow" "$@"
}
for source in "${sources[@]}"; do
    [ -e "$source" ] || { echo "scripts/mutate.sh: there is no $source" >&2; exit 2; }
    [ ${#tests[@]} -gt 0 ] || tests_of "$source" >/dev/null
done

if [ ! -x "$tool/cosmic-ray" ] || [ ! -x "$tool/coverage" ]; then
    "$python" -m venv .venv-mutation
    "$tool/python" -m pip install --quiet "cosmic-ray>=8.3,<9" "coverage>=7.6,<8"
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
trap 'exit 130' INT
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ ! -e "$file" ] || printf '%s\0' "$file" # a deleted file may still be in the index
done | tar --null -T - -c | tar -x -C "$copy"
cd "$copy"
export PATH="$repo/.venv/bin:$PATH" OMP_NUM_THREADS=1
export PYTHONPATH="$copy:$copy/backends:$copy/kernels" # before the link to the repository that .venv has

# A plugin of pytest that records the executed lines of a source, also in a pytest that a test starts. coverage comes last on
# the path: the other packages beside cosmic-ray are not those of the project.
cat >executed_lines.py <<'END'
import os
import sys

sys.path.append(os.environ["COVERAGE_PACKAGES"])
import coverage

recorded = coverage.Coverage(os.environ["EXECUTED_LINES"], data_suffix=True, include=os.environ["EXECUTED_SOURCE"])
recorded.set_option("run:disable_warnings", ["no-data-collected"])  # a test may leave all to a process that it starts


def pytest_configure():
    recorded.start()


def pytest_unconfigure():
    recorded.stop()
    recorded.save()
END
recorded() { # runs COMMAND...: recorded SOURCE COMMAND...
    local source=$copy/$1
    [ ! -d "$source" ] || source+="/*"
    rm -f "$copy"/executed.*
    COVERAGE_PACKAGES=$("$tool/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))') \
        EXECUTED_LINES=$copy/executed EXECUTED_SOURCE=$source PYTEST_PLUGINS=executed_lines "${@:2}"
}

# Leaves a share of the mutants of a session, and none of annotations, which no program reads; if asked, only those on
# executed lines in functions: what importing a module executes are mostly tables and names.
sample() { # sample SESSION PERCENT EXECUTED
    "$tool/python" - "$@" <<'END'
import ast
import random
import sys
from pathlib import Path

import coverage
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkResult


def executed(path):
    """Return the executed lines of a file that lie in functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, functions)]
    lines = {line for node in bodies for line in range(node.body[0].lineno, node.end_lineno + 1)}
    return lines.intersection(recorded.lines(str(Path(path).absolute())) or ())


def annotations(path):
    """Return the start and end of each annotation of a file."""
    nodes = [
        annotation
        for node in ast.walk(ast.parse(Path(path).read_text()))
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if annotation is not None
    ]
    return [((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in nodes]


if sys.argv[3]:
    measured = coverage.Coverage("executed")
    measured.combine()
    recorded = measured.get_data()
with use_db(sys.argv[1], WorkDB.Mode.open) as session:
    items = []
    paths = {item.mutations[0].module_path for item in session.work_items}
    spans = {path: annotations(path) for path in paths}
    lines = {path: executed(path) for path in paths if sys.argv[3]}
    for item in session.work_items:
        [mutation] = item.mutations
        path, position = mutation.module_path, tuple(mutation.start_pos)
        unused = any(first <= position < last for first, last in spans[path])
        unused |= path in lines and position[0] not in lines[path]
        items.append((unused, str(path), position, mutation.operator_name, mutation.occurrence, item.job_id))
    used = sorted(item for item in items if not item[0])
    kept = random.Random(0).sample(used, -(-len(used) * int(sys.argv[2]) // 100))
    for *_, job in set(items) - set(kept):
        session.set_result(job, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
print(f"{len(kept)} of {len(used)} mutants")
END
}

# Prints the mutants of a session that all tests passed, as diffs, and how many there were.
report() {
    "$tool/python" - "$1" <<'END'
import sys
from collections import Counter

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome

with use_db(sys.argv[1], WorkDB.Mode.open) as session:
    results = [result for _, result in session.completed_work_items if result.test_outcome is not None]
for result in results:
    if result.test_outcome == TestOutcome.SURVIVED:
        print(result.diff.partition("\n")[2], end="\n\n")
counts = Counter(result.test_outcome for result in results)
print(f"{counts[TestOutcome.SURVIVED]} of {len(results)} mutants survived, {counts[TestOutcome.INCOMPETENT]} could not run")
END
}

for source in "${sources[@]}"; do
    began=$SECONDS
    runs=
    if [ ${#tests[@]} -gt 0 ]; then
        runs=$(pytest "${tests[@]}")
    else
        while read -r path; do runs+="${runs:+&& }$(pytest "$path")"; done < <(tests_of "$source")
    fi
    command="bash -c $(printf '%q' "$runs")"
    echo "== $source =="
    ${executed:+recorded "$source"} bash -c "$runs" || { echo "scripts/mutate.sh: these tests fail without a mutant" >&2; exit 1; }
    "$python" - "$source" "$command" $((3 * (SECONDS - began) + 10)) >mutation.toml <<'END'
import json
import sys

source, command, timeout = sys.argv[1:]
print(f'[cosmic-ray]\nmodule-path = "{source}"\ntimeout = {timeout}.0\nexcluded-modules = []')
print(f'test-command = {json.dumps(command)}\n[cosmic-ray.distributor]\nname = "local"')
END
    rm -f mutation.sqlite
    "$tool/cosmic-ray" init mutation.toml mutation.sqlite
    sample mutation.sqlite "$percent" "$executed"
    "$tool/cosmic-ray" exec mutation.toml mutation.sqlite
    report mutation.sqlite
    echo "$source: $((SECONDS - began)) s"
done
