#!/usr/bin/env bash
# Train LoRA adapters of SmolLM2-135M with a calculator with GRPO on whatever this machine has; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" smollm2_135m_calculator auto -- "$@"
