"""`online_reward_model`: what is verified, what trains the model, and what a run and its checkpoints have of it."""

import json
import math
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hwgrpo.errors import ConfigError, RewardError, RunError
from hwgrpo.research.online_reward_model import OnlineRewardModel
from hwgrpo.research.outcome_metrics import calibration_error, ranking_accuracy
from hwgrpo.research.outcomes import Outcome, ReplayBuffer, from_tensors, pairs, to_tensors, verified
from hwgrpo.research.reward_losses import bradley_terry, classification, mse
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.functions import RewardFunction
from hwgrpo.rewards.response_steps import StepFinder
from hwgrpo.training.code_files import code_files
from tests.support.models.reward_models import save_reward_model
from tests.support.processes import ranks
from tests.support.runs import runs

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = """
def digits(batch, completions):
    return [float(text.isdigit()) for text in completions.texts]

def length(batch, completions):
    return [float(len(text)) for text in completions.texts]

def fails(batch, completions):
    return [None if "x" in text else 1.0 for text in completions.texts]

def raises(solution_str):
    raise ValueError("the verifier is gone")

def steps(batch, completions):
    return [[float("0" in step) for step in text.split("\\n")] for text in completions.texts]
"""
SLOW = """
import time

def slow(solution_str):
    time.sleep(60 * (solution_str == "x"))
    return 1.0
"""
GROUPS = [[str(10**n) for n in range(4)] + ["a", "bb", "ccc", "dddd"] for _ in range(3)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rules.py").write_text(RULES)
    save_reward_model(tmp_path / "start", "language model")
    return tmp_path


@pytest.fixture
def opened(folder, reward_config):
    """Return a function: rule, kwargs -> (pipeline, its reward model)."""

    def make(rule="digits", steps=None, policies=None, **kwargs):
        arguments = {"verifier": f"{folder}/rules.py:{rule}", "path": str(folder / "start"), **kwargs}
        entry = {"name": "online_reward_model", "kwargs": arguments, **(policies or {})}
        context = {"policy_path": "none", "training_seed": 3, "samples_per_prompt": 8}
        context |= {"max_response_tokens": 8, "sandbox_level": "auto"}
        pipeline = RewardPipeline(reward_config(entry), context=context, steps=steps)
        [function] = pipeline.functions
        assert isinstance(function, RewardFunction)
        return pipeline, cast("OnlineRewardModel", function.call)

    return make


def outcome(number: int, target: float = 0.0, uid: str = "u") -> Outcome:
    return Outcome(uid, number, 0, (number,), target, 0.0)


def learn(model, step, ranks=None):
    """Train a model after a step where it is due, with the outcomes of all ranks; None: of this one."""
    own = model.collect()
    model.add([own] if ranks is None else ranks)
    if model.is_due(step):
        model.train(step)
        model.measure_drift()


def test_one_of_eight_is_verified_whatever_rank_has_the_group_and_another_for_another_seed():
    chosen = [verified(f"0:{row}", 8, 0.125, seed=0) for row in range(400)]
    assert all(len(each) == 1 for each in chosen)
    assert {each for [each] in chosen} == set(range(8))
    assert chosen != [verified(f"0:{row}", 8, 0.125, seed=1) for row in range(400)]
    assert verified("0:7", 8, 0.125, seed=0) == chosen[7]
    counts = [len(verified(f"0:{row}", 4, 0.125, seed=0)) for row in range(4000)]
    assert set(counts) == {0, 1}
    assert sum(counts) / 4000 == pytest.approx(0.5, abs=5 * math.sqrt(0.25 / 4000))
    assert verified("0:1", 5, 1.0, seed=0) == [0, 1, 2, 3, 4]


def test_a_training_has_the_share_of_old_outcomes_and_keeps_the_newest():
    buffer = ReplayBuffer(25)
    assert buffer.mixed([outcome(n) for n in range(20)], 0.1, "a") == [outcome(n) for n in range(20)]
    mixed = buffer.mixed([outcome(n) for n in range(20, 40)], 0.1, "b")
    assert [row.sample for row in mixed[:20]] == list(range(20, 40))
    assert len(mixed) == 22
    assert all(row.sample < 20 for row in mixed[20:])
    assert [row.sample for row in buffer.rows] == list(range(15, 40))
    assert len(buffer.mixed([outcome(40)], 100.0, "c")) == 26


def test_outcomes_survive_a_checkpoint():
    rows = [Outcome("a:é", 1, 5, (3, 4, 5), 0.1, -7.25), Outcome("b", 0, 0, (), 1.0, 2.0)]
    assert from_tensors(to_tensors(rows, "x"), "x") == rows
    assert from_tensors(to_tensors([], "x"), "x") == []


def test_pairs_are_of_one_prompt_and_differ():
    a, b, c, d = outcome(0, 1.0), outcome(1, 0.0), outcome(2, 0.0), outcome(3, 0.0, uid="v")
    assert pairs([b, a, c, d]) == [(a, b), (a, c)]


def test_agreement_of_scores_with_outcomes():
    assert ranking_accuracy([0.9, 0.8, 0.1], [1, 0, 0]) == 1.0
    assert ranking_accuracy([0.1, 0.8, 0.05], [1, 0, 0]) == 0.5
    assert ranking_accuracy([0.5, 0.5], [1, 0]) == 0.5
    assert ranking_accuracy([0.1, 0.2, 0.3], [0.0, 0.5, 0.7]) == 1.0
    assert ranking_accuracy([0.1, 0.2], [1, 1]) is None
    # two bins: 0.9 and 0.95 with outcomes 1 and 0, 0.25 with outcome 0
    assert calibration_error([0.9, 0.95, 0.25], [1, 0, 0]) == pytest.approx((abs(1.85 - 1) + 0.25) / 3)
    assert calibration_error([1.0, 0.0], [1, 0]) == 0.0


def test_losses_are_those_of_torch():
    scores, targets = torch.tensor([-1.5, 0.25, 3.0]).double(), torch.tensor([0.0, 0.5, 1.0]).double()
    assert torch.equal(mse(scores, targets), functional.mse_loss(scores, targets, reduction="none"))
    cross = -(targets * scores.sigmoid().log() + (1 - targets) * (-scores).sigmoid().log())
    assert torch.allclose(classification(scores, targets), cross, rtol=1e-14)
    assert torch.allclose(bradley_terry(scores, targets), -torch.log((scores - targets).sigmoid()), rtol=1e-14)
    margin = torch.full((3,), 0.5).double()
    assert torch.equal(bradley_terry(scores, targets, margin), bradley_terry(scores - margin, targets))


def test_verified_responses_have_the_rules_outcome_and_the_others_the_models_probability(folder, opened, make_batch):
    pipeline, model = opened()
    batch, completions = make_batch(GROUPS)
    rewards = pipeline.score(batch, completions, 1)
    counts = model.counts()
    assert counts == {"verifier_calls": 3.0, "validation_verifier_calls": 0.0}
    network, tokenizer = model._placed.model, AutoTokenizer.from_pretrained(folder / "start")
    for prompt, group in enumerate(GROUPS):
        [chosen] = verified(f"0:{prompt}", 8, 0.125, 3)
        for place, text in enumerate(group):
            found = float(rewards.total[8 * prompt + place])
            if place == chosen:
                assert found == float(text.isdigit())
            else:
                ids = torch.tensor([tokenizer(f"prompt {prompt}{text}")["input_ids"]])
                with torch.no_grad():
                    score = float(network(input_ids=ids).logits.sigmoid())
                assert found == pytest.approx(score, rel=1e-4)


def test_a_validation_and_a_warm_up_are_verified_whole(opened, make_batch):
    pipeline, model = opened(warmup_steps=2)
    rule = [float(text.isdigit()) for group in GROUPS for text in group]
    assert pipeline.score(*make_batch(GROUPS)).total.tolist() == rule
    assert model.counts() == {"verifier_calls": 0.0, "validation_verifier_calls": 24.0}
    assert pipeline.score(*make_batch(GROUPS), 2).total.tolist() == rule
    assert model.counts() == {"verifier_calls": 24.0, "validation_verifier_calls": 0.0}
    pipeline.score(*make_batch(GROUPS), 3)
    assert model.counts()["verifier_calls"] == 3.0


@pytest.mark.parametrize("loss", ["classification", "mse", "bradley_terry"])
def test_an_update_is_that_of_plain_transformers_with_autograd(folder, opened, make_batch, loss):
    """One AdamW step from equal states: the moments have the gradient, so they are compared in full precision."""
    pipeline, model = opened(verify=1.0, loss=loss, batch_size=100, lr=1e-3)
    reference = AutoModelForSequenceClassification.from_pretrained(folder / "start", num_labels=1, dtype=torch.float64)
    reference.load_state_dict(model._placed.model.state_dict())
    pipeline.score(*make_batch(GROUPS), 1)
    learn(model, 1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    scores = [
        reference(input_ids=torch.tensor([tokenizer(f"prompt {prompt}{text}")["input_ids"]])).logits[0, 0]
        for prompt, group in enumerate(GROUPS)
        for text in group
    ]
    right = [text.isdigit() for group in GROUPS for text in group]
    if loss == "bradley_terry":
        terms = [
            -(scores[8 * g + i] - scores[8 * g + j]).sigmoid().log()
            for g in range(3)
            for i in range(8)
            for j in range(8)
            if right[8 * g + i] and not right[8 * g + j]
        ]
    elif loss == "mse":
        terms = [(score - float(target)) ** 2 for score, target in zip(scores, right, strict=True)]
    else:
        terms = [-(score if target else -score).sigmoid().log() for score, target in zip(scores, right, strict=True)]
    expected = torch.stack(terms).mean()
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    clip = min(1.0, 1.0 / (float(norm) + 1e-6))
    close = 1e3 * torch.finfo(torch.float32).eps  # sums of about a hundred fp32 terms per layer, relative to the norm
    assert model.metrics()["loss"] == pytest.approx(expected.item(), rel=close)
    state = model.state()
    gap = squares = 0.0
    for name, parameter in reference.named_parameters():
        first_moment = state[f"exp_avg.{name}"].double() / 0.1
        gap += float((first_moment - clip * parameter.grad).square().sum())
        squares += float((clip * parameter.grad).square().sum())
    assert math.sqrt(gap) <= close * math.sqrt(squares)


def test_the_updates_do_not_depend_on_the_size_of_a_forward_pass(opened, make_batch):
    states = []
    for tokens in (1, 10_000):
        pipeline, model = opened(verify=1.0, tokens_per_batch=tokens, lr=1e-3)
        pipeline.score(*make_batch(GROUPS), 1)
        learn(model, 1)
        states.append(model.state())
    for name in states[0]:
        if name.startswith("exp_avg."):
            close = 1e3 * torch.finfo(torch.float32).eps * float(states[1][name].norm()) + 1e-12
            assert float((states[0][name] - states[1][name]).norm()) <= max(close, 1e-9), name


def test_trained_every_k_steps_it_learns_the_rule_and_leaves_global_generators_alone(opened, make_batch):
    pipeline, model = opened(verify=0.5, every=2, lr=1e-2, epochs=4)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    found = []
    for step in range(1, 21):
        pipeline.score(*make_batch(GROUPS), step)
        learn(model, step)
        found.append(model.metrics())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [bool(each) for each in found] == [False, True] * 10
    assert found[-1]["ranking_accuracy"] == 1.0
    assert found[-1]["calibration_error"] < found[1]["calibration_error"]
    assert found[-1]["loss"] < 0.5 * found[1]["loss"]
    assert all(each["drift"] > 0 for each in found[1::2])
    right = pipeline.score(*make_batch([["123", "xyz"]]), 21).total
    assert right[0] > right[1]


def test_two_ranks_train_the_same_model_as_one(opened, make_batch):
    """Each rank has a share of the prompts; the outcomes are put in the order of prompts, not of ranks."""
    whole, one = opened()
    shares = [opened() for _ in range(2)]
    for step in (1, 2):
        whole.score(*make_batch(GROUPS), step)
        learn(one, step)
    batch, _ = make_batch(GROUPS)
    for step in (1, 2):
        own = []
        for rank, (pipeline, model) in enumerate(shares):
            rows = {0: [0, 2], 1: [1]}[rank]
            part = type(batch)(tuple(batch.prompts[row] for row in rows))
            _, texts = make_batch([GROUPS[row] for row in rows])
            pipeline.score(part, texts, step)
            own.append(list(model._own))
        for _, model in shares:
            learn(model, step, own)
    first, second, expected = shares[0][1].state(), shares[1][1].state(), one.state()
    assert first.keys() == expected.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, expected[name]), name


def test_a_state_restores_the_same_numbers(opened, make_batch):
    pipeline, model = opened(every=2)
    for step in (1, 2, 3):
        pipeline.score(*make_batch(GROUPS), step)
        learn(model, step)
    again_pipeline, again = opened(every=2)
    again.restore(model.state())
    for step in (4, 5, 6):
        scores = [each.score(*make_batch(GROUPS), step).total for each in (pipeline, again_pipeline)]
        assert torch.equal(*scores)
        for each in (model, again):
            learn(each, step)
    found, expected = again.state(), model.state()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_failures_of_the_rule_are_the_failures_of_the_reward(opened, make_batch):
    groups = [["x1", "2"]]
    pipeline, model = opened("fails", verify=1.0, policies={"on_nan": "mask_sample"})
    rewards = pipeline.score(*make_batch(groups), 1)
    assert rewards.valid.tolist() == [False, True]
    assert rewards.failures == {"nans/online_reward_model": 1}
    assert [row.sample for row in model._own] == [1]
    pipeline, _ = opened("raises", verify=1.0, policies={"on_error": "mask_sample"})
    assert pipeline.score(*make_batch(groups), 1).failures == {"errors/online_reward_model": 2}
    pipeline, _ = opened("raises", verify=1.0)
    with pytest.raises(RewardError, match="the verifier is gone"):
        pipeline.score(*make_batch(groups), 1)


def test_an_infinite_loss_ends_the_run(opened, make_batch):
    pipeline, model = opened("length", loss="mse", verify=1.0)
    with torch.no_grad():
        model._placed.model.score.weight.fill_(1e38)
    pipeline.score(*make_batch(GROUPS), 1)
    with pytest.raises(RunError, match=r"loss of the online reward model is (inf|nan)"):
        learn(model, 1)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"verify": 0}, r"kwargs.verify=0 must be a number above 0"),
        ({"verify": 8}, r"kwargs.verify=8 is a share"),
        ({"loss": "bradley_terry"}, r"kwargs.verify=0.125 of rollout.n=8 gives no pairs.*at least 0.25"),
        ({"loss": "bt"}, r"kwargs.loss.*bradley_terry"),
        ({"every": 0}, r"kwargs.every=0 must be a whole number of at least 1"),
        ({"lr": 0}, r"kwargs.lr=0"),
        ({"history": -1}, r"kwargs.history=-1"),
        ({"verifier": "online_reward_model"}, r"kwargs.verifier='online_reward_model' is this reward itself"),
        ({"verifier_timeout": 0}, r"kwargs.verifier_timeout=0"),
        ({"dtype": "float16"}, r"kwargs.dtype.*bfloat16"),
        ({"verifier": "exactmatch"}, r"kwargs.verifier.*did you mean 'exact_match'"),
        ({"verifier_kwargs": {"colour": 1}}, r"kwargs.verifier.*colour"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_named(opened, kwargs, said):
    with pytest.raises(ConfigError, match=f"(?i){said}"):
        opened(**kwargs)


def test_a_rule_that_returns_too_few_outcomes_stops_the_run_whatever_the_policy(folder, opened, make_batch):
    (folder / "rules.py").write_text("def short(batch, completions):\n    return [1.0]")
    pipeline, model = opened("short", verify=1.0, policies={"on_error": "mask_sample"})
    with pytest.raises(RewardError, match=r"verifier short must return a list with one outcome per response.* for 2"):
        pipeline.score(*make_batch([["1", "2"]]), 1)
    assert model._own == []


def test_a_column_that_the_rule_needs_is_missed_before_the_run(folder, opened):
    (folder / "rules.py").write_text("def by_level(completions, level):\n    return [1.0 for _ in completions]")
    pipeline, model = opened("by_level")
    assert model.missing_columns({"prompt"}) == pipeline.functions[0].missing_columns({"prompt"}) == ["level"]
    assert model.missing_columns({"prompt", "level"}) == []


def test_a_classifier_without_its_head_or_with_several_labels_is_refused(folder, opened):
    save_reward_model(folder / "two", "decoder", labels=2)
    with pytest.raises(ConfigError, match=r"kwargs.path=.*two' has 2 labels: use a model with one"):
        opened(path=str(folder / "two"))
    save_reward_model(folder / "one", "decoder")
    weights = load_file(folder / "one/model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if not name.startswith("score")},
        folder / "one/model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ConfigError, match=r"lacks 1 weights of Qwen3ForSequenceClassification, e.g. score.weight"):
        opened(path=str(folder / "one"))


def test_the_rule_counts_as_code_of_the_run(folder):
    verifier = f"{folder}/rules.py:digits"
    words = [f"reward.functions=[{{name: online_reward_model, kwargs: {{verifier: '{verifier}'}}}}]"]
    assert code_files(runs.small(folder / "run", *words)) == {"reward.functions.0.kwargs.verifier": folder / "rules.py"}
    with pytest.raises(ConfigError, match=r"reward.functions.0.kwargs.verifier=.*there is no file"):
        runs.small(folder / "run", words[0].replace("rules.py", "absent.py"))


def test_a_rule_that_runs_programs_has_a_sandbox_to_choose(tmp_path):
    words = "reward.functions=[{name: online_reward_model, kwargs: {verifier: code}}]"
    assert runs.small(tmp_path / "run", words, "reward.sandbox.level=seccomp").reward.sandbox.level == "seccomp"


def test_a_rules_random_numbers_differ_from_step_to_step_and_are_the_same_again(folder, opened, make_batch):
    (folder / "rules.py").write_text("import random\ndef draws(solution_str):\n    return random.random()")
    pipeline, _ = opened("draws", verify=1.0)
    first, second, again = (pipeline.score(*make_batch(GROUPS), step).total.tolist() for step in (1, 2, 1))
    assert first == again
    assert not set(first) & set(second)


def test_outcomes_outside_of_0_to_1_need_another_loss(opened, make_batch):
    pipeline, _ = opened("length", verify=1.0)
    with pytest.raises(ConfigError, match=r"kwargs.loss='classification' needs outcomes from 0 to 1.*use mse"):
        pipeline.score(*make_batch(GROUPS), 1)


def test_a_verifier_in_processes_of_its_own_is_stopped_by_its_time(folder, opened, make_batch):
    (folder / "rules.py").write_text(SLOW)
    pipeline, _ = opened("slow", verify=1.0, verifier_timeout=1.0, verifier_workers=2, policies={"on_timeout": "value"})
    with pipeline:
        assert pipeline.score(*make_batch([["a", "x"]]), 1).failures == {"timeouts/online_reward_model": 1}


def test_greedy_baselines_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"advantage.name='remax' with the reward online_reward_model.*rloo"):
        runs.run(tmp_path / "run", *ONLINE, "algorithm.advantage.name=remax")


def test_a_checkpoint_of_another_reward_model_is_refused(folder, opened):
    save_reward_model(folder / "other", "language model", head=16)
    _, model = opened()
    _, other = opened(path=str(folder / "other"))
    assert model.fits(model.state())
    assert not model.fits(other.state())


def test_steps_have_outcomes_and_scores_of_their_own(opened, make_batch):
    class Lines(StepFinder):
        def __init__(self):
            pass

        def ends(self, text):
            return [i + 1 for i, letter in enumerate(text) if letter == "\n"] + [len(text)]

        def token_ends(self, text, tokens):
            return [end - 1 for end in self.ends(text)]

    pipeline, model = opened("steps", steps=Lines(), verify=0.5)
    rewards = pipeline.score(*make_batch([["10\n11\n20", "5\n60"]]), 1)
    [chosen] = verified("0:0", 2, 0.5, 3)
    text = ["10\n11\n20", "5\n60"][chosen]
    expected = [float("0" in step) for step in text.split("\n")]
    assert [row.target for row in model._own] == expected
    assert [row.end for row in model._own] == Lines().ends(text)
    assert rewards.per_function["online_reward_model"][chosen] == sum(expected)
    learn(model, 1)
    assert model.metrics()["loss"] > 0


KWARGS = {"verifier": "exact_match", "warmup_steps": 1, "every": 2, "lr": 0.01, "history": 1.0}
ONLINE = ("reward.functions=" + json.dumps([{"name": "online_reward_model", "kwargs": KWARGS}]), "rollout.n=8")


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_run_goes_on_to_the_last_bit_and_its_model_is_a_reward_model(tmp_path: Path, strategy: str):
    words = (*ONLINE, f"trainer.strategy={strategy}", "trainer.validate_at_start=false", "trainer.save_every=1")

    def trained(output: Path, steps: int) -> None:
        assert ranks.forked(2, lambda rank: runs.run(output, *words, f"trainer.max_steps={steps}")) == [0, 0]

    trained(tmp_path / "whole", 4)
    trained(tmp_path / "parts", 3)
    trained(tmp_path / "parts", 4)
    found, expected = (runs.everything(tmp_path / each) for each in ("parts", "whole"))
    assert found["weights"] == expected["weights"]
    assert found["completions"] == expected["completions"]
    steps, again = (
        [
            {name: value for name, value in line.items() if "validation" not in name}
            for line in each["metrics"]
            if "actor/grad_norm" in line
        ]
        for each in (expected, found)
    )
    assert again == steps
    name = "reward/online_reward_model"
    calls = [line[f"{name}/verifier_calls"] for line in steps]
    assert calls[0] == 8 * calls[1] == 8 * calls[2] > 0
    assert steps[-1][f"{name}/total_verifier_calls"] == sum(calls)
    assert [f"{name}/loss" in line for line in steps] == [False, True, False, True]
    final = tmp_path / "whole" / "final-online_reward_model"
    model, report = AutoModelForSequenceClassification.from_pretrained(final, output_loading_info=True)
    assert not report["missing_keys"]
    saved = load_file(tmp_path / "whole/checkpoints/step-00000004/reward-online_reward_model.safetensors")
    assert all(torch.equal(value, saved[f"model.{key}"]) for key, value in model.named_parameters())


def test_the_trained_model_is_saved_in_the_dtype_of_its_base_or_the_one_that_is_set(tmp_path: Path):
    base = tmp_path / "base"
    assert runs.run(tmp_path / "run", "trainer.max_steps=1", "trainer.final_dtype=bfloat16") == "completed"
    (tmp_path / "run/final").rename(base)
    stored = dict.fromkeys(load_file(base / "model.safetensors"), torch.bfloat16)
    stored["model.norm.weight"] = torch.float32
    mixed = {name: value.to(stored[name]) for name, value in load_file(base / "model.safetensors").items()}
    save_file(mixed, base / "model.safetensors", {"format": "pt"})
    rewards = [{"name": "online_reward_model", "kwargs": {**KWARGS, "every": 1, "path": str(base)}}]
    words = (f"reward.functions={json.dumps(rewards)}", "trainer.max_steps=1", "rollout.n=8")
    finals = {}
    for dtype in ("auto", "float32"):
        assert runs.run(tmp_path / dtype, *words, f"trainer.final_dtype={dtype}") == "completed"
        finals[dtype] = load_file(tmp_path / dtype / "final-online_reward_model/model.safetensors")
    assert "score.weight" in finals["auto"]
    for name, weight in finals["auto"].items():
        assert weight.dtype == stored.get(name, torch.bfloat16), name
        assert finals["float32"][name].dtype == torch.float32
        assert torch.equal(finals["float32"][name].to(weight.dtype), weight), name
    config = json.loads((tmp_path / "auto/final-online_reward_model/config.json").read_text())
    assert config["dtype"] == "bfloat16"
