"""Whether a response ends where the chat template ends an assistant's message."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hwgrpo.config import Config
from hwgrpo.config.schema import DataConfig
from hwgrpo.data.chat_template import apply_template
from hwgrpo.data.prompts import PromptDataset
from hwgrpo.errors import DataError, quoted
from hwgrpo.models.loading import load_generation_config
from hwgrpo.rollout.stopping import end_token_ids

PROBE = "yes"
"""Content of the assistant's message in a conversation whose end is looked at."""


def end_of_turn_note(
    config: Config,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *datasets: PromptDataset | None,
    ask_hub: bool = True,
) -> str | None:
    """Return a note where responses go on after the token with which the chat template ends a message, else None.

    Args:
        config: checked settings.
        settings: the model's transformers configuration.
        tokenizer: the model's.
        datasets: the prompts.
        ask_hub: False: read a hub model's generation config from the cache only.
    """
    if not any(dataset is not None and dataset.templated for dataset in datasets):
        return None
    generation = load_generation_config(config.model, settings, ask_hub=ask_hub)
    ends = end_token_ids(tokenizer, generation, config.rollout.stop_token_ids)
    tail = _after_message(config.data, tokenizer)
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"] if tail.strip() else []
    if not ids or set(ids) & set(ends) or any(stop in tail for stop in config.rollout.stop):
        return None
    known = ", ".join(f"{quoted(tokenizer.convert_ids_to_tokens(each))} ({each})" for each in ends)
    special = next((each for each in ids if each in tokenizer.added_tokens_decoder), None)
    if special is None:
        what, remedy = f"the text {quoted(tail.strip())}", f"rollout.stop=[{quoted(tail.strip())}]"
    else:
        what = f"the token {quoted(tokenizer.convert_ids_to_tokens(special))} ({special})"
        remedy = f"rollout.stop_token_ids=[{special}]"
    return (
        f"warning: the chat template ends an assistant's message with {what}, and responses end with {known} alone: "
        f"after it they go on, into a turn that the model makes up; {remedy} ends them there"
    )


def _after_message(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the template writes after the content of an assistant's message; "" where that cannot be seen."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
    try:
        text = apply_template(messages, data, tokenizer, "a probe", add_generation_prompt=False)
    except DataError:  # a template that wants other roles
        return ""
    _, found, tail = text.rpartition(PROBE)
    return tail if found else ""
