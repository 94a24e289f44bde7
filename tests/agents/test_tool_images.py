"""Tools that return images: their blocks, the tokens of a turn's results, limits, and what cannot be shown."""

import asyncio
import base64
import copy
import io
import re
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from hwgrpo.agents.action import ToolResult
from hwgrpo.agents.given_tools import GivenTool
from hwgrpo.agents.tool_answers import Tools
from hwgrpo.agents.tool_results import pack_result, unpack_result
from hwgrpo.agents.tool_schema import make_schema
from hwgrpo.config.schema import DataConfig, DataImagesConfig, ToolConfig
from hwgrpo.data.chat_template import apply_template
from hwgrpo.data.images import ImageReader
from hwgrpo.data.observed_images import ObservedImages
from hwgrpo.models import tiny_vision
from hwgrpo.rollout.turn_template import TurnTemplate
from hwgrpo.support.given_objects import TOOL, given
from hwgrpo.values import Sampling
from tests.agents.scripted import agent_engine, agent_rows, prompts_of
from tests.agents.test_image_observations import LARGE, SMALL, parts

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    + tiny_vision.BEGIN
    + tiny_vision.IMAGE
    + tiny_vision.END_OF_IMAGE
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# {{ tools }} #}"
)
"""That of the small model, with calls."""
NO_TOOL_ROLE = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
RED, BLUE = Image.new("RGB", SMALL, "red"), Image.new("RGB", LARGE, "blue")


def image(picture: Any) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


def read(block: Any) -> Image.Image:
    """Return the image of a block, as a prompt's is read."""
    source = {name: value for name, value in block.items() if name != "type"}
    return ImageReader(DataImagesConfig()).read_all([source], Path(), "here")[0].image


def returned(value: Any, max_chars: int = 100, side: str = "middle") -> ToolResult:
    return unpack_result(pack_result(value, max_chars, side), 0.0)


def shown(result: ToolResult) -> list[Any]:
    """Return the content of a result: texts, and (size, color of the first pixel) of images."""
    assert not isinstance(result.content, str)
    pictures = [each if each["type"] == "text" else read(each) for each in result.content]
    return [each["text"] if isinstance(each, dict) else (each.size, each.getpixel((0, 0))) for each in pictures]


IS_RED, IS_BLUE = (SMALL, (255, 0, 0)), (LARGE, (0, 0, 255))
FORMS = {
    "an image": (RED, [IS_RED]),
    "images": ([RED, BLUE], [IS_RED, IS_BLUE]),
    "blocks": ([text("a "), image(RED), text("b"), text("c"), image(BLUE)], ["a ", IS_RED, "bc", IS_BLUE]),
    "bytes": ([{"type": "image", "bytes": png(RED)}], [IS_RED]),
    "base64": ([{"type": "image", "base64": base64.b64encode(png(BLUE)).decode()}], [IS_BLUE]),
    "datasets": ([image({"bytes": png(BLUE), "path": "a.png"})], [IS_BLUE]),
    "a URI": (
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png(RED)).decode()}}],
        [IS_RED],
    ),
    "a caption and a block": (
        ["red:", {"type": "image", "base64": base64.b64encode(png(RED)).decode()}, text("end")],
        ["red:", IS_RED, "end"],
    ),
    "null fields": (
        [{"type": "image", "image": RED, "text": None}, {"type": "text", "text": "a", "image": None}],
        [IS_RED, "a"],
    ),
    "a caption": (["red:", RED], ["red:", IS_RED]),
    "a result": (ToolResult("two:", blocks=[RED, text(" and "), image(BLUE)]), ["two:", IS_RED, " and ", IS_BLUE]),
    "transparent": (Image.new("RGBA", SMALL, (255, 0, 0, 0)), [(SMALL, (255, 255, 255))]),
}


