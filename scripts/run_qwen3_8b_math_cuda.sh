#!/usr/bin/env bash
# Train Qwen3-8B on MATH with GRPO on NVIDIA GPUs; sets up .venv first when needed.
#   bash scripts/run_qwen3_8b_math_cuda.sh                                      as it is
#   bash scripts/run_qwen3_8b_math_cuda.sh trainer.max_steps=50 rollout.n=16    with other settings
#   bash scripts/run_qwen3_8b_math_cuda.sh --dry-run                            the plan alone: needs no such device
# Reads data/math in the folder where it is called; `hwgrpo data math` makes that.
# Written by scripts/generate_launchers.py from one template; lasting changes belong there.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# ---- yours to adjust; settings on the command line come last and win ----
config="$repo/configs/qwen3_8b_math.yaml"
settings=(
    backend.name=cuda
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

# A plan takes the environment that is there: it needs no build for a device that is not.
if [ -z "$dry_run" ]; then
    bash "$repo/scripts/setup.sh" --backend cuda
elif [ ! -x "$repo/.venv/bin/hwgrpo" ]; then
    bash "$repo/scripts/setup.sh"
fi
if [ ${#torchrun[@]} -gt 0 ]; then
    exec "$repo/.venv/bin/torchrun" "${torchrun[@]}" -m hwgrpo train "$config" "${settings[@]}" "$@"
fi
exec "$repo/.venv/bin/hwgrpo" train "$config" "${settings[@]}" "$@"
