"""Examples of supervised training: which tokens of which rows are trained."""

import json

import pytest

from hwgrpo.data.examples import build_examples
from hwgrpo.errors import ConfigError, DataError
from tests.data.conftest import make_tokenizer

TURNS = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}$\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
"""Each message ends with the end token and a line end, as in ChatML."""
FORGETFUL = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content if loop.last else m.content.split('/')[-1] }}$\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
"""Leaves out the reasoning before the slash of earlier messages."""
END = 2


def say(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def read(config, tokenizer, *, longest=64, which="train"):
    """Return of each example the prompt, the response, and the response with untrained tokens as `_`."""
    data = build_examples(config, tokenizer, (END,), longest, which)
    assert data is not None
    found = []
    for row in range(len(data)):
        example = data.prompt(row, 0)
        texts = [tokenizer.convert_ids_to_tokens(list(ids)) for ids in (example.token_ids, example.response_ids)]
        masked = [token if trained else "_" for token, trained in zip(texts[1], example.trained, strict=True)]
        found.append(("".join(texts[0]), "".join(texts[1]), "".join(masked)))
    return found


def test_of_text_the_response_and_its_end_token_are_trained(data_config, jsonl, tokenizer):
    config = data_config(jsonl([{"prompt": "ab", "response": "cd"}, {"prompt": "x", "response": ""}]))
    assert read(config, tokenizer) == [("^ab", "cd$", "cd$"), ("^x", "$", "$")]


def test_the_responses_column_has_the_name_from_the_settings(data_config, jsonl, tokenizer):
    config = data_config(jsonl([{"prompt": "ab", "output": "cd"}]), response_key="output")
    assert read(config, tokenizer) == [("^ab", "cd$", "cd$")]
    with pytest.raises(DataError, match=r"line 1: no column 'response' \(data.response_key\); there are: prompt, outp"):
        read(data_config(config.train), tokenizer)


def test_of_a_conversation_every_turn_of_the_assistant_is_trained_up_to_its_end_token(data_config, jsonl):
    tokenizer = make_tokenizer(TURNS)
    expected = ("<u>hi$\n<a>", "yo$\n<u>b$\n<a>cd$", "yo$" + "_" * 10 + "cd$")
    rows = [{"messages": say("hi", "yo", "b", "cd", "and")}, {"messages": say("hi", "yo", "b", "cd")}]
    config = data_config(jsonl(rows))
    found = read(config, tokenizer)
    assert found == [expected, expected]
    as_prompt = data_config(jsonl([{"prompt": say("hi", "yo", "b", "cd")}], "prompt.jsonl"))
    assert read(as_prompt, tokenizer) == found[:1]


def test_of_a_prompt_with_messages_only_the_turns_of_the_response_are_trained(data_config, jsonl):
    tokenizer = make_tokenizer(TURNS)
    prompt, rest = say("hi", "yo", "b"), say("", "cd", "e", "fg")[1:]
    rows = [
        {"prompt": prompt, "response": rest},
        {"prompt": prompt, "response": "cd"},
        {"prompt": "b", "response": rest},
    ]
    context = "<u>hi$\n<a>yo$\n<u>b$\n<a>"
    assert read(data_config(jsonl(rows), max_prompt_tokens=99), tokenizer) == [
        (context, "cd$\n<u>e$\n<a>fg$", "cd$" + "_" * 10 + "fg$"),
        (context, "cd$", "cd$"),
        ("<u>b$\n<a>", "cd$\n<u>e$\n<a>fg$", "cd$" + "_" * 10 + "fg$"),
    ]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "hi", "response": say("", "yo")[1:]}, "<u>hi be$\n<a>"),
        ({"prompt": say("hi"), "response": "yo"}, "<u>hi be$\n<a>"),
        ({"prompt": say("hi", "yo")}, "<u>hi be$\n<a>"),
        ({"prompt": "hi", "response": "yo"}, "^hi be"),
    ],
)
def test_an_instruction_is_once_in_a_prompt(row, text, data_config, jsonl):
    [(prompt, response, _)] = read(data_config(jsonl([row]), instruction="be"), make_tokenizer(TURNS))
    assert (prompt, response) == (text, "yo$")


