"""What a trained model's folder has: the base model's files, its dtype, and weights that transformers reads again."""

import errno
import json
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from hwgrpo.cli.main import main
from hwgrpo.config.schema import LoraConfig, ModelConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models import builtin
from hwgrpo.models.final_dtype import cast_weights
from hwgrpo.models.loading import load_model, load_model_config, load_tokenizer
from hwgrpo.models.lora import apply_lora
from hwgrpo.models.saving import save_model, source_folder
from hwgrpo.models.stored_quantization import stored_method
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.planning.model_shape import model_shape
from hwgrpo.rollout.policy_weights import AdapterWeights
from hwgrpo.rollout.server.sglang import SglangServer
from hwgrpo.rollout.vllm.vllm_settings import engine_arguments
from hwgrpo.trainer.given_model import write_model
from hwgrpo.training.setup import build_run
from tests.rollout.served import parts_for
from tests.support.models.tiny import tiny_qwen3
from tests.support.runs import reward_model_runs, runs, supervised_runs

TINY = "builtin://tiny?task=sort&hidden=32&layers=1&steps=30&batch=32&digits=3"
SHORT = ("trainer.max_steps=1", "trainer.validate_at_start=false")
LORA = ("model.lora.rank=2",)
SAMPLED = '{"temperature": 0.6,\n "top_p": 0.9}'
"""A generation configuration that transformers reads and refuses to write, as of Llama 2."""


def changed(folder: Path, **values: Any) -> None:
    """Set values in a model's configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of the built-in model."""
    return Path(shutil.copytree(builtin.resolve(TINY), tmp_path / "base"))


def pairs(folder: Path) -> tuple[str, ...]:
    """Return the settings of a reward model's data."""
    return f"data.train={reward_model_runs.pairs(folder / 'pairs.jsonl', 8)}", "reward_model.loss=bradley_terry"


def dtypes(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for file in folder.glob("*.safetensors") for tensor in load_file(file).values()}


def refused(config: Any) -> str:
    """Return the message by which a run and its dry run refuse settings."""
    with pytest.raises(ConfigError) as planned:
        make_plan(config, BACKEND, 1)
    with pytest.raises(ConfigError) as started:
        build_run(config, BACKEND, 0, 1)
    assert str(planned.value) == str(started.value)
    return str(started.value)


@pytest.mark.parametrize("generation", [SAMPLED, '{"early_stopping": true}', '{"output_scores": true}'])
def test_a_generation_config_that_transformers_refuses_to_write_is_kept_as_it_is(base, tmp_path, generation):
    (base / "generation_config.json").write_text(generation)
    assert runs.run(tmp_path / "run", f"model.path={base}", *SHORT, *LORA) == "completed"
    assert (tmp_path / "run/final/generation_config.json").read_text() == generation
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/generation_config.json").read_text() == generation
    model = AutoModelForCausalLM.from_pretrained(base)
    folder, _ = write_model(model, tmp_path, 0, 1.0)
    assert model.generation_config.to_dict() == AutoModelForCausalLM.from_pretrained(folder).generation_config.to_dict()


def test_supervised_runs_and_reward_models_keep_it_too(base, tmp_path):
    (base / "generation_config.json").write_text(SAMPLED)
    model = f"model.path={base}"
    assert supervised_runs.run(tmp_path / "sft", model, "trainer.max_steps=1") == "completed"
    assert reward_model_runs.run(tmp_path / "scores", model, *pairs(tmp_path), "trainer.max_steps=1") == "completed"
    for run in ("sft", "scores"):
        assert (tmp_path / run / "final/generation_config.json").read_text() == SAMPLED


def test_what_could_not_be_saved_at_the_end_is_refused_before_the_first_step(base, tmp_path, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("Object of type set is not JSON serializable")

    tokenizer = type(load_tokenizer(ModelConfig(path=str(base))))
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "save_pretrained", fail)
        message = refused(runs.small(tmp_path / "run", f"model.path={base}"))
        assert "could not be saved (TypeError: Object of type set" in message
        with pytest.raises(ConfigError, match="could not be saved"):
            reward_model_runs.build(tmp_path / "scores", f"model.path={base}", *pairs(tmp_path))
        make_plan(runs.small(tmp_path / "run", "trainer.save_final_model=false"), BACKEND, 1)
    monkeypatch.setattr("peft.tuners.tuners_utils.BaseTuner.merge_and_unload", fail)
    assert "could not be saved" in refused(runs.small(tmp_path / "run", *LORA))