@pytest.mark.parametrize("form", FORMS)
def test_images_and_blocks_are_the_content_of_the_result(form: str):
    value, content = FORMS[form]
    result = returned(value)
    assert (result.failure, shown(result)) == ("", content)


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ([text("a\ud800"), text("b")], "a?b"),
        ([{"type": "inn", "beds": 2}], '[{"type": "inn", "beds": 2}]'),
        ({"type": "image", "url": "a.png"}, '{"type": "image", "url": "a.png"}'),
        ([], "[]"),
        (
            [{"type": "video", "title": "a"}, {"type": "image", "title": "b"}],
            '[{"type": "video", "title": "a"}, {"type": "image", "title": "b"}]',
        ),
        (
            [{"type": "image", "url": "a.png", "title": "b"}, {"type": "video", "url": "a.mp4", "title": "b"}],
            '[{"type": "image", "url": "a.png", "title": "b"}, {"type": "video", "url": "a.mp4", "title": "b"}]',
        ),
        ([{"type": "image"}, text("a")], '[{"type": "image"}, {"type": "text", "text": "a"}]'),
        (["a", "b"], '["a", "b"]'),
        ([text("a"), "b"], '[{"type": "text", "text": "a"}, "b"]'),
        ([3, text("a")], '[3, {"type": "text", "text": "a"}]'),
        (ToolResult("a", blocks=[]), "a"),
    ],
)
def test_a_result_without_images_is_text(value: Any, content: str):
    assert returned(value).content == content


def test_a_result_with_images_keeps_its_reward_and_failure():
    result = returned(ToolResult("no", "timeout", reward=0.5, blocks=[RED]))
    assert (result.reward, result.failure, shown(result)) == (0.5, "timeout", ["no", IS_RED])


