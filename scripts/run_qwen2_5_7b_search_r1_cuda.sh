#!/usr/bin/env bash
# Train Qwen2.5-7B on TriviaQA with a search engine with GRPO on NVIDIA GPUs; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" qwen2_5_7b_search_r1 cuda -- "$@"
