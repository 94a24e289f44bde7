"""Rollout engines: what turns prompts into sampled responses, behind one protocol."""

from hwgrpo.registry import Registry

ENGINES = Registry("rollout.engine", {"local": "hwgrpo.rollout.local:LocalEngine"})
