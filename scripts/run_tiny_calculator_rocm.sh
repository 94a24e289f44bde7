#!/usr/bin/env bash
# Train a small model to use a calculator with GRPO on AMD GPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" tiny_calculator rocm -- "$@"
