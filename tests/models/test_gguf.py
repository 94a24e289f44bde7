"""Models in GGUF: converted once into a cached folder, then trained and saved like any other."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hwgrpo.config.schema import ModelConfig
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.models import gguf as converted
from hwgrpo.models.loading import load_generation_config, load_model, load_model_config, load_tokenizer
from hwgrpo.models.loading import resolve_model_path as resolve
from hwgrpo.models.sequence_classifier import classifier_config, load_classifier
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.support.waits import Wait
from hwgrpo.training.setup import start_strategy
from tests.support.models.tiny import sharpened
from tests.support.runs import runs

SHAPE = LlamaConfig(
    vocab_size=99,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16384,
    rms_norm_eps=1e-5,
)
TOKENS = ["<|pad|>", "<|end|>", *map(chr, range(33, 127)), "Ġ", "Ċ", "qz"]
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IDS = torch.tensor([[5, 6, 7, 8, 9]])
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("HWGRPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/gguf"


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return sharpened(LlamaForCausalLM(LlamaConfig(**(SHAPE.to_dict() | changes))))


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a weight."""
    stem, _, kind = name.rpartition(".")
    if stem in OTHERS:
        return f"{OTHERS[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.{kind}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys in llama.cpp's order, with the two halves of a head interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def separated(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows in transformers' order."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(
    file: Path,
    model: LlamaForCausalLM,
    kind: Kind = Kind.F32,
    *,
    rope_freqs: np.ndarray | None = None,
    scaling: gguf.RopeScalingType = gguf.RopeScalingType.NONE,
) -> dict[str, torch.Tensor]:
    """Write a model in GGUF with its matrices in a format; return the values of its weights.

    Args:
        file: the file.
        model: with `TOKENS` as vocabulary.
        kind: format of the matrices.
        rope_freqs: factors of the rotary frequencies.
        scaling: the kind of rotary scaling.
    """
    c: Any = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_scaling_type(scaling)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["q z"])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    values = {}
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(name.split(".")[-2])
        weight = weight if heads is None else interleaved(weight, heads)
        stored_as = kind if weight.ndim == 2 else Kind.F32
        data = gguf.quants.quantize(weight, stored_as)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored_as)
        weight = gguf.quants.dequantize(data, stored_as)
        values[name] = torch.tensor(weight if heads is None else separated(weight, heads))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.F16])
def test_a_gguf_file_loads_with_its_exact_values_in_fp32(tmp_path, kind):
    file = tmp_path / "tiny.gguf"
    model = tiny_llama()
    values = write(file, model, kind)
    assert torch.equal(values["lm_head.weight"], model.lm_head.weight) == (kind == Kind.F32)
    config = ModelConfig(path=str(file))
    loaded = load_model(config, attention="eager")
    found = dict(loaded.named_parameters())
    assert found.keys() == values.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, values[name]), name
    if kind == Kind.F32:
        assert torch.equal(logits_of(loaded), logits_of(tiny_llama(attn_implementation="eager")))
    assert load_model_config(config).architectures == ["LlamaForCausalLM"]


def test_the_only_gguf_file_of_a_folder_loads_and_other_weights_beside_it_come_first(tmp_path):
    write(tmp_path / "tiny.gguf", tiny_llama())
    assert resolve(str(tmp_path)) == resolve(str(tmp_path / "tiny.gguf"))
    tiny_llama().save_pretrained(tmp_path)
    assert resolve(str(tmp_path)) == str(tmp_path)


