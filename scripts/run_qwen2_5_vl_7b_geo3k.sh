#!/usr/bin/env bash
# Train all parameters of Qwen2.5-VL-7B's text model on Geometry3K with GRPO on whatever this machine has; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen2_5_vl_7b_geo3k auto -- "$@"
