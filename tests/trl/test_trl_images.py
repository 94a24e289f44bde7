"""TRL's GRPOTrainer with models that read images: columns, processors, what is trained, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Image
from peft import LoraConfig
from PIL import Image as Pictures
from transformers import AutoModelForImageTextToText, AutoTokenizer, ProcessorMixin
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hwgrpo.errors import ConfigError
from hwgrpo.models.builtin import resolve
from hwgrpo.models.vision import freeze_vision
from hwgrpo.trl import GRPOConfig, GRPOTrainer
from tests.agents.test_tool_images import TEMPLATE
from tests.trl.small_trainer import SMALL, reward
from tests.trl.test_trl_agents import call, scripted

VLM = "builtin://tiny?task=squares&steps=0&hidden=32"
TOKENS = {16: 4, 32: 16}
"""Pixels of a picture's side -> its tokens."""


class Processor(ProcessorMixin):
    """The processor of a vision-language model: transformers' own of this family needs torchvision."""

    def __init__(self, tokenizer: Any, image_processor: Any, chat_template: str | None = None) -> None:
        """Keep the parts."""
        self.tokenizer, self.image_processor, self.chat_template = tokenizer, image_processor, chat_template

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Fail: prompts are made by the parts."""
        raise AssertionError


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model() -> str:
    return str(resolve(VLM))


def rows(column: str = "image", side: int = 16, number: int = 4) -> Dataset:
    pictures = [Pictures.new("RGB", (side, side), (60 * each, 0, 0)) for each in range(number)]
    images = pictures if column == "image" else [[each] for each in pictures]
    prompts = [[{"role": "user", "content": "what?"}]] * number
    feature = Image() if column == "image" else [Image()]
    return Dataset.from_dict({"prompt": prompts, column: images}).cast_column(column, feature)


def trainer(model: Any, **changed: Any) -> GRPOTrainer:
    arguments = {"reward_funcs": reward, "args": GRPOConfig("out", **SMALL), "train_dataset": rows()}
    return GRPOTrainer(model, **(arguments | changed))


def parts(model: str, **changed: Any) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(model), Qwen2VLImageProcessorPil.from_pretrained(model, **changed)


def test_rows_with_images_are_trained_and_rewards_see_them_as_in_trl(model: str):
    seen: list[Any] = []

    def look(prompts: Any, completions: Any, image: Any, **_: Any) -> list[float]:
        seen.extend(zip(prompts, image, strict=True))
        return [float(len(each[0]["content"])) for each in completions]

    run = trainer(model, reward_funcs=look)
    assert run.train().global_step == 1
    prompt, image = seen[0]
    assert prompt == [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    assert len(seen) == 4
    assert image is not None
    assert run.settings["model.train_vision"] == "all"
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward" in line] == [1]


def paint(color: str) -> Any:
    """Paint.

    Args:
        color: Name.
    """
    return [{"type": "text", "text": color}, {"type": "image", "image": Pictures.new("RGB", (16, 32), color)}]


def test_a_model_is_trained_on_the_images_of_tools(model: str, monkeypatch: pytest.MonkeyPatch):
    called = call("paint", color="red") + call("paint", color="blue")
    scripted(lambda text: "r1" if "<|tool|>" in text else called, monkeypatch)
    tokenizer, images = parts(model)
    tokenizer.chat_template = TEMPLATE
    run = trainer(
        model,
        processing_class=Processor(tokenizer, images),
        args=GRPOConfig("out", **SMALL | {"max_completion_length": 400}),
        train_dataset=Dataset.from_dict({"prompt": ["what?"] * 4}),
        tools=[paint],
    )
    assert run.train().global_step == 1
    lines = [json.loads(line) for line in Path("out/completions.jsonl").read_text().splitlines()]
    assert [[message["content"] for message in line["outcome"]["messages"][1:3]] for line in lines] == [
        [[{"type": "text", "text": color}, {"type": "image"}] for color in ("red", "blue")]
    ] * len(lines)
    for line in lines:
        shown = [Pictures.open(Path("out") / each["file"]).getpixel((0, 0)) for each in line["observed_images"]]
        assert shown == [(255, 0, 0), (0, 0, 255)]


def test_the_longest_prompt_has_its_images(model: str):
    longest = {
        (column, side): trainer(model, train_dataset=rows(column, side)).settings["data.max_prompt_tokens"]
        for column, side in (("image", 16), ("images", 32))
    }
    assert longest["images", 32] - longest["image", 16] == TOKENS[32] - TOKENS[16]
    longer = trainer(model, eval_dataset=rows("images", 32), args=GRPOConfig("out", **SMALL, eval_strategy="no"))
    assert longer.settings["data.max_prompt_tokens"] == longest["images", 32]


def test_adapters_are_in_the_tower_too(model: str):
    run = trainer(model, peft_config=LoraConfig(r=2, target_modules="all-linear"))
    assert (run.settings["model.lora.vision"], run.settings.get("model.train_vision")) == ("all", None)


@pytest.mark.parametrize("trained", ["none", "projector", "all"])
def test_an_object_trains_the_parts_that_require_a_gradient(trained: str, model: str):
    given = AutoModelForImageTextToText.from_pretrained(model)
    freeze_vision(given, trained)
    run = trainer(
        given,
        processing_class=Processor(*parts(model)),
        args=GRPOConfig("out", **SMALL, learning_rate=0.1),
        reward_funcs=lambda completions, **_: [float(number) for number in range(len(completions))],
    )
    assert run.settings["model.train_vision"] == trained
    if trained == "projector":
        before = {name: each.detach().clone() for name, each in given.named_parameters() if "visual" in name}
        run.train()  # the object has the trained weights then
        changed = {name for name, each in given.named_parameters() if name in before and not each.equal(before[name])}
        assert changed
        assert all("merger" in name for name in changed)
        folders = [*Path("out/objects").glob("model-*"), Path("out/final")]
        assert all((folder / "preprocessor_config.json").is_file() for folder in folders)


def test_a_frozen_part_of_the_text_model_is_still_an_error(model: str):
    given = AutoModelForImageTextToText.from_pretrained(model)
    given.get_input_embeddings().requires_grad_(False)
    with pytest.raises(ConfigError, match=r"requires_grad=False on .*embed_tokens"):
        trainer(given)


def test_a_processor_gives_its_tokenizer_and_its_chat_template(model: str):
    tokenizer, pictures = parts(model)
    longer = tokenizer.chat_template.replace("{% for message", "{{ 'aaaa' }}{% for message", 1)
    plain, other = (
        trainer(model, processing_class=Processor(tokenizer, pictures, template)) for template in (None, longer)
    )
    assert isinstance(other.processing_class, Processor)
    lengths = [each.settings["data.max_prompt_tokens"] for each in (plain, other)]
    assert lengths[1] - lengths[0] == len(tokenizer("aaaa", add_special_tokens=False)["input_ids"])
    assert "aaaa" not in tokenizer.chat_template


def test_a_processor_that_scales_images_otherwise_is_refused_by_its_fields(model: str):
    tokenizer, pictures = parts(model, patch_size=8)
    with pytest.raises(ConfigError, match=r"processing_class: its image processor has patch_size=8 instead of 4, and"):
        trainer(model, processing_class=Processor(tokenizer, pictures))


def test_a_processor_of_other_media_is_refused(model: str):
    with pytest.raises(ConfigError, match="sound and video are not supported"):
        trainer(model, processing_class=Processor(parts(model)[0], None))


def test_images_with_a_text_model_are_refused_by_their_column():
    with pytest.raises(ValueError, match="column 'image' holds images"):
        trainer("builtin://tiny?task=sort&steps=0")