def test_a_template_without_an_end_token_gets_one_at_the_end(data_config, jsonl, tokenizer):
    found = read(data_config(jsonl([{"messages": say("hi", "yo", "b", "cd")}])), tokenizer)
    assert found == [("<user>hi\n<assistant>", "yo\n<user>b\n<assistant>cd$", "yo" + "_" * 20 + "cd$")]


def test_a_response_continues_the_prompts_message_of_the_assistant(data_config, jsonl, tokenizer):
    found = read(data_config(jsonl([{"prompt": say("hi", "y"), "response": "o"}])), tokenizer)
    assert found == [("<user>hi\n<assistant>y", "o$", "o$")]


def test_a_template_that_forgets_earlier_reasoning_is_refused_with_the_row(data_config, jsonl):
    tokenizer = make_tokenizer(FORGETFUL)
    rows = [{"messages": say("hi", "yo")}, {"messages": say("hi", "why/yo", "b", "so/cd")}]
    with pytest.raises(DataError, match=r"line 2: the chat template does not keep what it wrote before message 3"):
        read(data_config(jsonl(rows)), tokenizer)
    # the last turn alone has the context of a rollout
    rows = [{"prompt": say("hi", "why/yo", "b"), "response": "so/cd"}]
    found = read(data_config(jsonl(rows, "turn.jsonl")), tokenizer)
    assert found == [("<u>hi$\n<a>yo$\n<u>b$\n<a>", "so/cd$", "so/cd$")]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": say("hi")}, "no message of the conversation is the assistant's"),
        ({"messages": say("hi", "yo")[1:]}, "column 'messages', message 0|begins with the assistant's"),
        ({"messages": "hi"}, "column 'messages' is text"),
        ({"prompt": "hi", "response": 3}, "column 'response' is of type int"),
        ({"prompt": "hi"}, "no column 'response'"),
    ],
)
def test_rows_without_a_response_are_refused(row, problem, data_config, jsonl):
    with pytest.raises(DataError, match=f"line 1: .*({problem})"):
        read(data_config(jsonl([row])), make_tokenizer(TURNS.replace("<a>", "")))


def test_long_examples_are_dropped_cut_or_refused(data_config, jsonl, tokenizer):
    path = jsonl(
        [{"prompt": "abcdef", "response": "g"}, {"prompt": "a", "response": "bcdef"}, {"prompt": "a", "response": "b"}]
    )
    limits = {"max_prompt_tokens": 4}
    dropped = build_examples(data_config(path, **limits), tokenizer, (END,), 3, "train")
    assert (len(dropped), dropped.filtered, dropped.long_responses) == (1, 1, 1)
    cut = read(data_config(path, **limits, overlong="truncate_left"), tokenizer, longest=3)
    assert cut == [("cdef", "g$", "g$"), ("^a", "bcd", "bcd"), ("^a", "b$", "b$")]
    with pytest.raises(DataError, match=r"line 1: the prompt has 7 tokens and the response 2, .*set data.overlong"):
        read(data_config(path, **limits, overlong="error"), tokenizer, longest=3)


def test_a_task_trains_its_correct_responses_on_prompts_of_their_own(data_config, tokenizer):
    config = data_config("task://sort?digits=2")
    train, validation = (read(config, tokenizer, which=which) for which in ("train", "validation"))
    for prompt, response, _ in train:
        assert response == "".join(sorted(prompt[6:8])) + "$"
    assert train
    assert not {prompt for prompt, *_ in train} & {prompt for prompt, *_ in validation}


def test_a_validation_without_responses_has_no_examples(data_config, jsonl, tokenizer):
    config = data_config(jsonl([{"prompt": "a", "response": "b"}]), validation=str(jsonl([{"prompt": "a"}], "v.jsonl")))
    assert build_examples(config, tokenizer, (END,), 9, "validation") is None


def logged(prompt, response, reward, *, finished=True, question=None):
    return {
        "step": 1, "uid": "0:0", "prompt": prompt, "question": question, "response": response, "reward": reward,
        "finished": finished,
    }  # fmt: skip


