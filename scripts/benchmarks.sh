#!/usr/bin/env bash
# Run the scripts of benchmarks/ one after another and write their tables into the pages of benchmarks/results/.
#   bash scripts/benchmarks.sh                    all of them: hours, on a machine that does nothing else
#   bash scripts/benchmarks.sh curves families    these runs
#   bash scripts/benchmarks.sh --smoke [RUN...]   tiny sizes, minutes; results go to a temporary folder, which it names
#   bash scripts/benchmarks.sh --list             the runs, the page of each and its command
# Of a page, only the text between <!-- RUN --> and <!-- end of RUN --> is replaced; families and vision_families write
# theirs in full, and agent_turns, sandbox and startup have none. Check the sentences around a new table: their figures
# are not replaced. A run that fails leaves its table unchanged, and the others go ahead. Exit code 1: one failed.
#   PYTHON=...        the interpreter (default .venv/bin/python)
#   TRL_PYTHON=...    an interpreter that has TRL (default PYTHON)
#   VLLM_PYTHON=...   an interpreter that has vLLM (default PYTHON); without it, --smoke skips the runs of vLLM
#   SMOLLM2=...       the folder that scripts/fetch_smollm2.py makes; without it, the runs of that model are skipped
#   GSM8K=...         the test questions, a file or a hub name (default openai/gsm8k)
#   VERL=...          a checkout of verl; without it, its graders do not run
set -uo pipefail

# A run, its page, and its command.
runs="\
against_trl_small against_trl.md python benchmarks/against_trl.py --trl-python TRL_PYTHON --setting add --setting sort --steps 200 --output benchmarks/results/against_trl_small.json
against_trl_8m against_trl.md python benchmarks/against_trl.py --trl-python TRL_PYTHON --setting 8m --steps 4 --block 2 --output benchmarks/results/against_trl_8m.json
agent_curves agents.md python benchmarks/agent_curves.py --output benchmarks/results/agents.json
agent_curves_smollm2 agents.md python benchmarks/agent_curves.py --model SMOLLM2 --output benchmarks/results/agents_smollm2.json
picture_curves vision.md python benchmarks/agent_curves.py --pictures --output benchmarks/results/vision.json
agent_turns agents.md python benchmarks/agent_turns.py --slots 16
curves curves.md python benchmarks/curves.py --output benchmarks/results/curves.csv
curves_vllm curves.md python benchmarks/curves.py --steps 20 --server-python VLLM_PYTHON --output benchmarks/results/curves_vllm.csv
dynamic_sampling dynamic_sampling_cpu.md python benchmarks/dynamic_sampling.py
dynamic_sampling_lr dynamic_sampling_cpu.md python benchmarks/dynamic_sampling.py --lr 1e-3
dynamic_sampling_sparse dynamic_sampling_cpu.md python benchmarks/dynamic_sampling.py --hopeless 15 --lr 1e-3 --tokens 160000 --seeds 3
families - python benchmarks/families.py --output benchmarks/results/families
graders real_model.md python benchmarks/graders.py --model SMOLLM2 --source GSM8K --dtype bfloat16 --threads 2 --verl VERL --trl-python TRL_PYTHON --output benchmarks/results/graders.json
grouped_update grouped_update_cpu.md python benchmarks/grouped_update.py --output benchmarks/results/grouped_update_cpu.json
image_steps vision.md python benchmarks/image_steps.py
image_steps_tower vision.md python benchmarks/image_steps.py --tower all
image_decoding vision.md python benchmarks/image_steps.py --decoding
image_decoding_long vision.md python benchmarks/image_steps.py --decoding --side 448 --response-tokens 256 --repeat 3
layout_times layout_times.md python benchmarks/layout_times.py --output benchmarks/results/layout_times.json
local_engine_short local_engine.md python benchmarks/local_engine.py --prompt-tokens 16 --response-tokens 32 --repeat 4
local_engine local_engine.md python benchmarks/local_engine.py
local_engine_vllm local_engine.md VLLM_PYTHON benchmarks/local_engine.py --peer vllm --size 36m
losses losses_cpu.md python benchmarks/losses.py --output benchmarks/results/losses_cpu.json
memory memory_cpu.md python benchmarks/memory.py --output benchmarks/results/memory_cpu.json
memory_lora memory_cpu.md python benchmarks/memory.py --rows lora --output benchmarks/results/memory_lora_cpu.json
memory_variants memory_cpu.md python benchmarks/memory.py --rows variants --freed-at-once --size 36m --size 120m --output benchmarks/results/memory_variants_cpu.json
online_reward_model online_reward_model_cpu.md python benchmarks/online_reward_model.py --seeds 5
overlap overlap_cpu.md python benchmarks/overlap.py --repeat 2 --steps 5 --output benchmarks/results/overlap_cpu.json
real_model_curves real_model.md python benchmarks/real_model.py --model SMOLLM2 --output benchmarks/results/real_model.json
real_model_float32 real_model.md python benchmarks/against_trl.py --trl-python TRL_PYTHON --setting arithmetic --model SMOLLM2 --threads 2 --steps 2 --block 1 --output benchmarks/results/real_model_float32.json
real_model_bfloat16 real_model.md python benchmarks/against_trl.py --trl-python TRL_PYTHON --setting arithmetic --model SMOLLM2 --dtype bfloat16 --threads 2 --steps 10 --block 2 --output benchmarks/results/real_model_bfloat16.json
real_model_engine real_model.md python benchmarks/local_engine.py --model SMOLLM2 --rows 64 --threads 2 --dtype float32 --dtype bfloat16 --output benchmarks/results/real_model_engine.json
real_model_busy real_model.md python benchmarks/local_engine.py --model SMOLLM2 --rows 64 --threads free --dtype bfloat16 --busy 1 --repeat 4 --output benchmarks/results/real_model_busy.json
sandbox - python benchmarks/sandbox.py --programs 500
startup - python benchmarks/startup.py --runs 20
step_ledger step_ledger.md python benchmarks/step_ledger.py --output benchmarks/results/step_ledger.json
strategies strategies_cpu.md torchrun --nproc-per-node 2 benchmarks/strategies.py ddp fsdp2 passes gathered zero-1 zero-2 zero-2-passes sequences layers --repeat 5 --output benchmarks/results/strategies_cpu.json
vision_families - python benchmarks/vision_families.py --output benchmarks/results/vision_families"

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo" || exit 1

