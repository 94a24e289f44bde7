#!/usr/bin/env bash
# Train Qwen2.5-7B on MATH with a Python interpreter with GRPO on NVIDIA GPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen2_5_7b_retool cuda -- "$@"
