"""Rows become examples of a reward model with the tokens that the trained model gets when it scores."""

import json
from pathlib import Path

import pytest

from hwgrpo.config import load_config
from hwgrpo.config.supervised import supervised_settings
from hwgrpo.data.prompts import build_dataset
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.research.scored_examples import ScoredDataset, build_scored
from hwgrpo.rewards.models.scored_text import ScoredText
from tests.support.models.reward_models import character_tokenizer

USER = {"role": "user", "content": "2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief"}
FIVE, FOUR = ({"role": "assistant", "content": text} for text in ("5", "4"))


def build(
    folder: Path, rows: list[dict], *overrides: str, chat: bool = True, limit: int = 100, which: str = "train"
) -> ScoredDataset | None:
    """Build the examples of rows."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = f"{folder / 'rows.jsonl'}"
    own = ["model.path=unused", f"data.train={file}", f"data.validation={file}", *overrides]
    config = load_config(None, own, used=supervised_settings)
    return build_scored(config, character_tokenizer(chat=chat), limit, which)


def texts(dataset: ScoredDataset | None) -> list[list[str]]:
    """Return what the model reads, for each example."""
    assert dataset is not None
    tokenizer = character_tokenizer()
    return [
        ["".join(tokenizer.convert_ids_to_tokens(list(row))) for row in dataset.prompt(i, 0).rows]
        for i in range(len(dataset))
    ]


PROMPTS = {"text": "2 + 2?", "messages": [SYSTEM, USER]}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("chat", [True, False])
def test_a_response_is_tokenized_as_the_model_scores_it_in_grpo(prompt: str, chat: bool, tmp_path: Path):
    given = () if chat or prompt == "text" else ("data.chat=never",)
    built = build(tmp_path, [{"prompt": PROMPTS[prompt], "response": "4", "reward": 1}], *given, chat=chat)
    assert built is not None
    tokenizer = character_tokenizer(chat=chat)
    policy = build_dataset(built.config, tokenizer, "train")
    assert policy is not None
    assert built.prompt(0, 0).rows == (tuple(ScoredText(tokenizer, None, None).tokens(policy.prompt(0, 0), "4")),)
    assert built.prompt(0, 0).target == 1.0


PAIR = "reward_model.loss=bradley_terry"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "[user]2 + 2?\n[assistant]{}\n"),
        (
            {"prompt": [SYSTEM, USER], "chosen": "4", "rejected": "5"},
            "[system]Be brief\n[user]2 + 2?\n[assistant]{}\n",
        ),
        ({"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}, "[user]2 + 2?\n[assistant]{}\n"),
        ({"prompt": "2 + 2?", "chosen": [FOUR], "rejected": [FIVE]}, "[user]2 + 2?\n[assistant]{}\n"),
        ({"chosen": [USER, FOUR], "rejected": [USER, FIVE]}, "[user]2 + 2?\n[assistant]{}\n"),
        (
            {"prompt": [USER], "chosen": [FIVE, USER, FOUR], "rejected": [FIVE, USER, FIVE]},
            "[user]2 + 2?\n[assistant]5\n[user]2 + 2?\n[assistant]{}\n",
        ),
    ],
    ids=["text", "messages and text", "messages", "text and messages", "full conversations", "several turns"],
)
def test_a_pair_has_the_chosen_text_first(row: dict, expected: str, tmp_path: Path):
    assert texts(build(tmp_path, [row], PAIR)) == [[expected.format("4"), expected.format("5")]]


def test_hh_rlhf_as_hwgrpo_data_writes_it(tmp_path: Path):
    from hwgrpo.data.raw_rows import preference

    start = "\n\nHuman: 2 + 2?\n\nAssistant: "
    example = preference({"chosen": f"{start}4", "rejected": f"{start}5"})
    row = {"prompt": example.prompt, **example.columns, "reward_model": {"style": "model", "ground_truth": None}}
    assert texts(build(tmp_path, [row], PAIR)) == [["[user]2 + 2?\n[assistant]4\n", "[user]2 + 2?\n[assistant]5\n"]]


def test_margins_and_labels_become_targets(tmp_path: Path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "m": margin} for margin in (0.5, "2")]
    built = build(tmp_path, rows, PAIR, "reward_model.margin_key=m")
    assert built is not None
    assert built.targets == (0.5, 2.0)
    rows = [{"prompt": "a", "response": "b", "ok": label} for label in (True, 0, 0.25)]
    built = build(tmp_path, rows, "reward_model.score_key=ok")
    assert built is not None
    assert built.targets == (1.0, 0.0, 0.25)


def logged(prompt: str, question: str | None, response: str | None = "4", reward: float | None = 1.0) -> dict:
    """Return a line of completions.jsonl."""
    row = {"uid": "0:0", "prompt": prompt, "question": question, "response": response, "reward": reward}
    return {**row, "finished": False}


def test_a_runs_responses_are_read_with_their_conversation(tmp_path: Path):
    """Truncated ones too, which have a reward; those without one are left out."""
    rows = [
        logged("[user]2 + 2?\n", "2 + 2?"),
        logged("2 + 2?", None),
        logged("[user]2 + 2?\n", "2 + 2?", reward=None),
        logged("[user]2 + 2?\n", "2 + 2?", response=None, reward=None),
    ]
    assert texts(build(tmp_path, rows)) == [["[user]2 + 2?\n[assistant]4\n"]] * 2
    rows = [logged("[system]Be brief\n[user]2 + 2?\n", "2 + 2?")]
    read = texts(build(tmp_path, rows, "data.system_prompt=Be brief"))
    assert read == [["[system]Be brief\n[user]2 + 2?\n[assistant]4\n"]]
    rows = [logged("[user]1 + 1?\n[assistant]2\n[user]2 + 2?\n", "2 + 2?")]
    read = texts(build(tmp_path, rows, "data.few_shot=[{prompt: '1 + 1?', response: '2'}]"))
    assert read == [["[user]1 + 1?\n[assistant]2\n[user]2 + 2?\n[assistant]4\n"]]
    with pytest.raises(DataError, match=r"the log has only the last message of this prompt's conversation"):
        build(tmp_path, rows)


def test_long_rows_are_treated_as_overlong_says(tmp_path: Path):
    rows = [{"prompt": "abc", "response": "d" * n, "reward": 0} for n in (1, 2, 5)]
    kept = build(tmp_path, rows, "data.overlong=filter", chat=False, limit=5)
    assert texts(kept) == [["abcd"], ["abcdd"]]
    assert kept is not None
    assert (kept.filtered, kept.truncated) == (1, 0)
    left = build(tmp_path, rows, "data.overlong=truncate_left", chat=False, limit=5)
    assert texts(left)[2] == ["ddddd"]
    right = build(tmp_path, rows, "data.overlong=truncate_right", chat=False, limit=5)
    assert texts(right)[2] == ["abcdd"]
    assert right is not None
    assert (right.filtered, right.truncated) == (0, 1)
    with pytest.raises(DataError, match=r"line 3: prompt and response have 8 tokens, above 5, the sum of data.max_pr"):
        build(tmp_path, rows, "data.overlong=error", chat=False, limit=5)
    with pytest.raises(DataError, match=r"all 3 examples have more than 3 tokens; raise data.max_prompt_tokens"):
        build(tmp_path, rows, chat=False, limit=3)


def test_pairs_that_are_equal_once_they_are_cut_are_left_out(tmp_path: Path):
    rows = [{"prompt": "abc", "chosen": "dd" + end, "rejected": "ddef"} for end in ("x", "yz")]
    rows.append({"prompt": "a", "chosen": "bcde", "rejected": "x"})
    pairs = build(
        tmp_path, rows, "reward_model.loss=bradley_terry", "data.overlong=truncate_right", chat=False, limit=5
    )
    assert texts(pairs) == [["abcde", "ax"]]
    assert pairs is not None
    assert (pairs.filtered, pairs.truncated) == (2, 0)


def test_a_validation_without_the_columns_is_none(tmp_path: Path):
    rows = [{"prompt": "a", "response": "b"}]
    assert build(tmp_path, rows, which="validation") is None
    assert build(tmp_path, [{**rows[0], "reward": 1}], which="validation") is not None


MISTAKES = {
    "a label above 1": (
        {"prompt": "a", "response": "b", "reward": 2},
        (),
        r"line 1: reward=2 is no label from 0 to 1.*set reward_model.loss=mse",
    ),
    "no number": (
        {"prompt": "a", "response": "b", "reward": "good"},
        (),
        r"column 'reward' is 'good', no finite number; correct or leave out the row",
    ),
    "no score": (
        {"prompt": "a", "response": "b", "rewards": 1},
        (),
        r"no column 'reward' \(reward_model.score_key\).*Did you mean 'rewards'",
    ),
    "pairs": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        (),
        r"no column 'reward'.*For pairs set reward_model.loss=bradley_terry",
    ),
    "no rejected": (
        {"prompt": "a", "chosen": "b", "reject": "c"},
        (PAIR,),
        r"no column 'rejected' \(reward_model.rejected_key\)",
    ),
    "equal responses": (
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        (PAIR,),
        r"line 1: the chosen and the rejected response have the same tokens",
    ),
    "ends with the user": (
        {"prompt": "a", "chosen": [FOUR, USER], "rejected": [FIVE]},
        (PAIR,),
        r"column 'chosen' must end with a message of the assistant",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_place_and_remedy(mistake: str, tmp_path: Path):
    row, given, message = MISTAKES[mistake]
    with pytest.raises(DataError, match=message):
        build(tmp_path, [row], *given)


def test_settings_that_contradict_the_data_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"bradley_terry needs pairs.*set reward_model.loss=classification, or mse"):
        build(tmp_path, [logged("a", None)], PAIR)
    several = {"prompt": [USER], "chosen": [FIVE, USER, FOUR], "rejected": [FIVE]}
    with pytest.raises(ConfigError, match=r"column 'chosen' is a conversation, and the tokenizer has no chat template"):
        build(tmp_path, [several], PAIR, chat=False)
    with pytest.raises(ConfigError, match=r"reward_model.margin_key='m' has no effect with reward_model.loss='mse'"):
        build(tmp_path, [], "reward_model.margin_key=m", "reward_model.loss=mse")
