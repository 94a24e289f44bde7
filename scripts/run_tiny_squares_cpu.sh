#!/usr/bin/env bash
# Train a small vision-language model to count squares with GRPO on the CPU; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" tiny_squares cpu -- "$@"
