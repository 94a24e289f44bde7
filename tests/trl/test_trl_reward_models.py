"""Reward models of a TRL script, as objects and by name: what they read, where they are, their names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from hwgrpo.trl import GRPOConfig, GRPOTrainer
from hwgrpo.trl.reward_callables import RewardCallables, RewardModelCall
from tests.support.models.reward_models import CHAT_TEMPLATE, character_tokenizer, save_reward_model
from tests.trl.tiny_chat_model import save_chat_model

PROMPT, COMPLETION = [{"role": "user", "content": "2+2"}], [{"role": "assistant", "content": "4"}]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reward model with a tokenizer that begins text with a BOS, as its chat template does."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / "judge"
    save_reward_model(folder, "decoder")
    tokenizer = character_tokenizer()
    tokenizer.bos_token, tokenizer.add_bos_token = "<unk>", True
    tokenizer.chat_template = "{{ bos_token }}{{ mark }}" + CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class Recorder:
    """Stands for a model: records where it moves and the tokens that it reads."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(_name_or_path="a/judge", pad_token_id=None)
        self.device = torch.device("cpu")
        self.moves: list[Any] = []
        self.read: list[list[int]] = []

    def eval(self) -> "Recorder":
        return self

    def to(self, device: torch.device) -> None:
        self.moves.append(device)

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.read += input_ids.tolist()
        return SimpleNamespace(logits=torch.zeros(len(input_ids), 1))


def test_the_tokens_of_a_model_given_as_an_object_and_its_device(judge: Path):
    tokenizer = AutoTokenizer.from_pretrained(judge)
    assert len(tokenizer("")["input_ids"]) == 1
    model, device = Recorder(), torch.device("cpu", 0)
    call = RewardModelCall(model, tokenizer, {"mark": "!"}, lambda: device)
    call([PROMPT], [COMPLETION])
    call(["2+2"], ["4"])
    conversation = "<unk>![user]2+2\n[assistant]4\n"
    assert model.read == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (conversation, "2+24")]
    assert model.moves == [device] * 2


def test_the_entry_of_a_name():
    rewards = RewardCallables(["a/judge", "b"], None, lambda: None, options={"mark": "!"}, conversations=False)
    kwargs = {"special_tokens": False, "chat_template": False, "chat_template_kwargs": {"mark": "!"}}
    assert rewards.entries == [
        {"name": "reward_model", "kwargs": {"path": path, **kwargs}} for path in ("a/judge", "b")
    ]
    assert rewards.shown == {"reward_model": "judge", "reward_model_2": "b"}


@pytest.mark.parametrize("prompt", ["2+2", PROMPT], ids=["text", "messages"])
def test_a_name_and_an_object_score_alike(judge: Path, prompt: Any):
    save_chat_model(Path("model"))
    run = GRPOTrainer(
        "model",
        [str(judge), AutoModelForSequenceClassification.from_pretrained(judge)],
        GRPOConfig(
            "out",
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=4,
            max_steps=1,
            bf16=False,
            chat_template_kwargs={"mark": "!"},
        ),
        [{"prompt": prompt}],
    )
    run.train()
    first = run.state.log_history[0]
    means = [first[name] for name in first if name.startswith("rewards/") and name.endswith("/mean")]
    assert "rewards/judge/mean" in first
    assert len(means) == 2
    assert means[0] == pytest.approx(means[1], abs=1e-4)


def test_a_name_and_an_object_write_the_date_of_the_run(judge: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = "RM {{ strftime_now('%d %b %Y') }}|" + CHAT_TEMPLATE
    tokenizer.save_pretrained(judge)
    save_chat_model(Path("model"))
    texts, apply = [], PreTrainedTokenizerFast.apply_chat_template

    def recorded(*args: Any, **kwargs: Any) -> Any:
        texts.append(apply(*args, **kwargs))
        return texts[-1]

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", recorded)
    monkeypatch.setattr("hwgrpo.training.resume.present_date", lambda: "2026-01-01T10:00:00")
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    arguments = GRPOConfig(
        "out", per_device_train_batch_size=2, num_generations=2, max_completion_length=4, max_steps=1, bf16=False
    )
    GRPOTrainer("model", [str(judge), model], arguments, [{"prompt": PROMPT}]).train()
    written = [text.partition("|")[0] for text in texts if isinstance(text, str) and text.startswith("RM ")]
    assert len(written) == 2 * 2
    assert set(written) == {"RM 01 Jan 2026"}
