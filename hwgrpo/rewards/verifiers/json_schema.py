"""JSON in a response that is valid under a schema, through the package jsonschema."""

from __future__ import annotations

import functools
import importlib
import json
from typing import Any

from hwgrpo.errors import ConfigError, DataError, error_text, quoted
from hwgrpo.values import Completions, PromptBatch

FENCES = ("```", "~~~")
INSTALL = 'pip install "hwgrpo[rewards]"'
NO_JSON = object()


def json_schema(
    batch: PromptBatch,
    completions: Completions,
    *,
    schema: Any = None,
    column: str | None = None,
    score: float = 1.0,
    json_score: float = 0.0,
) -> list[float]:
    """Return `score` for each response that is JSON valid under a schema.

    A response is JSON by itself, or its last fenced block that is. `NaN` and `Infinity` are not JSON. A schema's
    `format` is an annotation, and references to other documents are not fetched.

    Args:
        batch: the prompts, for their columns.
        completions: the responses.
        schema: the JSON schema, a mapping or its JSON text; None: each row has its own.
        column: the column with the row's schema, a mapping or JSON text; None: the ground truth.
        score: reward of valid JSON.
        json_score: reward of other JSON.

    Returns:
        One of `score`, `json_score` and 0 per response.

    Raises:
        ConfigError: the package is missing, or `schema` is no JSON schema.
        DataError: a row has no JSON schema.
    """
    values = []
    for index, text in zip(completions.prompt_index.tolist(), completions.texts, strict=True):
        prompt = batch.prompts[index]
        if schema is not None:
            validator = _validator(_as_text(schema), "kwargs.schema of reward json_schema", ConfigError)
        else:
            own = prompt.ground_truth if column is None else prompt.columns.get(column)
            name = "the ground truth" if column is None else f"column {column!r}"
            place = f"{name} of {prompt.place or f'prompt {prompt.uid}'}"
            if own is None:
                raise DataError(f"{place} is empty, but reward json_schema reads a JSON schema there")
            validator = _validator(_as_text(own), place, DataError)
        document = json_document(text)
        values.append(0.0 if document is NO_JSON else score if _is_valid(validator, document) else json_score)
    return values


def json_document(text: str) -> Any:
    """Return the JSON document in a response, `NO_JSON` without one."""
    for candidate in (text, *reversed(fenced_blocks(text))):
        try:
            return json.loads(candidate, parse_constant=_refuse)
        except (ValueError, RecursionError):  # nested too deeply to be read
            continue
    return NO_JSON


def fenced_blocks(text: str) -> list[str]:
    """Return the contents of the closed fenced blocks of a text."""
    blocks: list[str] = []
    opened: tuple[str, list[str]] | None = None
    for line in text.split("\n"):
        fence = line.strip()[:3]
        if opened is not None and line.strip() == opened[0]:
            blocks.append("\n".join(opened[1]))
            opened = None
        elif opened is not None:
            opened[1].append(line)
        elif fence in FENCES:
            opened = (fence, [])
    return blocks


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _as_text(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    if hasattr(schema, "items") and not isinstance(schema, dict):
        schema = _plain(schema)  # of OmegaConf
    return json.dumps(schema, default=_plain)


def _plain(value: Any) -> Any:
    return dict(value.items()) if hasattr(value, "items") else list(value)


@functools.lru_cache(maxsize=4096)
def _validator(schema: str, place: str, error: type[ValueError]) -> Any:
    """Return the validator of a schema's JSON text.

    Raises:
        ConfigError: the package is missing.
        error: the text is no JSON schema.
    """
    try:
        package = importlib.import_module("jsonschema")
        registry = importlib.import_module("referencing").Registry()  # fetches nothing
    except ImportError as missing:
        raise ConfigError(f"reward json_schema needs the package jsonschema ({missing}): {INSTALL}") from missing
    try:
        document = json.loads(schema)
        if not isinstance(document, dict | bool):
            raise ValueError("it is neither a mapping nor true or false")
        if isinstance(document, dict) and not isinstance(document.get("$schema", ""), str):
            raise ValueError("its $schema is no text")
        kind = package.validators.validator_for(document, default=package.Draft202012Validator)
        kind.check_schema(document)
    except (ValueError, RecursionError, package.SchemaError) as reason:
        why = getattr(reason, "message", None) or error_text(reason)
        raise error(f"{place}={quoted(schema)} is no JSON schema: {why}") from reason
    return kind(document, registry=registry)


def _is_valid(validator: Any, document: Any) -> bool:
    try:
        return bool(validator.is_valid(document))
    except RecursionError:  # nested too deeply to be checked
        return False
