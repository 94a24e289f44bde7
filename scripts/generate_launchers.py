"""Write scripts/run_<task>[_<device>].sh from one template: `python scripts/generate_launchers.py`."""

import sys
from pathlib import Path

TASKS = {"tiny_sort": "a small model to sort digits"}
DEVICES = {
    "auto": "whatever this machine has",
    "cpu": "the CPU",
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD GPUs",
    "npu": "Huawei Ascend NPUs",
}

TEMPLATE = """\
#!/usr/bin/env bash
# Train {task_words} with GRPO on {device_words}; sets up .venv first when needed.
#   bash scripts/{file}                                      as it is
#   bash scripts/{file} trainer.max_steps=50 rollout.n=16    with other settings
# Written by scripts/generate_launchers.py from one template; lasting changes belong there.
set -euo pipefail
repo=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)

# ---- yours to adjust; settings on the command line come last and win ----
config="$repo/configs/{task}.yaml"
settings=(
    backend.name={device}
)
# --------------------------------------------------------------------------
{cann}
bash "$repo/scripts/setup.sh"{setup_args}
exec "$repo/.venv/bin/hwgrpo" train "$config" "${{settings[@]}}" "$@"
"""

CANN = """
# torch-npu finds its libraries through the variables that CANN's own scripts set; they read unset variables.
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
    for file in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
        if [ -f "$file" ]; then
            set +u
            # shellcheck disable=SC1090
            source "$file"
            set -u
        fi
    done
fi
"""


def launchers() -> dict[str, str]:
    """Return every launcher's text by file name."""
    texts = {}
    for task, task_words in TASKS.items():
        for device, device_words in DEVICES.items():
            file = f"run_{task}.sh" if device == "auto" else f"run_{task}_{device}.sh"
            texts[file] = TEMPLATE.format(
                task=task,
                task_words=task_words,
                device=device,
                device_words=device_words,
                file=file,
                cann=CANN if device in ("auto", "npu") else "",
                setup_args="" if device == "auto" else f" --backend {device}",
            )
    return texts


def main() -> int:
    folder = Path(__file__).resolve().parent
    for file, text in launchers().items():
        (folder / file).write_text(text)
        (folder / file).chmod(0o755)
    return 0


if __name__ == "__main__":
    sys.exit(main())
