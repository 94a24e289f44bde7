"""Write scripts/run_<recipe>[_<device>].sh, a launcher per recipe and device, each a call of run_recipe.sh.

`python scripts/generate_launchers.py` writes them all; `--backend NAME --words "its devices"` writes those of a
plug-in's backend. A launcher sets no device variables: `hwgrpo train` sets those of its backend (`hwgrpo env` prints
them).
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

RECIPES = {
    "tiny_sort": "a small model to sort digits",
    "tiny_calculator": "a small model to use a calculator",
    "tiny_lookup": "a small model to search documents",
    "tiny_guess": "a small model in a guessing game",
    "tiny_spell": "a small model to spell words with a second try",
    "tiny_squares": "a small vision-language model to count squares",
    "tiny_look": "a small vision-language model to look before it answers",
    "smollm2_135m_calculator": "LoRA adapters of SmolLM2-135M with a calculator",
    "smollm2_135m_arithmetic": "LoRA adapters of SmolLM2-135M on sums",
    "smollm2_135m_gsm8k": "SmolLM2-135M on GSM8K",
    "smollm2_135m_gsm8k_lora": "LoRA adapters of SmolLM2-135M on GSM8K",
    "qwen2_5_0_5b_gsm8k": "Qwen2.5-0.5B on GSM8K",
    "qwen2_5_3b_gsm8k_lora": "LoRA adapters of Qwen2.5-3B on GSM8K",
    "qwen2_5_7b_gsm8k": "Qwen2.5-7B on GSM8K",
    "qwen2_5_7b_gsm8k_full": "all parameters of Qwen2.5-7B on GSM8K",
    "qwen2_5_7b_retool": "Qwen2.5-7B on MATH with a Python interpreter",
    "qwen2_5_7b_search_r1": "Qwen2.5-7B on TriviaQA with a search engine",
    "qwen2_5_vl_7b_geo3k": "all parameters of Qwen2.5-VL-7B's text model on Geometry3K",
    "qwen3_vl_8b_geo3k": "all parameters of Qwen3-VL-8B's text model on Geometry3K",
    "qwen3_4b_math": "Qwen3-4B on MATH",
    "qwen3_8b_math": "Qwen3-8B on MATH",
    "qwen3_8b_math_qlora": "adapters of Qwen3-8B in 4 bits on MATH",
    "qwen3_30b_a3b_math_lora": "LoRA adapters of Qwen3-30B-A3B on MATH",
    "qwen3_30b_a3b_math_qlora": "adapters of Qwen3-30B-A3B in 4 bits on MATH",
    "qwen3_32b_math": "Qwen3-32B on MATH",
    "qwen3_32b_math_full": "all parameters of Qwen3-32B on MATH",
    "qwen2_7b_math": "Qwen2-7B on MATH",
    "deepseek_7b_math": "DeepSeek-LLM-7B on MATH",
    "glm4_9b_math": "GLM-4-9B on MATH",
    "mistral_7b_math": "Mistral-7B on MATH",
}
"""Recipe in configs/ -> description of the training."""
DEVICES = {
    "auto": "whatever this machine has",
    "cpu": "the CPU",
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD GPUs",
    "npu": "Huawei Ascend NPUs",
}

TEMPLATE = """\
#!/usr/bin/env bash
# Train {recipe_description} with GRPO on {device_description}; sets up .venv first if needed.
exec bash "$(dirname "$0")/run_recipe.sh" "$0" {recipe} {device} -- "$@"
"""


def launchers(devices: Mapping[str, str] = DEVICES) -> dict[str, str]:
    """Return the text of each launcher by file name.

    Args:
        devices: backend -> description.
    """
    texts = {}
    for recipe, recipe_description in RECIPES.items():
        for device, device_description in devices.items():
            file = f"run_{recipe}.sh" if device == "auto" else f"run_{recipe}_{device}.sh"
            texts[file] = TEMPLATE.format(
                recipe=recipe,
                recipe_description=recipe_description,
                device=device,
                device_description=device_description,
            )
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the launchers of all recipes.")
    parser.add_argument("--backend", metavar="NAME", help="write only those of this backend of a plug-in")
    parser.add_argument("--words", metavar="TEXT", help="its description, as in: train ... with GRPO on TEXT")
    options = parser.parse_args()
    if options.backend in DEVICES:
        parser.error(f"--backend {options.backend}: its launchers are written without options")
    devices = {options.backend: options.words or f"{options.backend} devices"} if options.backend else DEVICES
    folder = Path(__file__).resolve().parent
    for file, text in launchers(devices).items():
        (folder / file).write_text(text)
        (folder / file).chmod(0o755)
    return 0


if __name__ == "__main__":
    sys.exit(main())
