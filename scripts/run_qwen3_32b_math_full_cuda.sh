#!/usr/bin/env bash
# Train all parameters of Qwen3-32B on MATH with GRPO on NVIDIA GPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen3_32b_math_full cuda -- "$@"
