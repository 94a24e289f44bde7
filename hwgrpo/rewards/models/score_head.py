"""Heads with one score: which models have one, and new ones for language models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

ARCHITECTURE = "ForSequenceClassification"
"""End of the name of a saved architecture that has a head already."""


def is_classifier(settings: Any) -> bool:
    """Return whether a saved model, by its transformers configuration, has a sequence-classification head already."""
    return any(name.endswith(ARCHITECTURE) for name in settings.architectures or [])


@contextmanager
def without_load_report() -> Iterator[None]:
    """Leave out transformers' report of missing weights, where a new head is meant to be missing."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def missing_weights(model: Any, report: Any, *, new_head: bool) -> tuple[list[str], list[str]]:
    """Return the names of weights that a folder lacks: those of a new head, and others.

    Args:
        model: the loaded model.
        report: transformers' loading report.
        new_head: the folder is a language model's, whose head is new.
    """
    missing = sorted(report["missing_keys"])
    head = [name for name in missing if new_head and not name.startswith(f"{model.base_model_prefix}.")]
    return head, [name for name in missing if name not in head]


@torch.no_grad()
def draw_head(model: Any, names: Sequence[str], seed: int) -> None:
    """Draw a new head's weights from a generator of their own, by the configuration's `initializer_range`.

    Args:
        model: on the CPU.
        names: of the head's parameters; biases become 0.
        seed: of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    deviation = float(getattr(model.config.get_text_config(), "initializer_range", None) or 0.02)
    for name in names:
        weight = model.get_parameter(name)
        if weight.ndim < 2:
            weight.zero_()
        else:
            weight.normal_(0.0, deviation, generator=generator)
