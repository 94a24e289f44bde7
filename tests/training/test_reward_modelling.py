"""`hwgrpo reward-model`: its losses and gradients, its runs on one and two ranks, and what the result is good for."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hwgrpo.config import load_config
from hwgrpo.config.supervised import supervised_settings
from hwgrpo.errors import ConfigError
from hwgrpo.research import reward_model_run
from hwgrpo.research.reward_update import RewardUpdate
from hwgrpo.research.score_model import ScoreModel
from hwgrpo.research.score_ranking import rank_outcomes, rank_pairs
from hwgrpo.research.scored_examples import ScoredExample
from hwgrpo.rewards.models.reward_model import RewardModel
from hwgrpo.training.strategies.single import Single
from hwgrpo.values import Completions, Prompt, PromptBatch
from tests.support.models.reward_models import save_reward_model
from tests.support.numbers.rounding import GENTLE, assert_gradients_close, assert_metrics_close, bound, drift
from tests.support.processes import ranks
from tests.support.runs import reward_model_runs, runs

EXACT = bound(dtype=torch.float64)
CPU = torch.device("cpu")
LOSSES = ("classification", "mse", "bradley_terry")
DATA = {"classification": "outcomes", "mse": "outcomes", "bradley_terry": "pairs"}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def words(folder: Path, loss: str, count: int = 40) -> tuple[str, ...]:
    """Return the settings of a loss and of its data, written to a folder."""
    write = getattr(reward_model_runs, DATA[loss])
    train, held_out = write(folder / "train.jsonl", count), write(folder / "held_out.jsonl", 20, held_out=True)
    margin = ("reward_model.margin_key=margin",) if loss == "bradley_terry" else ()
    return f"reward_model.loss={loss}", f"data.train={train}", f"data.validation={held_out}", *margin


def examples(loss: str, vocabulary: int) -> list[ScoredExample]:
    """Return five examples of several lengths."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for number, lengths in enumerate(((5, 9), (12, 3), (2, 2), (7, 4), (1, 6))):
        rows = [tuple(torch.randint(4, vocabulary, (n,), generator=draw).tolist()) for n in lengths]
        rows = rows if loss == "bradley_terry" else rows[:1]
        target = float(torch.rand((), generator=draw))
        made.append(ScoredExample(f"0:{number}", "", (), None, {}, rows=tuple(rows), target=target))
    return made


