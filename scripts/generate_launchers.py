"""Write scripts/run_<recipe>[_<device>].sh, a launcher per recipe and device, from one template.

`python scripts/generate_launchers.py` writes them all; `--backend NAME --words "its devices"` those of a backend
that a plug-in brings. A launcher names no variable of any device: `hwgrpo train` sets those of its backend itself
(`hwgrpo env` shows them).
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

RECIPES = {
    "tiny_sort": "a small model to sort digits",
    "qwen2_5_0_5b_gsm8k": "Qwen2.5-0.5B on GSM8K",
    "qwen2_5_3b_gsm8k_lora": "low-rank adapters of Qwen2.5-3B on GSM8K",
    "qwen2_5_7b_gsm8k": "Qwen2.5-7B on GSM8K",
    "qwen3_4b_math": "Qwen3-4B on MATH",
    "qwen3_8b_math": "Qwen3-8B on MATH",
    "qwen3_32b_math": "Qwen3-32B on MATH",
    "qwen2_7b_math": "Qwen2-7B on MATH",
    "deepseek_7b_math": "DeepSeek-LLM-7B on MATH",
    "glm4_9b_math": "GLM-4-9B on MATH",
    "mistral_7b_math": "Mistral-7B on MATH",
}
"""Recipe in configs/ -> what it trains."""
DEVICES = {
    "auto": "whatever this machine has",
    "cpu": "the CPU",
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD GPUs",
    "npu": "Huawei Ascend NPUs",
}

TEMPLATE = """\
#!/usr/bin/env bash
# Train {recipe_words} with GRPO on {device_words}; sets up .venv first when needed.
#   bash scripts/{file}                                      as it is
#   bash scripts/{file} trainer.max_steps=50 rollout.n=16    with other settings
#   bash scripts/{file} --dry-run                            the plan alone: needs no such device
{data}# Written by scripts/generate_launchers.py from one template; lasting changes belong there.
set -euo pipefail
repo=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)

# ---- yours to adjust; settings on the command line come last and win ----
config="$repo/configs/{recipe}.yaml"
settings=(
    backend.name={device}
)
# For several devices: words for torchrun, as (--nproc-per-node 8); over 4 hosts, on the first of them,
# (--nnodes 4 --node-rank 0 --master-addr HOST --master-port 29500 --nproc-per-node 8).
torchrun=()
# --------------------------------------------------------------------------

dry_run=""
for argument in "$@"; do
    case $argument in
        -h | --help) sed -n '2,/^set /s/^# \\{{0,1\\}}//p' "$0"; exit 0 ;;
        --dry-run) dry_run=1 ;;
    esac
done
{cann}
# A plan takes the environment that is there: it needs no build for a device that is not.
if [ -z "$dry_run" ]; then
    bash "$repo/scripts/setup.sh"{setup_args}
elif [ ! -x "$repo/.venv/bin/hwgrpo" ]; then
    bash "$repo/scripts/setup.sh"
fi
{stop}if [ ${{#torchrun[@]}} -gt 0 ]; then
    exec "$repo/.venv/bin/torchrun" "${{torchrun[@]}}" -m hwgrpo train "$config" "${{settings[@]}}" "$@"
fi
exec "$repo/.venv/bin/hwgrpo" train "$config" "${{settings[@]}}" "$@"
"""

CANN = """
# torch-npu finds its libraries through the variables that CANN's own scripts set; they read unset variables.
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
    cann=/usr/local/Ascend/cann/set_env.sh # since CANN 8.5; before it, that of ascend-toolkit
    [ -f "$cann" ] || cann=/usr/local/Ascend/ascend-toolkit/set_env.sh
    for file in "$cann" /usr/local/Ascend/nnal/atb/set_env.sh; do
        if [ -f "$file" ]; then
            set +u
            # shellcheck disable=SC1090
            source "$file"
            set -u
        fi
    done
fi
"""

STOP_WITHOUT_CANN = """
# Without those variables an image may still bring CANN's libraries: torch-npu itself is asked, and says what is wrong.
if [ -z "${ASCEND_HOME_PATH:-}$dry_run" ] &&
    ! said=$("$repo/.venv/bin/hwgrpo" detect --backend npu --probe); then
    echo "${said##*$'\\n'}" >&2
    exit 1
fi

"""

DATA = "# Reads data/{task} in the folder where it is called; `hwgrpo data {task}` makes that.\n"


def launchers(devices: Mapping[str, str] = DEVICES) -> dict[str, str]:
    """Return every launcher's text by file name.

    Args:
        devices: backend -> what it is in words. For one that is not in `DEVICES` set-up installs what fits the host.
    """
    texts = {}
    for recipe, recipe_words in RECIPES.items():
        task = next((word for word in ("gsm8k", "math") if word in recipe.split("_")), None)
        for device, device_words in devices.items():
            file = f"run_{recipe}.sh" if device == "auto" else f"run_{recipe}_{device}.sh"
            texts[file] = TEMPLATE.format(
                recipe=recipe,
                recipe_words=recipe_words,
                data=DATA.format(task=task) if task else "",
                device=device,
                device_words=device_words,
                file=file,
                cann=CANN if device in ("auto", "npu") else "",
                stop=STOP_WITHOUT_CANN if device == "npu" else "",
                setup_args=f" --backend {device}" if device in DEVICES and device != "auto" else "",
            )
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the launchers of all recipes.")
    parser.add_argument("--backend", metavar="NAME", help="only those of this backend, which a plug-in brings")
    parser.add_argument("--words", metavar="TEXT", help="what it is, as in: train ... with GRPO on TEXT")
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
