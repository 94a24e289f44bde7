#!/usr/bin/env bash
# Train Qwen3-8B on MATH with GRPO on AMD GPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen3_8b_math rocm -- "$@"
