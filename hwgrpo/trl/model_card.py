"""The model card of a trained model: README.md with the metadata of the hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCardData

import hwgrpo

TAGS = ("generated_from_trainer", "hwgrpo", "grpo")
_PAPER = "[DeepSeekMath](https://arxiv.org/abs/2402.03300)"


def model_card(
    name: str, base: str | None, dataset: str | None, tags: Iterable[str], settings: Mapping[str, Any]
) -> str:
    """Return the text of a model card.

    Args:
        name: the model's.
        base: name of the model that was trained, on the hub; None: it is not there.
        dataset: its name on the hub; None: not known.
        tags: further tags.
        settings: the settings of the run here.
    """
    data = ModelCardData(
        base_model=base,
        datasets=dataset,
        library_name="transformers",
        model_name=name,
        tags=sorted({*TAGS, *tags}),
    )
    trained = f"[{base}](https://huggingface.co/{base})" if base else "a local model"
    rows = f" on [{dataset}](https://huggingface.co/datasets/{dataset})" if dataset else ""
    lines = [
        "---",
        data.to_yaml(),
        "---",
        "",
        f"# {name}",
        "",
        f"{trained}, trained{rows} by GRPO ({_PAPER}) with hwgrpo {hwgrpo.__version__}, transformers "
        f"{transformers.__version__} and torch {torch.__version__}.",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| `{key}` | `{value}` |" for key, value in sorted(settings.items()) if key != "trainer.output_dir"),
    ]
    return "\n".join(lines) + "\n"
