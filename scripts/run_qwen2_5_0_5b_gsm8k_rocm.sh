#!/usr/bin/env bash
# Train Qwen2.5-0.5B on GSM8K with GRPO on AMD GPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen2_5_0_5b_gsm8k rocm -- "$@"
