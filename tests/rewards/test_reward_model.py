"""`reward_model`: the same value in any batch, what it reads, and what is wrong with a model."""

import pytest
import torch

from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.rewards.combine import RewardPipeline
from tests.support.models.reward_models import CHAT_TEMPLATE, character_tokenizer, save_reward_model

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS = [["4", "the answer is 4", "no"], ["x" * 40, "7\n7"]]
MESSAGES = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"})


@pytest.fixture
def scored(reward_config, make_batch):
    """Return a function: folder, kwargs -> the rewards of `GROUPS`."""

    def score(folder, groups=GROUPS, messages=None, policies=None, **kwargs):
        entry = {"name": "reward_model", "kwargs": {"path": str(folder), **kwargs}, **(policies or {})}
        with RewardPipeline(reward_config(entry)) as rewards:
            return rewards.score(*make_batch(groups, messages=messages))

    return score


def alone(model, ids, label=0):
    """Return the logit of one sequence by itself, without padding."""
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, label])


def tolerance(model, values):
    """Return how far two orders of fp32 sums may differ: a few ulp of the largest logit per layer and matrix."""
    return 64 * torch.finfo(torch.float32).eps * max(1.0, *map(abs, values)) * model.config.num_hidden_layers


@pytest.mark.parametrize("pads", [{}, {"model_pad": False}, {"pad": False, "model_pad": False}], ids=str)
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize("tokens", [1, 60, 10_000])
def test_the_value_is_that_of_the_sequence_by_itself_in_any_batch(tmp_path, scored, kind, tokens, pads):
    model = save_reward_model(tmp_path, kind, **pads)
    tokenizer = character_tokenizer()
    rewards = scored(tmp_path, tokens_per_batch=tokens)
    texts = [f"prompt {index}{text}" for index, group in enumerate(GROUPS) for text in group]
    expected = [alone(model, tokenizer(text)["input_ids"]) for text in texts]
    assert len({round(each, 3) for each in expected}) == len(expected)
    assert rewards.total.tolist() == pytest.approx(expected, abs=tolerance(model, expected))


def test_a_text_that_ends_with_the_padding_token_of_no_model_is_read_to_its_end(tmp_path, scored):
    """With the end-of-sequence token as padding the last token would be passed over."""
    model = save_reward_model(tmp_path, "decoder", pad=False, model_pad=False)
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<eos>"})
    tokenizer.save_pretrained(tmp_path)
    texts = ["4<eos>", "a longer response"]
    expected = [alone(model, tokenizer(f"prompt 0{text}")["input_ids"]) for text in texts]
    assert scored(tmp_path, [texts]).total.tolist() == pytest.approx(expected, abs=tolerance(model, expected))


