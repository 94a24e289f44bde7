"""Values from variables that may be secret: stored as interpolations, with a digest of their values.

Secrets reach a run through `${oc.env:NAME}` in its free-form mappings (arguments of rewards and engines, a server's
variables) and in the credentials of URLs. All other settings are stored as resolved, so that a
resumed run cannot change silently.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationKeyError, UnsupportedInterpolationType

from hwgrpo.config.typed import hints_of, section_of
from hwgrpo.errors import ConfigError
from hwgrpo.support.text import (
    has_credentials,
    hide_secrets,
    is_secret,
    remember_secrets,
    shown_mapping,
    without_credentials,
)

Place = tuple[str | int, ...]
"""Where a value stands: keys of mappings and indices of lists."""
URL = ("rollout", "server", "url")
"""The setting whose credentials may come with all of it from a variable."""
UNSET = re.compile(r"Environment variable '(?P<name>.*?)' not found")
SHORTEST = 8
"""Length from which a value is treated as a secret, whatever its name."""
ROUNDS = 50_000
DIGEST_BYTES = 2
_CALL = re.compile(r"\$\{\s*[\w.]+\s*:")
_REFERENCE = re.compile(r"\$\{\s*(?:[\w.]+\s*:\s*)?(?P<path>[^${}:,]+?)\s*[,}]")
"""A node interpolation, or the first argument of a resolver, which may be a node as in oc.select."""
_PART = re.compile(r"[.\[\]]+")
_ATTRIBUTE = "_written"
"""Of a configuration; no field of its dataclass, since it is no setting."""


@dataclass(frozen=True)
class Written:
    """A value that was made from variables."""

    text: str
    """As it was written, `${oc.env:KEY}`."""
    value: Any
    """What it stood for; None where a variable is not set."""
    unset: str | None = None
    """The variable that is not set."""


def written_of(config: Any) -> Mapping[Place, Written]:
    """Return what of a loaded configuration is stored as it was written."""
    return vars(config).get(_ATTRIBUTE, {})


def attach(config: Any, written: Mapping[Place, Written], tree: Any, section: type) -> None:
    """Let a configuration carry what of it is stored as it was written, and keep the secrets in it out of messages.

    Args:
        config: with every value resolved.
        written: values stored as written.
        tree: the configuration, unresolved, as plain containers.
        section: its dataclass.
    """
    vars(config)[_ATTRIBUTE] = dict(written)
    remember_secrets(secrets_in(written))
    typed = (
        text for place, text, free in _texts(tree, section, ()) if free and "${" not in text and _is_named_secret(place)
    )
    remember_secrets(text for text in typed if len(text) >= SHORTEST)


def dotted(place: Place) -> str:
    """Return a place as settings are named, `reward.functions.0.kwargs.key`."""
    return ".".join(map(str, place))


def source_line(path: str) -> Place:
    """Return the place of a dotted name; indices may be in brackets."""
    return tuple(int(part) if part.isdigit() else part for part in _PART.split(path) if part)


def texts(tree: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield every text of plain containers with its place."""
    inner = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield from texts(value, (*place, key))
    if isinstance(tree, str):
        yield place, tree


def interpolations(tree: Any, section: type) -> Iterator[tuple[Place, str, bool]]:
    """Yield the texts of an unresolved configuration that hold an interpolation.

    Yields:
        The place, the text, and whether it is in a free-form mapping.
    """
    for place, text, free in _texts(tree, section, ()):
        if "${" in text:
            yield place, text, free


def without_unset(place: Place, text: str, free: bool, error: Exception) -> Written | None:
    """Return the replacement of a value whose variable is not set; None where it cannot be secret.

    A mapping or a value in one becomes null; a URL loses its credentials.

    Args:
        place: where it stands.
        text: as it was written.
        free: whether it is, or is in, a free-form mapping.
        error: that its resolution raised.
    """
    unset = UNSET.search(str(error))
    if unset is None:
        return None
    if free:
        return Written(text, None, unset["name"])
    if has_credentials(text) or place == URL:
        without = without_credentials(text, "")
        return Written(text, None if "${" in without else without, unset["name"])
    return None


def written_values(config: Any, tree: Any, section: type, left_out: Mapping[Place, Written]) -> dict[Place, Written]:
    """Return the values of a configuration that are to be stored as they were written.

    Args:
        config: with every value resolved.
        tree: the same, unresolved, as plain containers.
        section: its dataclass.
        left_out: values left out because a variable is not set.
    """
    values = {
        place: (text, free, value_at(config, place))
        for place, text, free in interpolations(tree, section)
        if place not in left_out
    }
    found = dict(left_out)
    for place, (text, free, value) in values.items():
        if (free and _CALL.search(text)) or (not free and isinstance(value, str) and has_credentials(value)):
            found[place] = Written(text, value)
    while True:  # what refers to one of them would give it away
        more = {
            place: Written(text, value)
            for place, (text, _, value) in values.items()
            if place not in found and any(_meets(target, found) for target in references(text, place))
        }
        if not more:
            return found
        found |= more


def secrets_in(written: Mapping[Place, Written]) -> Iterator[str]:
    """Yield the texts among values that must not be shown: by their names, or long enough to be nothing else.

    A path, a URL or the name of a model is worth more in a message than hidden.
    """
    for place, each in written.items():
        names = [*map(str, place), *re.findall(r"oc\.env:\s*(\w+)", each.text)]
        named = any(map(is_secret, names))
        for _, text in texts(each.value):
            if named or (len(text) >= SHORTEST and "/" not in text):
                yield text
            for credentials in re.findall(r"://([^/\s@]+)@", text):
                yield credentials.partition(":")[2] or credentials