def test_a_full_folder_for_temporary_files_refuses_no_run(base, tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for place in ("hwgrpo.models.saving.tempfile.TemporaryDirectory", "hwgrpo.models.saving.shutil.copyfile"):
        with monkeypatch.context() as patch:
            patch.setattr(place, full)
            make_plan(runs.small(tmp_path / "run", f"model.path={base}"), BACKEND, 1)


QUANTIZED: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"},
    "bitsandbytes, of old files": {"load_in_8bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "an unknown method": {"bits": 4},
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_are_refused_by_name_and_planned_from_the_configuration(base, tmp_path, method):
    changed(base, quantization_config=QUANTIZED[method])
    message = refused(runs.small(tmp_path / "run", f"model.path={base}"))
    assert f"has weights quantized by {method.partition(',')[0]}" in message
    assert "model.quantize=nf4" in message
    config = ModelConfig(path=str(base))
    plain = model_shape(ModelConfig(path=TINY), load_model_config(ModelConfig(path=TINY)))
    assert model_shape(config, load_model_config(config)).parameters == plain.parameters
    with pytest.raises(ConfigError, match="has weights quantized by"):
        load_model(config, attention="sdpa")
    with pytest.raises(ConfigError, match="has weights quantized by"):
        reward_model_runs.build(tmp_path / "scores", f"model.path={base}", *pairs(tmp_path))


def in_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Store a model's projections as DeepSeek-V3 does, and the rest in bf16; return the values of its weights."""
    values, stored = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight"):
            scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            stored |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}
            values[name] = stored[name].float() * scale
        else:
            stored[name] = weight.bfloat16()
            values[name] = stored[name].float()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    described = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    changed(folder, dtype="bfloat16", quantization_config=described)
    return values


def test_fp8_weights_are_dequantized_trained_and_saved_unquantized_with_a_note(base, tmp_path, capsys):
    values = in_fp8(base)
    model = load_model(ModelConfig(path=str(base)), attention="sdpa")
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, values[name]), name
    on_meta = load_model(ModelConfig(path=str(base)), attention="sdpa", on_meta_device=True)
    assert {n: (p.shape, p.dtype) for n, p in on_meta.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in model.named_parameters()
    }
    words = (f"model.path={base}", *SHORT, "observe.progress=plain")
    assert "quantized (fp8)" in make_plan(runs.small(tmp_path / "run", *words), BACKEND, 1).text
    assert runs.run(tmp_path / "run", *words) == "completed"
    assert "the model's files are quantized (fp8)" in capsys.readouterr().out
    assert dtypes(tmp_path / "run/final") == {torch.bfloat16}
    assert stored_method(load_model_config(ModelConfig(path=str(tmp_path / "run/final")))) is None
    assert {name for name, _ in AutoModelForCausalLM.from_pretrained(tmp_path / "run/final").named_parameters()} == {
        *values
    }