def test_a_vocabulary_that_is_used_up_leaves_each_row_by_itself(tmp_path, scored):
    model = save_reward_model(tmp_path, "decoder", model_pad=False)
    tokenizer = character_tokenizer()
    every = "".join(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    expected = [alone(model, tokenizer(f"prompt 0{text}")["input_ids"]) for text in (every, "no")]
    assert scored(tmp_path, [[every, "no"]]).total.tolist() == pytest.approx(expected, abs=tolerance(model, expected))


@pytest.mark.parametrize("messages", [None, MESSAGES], ids=["plain", "chat"])
def test_the_models_own_chat_template_is_applied(tmp_path, scored, messages):
    model = save_reward_model(tmp_path, "decoder", chat=True)
    tokenizer = character_tokenizer()
    before = "[user]prompt 0\n" if messages is None else "[system]be brief\n[user]2+2?\n"
    expected = alone(model, tokenizer(f"{before}[assistant]4\n")["input_ids"])
    plain = alone(model, tokenizer("prompt 04")["input_ids"])
    assert CHAT_TEMPLATE.count("[") > 1
    close = tolerance(model, [expected, plain])
    assert scored(tmp_path, [["4"]], messages).total.tolist() == pytest.approx([expected], abs=close)
    assert scored(tmp_path, [["4"]], messages, chat_template=False).total.tolist() == pytest.approx([plain], abs=close)


def test_options_of_the_chat_template_and_no_special_tokens_of_plain_text(tmp_path, scored):
    model = save_reward_model(tmp_path, "decoder", chat=True)
    tokenizer = character_tokenizer(chat=True)
    tokenizer.chat_template = "{{ mark }}" + CHAT_TEMPLATE
    tokenizer.bos_token, tokenizer.add_bos_token = "<unk>", True
    tokenizer.save_pretrained(tmp_path)
    start = tokenizer("")["input_ids"]
    assert len(start) == 1
    ids = character_tokenizer()("prompt 04")["input_ids"]
    marked = character_tokenizer()("![user]prompt 0\n[assistant]4\n")["input_ids"]
    expected = [alone(model, each) for each in ([*start, *ids], ids, marked)]
    options = [
        {"chat_template": False},
        {"chat_template": False, "special_tokens": False},
        {"chat_template_kwargs": {"mark": "!"}},
    ]
    found = [scored(tmp_path, [["4"]], **each).total.item() for each in options]
    assert found == pytest.approx(expected, abs=tolerance(model, expected))


def test_the_logit_of_a_label_by_number_and_by_name(tmp_path, scored):
    model = save_reward_model(tmp_path, "decoder", labels=3)
    ids = character_tokenizer()("prompt 04")["input_ids"]
    for label, number in ((2, 2), ("LABEL_1", 1), ("0", 0)):
        expected = alone(model, ids, number)
        found = scored(tmp_path, [["4"]], label=label).total.tolist()
        assert found == pytest.approx([expected], abs=tolerance(model, [expected]))


def test_a_text_that_is_too_long_fails_or_is_cut(tmp_path, scored):
    model = save_reward_model(tmp_path, "decoder", positions=20)
    tokenizer = character_tokenizer()
    groups = [["4", "x" * 30 + "y"]]
    whole = tokenizer("prompt 0" + groups[0][1])["input_ids"]
    with pytest.raises(RewardError, match=r"39 tokens of the reward model's, above its max_length=20.*on_error"):
        scored(tmp_path, groups)
    masked = scored(tmp_path, groups, policies={"on_error": "mask_sample"})
    assert masked.valid.tolist() == [True, False]
    assert masked.failures == {"errors/reward_model": 1}
    for side, ids in (("left", whole[-20:]), ("right", whole[:20])):
        cut = scored(tmp_path, groups, too_long=side)
        expected = alone(model, ids)
        assert cut.total[1].item() == pytest.approx(expected, abs=tolerance(model, [expected]))
    assert scored(tmp_path, [["4" * 4]], max_length=12).failures == {}
    with pytest.raises(RewardError, match="max_length=11"):
        scored(tmp_path, [["4" * 4]], max_length=11)


def test_scoring_leaves_random_numbers_and_gradients_alone(tmp_path, scored):
    save_reward_model(tmp_path, "encoder")
    first, second = scored(tmp_path), scored(tmp_path)  # dropout would show
    assert torch.equal(first.total, second.total)
    assert not first.total.requires_grad


def test_weights_that_are_offloaded_are_on_the_device_while_it_scores(tmp_path, make_batch):
    from hwgrpo.rewards.models.placement import PlacedModel
    from hwgrpo.rewards.models.reward_model import RewardModel

    save_reward_model(tmp_path, "decoder")
    moves = []
    reward = RewardModel(torch.device("cpu"), "reward.functions[0]", str(tmp_path), offload=True)
    placed = reward._placed
    assert isinstance(placed, PlacedModel)
    assert not placed._offload  # there is nothing to move on a CPU

    class Recorded:
        def to(self, place):
            moves.append(str(place))

    away = PlacedModel(Recorded(), torch.device("meta"), "run", offload=True)
    assert moves == []
    with away.loaded():
        assert moves == ["meta"]
    assert moves == ["meta", "cpu"]


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"folder": "/nowhere/at/all"}, ["path='/nowhere/at/all'", "is not a folder"]),
        ({"folder": ""}, ["path=''", "must be a text"]),
        ({"label": "helpful"}, ["kwargs.label='helpful'", "LABEL_0"]),
        ({"place": "gpu"}, ["kwargs.place='gpu'", "cpu, run"]),
        ({"dtype": "fp8"}, ["kwargs.dtype='fp8'", "bfloat16"]),
        ({"tokens_per_batch": 0}, ["tokens_per_batch=0", "at least 1"]),
        ({"offload": True, "place": "cpu"}, ["offload=true", "no effect with place=cpu"]),
        ({"chat_template": True}, ["chat_template=true", "needs a tokenizer with a chat template"]),
        ({"too_long": "truncate"}, ["too_long='truncate'", "fail, left, right"]),
        ({"pth": "x"}, ["'pth'", "Did you mean 'path'"]),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(tmp_path, scored, change, expected):
    save_reward_model(tmp_path, "decoder")
    with pytest.raises(ConfigError) as error:
        scored(**{"folder": tmp_path, **change})
    for words in ["reward.functions[0]", *expected]:
        assert words in str(error.value)


def test_a_model_with_several_labels_needs_one(tmp_path, scored):
    save_reward_model(tmp_path, "decoder", labels=2)
    with pytest.raises(ConfigError, match=r"has 2 labels, not one.*label, one of 0 \(LABEL_0\), 1 \(LABEL_1\)"):
        scored(tmp_path)


def test_a_language_model_is_no_reward_model(tmp_path, scored):
    save_reward_model(tmp_path, "language model")
    with pytest.raises(ConfigError, match=r"lacks 1 weights of Qwen3ForSequenceClassification, e\.g\. score\.weight"):
        scored(tmp_path, label=0)


def test_a_folder_without_a_model_is_named(tmp_path, scored):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        scored(tmp_path)
