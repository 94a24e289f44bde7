"""`hwgrpo parity --layers`: a large model layer by layer, each alone on the hidden states that enter it in fp64."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hwgrpo_backends import registry
from hwgrpo_backends.device import Device
from hwgrpo_kernels.head import HeadGradients
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from hwgrpo.cli.main import main
from hwgrpo.config.schema import ModelConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.parity import golden_head, layer_comparison, layer_states, measured_layer
from hwgrpo.parity.families import EXPERTS, FAMILIES, SHAPE, save_family
from hwgrpo.parity.fixed_step import make_step
from hwgrpo.parity.golden import layer_names, load_golden_model, outputs_of
from hwgrpo.parity.golden_head import GoldenHead
from hwgrpo.parity.layer_comparison import select_layers
from hwgrpo.parity.layer_states import LayerStates, PrefixStep, compute_states, number_prefixes
from hwgrpo.parity.one_layer_models import LargeModel, one_layer_config, open_large_model
from hwgrpo.parity.rounded_operations import in_fp64
from hwgrpo.training.policy import micro_batch
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.strategies.optimizer import Stepping

Mutant = Callable[[pytest.MonkeyPatch], None]
CPU = ("parity", "backend.name=cpu", "trainer.threads=1")
OF_LAYER = ("{}", "{}, gradients", "{}, updated weights")
OF_HEAD = ("log-probs", "entropy", "advantages", "loss", "head, gradients", "head, updated weights")


@pytest.fixture(autouse=True)
def _golden_once(monkeypatch: pytest.MonkeyPatch):
    """The fp64 side of a model and precision is computed once: what tests change is the device's side."""
    rounding, compute = layer_comparison.rounding_of_layer, GoldenHead.compute

    def rounding_once(*args: Any) -> Any:
        *_, precision, output, _ = args
        key = (precision, float(output.sum()))
        if key not in COMPUTED:
            COMPUTED[key] = rounding(*args)
        return COMPUTED[key]

    def compute_once(head: GoldenHead, *args: Any) -> Any:
        key = (args[-1], head._large.settings.path, golden_head.ROWS)
        if key not in COMPUTED:
            COMPUTED[key] = compute(head, *args)
        return COMPUTED[key]

    monkeypatch.setattr(layer_comparison, "rounding_of_layer", rounding_once)
    monkeypatch.setattr(GoldenHead, "compute", compute_once)


COMPUTED: dict = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's model, which is made once."""
    root = tmp_path_factory.mktemp("families")

    def make(name: str) -> Path:
        if not (root / name).is_dir():
            save_family(name, root / name)
        return root / name

    return make


def parity(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str, dtype: str = "float32") -> dict:
    """Return the report of a comparison of all layers."""
    code = main([*CPU, f"model.path={folder}", f"model.dtype={dtype}", "--layers", "all", "--json", *arguments])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    report = json.loads(printed.out)
    assert code == (0 if report["passed"] else 1)
    return report["comparisons"][0]


def states_of(large: LargeModel) -> tuple[PrefixStep, LayerStates]:
    """Return the step and the hidden states of both layers."""
    prefixes = number_prefixes(make_step(large.vocabulary, seed=0))
    return prefixes, compute_states(large, prefixes, {0, 1}, Device(registry.get("cpu")), lambda line: None)


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_of_one_layer_at_a_time_are_those_of_the_whole_model(name: str, folder):
    large = open_large_model(ModelConfig(path=str(folder(name))))
    model = load_golden_model(large.settings)
    prefixes, states = states_of(large)
    layers = layer_names(model)
    with torch.no_grad(), in_fp64(), outputs_of(model, layers) as outputs:
        model(input_ids=prefixes.tokens[prefixes.rows], use_cache=False)
    found = {"embeddings": states.embeddings, "layer 1": states.leaving[0], "layer 2": states.leaving[1]}
    assert found.keys() == outputs.keys()
    for stage, values in found.items():
        right = outputs[stage].flatten(0, 1)[prefixes.first]
        torch.testing.assert_close(values, right, rtol=1e-12, atol=1e-12 * float(right.abs().max()))
    torch.testing.assert_close(states.entering[1], states.leaving[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in ("qwen2", "gemma2", "qwen3_moe")), ("qwen2", "bfloat16")]
)
def test_rounding_explains_every_difference_of_every_layer(name: str, dtype: str, folder, capsys):
    report = parity(capsys, folder(name), dtype=dtype)
    assert report["first_difference"] is None, report
    stages = [stage["name"] for stage in report["stages"] if not stage["name"].endswith("dense mask")]
    of_layers = [each.format(layer) for layer in ("layer 1", "layer 2") for each in OF_LAYER]
    assert stages == ["embeddings", *of_layers, *OF_HEAD]
    coarse = [stage["name"] for stage in report["stages"] if stage["is_coarse"]]
    assert all(stage.endswith("updated weights") for stage in coarse)
    assert "errors that accumulate over layers are not compared" in report["notes"][0]