def test_mxfp4_experts_are_dequantized_and_saved_under_their_own_names(tmp_path):
    draw = torch.Generator().manual_seed(0)
    shape = GptOssConfig(
        vocab_size=37,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"],
    )
    GptOssForCausalLM(shape).bfloat16().save_pretrained(tmp_path / "base")
    stored = {}
    for name, weight in load_file(tmp_path / "base/model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            blocks = experts, outputs, inputs // 32, 16
            stored[f"{name}_blocks"] = torch.randint(256, blocks, generator=draw, dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(118, 122, blocks[:-1], generator=draw, dtype=torch.uint8)
        else:
            stored[name] = weight
    save_file(stored, tmp_path / "base/model.safetensors", {"format": "pt"})
    changed(tmp_path / "base", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    config = ModelConfig(path=str(tmp_path / "base"))
    model = load_model(config, attention="eager")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    experts: Any = model.get_submodule("model.layers.0.mlp.experts").get_parameter("down_proj")
    assert experts.abs().max() > 0
    save_model(model, character_tokenizer(""), tmp_path / "out", merge=True, source=source_folder(config), dtype="auto")
    assert dtypes(tmp_path / "out") == {torch.bfloat16}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for (name, weight), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other), f"{name} is exact in bf16, and was not trained"


def test_an_untied_head_of_a_tied_configuration_is_saved_as_untied(tmp_path):
    folder = tmp_path / "base"
    tiny_qwen3(tied=True).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = load_model(ModelConfig(path=str(folder)), attention="sdpa")
    save_model(model, character_tokenizer(""), tmp_path / "out", merge=True, source=folder)
    given, _ = write_model(AutoModelForCausalLM.from_pretrained(folder), tmp_path, 0, 1.0)
    for each in (tmp_path / "out", given):
        assert json.loads((each / "config.json").read_text())["tie_word_embeddings"] is False
        again: Any = AutoModelForCausalLM.from_pretrained(each)
        assert torch.equal(again.lm_head.weight, weights["lm_head.weight"])
        assert torch.equal(again.get_input_embeddings().weight, weights["model.embed_tokens.weight"])
    tied = load_model(ModelConfig(path=TINY), attention="sdpa")
    assert tied.config.tie_word_embeddings is True


def test_engines_that_read_the_folder_are_told_what_differs_in_the_loaded_model(base, tmp_path):
    in_fp8(base)
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    model = load_model(ModelConfig(path=str(base)), attention="sdpa")
    server = f"rollout.server.python={sys.executable}"
    parts = replace(parts_for(None, tmp_path, f"model.path={base}", server), model=model)
    different = {"quantization_config": None, "tie_word_embeddings": False}
    assert engine_arguments(parts, None)["hf_overrides"] == different
    command = SglangServer().command(parts, None, "127.0.0.1", 1)
    assert json.loads(command[command.index("--json-model-override-args") + 1]) == different
    adapted = replace(parts, model=apply_lora(model, LoraConfig(rank=2)))
    adapter = AdapterWeights({"r": 2}, {})
    assert engine_arguments(adapted, adapter)["hf_overrides"] == {"tie_word_embeddings": False}
    plain = replace(parts, model=load_model(ModelConfig(path=TINY), attention="sdpa"))
    assert "hf_overrides" not in engine_arguments(plain, None)
    assert "--json-model-override-args" not in SglangServer().command(plain, None, "127.0.0.1", 1)


def in_bf16(folder: Path) -> Path:
    """Store a model's weights in bf16, but for its norms."""
    weights = load_file(folder / "model.safetensors")
    cast = {name: weight if "norm" in name else weight.bfloat16() for name, weight in weights.items()}
    save_file(cast, folder / "model.safetensors", {"format": "pt"})
    changed(folder, dtype="bfloat16")
    return folder


def test_the_final_model_has_the_dtype_of_each_weight_of_the_base_or_the_one_that_is_set(base, tmp_path):
    in_bf16(base)
    stored = {name: weight.dtype for name, weight in load_file(base / "model.safetensors").items()}
    assert {*stored.values()} == {torch.float32, torch.bfloat16}
    words = (f"model.path={base}", *SHORT)
    assert runs.run(tmp_path / "run", *words) == "completed"
    final = load_file(tmp_path / "run/final/model.safetensors")
    assert {name: weight.dtype for name, weight in final.items()} == stored
    assert json.loads((tmp_path / "run/final/config.json").read_text())["dtype"] == "bfloat16"
    assert runs.run(tmp_path / "wide", *words, "trainer.final_dtype=float32") == "completed"
    masters = load_file(tmp_path / "wide/final/model.safetensors")
    for name, weight in masters.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight.to(stored[name]), final[name]), name
    assert any(not torch.equal(weight, final[name].float()) for name, weight in masters.items())
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert load_file(tmp_path / "out/model.safetensors").keys() == masters.keys()
    for name, weight in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(weight, masters[name]), "the checkpoint has the fp32 weights"


def test_an_adapter_stays_fp32_unless_a_dtype_is_set_and_shards_have_the_size_of_their_dtype(base, tmp_path):
    in_bf16(base)
    config = ModelConfig(path=str(base), lora=LoraConfig(rank=2))
    model = apply_lora(load_model(config, attention="sdpa"), config.lora)
    tokenizer, source = load_tokenizer(config), source_folder(config)
    for dtype, of_adapter in (("auto", torch.float32), ("float16", torch.float16)):
        save_model(model, tokenizer, tmp_path / f"adapter-{dtype}", merge=False, source=source, dtype=dtype)
        assert dtypes(tmp_path / f"adapter-{dtype}") == {of_adapter}
    save_model(model, tokenizer, tmp_path / "out", merge=True, max_shard_size="20KB", source=source, dtype="bfloat16")
    assert dtypes(tmp_path / "out") == {torch.bfloat16}
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    size = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    merged = model.merge_and_unload()
    for (name, weight), other in zip(merged.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight.bfloat16().float(), other), name


def test_a_save_casts_only_the_weights_that_it_wrote(base, tmp_path):
    config = ModelConfig(path=str(base), lora=LoraConfig(rank=2))
    model, tokenizer = apply_lora(load_model(config, attention="sdpa"), config.lora), load_tokenizer(config)
    folder = tmp_path / "shared"
    folder.mkdir()
    save_file({"mine": torch.rand(4)}, folder / "notes.safetensors")
    save_model(model, tokenizer, folder, merge=False, dtype="auto")
    save_model(model, tokenizer, folder, merge=True, max_shard_size="20KB", dtype="bfloat16")
    for name in ("adapter_model", "notes"):
        assert {weight.dtype for weight in load_file(folder / f"{name}.safetensors").values()} == {torch.float32}, name
    shards = list(folder.glob("model-*.safetensors"))
    assert {weight.dtype for file in shards for weight in load_file(file).values()} == {torch.bfloat16}
    size = sum(weight.nbytes for file in shards for weight in load_file(file).values())
    assert json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == size
    save_model(model, tokenizer, folder, merge=False, dtype="float16")
    assert {weight.dtype for weight in load_file(folder / "adapter_model.safetensors").values()} == {torch.float16}
    assert {weight.dtype for file in shards for weight in load_file(file).values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_cast_holds_one_weight_at_a_time(tmp_path):
    count, size = 16, 2**20
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({f"weight.{number}": torch.zeros(size) for number in range(count)}, folder / "model.safetensors")
    written = count * size * torch.bfloat16.itemsize

    def cast() -> None:
        status = Path("/proc/self/status").read_text()
        held = int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]) * 1024
        mapped = (folder / "model.safetensors").stat().st_size  # counted as data, since it may be written
        resource.setrlimit(resource.RLIMIT_DATA, (held + mapped + written // 2, resource.RLIM_INFINITY))
        cast_weights(folder, "bfloat16", None)

    assert runs.forked(cast) == 0
    assert (folder / "model.safetensors").stat().st_size < written + 10_000
