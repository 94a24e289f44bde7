#!/usr/bin/env bash
# Train Qwen3-32B on MATH with GRPO on AMD GPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen3_32b_math rocm -- "$@"