def test_layers_are_compared_in_the_layout_of_the_settings(folder, capsys):
    report = parity(capsys, folder("qwen2"), "model.layout=padded")
    assert report["passed"], report
    assert report["layout"] == "padded"


def test_a_layer_is_compared_on_the_hidden_states_that_enter_it(folder, capsys, monkeypatch):
    """Embeddings of Gemma are scaled: what enters a layer is no row of the one-layer model's table."""
    compared, check = [], layer_comparison.check_alone
    rounding = layer_comparison.rounding_of_layer
    monkeypatch.setattr(
        layer_comparison, "rounding_of_layer", lambda *args: compared.append(args[-2]) or rounding(*args)
    )
    monkeypatch.setattr(layer_comparison, "check_alone", lambda *args: compared.append(args[-1]) or check(*args))
    assert parity(capsys, folder("gemma3_text"))["passed"]
    assert len(compared) == 4
    for within, alone in zip(compared[::2], compared[1::2], strict=True):
        torch.testing.assert_close(alone, within, rtol=0, atol=1e-5 * float(within.abs().max()))


def changed(part: str, change: Callable[[Any], object]) -> Mutant:
    """Return a mutant that changes a part on the device: `embeddings`, a layer, as `layer-1`, or `head`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        build = measured_layer.build_measured

        def built(config: Any, *rest: Any, **options: Any) -> Any:
            measured = build(config, *rest, **options)
            if Path(config.model.path).name == part:
                change(measured.model)
            return measured

        patch.setattr(measured_layer, "build_measured", built)

    return plant


def output_of(part: str, name: str) -> Mutant:
    """Return a mutant in which a module's output is 1 % too large."""
    return changed(part, lambda model: model.get_submodule(name).register_forward_hook(lambda *call: call[2] * 1.01))


def gradient_of(part: str, name: str) -> Mutant:
    """Return a mutant in which the gradient of a parameter is 1 % too large."""
    return changed(part, lambda model: model.get_parameter(name).register_hook(lambda gradient: gradient * 1.01))


def larger_input_gradient(model: Any) -> None:
    def change(layer: Any, inputs: Any) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: 1.01 * gradient)

    model.model.layers[0].register_forward_pre_hook(change)


def without_temperature(patch: pytest.MonkeyPatch) -> None:
    right = PolicyModel._head_options
    patch.setattr(PolicyModel, "_head_options", lambda *args: right(*args) | {"temperature": 1.0})


def larger_head_gradient(patch: pytest.MonkeyPatch) -> None:
    right = HeadGradients.add
    patch.setattr(HeadGradients, "add", lambda self, dlogits, start: right(self, dlogits.mul_(1.01), start))


def larger_step(patch: pytest.MonkeyPatch) -> None:
    right = Stepping.step
    patch.setattr(Stepping, "step", lambda self, lr: right(self, 1.01 * lr))


def prompts_that_see_later_tokens(patch: pytest.MonkeyPatch) -> None:
    """What no response token shows in a single layer: the query of a prompt's first token."""
    right = micro_batch._row_mask

    def mask(*args: Any) -> torch.Tensor:
        changed = right(*args).clone()
        changed[:, :, 0, 1] = True
        return changed

    def plant(model: Any) -> None:  # after the startup check, which would find it
        patch.setattr(micro_batch, "_row_mask", mask)

    changed("layer-1", plant)(patch)


