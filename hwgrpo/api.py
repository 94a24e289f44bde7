"""What code of your own may import: docs/extend.md uses these names, and they stay when hwgrpo moves their code.

Each is imported at its first use, so that importing this module imports no torch.

Example:
    from hwgrpo.api import policy_loss

    @policy_loss("token", reads=())
    def policy_gradient(x, config):
        return -x.advantage * x.log_ratio.exp(), {}
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwgrpo.agents.action import Action, StepResult, ToolResult
    from hwgrpo.algorithms.losses import SurrogateInput
    from hwgrpo.algorithms.scope import policy_loss, scoped
    from hwgrpo.algorithms.token_advantages import TokenProbs, token_level
    from hwgrpo.catalog import ADVANTAGES, AGGREGATIONS, ENGINES, POLICY_LOSSES, STRATEGIES
    from hwgrpo.config.bound_arguments import Below
    from hwgrpo.config.fields import Limits
    from hwgrpo.rollout.deadlines import GroupDeadlines
    from hwgrpo.rollout.engine import Engine, Session, TurnRequest
    from hwgrpo.rollout.engine_kind import EngineKind
    from hwgrpo.rollout.engine_parts import EngineParts
    from hwgrpo.rollout.local.engine import local_engine
    from hwgrpo.rollout.workflow import Sampler, Trajectory
    from hwgrpo.training.feed.on_demand import on_demand
    from hwgrpo.training.feed.response_source import ResponseSource, SourceParts
    from hwgrpo.training.stages.stage import StepState
    from hwgrpo.training.strategies.sharding import Sharding
    from hwgrpo.training.strategies.single import Single
    from hwgrpo.training.strategies.strategy import Strategy
    from hwgrpo.training.strategies.strategy_kind import StrategyKind
    from hwgrpo.values import Completions, Prompt, StepRewards

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "ENGINES",
    "POLICY_LOSSES",
    "STRATEGIES",
    "Action",
    "Below",
    "Completions",
    "Engine",
    "EngineKind",
    "EngineParts",
    "GroupDeadlines",
    "Limits",
    "Prompt",
    "ResponseSource",
    "Sampler",
    "Session",
    "Sharding",
    "Single",
    "SourceParts",
    "StepResult",
    "StepRewards",
    "StepState",
    "Strategy",
    "StrategyKind",
    "SurrogateInput",
    "TokenProbs",
    "ToolResult",
    "Trajectory",
    "TurnRequest",
    "local_engine",
    "on_demand",
    "policy_loss",
    "scoped",
    "token_level",
]

_HOMES = {
    "hwgrpo.agents.action": ("Action", "StepResult", "ToolResult"),
    "hwgrpo.algorithms.scope": ("policy_loss", "scoped"),
    "hwgrpo.algorithms.losses": ("SurrogateInput",),
    "hwgrpo.algorithms.token_advantages": ("TokenProbs", "token_level"),
    "hwgrpo.catalog": ("ADVANTAGES", "AGGREGATIONS", "ENGINES", "POLICY_LOSSES", "STRATEGIES"),
    "hwgrpo.config.bound_arguments": ("Below",),
    "hwgrpo.config.fields": ("Limits",),
    "hwgrpo.rollout.deadlines": ("GroupDeadlines",),
    "hwgrpo.rollout.engine": ("Engine", "Session", "TurnRequest"),
    "hwgrpo.rollout.engine_kind": ("EngineKind",),
    "hwgrpo.rollout.engine_parts": ("EngineParts",),
    "hwgrpo.rollout.local.engine": ("local_engine",),
    "hwgrpo.rollout.workflow": ("Sampler", "Trajectory"),
    "hwgrpo.training.feed.on_demand": ("on_demand",),
    "hwgrpo.training.feed.response_source": ("ResponseSource", "SourceParts"),
    "hwgrpo.training.stages.stage": ("StepState",),
    "hwgrpo.training.strategies.sharding": ("Sharding",),
    "hwgrpo.training.strategies.single": ("Single",),
    "hwgrpo.training.strategies.strategy": ("Strategy",),
    "hwgrpo.training.strategies.strategy_kind": ("StrategyKind",),
    "hwgrpo.values": ("Completions", "Prompt", "StepRewards"),
}
"""Module -> the names that are imported from it."""


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'hwgrpo.api' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
