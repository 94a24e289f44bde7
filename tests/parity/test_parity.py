"""`hwgrpo parity`: passes where rounding explains each difference, and names the first stage of a mistake."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_kernels.head import HeadGradients
from hwgrpo_kernels.loss_calls import LossCalls
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2VLConfig

from hwgrpo.algorithms import losses, policy_loss
from hwgrpo.algorithms.groups import Groups
from hwgrpo.cli.main import main
from hwgrpo.errors import ConfigError
from hwgrpo.models import vision
from hwgrpo.models.loading import load_model
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.parity import comparison, fixed_step, measured
from hwgrpo.parity.families import FAMILIES, VISION_FAMILIES, save_family
from hwgrpo.parity.fixed_adapter import with_adapter
from hwgrpo.parity.settings import load_settings
from hwgrpo.rollout.local import token_sampling
from hwgrpo.training.policy import micro_batch
from hwgrpo.training.policy.micro_batch import MicroBatch
from hwgrpo.training.policy.policy_model import HeadOperand, PolicyModel
from hwgrpo.training.strategies.optimizer import Stepping
from hwgrpo.training.strategies.replicated import Replicated
from hwgrpo.training.update import policy_update
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import Completions, PromptBatch, Sampling

Mutant = Callable[[pytest.MonkeyPatch], None]
FLOAT32 = ("backend.name=cpu", "model.dtype=float32", "trainer.threads=1")
BFLOAT16 = ("backend.name=cpu", "model.dtype=bfloat16", "trainer.threads=1")
STAGES = [
    *("embeddings", "layer 1", "layer 2", "log-probs", "entropy", "greedy tokens", "advantages", "loss"),
    *("gradients, head", "gradients, layer 2", "gradients, layer 1", "gradients, embeddings"),
    *("gradient norm", "updated weights", "log-probs after the update", "sampled log-probs", "second update"),
]


def parity(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """Return the report of a comparison with fp64."""
    (report,) = comparisons(capsys, *arguments)
    return report


def comparisons(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    """Return the reports of all comparisons."""
    code = main(["parity", *arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["passed"] else 1)
    assert report["passed"] == all(each["passed"] for each in report["comparisons"])
    return report["comparisons"]


@pytest.mark.parametrize(
    "arguments",
    [
        FLOAT32,
        (*FLOAT32, "trainer.seed=1"),
        *((*FLOAT32, f"model.layout={layout}") for layout in ("padded", "packed", "grouped", "grouped_masked")),
        (*FLOAT32, "model.attention=eager"),
        (*FLOAT32, "kernels.chunk_rows=4"),
        (*FLOAT32, "algorithm.entropy_coef=0.1"),
        BFLOAT16,
        (*BFLOAT16, "kernels.logits_dtype=float32"),
    ],
    ids=lambda arguments: " ".join(arguments[1:]),
)
def test_rounding_explains_every_difference_on_a_cpu(arguments: tuple[str, ...], capsys):
    report = parity(capsys, *arguments)
    assert [stage["name"] for stage in report["stages"] if stage["name"] != "log-probs, dense mask"] == STAGES
    assert report["first_difference"] is None, report
    assert [stage["name"] for stage in report["stages"] if stage["is_coarse"]] == []
    assert decided_tokens(report) > 0


def decided_tokens(report: dict) -> int:
    """Return how many greedy tokens lead by more than rounding, so that they are compared."""
    (stage,) = (stage for stage in report["stages"] if stage["name"] == "greedy tokens")
    return int(stage["tensor"].split()[0])


def test_a_model_of_the_users_own_is_compared(tmp_path: Path, capsys):
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    character_tokenizer("0123456789").save_pretrained(tmp_path)
    report = parity(capsys, *FLOAT32, f"model.path={tmp_path}")
    assert report["passed"], report
    assert "layer 3" in [stage["name"] for stage in report["stages"]]


def changed_parts(change: Callable[[Any], None]) -> Mutant:
    """Return a mutant that changes the model on the device."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        build = comparison.build_measured

        def built(*args: Any) -> Any:
            measured = build(*args)
            change(measured.model)
            return measured

        patch.setattr(comparison, "build_measured", built)

    return plant


LORA = ("model.lora.rank=4",)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
def test_adapters_are_compared_as_if_they_had_been_trained(dtype, targets, capsys):
    report = parity(capsys, *dtype, *LORA, f"model.lora.target_modules=[{targets}]")
    trained = [stage for stage in STAGES if stage not in ("gradients, head", "gradients, embeddings")]
    assert [stage["name"] for stage in report["stages"] if stage["name"] != "log-probs, dense mask"] == trained
    assert report["first_difference"] is None, report
    coarse = {stage["name"] for stage in report["stages"] if stage["is_coarse"]}
    assert coarse <= ({"updated weights", "second update"} if dtype == BFLOAT16 else set()), (
        "a step of an adapter is small"
    )


