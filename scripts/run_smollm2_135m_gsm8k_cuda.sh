#!/usr/bin/env bash
# Train SmolLM2-135M on GSM8K with GRPO on NVIDIA GPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" smollm2_135m_gsm8k cuda -- "$@"
