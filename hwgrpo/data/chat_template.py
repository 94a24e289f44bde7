"""Chat templates: a row -> the model's input text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError
from omegaconf import OmegaConf

from hwgrpo.data.image_rows import PLACE, read_image_prompt
from hwgrpo.data.prompt_findings import LEFT_OUT, REWRITTEN, findings_of, open_end_findings, template_findings
from hwgrpo.data.row_schema import Message, check_text, message_text, read_ground_truth, read_prompt
from hwgrpo.data.sources import Rows
from hwgrpo.data.tool_descriptions import with_tools_described
from hwgrpo.errors import ConfigError, DataError, error_text, nearest, shown
from hwgrpo.rewards.ground_truths import is_missing
from hwgrpo.support.template_clock import clock_options
from hwgrpo.support.template_limit import template_limit

if TYPE_CHECKING:
    from hwgrpo.data.image_prompts import ImagePrompts


class Rendered(NamedTuple):
    """A row's prompt after the chat template."""

    text: str
    templated: bool
    """Whether the chat template was applied."""
    answered: bool
    """Whether the row has a ground truth."""
    columns: Mapping[str, Any]
    """The row."""
    findings: tuple[str, ...] = ()
    """Kinds of `prompt_findings` that the prompt is of."""
    sources: tuple[Any, ...] = ()
    """What the row has for each image that the prompt shows."""


def render(rows: Rows, index: int, config: Any, tokenizer: Any, images: ImagePrompts | None = None) -> Rendered:
    """Return a row's prompt as the model's input text.

    Args:
        rows: the data.
        index: index of the row.
        config: the `data` settings.
        tokenizer: a transformers tokenizer, for its chat template.
        images: of a model that reads images; None: a text model, and a row with images is an error.

    Raises:
        ConfigError: settings contradict the row.
        DataError: the row is malformed.
    """
    rendered = _render(rows, index, config, tokenizer, images)
    if images is not None:
        images.check_marks(rendered.text, len(rendered.sources), rows.place(index))
    return rendered


def _render(rows: Rows, index: int, config: Any, tokenizer: Any, images: ImagePrompts | None) -> Rendered:
    place, row = rows.place(index), rows[index]
    # a missing answer is reported now, not in the middle of a run
    answered = not is_missing(read_ground_truth(row, config.ground_truth_key, place))
    messages, sources = conversation_with_images(row, config, place, images)
    findings = tuple(findings_of(messages))
    if isinstance(messages, str):
        return Rendered(messages, False, answered, row, (*findings, *open_end_findings(messages, tokenizer)))
    if config.chat == "never" and sources:
        raise ConfigError(
            f"data.chat=never joins the messages as text, and {place} has images, which the chat template shows; set "
            "data.chat=auto, or leave out such rows"
        )
    if config.chat == "never":
        text = "\n".join(message_text(message) for message in messages)
        return Rendered(text, False, answered, row, (*findings, *open_end_findings(text, tokenizer)))
    if tokenizer.chat_template is None:
        if sources:
            raise ConfigError(
                f"{place}: the prompt has images, which a chat template shows, and the tokenizer has none; set "
                "model.chat_template to a file with one"
            )
        if isinstance(row[config.prompt_key], str):
            raise ConfigError(
                f"data.chat=always puts plain text ({place}) into the tokenizer's chat template, and it has none; set "
                "model.chat_template to a file with one, or data.chat=auto to pass the text to the model unchanged"
            )
        raise ConfigError(
            f"{place}: the prompt is a conversation, and the tokenizer has no chat template; set model.chat_template "
            "to a file with one, or data.chat=never to join the messages"
        )
    # An assistant message at the end is the beginning of the response, to be continued; an empty one begins nothing.
    continued = messages[-1]["role"] == "assistant"
    if continued and not message_text(messages[-1]).strip() and len(messages) > 1:
        continued, messages = False, messages[:-1]
    apply = partial(apply_template, config=config, tokenizer=tokenizer, place=place, tools=rows.tools(index))
    write = partial(apply, add_generation_prompt=not continued, continued=continued)
    if images is None:
        text = write(messages)
        seen = tuple(template_findings(messages, text, tokenizer))
    else:
        text, seen = _written_with_parts(messages, write, tokenizer)
    findings = (*findings, *seen)
    if continued:
        findings = (*findings, *open_end_findings(text, tokenizer))
        if _is_rewritten(messages, text, apply):
            findings = (*findings, REWRITTEN)
    return Rendered(text, True, answered, row, findings, sources)