def test_existing_adapters_are_compared(tmp_path: Path, capsys):
    config = load_settings([*FLOAT32, *LORA])
    empty = load_model(config.model, attention="eager", on_meta_device=True)
    config = with_adapter(config, empty, tmp_path / "adapter")
    assert parity(capsys, *FLOAT32, f"model.lora.adapter={config.model.lora.adapter}")["passed"]


def scaled_adapters(model: Any) -> None:
    for module in model.model.layers[1].modules():
        for name in module.scaling if hasattr(module, "lora_A") else ():
            module.scaling[name] *= 1.01


def unadapted_sampler(patch: pytest.MonkeyPatch) -> None:
    """A sampler that reads the frozen weights alone."""
    right = measured.build_engine

    def build(config: Any, policy: Any, *rest: Any, **kwargs: Any) -> Any:
        engine = right(config, policy, *rest, **kwargs)
        generate = engine.generate

        def without(batch: PromptBatch, sampling: Sampling) -> Completions:
            with policy.model.disable_adapter():
                engine.update_weights(0)
                return generate(batch, sampling)

        engine.generate = without
        return engine

    patch.setattr(measured, "build_engine", build)


def untempered_sampler(patch: pytest.MonkeyPatch) -> None:
    right = token_sampling._draw
    patch.setattr(
        token_sampling, "_draw", lambda logits, uniform, temperature, *rest: right(logits, uniform, 1.0, *rest)
    )


def output_of(name: str) -> Mutant:
    """Return a mutant in which a module's output is 1 % too large."""
    return changed_parts(lambda model: model.get_submodule(name).register_forward_hook(lambda *call: call[2] * 1.01))


def gradient_of(name: str) -> Mutant:
    """Return a mutant in which the gradient of a parameter is 1 % too large."""
    return changed_parts(lambda model: model.get_parameter(name).register_hook(lambda gradient: gradient * 1.01))


OF_ADAPTERS = {
    "adapters of layer 2 1 % too large": (changed_parts(scaled_adapters), "layer 2"),
    "the sampler has no adapters": (unadapted_sampler, "greedy tokens"),
    "the gradient of an A in layer 1 1 % too large": (
        gradient_of("model.layers.0.mlp.up_proj.lora_A.default.weight"),
        "gradients, layer 1",
    ),
    "the gradient of a B in layer 2 1 % too large": (
        gradient_of("model.layers.1.self_attn.o_proj.lora_B.default.weight"),
        "gradients, layer 2",
    ),
}


@pytest.mark.parametrize("name", OF_ADAPTERS)
def test_a_mistake_with_adapters_is_found_at_its_stage(name: str, capsys, monkeypatch):
    plant, stage = OF_ADAPTERS[name]
    plant(monkeypatch)
    assert parity(capsys, *FLOAT32, *LORA)["first_difference"] == stage


