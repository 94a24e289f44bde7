"""Dotted keys in YAML: `model.path: x` is `model: {path: x}`."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from hwgrpo.config.typed import hint_below, is_list, section_of

_MAPPING = "tag:yaml.org,2002:map"
_MERGE = "tag:yaml.org,2002:merge"
_TEXT = "tag:yaml.org,2002:str"


def nest_dotted_keys(node: yaml.Node, hint: Any, longest: int) -> yaml.Node:
    """Return a node in which the dotted keys of sections are nested mappings.

    Keys of free-form mappings, such as keyword arguments, stay as they are written.

    Args:
        node: a value of YAML; it is not changed, since anchors share nodes.
        hint: the type that the schema has for it.
        longest: maximum number of names in a dotted key; a longer key stays, as an unknown one.

    Raises:
        yaml.MarkedYAMLError: a setting is there twice, as a dotted key and in a section.
    """
    if isinstance(node, yaml.SequenceNode) and is_list(hint):
        elements = [nest_dotted_keys(value, hint_below(hint, ""), longest) for value in node.value]
        return yaml.SequenceNode(node.tag, elements, node.start_mark, node.end_mark)
    if not isinstance(node, yaml.MappingNode):
        return node
    section = None if is_list(hint) else section_of(hint)
    fields = {field.name for field in dataclasses.fields(section)} if section else set()
    pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for name, value in node.value:
        first, *rest = name.value.split(".")
        if first in fields and len(rest) < longest:
            name, value = _key(first, name), _nested(rest, name, value)
        if name.value in pairs:
            value = _joined(pairs[name.value][1], value, name)
        pairs[name.value] = name, value
    nested = [
        (name, nest_dotted_keys(value, hint if name.tag == _MERGE else hint_below(hint, key), longest))
        for key, (name, value) in pairs.items()
    ]
    return yaml.MappingNode(node.tag, nested, node.start_mark, node.end_mark)


def _key(text: str, written: yaml.Node) -> yaml.ScalarNode:
    return yaml.ScalarNode(_TEXT, text, written.start_mark, written.end_mark)


def _nested(names: list[str], written: yaml.Node, value: yaml.Node) -> yaml.Node:
    """Return `{a: {b: value}}` for the names a and b."""
    for name in reversed(names):
        value = yaml.MappingNode(_MAPPING, [(_key(name, written), value)], written.start_mark, value.end_mark)
    return value


def _joined(earlier: yaml.Node, later: yaml.Node, name: yaml.Node) -> yaml.Node:
    """Return a mapping with the pairs of two."""
    if not isinstance(earlier, yaml.MappingNode) or not isinstance(later, yaml.MappingNode):
        raise yaml.MarkedYAMLError(problem=f"the key {name.value!r} is there twice", problem_mark=name.start_mark)
    return yaml.MappingNode(_MAPPING, [*earlier.value, *later.value], earlier.start_mark, later.end_mark)
