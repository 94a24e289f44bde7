"""Copies of what functions of the user's own are called with: what one call changes, no other call or epoch sees."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from hwgrpo.values import Prompt, PromptBatch

UNCHANGEABLE = frozenset((str, int, float, bool, complex, bytes, type(None)))


def own_copy(value: Any) -> Any:
    """Return a copy of an argument: dicts, lists, tensors and the rows of prompts are new, text and numbers shared.

    It takes no recursion, since rows may be nested as deep as their parser allows. Objects of other classes are copied
    by `copy.deepcopy`, and shared where their class does not allow it.
    """
    copies: dict[int, Any] = {}
    unfinished: list[Any] = []

    def copied(each: Any) -> Any:
        if type(each) in UNCHANGEABLE:
            return each
        if id(each) not in copies:
            if type(each) in (dict, list):
                copies[id(each)] = each.copy()
                unfinished.append(copies[id(each)])
            else:
                copies[id(each)] = _copied_object(each)
        return copies[id(each)]

    result = copied(value)
    for container in unfinished:  # grows meanwhile
        contents = container.values() if isinstance(container, dict) else container
        if UNCHANGEABLE.issuperset(map(type, contents)):
            continue
        for key, each in list(container.items() if isinstance(container, dict) else enumerate(container)):
            container[key] = copied(each)
    return result


def _own_prompt(prompt: Prompt) -> Prompt:
    messages = None if prompt.messages is None else tuple(map(own_copy, prompt.messages))
    columns = own_copy(dict(prompt.columns))
    return dataclasses.replace(prompt, ground_truth=own_copy(prompt.ground_truth), columns=columns, messages=messages)


def _copied_object(value: Any) -> Any:
    if isinstance(value, PromptBatch):
        return PromptBatch(tuple(map(_own_prompt, value.prompts)))
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, a generator, or a class of the user's, which may raise anything
        return value