def scaled(place: Any, name: str, factor: float = 1.01) -> Mutant:
    """Return a mutant in which the result of a function is a factor too large."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = getattr(place, name)
        patch.setattr(place, name, lambda *args, **kwargs: right(*args, **kwargs) * factor)

    return plant


def wrong_positions(patch: pytest.MonkeyPatch) -> None:
    right = MicroBatch.to
    patch.setattr(
        MicroBatch, "to", lambda self, device: right(replace(self, position_ids=2 * self.position_ids), device)
    )


def without_temperature(patch: pytest.MonkeyPatch) -> None:
    right = PolicyModel._head_options
    patch.setattr(PolicyModel, "_head_options", lambda *args: right(*args) | {"temperature": 1.0})


def wrong_entropy(patch: pytest.MonkeyPatch) -> None:
    right = PolicyUpdate.score

    def score(*args: Any, entropies: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        found = right(*args, entropies=entropies, **kwargs)
        if entropies is not None:
            entropies.mul_(1.01)
        return found

    patch.setattr(PolicyUpdate, "score", score)


def least_likely(patch: pytest.MonkeyPatch) -> None:
    right = token_sampling._draw
    patch.setattr(token_sampling, "_draw", lambda logits, *rest: right(-logits, *rest))


def unclipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(losses, "clip_ratio", lambda ratio, advantage, *rest: (-advantage * ratio, {}))


def larger_kl(patch: pytest.MonkeyPatch) -> None:
    right = policy_loss.build_kl

    def build(*args: Any) -> Any:
        estimator = right(*args)
        return lambda *logprobs: 1.01 * estimator(*logprobs)

    patch.setattr(policy_loss, "build_kl", build)


def larger_step(patch: pytest.MonkeyPatch) -> None:
    right = Stepping.step
    patch.setattr(Stepping, "step", lambda self, lr: right(self, 1.01 * lr))


def larger_head_gradient(patch: pytest.MonkeyPatch) -> None:
    right = HeadGradients.add
    patch.setattr(HeadGradients, "add", lambda self, dlogits, start: right(self, dlogits.mul_(1.01), start))


def larger_input_gradient(patch: pytest.MonkeyPatch) -> None:
    def change(model: Any) -> None:
        model.model.layers[1].register_full_backward_hook(lambda layer, inputs, outputs: (1.01 * inputs[0],))

    changed_parts(change)(patch)


def without_a_micro_batch(patch: pytest.MonkeyPatch) -> None:
    right = policy_update.split_micro_batches

    def split(*args: Any, **options: Any) -> Any:
        parts = right(*args, **options)
        assert len(parts) > 1
        return parts[1:] if torch.is_grad_enabled() else parts

    patch.setattr(policy_update, "split_micro_batches", split)


def unclipped_gradients(patch: pytest.MonkeyPatch) -> None:
    right = Replicated.clip_gradients
    patch.setattr(Replicated, "clip_gradients", lambda self, most: right(self, 0.0))


def stale_sampler(patch: pytest.MonkeyPatch) -> None:
    right = measured.build_engine
    patch.setattr(
        measured,
        "build_engine",
        lambda config, policy, *rest, **kwargs: right(config, deepcopy(policy), *rest, **kwargs),
    )


def other_betas(patch: pytest.MonkeyPatch) -> None:
    build = comparison.build_measured

    def built(*args: Any) -> Any:
        result = build(*args)
        for group in result.strategy.optimizer.param_groups:
            group["betas"] = (0.91, 0.999)
        return result

    patch.setattr(comparison, "build_measured", built)


MUTANTS = {
    "embeddings 1 % too large": (output_of("model.embed_tokens"), "embeddings"),
    "positions twice as far": (wrong_positions, "layer 1"),
    "a product of layer 2 1 % too large": (output_of("model.layers.1.mlp.gate_proj"), "layer 2"),
    "the last norm 1 % too large": (output_of("model.norm"), "log-probs"),
    "no temperature": (without_temperature, "log-probs"),
    "the entropy 1 % too large": (wrong_entropy, "entropy"),
    "the least likely tokens": (least_likely, "greedy tokens"),
    "the standard deviation 1 % too large": (scaled(Groups, "scale"), "advantages"),
    "no clip": (unclipped, "loss"),
    "the KL 1 % too large": (larger_kl, "loss"),
    "the last norm's gradient 1 % too large": (gradient_of("model.norm.weight"), "gradients, head"),
    "the gradient of the logits 1 % too large": (larger_head_gradient, "gradients, head"),
    "the gradient of the embeddings 1 % too large": (
        gradient_of("model.embed_tokens.weight"),
        "gradients, embeddings",
    ),
    "what layer 2 gives layer 1 in backward 1 % too large": (larger_input_gradient, "gradients, layer 1"),
    "one micro-batch of several is left out": (without_a_micro_batch, "loss"),
    "no clipping of gradients": (unclipped_gradients, "updated weights"),
    "a gradient of layer 2 1 % too large": (
        gradient_of("model.layers.1.self_attn.q_proj.weight"),
        "gradients, layer 2",
    ),
    "a gradient of layer 1 1 % too large": (gradient_of("model.layers.0.mlp.up_proj.weight"), "gradients, layer 1"),
    "a step 1 % too large": (larger_step, "updated weights"),
    "the sampler keeps the weights of the start": (stale_sampler, "sampled log-probs"),
    "the sampler has no temperature": (untempered_sampler, "sampled log-probs"),
    "another beta of AdamW": (other_betas, "second update"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found_at_its_stage_and_at_no_earlier_one(name: str, capsys, monkeypatch):
    plant, stage = MUTANTS[name]
    plant(monkeypatch)
    assert parity(capsys, *FLOAT32)["first_difference"] == stage


def without_kl(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy_loss, "build_kl", lambda *args: lambda logprob, ref: 0 * logprob)


def much_larger_step(patch: pytest.MonkeyPatch) -> None:
    right = Stepping.step
    patch.setattr(Stepping, "step", lambda self, lr: right(self, 1.5 * lr))


def stale_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeadOperand, "release", lambda self: None)


def test_the_gradient_of_the_entropy_is_compared_where_it_has_a_bonus(capsys, monkeypatch):
    right = LossCalls.__call__

    def larger(*args: Any) -> Any:
        gradients = right(*args)
        assert gradients.entropy is not None
        return gradients._replace(entropy=1.01 * gradients.entropy)

    monkeypatch.setattr(LossCalls, "__call__", larger)
    assert parity(capsys, *FLOAT32, "algorithm.entropy_coef=0.1")["first_difference"] == "gradients, head"


def test_a_mistake_in_log_probs_of_which_a_model_is_sure_is_found_at_its_stage(tmp_path: Path, capsys, monkeypatch):
    save_family("granite", tmp_path)
    sure = (*FLOAT32, f"model.path={tmp_path}")
    assert parity(capsys, *sure)["passed"]
    right = torch.Tensor.log1p
    monkeypatch.setattr(torch.Tensor, "log1p", lambda x: right(torch.where(x < 1, 0, x)))
    assert parity(capsys, *sure)["first_difference"] == "log-probs"


GROSS = {
    **{name: MUTANTS[name] for name in ("positions twice as far", "no temperature", "the least likely tokens")},
    **{name: MUTANTS[name] for name in ("no clip", "one micro-batch of several is left out")},
    "no KL": (without_kl, "loss"),
    "a gradient of layer 2 is zero": (
        changed_parts(
            lambda model: model.get_parameter("model.layers.1.self_attn.k_proj.weight").register_hook(torch.zeros_like)
        ),
        "gradients, layer 2",
    ),
    "a step half too large": (much_larger_step, "updated weights"),
    "the head's cast copy is that before the update": (stale_head, "log-probs after the update"),
}


@pytest.mark.parametrize("name", GROSS)
def test_gross_mistakes_are_found_in_bf16_too(name: str, capsys, monkeypatch):
    plant, stage = GROSS[name]
    plant(monkeypatch)
    assert parity(capsys, *BFLOAT16)["first_difference"] == stage


def test_short_rows_with_a_dense_mask_are_compared_too(capsys, monkeypatch):
    right = micro_batch._row_mask

    def plant(model: Any) -> None:  # after the startup check, which would find it
        monkeypatch.setattr(micro_batch, "_row_mask", lambda *args: torch.ones_like(right(*args)).tril())

    changed_parts(plant)(monkeypatch)
    assert parity(capsys, *FLOAT32)["first_difference"] == "log-probs, dense mask"


def test_a_parameter_whose_gradient_is_missing_differs(capsys, monkeypatch):
    right = Stepping.gradient
    monkeypatch.setattr(Stepping, "gradient", lambda self, weight: None if weight.ndim > 1 else right(self, weight))
    assert parity(capsys, *FLOAT32)["first_difference"] == "gradients, layer 2"


def test_an_operation_that_the_device_lacks_is_named(capsys, monkeypatch):
    def lacking(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("Could not run 'aten::logsumexp' with arguments from the 'NPU' backend")

    monkeypatch.setattr(PolicyUpdate, "score", lacking)
    assert main(["parity", *FLOAT32]) == 2
    assert "(cpu) cannot compute the step: Could not run 'aten::logsumexp'" in capsys.readouterr().err


def test_a_kernel_that_cannot_run_is_named(capsys):
    assert main(["parity", *FLOAT32, "kernels.pins={row_stats: triton}"]) == 2
    assert "row_stats=triton cannot run" in capsys.readouterr().err


def test_a_value_that_is_no_number_differs(capsys, monkeypatch):
    scaled(Groups, "scale", float("nan"))(monkeypatch)
    assert parity(capsys, *FLOAT32)["first_difference"] == "advantages"


def test_the_table_names_the_first_difference_and_its_tensor(capsys, monkeypatch):
    gradient_of("model.layers.0.mlp.up_proj.weight")(monkeypatch)
    assert main(["parity", *FLOAT32]) == 1
    printed = capsys.readouterr().out
    assert "gradients, layer 1" in next(line for line in printed.splitlines() if line.endswith("DIFFERS"))
    verdict = printed.splitlines()[-1]
    assert verdict.startswith("first difference: gradients, layer 1, in gradient of model.layers.0.mlp.up_proj.weight[")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("algorithm.kl.coef=1",), "algorithm.kl.coef=1.0: parity compares one fixed step; leave it out"),
        (("model.lora.rank=4", "model.lora.dora=true"), "model.lora.dora: parity does not compare new DoRA adapters"),
        (("model.lora.rank=4", "model.lora.dropout=0.1"), "model.lora.dropout: parity does not compare dropout"),
        (("model.router_loss_coef=0.1",), "model.router_loss_coef: parity does not compare the router's loss"),
        (("--families", "model.path=folder"), "model.path=folder with --families"),
        (("--families", "--save", "file"), "--families with --save"),
        (("model.path=nowhere",), "model.path='nowhere'"),
        (("model.dtyp=bfloat16",), "model.dtyp"),
        (("Qwen/Qwen3-0.6B",), "write model.path=Qwen/Qwen3-0.6B"),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_what_is_not_compared_is_an_error_that_names_the_setting(arguments, message, capsys):
    assert main(["parity", "backend.name=cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_layers_of_a_model_that_reads_images_are_not_compared_alone(tmp_path: Path, capsys):
    Qwen2VLConfig().save_pretrained(tmp_path)
    assert main(["parity", "backend.name=cpu", f"model.path={tmp_path}", "--layers", "1"]) == 2
    printed = capsys.readouterr().err
    assert "--layers 1: model.path=" in printed
    assert "reads images (qwen2_vl), and layers are compared on text alone" in printed


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, str]:
    """Return the folders of the families that read images."""
    folder = tmp_path_factory.mktemp("families")
    for name in VISION_FAMILIES:
        save_family(name, folder / name)
    return {name: f"model.path={folder / name}" for name in VISION_FAMILIES}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen2_vl", ("model.train_vision=all",)),
        ("qwen3_vl", ("model.train_vision=projector", "model.layout=padded")),
        ("qwen3_vl", ("model.lora.rank=4",)),
    ],
)
def test_a_step_with_images_is_that_of_fp64_and_not_by_large_tolerances(name, words, families, capsys):
    report = parity(capsys, *FLOAT32, families[name], *words)
    assert report["first_difference"] is None
    tolerances = {stage["name"]: stage["tolerance"] for stage in report["stages"]}
    for stage in ("layer 1", "layer 2", "gradients, layer 1"):
        assert tolerances[stage] < 1e-4


def _swapped(monkeypatch) -> None:
    right = vision._joined
    monkeypatch.setattr(vision, "_joined", lambda features: right(features[::-1]))


def _encoded_again(monkeypatch) -> None:
    right = vision.ImageEncoder._encode
    monkeypatch.setattr(vision.ImageEncoder, "_encode", lambda *given: _detached(right(*given)))


def _detached(features: vision.Features) -> vision.Features:
    return replace(features, images=tuple(each.detach() for each in features.images))


def _positions_of_text(monkeypatch) -> None:
    right = fixed_step.image_columns

    def moved(prompts):
        columns = right(prompts)
        return columns | {"prompt_axes": columns["prompt_axes"].amin(1, keepdim=True).expand(-1, 3)}

    monkeypatch.setattr(fixed_step, "image_columns", moved)


def _not_banned(monkeypatch) -> None:
    right = PolicyModel.__init__

    def allowing(self, *args, **options):
        right(self, *args, **options)
        self.head = replace(self.head, banned=())

    monkeypatch.setattr(PolicyModel, "__init__", allowing)


@pytest.mark.parametrize(
    ("plant", "stage"),
    [
        (_swapped, "layer 1"),
        (_positions_of_text, "layer 1"),
        (_not_banned, "log-probs"),
        (_encoded_again, "gradients, embeddings"),
    ],
)
def test_a_mistake_with_images_is_found_at_its_stage(plant, stage, families, capsys, monkeypatch):
    monkeypatch.setattr("hwgrpo.training.policy.layout_check.check_images", lambda policy: None)  # a run's start
    plant(monkeypatch)
    report = parity(capsys, *FLOAT32, families["qwen2_vl"], "model.train_vision=all")
    assert report["first_difference"] == stage


def test_families_that_read_images_are_left_out_by_name_where_they_cannot_be_compared(capsys, monkeypatch):
    def too_old(model):
        raise ConfigError("this transformers is too old")

    monkeypatch.setattr("hwgrpo.parity.families.ImageEncoder", too_old)
    monkeypatch.setattr("hwgrpo.parity.families.FAMILIES", {"qwen2": FAMILIES["qwen2"]})
    assert main(["parity", *FLOAT32, "--families"]) == 0
    printed = capsys.readouterr()
    assert [name for name in (*FAMILIES, *VISION_FAMILIES) if f"{name}: " in printed.out] == ["qwen2"]
    for name in VISION_FAMILIES:
        assert f"{name} is left out: this transformers is too old" in printed.err


def test_a_model_too_large_for_copies_in_fp64_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(comparison, "host_bytes", lambda: 2**20)
    assert main(["parity", *FLOAT32]) == 2
    assert "with fp64 takes" in capsys.readouterr().err
