"""A character tokenizer with a chat template, small data files, and the data settings' defaults."""

import json
import string
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hwgrpo.config.schema import DataImagesConfig
from tests.support.models.tiny_image_prompts import image_prompts, image_tokenizer

CHAT_TEMPLATE = (
    "{% if mood is defined %}{{ mood }};{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{% if m.name is defined %}({{ m.name }}){% endif %}{{ m.content }}{% if not loop.last or "
    "m.role != 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(chat_template=CHAT_TEMPLATE):
    """One token per character; `^` is the beginning-of-sequence token that plain text gets."""
    characters = ["?", "^", "$", *string.ascii_letters, *string.digits, *" =+-<>;()\n.,:!/_"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = TemplateProcessing(single="^ $A", special_tokens=[("^", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", bos_token="^", eos_token="$")
    fast.chat_template = chat_template
    return fast


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_without_template():
    return make_tokenizer(None)


@pytest.fixture(scope="session")
def seeing_tokenizer():
    """A tokenizer whose chat template shows images."""
    return image_tokenizer(make_tokenizer())


@pytest.fixture(scope="session")
def seeing(seeing_tokenizer):
    """The `ImagePrompts` of a model that reads images."""
    return image_prompts(seeing_tokenizer)


@pytest.fixture
def data_config():
    """Return a function that makes data settings: the schema's defaults and what a test changes."""

    def make(train, **changes):
        settings = {
            "train": str(train),
            "validation": None,
            "split": "train",
            "validation_split": "test",
            "prompt_key": "prompt",
            "ground_truth_key": None,
            "response_key": "response",
            "keep": None,
            "source_key": "data_source",
            "max_prompt_tokens": 64,
            "overlong": "filter",
            "chat": "auto",
            "system_prompt": None,
            "instruction": None,
            "few_shot": [],
            "chat_template_kwargs": {},
            "template_date": None,
            "max_rows": 0,
            "validation_max_rows": 256,
            "shuffle": True,
            "images": DataImagesConfig(),
        }
        assert set(changes) <= set(settings)
        return SimpleNamespace(**settings | changes)

    return make


@pytest.fixture
def jsonl(tmp_path):
    """Return a function that writes rows to a JSONL file."""

    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
