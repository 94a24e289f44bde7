"""Datasets of a TRL script -> rows with a prompt, and what the run needs to know of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from hwgrpo.data.given_rows import part_of
from hwgrpo.data.row_schema import read_prompt
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.support.template_limit import template_limit
from hwgrpo.trl.grpo_config import note
from hwgrpo.trl.trl_agents import Agents

SPECIAL_TOKENS = 8
"""Tokens that a tokenizer may put around a prompt."""
MEASURED = 256
"""Rows whose prompts, as environments give them, are measured."""


def rows_of(dataset: Any, name: str, count: int | None, *, needs_prompt: bool = True) -> Any:
    """Return a dataset with a column `prompt`, read where it is iterable only.

    Args:
        dataset: a `datasets.Dataset`, an iterable one, or a list of dicts; None stays None.
        name: the argument, for messages.
        count: rows that the run takes of an iterable one; None: not known.
        needs_prompt: False: environments may give the prompts.

    Raises:
        ConfigError: an iterable dataset without max_steps, or one of several splits.
        DataError: there is no prompt.
    """
    if dataset is None:
        return None
    if isinstance(dataset, Mapping):
        raise ConfigError(f"{name} has the splits {', '.join(map(str, dataset))}; give one, {name}=dataset['train']")
    if type(dataset).__module__.partition(".")[0] == "pandas":
        raise ConfigError(f"{name} is a pandas {type(dataset).__name__}; give datasets.Dataset.from_pandas({name})")
    if not hasattr(dataset, "__len__"):
        if count is None:
            raise ConfigError(f"{name} is iterable and has no length; set max_steps, or give a datasets.Dataset")
        dataset = list(itertools.islice(dataset, count))
        note(f"{name}: {len(dataset)} rows of the iterable dataset were read")
    if not len(dataset):
        raise DataError(f"{name} has no rows")
    columns = getattr(dataset, "column_names", None) or list(dataset[0])
    if "prompt" in columns:
        return dataset
    if "query" not in columns:
        if not needs_prompt:
            return dataset
        raise DataError(f"{name} has no column prompt (columns: {', '.join(columns)}); rename the one with the prompts")
    note(f"{name}: TRL has no column query; it is read as prompt")
    if hasattr(dataset, "rename_column"):
        return dataset.rename_column("query", "prompt")
    return [{**{key: value for key, value in row.items() if key != "query"}, "prompt": row["query"]} for row in dataset]


def evaluation_rows(dataset: Any, *, needs_prompt: bool = True) -> Any:
    """Return the rows of an evaluation dataset; those of several get their name as `data_source`.

    Raises:
        ConfigError, DataError: as `rows_of`; or rows of several datasets have the column already.
    """
    if not isinstance(dataset, Mapping):
        return rows_of(dataset, "eval_dataset", None, needs_prompt=needs_prompt)
    rows = []
    for name, part in dataset.items():
        for row in rows_of(part, f"eval_dataset[{name!r}]", None, needs_prompt=needs_prompt):
            if "data_source" in row:
                raise ConfigError("eval_dataset: several datasets with a column data_source; leave the column out")
            rows.append({**row, "data_source": str(name)})
    return rows


def longest_prompt(
    datasets: Iterable[Any], tokenizer: Any, template: Mapping[str, Any], agents: Agents | None = None
) -> int:
    """Return the tokens of the longest prompt, special ones included.

    Environments are reset for the rows, for up to `MEASURED` of a dataset: of a longer one the result has twice the
    tokens that they add.

    Args:
        datasets: rows with a prompt.
        tokenizer: of the model.
        template: options of the chat template.
        agents: give rows their tools and prompts.

    Raises:
        DataError: a row has no prompt, or one that is not text alone.
    """
    longest = 1
    for dataset in datasets:
        rows = part_of(dataset, "the dataset", "train_dataset").rows
        if agents is not None:
            longest = max(longest, _longest_opened(rows, tokenizer, template, agents))
            continue
        for number, row in enumerate(rows):
            if row["prompt"] is None:
                raise DataError(f"row {number} of the dataset has prompt=None; give text or messages, or drop it")
            prompt = read_prompt(row, "prompt", f"row {number} of the dataset")
            text = prompt if isinstance(prompt, str) else _rendered(prompt, tokenizer, template)
            longest = max(longest, len(tokenizer(text)["input_ids"]))
    return longest + SPECIAL_TOKENS


def _longest_opened(rows: Any, tokenizer: Any, template: Mapping[str, Any], agents: Agents) -> int:
    """Return the tokens of the longest prompt of rows that environments have opened."""
    step, longest, added = max(1, len(rows) // MEASURED), 1, 0
    for number in range(len(rows)):
        row, place = rows[number], f"row {number} of the dataset"
        own = [{"role": "user", "content": ""}] if row.get("prompt") is None else read_prompt(row, "prompt", place)
        messages = [{"role": "user", "content": own}] if isinstance(own, str) else own
        length = len(tokenizer(_rendered(messages, tokenizer, template))["input_ids"])
        longest = max(longest, length)
        if number % step == 0:
            opened, tools = agents.open(row)
            if opened is None:
                raise DataError(f"{place} has no prompt, and reset returned None for it; one of both gives the prompt")
            opened = _rendered(opened, tokenizer, {**template, "tools": tools})
            added = max(added, len(tokenizer(opened)["input_ids"]) - length)
    return longest + added * (1 if step == 1 else 2)


def _rendered(messages: Any, tokenizer: Any, template: Mapping[str, Any]) -> str:
    """Return a conversation as the run renders it: an assistant's message at the end is continued."""
    continued = messages[-1]["role"] == "assistant"
    with template_limit("a prompt of the dataset"):
        return tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            **template,
        )
