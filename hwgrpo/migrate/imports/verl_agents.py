"""verl's settings of agents: tools, turns, and how the model calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hwgrpo.migrate.imports.conversion import Assignment, Converted, Refusal, Remark
from hwgrpo.migrate.imports.variable_text import known
from hwgrpo.migrate.imports.verl_algorithm import value_of
from hwgrpo.migrate.imports.verl_settings import ROLLOUT, VerlSettings

_TURNS = ROLLOUT + "multi_turn."
_ENABLE, _LOOP = _TURNS + "enable", ROLLOUT + "agent.default_agent_loop"
_FILES = {"tool_config": _TURNS + "tool_config_path", "function_tools": _TURNS + "function_tool_path"}
_LIMITS = {
    name: _TURNS + name for name in ("max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side")
}
_MOST = (_TURNS + "max_assistant_turns", _TURNS + "max_user_turns")
_FORMAT = _TURNS + "format"


def agents(v: VerlSettings) -> Iterator[Converted]:
    """Convert the tools and the limits of turns."""
    loop = v[_LOOP]
    if known(loop) not in ("single_turn_agent", "tool_agent"):
        why = "agent loops of your own are not converted"
        yield Refusal(_LOOP, loop, why, "tool_agent, or rollout.workflow=FILE.py:COROUTINE (docs/extend.md)")
        return
    files = {name: v[key] for name, key in _FILES.items() if v[key]}
    on = v[_ENABLE] or known(loop) == "tool_agent"
    keys = (_ENABLE, _LOOP, *_FILES.values(), *_LIMITS.values(), *_MOST, _FORMAT)
    if not on or not files:
        yield Remark(keys, "a response is one turn without tools" if on else "without effect while multi_turn is off")
        return
    limits = {name: v[key] for name, key in _LIMITS.items()}
    environment: dict[str, Any] = {"name": "verl_tools", "kwargs": {**files, **limits}}
    yield Assignment("rollout.workflow", "environment", (_ENABLE, _LOOP))
    yield Assignment("rollout.agent.environments", [environment], (*_FILES.values(), *_LIMITS.values()))
    most = [count for count in (v[_MOST[0]], v[_MOST[1]] and v[_MOST[1]] + 1) if count]
    yield Assignment("rollout.agent.max_turns", min(most, default=None), _MOST)
    if here := value_of(_FORMAT, v[_FORMAT]):
        yield Assignment("rollout.agent.call_format", here, (_FORMAT,))
    else:
        yield Refusal(_FORMAT, v[_FORMAT], "calls of this form are not read", "hermes, or another of the list")
