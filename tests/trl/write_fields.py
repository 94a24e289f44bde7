"""Write trl_fields.txt from an installed TRL: class, field and default of every argument of `trl grpo`.

`python -m tests.trl.write_fields` writes it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path

FILE = Path(__file__).parent / "trl_fields.txt"
VERSION = "1.16.0"


def fields() -> list[str]:
    """Return the lines of the file."""
    from trl.scripts.grpo import GRPOScriptArguments  # pyright: ignore[reportMissingImports]
    from trl.scripts.utils import DatasetMixtureConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.model_config import ModelConfig  # pyright: ignore[reportMissingImports]

    lines = []
    for kind in (GRPOConfig, ModelConfig, GRPOScriptArguments, DatasetMixtureConfig):
        for field in dataclasses.fields(kind):
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            default = default.value if isinstance(default, enum.Enum) else default
            lines.append(f"{kind.__name__} {field.name} {json.dumps(default)}")
    return lines


if __name__ == "__main__":
    FILE.write_text("\n".join(fields()) + "\n", encoding="utf-8")
