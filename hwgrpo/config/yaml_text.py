"""YAML of recipes and overrides: plain values, decimal numbers, bounded size, dotted keys.

YAML 1.1, which PyYAML implements, reads `1:30` as 90 and `010` as 8. Here only decimal numbers are numbers.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import yaml
from yaml.reader import ReaderError

from hwgrpo.config.typed import hint_below, is_list, read_text_as_written, section_of
from hwgrpo.errors import ConfigError

MAX_BYTES = 2**20
"""Size of the largest recipe that is read; one with every setting has 10 KiB."""
MAX_DEPTH = 50
MAX_KEYS = 10_000
"""Keys of all mappings in one recipe, each anchor counted as often as it is used."""
MAX_NODES = 100_000
"""Values in one recipe, each anchor counted as often as it is used."""
MAX_DIGITS = 400
"""Python itself refuses to convert more than 4300 digits."""


def read_yaml(text: str, place: str, hint: Any) -> Any:
    """Return the value of a YAML document.

    Args:
        text: the document.
        place: its name in messages: a file, or `key='text'`.
        hint: the type that the schema has for it; a text setting takes `yes` or `007` as they are written, and a
            section dotted keys.

    Raises:
        ConfigError: it is not valid YAML, or larger or deeper than any recipe.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{place} has {len(text)} characters, and at most {MAX_BYTES} are read; use a smaller value")
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        node = _nest_dotted_keys(node, hint, MAX_DEPTH)
        read_text_as_written(node, hint)
        return loader.construct_document(node)
    except ReaderError as error:
        number = error.character if isinstance(error.character, int) else ord(error.character)
        raise ConfigError(
            f"{place}: character {error.position + 1} (U+{number:04X}) is not allowed in YAML; remove it, and write "
            "the text in UTF-8"
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        remedy = "indent with spaces" if "'\\t'" in str(error) else "put text that is not YAML in quotes"
        raise ConfigError(f"{place} is not valid YAML: {error.problem or error.context}{where}; {remedy}") from error
    finally:
        if loader is not None:
            loader.dispose()


def write_yaml(tree: Any) -> str:
    """Return plain containers as a YAML document, which `read_yaml` and OmegaConf read back; text stays text."""
    return yaml.dump(tree, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """SafeDumper without anchors, with text in quotes that another reader takes for a number or a truth value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "'" if text in ("y", "Y", "n", "N") or _is_number(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_PREFIX = "tag:yaml.org,2002:"
_TAGS = {_PREFIX + name for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}
_MAPPING, _MERGE, _TEXT = (_PREFIX + name for name in ("map", "merge", "str"))


class _Loader(yaml.SafeLoader):
    """SafeLoader with decimal numbers, text as keys, and bounds that also hold for anchors."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML fills it per class)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._keys = 0
        self._measures: dict[int, tuple[int, int, int]] = {}
        """id of a node -> (its values, its keys, its depth), anchors counted where they are used."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node:  # type: ignore[override]
        mark, alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels deep", problem_mark=mark)
        self._keys += isinstance(parent, yaml.MappingNode) and index is None
        if self._keys > MAX_KEYS:  # before the rest is read
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_KEYS} keys", problem_mark=mark)
        node: yaml.Node = super().compose_node(parent, index)  # type: ignore[assignment]
        self._depth -= 1
        if not alias:
            self._measure(node, mark)
        elif id(node) not in self._measures:
            raise yaml.MarkedYAMLError(problem="an anchor contains itself", problem_mark=mark)
        return node

    def _measure(self, node: yaml.Node, mark: yaml.Mark) -> None:
        if node.tag not in _TAGS:
            raise yaml.MarkedYAMLError(problem=f"the tag {node.tag!r} is not for settings", problem_mark=mark)
        below: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            below = node.value
        elif isinstance(node, yaml.MappingNode):
            self._check_names(node)
            below = [value for _, value in node.value]
        measures = [self._measures[id(child)] for child in below]
        size, depth = 1 + sum(m[0] for m in measures), 1 + max((m[2] for m in measures), default=0)
        keys = (len(below) if isinstance(node, yaml.MappingNode) else 0) + sum(m[1] for m in measures)
        if size > MAX_NODES or keys > MAX_KEYS or depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"anchors make more than {MAX_NODES} values, {MAX_KEYS} keys or {MAX_DEPTH} levels of it",
                problem_mark=mark,
            )
        self._measures[id(node)] = size, keys, depth

    def _check_names(self, node: yaml.MappingNode) -> None:
        """Check that the keys of a mapping are text, each once; `on` and `007` are text here."""
        seen = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a name", problem_mark=name.start_mark)
            if name.tag != "tag:yaml.org,2002:merge":
                name.tag = "tag:yaml.org,2002:str"
            if name.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name.value!r} is there twice", problem_mark=name.start_mark
                )
            seen.add(name.value)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        text = node.value.replace("_", "")
        if len(text) > MAX_DIGITS:
            raise yaml.MarkedYAMLError(
                problem=f"a number of {len(text)} digits, too many to convert", problem_mark=node.start_mark
            )
        if node.tag.endswith("int"):
            return int(text)
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_DIGITS = r"[0-9]+(?:_[0-9]+)*"
for _tag, _pattern, _first in (
    ("bool", r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)", "-+0123456789"),
    (
        "float",
        rf"[-+]?(?:{_DIGITS}\.(?:{_DIGITS})?(?:[eE][-+]?[0-9]+)?|\.{_DIGITS}(?:[eE][-+]?[0-9]+)?"
        rf"|{_DIGITS}[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", "<<", "<"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
):
    firsts = [*_first.replace("\0", ""), *([""] if "\0" in _first else [])]
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), firsts)
for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def _nest_dotted_keys(node: yaml.Node, hint: Any, longest: int) -> yaml.Node:
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
        elements = [_nest_dotted_keys(value, hint_below(hint, ""), longest) for value in node.value]
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
        (name, _nest_dotted_keys(value, hint if name.tag == _MERGE else hint_below(hint, key), longest))
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
