#!/usr/bin/env bash
# Train Qwen3-32B on MATH with GRPO on whatever this machine has; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen3_32b_math auto -- "$@"
