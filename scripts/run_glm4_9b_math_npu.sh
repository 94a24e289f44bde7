#!/usr/bin/env bash
# Train GLM-4-9B on MATH with GRPO on Huawei Ascend NPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" glm4_9b_math npu -- "$@"
