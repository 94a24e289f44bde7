#!/usr/bin/env bash
# Train a small model to spell words with a second try with GRPO on NVIDIA GPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" tiny_spell cuda -- "$@"