def _written_with_parts(
    messages: tuple[Message, ...], write: Callable[..., str], tokenizer: Any
) -> tuple[str, tuple[str, ...]]:
    """Return a conversation as text, and its findings, also by templates that show the parts of a content alone.

    Templates of models that read images differ: Pixtral's wants the system's message as text, SmolVLM's as parts.
    """
    text, seen = None, ()
    try:
        text = write(messages)
        seen = tuple(template_findings(messages, text, tokenizer))
        if LEFT_OUT not in seen:
            return text, seen
        text_of_parts = write(tuple(map(_in_parts, messages)))
    except DataError:
        if text is not None:
            return text, seen
        text_of_parts = write(tuple(map(_in_parts, messages)))
    return text_of_parts, tuple(template_findings(messages, text_of_parts, tokenizer))


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _is_rewritten(messages: Sequence[Message], text: str, apply: Callable[..., str]) -> bool:
    """Return whether a message to be continued does not begin, but for white space, as a response does."""
    try:
        opened = apply(messages[:-1], add_generation_prompt=True)
    except DataError:  # a conversation of this message alone
        return False
    return text.split() != (opened + message_text(messages[-1])).split()


def apply_template(
    messages: Sequence[Message],
    config: Any,
    tokenizer: Any,
    place: str,
    *,
    add_generation_prompt: bool,
    continued: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return a conversation as text.

    Args:
        messages: the conversation.
        config: the `data` settings.
        tokenizer: a transformers tokenizer with a chat template.
        place: file and line, for messages.
        add_generation_prompt: whether the beginning of an assistant's message is appended.
        continued: whether the last message is left open.
        tools: JSON schemas of tools that the model is shown, in a system message if the template shows none.

    Raises:
        ConfigError: `data.chat_template_kwargs` has an option that the trainer sets.
        DataError: the template refuses the conversation, or takes too long.
    """
    options = config.chat_template_kwargs
    options = OmegaConf.to_container(options) if OmegaConf.is_config(options) else options
    assert isinstance(options, Mapping)
    reserved = {"tokenize", "add_generation_prompt", "continue_final_message", "tools"} & {
        str(each) for each in options
    }
    if reserved:
        raise ConfigError(f"data.chat_template_kwargs: {', '.join(sorted(reserved))} is set by the trainer; remove it")
    _check_options(options, tokenizer.chat_template)
    if tools and not shows_tools(tokenizer.chat_template):
        messages, tools = with_tools_described(messages, tools), ()
    try:
        with template_limit(place):
            text = tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continued,
                tools=list(tools) or None,
                **clock_options(config.template_date) | {str(name): value for name, value in options.items()},
            )
    except DataError:
        raise
    except (
        TemplateError,
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
    ) as error:  # raised by the template's own code
        system = "leave data.system_prompt out, " if config.system_prompt else ""
        raise DataError(
            f"{place}: the chat template refuses this conversation: {error_text(error, 300)}; {system}change its "
            "messages, or set model.chat_template to a file with a template that takes them"
        ) from error
    check_text(text, f"{place}: the rendered conversation")
    return text


def shows_tools(template: Any) -> bool:
    """Return whether a chat template, or each of several, shows the tools that it is given."""
    return not unread_options({"tools": ()}, template)


def unread_options(options: Mapping[Any, Any], template: Any) -> list[str]:
    """Return the names of options that a chat template, or each of several, does not read."""
    return [str(name) for name in options if str(name) not in {*_names_in(template), "chat_template"}]


def _names_in(template: Any) -> set[str]:
    text = "\n".join(template.values()) if isinstance(template, Mapping) else str(template)
    return set(re.findall(r"[A-Za-z_]\w*", text))


def _check_options(options: Mapping[Any, Any], template: Any) -> None:
    """Check that a template reads the options.

    Raises:
        ConfigError: one has no effect, or is text where it should be true or false.
    """
    unread = unread_options(options, template)
    for name, value in options.items():
        key = f"data.chat_template_kwargs.{name}"
        if str(name) in unread:
            near = nearest(str(name), _names_in(template))
            raise ConfigError(
                f"{key}={shown(value)} has no effect, for the chat template has no variable of that name; "
                + (f"did you mean {near}? Otherwise remove it" if near else "remove it")
            )
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise ConfigError(
                f"{key}={shown(value)} is text, which is neither true nor false in a template: write "
                f"{value.lower()} without quotes"
            )


def conversation(row: Mapping[str, Any], config: Any, place: str) -> str | tuple[Message, ...]:
    """Return a row's prompt with the settings `chat`, `system_prompt`, `few_shot` and `instruction` applied."""
    return _completed(read_prompt(row, config.prompt_key, place), config, place)


def conversation_with_images(
    row: Mapping[str, Any], config: Any, place: str, images: ImagePrompts | None
) -> tuple[str | tuple[Message, ...], tuple[Any, ...]]:
    """Return the same, with `{"type": "image"}` where an image stands, and what the row has for each.

    Args:
        row: the data row.
        config: the `data` settings.
        place: file and row, for messages.
        images: None: a text model, and a row with images is an error.
    """
    if images is None:
        return conversation(row, config, place), ()
    prompt, sources = read_image_prompt(row, config, images.marks, place)
    _refuse_places(config)
    return _completed(prompt, config, place), sources


def _refuse_places(config: Any) -> None:
    """Raise `ConfigError` where a setting has the place of an image: it has no image, and would be shown as text."""
    few_shot = [text for each in config.few_shot for text in (each.prompt, each.response)]
    for key, texts in (
        ("system_prompt", [config.system_prompt]),
        ("instruction", [config.instruction]),
        ("few_shot", few_shot),
    ):
        if any(PLACE in text for text in texts if text):
            raise ConfigError(
                f"data.{key} has {PLACE}, the place of an image, and images are those of rows; take it out there"
            )


def _completed(prompt: str | tuple[Message, ...], config: Any, place: str) -> str | tuple[Message, ...]:
    prompt = _instructed(prompt, config.instruction, place)
    if isinstance(prompt, str):
        if config.chat != "always":
            for key in ("system_prompt", "few_shot"):
                if getattr(config, key):
                    raise ConfigError(
                        f"data.{key} is set, but {place} is plain text and gets no chat template under "
                        f"data.chat={config.chat}; set data.chat=always, or remove data.{key}"
                    )
            return prompt
        prompt = ({"role": "user", "content": prompt},)
    own_system = prompt[0]["role"] in ("system", "developer")
    system, rest = (prompt[:1], prompt[1:]) if own_system else ((), prompt)
    if config.system_prompt and not own_system:
        system = ({"role": "system", "content": config.system_prompt},)
    return (*system, *few_shot_messages(config), *rest)


def few_shot_messages(config: Any) -> Iterator[Message]:
    """Yield the turns of `few_shot`, each with the instruction that a prompt gets."""
    for example in config.few_shot:
        yield {"role": "user", "content": _with_instruction(example.prompt, config.instruction)}
        yield {"role": "assistant", "content": example.response}


def _instructed(prompt: str | tuple[Message, ...], instruction: str | None, place: str) -> str | tuple[Message, ...]:
    """Return a prompt with the instruction at its end."""
    if not instruction:
        return prompt
    if isinstance(prompt, str):
        return _with_instruction(prompt, instruction)
    last = max((number for number, message in enumerate(prompt) if message["role"] == "user"), default=None)
    if last is None:
        raise DataError(
            f"{place}: the conversation has no message of the user, to which data.instruction could be added; remove "
            "the instruction, or the row"
        )
    content = prompt[last]["content"]
    if isinstance(content, str) or all("text" in part for part in content or ()):
        content = _with_instruction(message_text(prompt[last]), instruction)
    elif "text" in content[-1]:
        content = [*content[:-1], {**content[-1], "text": _with_instruction(content[-1]["text"], instruction)}]
    else:  # after an image
        content = [*content, {"type": "text", "text": instruction}]
    message = {**prompt[last], "content": content}
    return (*prompt[:last], message, *prompt[last + 1 :])


def _with_instruction(text: str, instruction: str | None) -> str:
    """Return a text and the instruction, after a space unless it begins with white space itself."""
    if not instruction:
        return text
    return text + (instruction if instruction[0].isspace() else f" {instruction}")