def expected(model, loss: str, chosen: list[ScoredExample]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss and its gradient by transformers and autograd, one unpadded sequence after the other."""
    model.zero_grad()
    losses = []
    for each in chosen:
        scores = [model(input_ids=torch.tensor([row])).logits[0, 0] for row in each.rows]
        target = torch.tensor(each.target, dtype=torch.float64)
        if loss == "mse":
            losses.append((scores[0] - target) ** 2)
        elif loss == "classification":
            losses.append(functional.softplus(scores[0]) - target * scores[0])
        else:
            losses.append(functional.softplus(-(scores[0] - scores[1] - target)))
    mean = torch.stack(losses).mean()
    mean.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return float(mean.detach()), gradients


@pytest.mark.parametrize("tokens", [1000, 16], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_those_of_transformers_in_fp64(loss: str, tokens: int, tmp_path: Path):
    model = save_reward_model(tmp_path, "decoder").double()
    config = load_config(
        None,
        [
            f"model.path={tmp_path}",
            "data.train=task://sort",
            f"reward_model.loss={loss}",
            f"trainer.tokens_per_micro_batch={tokens}",
            "trainer.prompts_per_step=5",
            "data.max_prompt_tokens=8",
            "rollout.max_response_tokens=8",
        ],
        used=supervised_settings,
    )
    strategy = Single(CPU, "gloo")
    policy = ScoreModel(model, compute_dtype=torch.float32)  # no autocast
    model.float()  # the optimizer's masters are fp32
    strategy.wrap(policy, config)  # pyright: ignore[reportArgumentType]
    model.double()
    update = RewardUpdate(config, strategy, policy, CPU, None, 1)  # pyright: ignore[reportArgumentType]
    batch = examples(loss, model.config.vocab_size)
    found, _ = update.accumulate_gradients(batch, range(5))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    exact, reference = expected(model, loss, batch)
    assert found == pytest.approx(exact, rel=EXACT)
    assert_gradients_close(gradients, reference, EXACT)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_train_like_one(strategy: str, loss: str, tmp_path: Path):
    """In micro-batches whose numbers differ between the ranks."""
    given = (*words(tmp_path, loss), *GENTLE, "trainer.max_steps=2", "trainer.prompts_per_update=4")
    limits = ("data.max_prompt_tokens=9", "rollout.max_response_tokens=3", "trainer.tokens_per_micro_batch=20")
    two = (f"trainer.strategy={strategy}", *limits)
    assert runs.forked(lambda: reward_model_runs.run(tmp_path / "one", *given)) == 0
    assert ranks.forked(2, lambda rank: reward_model_runs.run(tmp_path / "two", *given, *two)) == [0, 0]
    one, other = (reward_model_runs.results(tmp_path / name)["metrics"] for name in ("one", "two"))
    assert len(one) == len(other) == 4
    # a ranking may turn where two scores are equal but for rounding
    assert_metrics_close(other, one, drift(4), without=("reward_model/accuracy", "val/accuracy"))
    weights = [load_file(tmp_path / name / "final" / "model.safetensors") for name in ("two", "one")]
    assert_gradients_close(*weights, drift(4))


@pytest.mark.parametrize("loss", ["classification", "bradley_terry"])
def test_a_killed_run_continues_to_the_same_bits(loss: str, tmp_path: Path):
    given = (*words(tmp_path, loss), "trainer.save_every=2", "trainer.validate_every=2", "optim.schedule=cosine")
    assert runs.forked(lambda: reward_model_runs.run(tmp_path / "whole", *given)) == 0

    def killed() -> None:
        plain = reward_model_run.REWARD_MODEL.step

        def deadly(run, step: int) -> None:
            plain(run, step)
            if step == 5:
                run.saver.wait()
                os.kill(os.getpid(), signal.SIGKILL)

        object.__setattr__(reward_model_run.REWARD_MODEL, "step", deadly)
        reward_model_runs.run(tmp_path / "killed", *given)

    assert runs.forked(killed) == -signal.SIGKILL
    kept = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000004"]
    assert runs.forked(lambda: reward_model_runs.run(tmp_path / "killed", *given)) == 0
    assert reward_model_runs.results(tmp_path / "killed") == reward_model_runs.results(tmp_path / "whole")


@pytest.mark.parametrize("loss", LOSSES)
def test_a_trained_model_ranks_held_out_responses(loss: str, tmp_path: Path):
    """Prompts are held out, too. Chance ranks half of the pairs right."""
    longer = ("trainer.max_steps=50", "trainer.prompts_per_step=32")
    reward_model_runs.run(tmp_path / "run", *words(tmp_path, loss, 1000), *longer)
    lines = [each for each in reward_model_runs.results(tmp_path / "run")["metrics"] if "val/loss" in each]
    assert [each["step"] for each in lines] == [0, 50]
    assert lines[1]["val/loss"] < 0.8 * lines[0]["val/loss"]
    assert lines[1]["val/accuracy"] > 0.75
    assert lines[1]["val/margin"] > lines[0]["val/margin"] + 0.1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["verdict"]["headline"].startswith("Validation loss fell from")


def test_the_result_is_a_complete_model_that_scores_as_it_was_trained(tmp_path: Path):
    """By transformers, and as `reward_model` in GRPO: the loss on the validation rows is the logged one."""
    assert reward_model_runs.run(tmp_path / "run", *words(tmp_path, "mse")) == "completed"
    final = tmp_path / "run" / "final"
    model, report = AutoModelForSequenceClassification.from_pretrained(final, output_loading_info=True)
    assert not report["missing_keys"]
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == AutoTokenizer.from_pretrained(final).pad_token_id
    rows = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    prompts = [Prompt(str(i), row["prompt"], (), None, {}) for i, row in enumerate(rows)]
    count = len(rows)
    completions = Completions(
        prompt_index=torch.arange(count),
        tokens=torch.zeros(count, dtype=torch.int64),
        offsets=torch.arange(count + 1),
        logprobs=torch.zeros(count),
        finished=torch.ones(count, dtype=torch.bool),
        texts=tuple(row["response"] for row in rows),
    )
    scores = RewardModel(CPU, "reward.functions[0]", str(final))(PromptBatch(tuple(prompts)), completions)
    loss = sum((float(score) - row["reward"]) ** 2 for score, row in zip(scores, rows, strict=True)) / count  # type: ignore[arg-type]
    last = [each for each in reward_model_runs.results(tmp_path / "run")["metrics"] if "val/loss" in each][-1]
    assert loss == pytest.approx(last["val/loss"], rel=bound())


def test_a_new_head_is_drawn_with_the_seed_and_an_existing_one_is_trained_further(tmp_path: Path):
    given = (*words(tmp_path, "mse"), "optim.lr=1e-12", "trainer.max_steps=1", "trainer.validate_at_start=false")

    def head(name: str, *overrides: str) -> torch.Tensor:
        reward_model_runs.run(tmp_path / name, *given, *overrides)
        return load_file(tmp_path / name / "final" / "model.safetensors")["score.weight"]

    first, again, other = head("a"), head("b"), head("c", "trainer.seed=1")
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    deviation = json.loads((tmp_path / "a" / "final" / "config.json").read_text())["initializer_range"]
    assert 0.5 * deviation < float(first.std()) < 2 * deviation
    further = head("d", "trainer.seed=1", f"model.path={tmp_path / 'a' / 'final'}")
    assert torch.allclose(further, first, atol=1e-9)


def test_a_model_without_a_padding_token_gets_the_tokenizers(tmp_path: Path):
    save_reward_model(tmp_path / "model", "language model", pad=False, model_pad=False)
    reward_model_runs.run(tmp_path / "run", *words(tmp_path, "mse"), f"model.path={tmp_path / 'model'}")
    settings = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert settings["pad_token_id"] == AutoTokenizer.from_pretrained(tmp_path / "run" / "final").pad_token_id
    assert settings["pad_token_id"] is not None


def test_the_ranking_of_outcomes_is_the_area_under_the_curve():
    scores, targets = torch.tensor([3.0, 1.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    ranking = rank_outcomes(scores, targets)
    assert ranking.pairs == 4
    assert ranking.metrics("val") == {"val/accuracy": 3.5 / 4, "val/margin": 1.5}
    assert rank_outcomes(scores, torch.ones(4)).metrics("val") == {}
    assert rank_pairs(scores, torch.tensor([1.0, 1.0, 2.0, -1.0])).metrics("val") == {
        "val/accuracy": 2.5 / 4,
        "val/margin": 0.5,
    }


REFUSED = {
    "trainer.strategy=deepspeed": r"trainer.strategy='deepspeed' is not supported by hwgrpo reward-model; use single",
    "model.lora.rank=4": r"model.lora.rank=4, .* all parameters are trained: set rank to 0",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_is_not_supported_is_refused_by_name(setting: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=REFUSED[setting]):
        reward_model_runs.build(tmp_path / "run", *words(tmp_path, "mse"), setting)


def test_a_model_that_cannot_be_a_reward_model_is_refused(tmp_path: Path):
    save_reward_model(tmp_path / "two", "decoder", labels=2)
    with pytest.raises(ConfigError, match=r"model.path=.*two' is a classifier with 2 labels.*one label, or a language"):
        reward_model_runs.build(tmp_path / "run", *words(tmp_path, "mse"), f"model.path={tmp_path / 'two'}")


def test_log_lines_have_loss_and_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shown = ("observe.progress=plain", "observe.log_every=1", "trainer.max_steps=1")
    reward_model_runs.run(tmp_path / "run", *words(tmp_path, "mse"), *shown)
    printed = capsys.readouterr().out
    assert re.search(r"^step 1/1  loss \d\.\d{3}  accuracy \d\.\d{3}  tok/s", printed, flags=re.MULTILINE), printed
    assert re.search(r"^step 1/1  validation loss \d\.\d{3}  accuracy \d\.\d{3}$", printed, flags=re.MULTILINE), printed


def test_a_folder_of_another_command_is_refused(tmp_path: Path):
    given = words(tmp_path, "mse")
    reward_model_runs.run(tmp_path / "run", *given, "trainer.max_steps=1")
    with pytest.raises(ConfigError, match=r"checkpoint of `hwgrpo reward-model`, which `hwgrpo train` cannot continue"):
        runs.run(tmp_path / "run")
