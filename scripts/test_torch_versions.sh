#!/usr/bin/env bash
# Run the unit tests with each torch that pyproject.toml promises, in an environment per version. CI's own run has one of them.
#   bash scripts/test_torch_versions.sh             every promised version
#   bash scripts/test_torch_versions.sh 2.10 2.14   these
#   bash scripts/test_torch_versions.sh --dry-run   print the commands without running them
#   bash scripts/test_torch_versions.sh 2.14 -- -k packing   what follows -- goes to pytest
# An environment, .venv-torch-VERSION, takes about 2 GB and stays for the next time; it has the newest release of torch's
# version as a CPU build, and everything else in the versions of scripts/constraints/. HWGRPO_TORCH_INDEX names the index of
# torch; empty is the index that pip is configured with, whose builds may bring gigabytes of CUDA. PYTHON is the interpreter.
# The last lines say what became of each version: passed, FAILED, or not run, with the reason. The exit code is 0 if at least
# one version ran and none failed.
set -uo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo" || exit 1
python=${PYTHON:-python3}
index=${HWGRPO_TORCH_INDEX-https://download.pytorch.org/whl/cpu}

promised=$(sed -nE 's/^    "torch>=2\.([0-9]+),<2\.([0-9]+)",$/\1 \2/p' pyproject.toml)
read -r first beyond <<<"$promised"
dry_run=false
versions=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --dry-run) dry_run=true ;;
        --) shift; break ;;
        *)
            minor=${1#2.}
            if [[ ! $1 =~ ^2\.[0-9]+$ ]] || [ "$minor" -lt "$first" ] || [ "$minor" -ge "$beyond" ]; then
                echo "$0: torch $1 is not promised; pyproject.toml has 2.$first to 2.$((beyond - 1))" >&2
                exit 2
            fi
            versions+=("$1")
            ;;
    esac
    shift
done
selected=("$@")
[ ${#versions[@]} -gt 0 ] || for ((minor = first; minor < beyond; minor++)); do versions+=("2.$minor"); done

read -ra folders <<<"$(sed -n 's/^unit  *together  *//p' tests/groups.txt)"
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
trap 'exit 130' INT
of_torch="torch|filelock|fsspec|jinja2|markupsafe|mpmath|networkx|setuptools|sympy|typing-extensions" # it says which
cat scripts/constraints/common.txt scripts/constraints/release.txt | grep -E '^[a-z].*==' | grep -vE "^($of_torch)==" >"$pins"

do_it() { # print a command, and run it unless this is a dry run
    printf '+ %s\n' "$*"
    $dry_run || "$@"
}

from=()
[ -z "$index" ] || from=(--index-url "$index")
available=
if ! $dry_run && ! available=$("$python" -m pip index versions torch "${from[@]}"); then
    echo "$0: ${index:-the configured index} does not say which versions of torch it has; HWGRPO_TORCH_INDEX names another" >&2
    exit 1
fi

# Test one version; sets outcome.
test_version() {
    local venv=.venv-torch-$1
    if ! $dry_run && ! grep -qE "[ ,]${1/./\\.}\.[0-9]" <<<"$available"; then
        outcome="not run: no wheel of it for this Python and platform at ${index:-the configured index}"
        return
    fi
    outcome="not run: the environment could not be made"
    [ -x "$venv/bin/python" ] || do_it "$python" -m venv "$venv" || return
    do_it "$venv/bin/python" -m pip install --quiet "torch==$1.*" "${from[@]}" || return
    do_it "$venv/bin/python" -m pip install --quiet -c "$pins" "torch==$1.*" -e ".[cpu,dev]" || return
    do_it "$venv/bin/python" -m pip install --quiet --no-deps "triton>=3.6,<4; platform_system == 'Linux'" || return
    outcome=passed
    ( # tests call tools by name
        export PATH="$repo/$venv/bin:$PATH"
        do_it "$venv/bin/python" -m pytest -q -m "not slow" -n 2 --dist loadfile "${folders[@]/#/tests/}" "${selected[@]}"
    ) || outcome=FAILED
    $dry_run && outcome="not run: a dry run"
}

lines=()
status=1
for version in "${versions[@]}"; do
    echo "== torch $version =="
    test_version "$version" </dev/null
    lines+=("torch $version  $outcome${selected:+ (selected tests)}")
done
echo
printf '%s\n' "${lines[@]}"
! printf '%s\n' "${lines[@]}" | grep -q '  passed' || status=0
! printf '%s\n' "${lines[@]}" | grep -q '  FAILED' || status=1
! $dry_run || status=0
exit $status
