"""Settings whose text has values of environment variables: exports write the interpolation, never the value."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hwgrpo.catalog import LOGGERS, REWARDS
from hwgrpo.config import Config
from hwgrpo.config.document import entries
from hwgrpo.config.keys import INDEX
from hwgrpo.config.written_config import Place, dotted, interpolated_texts, value_at
from hwgrpo.errors import ConfigError
from hwgrpo.imports.hydra_values import Resolver
from hwgrpo.imports.variable_text import VariableText

_WORDS: Mapping[str, Collection[str]] = {
    "model.lora.target_modules[]": ("all-linear",),
    "reward.functions[].name": REWARDS.names(),
    "algorithm.filter_groups.metric": ("reward",),
    "trainer.resume": ("auto", "never"),
    "observe.loggers[]": LOGGERS.names(),
}
"""Texts of which some are choices: these follow the other project's settings, and say nothing of a variable else."""


def with_variables(config: Config) -> Config:
    """Return a loaded configuration in which texts that variables make are `VariableText`.

    Numbers and choices stay what they are: the other project's settings follow from them.
    """
    texts = interpolated_texts(config)
    if not any("oc." in text for text in texts.values()):
        return config
    settings = {dotted(place): value for place, value in _leaves(dataclasses.asdict(config), ())}
    above = tuple(f"{dotted(place)}." for place in texts)
    settings = {key: value for key, value in settings.items() if not key.startswith(above)}
    resolver = Resolver(settings | {dotted(place): text for place, text in texts.items()}, {}, os.environ)
    choices = {each.key for each in entries() if each.allowed}
    result = copy.deepcopy(config)
    for place, text in texts.items():
        key = INDEX.sub("[]", dotted(place))
        value = value_at(result, place)
        if key in choices or (isinstance(value, str) and value in _WORDS.get(key, ())):
            continue
        try:
            found = resolver.resolved(dotted(place))
        except ConfigError:  # a variable that is not set, or a resolver that only OmegaConf has
            found = VariableText(text, "")
        here: Any = value_at(result, place[:-1])
        kept = _with_texts(value, found)
        if isinstance(here, list | dict):
            here[place[-1]] = kept  # type: ignore[index]
        else:
            setattr(here, str(place[-1]), kept)
    return result


def variable_keys(config: Config) -> Iterator[str]:
    """Yield the settings with texts that `with_variables` changed, each once."""
    settings = {each.key for each in entries() if "[]" not in each.key}
    changed = [
        place
        for place in interpolated_texts(config)
        if any(isinstance(leaf, VariableText) for _, leaf in _leaves(value_at(config, place), ()))
    ]
    heads = (dotted(place[:size]) for place in changed for size in range(1, len(place) + 1))
    yield from dict.fromkeys(head for head in heads if head in settings)


def _with_texts(value: Any, found: Any) -> Any:
    """Return a value whose texts are those of its interpolation.

    Args:
        value: as the configuration has it; null where a variable is not set.
        found: what it resolves to: a text with variables, which is that of all texts in the value, or another
            setting, whose keys may be dotted.
    """
    variables = {dotted(place): leaf for place, leaf in _leaves(found, ()) if isinstance(leaf, VariableText)}
    if not variables:
        return value

    def kept(inner: Any, place: Place) -> Any:
        if isinstance(inner, dict):
            return {name: kept(each, (*place, name)) for name, each in inner.items()}
        if isinstance(inner, list):
            return [kept(each, (*place, i)) for i, each in enumerate(inner)]
        text = variables.get("", variables.get(dotted(place)))
        if text is None:
            return inner
        return VariableText(str(text), inner) if isinstance(inner, str) else text if inner is None else inner

    return kept(value, ())


def _leaves(tree: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in inner:
        yield from _leaves(value, (*place, name))
    if not isinstance(tree, dict | list):
        yield place, tree
