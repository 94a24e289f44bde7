#!/usr/bin/env bash
# Train LoRA adapters of Qwen2.5-3B on GSM8K with GRPO on whatever this machine has; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen2_5_3b_gsm8k_lora auto -- "$@"
