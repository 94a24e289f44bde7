"""Settings whose text has values of environment variables: exports write the interpolation, never the value."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from hwgrpo.config.document import entries
from hwgrpo.config.keys import INDEX
from hwgrpo.config.schema import Config
from hwgrpo.config.written_config import Place, dotted, interpolated_texts, value_at
from hwgrpo.errors import ConfigError
from hwgrpo.imports.hydra_values import Resolver
from hwgrpo.imports.variable_text import VariableText


def with_variables(config: Config) -> Config:
    """Return a loaded configuration in which texts that variables make are `VariableText`.

    Numbers and choices stay what they are: the other project's settings follow from them.
    """
    texts = interpolated_texts(config)
    if not any("oc." in text for text in texts.values()):
        return config
    settings = {dotted(place): value for place, value in _leaves(dataclasses.asdict(config), ())}
    resolver = Resolver(settings | {dotted(place): text for place, text in texts.items()}, {}, os.environ)
    choices = {each.key for each in entries() if each.allowed}
    result = copy.deepcopy(config)
    for place, text in texts.items():
        if INDEX.sub("[]", dotted(place)) in choices:
            continue
        try:
            found = resolver.resolved(dotted(place))
        except ConfigError:  # a variable that is not set, or a resolver that only OmegaConf has
            found = VariableText(text, "")
        if isinstance(found, VariableText):
            here: Any = value_at(result, place[:-1])
            kept = _with_text(value_at(here, place[-1:]), found)
            if isinstance(here, list | dict):
                here[place[-1]] = kept  # type: ignore[index]
            else:
                setattr(here, str(place[-1]), kept)
    return result


def variable_keys(config: Config) -> Iterator[str]:
    """Yield the settings with texts that `with_variables` changed, each once."""
    settings = {each.key for each in entries() if "[]" not in each.key}
    changed = [place for place in interpolated_texts(config) if isinstance(value_at(config, place), VariableText)]
    heads = (dotted(place[:size]) for place in changed for size in range(1, len(place) + 1))
    yield from dict.fromkeys(head for head in heads if head in settings)


def _with_text(value: Any, text: VariableText) -> Any:
    """Return a value whose texts are those of an interpolation; null where the variable is not set."""
    if isinstance(value, dict):
        return {name: _with_text(each, text) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_text(each, text) for each in value]
    if isinstance(value, str):
        return VariableText(str(text), value)
    return text if value is None else value


def _leaves(tree: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in inner:
        yield from _leaves(value, (*place, name))
    if not isinstance(tree, dict | list):
        yield place, tree
