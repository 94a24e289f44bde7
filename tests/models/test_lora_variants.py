"""rsLoRA, DoRA and targets by regular expression: against their formulas, trained, resumed, and refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.config import load_config
from hwgrpo.config.schema import LoraConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models import lora
from hwgrpo.models.lora import adapted_layers, apply_lora
from hwgrpo.training.setup import build_run
from tests.resume.test_ranks import start, steps
from tests.support.models.families import make
from tests.support.models.tiny import tiny_qwen3
from tests.support.runs import runs

DORA = ("model.lora.rank=2", "model.lora.dora=true", "optim.lr=1e-2")


def adapted(**settings: Any) -> tuple[Any, Any, Any]:
    """Return a model with filled adapters, one of its adapted layers, and inputs to it."""
    model = apply_lora(tiny_qwen3(), LoraConfig(**{"rank": 4, "alpha": 8.0} | settings))
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=g))
    layer = layer_of(model)
    return model, layer, torch.randn(5, layer.base_layer.in_features, generator=g)


def layer_of(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp.up_proj"))


def factors(layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        layer.base_layer.weight.double(),
        layer.lora_A["default"].weight.double(),
        layer.lora_B["default"].weight.double(),
    )


def assert_layer_gives(layer: Any, inputs: torch.Tensor, weight: torch.Tensor) -> None:
    """Compare a layer with a product in fp64; fp32 sums of in_features products, each rounded."""
    expected = inputs.double() @ weight.T
    bound = 4 * torch.finfo(torch.float32).eps * inputs.shape[1] * float(weight.abs().max() * inputs.abs().max())
    torch.testing.assert_close(layer(inputs).double(), expected, rtol=0, atol=bound)


def test_rslora_divides_by_the_root_of_the_rank():
    _, layer, inputs = adapted(rslora=True)
    weight, down, up = factors(layer)
    assert_layer_gives(layer, inputs, weight + 8.0 / 2 * up @ down)


def test_dora_trains_norms_of_the_weights_and_starts_as_the_identity():
    fresh = apply_lora(tiny_qwen3(), LoraConfig(rank=4, dora=True))
    layer = layer_of(fresh)
    inputs = torch.randn(3, layer.base_layer.in_features, generator=torch.Generator().manual_seed(1))
    assert_layer_gives(layer, inputs, layer.base_layer.weight.double())
    _, layer, inputs = adapted(dora=True)
    weight, down, up = factors(layer)
    moved = weight + 2.0 * up @ down
    norms = layer.lora_magnitude_vector["default"].weight.double()
    assert layer.lora_magnitude_vector["default"].weight.requires_grad
    assert_layer_gives(layer, inputs, norms[:, None] * moved / moved.norm(dim=1, keepdim=True))


def test_a_regular_expression_selects_layers_by_their_full_names():
    model = apply_lora(tiny_qwen3(), LoraConfig(rank=2, target_modules=[r"re:.*layers\.0\..*(q|v)_proj", "down_proj"]))
    found = sorted({name.rsplit(".lora_A", 1)[0][17:] for name, _ in model.named_parameters() if ".lora_A" in name})
    assert found == [
        "model.layers.0.mlp.down_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.mlp.down_proj",
    ]


@pytest.mark.parametrize(
    ("target", "message"), [("re:(", "no regular expression"), ("re:.*q_prj", "no linear layer 're:.*q_prj'")]
)
def test_a_wrong_regular_expression_is_refused(target: str, message: str):
    with pytest.raises(ConfigError, match="target_modules") as error:
        apply_lora(tiny_qwen3(), LoraConfig(rank=2, target_modules=[target]))
    assert message in str(error.value)


@pytest.mark.parametrize("settings", [("model.lora.rslora=true",), ("model.lora.dora=true",)], ids=["rslora", "dora"])
def test_the_engine_samples_with_the_trained_adapters(settings: tuple[str, ...], tmp_path: Path):
    runs.run(tmp_path / "run", "model.lora.rank=2", "optim.lr=1e-2", *settings, "trainer.max_steps=3")
    lines = [line for line in runs.metrics(tmp_path / "run") if "rollout_corr/kl" in line]
    assert len(lines) > 1, "others have no response with an advantage"
    assert all(abs(line["rollout_corr/kl"]) < 1e-6 for line in lines), "on policy, both in fp32"
    assert max(line["actor/grad_norm"] for line in lines) > 0


@pytest.mark.parametrize("way", ["single 1", "fsdp2 2"])
def test_dora_resumes_as_it_was(way: str, tmp_path: Path):
    start(tmp_path / "whole", way, 3, *DORA, "trainer.save_every=1")
    start(tmp_path / "parts", way, 2, *DORA, "trainer.save_every=1")
    start(tmp_path / "parts", way, 3, *DORA, "trainer.save_every=1")
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")


def test_a_dora_adapter_is_trained_further(tmp_path: Path):
    model, _, _ = adapted(dora=True)
    model.save_pretrained(tmp_path / "adapter")
    again = apply_lora(tiny_qwen3(), LoraConfig(adapter=str(tmp_path / "adapter")))
    ids = torch.tensor([[3, 7, 5]])
    assert torch.equal(again.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_what_does_not_go_together_is_refused(tmp_path: Path):
    for settings, message in (
        (["rollout.engine=vllm"], "model.lora.dora=true with rollout.engine='vllm': vLLM serves no DoRA"),
        (["rollout.engine=vllm_server"], "vLLM serves no DoRA"),
        (["model.quantize=nf4"], "its norms are of the weights, which are codes"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config("tiny_sort", [*DORA, *settings])
    with pytest.raises(ConfigError, match=r"model\.lora\.dora=true has no effect with model\.lora\.rank=0"):
        load_config("tiny_sort", ["model.lora.dora=true"])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "use_dora": True}))
    with pytest.raises(ConfigError, match=r"the DoRA adapter model.lora.adapter=.*vLLM serves no DoRA"):
        load_config("tiny_sort", [f"model.lora.adapter={adapter}", "rollout.engine=vllm"])
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "modules_to_save": ["lm_head"]}))
    with pytest.raises(ConfigError, match=r"has modules_to_save=\['lm_head'\].*merge_and_unload"):
        build_run(runs.small(tmp_path / "run", f"model.lora.adapter={adapter}"), BACKEND, 0, 1)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"adapter_config\.json cannot be read"):
        load_config("tiny_sort", [f"model.lora.adapter={adapter}", "rollout.engine=vllm"])


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2", "FalconMamba", "FalconH1", "NemotronH"])
def test_adapters_of_state_space_models_leave_out_what_kernels_read_past_them(kind, tmp_path):
    model = make(kind, tmp_path)
    layers = adapted_layers(model, ["all-linear"])
    with pytest.raises(ConfigError, match=r"target_modules=\['out_proj'\]: 'out_proj' has out_proj, whose weight"):
        apply_lora(model, LoraConfig(rank=2, target_modules=["out_proj"]))
    adapted = apply_lora(model, LoraConfig(rank=2))
    adapters = {name for name, module in adapted.get_base_model().named_modules() if hasattr(module, "lora_A")}
    assert adapters == layers.keys()
    assert adapters
    assert not any(name.endswith("out_proj") for name in adapters)


def test_adapters_read_16_bits_under_autocast_with_the_bits_of_peft_s_casts(monkeypatch):
    def passes() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        model = apply_lora(tiny_qwen3(), LoraConfig(rank=4, alpha=8.0))
        trained = [each for each in model.parameters() if each.requires_grad]
        for each in model.parameters():
            each.data = torch.randn_like(each) * 0.1 if each.requires_grad else each.data.bfloat16()
        read = []
        for name, module in model.named_modules():
            if name.endswith("lora_A.default"):
                module.register_forward_pre_hook(lambda module, args: read.append(args[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model(input_ids=torch.arange(12).view(2, 6), use_cache=False).logits
        dtypes.append(set(read))
        return hidden, *torch.autograd.grad(hidden.float().square().sum(), trained)

    dtypes: list[set[torch.dtype]] = []
    found = passes()
    monkeypatch.setattr(lora, "_skip_casts", lambda model: None)
    expected = passes()
    assert dtypes == [{torch.bfloat16}, {torch.float32}]
    assert len(found) == len(expected) > 20
    assert all(map(torch.equal, found, expected))
