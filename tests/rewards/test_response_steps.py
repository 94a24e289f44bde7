"""Steps of responses: where they end in text and tokens, and the rewards of steps that functions return."""

import random
import re
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hwgrpo.config.schema import ProcessConfig
from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.response_steps import StepFinder, last_tokens, separated

LETTERS = SimpleNamespace(decode=lambda tokens, **_: "".join(map(chr, tokens)))
"""A token per character, as in `make_batch`."""
SENTENCES = """
def f(solution_str):
    return [float(len(step)) for step in solution_str.split(".") if step]
"""


@pytest.mark.parametrize(
    ("text", "delimiter", "steps"),
    [
        ("one\ntwo\nthree", r"\n", ["one\n", "two\n", "three"]),
        ("one\ntwo\n", r"\n", ["one\n", "two\n"]),
        ("\n\none\n\n \ntwo\n", r"\n", ["\n\none\n\n \n", "two\n"]),
        ("one", r"\n", ["one"]),
        ("", r"\n", [""]),
        ("\n\n", r"\n", ["\n\n"]),
        ("<s>one<s><s>two", "<s>", ["<s>one<s><s>", "two"]),
        ("1 = 1. So 2 = 2! Yes", r"(?<=[.!]) ", ["1 = 1. ", "So 2 = 2! ", "Yes"]),
        ("abc", "(?<=.)", ["a", "b", "c"]),
    ],
)
def test_a_delimiter_belongs_to_the_step_before_it_and_white_space_is_no_step(text, delimiter, steps):
    ends = separated(text, re.compile(delimiter))
    assert [text[start:end] for start, end in zip([0, *ends], ends, strict=False)] == steps


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A byte-level BPE tokenizer: characters of several bytes are several tokens, and tokens join a line's end and what
    follows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["the sum is four\nso the sum", "é\nso 漢字 the", "sum.\n\nthe 😀 sum"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def first_complete(text_end: int, tokens: list[int], decode) -> int:
    """The definition: the first token up to which the text has `text_end` complete characters."""
    return next(
        i
        for i in range(len(tokens))
        if len(decode(tokens[: i + 1]).rstrip("\ufffd")) >= text_end or i == len(tokens) - 1
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_last_tokens_of_steps_are_those_that_complete_their_text(seed: int, byte_level: Tokenizer):
    draw = random.Random(seed)
    pieces = ["the", " sum", "\n", "\n\n", "é", "漢字", "😀", ".", " is four", "Ω"]
    text = "".join(draw.choice(pieces) for _ in range(60))
    tokens = byte_level.encode(text).ids
    assert byte_level.decode(tokens) == text
    single = [token for token in tokens if "\ufffd" in byte_level.decode([token])]
    assert single, "the text has characters of several tokens"
    ends = separated(text, re.compile(r"\n|(?<=[é漢😀Ω])"))
    assert len(ends) > 8
    found = last_tokens(ends, tokens, byte_level.decode)
    assert found == [*(first_complete(end, tokens, byte_level.decode) for end in ends[:-1]), len(tokens) - 1]


def test_steps_found_by_a_tokenizer_that_strips_the_first_space():
    words = ["▁so", "▁two", "\n", "▁and", "▁two", "▁is", "\n", "▁four"]

    def decode(tokens):
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    tokens = list(range(len(words)))
    text = decode(tokens)
    assert last_tokens(separated(text, re.compile(r"\n")), tokens, decode) == [2, 6, 7]
    assert last_tokens(separated(text, re.compile(" ")), tokens, decode) == [
        first_complete(end, tokens, decode) for end in separated(text, re.compile(" "))
    ]


def test_bytes_that_are_no_character_keep_the_order_of_steps(byte_level: Tokenizer):
    broken = byte_level.encode("漢").ids[:1] + byte_level.encode("\nso\nthe").ids + byte_level.encode("字").ids[:1]
    text = byte_level.decode(broken)
    found = last_tokens(separated(text, re.compile(r"\n")), broken, byte_level.decode)
    assert found == sorted(found)
    assert found[-1] == len(broken) - 1
    assert found[0] == next(i for i in range(len(broken)) if "\n" in byte_level.decode(broken[: i + 1]))


def test_two_steps_may_end_with_one_token_and_tokens_may_be_absent():
    assert last_tokens([1, 2, 3], [0, 1], lambda tokens: "".join("ab" if t == 0 else "c" for t in tokens)) == [0, 0, 1]
    assert last_tokens([0], [], lambda tokens: "") == [-1]


def test_steps_of_a_function_of_ones_own(reward_file):
    path = reward_file("def halves(text): return [len(text) // 2, len(text)] if len(text) > 1 else []")
    finder = StepFinder(ProcessConfig(function=f"{path}:halves"), LETTERS)
    assert finder.ends("abcd") == [2, 4]
    assert finder.ends("") == [0]
    assert finder.token_ends("abcde", [97, 98, 99, 100, 101]) == [1, 4]
    with pytest.raises(ConfigError, match="has no function 'thirds'"):
        StepFinder(ProcessConfig(function=f"{path}:thirds"), LETTERS)


@pytest.mark.parametrize("body", ["[3, 2]", "[0, 2]", "[9]", "[2, 2]"])
def test_ends_that_do_not_ascend_within_the_text_are_refused(body: str, reward_file):
    path = reward_file(f"def ends(text): return {body}")
    with pytest.raises(RewardError, match=r"ascending ends of steps in a text of 4 characters.*returned \["):
        StepFinder(ProcessConfig(function=f"{path}:ends"), LETTERS).ends("abcd")


def test_a_function_of_ones_own_that_fails_is_named(reward_file):
    path = reward_file("def ends(text): raise ValueError('no steps here')")
    with pytest.raises(RewardError, match=r"algorithm\.process\.function=.*ValueError: no steps here"):
        StepFinder(ProcessConfig(function=f"{path}:ends"), LETTERS).ends("abcd")


@pytest.fixture
def stepped(reward_config, reward_file):
    """Return a function: source of `f`, settings of it and of further functions -> a pipeline with steps by `.`."""
    opened = []

    def make(source: str, *others, **settings) -> RewardPipeline:
        config = reward_config({"name": f"{reward_file(source)}:f", **settings}, *others)
        opened.append(RewardPipeline(config, steps=StepFinder(ProcessConfig(delimiter="."), LETTERS)))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_list_has_the_rewards_of_steps_and_a_number_is_that_of_the_last(workers, stepped, make_batch):
    pipeline = stepped(
        SENTENCES, {"name": "format", "weight": 10, "kwargs": {"pattern": ".*ab.*"}}, weight=2, workers=workers
    )
    rewards = pipeline.score(*make_batch([["ab.c", "abc."], ["d.e.f"]]))
    assert rewards.steps.offsets.tolist() == [0, 2, 3, 6]
    assert rewards.steps.ends.tolist() == [2, 3, 3, 1, 3, 4]
    assert rewards.steps.rewards.tolist() == [4, 12, 16, 2, 2, 2]
    assert rewards.total.tolist() == [16, 16, 6]
    assert rewards.per_function["f"].tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    "source",
    [
        "def f(completions, **kwargs): return [[1.0] * text.count('.') for text in completions]",
        "import torch\ndef f(batch, completions): return [torch.ones(t.count('.')) for t in completions.texts]",
        "def f(solution_str): return {'score': (1,) * solution_str.count('.'), 'seen': 1}",
    ],
    ids=["TRL", "batch", "verl with fields"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_all_forms_may_return_lists(source, workers, stepped, make_batch):
    rewards = stepped(source, workers=workers).score(*make_batch([["a.b.", "c."]]))
    assert rewards.steps.rewards.tolist() == [1, 1, 1]
    assert rewards.total.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("policy", "valid", "steps"),
    [
        ("value", [1, 1, 1], [1, 1, 0, -3, 1]),
        ("mask_sample", [1, 0, 1], [1, 1, 0, 0, 1]),
        ("drop_group", [0, 0, 1], [0, 0, 0, 0, 1]),
    ],
)
def test_another_number_of_rewards_than_steps_is_a_counted_failure(policy, valid, steps, stepped, make_batch):
    source = "def f(solution_str): return [1.0] * (3 if 'bad' in solution_str else solution_str.count('.'))"
    rewards = stepped(source, on_error=policy, failure_value=-3).score(*make_batch([["a.b.", "bad.c."], ["d."]]))
    assert rewards.valid.tolist() == [bool(each) for each in valid]
    assert rewards.steps.rewards.tolist() == steps
    assert rewards.failures == {"steps/f": 1}
    assert "returned 3 rewards of steps for a response of 2" in rewards.first_failures["steps/f"]


def test_under_raise_another_number_of_rewards_ends_the_run(stepped, make_batch):
    with pytest.raises(RewardError, match=r"sample 0 of its group returned 1 rewards of steps for .* of 2.*on_error"):
        stepped("def f(solution_str): return [1.0]").score(*make_batch([["a.b."]]))


@pytest.mark.parametrize("value", ["float('nan')", "None"])
def test_a_reward_of_a_step_that_is_no_number_fails_its_response(value, stepped, make_batch):
    source = f"def f(solution_str): return [1.0, {value}]"
    rewards = stepped(source, on_nan="mask_sample").score(*make_batch([["a.b."]]))
    assert rewards.failures == {"nans/f": 1}
    assert rewards.valid.tolist() == [False]
    assert rewards.steps.rewards.tolist() == [0, 0]
    replaced = stepped(source, on_nan="value", failure_value=-3).score(*make_batch([["a.b."]]))
    assert replaced.steps.rewards.tolist() == [0, -3]


def test_an_empty_response_is_one_step_for_which_an_empty_list_is_0(stepped, make_batch):
    rewards = stepped(SENTENCES).score(*make_batch([["", "ab."]]))
    assert rewards.steps.rewards.tolist() == [0, 2]
    assert rewards.steps.ends.tolist() == [-1, 2]


def test_steps_need_a_function_that_returns_lists(stepped, make_batch):
    with pytest.raises(RewardError, match="every reward function returned one number per response"):
        stepped("def f(solution_str): return 1.0").score(*make_batch([["a.b."]]))


def test_lists_need_an_estimator_of_steps(make_batch, reward_config, reward_file):
    pipeline = RewardPipeline(reward_config({"name": f"{reward_file(SENTENCES)}:f"}))
    with pytest.raises(RewardError, match=r"not a number; rewards of steps need algorithm\.advantage\.name=process"):
        pipeline.score(*make_batch([["a.b."]]))


def test_ranks_join_their_steps():
    from hwgrpo.values import StepRewards

    parts = [
        StepRewards(torch.tensor([1.0]).double(), torch.tensor([2]), torch.tensor([0, 1])),
        StepRewards(torch.tensor([2.0, 3.0]).double(), torch.tensor([0, 1]), torch.tensor([0, 0, 2])),
    ]
    joined = StepRewards.concat(parts)
    assert joined.rewards.tolist() == [1, 2, 3]
    assert joined.offsets.tolist() == [0, 1, 1, 3]
