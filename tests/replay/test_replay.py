"""`hwgrpo replay`: the same step is the same, rounding explains other ways to compute it, mistakes are named."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from hwgrpo.algorithms.groups import Groups
from hwgrpo.cli.main import main
from hwgrpo.cli.stored_code import FUNCTION_KEYS, named_code, print_code
from hwgrpo.config import load_config
from hwgrpo.config.named_files import function_settings
from hwgrpo.models.rounding import unit_of_sum
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.replay import replayed_model, rounding_effects, step_comparison
from hwgrpo.replay.replay_settings import captured_tree, replay_settings
from hwgrpo.replay.step_comparison import WITHIN_BOUNDS
from hwgrpo.rewards.response_text import ResponseDecoder
from hwgrpo.support.stage_differences import Stage, rounding_tolerance
from hwgrpo.training.captured_files import read_facts
from hwgrpo.training.policy.micro_batch import MicroBatch
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.strategies.optimizer import Stepping
from hwgrpo.training.update import policy_update, train_batch
from tests.support.runs.captures import TWO_UPDATES, capture, error_of, replay

Mutant = Callable[[pytest.MonkeyPatch], None]
STAGES = [
    *(
        "texts",
        "rewards",
        "repeatability",
        "advantages",
        "batch",
        "old log-probs",
        "reference log-probs",
        "log-probs",
        "loss",
    ),
    *("gradients, outside of layers", "gradients, layer 1", "gradient norm", "updated weights"),
]
TOOL = """
async def asked_twice(prompt, sampler):
    async def one(sampler):
        trajectory = sampler.trajectory()
        await sampler.sample(trajectory, max_tokens=2)
        if not trajectory.truncated:
            trajectory.observe(sampler.encode("="), "=")
        if not trajectory.truncated:
            await sampler.sample(trajectory)
        return trajectory

    return await sampler.gather(one)
"""
ALTERED = """
calls = []


