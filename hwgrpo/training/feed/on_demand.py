"""Responses on demand: a step waits for its own, which the newest weights sample."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hwgrpo.rollout.engine import Engine
from hwgrpo.training.feed import group_files
from hwgrpo.training.feed.collector import make_collector
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.response_source import Batch, Collector, SourceParts


def on_demand(parts: SourceParts) -> OnDemand:
    """Return the source that collects a step's responses on demand."""
    return OnDemand(make_collector(parts, parts.strategy), parts.prompts, parts.engine)


@dataclass
class OnDemand:
    """Collects a step's responses on demand; see `ResponseSource` for the methods."""

    collector: Collector
    prompts: PromptSource
    engine: Engine

    def next(self, step: int) -> Batch:
        return self.collector.collect(step)

    def update_weights(self, version: int) -> None:
        self.engine.update_weights(version)

    def exclusive_engine(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def state(self) -> dict[str, Any]:
        return self.prompts.state()

    def files(self) -> dict[str, dict[str, torch.Tensor]]:
        return group_files.files_of(self.collector.kept, self.prompts.rank)

    def close(self) -> None:
        pass
