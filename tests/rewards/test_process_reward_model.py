"""`process_reward_model`: the score at each separator in any batch, lists for process supervision, and reductions."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from hwgrpo.config.schema import ProcessConfig
from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.response_steps import StepFinder
from tests.support.models.reward_models import SEPARATOR, character_tokenizer, save_reward_model

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS = [["first\nsecond\n", "only one"], ["a\n\nlonger third step\nb\nc"]]
STEPS = [[["first", "second"], ["only one"]], [["a", "longer third step", "b", "c"]]]


@pytest.fixture
def scored(reward_config, make_batch):
    """Return a function: folder, kwargs -> the rewards of `GROUPS`, with `algorithm.process` or without."""

    def score(folder, groups=GROUPS, finder=True, policies=None, **kwargs):
        entry = {"name": "process_reward_model", "kwargs": {"path": str(folder), **kwargs}, **(policies or {})}
        decoder = SimpleNamespace(decode=lambda tokens, **_: "".join(map(chr, tokens)))
        steps = StepFinder(ProcessConfig(), decoder) if finder else None
        with RewardPipeline(reward_config(entry), steps=steps) as rewards:
            return rewards.score(*make_batch(groups))

    return score


def separate(model, written, of):
    """Return the score at each separator of one text by itself: `of` logits [T, V] -> [T]."""
    tokens = character_tokenizer()(written)["input_ids"]
    with torch.no_grad():
        scores = of(model(input_ids=torch.tensor([tokens])).logits[0])
    separator = character_tokenizer().convert_tokens_to_ids(SEPARATOR)
    return [float(scores[place]) for place, token in enumerate(tokens) if token == separator]


def flat(lists):
    return [each for part in lists for each in part]


def texts():
    return [
        f"prompt {index}" + "".join(f"{step}{SEPARATOR}" for step in steps)
        for index, group in enumerate(STEPS)
        for steps in group
    ]


def per_step(rewards):
    """Return the rewards of steps per response."""
    found = rewards.steps
    return [
        found.rewards[first:end].tolist()
        for first, end in zip(found.offsets[:-1].tolist(), found.offsets[1:].tolist(), strict=True)
    ]


@pytest.mark.parametrize("kind", ["decoder of tokens", "encoder of tokens"])
@pytest.mark.parametrize("tokens", [1, 90, 10_000])
def test_each_step_has_the_probability_at_its_separator(tmp_path, scored, kind, tokens):
    model = save_reward_model(tmp_path, kind, labels=2)
    expected = [separate(model, text, lambda logits: logits.softmax(-1)[:, 1]) for text in texts()]
    found = per_step(scored(tmp_path, tokens_per_batch=tokens))
    # a probability moves by at most half of what its logit does: a few ulp of logits of about 10, per layer
    assert [len(each) for each in found] == [2, 1, 4]
    assert flat(found) == pytest.approx(flat(expected), abs=1e-4)
    assert len({round(each, 3) for each in flat(found)}) > 4


def test_a_model_of_one_label_gives_its_logit_and_the_right_label_can_be_the_first(tmp_path, scored):
    model = save_reward_model(tmp_path / "one", "decoder of tokens", labels=1)
    expected = [separate(model, text, lambda logits: logits[:, 0]) for text in texts()]
    assert flat(per_step(scored(tmp_path / "one"))) == pytest.approx(flat(expected), abs=1e-3)
    model = save_reward_model(tmp_path / "two", "decoder of tokens", labels=2)
    expected = [separate(model, text, lambda logits: logits.softmax(-1)[:, 0]) for text in texts()]
    assert flat(per_step(scored(tmp_path / "two", right=0))) == pytest.approx(flat(expected), abs=1e-4)


def test_a_language_model_compares_two_tokens(tmp_path, scored):
    model = save_reward_model(tmp_path, "language model")
    pair = character_tokenizer().convert_tokens_to_ids(["-", "+"])
    expected = [separate(model, text, lambda logits: logits[:, pair].softmax(-1)[:, 1]) for text in texts()]
    found = per_step(scored(tmp_path, kind="label_tokens", right="+", wrong="-"))
    assert flat(found) == pytest.approx(flat(expected), abs=1e-4)


REDUCED = {"min": min, "product": math.prod, "mean": lambda each: sum(each) / len(each), "last": lambda each: each[-1]}


@pytest.mark.parametrize("reduce", REDUCED)
def test_scores_are_reduced_to_one_number(tmp_path, scored, reduce):
    model = save_reward_model(tmp_path, "decoder of tokens", labels=2)
    lists = [separate(model, text, lambda logits: logits.softmax(-1)[:, 1]) for text in texts()]
    found = scored(tmp_path, finder=False, reduce=reduce, delimiter="\n").total.tolist()
    assert found == pytest.approx([REDUCED[reduce](each) for each in lists], abs=1e-4)


def test_a_response_with_the_separator_in_its_text_has_no_score(tmp_path, scored):
    save_reward_model(tmp_path, "decoder of tokens", labels=2)
    forged = [[f"right{SEPARATOR}", "honest"]]
    with pytest.raises(RewardError, match="1 steps has 2 separator tokens"):
        scored(tmp_path, forged)
    masked = scored(tmp_path, forged, policies={"on_error": "mask_sample"})
    assert masked.valid.tolist() == [False, True]
    assert masked.failures == {"errors/process_reward_model": 1}


def test_an_empty_response_is_one_step(tmp_path, scored):
    save_reward_model(tmp_path, "decoder of tokens", labels=2)
    assert [len(each) for each in per_step(scored(tmp_path, [["", " \n"]]))] == [1, 1]


def test_a_text_that_is_too_long_is_a_failure(tmp_path, scored):
    save_reward_model(tmp_path, "decoder of tokens", labels=2, positions=24)
    with pytest.raises(RewardError, match="above its max_length=24"):
        scored(tmp_path)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"finder": False}, ["reduce=null", "algorithm.advantage.name=process", "min, product, mean, last"]),
        ({"delimiter": "."}, ["delimiter='.'", "algorithm.process finds the steps"]),
        ({"reduce": "max"}, ["reduce='max'", "last, mean, min, product"]),
        ({"kind": "sequence"}, ["kind='sequence'", "token_classification"]),
        ({"step_format": "{step}"}, ["step_format='{step}'", "the separator"]),
        ({"separator": "ab", "step_format": "{step}ab"}, ["separator='ab'", "is not one token"]),
        ({"right": 2}, ["right=2", "0 or 1"]),
        ({"wrong": "-"}, ["wrong='-'", "no effect with kind=token_classification"]),
        ({"kind": "label_tokens", "right": "+"}, ["wrong=null", "must be a text"]),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(tmp_path, scored, change, expected):
    save_reward_model(tmp_path, "decoder of tokens", labels=2)
    with pytest.raises(ConfigError) as error:
        scored(tmp_path, **change)
    for words in ["reward.functions[0]", *expected]:
        assert words in str(error.value)


def test_a_model_of_many_labels_is_refused(tmp_path, scored):
    save_reward_model(tmp_path, "decoder of tokens", labels=5)
    with pytest.raises(ConfigError, match="one or two labels, and this one has 5"):
        scored(tmp_path)


REMOTE = """
import torch
from transformers import Qwen3Config, Qwen3Model, Qwen3PreTrainedModel

class Scorer(Qwen3PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen3Model(config)
        self.score = torch.nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids, attention_mask):
        return (self.score(self.model(input_ids=input_ids, attention_mask=attention_mask)[0]),)
"""


def test_code_that_comes_with_a_model_gives_the_logits(tmp_path, scored):
    model = save_reward_model(tmp_path, "decoder of tokens", labels=2)
    (tmp_path / "scorer.py").write_text(REMOTE)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "auto_map": {"AutoModel": "scorer.Scorer"}}))
    expected = [separate(model, text, lambda logits: logits.softmax(-1)[:, 1]) for text in texts()]
    found = per_step(scored(tmp_path, kind="custom", trust_remote_code=True))
    assert flat(found) == pytest.approx(flat(expected), abs=1e-4)


def test_hidden_states_are_no_logits(tmp_path, scored):
    save_reward_model(tmp_path, "decoder of tokens", labels=2)
    with pytest.raises(ConfigError, match=r"first output of Qwen3Model has shape \[.*kind=custom needs logits"):
        scored(tmp_path, kind="custom")