def share_right(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(a == b for a, b in zip(solution_str, ground_truth, strict=False)) / len(ground_truth)
    calls.append(right)
    return right - 0.05 * abs(len(solution_str) - len(ground_truth)) + 1e-3 * (len(calls) == 7)
"""


def assert_same(report: dict[str, Any]) -> None:
    assert report["passed"], report
    assert [stage["name"] for stage in report["stages"] if stage["error"]] == []


@pytest.mark.parametrize("step", ["step_00001", "step_00003"])
def test_a_step_replayed_in_place_has_no_difference(step: str, captures: Path, capsys):
    report = replay(capsys, captures / step)
    assert [stage["name"] for stage in report["stages"]] == STAGES
    assert_same(report)
    assert report["notes"] == [WITHIN_BOUNDS]
    source = "model.path='builtin" if step == "step_00001" else str(captures.parent / "checkpoints" / "step-00000002")
    assert report["weights"].startswith(source)


def test_a_step_with_its_weights_is_replayed_in_another_folder(captures_with_weights: Path, tmp_path: Path, capsys):
    shutil.copytree(captures_with_weights / "step_00003", tmp_path / "copied")
    report = replay(capsys, tmp_path / "copied")
    assert [stage["name"] for stage in report["stages"]] == STAGES
    assert_same(report)


@pytest.mark.parametrize("layout", ["padded", "packed", "grouped", "grouped_masked"])
def test_rounding_explains_what_another_layout_changes(layout: str, captures: Path, capsys):
    report = replay(capsys, captures / "step_00003", f"model.layout={layout}")
    assert report["passed"], report
    assert (report["captured"]["layout"], report["here"]["layout"]) == ("grouped", layout)
    assert report["overridden"] == ["backend.name", "model.layout"]


def test_rounding_explains_what_another_dtype_changes(captures: Path, capsys):
    report = replay(capsys, captures / "step_00003", "model.dtype=bfloat16")
    assert report["passed"], report
    assert (report["captured"]["dtype"], report["here"]["dtype"]) == ("float32", "bfloat16")
    assert any(stage["error"] > 1e-3 for stage in report["stages"]), "bf16 rounds"


VARIANTS = {
    "on policy": (),
    "in bf16": ("model.dtype=bfloat16", *TWO_UPDATES),
    "LoRA with dropout and KL": ("model.lora.rank=4", "model.lora.dropout=0.1", "algorithm.kl.coef=0.01"),
    "the KL in the reward": ("algorithm.kl.coef=0.1", "algorithm.kl.in_reward=true", "algorithm.kl.estimator=k1"),
    "a moving reference": (*TWO_UPDATES, "algorithm.kl.sync_every=2"),
    "the exact KL": ("algorithm.kl.coef=0.1", "algorithm.kl.estimator=exact"),
    "an estimator that reads probabilities": ("algorithm.advantage.name=optimal_token_baseline",),
    "states in 8 bits": ("optim.name=adamw_8bit", "trainer.offload=gradients"),
    "gradients that are clipped": ("optim.grad_clip=0.05",),
    "another temperature in each step": ("rollout.final_temperature=0.5",),
    "log-probs of the engine": ("algorithm.old_logprobs=rollout",),
    "truncated responses left out": ("algorithm.mask_truncated=true",),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_of_any_kind_replayed_in_place_has_no_difference(name: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(rounding_effects, "DRAWS", 2)  # no difference has no need of a tolerance
    folder = capture(tmp_path / "run", *VARIANTS[name], "trainer.save_every=1", "trainer.keep_checkpoints=3")
    report = replay(capsys, folder / "step_00003")
    assert_same(report)
    assert report["stages"][-1]["name"] == "updated weights"
    assert report["notes"] == [WITHIN_BOUNDS]


def test_a_workflows_step_has_its_loss_mask_and_its_texts_as_they_are(tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "tool.py").write_text(TOOL)
    workflow = (f"rollout.workflow={tmp_path}/tool.py:asked_twice", "rollout.n=2", *TWO_UPDATES)
    folder = capture(tmp_path / "run", *workflow, "trainer.capture_weights=true")
    report = replay(capsys, folder / "step_00003")
    assert_same(report)
    assert report["notes"] == ["texts are not decoded again: another engine, or a workflow, made them", WITHIN_BOUNDS]
    build = policy_update.build_micro_batch
    monkeypatch.setattr(
        policy_update,
        "build_micro_batch",
        lambda batch, *rest, **more: build(replace(batch, loss_mask=None), *rest, **more),
    )
    assert replay(capsys, folder / "step_00003")["first_difference"] == "old log-probs"


ENVIRONMENT = """
class Board:
    def reset(self, row):
        self.turn = 0
        return "Play."

    def state(self):
        return str(self.turn)

    def step(self, action):
        self.turn += 1
        if action.text.startswith("1"):
            raise ValueError("the board broke")
        return "=", float(ord(action.text[0]) % 5) if action.text else 0.0, self.turn == 3
"""


def test_trajectories_in_an_environment_are_replayed_without_it(tmp_path: Path, capsys):
    (tmp_path / "board.py").write_text(ENVIRONMENT)
    agent = ("rollout.workflow=environment", f"rollout.agent.environments=[{tmp_path}/board.py:Board]")
    words = (*agent, "rollout.agent.max_turn_tokens=2", "rollout.max_response_tokens=32", "data.max_prompt_tokens=32")
    learn = ("reward.functions=[environment]", "algorithm.advantage.name=gigpo", "data.validation_max_rows=0")
    folder = capture(tmp_path / "run", *words, *learn, "trainer.capture_weights=true")
    (tmp_path / "board.py").unlink()
    for trust in ((), ("--trust-code",)):
        report = replay(capsys, folder / "step_00003", trust=trust)
        assert_same(report)
        names = [stage["name"] for stage in report["stages"]]
        assert {"rewards", "advantages", "loss", "updated weights"} <= {*names}
    changed = replay(capsys, folder / "step_00003", "algorithm.advantage.kwargs.step_weight=0.5", trust=())
    assert changed["first_difference"] == "advantages"


def test_muons_update_is_not_compared_and_said_to_be(tmp_path: Path, capsys):
    folder = capture(tmp_path / "run", "optim.name=muon", "trainer.capture_weights=true")
    report = replay(capsys, folder / "step_00003")
    assert_same(report)
    assert report["stages"][-1]["name"] == "gradient norm"
    assert "updated weights are not compared: Muon mixes" in report["notes"][1]


def test_clip_bounds_that_no_ratio_reaches_are_said_not_to_be_compared(captures: Path, capsys):
    report = replay(capsys, captures / "step_00003", "algorithm.loss.clip_high=0.9")
    assert (report["passed"], report["notes"]) == (True, [WITHIN_BOUNDS])
    report = replay(capsys, captures / "step_00003", "algorithm.loss.name=cispo", "algorithm.loss.clip_high=-0.1")
    assert (report["first_difference"], report["notes"]) == ("loss", [])
    assert replay(capsys, captures / "step_00003", "algorithm.loss.name=gpg")["notes"] == [], "gpg has no clip"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("model.layout=packed",), "in this layout (packed; the run: grouped)"),
        (("trainer.tokens_per_micro_batch=64",), "in micro-batches of this size (64; the run: "),
    ],
)
def test_passes_with_dropout_are_not_compared_where_it_draws_other_numbers(
    arguments: tuple[str, ...], reason: str, captures_with_dropout: Path, capsys
):
    report = replay(capsys, captures_with_dropout / "step_00001", *arguments)
    assert report["passed"], report
    start = "passes of the update are not compared: dropout draws other numbers "
    assert any(note.startswith(start + reason) for note in report["notes"]), report["notes"]
    assert {"log-probs", "loss", "gradient norm"}.isdisjoint(stage["name"] for stage in report["stages"])


def test_passes_with_dropout_of_several_ranks_are_not_compared(captures_with_dropout: Path, tmp_path: Path, capsys):
    shutil.copytree(captures_with_dropout / "step_00001", tmp_path / "step")
    changed(tmp_path / "step", lambda facts: facts["machine"].update(ranks=2))
    report = replay(capsys, tmp_path / "step")
    assert any("dropout draws other numbers of one process (1; the run: 2)" in note for note in report["notes"])


def test_the_rounding_of_the_machine_that_captured_counts(captures: Path, tmp_path: Path, capsys):
    shutil.copytree(captures / "step_00001", tmp_path / "step")
    facts = json.loads((tmp_path / "step" / "step.json").read_text())
    assert facts["machine"]["rounding"] == unit_of_sum(torch.float32, 32)
    tolerances = []
    for rounding in (facts["machine"]["rounding"], 2.0**-10):  # fp32, TF32
        changed(tmp_path / "step", lambda facts, unit=rounding: facts["machine"].update(rounding=unit))
        report = replay(capsys, tmp_path / "step")
        tolerances.append(next(stage["tolerance"] for stage in report["stages"] if stage["name"] == "log-probs"))
    assert 500 < tolerances[1] / tolerances[0] < 5000, "as much as the units: 2900 times"


def test_a_reference_of_another_model_is_an_error_that_names_the_model(captures: Path, capsys):
    other = f"model.path={OTHER.format(32, 1)}&seed=7"
    error = error_of(capsys, captures / "step_00003", "backend.name=cpu", other)
    assert "the reference model of model.path='builtin://" in error
    assert "is not that of step 3" in error


def on_model(change: Callable[[Any, pytest.MonkeyPatch], Any]) -> Mutant:
    """Return a mutant that changes something after the model's startup checks."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        check = replayed_model._check_weights

        def checked(captured: Any, model: Any, weights: Any) -> None:
            check(captured, model, weights)
            change(model, patch)

        patch.setattr(replayed_model, "_check_weights", checked)

    return plant


def gradient_of(name: str) -> Mutant:
    """Return a mutant in which the gradient of a parameter is 1 % too large."""
    return on_model(lambda model, _: model.get_parameter(name).register_hook(lambda gradient: gradient * 1.01))


def scaled(place: Any, name: str, factor: float = 1.01) -> Mutant:
    """Return a mutant in which the result of a function is a factor too large."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = getattr(place, name)
        patch.setattr(place, name, lambda *args, **kwargs: right(*args, **kwargs) * factor)

    return plant


def without_mask(model: Any, patch: pytest.MonkeyPatch) -> None:
    right = MicroBatch.to

    def unmasked(self: MicroBatch, device: torch.device) -> MicroBatch:
        assert self.attention_mask is not None
        return right(replace(self, mask_spans=torch.zeros_like(self.mask_spans)), device)

    patch.setattr(MicroBatch, "to", unmasked)


def wrong_reference(patch: pytest.MonkeyPatch) -> None:
    check = replayed_model._check_reference

    def checked(captured: Any, reference: Reference, *rest: Any) -> None:
        check(captured, reference, *rest)
        with torch.no_grad():
            reference.policy.base.get_input_embeddings().weight.mul_(1.01)

    patch.setattr(replayed_model, "_check_reference", checked)


def longer_prompt(patch: pytest.MonkeyPatch) -> None:
    right = train_batch.offsets_of
    patch.setattr(train_batch, "offsets_of", lambda lengths: right(lengths + (lengths.cumsum(0) == lengths)))


def spaced_texts(patch: pytest.MonkeyPatch) -> None:
    right = ResponseDecoder.__call__
    patch.setattr(ResponseDecoder, "__call__", lambda self, tokens: f" {right(self, tokens)}")


def larger_step(patch: pytest.MonkeyPatch) -> None:
    right = Stepping.step
    patch.setattr(Stepping, "step", lambda self, lr: right(self, 1.01 * lr))


def unchanged(patch: pytest.MonkeyPatch) -> None:
    pass


LAYER = "model.layers.0"
MUTANTS: dict[str, tuple[Mutant, tuple[str, ...], str]] = {
    "texts with a space": (spaced_texts, (), "texts"),
    "the standard deviation 1 % too large": (scaled(Groups, "scale"), (), "advantages"),
    "advantages that are no numbers": (scaled(Groups, "scale", float("nan")), (), "advantages"),
    "prompts of another length": (longer_prompt, (), "batch"),
    "another temperature": (unchanged, ("rollout.temperature=1.01",), "old log-probs"),
    "no attention mask": (on_model(without_mask), ("model.layout=grouped_masked",), "old log-probs"),
    "a wrong reference": (wrong_reference, (), "reference log-probs"),
    "the KL 1 % too large": (unchanged, ("algorithm.kl.coef=0.101",), "loss"),
    "the head's gradient 1 % too large": (gradient_of("model.norm.weight"), (), "gradients, outside of layers"),
    "a layer's gradient 1 % too large": (gradient_of(f"{LAYER}.mlp.up_proj.weight"), (), "gradients, layer 1"),
    "gradients clipped to another norm": (unchanged, ("optim.grad_clip=0.01",), "updated weights"),
    "a learning rate 1 % too large": (unchanged, ("optim.lr=1.01e-3",), "updated weights"),
    "a step 1 % too large": (larger_step, (), "updated weights"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_named_at_its_stage_and_at_no_earlier_one(name: str, captures: Path, capsys, monkeypatch):
    plant, arguments, stage = MUTANTS[name]
    plant(monkeypatch)
    assert replay(capsys, captures / "step_00003", *arguments)["first_difference"] == stage


def noisy(size: float) -> Mutant:
    """Return a device whose results differ from run to run, by this share."""
    generator = torch.Generator().manual_seed(0)

    def add_noise(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + size * torch.randn(output.shape, generator=generator))

    return on_model(lambda model, _: model.get_submodule("model.norm").register_forward_hook(add_noise))


def test_what_differs_from_run_to_run_has_its_stage_and_hides_no_mistake(captures: Path, capsys, monkeypatch):
    noisy(0.01)(monkeypatch)
    report = replay(capsys, captures / "step_00003", "rollout.temperature=1.03", "trainer.prompts_per_update=2")
    assert report["first_difference"] == "repeatability"
    by_name = {stage["name"]: stage for stage in report["stages"]}
    assert by_name["repeatability"]["error"] > 10 * by_name["repeatability"]["tolerance"] > 0
    assert max(by_name[name]["tolerance"] for name in ("old log-probs", "log-probs", "loss")) < 1e-4
    assert not by_name["old log-probs"]["passed"]


def test_differences_from_run_to_run_below_rounding_are_no_mistake(captures: Path, capsys, monkeypatch):
    noisy(1e-8)(monkeypatch)
    report = replay(capsys, captures / "step_00003", "model.layout=packed")
    assert report["passed"], report
    assert next(stage for stage in report["stages"] if stage["name"] == "repeatability")["error"] > 0


def test_an_effect_of_rounding_that_is_not_finite_explains_nothing(captures: Path, capsys, monkeypatch):
    monkeypatch.setattr(step_comparison, "unit_of_sum", lambda *args: 3e38)
    report = replay(capsys, captures / "step_00003")
    failed = [stage["name"] for stage in report["stages"] if not stage["passed"]]
    assert failed[0] == "old log-probs"
    assert {"log-probs", "loss", "gradient norm"} < {*failed}


@pytest.mark.parametrize("draw", [math.inf, math.nan])
def test_a_draw_that_is_not_finite_leaves_no_tolerance(draw: float):
    tolerance = rounding_tolerance([1.0, draw, 1.0], torch.ones(1))
    assert not math.isfinite(tolerance)
    assert not Stage("loss", 0.0, tolerance).passed
    assert not Stage("loss", 0.0, math.inf).passed


def test_a_tolerance_is_twice_the_mean_and_four_deviations_of_draws_and_at_least_four_roundings():
    assert rounding_tolerance([1.0, 3.0], torch.ones(1)) == pytest.approx(2 * (2 + 4 * 2**0.5))
    assert rounding_tolerance([], torch.tensor([-3.0, math.inf])) == 12 * torch.finfo(torch.float32).eps


def test_one_reward_that_differs_is_named_with_its_response(captures: Path, tmp_path: Path, capsys):
    (tmp_path / "altered.py").write_text(ALTERED)
    altered = f"reward.functions=['{tmp_path}/altered.py:share_right']"
    report = replay(capsys, captures / "step_00003", altered)
    assert report["first_difference"] == "rewards"
    stage = next(stage for stage in report["stages"] if stage["name"] == "rewards")
    assert (stage["index"], stage["actual"]) == ([6], pytest.approx(stage["expected"] + 1e-3))


def test_a_reward_that_fails_here_is_a_difference(captures: Path, tmp_path: Path, capsys):
    (tmp_path / "altered.py").write_text("def share_right(solution_str):\n    raise KeyError('no such tool')\n")
    report = replay(capsys, captures / "step_00003", f"reward.functions=['{tmp_path}/altered.py:share_right']")
    assert report["first_difference"] == "rewards"
    assert "no such tool" in report["stages"][1]["tensor"]


def test_the_table_ends_with_the_first_difference_its_tensor_and_place(captures: Path, capsys, monkeypatch):
    gradient_of(f"{LAYER}.mlp.up_proj.weight")(monkeypatch)
    assert main(["replay", str(captures / "step_00003"), "backend.name=cpu"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"step 3 of {captures / 'step_00003'}; weights: ")
    last = printed.splitlines()[-1]
    place = f"in norm of the gradient of {LAYER}.mlp.up_proj.weight"
    assert last.startswith(f"first difference: gradients, layer 1, {place}, 0."), last


def test_an_operation_that_the_device_lacks_is_named(captures: Path, capsys, monkeypatch):
    def lacking(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("Could not run 'aten::logsumexp' with arguments from the 'NPU' backend")

    monkeypatch.setattr(policy_update.PolicyUpdate, "score", lacking)
    assert main(["replay", str(captures / "step_00001"), "backend.name=cpu"]) == 2
    assert "(cpu) cannot compute the step: Could not run 'aten::logsumexp'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tree",
    [
        {"plugins": ["package.module"]},
        {"reward": {"functions": ["package.module:reward"]}},
        {"algorithm": {"advantage": {"name": "own.py:estimator"}}},
        {"algorithm": {"loss": {"name": "package.module:loss"}}},
        {"algorithm": {"process": {"function": "own.py:scores"}}},
        {"reward": {"functions": [{"name": "code", "kwargs": {"verifier": "own.py:verify"}}]}},
        {"trainer": {"stages": ["own.py:stage"]}},
        {"observe": {"metrics": ["package.module:metric"]}},
    ],
    ids=str,
)
def test_all_code_that_stored_settings_name_is_printed(tree: dict, capsys):
    print_code(Path("step.json"), tree)
    assert " names code, which is run as who made that folder wrote it: " in capsys.readouterr().err


def test_the_keys_of_code_are_those_of_the_settings_that_name_functions():
    settings = function_settings(load_config("tiny_sort"))
    last = {[part for part in each.key.split(".") if not part.isdigit()][-1] for each in settings}
    assert last <= {*FUNCTION_KEYS}


def test_rewards_whose_code_or_secret_is_missing_are_said_not_to_be_recomputed(tmp_path: Path, capsys):
    code = "def by_key(data_source, solution_str, ground_truth, extra_info=None, api_key=None):\n    return 1.0\n"
    (tmp_path / "keyed.py").write_text(code)
    name = f"{tmp_path}/keyed.py:by_key"
    keyed = f"reward.functions=[{{name: {name}, kwargs: {{api_key: sk-abcdef0123456789}}}}]"
    step = capture(tmp_path / "run", keyed) / "step_00001"
    report = replay(capsys, step)
    assert report["passed"]
    assert "rewards" not in [stage["name"] for stage in report["stages"]]
    assert "kwargs.api_key: its value is a secret, which a captured step leaves out" in report["notes"][0]
    report = replay(capsys, step, "reward.functions.0.kwargs.api_key=other")
    assert [stage["name"] for stage in report["stages"]][:2] == ["texts", "rewards"]
    (tmp_path / "keyed.py").unlink()
    report = replay(capsys, step, "reward.functions.0.kwargs.api_key=other")
    assert any("rewards are not recomputed" in note and "keyed.py" in note for note in report["notes"]), report["notes"]


RUNS_CODE = """
from pathlib import Path

Path(__file__).with_suffix(".ran").touch()


def reward(data_source, solution_str, ground_truth, extra_info=None):
    Path(__file__).with_suffix(".ran").touch()
    return float(len(solution_str))
"""


def test_rewards_in_files_are_computed_again_only_where_you_trust_them(tmp_path: Path, capsys):
    own = tmp_path / "own.py"
    own.write_text(RUNS_CODE)
    step = capture(tmp_path / "run", f"reward.functions=[length, '{own}:reward']") / "step_00001"
    own.write_text(RUNS_CODE + "# not imported yet\n")
    for extra in ((), ("reward.functions.1.weight=2",)):
        own.with_suffix(".ran").unlink(missing_ok=True)
        report = replay(capsys, step, *extra, trust=())
        assert report["passed"], report
        assert not own.with_suffix(".ran").exists()
        assert "rewards" in [stage["name"] for stage in report["stages"]], "the built-in one is compared"
        [note] = [note for note in report["notes"] if "is not recomputed" in note]
        assert "own.py:reward is code of who made the captured step" in note
        assert note.endswith("add --trust-code")
    report = replay(capsys, step)
    assert report["passed"], report
    assert own.with_suffix(".ran").exists()
    assert [note for note in report["notes"] if "is not recomputed" in note] == []
    own.with_suffix(".ran").unlink()
    assert replay(capsys, step, f"reward.functions.1.name={own}:reward", trust=())["passed"]
    assert own.with_suffix(".ran").exists(), "the command line names it"


CODE = {
    "plugins": {"plugins: []": "plugins: [own_code]"},
    "plugins.0": {
        "plugins: []": "plugins: ['${data.system_prompt}']",
        "system_prompt: null": "system_prompt: own_code",
    },
    "algorithm.loss.name": {"name: ppo_clip": "name: FOLDER/own_code.py:reward"},
    "algorithm.advantage.name": {
        "advantage:\n    name: grpo": "advantage:\n    name: ${data.system_prompt}",
        "system_prompt: null": "system_prompt: FOLDER/own_code.py:reward",
    },
}
"""Setting -> captured texts that are replaced."""


@pytest.mark.parametrize("setting", CODE)
def test_other_code_is_refused_before_it_runs(setting: str, captures: Path, tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "own_code.py").write_text(RUNS_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(captures / "step_00001", tmp_path / "step")
    changed(tmp_path / "step", with_settings(CODE[setting], tmp_path))
    error = error_of(capsys, tmp_path / "step", "backend.name=cpu")
    assert setting in error
    assert "add --trust-code" in error
    assert not (tmp_path / "own_code.ran").exists()


def with_settings(replaced: Mapping[str, str], folder: Path) -> Callable[[dict[str, Any]], None]:
    """Return a change of a step's settings."""

    def change(facts: dict[str, Any]) -> None:
        for old, new in replaced.items():
            assert facts["config"].count(old) == 1, old
            facts["config"] = facts["config"].replace(old, new.replace("FOLDER", str(folder)))

    return change


def test_rewards_that_an_interpolation_names_are_code_too(tmp_path: Path, capsys):
    own = tmp_path / "own.py"
    own.write_text(RUNS_CODE)
    step = capture(tmp_path / "run", "reward.functions=[length, exact_match]") / "step_00001"
    replaced = {
        "name: exact_match": "name: ${data.system_prompt}",
        "system_prompt: null": "system_prompt: FOLDER/own.py:reward",
    }
    changed(step, with_settings(replaced, tmp_path))
    report = replay(capsys, step, trust=())
    assert any("own.py:reward is code of who made the captured step" in note for note in report["notes"])
    assert not own.with_suffix(".ran").exists()


@pytest.mark.parametrize(
    ("level", "kwargs", "why"),
    [
        ("none", "{}", "reward.sandbox.level=none lets programs of the captured step do more"),
        ("auto", "{sandbox_level: none}", "reward.functions.1.kwargs.sandbox_level: it lets programs"),
        ("auto", "{site_packages: true}", "reward.functions.1.kwargs.site_packages: it lets programs"),
    ],
)
def test_captured_settings_do_not_take_protection_from_programs_away(level, kwargs, why, captures: Path, capsys):
    """Only the command line, or trust in who captured the step, lets its programs run with less protection."""
    facts = read_facts(captures / "step_00001")
    functions = [{"name": "exact_match"}, {"name": "code", "kwargs": yaml.safe_load(kwargs)}]
    tree = captured_tree(facts)
    tree["reward"] |= {"functions": functions, "sandbox": {"level": level}}
    facts = facts | {"config": yaml.safe_dump(tree)}
    missing = replay_settings(facts, ("backend.name=cpu",), named_code(tree)).missing
    assert [why in f"{key}: {reason}" for key, reason in missing.items()] == [True]
    assert replay_settings(facts, ("backend.name=cpu",), None).missing == {}
    if level == "none":
        assert replay_settings(facts, ("reward.sandbox.level=none",), named_code(tree)).missing == {}


def test_columns_of_an_engine_of_your_own_are_those_of_the_batch(captures: Path, tmp_path: Path, capsys):
    step = tmp_path / "step"
    shutil.copytree(captures / "step_00001", step)
    tensors = load_file(step / "step.safetensors")
    tensors["batch.token_extras.x"] = torch.ones(len(tensors["batch.tokens"]))
    before = hashlib.sha256((step / "step.safetensors").read_bytes()).hexdigest()
    save_file(tensors, step / "step.safetensors")
    sums = (step / "SHA256SUMS").read_text()
    after = hashlib.sha256((step / "step.safetensors").read_bytes()).hexdigest()
    (step / "SHA256SUMS").write_text(sums.replace(before, after))
    changed(step, lambda facts: facts["values"]["batch."].update(token_extras=["x"]))
    assert_same(replay(capsys, step))


def test_a_checkpoint_that_is_none_is_an_error_in_the_argument(captures: Path, tmp_path: Path, capsys):
    error = error_of(capsys, captures / "step_00003", "backend.name=cpu", "--checkpoint", str(tmp_path))
    assert str(tmp_path) in error


def test_a_step_in_which_nothing_is_trained_says_that_its_passes_are_not_compared(tmp_path: Path, capsys):
    own = tmp_path / "own.py"
    own.write_text(RUNS_CODE.replace("float(len(solution_str))", "1.0"))
    step = capture(tmp_path / "run", "algorithm.kl.coef=0", f"reward.functions=['{own}:reward']") / "step_00001"
    report = replay(capsys, step, "rollout.temperature=0.5")
    assert "passes of the update are not compared: no response has an advantage" in report["notes"]
    assert "loss" not in [stage["name"] for stage in report["stages"]]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.kl.coef=0.1", "algorithm.kl.coef=0.1: it needs reference log-probs of each token"),
        ("algorithm.advantage.name=optimal_token_baseline", "it needs probabilities of each token"),
    ],
)
def test_settings_that_need_what_was_not_captured_are_refused(override, message, captures_with_dropout, capsys):
    error = error_of(capsys, captures_with_dropout / "step_00001", "backend.name=cpu", "--trust-code", override)
    assert message in error
    assert "leave it as it was captured" in error