BROKEN = {
    "video": ([text("a"), {"type": "video", "video": "a.mp4"}], "block 1 is of type 'video'"),
    "sound": ([{"type": "input_audio", "input_audio": {"data": "a"}}], "block 0 is of type 'input_audio'"),
    "sound after a caption": (["a", {"type": "audio", "path": "a.wav"}], "block 1 is of type 'audio'"),
    "another field": ([RED, {"type": "image", "data": "a"}], "has a field 'data'"),
    "no image": ([RED, {"type": "image"}], "has no image"),
    "unknown": ([{"type": "image", "path": "a.png"}, {"type": "inn"}], "block 1 is {'type': 'inn'}; expected"),
    "a tensor": ([image(torch.zeros(2, 2))], "block 0 has an image of type Tensor"),
    "no text": ([RED, {"type": "text"}], "expected"),
    "another type": ([image(3)], "of type int"),
    "no pixels": (Image.new("RGB", (0, 5)), "0 x 5 pixels"),
    "no block": (ToolResult("a", blocks=[5]), "block 0 is 5"),
    "broken": (Image.open(io.BytesIO(png(Image.effect_noise((64, 64), 9))[:-500])), "broken or truncated"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_image_is_a_failure_that_the_model_reads(case: str):
    value, said = BROKEN[case]
    result = returned(value, max_chars=1000)
    assert result.failure == "error"
    assert result.text.startswith("Error: the tool's result")
    assert said in result.text
    assert not result.blocks


class Raising(dict):
    """No value that a tool should return."""

    def items(self) -> Any:
        raise KeyError("no")


def test_an_object_that_cannot_be_packed_fails_the_call_whatever_it_raises():
    given_tool = GivenTool(
        returning(Raising({1: 2})),
        make_schema(returning(None), {}, "here"),
        timeout=9,
        workers=1,
        max_chars=99,
        truncate="right",
    )
    result = asyncio.run(given_tool.call({}))
    assert (result.failure, result.text[:43]) == ("error", "Error: the tool returned a value of type Ra")
    assert returned(ToolResult("a", reward=10**400)).failure == "error"


@pytest.mark.parametrize(
    "fields",
    [
        {"blocks": 5},
        {"blocks": [5]},
        {"blocks": [{"type": "text", "text": 5}]},
        {"blocks": [{"type": "image"}]},
        {"text": None},
        {"failure": ["error"]},
        {"reward": "1"},
        {"reward": float("nan")},
    ],
)
def test_invalid_fields_from_a_tools_process_are_a_failed_result(fields: dict[str, Any]):
    result = unpack_result({"text": "a", **fields}, 2.0)
    assert result == ToolResult("Error: the tool sent an invalid result", "error", 2.0)


@pytest.mark.parametrize(
    ("side", "content"),
    [
        ("left", ["...[6 characters left out]...", IS_RED, "f", IS_BLUE, "ghi"]),
        ("middle", ["ab...[6 characters left out]...", IS_RED, IS_BLUE, "hi"]),
        ("right", ["abcd...[6 characters left out]...", IS_RED, IS_BLUE]),
    ],
)
def test_the_limit_counts_text_alone_and_leaves_no_image_out(side: str, content: list[Any]):
    value = [text("abcdE"), image(RED), text("Ff"), image(BLUE), text("ghi")]
    assert shown(returned(value, 4, side)) == content


def call(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


def returning(value: Any) -> Any:
    """Return a function that returns a value."""

    def function() -> Any:
        """Show it."""
        return value

    return function


@cache
def tokenizer(template: str) -> Any:
    """Return the tokenizer of the small model with another chat template."""
    made = copy.deepcopy(parts()[0])
    made.chat_template = template
    return made


def play(
    turns: list[str],
    tools: dict[str, Any],
    *,
    template: str = TEMPLATE,
    limit: int = 800,
    sees: bool = True,
    **images: Any,
) -> Any:
    """Return the response of a policy that writes these turns, with tools that return these values."""
    written = iter(turns)
    configs = [ToolConfig(TOOL + name) for name in tools]
    observed = ObservedImages(parts()[1], DataImagesConfig(**images)) if sees else None
    with given({TOOL + name: returning(value) for name, value in tools.items()}):
        engine = agent_engine(
            lambda _: next(written), tokenizer(template), "tools", observed, tools=configs, call_format="hermes"
        )
        prompts = prompts_of(agent_rows([{"prompt": "what?"}], tools=configs), tokenizer(template))
    try:
        return engine.generate(prompts, Sampling(n=1, max_response_tokens=limit))
    finally:
        engine.close()


def test_results_of_a_turn_are_the_tokens_and_images_of_the_whole_conversation():
    """Two calls of a turn, whose images differ in size and color, and one without: in the order of the calls."""
    turns = [call("small") + call("large") + call("none"), call("large"), "r1"]
    tools = {"large": [text("large "), image(BLUE)], "small": RED, "none": "nothing"}
    done = play(turns, tools)
    results = [
        {"role": "tool", "content": [{"type": "image"}], "name": "small"},
        {"role": "tool", "content": [text("large "), {"type": "image"}], "name": "large"},
        {"role": "tool", "content": "nothing", "name": "none"},
    ]
    messages = done.outcomes[0]["messages"]
    assert [message for message in messages if message["role"] == "tool"] == [*results, results[1]]
    conversation = [{"role": "user", "content": "what?"}, *messages]
    whole = tokenizer(TEMPLATE).apply_chat_template(conversation, tokenize=False)
    tokens, images = parts()[1].encode(whole, [RED, BLUE, BLUE], "here")
    (sampled,) = done.token_lists()
    assert sampled == tokens[-len(sampled) :]
    (seen,) = done.seen
    pixels = torch.cat([each.inputs["pixel_values"] for each in seen])
    assert torch.equal(pixels, images.inputs["pixel_values"])
    assert torch.equal(torch.cat([each.inputs["image_grid_thw"] for each in seen]), images.inputs["image_grid_thw"])
    thumbnails = [thumbnail for each in seen for thumbnail in each.all_thumbnails]
    assert [(each.width, each.height) for each in thumbnails] == [SMALL, LARGE, LARGE]
    assert done.outcomes[0]["calls"] == {"small": 1, "large": 2, "none": 1}


def test_a_template_without_the_role_shows_them_in_one_message_of_the_user():
    turns = [call("one") + call("two") + call("three"), "r1"]
    done = play(turns, {"one": "1", "two": RED, "three": "3"}, template=NO_TOOL_ROLE + TEMPLATE)
    [message] = [each for each in done.outcomes[0]["messages"] if each["role"] == "user"]
    assert message["content"] == [text("1\n"), {"type": "image"}, text("\n3")]
    done = play(turns, {"one": "1", "two": "2", "three": "3"}, template=NO_TOOL_ROLE + TEMPLATE)
    [message] = [each for each in done.outcomes[0]["messages"] if each["role"] == "user"]
    assert message["content"] == "1\n2\n3"


def test_texts_beside_images_lose_special_tokens_those_that_two_blocks_make_included():
    blocks = [text("a<e"), text("os>"), image(RED), text(f"{tiny_vision.IMAGE}b"), text("<eos>")]
    done = play([call("f"), "r1"], {"f": blocks})
    assert done.outcomes[0]["failure"] == ""
    assert done.outcomes[0]["messages"][1]["content"] == [text("a"), {"type": "image"}, text("b")]


def test_texts_around_an_image_lose_the_special_token_that_they_make_together():
    """A template may write the texts one after the other, behind the images."""
    done = play([call("f"), "r1"], {"f": [text("a<e<e"), image(RED), text("o"), image(RED), text("s>os>b<eo"), RED]})
    assert done.outcomes[0]["failure"] == ""
    pictures = [{"type": "image"}] * 2
    assert done.outcomes[0]["messages"][1]["content"] == [text("a"), *pictures, text("b<eo"), {"type": "image"}]


AS_TEXT = TEMPLATE.replace("m.content is string", "(m.content is string or m.role == 'tool')")
"""That writes the blocks of results as text."""
REFUSES_BLOCKS = TEMPLATE.replace(
    "{% for part in", "{% if m.role == 'tool' %}{{ raise_exception('text') }}{% endif %}{% for part in"
)


@pytest.mark.parametrize("template", [AS_TEXT, REFUSES_BLOCKS], ids=["as text", "refuses blocks"])
def test_a_template_whose_role_for_results_shows_no_images_shows_them_in_a_message_of_the_user(template: str):
    done = play([call("f"), "r1"], {"f": RED}, template=template)
    assert done.outcomes[0]["failure"] == ""
    assert done.outcomes[0]["messages"][1] == {"role": "user", "content": [{"type": "image"}]}
    done = play([call("f"), "r1"], {"f": "a"}, template=template, sees=False)  # a text model uses the role
    assert done.outcomes[0]["messages"][1]["role"] == "tool"


REWRITES = (
    "{% if messages[-1].role == 'user' %}{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "note"),
    [
        (TEMPLATE, ()),
        (NO_TOOL_ROLE + TEMPLATE, ("the chat template has no role for them",)),
        (AS_TEXT, ("the role of the chat template for them shows no images",)),
        (TEMPLATE.replace("part.type == 'image'", "false"), ()),  # that of a user shows none either
        (REWRITES + AS_TEXT, ()),  # behind a message of the user an image cannot be shown either
    ],
)
def test_a_note_says_why_results_are_messages_of_the_user(template: str, note: tuple[str, ...]):
    own = tokenizer(template)
    render = partial(apply_template, config=DataConfig(), tokenizer=own, place="here")
    turns = TurnTemplate(render, own, [own.eos_token_id], ObservedImages(parts()[1], DataImagesConfig()))
    tools: Any = [SimpleNamespace(name="f")]
    assert Tools(tools, turns, own).notes == tuple(f"tool results are messages of the user: {why}" for why in note)


UNSHOWN = {
    "a text model": ([RED], {"sees": False}, "it has images, and the model reads text alone"),
    "too many": ([RED] * 3, {"max_per_prompt": 2}, "3 images, more than data.images.max_per_prompt=2"),
    "too large": ([RED], {"max_mb": 1e-5}, "image 1 has .* more than data.images.max_mb"),
    "a file": ([{"type": "image", "path": "gone.png"}], {}, "gone.png"),
    "a URL": ([{"type": "image", "url": "https://example.com/a.png"}], {}, "allow_urls"),
}


@pytest.mark.parametrize("case", UNSHOWN)
def test_an_image_that_the_settings_do_not_allow_ends_the_trajectory_and_names_the_tool(case: str):
    value, settings, said = UNSHOWN[case]
    done = play([call("g") + call("f"), "r1"], {"f": value, "g": "text"}, **settings)
    (outcome,) = done.outcomes
    assert outcome["stop"] == "failed"
    assert re.match(f"what f returned cannot be shown: .*{said}", outcome["failure"]), outcome["failure"]


def test_a_result_without_room_truncates_the_trajectory_whole():
    done = play([call("f"), "r1"], {"f": [text("a"), image(BLUE)]}, limit=60)
    assert done.outcomes[0]["stop"] == "length"
    assert not any(done.seen)
    assert done.lengths.tolist() == [len(call("f")) + 1]


def test_functions_in_memory_return_images():
    def paint(color: str) -> Any:
        """Paint.

        Args:
            color: Name.
        """
        return [text(color), image(Image.new("RGB", SMALL, color))]

    made = GivenTool(paint, make_schema(paint, {}, "here"), timeout=9, workers=1, max_chars=2, truncate="right")
    result = asyncio.run(made.call({"color": "red"}))
    assert shown(result) == ["re...[1 characters left out]...", IS_RED]
