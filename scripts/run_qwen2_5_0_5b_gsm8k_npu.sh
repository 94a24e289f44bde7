#!/usr/bin/env bash
# Train Qwen2.5-0.5B on GSM8K with GRPO on Huawei Ascend NPUs; sets up .venv first when needed.
#   bash scripts/run_qwen2_5_0_5b_gsm8k_npu.sh                                      as it is
#   bash scripts/run_qwen2_5_0_5b_gsm8k_npu.sh trainer.max_steps=50 rollout.n=16    with other settings
# Reads data/gsm8k in the folder where it is called; `hwgrpo data gsm8k` makes that.
# Written by scripts/generate_launchers.py from one template; lasting changes belong there.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# ---- yours to adjust; settings on the command line come last and win ----
config="$repo/configs/qwen2_5_0_5b_gsm8k.yaml"
settings=(
    backend.name=npu
)
# For several devices: words for torchrun, as (--nproc-per-node 8); over 4 hosts, on the first of them,
# (--nnodes 4 --node-rank 0 --master-addr HOST --master-port 29500 --nproc-per-node 8).
torchrun=()
# --------------------------------------------------------------------------

# torch-npu finds its libraries through the variables that CANN's own scripts set; they read unset variables.
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
    for file in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
        if [ -f "$file" ]; then
            set +u
            # shellcheck disable=SC1090
            source "$file"
            set -u
        fi
    done
fi

bash "$repo/scripts/setup.sh" --backend npu

# Without those variables an image may still bring CANN's libraries: torch-npu itself is asked, and says what is wrong.
# A plan (--dry-run) needs no device.
if [ -z "${ASCEND_HOME_PATH:-}" ] && [[ " $* " != *" --dry-run "* ]] &&
    ! said=$("$repo/.venv/bin/hwgrpo" detect --backend npu --probe); then
    echo "${said##*$'\n'}" >&2
    exit 1
fi

if [ ${#torchrun[@]} -gt 0 ]; then
    exec "$repo/.venv/bin/torchrun" "${torchrun[@]}" -m hwgrpo train "$config" "${settings[@]}" "$@"
fi
exec "$repo/.venv/bin/hwgrpo" train "$config" "${settings[@]}" "$@"
