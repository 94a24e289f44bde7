#!/usr/bin/env bash
# Train all parameters of Qwen2.5-7B on GSM8K with GRPO on whatever this machine has; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen2_5_7b_gsm8k_full auto -- "$@"