def test_the_tokenizer_is_the_files_and_the_configuration_ends_responses_with_its_token(tmp_path):
    write(tmp_path / "tiny.gguf", tiny_llama())
    config = ModelConfig(path=str(tmp_path))
    tokenizer = load_tokenizer(config)
    assert tokenizer("ab 1<|end|>").input_ids == [TOKENS.index(token) for token in ("a", "b", "Ġ", "1", "<|end|>")]
    assert len(tokenizer) == len(TOKENS)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "3"}], tokenize=False) == "3"
    settings = load_model_config(config)
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (None, 1, 0)
    assert load_generation_config(config).eos_token_id == 1


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path, cache, capsys):
    file = tmp_path / "tiny.gguf"
    write(file, tiny_llama())
    first = resolve(str(file), weights=True)
    assert "converting" in capsys.readouterr().err
    assert resolve(str(file), weights=True) == first
    assert "converting" not in capsys.readouterr().err
    assert sorted(path.name for path in Path(first).iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert {path.stat().st_mode & 0o777 for path in Path(first).iterdir()} == {0o644}
    changed = tiny_llama()
    with torch.no_grad():
        changed.lm_head.weight.mul_(2)
    write(file, changed)
    second = Path(resolve(str(file), weights=True))
    assert torch.equal(load_file(second / "model.safetensors")["lm_head.weight"], changed.lm_head.weight)
    assert {*cache.iterdir()} == {Path(first), second}


def test_a_dry_run_converts_no_weights_and_a_run_trains_and_saves_them_unquantized(tmp_path, cache, capsys):
    values = write(tmp_path / "tiny.gguf", tiny_llama(), Kind.Q8_0)
    words = (f"model.path={tmp_path / 'tiny.gguf'}", "trainer.max_steps=1", "trainer.validate_at_start=false")
    planned = make_plan(runs.small(tmp_path / "run", *words), BACKEND, 1).text
    assert "GGUF tiny.gguf is converted once, when a run starts, to fp32" in " ".join(planned.split())
    (folder,) = cache.iterdir()
    assert not [*folder.glob("*.safetensors")]
    assert runs.run(tmp_path / "run", *words, "observe.progress=plain", "optim.lr=1e-30") == "completed"
    printed = " ".join(capsys.readouterr().out.split())
    assert "GGUF tiny.gguf was converted to fp32" in printed
    assert "the model is trained and saved unquantized" in printed
    final = tmp_path / "run/final"
    settings = json.loads((final / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in settings
    saved = AutoModelForCausalLM.from_pretrained(final)
    for name, weight in saved.named_parameters():
        assert torch.allclose(weight, values[name], rtol=0, atol=1e-20), name
    assert AutoTokenizer.from_pretrained(final)("1").input_ids == [TOKENS.index("1")]


def test_weights_are_converted_before_the_processes_of_a_run_join(tmp_path, cache):
    write(tmp_path / "tiny.gguf", tiny_llama())
    start_strategy(runs.small(tmp_path / "run", f"model.path={tmp_path}"), Device(BACKEND))
    assert len([*cache.glob("*/model.safetensors")]) == 1


def test_a_reward_model_starts_from_a_gguf_file(tmp_path):
    values = write(tmp_path / "tiny.gguf", tiny_llama(), Kind.Q8_0)
    config = ModelConfig(path=str(tmp_path))
    model = load_classifier(config, classifier_config(config, 0), attention="eager", seed=0)
    assert torch.equal(model.model.embed_tokens.weight, values["model.embed_tokens.weight"])


def test_processes_convert_in_turn_and_wait_no_longer_than_a_limit(tmp_path, cache, monkeypatch, capsys):
    file = tmp_path / "tiny.gguf"
    write(file, tiny_llama())
    cache.mkdir(parents=True)
    found = []
    with converted._locked(cache):
        other = threading.Thread(target=lambda: found.append(resolve(str(file), weights=True)), daemon=True)
        other.start()
        other.join(1.0)
        assert other.is_alive()
        assert [*cache.iterdir()] == []
    other.join(60.0)
    assert Path(found[0], "model.safetensors").is_file()
    monkeypatch.setattr(converted, "Wait", lambda what, _: Wait(what, 0.1))
    os.utime(file, (1, 1))
    with converted._locked(cache), pytest.raises(RunError, match=r"another process has converted.*HWGRPO_CACHE"):
        resolve(str(file))


def test_an_interrupted_conversion_leaves_no_weights(tmp_path, cache, monkeypatch):
    write(tmp_path / "tiny.gguf", tiny_llama())

    def interrupted(self, folder, **_):
        (folder / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve(str(tmp_path), weights=True)
    (folder,) = cache.iterdir()
    assert not (folder / "model.safetensors").exists()
    load_model(ModelConfig(path=str(tmp_path)), attention="sdpa")


def test_a_full_disk_is_an_error_that_names_the_cache(tmp_path, cache, monkeypatch):
    write(tmp_path / "tiny.gguf", tiny_llama())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(ConfigError, match=rf"cannot be converted into {cache}.*No space left.*set HWGRPO_CACHE"):
        resolve(str(tmp_path), weights=True)


def test_a_cache_that_cannot_be_made_is_an_error_that_names_its_variable(tmp_path, monkeypatch):
    write(tmp_path / "tiny.gguf", tiny_llama())
    monkeypatch.setenv("HWGRPO_CACHE", str(tmp_path / "tiny.gguf"))
    with pytest.raises(ConfigError, match=r"cannot be made .*where converted models are kept; set HWGRPO_CACHE"):
        resolve(str(tmp_path))


def test_several_files_and_shards_are_refused_by_their_names(tmp_path):
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        ConfigError, match=r"several GGUF files \(tiny-Q4_K_M.gguf, tiny-Q8_0.gguf\): set model.path to"
    ):
        resolve(str(tmp_path))
    shard = tmp_path / "shards/tiny-00001-of-00002.gguf"
    shard.parent.mkdir()
    shard.touch()
    for path in (shard, shard.parent):
        with pytest.raises(ConfigError, match=r"in several shards.*llama-gguf-split --merge"):
            resolve(str(path))


def test_without_the_package_gguf_the_error_names_it(tmp_path, monkeypatch):
    (tmp_path / "tiny.gguf").touch()
    monkeypatch.setitem(converted.sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"tiny.gguf' is in GGUF.*pip install gguf"):
        resolve(str(tmp_path))


def test_what_transformers_cannot_read_is_refused_with_its_reason(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"rwkv7 is not supported yet.*set model.path to the original checkpoint"):
        resolve(str(tmp_path / "other.gguf"))
    (tmp_path / "broken.gguf").write_text("no model")
    with pytest.raises(ConfigError, match=r"cannot read this GGUF file .*set model.path to the original checkpoint"):
        resolve(str(tmp_path / "broken.gguf"))


def test_missing_weights_are_refused_instead_of_converted_at_random(tmp_path, cache):
    model = tiny_llama()
    mlp: Any = model.model.layers[1].mlp
    del mlp.down_proj
    write(tmp_path / "tiny.gguf", model)
    with pytest.raises(ConfigError, match=r"lacks 1 weights, e.g. model.layers.1.mlp.down_proj.weight"):
        resolve(str(tmp_path), weights=True)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotary_scaling_of_llama_3_is_restored_from_its_factors(tmp_path, factor):
    scaling = LLAMA_3 | {"factor": factor, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    model = tiny_llama(rope_parameters=scaling)
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert {1.0, factor} < {*factors.round(3)}
    write(tmp_path / "tiny.gguf", model, rope_freqs=factors)
    loaded = load_model(ModelConfig(path=str(tmp_path)), attention="eager")
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_freqs": np.full(8, 2.0, np.float32)}, "rope_freqs.weight"),
        ({"rope_freqs": np.full(4, 8.0, np.float32)}, "rope_freqs.weight"),
        ({"scaling": gguf.RopeScalingType.YARN}, "yarn"),
    ],
)
def test_another_rotary_scaling_is_refused(tmp_path, changes, named):
    write(tmp_path / "tiny.gguf", tiny_llama(), **changes)
    with pytest.raises(ConfigError, match=rf"scales its rotary embeddings \({named}\).*original checkpoint"):
        resolve(str(tmp_path))
