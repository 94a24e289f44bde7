#!/usr/bin/env bash
# Train all parameters of Qwen3-VL-8B's text model on Geometry3K with GRPO on whatever this machine has; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen3_vl_8b_geo3k auto -- "$@"
