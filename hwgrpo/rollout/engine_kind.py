"""Capabilities and checks of a rollout engine, known before it is made. Importing this imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hwgrpo.catalog import ENGINES
from hwgrpo.config import Config
from hwgrpo.config.bound_arguments import bind_arguments
from hwgrpo.config.schema import RolloutConfig
from hwgrpo.registry import import_target

if TYPE_CHECKING:
    from hwgrpo_backends import Backend

    from hwgrpo.rollout.engine import Engine
    from hwgrpo.rollout.engine_parts import EngineParts


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """Capabilities, checks and factory of a rollout engine.

    An entry of `hwgrpo.catalog.ENGINES`. A `module:function` is imported when it is called.
    """

    maker: str | Callable[[EngineParts], Engine]
    """Factory: `EngineParts` -> `Engine`; a callable, or `module:callable`. Its keyword-only arguments are settings of
    the engine, `rollout.engine_kwargs`: their annotations are checked (`hwgrpo/config/bound_arguments.py`)."""
    refuse: Callable[[Config], None] | None = None
    """Raises ConfigError for settings that it does not support."""
    check_host: str | None = None
    """`module:function` of the settings that raises ConfigError where this machine lacks a requirement."""
    ask_environment: str | None = None
    """`module:function` of settings and backend that asks the engine's environment, in a process of its own, whether it
    computes on the run's devices: returns what it said, or raises ConfigError. Called before `auto` uses an engine."""
    check_server: str | None = None
    """`module:function` of the settings that raises ConfigError where the server at `rollout.server.url` is not of this
    kind or rejects the token. None: the engine uses no server."""
    samples_with_policy: bool = False
    """Whether it samples with the policy's weights, or a copy of them in this process; others are sent the weights."""
    reports_floors: bool = False
    """Whether it reports which tokens top_k, top_p and min_p dropped (`Completions.floors`)."""
    has_sessions: bool = False
    """Whether it has `open_session`: turns may come while others are sampled."""
    image_models: frozenset[str] | None = frozenset()
    """Model types whose prompts may have images; None: all that are supported."""
    runs_vllm: bool = False
    """Whether vLLM computes the attention."""
    receives_in_group: bool = False
    """Whether weights can go to its servers through a process group; else through a folder."""
    packages: tuple[str, ...] = ()
    """Distributions, one of which this environment needs."""
    remark: str = "part of hwgrpo"
    """Line of `hwgrpo doctor` where nothing is missing."""

    def make(self, parts: EngineParts) -> Engine:
        """Return an engine with the policy's current weights; a collective call of all ranks."""
        return self.bound_maker(parts.config)(parts)

    def bound_maker(self, config: Config) -> Callable[[EngineParts], Engine]:
        """Return the factory with the settings of its own.

        Raises:
            ConfigError: `rollout.engine_kwargs` has others, or values that it does not allow.
        """
        maker = import_target(self.maker) if isinstance(self.maker, str) else self.maker
        if not any(each.kind is each.KEYWORD_ONLY for each in inspect.signature(maker).parameters.values()):
            return maker  # it reads them from the settings, if it has any
        return bind_arguments(maker, config.rollout.engine_kwargs, 1, "rollout.engine_kwargs")

    @property
    def on_server(self) -> bool:
        """Whether it samples by a server, which may run in another environment."""
        return self.check_server is not None


def engine_kind(rollout: RolloutConfig) -> EngineKind:
    """Return the kind of engine that the settings name."""
    return ENGINES.load(rollout.engine)


def unmatched_filters(rollout: RolloutConfig, softcap: float | None = None) -> str | None:
    """Return why the trainer's log-probs are over more tokens than top_k, top_p and min_p keep; None: they are not.

    Args:
        rollout: settings of engine and sampling.
        softcap: the model's, of its logits; None: it has none.
    """
    if (rollout.top_k, rollout.top_p, rollout.min_p) == (0, 1.0, 0.0):
        return None
    if not engine_kind(rollout).reports_floors:
        return f"rollout.engine={rollout.engine} does not report which tokens they drop"
    return None if softcap is None else "the model's logits have a softcap"


def check_engine(config: Config) -> None:
    """Check that this machine has what the rollout engine needs.

    Raises:
        ConfigError: a requirement is missing, or a setting of the engine's own is wrong; the message says what to do.
    """
    kind = engine_kind(config.rollout)
    if kind.check_host is not None:
        import_target(kind.check_host)(config)
    kind.bound_maker(config)


def ask_environment(config: Config, backend: Backend) -> str:
    """Return what the engine's environment says of itself; empty where it is not asked.

    Raises:
        ConfigError: it cannot be used on these devices.
    """
    kind = engine_kind(config.rollout)
    return import_target(kind.ask_environment)(config, backend) if kind.ask_environment is not None else ""


def check_running_server(config: Config) -> None:
    """Check that the server at `rollout.server.url`, if set, responds and accepts the token.

    Raises:
        ConfigError: it does not.
    """
    kind = engine_kind(config.rollout)
    if kind.check_server is not None and config.rollout.server.url is not None:
        import_target(kind.check_server)(config)
