"""A small run trains with each example of docs/reward-models.md, and its records have no key."""

import dataclasses
import inspect
import json
import re

import pytest
import yaml

from hwgrpo.catalog import REWARDS
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.services.concurrent_requests import RETRIED
from hwgrpo.rewards.services.connection import Connection
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.values import PromptBatch
from tests.docs.pages import FENCED, blocks, code, page, section, table
from tests.support.models.reward_models import save_reward_model
from tests.support.runs.runs import run
from tests.support.servers.reward_server import rewards_by

PAGE = page("reward-models.md")
EXAMPLES = [yaml.safe_load(block) for block in blocks(PAGE, "yaml")]
NAMES = [example["reward"]["functions"][0]["name"] for example in EXAMPLES]
KEY = "the-key-that-only-the-test-knows"
STEPS = 2


def reply(asked, number):
    """Reply as each service does."""
    if asked.path == "/classify":
        return {"data": [{"probs": [float(len(asked.body["input"]))]}]}
    if asked.path == "/v1/chat/completions":
        assert asked.headers["authorization"] == f"Bearer {KEY}"
        text = asked.body["messages"][0]["content"]
        usage = {"prompt_tokens": 20, "completion_tokens": 5}
        return {"choices": [{"message": {"content": f"score: {len(text) % 11}"}}], "usage": usage}
    assert asked.path == "/rewards"
    return {"rewards": [float(len(text)) for text in asked.body["responses"]]}


def overrides(example, server):
    """Return an example as overrides of a run, with the test's server for the page's."""
    text = json.dumps(example["reward"]["functions"]).replace("http://localhost:8000", server.url)
    advantage = example.get("algorithm", {}).get("advantage", {}).get("name", "grpo")
    return f"reward.functions={text}", f"algorithm.advantage.name={advantage}"


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Make the models of the page in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    save_reward_model(tmp_path / "my-reward-model", "decoder")
    save_reward_model(tmp_path / "my-process-reward-model", "decoder of tokens", labels=2)
    return tmp_path


@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=[f"{name} {n}" for n, name in enumerate(NAMES)])
def test_a_run_trains_with_the_example(models, number):
    example, name = EXAMPLES[number], NAMES[number]
    with rewards_by(reply) as server:
        words = overrides(example, server)
        status = run(models / "run", *words, f"trainer.max_steps={STEPS}", "observe.completions_per_step=16")
    assert status == "completed"
    steps = [line for line in read_lines(models / "run" / "metrics.jsonl") if f"rewards/{name}/mean" in line]
    assert len(steps) == STEPS
    by_rule = example["reward"]["functions"][0]["kwargs"].get("warmup_steps", 0)  # which scores the small model 0
    assert all(line[f"rewards/{name}/std"] > 0 for line in steps[by_rule:])
    assert not any(metric.startswith("reward_failures") for line in steps for metric in line)
    for file in (models / "run").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    if name == "judge":
        assert "JUDGE_API_KEY" in (models / "run" / "config.yaml").read_text()
        records = list(read_lines(models / "run" / "completions.jsonl"))
        assert records[0]["extras"]["judge_prompt_tokens"] == 20
        assert list((models / "judge-cache").rglob("*.json"))
        lines = [line for line in read_lines(models / "run" / "metrics.jsonl") if "reward/judge/requests" in line]
        requests = [line["reward/judge/requests"] for line in lines]
        assert sum(requests) == lines[-1]["reward/judge/total_requests"] == len(server.asked)
        assert lines[-1]["reward/judge/total_prompt_tokens"] == 20 * sum(requests) > 0


def test_every_reward_by_a_model_or_a_service_has_an_example_and_a_row():
    assert set(NAMES) == {code(row["name"])[0] for row in table(PAGE, "name", "the score comes from")}


PASSED = {
    *("device", "steps", "key", "name", "connection"),
    *("policy_path", "training_seed", "samples_per_prompt", "max_response_tokens", "sandbox_level"),
    "template_date",
}
"""Parameters that the trainer passes, and those of a connection."""
SECTIONS = {
    "reward_model": "A reward model in the trainer: `reward_model`",
    "process_reward_model": "A process reward model: `process_reward_model`",
    "online_reward_model": "A reward model that learns during the run: `online_reward_model`",
    "served_reward_model": "A reward model on a server: `served_reward_model`",
    "judge": "A judge: `judge`",
    "http": "Your own service: `http`",
}


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_names_the_arguments_of_a_reward_and_their_defaults(name):
    parameters = inspect.signature(REWARDS.load(name)).parameters
    text = section(PAGE, SECTIONS[name])
    wanted = set(parameters) - PASSED
    assert wanted <= set(re.findall(r"\w+", " ".join(code(FENCED.sub("", text)))))
    assert {row for each in table(text, "argument", "default") for row in code(each["argument"])} <= wanted
    for row in table(text, "argument", "default"):
        [first, *_] = code(row["argument"])
        default = parameters[first].default
        if isinstance(default, bool | int) and default is not inspect.Parameter.empty:
            assert row["default"].split(",")[0] == str(default).lower(), first
        elif isinstance(default, str):
            assert code(row["default"]) == [default], first


def test_the_page_names_the_arguments_of_connections_and_their_defaults():
    rows = {
        code(row["argument"])[0]: row["default"] for row in table(section(PAGE, "Connections"), "argument", "default")
    }
    defaults = {field.name: field.default for field in dataclasses.fields(Connection)}
    assert list(rows) == list(defaults)
    for name, default in defaults.items():
        if isinstance(default, int | float):
            assert float(rows[name]) == default
    for status in RETRIED:
        assert str(status) in PAGE


def test_the_class_of_the_page_is_a_reward(tmp_path, reward_config, make_batch):
    [source] = blocks(PAGE, "python")
    (tmp_path / "mine.py").write_text(source)
    config = reward_config({"name": f"{tmp_path}/mine.py:Brevity", "kwargs": {"longest": 4}})
    with RewardPipeline(config) as rewards:
        assert rewards.score(*make_batch([["a", "abcdef"]])).total.tolist() == [0.75, 0.0]


def test_the_json_of_the_page_is_what_is_sent_and_read(reward_config, make_batch):
    sent, replied = map(json.loads, blocks(PAGE, "json"))
    with rewards_by(lambda asked, number: replied) as server:
        config = reward_config({"name": "http", "kwargs": {"url": server.url}})
        batch, completions = make_batch([["4"]], ["4"], [sent["columns"][0]])
        batch = PromptBatch((dataclasses.replace(batch.prompts[0], text="2+2?"),))
        with RewardPipeline(config) as rewards:
            assert rewards.score(batch, completions).total.tolist() == replied["rewards"]
    assert server.asked[0].body == sent
