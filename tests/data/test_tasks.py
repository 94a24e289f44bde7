import collections

import pytest

from hwgrpo.data.tasks import parse_task
from hwgrpo.errors import ConfigError

SPECS = ["task://sort", "task://sort?digits=2", "task://sort?digits=9", "task://add?max=9", "task://add", "task://copy"]


@pytest.mark.parametrize("spec", SPECS)
def test_no_prompt_is_in_two_splits_or_twice_in_one(spec):
    splits = parse_task(spec).splits
    assert set(splits) == {"warm", "train", "validation"}
    prompts = [row["prompt"] for rows in splits.values() for row in rows]
    assert len(prompts) == len(set(prompts))
    assert all(len(rows) >= 10 for rows in splits.values())


@pytest.mark.parametrize("spec", SPECS)
def test_a_task_is_the_same_each_time(spec):
    assert parse_task(spec).splits == parse_task(spec).splits


@pytest.mark.parametrize("spec", SPECS)
def test_the_splits_are_not_cut_from_an_ordered_list(spec):
    for rows in parse_task(spec).splits.values():
        prompts = [row["prompt"] for row in rows]
        assert prompts != sorted(prompts)


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ("task://sort", lambda payload: "".join(sorted(payload))),
        ("task://add?max=20", lambda payload: str(eval(payload))),
        ("task://copy?length=3", lambda payload: payload),
    ],
)
def test_the_ground_truth_is_the_right_answer_of_every_row(spec, answer):
    task = parse_task(spec)
    for rows in task.splits.values():
        for row in rows:
            name, payload = row["prompt"].removesuffix("=").split(" ")
            assert name == task.name
            assert row["ground_truth"] == answer(payload)
            assert row["data_source"] == f"task://{task.name}"


def test_options_set_the_size_of_the_problem():
    assert all(len(row["ground_truth"]) == 6 for row in parse_task("task://sort?digits=6").splits["train"])
    assert all(len(row["ground_truth"]) == 3 for row in parse_task("task://copy?length=3").splits["train"])
    addends = [
        int(addend)
        for rows in parse_task("task://add?max=12").splits.values()
        for row in rows
        for addend in row["prompt"][4:-1].split("+")
    ]
    assert (min(addends), max(addends)) == (0, 12)


@pytest.mark.parametrize("spec", SPECS)
def test_the_alphabet_and_the_length_limit_hold_every_prompt_and_demonstration(spec):
    task = parse_task(spec)
    texts = [text for pair in task.demonstrations(2000, seed=1) for text in pair]
    texts += [row[key] for rows in task.splits.values() for row in rows for key in ("prompt", "ground_truth")]
    assert set("".join(texts)) <= set(task.alphabet)
    assert list(task.alphabet) == sorted(set(task.alphabet))
    assert max(len(response) for _, response in task.demonstrations(2000, seed=1)) <= task.max_response_chars


@pytest.mark.parametrize("spec", SPECS)
def test_demonstrations_come_from_all_of_the_warm_split_and_from_nothing_else(spec):
    task = parse_task(spec)
    warm = {row["prompt"] for row in task.splits["warm"]}
    drawn = {prompt for prompt, _ in task.demonstrations(2 * len(warm), seed=3)}
    assert drawn <= warm
    assert len(drawn) > 0.7 * len(warm)


@pytest.mark.parametrize("spec", ["task://sort?digits=6", "task://add", "task://copy"])
def test_the_three_modes_of_demonstration_are_about_equally_frequent(spec):
    task = parse_task(spec)
    assert len(task.modes) == 3
    counts = collections.Counter()
    for prompt, response in task.demonstrations(3000, seed=0):
        matching = [name for name, answer in task.modes.items() if answer(task.payload(prompt)) == response]
        assert matching
        if len(matching) == 1:
            counts[matching[0]] += 1
    assert all(0.28 < counts[name] / counts.total() < 0.39 for name in task.modes), counts


def test_the_same_prompt_is_demonstrated_in_different_modes():
    responses = collections.defaultdict(set)
    for prompt, response in parse_task("task://sort?digits=2").demonstrations(2000, seed=0):
        responses[prompt].add(response)
    assert any(len(found) == 2 for found in responses.values())


def test_demonstrations_depend_on_the_seed_and_on_nothing_else():
    task = parse_task("task://sort")
    assert task.demonstrations(50, seed=1) == parse_task("task://sort").demonstrations(50, seed=1)
    assert task.demonstrations(50, seed=1) != task.demonstrations(50, seed=2)


def test_the_first_mode_is_the_right_answer():
    for name in ("sort", "add", "copy"):
        task = parse_task(f"task://{name}")
        right = next(iter(task.modes.values()))
        assert all(right(task.payload(row["prompt"])) == row["ground_truth"] for row in task.splits["validation"])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("task://sotr", ["task://sotr: task='sotr'", "add, calculator, copy", "Did you mean 'sort'?"]),
        ("task://sort?digit=4", ["'digit'", "Did you mean 'digits'?"]),
        ("task://sort?digits=four", ["digits='four'", "integer", "digits=4"]),
        ("task://sort?digits=1", ["digits=1", "2 to 32"]),
        ("task://add?max=5", ["max=5", "9 to 1000000"]),
        ("task://copy?length=99", ["length=99", "2 to 32"]),
        ("task://copy?7", ["'7'", "length"]),
    ],
)
def test_a_wrong_task_address_is_refused_with_what_is_allowed(spec, words):
    with pytest.raises(ConfigError) as caught:
        parse_task(spec)
    assert all(word in str(caught.value) for word in words), caught.value
