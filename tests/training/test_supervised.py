"""`hwgrpo sft`: its loss and gradient, its runs on one and two ranks, and what comes of them."""

import copy
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hwgrpo.data.examples import Example
from hwgrpo.errors import ConfigError
from hwgrpo.training.policy.layouts import GROUPED, PACKED, PADDED, Layout
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.supervised.example_batch import assemble_examples, mean_over_trained
from tests.support.models.steps import CPU, updater
from tests.support.models.tiny import VOCAB, tiny_qwen3
from tests.support.numbers.rounding import GENTLE, STEP, assert_gradients_close, assert_metrics_close, drift
from tests.support.processes import ranks
from tests.support.runs import runs, supervised_runs

UPDATES = (
    "algorithm.loss.name=gpg",
    "trainer.prompts_per_step=4",
    "trainer.prompts_per_update=2",
    "trainer.tokens_per_micro_batch=32",
)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def examples() -> list[Example]:
    """Return four examples of several lengths, two of them with tokens of other turns in the response."""
    draw = torch.Generator().manual_seed(7)
    made = []
    for number, (prompt, trained) in enumerate(((3, "111"), (5, "1100011"), (2, "1"), (4, "1110111110"))):
        ids = torch.randint(VOCAB, (prompt + len(trained),), generator=draw).tolist()
        made.append(
            Example(
                uid=f"0:{number}",
                text="",
                token_ids=tuple(ids[:prompt]),
                ground_truth=None,
                columns={},
                response_ids=tuple(ids[prompt:]),
                trained=tuple(digit == "1" for digit in trained),
            )
        )
    return made