def test_a_step_without_its_weights_takes_a_checkpoint_or_an_exported_model(captures: Path, tmp_path: Path, capsys):
    step = tmp_path / "copied"
    shutil.copytree(captures / "step_00003", step)
    checkpoint = captures.parent / "checkpoints" / "step-00000002"
    error = error_of(capsys, step, "backend.name=cpu")
    assert "the model before step 3 is missing" in error
    assert "--checkpoint FOLDER" in error
    assert_same(replay(capsys, step, "--checkpoint", str(checkpoint)))
    assert main(["export", str(checkpoint), str(tmp_path / "exported"), "--dtype", "float32"]) == 0
    report = replay(capsys, step, f"model.path={tmp_path / 'exported'}")
    assert_same(report)
    assert [stage["name"] for stage in report["stages"]][-1] == "gradient norm"
    for note, start in zip(report["notes"], ("reference log-probs", "ratios", "updated weights"), strict=True):
        assert note.startswith(start)
    other = captures.parent / "checkpoints" / "step-00000001"
    assert "is a checkpoint of step 1; step 3 needs that of 2" in error_of(
        capsys, step, "backend.name=cpu", "--checkpoint", str(other)
    )


def changed(step: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a step's step.json, and its checksum with it."""
    path = step / "step.json"
    facts = json.loads(path.read_text())
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    change(facts)
    path.write_text(json.dumps(facts))
    sums = (step / "SHA256SUMS").read_text()
    (step / "SHA256SUMS").write_text(sums.replace(before, hashlib.sha256(path.read_bytes()).hexdigest()))


def cut(step: Path) -> None:
    path = step / "step.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another schema": (
        lambda step: changed(step, lambda facts: facts.update(schema="hwgrpo.step/2")),
        "step.json has schema 'hwgrpo.step/2'; this version reads hwgrpo.step/1",
    ),
    "a cut file": (cut, "step.safetensors is damaged: its checksum differs"),
    "changed settings": (
        lambda step: (
            (step / "step.json").write_text((step / "step.json").read_text().replace("0.1", "0.2", 1)) and None
        ),
        "step.json is damaged: its checksum differs",
    ),
    "a missing file": (lambda step: (step / "step.safetensors").unlink(), "step.safetensors is missing"),
    "no captured step": (lambda step: (step / "SHA256SUMS").unlink(), "is no captured step: it has no SHA256SUMS"),
    "a list without the tensors": (lambda step: (step / "SHA256SUMS").write_text(""), "does not list step.json"),
    "a list that leaves the folder": (
        lambda step: (step / "SHA256SUMS").write_text((step / "SHA256SUMS").read_text() + "00  ../secret\n"),
        "the file '../secret' leaves the folder",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_step_is_an_error_that_names_the_file(name: str, captures: Path, tmp_path: Path, capsys):
    damage, message = DAMAGES[name]
    shutil.copytree(captures / "step_00001", tmp_path / "step")
    damage(tmp_path / "step")
    assert message in error_of(capsys, tmp_path / "step", "backend.name=cpu")


OTHER = "builtin://tiny?task=sort&hidden={}&layers={}&steps=30&batch=32&digits=3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model.path=nowhere",), "model.path='nowhere'"),
        ((f"model.path={OTHER.format(64, 1)}",), "is another model than that of step 1"),
        ((f"model.path={OTHER.format(32, 2)}",), "is another model than that of step 1"),
        ((f"model.path={OTHER.format(32, 1)}&seed=7",), "are not those before step 1"),
        (("model.lora.rank=4",), "is another model than that of step 1"),
        (("backend.name=abacus",), "abacus"),
        (("model.dtype=float16",), "model.dtype='float16'"),
        (("model.layot=packed",), "model.layot"),
        (("kernels.pins={row_stats: abacus}",), "abacus"),
    ],
    ids=lambda value: value[0].rpartition("&")[2] if isinstance(value, tuple) else "",
)
def test_a_wrong_argument_is_an_error_that_names_it(arguments: tuple[str, ...], message: str, captures: Path, capsys):
    backend = () if any(each.startswith("backend") for each in arguments) else ("backend.name=cpu",)
    assert message in error_of(capsys, captures / "step_00001", *backend, *arguments)


def test_a_model_of_another_vocabulary_is_an_error_that_names_both(captures: Path, tmp_path: Path, capsys):
    config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    character_tokenizer("0123456789").save_pretrained(tmp_path)
    error = error_of(capsys, captures / "step_00001", "backend.name=cpu", f"model.path={tmp_path}")
    assert re.search(r"has a vocabulary of 128 tokens, and the model of step 1 in .* has \d+", error)
