"""Select the backend of this process: gather the facts that are needed, decide, or raise."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

from hwgrpo_backends import registry
from hwgrpo_backends.backend import Backend, BackendError
from hwgrpo_backends.decide import AUTO, Decision, decide
from hwgrpo_backends.facts import Facts
from hwgrpo_backends.tier0 import gather_tier0
from hwgrpo_backends.tier1 import gather_tier1

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """The backend of this process, with the decision and the facts that led to it."""

    backend: Backend
    decision: Decision
    facts: Facts


def choose(requested: str = AUTO, environ: Mapping[str, str] = os.environ) -> Choice:
    """Select the backend this process trains on, without importing torch, so that its environment can still be set.

    A child process imports torch if that could change the result: not if nothing installed is built for an accelerator,
    and not in a worker, which inherits its launcher's selection.

    Raises:
        BackendError: no backend can be selected; the message has the reason and the remedy.
    """
    backends, problems = registry.load_all()
    facts = gather_tier0(environ=environ, backends=backends.values())
    decision = decide(facts, requested, backends, problems)
    if torch_matters(decision, facts, backends):
        facts = gather_tier1(facts, environ, backends.values())
        decision = decide(facts, requested, backends, problems)
    if decision.selected is None:
        raise BackendError(decision.error)
    for warning in decision.warnings:
        logger.warning("%s", warning)
    return Choice(backends[decision.selected], decision, facts)


def torch_matters(decision: Decision, facts: Facts, backends: Mapping[str, Backend]) -> bool:
    """Return whether importing torch could change a decision made without it."""
    if decision.inherited or facts.torch_version is None:
        return False
    if facts.torch_plugins:
        return True  # each of them can break `import torch`, for every backend
    asked = [name for name in backends if decision.requested in (AUTO, name) and not backends[name].is_host]
    return any(decision.verdicts[name].claimed for name in asked)