MUTANTS = {
    "the embeddings": (output_of("embeddings", "model.embed_tokens"), "embeddings"),
    "a product of layer 1": (output_of("layer-1", "model.layers.0.mlp.gate_proj"), "layer 1"),
    "a product of layer 2": (output_of("layer-2", "model.layers.0.self_attn.v_proj"), "layer 2"),
    "the mask of a prompt's first token": (prompts_that_see_later_tokens, "layer 1, dense mask"),
    "a gradient of layer 2": (gradient_of("layer-2", "model.layers.0.mlp.up_proj.weight"), "layer 2, gradients"),
    "the input's gradient of layer 2": (changed("layer-2", larger_input_gradient), "layer 2, gradients"),
    "the step": (larger_step, "layer 1, updated weights"),
    "the last norm": (output_of("head", "model.norm"), "log-probs"),
    "no temperature": (without_temperature, "log-probs"),
    "the gradient of the logits": (larger_head_gradient, "head, gradients"),
    "the gradient of the last norm": (gradient_of("head", "model.norm.weight"), "head, gradients"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found_at_its_layer_and_at_no_earlier_stage(name: str, folder, capsys, monkeypatch):
    plant, stage = MUTANTS[name]
    plant(monkeypatch)
    assert parity(capsys, folder("qwen2"))["first_difference"] == stage


@pytest.mark.parametrize(
    ("lost", "stages"),
    [
        (
            {"layer-2": "model.layers.0.mlp.up_proj.weight", "head": "model.embed_tokens.weight"},
            {
                "layer 2, gradients": "gradient of model.layers.1.mlp.up_proj.weight (missing)",
                "head, gradients": "gradient of lm_head.weight (missing)",
                "head, updated weights": "updated lm_head.weight (missing)",
            },
        ),
        (
            {"head": "model.norm.weight"},
            {
                "head, gradients": "gradient of model.norm.weight (missing)",
                "head, updated weights": "updated model.norm.weight (missing)",
            },
        ),
    ],
    ids=["layer and head", "norm"],
)
def test_a_gradient_that_the_device_lacks_is_missing(lost: dict, stages: dict, folder, capsys, monkeypatch):
    """As a zero it would pass where the tolerance is coarse."""
    right = measured_layer.gradients_of

    def gradients_of(measured: Any) -> Any:
        gradients = right(measured)
        gradients.pop(lost.get(Path(measured.config.model.path).name), None)
        return gradients

    monkeypatch.setattr(measured_layer, "gradients_of", gradients_of)
    report = parity(capsys, folder("qwen2"))
    failed = {stage["name"]: stage["tensor"] for stage in report["stages"] if not stage["passed"]}
    assert failed == stages


def test_parameters_without_dimensions_are_compared(tmp_path: Path, capsys, monkeypatch):
    """Of norms, in layers and after the last one."""
    init, forward = Qwen2RMSNorm.__init__, Qwen2RMSNorm.forward

    def with_gain(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.gain = torch.nn.Parameter(torch.tensor(1.1))

    monkeypatch.setattr(Qwen2RMSNorm, "__init__", with_gain)
    monkeypatch.setattr(Qwen2RMSNorm, "forward", lambda self, states: self.gain * forward(self, states))
    save_family("qwen2", tmp_path)
    gradient_of("head", "model.norm.gain")(monkeypatch)
    report = parity(capsys, tmp_path)
    failed = {stage["name"]: stage["tensor"] for stage in report["stages"] if not stage["passed"]}
    assert failed == {
        "head, gradients": "gradient of model.norm.gain",
        "head, updated weights": "updated model.norm.gain",
    }


def test_the_gradients_of_the_head_are_compared_by_rows(folder, capsys, monkeypatch):
    """Rows of the vocabulary in several parts are compared as all together, and a wrong row is named."""
    whole = parity(capsys, folder("qwen2"))
    monkeypatch.setattr("hwgrpo.parity.golden_head.ROWS", 7 * SHAPE["hidden_size"])
    parts = parity(capsys, folder("qwen2"))
    for one, other in zip(whole["stages"], parts["stages"], strict=True):
        assert one["error"] == pytest.approx(other["error"], rel=1e-6), one["name"]
        assert one["tolerance"] == pytest.approx(other["tolerance"], rel=0.5), one["name"]

    def wrong_row(model: Any) -> None:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient[23, 5] += 1.0
            return gradient

        model.get_input_embeddings().weight.register_hook(hook)

    changed("head", wrong_row)(monkeypatch)
    report = parity(capsys, folder("qwen2"))
    (stage,) = (stage for stage in report["stages"] if stage["name"] == "head, gradients")
    assert report["first_difference"] == "head, gradients"
    assert (stage["tensor"], stage["index"]) == ("gradient of lm_head.weight", [23, 5])


def test_a_head_of_its_own_in_a_configuration_that_ties_it_is_the_one_compared(folder, tmp_path, capsys):
    """transformers loads both tables of such files."""
    shutil.copytree(folder("qwen2"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    large = open_large_model(ModelConfig(path=str(tmp_path)))
    assert (large.embeddings, large.head) == ("model.embed_tokens.weight", "lm_head.weight")
    assert parity(capsys, tmp_path)["passed"]


def test_files_without_the_name_of_the_backbone_are_read(folder, tmp_path: Path, capsys):
    shutil.copytree(folder("qwen2"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_large_model(ModelConfig(path=str(tmp_path))).prefix == "layers."
    assert parity(capsys, tmp_path)["passed"]


def test_files_beside_those_of_the_index_are_not_read(folder, tmp_path: Path):
    """A folder may have the weights once more, in a file with names of their authors."""
    shutil.copytree(folder("qwen2"), tmp_path, dirs_exist_ok=True)
    shard = (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    names = load_file(shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard.name)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"tok_embeddings.weight": torch.zeros(3)}, tmp_path / "consolidated.safetensors", {"format": "pt"})
    large = open_large_model(ModelConfig(path=str(tmp_path)))
    assert large.weights.files.keys() == names.keys()
    assert large.outside == ["model.norm.weight"]


def test_own_code_is_refused_only_where_it_is_used(folder, tmp_path: Path):
    shutil.copytree(folder("qwen2"), tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    _, states = states_of(open_large_model(ModelConfig(path=str(tmp_path))))
    assert states.leaving.keys() == {0, 1}
    with pytest.raises(ConfigError, match="it has code of its own"):
        open_large_model(ModelConfig(path=str(tmp_path), trust_remote_code=True))


FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"


def test_a_layer_that_is_no_model_is_refused_unless_memory_is_full(folder, monkeypatch):
    large = open_large_model(ModelConfig(path=str(folder("qwen2"))))

    def fail(error: Exception) -> Callable[..., Any]:
        def load(settings: ModelConfig) -> Any:
            raise error

        return load

    monkeypatch.setattr(layer_states, "load_golden_model", fail(StrictDataclassError("field 'x':\n 2 is no str")))
    with pytest.raises(ConfigError, match="layer 1 alone is no model: field 'x': 2 is no str; compare"):
        states_of(large)
    monkeypatch.setattr(layer_states, "load_golden_model", fail(RuntimeError(FULL)))
    with pytest.raises(RuntimeError, match=FULL):
        states_of(large)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("shapes cannot be multiplied", ConfigError, "its forward failed, .*: shapes cannot be multiplied; compare"),
        (FULL, RuntimeError, f"^{FULL}"),
    ],
)
def test_a_forward_that_fails_is_refused_unless_memory_is_full(text: str, kind, message: str, folder, monkeypatch):
    def forward(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(text)

    monkeypatch.setattr(Qwen2DecoderLayer, "forward", forward)
    with pytest.raises(kind, match=message):
        states_of(open_large_model(ModelConfig(path=str(folder("qwen2")))))


def test_layers_of_a_built_in_model_are_compared(capsys):
    assert parity(capsys, Path("unused"), "model.path=builtin://tiny?task=sort&steps=20")["passed"]


def test_layers_are_spread_from_the_first_to_the_last():
    assert select_layers("1", 28) == [0]
    assert select_layers("2", 28) == [0, 27]
    assert select_layers("4", 28) == [0, 9, 18, 27]
    assert select_layers("all", 3) == [0, 1, 2]


@pytest.mark.parametrize("settings", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 2]}], ids=str)
def test_a_layer_alone_is_of_its_kind(settings: dict, tmp_path: Path):
    """Layers 1 and 3 are dense, layer 2 has experts."""
    config = AutoConfig.for_model("qwen3_moe", vocab_size=8, **SHAPE | EXPERTS | {"num_hidden_layers": 3} | settings)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
        for number, layer in enumerate(whole.model.layers):
            alone = AutoModelForCausalLM.from_config(one_layer_config("", config, number)).model.layers
            assert [type(each.mlp) for each in alone] == [type(layer.mlp)]


STATE_SPACES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1}


@pytest.mark.parametrize(
    ("setting", "layers"), [("time_step_limit", 2), ("mlp_multipliers", 2), ("ssm_multipliers", 5)]
)
def test_a_list_that_every_layer_reads_is_kept_whole(setting: str, layers: int):
    """It has as many values as there are layers, by chance."""
    config = AutoConfig.for_model("falcon_h1", vocab_size=8, **SHAPE | STATE_SPACES | {"num_hidden_layers": layers})
    assert len(getattr(config, setting)) == layers
    assert getattr(one_layer_config("", config, 0), setting) == getattr(config, setting)


def test_a_model_of_two_kinds_of_layers_that_return_pairs_is_compared(tmp_path: Path, capsys, monkeypatch):
    """A state space, whose two limits are no values of the two layers, and attention."""
    monkeypatch.setitem(FAMILIES, "bamba", STATE_SPACES | {"mamba_chunk_size": 8, "attn_layer_indices": [1]})
    save_family("bamba", tmp_path)
    assert parity(capsys, tmp_path)["first_difference"] is None


def test_a_layer_that_reads_another_ones_output_is_refused(folder, capsys, monkeypatch):
    forward, seen = Qwen2DecoderLayer.forward, {}

    def reading(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = forward(self, hidden_states, *args, **kwargs)
        number = self.self_attn.layer_idx
        seen[number] = output
        return output + 0.01 * seen[number - 1] if number else output

    monkeypatch.setattr(Qwen2DecoderLayer, "forward", reading)
    assert main([*CPU, f"model.path={folder('qwen2')}", "model.dtype=float32", "--layers", "2"]) == 2
    assert "layer 2 alone differs from itself within the model" in capsys.readouterr().err


def save_gpt2(folder: Path) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=99, n_embd=16, n_layer=1, n_head=2, n_positions=32, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    character_tokenizer("").save_pretrained(folder)


def without_safetensors(folder: Path) -> None:
    save_family("qwen2", folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def quantized(folder: Path) -> None:
    save_family("qwen2", folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (save_gpt2, "what enters its first layer is no multiple of its embeddings"),
        (without_safetensors, "has no *.safetensors files"),
        (quantized, "its weights are stored as F8_E4M3"),
    ],
)
def test_a_model_that_does_not_come_apart_is_refused(save: Callable[[Path], None], message, tmp_path: Path, capsys):
    save(tmp_path)
    assert main([*CPU, f"model.path={tmp_path}", "--layers", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"model.path={str(tmp_path)!r} with --layers" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "3"), "--layers 3: the model has 2 layers; use 1 to 2, or all"),
        (("--layers", "0"), "--layers 0: the model has 2 layers"),
        (("--layers", "some"), "--layers some: the model has 2 layers"),
        (("--layers", "1", "--save", "file"), "--layers 1 with --families, --save or --against"),
        (("--layers", "1", "--against", "file"), "--layers 1 with --families, --save or --against"),
        (("--layers", "1", "--families"), "--layers 1 with --families, --save or --against"),
        (
            ("--layers", "1", "trainer.strategy=fsdp2"),
            "--layers with trainer.strategy=fsdp2: layers are compared in one",
        ),
        (("--layers", "1", "model.lora.rank=4"), "--layers with model.lora: layers are compared without adapters"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_what_is_not_compared_by_layers_is_an_error(arguments: tuple[str, ...], message: str, capsys):
    assert main([*CPU, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_layer_too_large_for_the_host_is_refused_before_it_is_read(folder, capsys, monkeypatch):
    monkeypatch.setattr(layer_comparison, "host_bytes", lambda: 2**30)
    assert main([*CPU, f"model.path={folder('qwen2')}", "--layers", "1"]) == 2
    error = capsys.readouterr().err
    assert "its largest layer has 7,808 parameters and its LM head 3,168; comparing them with fp64 takes" in error
    assert "this host has 1.0 GiB" in error
