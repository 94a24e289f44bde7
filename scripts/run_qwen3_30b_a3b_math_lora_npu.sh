#!/usr/bin/env bash
# Train LoRA adapters of Qwen3-30B-A3B on MATH with GRPO on Huawei Ascend NPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen3_30b_a3b_math_lora npu -- "$@"
