#!/usr/bin/env bash
# Train adapters of Qwen3-30B-A3B in 4 bits on MATH with GRPO on NVIDIA GPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen3_30b_a3b_math_qlora cuda -- "$@"
