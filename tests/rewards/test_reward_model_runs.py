"""A small run trains with each example of docs/reward-models.md, and its records have no key."""

import json

import pytest
import yaml

from hwgrpo.jsonlines import read_lines
from tests.docs.pages import blocks, code, page, table
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
    assert all(line[f"rewards/{name}/std"] > 0 for line in steps)
    assert not any(metric.startswith("reward_failures") for line in steps for metric in line)
    for file in (models / "run").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    if name == "judge":
        assert "JUDGE_API_KEY" in (models / "run" / "config.yaml").read_text()
        records = list(read_lines(models / "run" / "completions.jsonl"))
        assert records[0]["extras"]["judge_prompt_tokens"] == 20
        assert list((models / "judge-cache").rglob("*.json"))


def test_every_reward_by_a_model_or_a_service_has_an_example_and_a_row():
    assert set(NAMES) == {code(row["name"])[0] for row in table(PAGE, "name", "the score comes from")}
