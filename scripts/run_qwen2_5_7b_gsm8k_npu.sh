#!/usr/bin/env bash
# Train Qwen2.5-7B on GSM8K with GRPO on Huawei Ascend NPUs; sets up .venv first when needed.
#   bash scripts/run_qwen2_5_7b_gsm8k_npu.sh                                      as it is
#   bash scripts/run_qwen2_5_7b_gsm8k_npu.sh trainer.max_steps=50 rollout.n=16    with other settings
#   bash scripts/run_qwen2_5_7b_gsm8k_npu.sh --dry-run                            the plan alone: needs no such device
# Reads data/gsm8k in the folder where it is called; `hwgrpo data gsm8k` makes that.
# Written by scripts/generate_launchers.py from one template; lasting changes belong there.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# ---- yours to adjust; settings on the command line come last and win ----
config="$repo/configs/qwen2_5_7b_gsm8k.yaml"
settings=(
    backend.name=npu
)
# For several devices: words for torchrun, as (--nproc-per-node 8); over 4 hosts, on the first of them,
# (--nnodes 4 --node-rank 0 --master-addr HOST --master-port 29500 --nproc-per-node 8).
torchrun=()
# --------------------------------------------------------------------------

dry_run=""
for argument in "$@"; do
    case $argument in
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --dry-run) dry_run=1 ;;
    esac
done

# torch-npu finds its libraries through the variables that CANN's own scripts set; they read unset variables.
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
    cann=/usr/local/Ascend/cann/set_env.sh # since CANN 8.5; before it, that of ascend-toolkit
    [ -f "$cann" ] || cann=/usr/local/Ascend/ascend-toolkit/set_env.sh
    for file in "$cann" /usr/local/Ascend/nnal/atb/set_env.sh; do
        if [ -f "$file" ]; then
            set +u
            # shellcheck disable=SC1090
            source "$file"
            set -u
        fi
    done
fi

# A plan takes the environment that is there: it needs no build for a device that is not.
if [ -z "$dry_run" ]; then
    bash "$repo/scripts/setup.sh" --backend npu
elif [ ! -x "$repo/.venv/bin/hwgrpo" ]; then
    bash "$repo/scripts/setup.sh"
fi

# Without those variables an image may still bring CANN's libraries: torch-npu itself is asked, and says what is wrong.
if [ -z "${ASCEND_HOME_PATH:-}$dry_run" ] &&
    ! said=$("$repo/.venv/bin/hwgrpo" detect --backend npu --probe); then
    echo "${said##*$'\n'}" >&2
    exit 1
fi

if [ ${#torchrun[@]} -gt 0 ]; then
    exec "$repo/.venv/bin/torchrun" "${torchrun[@]}" -m hwgrpo train "$config" "${settings[@]}" "$@"
fi
exec "$repo/.venv/bin/hwgrpo" train "$config" "${settings[@]}" "$@"
