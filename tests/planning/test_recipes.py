"""Every recipe that ships is loaded, checked and planned on every backend, without a hub, data or a device."""

import json
import re
import socket
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hwgrpo_backends import registry
from transformers import AutoConfig, Lfm2Config

from hwgrpo.cli.chips import chosen_chips
from hwgrpo.config import load_config
from hwgrpo.config.validate import check_world_size
from hwgrpo.models.loading import auto_class
from hwgrpo.planning import dry_run
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.planning.model_shape import HUB_NAMES, planned_settings, shipped_shapes
from hwgrpo.planning.scale_plan import Cluster, plan_at_scale
from hwgrpo.rollout.server import server_environment
from hwgrpo.training import startup_checks

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
OF_THE_HUB = [name for name in RECIPES if not name.startswith("tiny_")]
PUBLISHED = {
    "DeepSeek-LLM-7B": 6_910_365_696,
    "DeepSeek-V3": 671_026_404_352,
    "GLM-4-9B": 9_400_279_040,
    "Llama-3.1-8B": 8_030_261_248,
    "Mistral-7B": 7_248_023_552,
    "Qwen2-7B": 7_615_616_512,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-VL-8B": 8_767_123_696,
    "SmolLM2-135M": 134_515_008,
}
"""Parameters as the models' pages say."""


@pytest.fixture(autouse=True, scope="module")
def models_made_once():
    """The adapters of a recipe's model are the same on every backend, and making them takes longest."""

    def once(function):
        known = {}

        def remembered(*arguments):
            key = repr(arguments[-2:])
            if key not in known:
                known[key] = function(*arguments)
            return known[key]

        return remembered

    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_without_weights", "check_saving"):
            patch.setattr(startup_checks, name, once(getattr(startup_checks, name)))
        yield


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch):
    def refuse(self, address):
        raise AssertionError(f"something connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_every_shape_has_the_parameters_that_its_model_is_published_with():
    assert {path.stem for path in (CONFIGS / "models").glob("*.json")} == set(PUBLISHED)
    for name, published in PUBLISHED.items():
        settings = AutoConfig.from_pretrained(CONFIGS / "models" / f"{name}.json")
        with torch.device("meta"):
            model = auto_class(settings).from_config(settings)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(published, rel=0.01), name
        assert type(model).__name__ == settings.architectures[0]


def test_every_key_of_a_shape_is_one_that_transformers_knows():
    for path in (CONFIGS / "models").glob("*.json"):
        written = json.loads(path.read_text())
        default = AutoConfig.for_model(written["model_type"])
        known = set(default.to_dict()) | set(default.attribute_map)
        known |= {HUB_NAMES, "head_dim", "rope_theta", "partial_rotary_factor"}  # the last two: rope_parameters
        assert set(written) <= known, path.name


def test_a_hub_name_belongs_to_one_shape():
    named = [name for path in (CONFIGS / "models").glob("*.json") for name in json.loads(path.read_text())[HUB_NAMES]]
    assert len(named) == len(set(named)) == len(shipped_shapes())


def test_a_local_folder_is_read_and_not_a_shape_that_ships(tmp_path, monkeypatch):
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 3}))
    monkeypatch.chdir(tmp_path)
    words = ["model.path=Qwen/Qwen3-8B", "data.train=task://sort", "reward.functions=[exact_match]"]
    settings, shipped = planned_settings(load_config(None, words).model)
    assert (settings.num_hidden_layers, shipped) == (3, None)


@pytest.mark.parametrize("backend", registry.BUILTIN)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_planned_on_every_backend(recipe, backend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server_environment, "SOURCES", tmp_path)  # without rollout environments
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # one's data comes from this package
    monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
    words = [f"backend.name={backend}"]
    if recipe not in OF_THE_HUB:  # its model is made here: two steps of warm-up are enough to look at it
        words.append(f"model.path=builtin://tiny?task={recipe.removeprefix('tiny_')}&steps=2")
    config = load_config(recipe, words, data_may_be_missing=True)
    check_world_size(config, 8)
    family = registry.get(backend)
    plan = make_plan(config, family, 8, no_device=None if family.is_host else "no such device here")
    named = {"data.train": config.data.train, "data.validation": config.data.validation}
    missing = [key for key, source in named.items() if source and not source.startswith("task://")]
    assert [line.partition("=")[0] for line in plan.problems if line.startswith("data.")] == missing
    by_server = config.rollout.engine == "vllm_server"
    here = (by_server, config.trainer.strategy == "fsdp2") if family.is_host else (True,)
    unread = recipe in OF_THE_HUB and not missing  # the data is here, and the tokenizer is not
    assert len(plan.problems) == len(missing) + sum(here) + unread
    first = plan.text.splitlines()[0]
    assert first.startswith(f"backend    {backend}, 8 processes")
    assert ("not on this machine" in first) is not family.is_host
    t, r = config.trainer, config.rollout
    sharded = t.strategy == "fsdp2"
    for part in (
        f"{t.max_steps} steps of {t.prompts_per_step} prompts x {r.n} samples",
        f"in all {t.max_steps * t.prompts_per_step:,} prompts and {t.max_steps * t.prompts_per_step * r.n:,} samples",
        "parameters (fp32)",
        "gradients (fp32)",
        "optimizer states (AdamW)",
        *(() if by_server else ("rollout: key-value cache of",)),
        *(() if sharded else ("update: activations of", "update: a chunk of log")),
        "float32, sdpa attention" if family.is_host else "bfloat16, sdpa attention",
    ):
        assert part in plan.text
    # whichever needs more
    assert not sharded or re.search("update: (unsharded gradients of a unit|a chunk of log)", plan.text)
    if recipe in OF_THE_HUB:
        [shape] = re.findall(r"shape from models/(\S+)\.json, not from the hub", plan.text)
        [parameters] = re.findall(r"([\d,]+) parameters, ", plan.text)
        assert int(parameters.replace(",", "")) == pytest.approx(PUBLISHED[shape], rel=0.01)