def expected(model, chosen: list[Example]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient by transformers in fp64: labels of -100 outside of the trained tokens."""
    model = copy.deepcopy(model).double()
    longest = max(len(each.token_ids) + len(each.response_ids) for each in chosen)
    ids = torch.zeros(len(chosen), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, each in enumerate(chosen):
        tokens = [*each.token_ids, *each.response_ids]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        for place, trained in enumerate(each.trained, start=len(each.token_ids)):
            if trained:
                labels[row, place] = tokens[place]
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", [PADDED, PACKED, GROUPED], ids=lambda layout: layout.name)
def test_loss_and_gradient_are_those_of_transformers_in_fp64(layout: Layout):
    """Over two updates of two examples, in several micro-batches."""
    model = tiny_qwen3()
    update = updater(model, *UPDATES, layout=layout)
    batch = mean_over_trained(assemble_examples(examples()), 2, Single(CPU, "gloo"))
    for sequences in ([0, 1], [2, 3]):
        loss, _ = update.accumulate_gradients(batch, sequences)
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        update.strategy.discard_gradients()
        exact, reference = expected(model, [examples()[i] for i in sequences])
        assert loss == pytest.approx(exact, rel=STEP)
        assert_gradients_close(found, reference, STEP)


def test_untrained_tokens_have_no_influence_on_the_mean():
    """The scale of an update's advantages is its response tokens over its trained ones."""
    batch = mean_over_trained(assemble_examples(examples()), 2, Single(CPU, "gloo"))
    assert batch.token_advantages is not None
    first, second = batch.token_advantages[:10], batch.token_advantages[10:]
    assert first[first > 0].tolist() == pytest.approx([10 / 7] * 7)
    assert second[second > 0].tolist() == pytest.approx([11 / 9] * 9)
    assert (first == 0).sum() + (second == 0).sum() == 5


def conversations(folder: Path) -> str:
    """Return the setting of a file with conversations of two turns, whose template has an end token."""
    (folder / "template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    rows = []
    for number in range(40):
        turns = [
            ("user", f"sort {number}="),
            ("assistant", str(number)),
            ("user", "more"),
            ("assistant", "1" * (1 + number % 5)),
        ]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train={folder / 'chat.jsonl'}"


def chat_words(folder: Path) -> tuple[str, ...]:
    return (
        conversations(folder),
        f"data.validation={folder / 'chat.jsonl'}",
        f"model.chat_template={folder / 'template.jinja'}",
        "trainer.prompts_per_update=4",
        *GENTLE,
    )


WAYS = {
    "ddp": ("trainer.strategy=ddp",),
    "fsdp2": ("trainer.strategy=fsdp2", "trainer.tokens_per_micro_batch=80"),
    "ddp, LoRA": ("trainer.strategy=ddp", "model.lora.rank=4", "model.lora.dropout=0"),
    "sequences shared": ("trainer.strategy=ddp", "trainer.sequence_parallel_size=2", "model.layout=grouped"),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_like_one(way: str, tmp_path: Path):
    words = (*chat_words(tmp_path), "trainer.max_steps=3")
    others = [word for word in WAYS[way] if word.startswith("model.lora")]
    assert runs.forked(lambda: supervised_runs.run(tmp_path / "one", *words, *others)) == 0
    assert ranks.forked(2, lambda rank: supervised_runs.run(tmp_path / "two", *words, *WAYS[way])) == [0, 0]
    one, two = (supervised_runs.results(tmp_path / name)["metrics"] for name in ("one", "two"))
    assert len(one) == len(two) == 5
    assert_metrics_close(two, one, drift(6))
    finals = [sorted((tmp_path / name).glob("final*/*.safetensors")) for name in ("two", "one")]
    assert len(finals[0]) == len(finals[1]) == 1 + bool(others)
    for left, right in zip(*finals, strict=True):
        assert_gradients_close(load_file(left), load_file(right), drift(6))


@pytest.mark.parametrize("more", [(), ("model.lora.rank=4", "model.lora.dropout=0.1")], ids=["full", "lora"])
def test_a_killed_run_continues_to_the_same_bits(more: tuple[str, ...], tmp_path: Path):
    words = (*chat_words(tmp_path), *more, "trainer.save_every=2", "trainer.validate_every=2", "optim.schedule=cosine")
    assert runs.forked(lambda: supervised_runs.run(tmp_path / "whole", *words)) == 0

    def killed() -> None:
        plain = supervised_runs.supervised_step

        def deadly(run, step: int) -> None:
            plain(run, step)
            if step == 5:
                run.saver.wait()
                os.kill(os.getpid(), signal.SIGKILL)

        supervised_runs.supervised_step = deadly
        supervised_runs.run(tmp_path / "killed", *words)

    assert runs.forked(killed) == -signal.SIGKILL
    kept = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000004"]
    assert runs.forked(lambda: supervised_runs.run(tmp_path / "killed", *words)) == 0
    assert supervised_runs.results(tmp_path / "killed") == supervised_runs.results(tmp_path / "whole")
    [resume] = json.loads((tmp_path / "killed" / "environment.json").read_text())["resumes"]
    assert [(stage["name"], stage["error"]) for stage in resume["stages"]] == [("log-probs", 0), ("entropy", 0)]


def test_the_losses_are_in_metrics_summary_and_epochs(tmp_path: Path):
    words = (*chat_words(tmp_path), "trainer.max_steps=0", "trainer.epochs=2", "trainer.validate_every=5")
    assert supervised_runs.run(tmp_path / "run", *words) == "completed"
    lines = supervised_runs.results(tmp_path / "run")["metrics"]
    steps = [line for line in lines if "actor/loss" in line]
    validations = {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert [line["data/epoch"] for line in steps] == pytest.approx([step / 5 for step in range(1, 11)])
    assert list(validations) == [0, 5, 10]
    assert validations[10] < validations[5] < validations[0]
    assert not [name for line in lines for name in line if "reward" in name or "rollout" in name or "advantage" in name]
    assert sum(line["perf/response_tokens"] for line in steps) == 2 * sum(
        len(str(number)) + 1 + 1 + number % 5 + 1 for number in range(40)
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["loss"]["validation"] == {"before": validations[0], "after": validations[10], "after_step": 10}
    assert summary["verdict"]["mood"] == "good"
    assert summary["verdict"]["headline"].startswith("Validation loss fell from")


def test_the_settings_of_rollout_reward_and_algorithm_are_not_used(tmp_path: Path):
    unused = (
        "rollout.engine=vllm_server",
        "rollout.temperature=0.5",
        "rollout.n=1",
        "reward.functions=[nowhere.py:reward]",
        "algorithm.aggregation.name=seq-mean-token-mean",
        "algorithm.kl.coef=0.1",
        "algorithm.preset=dapo",
        "data.difficulty.hard_threshold=0",
        "trainer.epochs_per_batch=3",
    )
    for name, words in (("plain", ()), ("recipe", unused)):
        supervised_runs.run(tmp_path / name, *words, "trainer.max_steps=2")
    assert supervised_runs.results(tmp_path / "recipe") == supervised_runs.results(tmp_path / "plain")


def test_a_folder_of_another_command_is_refused(tmp_path: Path):
    supervised_runs.run(tmp_path / "sft", "trainer.max_steps=2")
    with pytest.raises(ConfigError, match=r"is a checkpoint of `hwgrpo sft`, which `hwgrpo train` cannot continue"):
        runs.run(tmp_path / "sft")
    runs.run(tmp_path / "train", "trainer.max_steps=1", "trainer.validate_at_start=false")
    with pytest.raises(ConfigError, match=r"`hwgrpo train`, which `hwgrpo sft` cannot.*model.path=.*/train/final"):
        supervised_runs.run(tmp_path / "train")