names() { while read -r name _; do echo "$name"; done <<<"$runs"; }

smoke=()
wanted=()
while [ $# -gt 0 ]; do
    case "$1" in
        --list) echo "$runs"; exit 0 ;;
        -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --smoke) smoke=(--smoke) ;;
        *)
            if ! grep -qxF -- "$1" <<<"$(names)"; then
                echo "scripts/benchmarks.sh: unknown run '$1'; use one of: $(names | paste -sd ' ' -)" >&2
                exit 2
            fi
            wanted+=("$1")
            ;;
    esac
    shift
done
[ ${#wanted[@]} -gt 0 ] || mapfile -t wanted < <(names)

python=${PYTHON:-$repo/.venv/bin/python}
export PYTHONPATH="$repo:$repo/backends:$repo/kernels"
results=$repo/benchmarks/results
if [ ${#smoke[@]} -gt 0 ]; then
    results=$(mktemp -d)
    cp benchmarks/results/*.md "$results"
fi
output=$(mktemp)
trap 'rm -f "$output"' EXIT
trap 'exit 130' INT # otherwise Ctrl-C would only end the current run

# Replace the table of a page by the printed one, with its command, commit and machine: replace_table PAGE RUN COMMAND
replace_table() {
    "$python" - "$@" "$output" <<'END'
import datetime
import os
import re
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

from hwgrpo.bench.machine import processor

page, name, command, output = sys.argv[1:]


def git(*arguments):
    return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()


commit = git("rev-parse", "--short", "HEAD") or "unknown"
if git("status", "--porcelain", "--", ".", ":!benchmarks/results"):
    commit += " with changes"
conditions = f"commit {commit}, {datetime.date.today()}, {processor()}, {os.cpu_count()} cores, "
conditions += ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))
table = [line for line in Path(output).read_text().splitlines() if line.startswith("|")]
if not table:
    sys.exit(f"{name} printed no table")
caption = textwrap.fill(f"`{command}`, {conditions}:", 125, break_on_hyphens=False, break_long_words=False)
block = "\n".join([f"<!-- {name} -->", caption, "", *table, f"<!-- end of {name} -->"])
text = Path(page).read_text()
text, count = re.subn(rf"<!-- {name} -->.*<!-- end of {name} -->", lambda _: block, text, flags=re.DOTALL)
if count != 1:
    sys.exit(f"{page} has {count} blocks <!-- {name} --> ... <!-- end of {name} -->, expected 1")
Path(page).write_text(text)
END
}

status=0
summary=()
for run in "${wanted[@]}"; do
    read -r _ page command <<<"$(grep "^$run " <<<"$runs")"
    if [[ $run = *_vllm ]] && [ ${#smoke[@]} -gt 0 ] && [ -z "${VLLM_PYTHON:-}" ]; then
        summary+=("$run: skipped: VLLM_PYTHON is not set")
        continue
    fi
    if [[ " $command " = *" SMOLLM2 "* ]] && [ -z "${SMOLLM2:-}" ]; then
        summary+=("$run: skipped: SMOLLM2 is not set, a folder that scripts/fetch_smollm2.py makes")
        continue
    fi
    argv=()
    for argument in $command; do
        case $argument in
            python) argv+=("$python") ;;
            torchrun) argv+=("$python" -m torch.distributed.run --standalone) ;;
            TRL_PYTHON) argv+=("${TRL_PYTHON:-$python}") ;;
            VLLM_PYTHON) argv+=("${VLLM_PYTHON:-$python}") ;;
            SMOLLM2) argv+=("$SMOLLM2") ;;
            GSM8K) argv+=("${GSM8K:-openai/gsm8k}") ;;
            VERL) argv+=("${VERL:-VERL}") ;;
            benchmarks/results/*) argv+=("$results/${argument##*/}") ;;
            *) argv+=("$argument") ;;
        esac
    done
    echo
    echo "== $run =="
    began=$SECONDS
    outcome=finished
    if ! "${argv[@]}" "${smoke[@]}" </dev/null | tee "$output"; then
        outcome=failed
    elif [ "$page" != - ] && ! replace_table "$results/$page" "$run" "$command${smoke[*]/#/ }"; then
        outcome=failed
    fi
    [ $outcome = finished ] || status=1
    summary+=("$run: $outcome, $((SECONDS - began)) s")
done

echo
printf '%s\n' "${summary[@]}" "results: $results"
exit $status