LOGGED = [
    logged("a", "b", 1.0),
    logged("a", "b", 1.0),
    logged("a", "c", 0.2),
    logged("a", "d", 0.9, finished=False),
    logged("a", None, None),
    logged("<u>q$\n<a>", "e", 0.8, question="q"),
]


@pytest.mark.parametrize(
    ("keep", "responses"),
    [("correct", "be"), ("reward>=0.8", "be"), ("reward>0.8", "b"), ("reward < 0.5", "c"), (None, "bbce")],
)
def test_logged_responses_are_kept_by_their_reward_once_each(keep, responses, data_config, jsonl):
    found = read(data_config(jsonl(LOGGED), keep=keep), make_tokenizer(TURNS))
    assert [response for _, response, _ in found] == [f"{each}$" for each in responses]


def test_logged_prompts_are_the_models_input_as_it_was(data_config, jsonl):
    found = read(data_config(jsonl(LOGGED), keep="correct"), make_tokenizer(TURNS))
    assert [prompt for prompt, *_ in found] == ["^a", "<u>q$\n<a>"]


def trajectory(response: str, characters: str, sampled: list[list[int]], **more):
    ids = make_tokenizer().convert_tokens_to_ids(list(characters))
    more = {"tokens": ids, "sampled": sampled, "outcome": {"reward": 1}} | more
    return logged("<u>q$\n<a>", response, 1.0, question="q") | more


def test_of_a_logged_trajectory_the_sampled_tokens_are_trained_as_they_are(data_config, jsonl):
    rows = [
        trajectory("x\n<u>no\n<a>yz", "x$\n<u>no$\n<a>yz$", [[0, 2], [13, 16]]),
        trajectory("xy", "xy!", [[0, 3]]),  # ended by a stop string
        trajectory("xobserved", "xnoy$no", [[0, 1], [3, 5]], outcome=None),  # with a text of the user's own
    ]
    found = read(data_config(jsonl(rows)), make_tokenizer(TURNS))
    assert found == [
        ("<u>q$\n<a>", "x$\n<u>no$\n<a>yz$", "x$___________yz$"),
        ("<u>q$\n<a>", "xy!", "xy!"),
        ("<u>q$\n<a>", "xnoy$", "x__y$"),
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (trajectory("xnoy", "", [], tokens=None), "line 1: a trajectory, .* without its tokens.* hwgrpo train"),
        (trajectory("x other y", "x$noy$", [[0, 2], [4, 6]]), "not those of its text under this tokenizer"),
        (trajectory("xnoy", "", [[0, 1]], tokens=[30, 99999]), "not those of its text under this tokenizer"),
        (trajectory("other", "x$", [[0, 2]]), "not those of its text under this tokenizer"),
    ],
)
def test_trajectories_whose_tokens_are_unknown_are_refused(row, problem, data_config, jsonl):
    with pytest.raises(DataError, match=problem):
        read(data_config(jsonl([row])), make_tokenizer(TURNS))


def test_conditions_on_nothing_are_refused(data_config, jsonl, tokenizer):
    path = jsonl(LOGGED)
    for keep, error, problem in (
        ("best", ConfigError, "data.keep='best' is neither correct nor a condition"),
        ("score>1", DataError, r"no column 'score' \(data.keep\)"),
        ("reward>2", DataError, "none of the 6 rows .* meets it; 2 reached the length limit or were dropped"),
    ):
        with pytest.raises(error, match=problem):
            read(data_config(path, keep=keep), tokenizer)


def test_conversations_with_equal_rewards_are_not_taken_for_each_other(data_config, jsonl):
    rows = [{"messages": say("hi", text), "reward": 1} for text in ("yo", "no")]
    assert len(read(data_config(jsonl(rows), keep="correct"), make_tokenizer(TURNS))) == 2


def test_the_fingerprint_changes_with_a_response(data_config, jsonl, tokenizer):
    one, two = (
        build_examples(
            data_config(jsonl([{"prompt": "a", "response": text}], f"{text}.jsonl")), tokenizer, (END,), 9, "train"
        )
        for text in "bc"
    )
    assert one.fingerprint != two.fingerprint
    assert json.dumps(one.fingerprint)