def overlaid(tree: Any, written: Mapping[Place, Written]) -> Any:
    """Replace values by their interpolations, in plain containers, and escape all other texts.

    A value changed after loading keeps the change.
    """
    escaped = _escaped(tree)
    for place, each in written.items():
        try:
            inner, here = value_at(tree, place[:-1]), value_at(escaped, place[:-1])
            now = inner.get(place[-1]) if isinstance(inner, dict) else inner[place[-1]]
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
        if now == each.value:
            here[place[-1]] = each.text
    return escaped


def digests(written: Mapping[Place, Written]) -> dict[str, str]:
    """Return digests by which a later start sees that a value has changed, by the places' dotted names.

    A short secret (a PIN, a word) can be found by trying all: each digest has its own salt and takes
    long to compute, and it is so short that a list of candidates leaves one in 65,536 of them, whichever was right.
    """
    result = {}
    for place, each in written.items():
        if each.unset is None:
            salt = secrets.token_bytes(8)
            result[dotted(place)] = f"{salt.hex()}:{_digest(each.value, salt)}"
    return result


def changed_values(saved: Mapping[str, str], written: Mapping[Place, Written]) -> list[str]:
    """Return the dotted names of values whose digest is another than the one that was saved."""
    changed = []
    for place, each in written.items():
        salt, colon, digest = saved.get(dotted(place), "").partition(":")
        if colon and each.unset is None and _digest(each.value, bytes.fromhex(salt)) != digest:
            changed.append(dotted(place))
    return changed


def shown_settings(tree: Any, section: type | None) -> Any:
    """Return unresolved settings as they may be shown: literal secrets in free-form mappings are hidden.

    Args:
        tree: as plain containers.
        section: their dataclass; None: nothing is known of their keys.
    """
    if not isinstance(tree, Mapping):
        return hide_secrets(tree) if isinstance(tree, str) else tree
    if section is None:
        return shown_mapping(tree)
    hints = hints_of(section)
    result = {}
    for name, value in tree.items():
        hint = hints.get(name)
        if section_of(hint) is not None and isinstance(value, list):
            result[name] = [shown_settings(each, section_of(hint)) for each in value]
        elif isinstance(value, Mapping):
            result[name] = shown_settings(value, section_of(hint))
        elif isinstance(value, list):
            result[name] = [shown_settings(each, None) for each in value]
        else:
            result[name] = shown_settings(value, None)
    return result


def unset_error(place: Place, text: str, variable: str) -> ConfigError:
    """Return the error for a setting whose variable is not set."""
    return ConfigError(
        f"{dotted(place)}={text!r}: the environment variable {variable} is not set; export it, or give a default: "
        f"${{oc.env:{variable},default}}"
    )


def unresolved_error(place: Place, text: str, error: Exception) -> ConfigError:
    """Return the error for an interpolation that cannot be resolved; it shows no value that was read."""
    unset = UNSET.search(str(error))
    if unset is not None:
        return unset_error(place, text, unset["name"])
    reason = type(error).__name__
    if isinstance(error, RecursionError):
        reason = "it refers to itself"
    elif isinstance(error, (InterpolationKeyError, UnsupportedInterpolationType, GrammarParseError)):
        reason = str(error).splitlines()[0]  # names the interpolation
    return ConfigError(
        f"{dotted(place)}={text!r} cannot be resolved: {reason}; name a setting as ${{rollout.n}} or a variable as "
        "${oc.env:NAME}, and write \\${ for the characters themselves"
    )


def _texts(tree: Any, hint: Any, place: Place, free: bool = False) -> Iterator[tuple[Place, str, bool]]:
    section = section_of(hint)
    if isinstance(tree, Mapping):
        hints = hints_of(section) if section is not None else {}
        for name, value in tree.items():
            inner = hints.get(name)
            yield from _texts(value, inner, (*place, name), free or typing.get_origin(inner) is dict)
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from _texts(value, section, (*place, i), free)
    elif isinstance(tree, str):
        yield place, tree, free


def value_at(tree: Any, place: Place) -> Any:
    """Return what stands at a place of containers or dataclasses."""
    value: Any = tree
    for key in place:
        indexed = isinstance(value, Mapping | list)
        value = value[key] if indexed else getattr(value, str(key))
    return value


def references(text: str, place: Place) -> Iterator[Place]:
    """Yield the places that a text's node interpolations name, relative ones seen from its own place."""
    for found in _REFERENCE.finditer(text):
        path = found["path"]
        up = len(path) - len(path.lstrip("."))
        parts = source_line(path)
        yield (*place[: len(place) - up], *parts) if up else parts


def _meets(target: Place, places: Mapping[Place, Any]) -> bool:
    """Return whether a place contains one of `places`, or is within it."""
    return any(target[: len(place)] == place or place[: len(target)] == target for place in places)


def _is_named_secret(place: Place) -> bool:
    return any(is_secret(str(part)) for part in place)


def _escaped(tree: Any) -> Any:
    """Return plain containers whose texts hold no interpolation once they are read back."""
    if isinstance(tree, Mapping):
        return {name: _escaped(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_escaped(value) for value in tree]
    if isinstance(tree, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", tree)
    return tree


def _digest(value: Any, salt: bytes) -> str:
    text = OmegaConf.to_yaml(OmegaConf.create({"value": _escaped(value)})) if not isinstance(value, str) else value
    return hashlib.pbkdf2_hmac("sha256", text.encode(), salt, ROUNDS, dklen=DIGEST_BYTES).hex()
