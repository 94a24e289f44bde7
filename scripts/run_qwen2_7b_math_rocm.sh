#!/usr/bin/env bash
# Train Qwen2-7B on MATH with GRPO on AMD GPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen2_7b_math rocm -- "$@"