@pytest.mark.parametrize("recipe", OF_THE_HUB)
def test_the_memory_that_a_recipe_names_is_what_is_planned_and_its_longest_sequence_fits(recipe):
    config = load_config(recipe, data_may_be_missing=True)
    text = (CONFIGS / f"{recipe}.yaml").read_text()
    [devices] = re.findall(r"on (\d+) devices", text) or [1]
    [(figure, name)] = re.findall(r"About (\d+) GiB on each device by `hwgrpo plan --chip (\w+)`; never run on", text)
    cluster = Cluster(devices=int(devices), separate=config.rollout.engine == "vllm_server")
    [chip] = plan_at_scale(config, cluster, chosen_chips([name], config)).chips
    assert int(figure) == round(chip.memory.peak / 2**30)
    settings, _ = planned_settings(config.model)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    assert longest <= settings.get_text_config().max_position_embeddings


WITH_ADAPTERS = [name for name in OF_THE_HUB if "lora: {rank: 32}" in (CONFIGS / f"{name}.yaml").read_text()]


@pytest.mark.parametrize("recipe", [name for name in WITH_ADAPTERS if "qlora" not in name])
def test_a_recipe_with_adapters_trains_all_parameters_when_its_comment_is_followed(recipe):
    words = ["model.lora.rank=0", "optim.lr=1e-6"]
    text = make_plan(load_config(recipe, words, data_may_be_missing=True), registry.get("cpu"), 1).text
    [total, trainable] = re.findall(r"([\d,]+) parameters, ([\d,]+) trainable", text)[0]
    assert total == trainable
    told = re.findall(r"(\d+) GiB on every device", (CONFIGS / f"{recipe}.yaml").read_text())
    assert all(int(size) == round(16 * int(total.replace(",", "")) / 2**30) for size in told)


def test_recipes_state_only_what_differs_from_the_defaults():
    default = load_config(None, ["model.path=unused", "data.train=task://sort", "reward.functions=[exact_match]"])

    def same(written: dict, section: object) -> list[str]:
        found = []
        for key, value in written.items():
            inner = getattr(section, key)
            found += same(value, inner) if isinstance(value, dict) and hasattr(inner, "__dataclass_fields__") else []
            found += [key] if not isinstance(value, dict) and value == inner else []
        return found

    looked_for = {"n", "lr", "max_prompt_tokens", "max_response_tokens"}  # what a reader wants to see in any case
    for recipe in OF_THE_HUB:
        written = yaml.safe_load((CONFIGS / f"{recipe}.yaml").read_text())
        assert set(same(written, default)) <= looked_for, recipe


def test_a_plan_names_what_falls_back_and_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    Lfm2Config(**layers, hidden_size=64, vocab_size=64, architectures=["Lfm2ForCausalLM"]).save_pretrained("model")
    config = load_config("qwen3_4b_math", ["model.path=model"], data_may_be_missing=True)
    text = make_plan(config, registry.get("cpu"), 1).text
    assert "layout padded (one sequence per row): a lfm2 model has layers" in text
    assert "rollout decodes with the model's own forward: Lfm2ForCausalLM is not one" in text
    shipped = load_config("qwen3_4b_math", data_may_be_missing=True)
    assert "own forward" not in make_plan(shipped, registry.get("cpu"), 1).text


@pytest.mark.parametrize("words", [(), ("model.tokenizer=nobody/none-such",)], ids=["the model's", "another"])
def test_a_plan_of_a_shape_that_ships_never_asks_the_hub(words, tmp_path, monkeypatch):
    asked = []

    def refuse(self, address):
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: refuse(None, args))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    data = ("data.train=rows.jsonl", "data.validation=rows.jsonl")
    plan = make_plan(load_config("qwen2_5_0_5b_gsm8k", [*data, *words]), registry.get("cpu"), 1)
    assert not asked
    [problem] = plan.problems
    assert "a dry run does not download it; run `hf download" in problem


def test_a_plan_looks_for_missing_data_once(monkeypatch):
    looked = []
    monkeypatch.setattr(dry_run, "missing_data", lambda config: looked.append(config) or ["no data"])
    plan = make_plan(load_config("tiny_sort", ["trainer.max_steps=3"]), registry.get("cpu"), 1)
    assert plan.problems == ("no data",)
    assert "not tried: that needs the data" in plan.text
    assert len(looked) == 1
