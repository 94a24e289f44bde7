"""Loading, overriding and refusing settings."""

from pathlib import Path

import pytest

from hwgrpo.config import load_config
from hwgrpo.config.document import entries
from hwgrpo.config.load import to_yaml
from hwgrpo.config.recipe_files import find_recipe
from hwgrpo.config.validate import check_world_size
from hwgrpo.errors import ConfigError

BASE = ("model.path=builtin://tiny", "data.train=task://sort", "reward.functions=[exact_match]")


def load(*overrides: str):
    return load_config(None, (*BASE, *overrides))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    return str(error.value)


def test_overrides_win_over_the_recipe_and_the_recipe_over_defaults(tmp_path: Path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {path: m}\ndata: {train: 'task://sort'}\nreward: {functions: [exact_match]}\n"
        "rollout: {n: 4, top_k: 5}\n"
    )
    config = load_config(recipe, ["rollout.n=16"])
    assert (config.rollout.n, config.rollout.top_k, config.rollout.top_p) == (16, 5, 1.0)


def test_the_printed_configuration_loads_back_to_itself(tmp_path: Path):
    config = load(
        "optim.lr=3e-4", "rollout.stop=['###']", "reward.functions=[{name: exact_match, weight: 0.5}, length]"
    )
    recipe = tmp_path / "resolved.yaml"
    recipe.write_text(to_yaml(config))
    assert load_config(recipe) == config


def test_a_reward_may_be_just_a_name_and_its_fields_can_be_overridden_by_index():
    config = load("reward.functions.0.weight=2.5")
    assert (config.reward.functions[0].name, config.reward.functions[0].weight) == ("exact_match", 2.5)


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("rollout.temprature=1", ["rollout.temprature", "Did you mean rollout.temperature?"]),
        ("rolout.n=4", ["unknown key rolout", "Did you mean rollout?"]),
        ("trainer.lr=1e-5", ["unknown key trainer.lr", "Did you mean optim.lr?"]),
        ("algorithm.kl.coeff=1", ["Did you mean algorithm.kl.coef?"]),
        ("reward.functions.0.wieght=1", ["Did you mean reward.functions.0.weight?"]),
        ("rollout.n=many", ["rollout.n='many'", "must be int"]),
        ("data.shuffle=perhaps", ["data.shuffle='perhaps'", "must be bool"]),
        ("rollout.n=0", ["rollout.n=0", "at least 1"]),
        ("rollout.top_p=1.5", ["rollout.top_p=1.5", "0 < x <= 1"]),
        ("optim.lr=0", ["optim.lr=0.0", "above 0"]),
        ("optim.lr=.nan", ["optim.lr=nan", "above 0"]),
        ("optim.betas=[0.9]", ["optim.betas", "two numbers"]),
        ("algorithm.loss.name=ppo_clp", ["algorithm.loss.name='ppo_clp'", "Did you mean 'ppo_clip'?"]),
        ("algorithm.kl.estimator=k4", ["k3"]),
        ("algorithm.advantage.std=grupo", ["algorithm.advantage.std='grupo'", "Did you mean 'group'?"]),
        ("algorithm.advantage.singleton=zeros", ["algorithm.advantage.singleton='zeros'", "Did you mean 'zero'?"]),
        ("algorithm.advantage.eps=-1", ["algorithm.advantage.eps=-1.0", "0 <= x <= 1"]),
        ("algorithm.advantage.std_correction=2", ["algorithm.advantage.std_correction=2", "0 <= x <= 1"]),
        ("algorithm.kl.output_clamp=-1", ["algorithm.kl.output_clamp=-1.0", "above 0"]),
        ("algorithm.kl.coef=-0.1", ["algorithm.kl.coef=-0.1", "at least 0"]),
        ("algorithm.loss.clip_low=1.5", ["algorithm.loss.clip_low=1.5", "0 <= x <= 1"]),
        ("algorithm.loss.clip_high=-1", ["algorithm.loss.clip_high=-1.0", "above -1"]),
        ("algorithm.loss.dual_clip=1", ["algorithm.loss.dual_clip=1.0", "above 1"]),
        ("algorithm.loss.log_ratio_clamp=0", ["algorithm.loss.log_ratio_clamp=0.0", "above 0"]),
        ("algorithm.loss.tau_neg=0", ["algorithm.loss.tau_neg=0.0", "above 0"]),
        ("algorithm.correction.low=0", ["algorithm.correction.low=0.0", "above 0"]),
        ("algorithm.correction.high=.nan", ["algorithm.correction.high=nan", "above 0"]),
        ("algorithm.entropy_coef=.inf", ["algorithm.entropy_coef=inf", "at most"]),
        ("backend.name=cdua", ["backend.name='cdua'", "Did you mean 'cuda'?"]),  # hw: the word under test
        ("observe.loggers=[jsonl,tensorbord]", ["Did you mean 'tensorboard'?"]),
        ("reward.functions=[exact_mach]", ["Did you mean 'exact_match'?"]),
        ("reward.functions=[]", ["reward.functions is empty"]),
        ("reward.functions=exact_match", ["reward.functions", "must be a list"]),
        ("rollout=5", ["rollout", "mapping"]),
        ("reward.functions=[nowhere.py:score]", ["reward.functions.0.name", "no file nowhere.py"]),
        ("data.train=missing.jsonl", ["data.train='missing.jsonl'", "no such file"]),
        ("data.train=task://sortt", ["sort"]),
        ("justaword", ["section.key=value"]),
        ("rollout.n=[", ["rollout.n", "YAML"]),
    ],
)
def test_a_wrong_setting_is_refused_with_key_value_and_remedy(word: str, parts: list[str]):
    message = refusal(word)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["rollout.n=1"], ["rollout.n=1", "no baseline", "rollout.n=2"]),
        (
            ["trainer.prompts_per_step=32", "trainer.prompts_per_update=12"],
            ["prompts_per_update=12", "does not divide"],
        ),
        (
            ["trainer.tokens_per_micro_batch=100", "data.max_prompt_tokens=64", "rollout.max_response_tokens=64"],
            ["tokens_per_micro_batch=100", "at least 128"],
        ),
        (["model.lora.alpha=3"], ["model.lora.alpha=3.0", "no effect", "model.lora.rank"]),
        (["model.lora.adapter=somewhere"], ["model.lora.adapter='somewhere'", "no such folder"]),
        (["observe.loggers=[tensorboard]", "trainer.save_every=5"], ["jsonl"]),
        (
            ["algorithm.correction.name=token_mask", "algorithm.correction.low=3", "algorithm.correction.high=2"],
            ["correction.low=3.0", "below"],
        ),
        (
            ["algorithm.correction.name=token_truncate", "algorithm.correction.high=null"],
            ["algorithm.correction.name='token_truncate'", "needs a bound"],
        ),
        (["rollout.source=prefetch"], ["rollout.source='prefetch'", "max_staleness=0", "leave rollout.source out"]),
        (["algorithm.loss.clip_high=-0.1"], ["clip_high=-0.1", "loss.name='ppo_clip'", "at least 0"]),
        (["algorithm.aggregation.norm_length=5"], ["norm_length=5", "no effect"]),
        (["reward.functions.0.weight=0"], ["weight is 0"]),
    ],
)
def test_contradicting_settings_are_refused(words: list[str], parts: list[str]):
    message = refusal(*words)
    for part in parts:
        assert part in message


def test_every_number_of_the_loss_can_be_set():
    algorithm = load(
        "algorithm.loss.name=cispo",
        "algorithm.loss.clip_high=-0.8",
        "algorithm.loss.log_ratio_clamp=null",
        "algorithm.kl.coef=0.1",
        "algorithm.kl.input_clamp=null",
        "algorithm.kl.output_clamp=5",
        "algorithm.kl.times_ratio=true",
    ).algorithm
    assert (algorithm.loss.clip_high, algorithm.loss.log_ratio_clamp) == (-0.8, None)
    assert (algorithm.kl.input_clamp, algorithm.kl.output_clamp, algorithm.kl.times_ratio) == (None, 5.0, True)
    loss = load("algorithm.loss.name=sapo", "algorithm.loss.tau_pos=2", "algorithm.loss.tau_neg=3").algorithm.loss
    assert (loss.tau_pos, loss.tau_neg) == (2.0, 3.0)


def test_a_group_of_one_is_legal_when_the_raw_reward_is_asked_for():
    assert load("rollout.n=1", "algorithm.advantage.singleton=raw").rollout.n == 1


def test_a_required_setting_that_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"model\.path is required"):
        load_config(None, ["data.train=task://sort", "reward.functions=[exact_match]"])


def test_broken_yaml_names_the_file_and_the_line(tmp_path: Path):
    recipe = tmp_path / "broken.yaml"
    recipe.write_text("model: {path: [\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml.*line"):
        load_config(recipe)


def test_an_unknown_recipe_lists_those_that_ship():
    with pytest.raises(ConfigError, match="tiny_sort"):
        find_recipe("configs/tiny_srot.yaml")


def test_every_setting_is_documented():
    assert [e.key for e in entries() if len(e.doc) < 10] == []


def test_every_shipped_recipe_loads():
    recipes = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        load_config(recipe, data_may_be_missing=True)


def test_batches_must_be_shared_out_among_the_ranks_and_single_means_one_rank():
    check_world_size(load("trainer.prompts_per_step=32"), 4)
    with pytest.raises(ConfigError, match="multiple of 3"):
        check_world_size(load("trainer.prompts_per_step=32"), 3)
    with pytest.raises(ConfigError, match="strategy=ddp"):
        check_world_size(load("trainer.strategy=single"), 2)


def test_ranks_share_sequences_only_where_there_are_groups_of_them():
    two = "trainer.sequence_parallel_size=2"
    check_world_size(load("trainer.prompts_per_step=32", two), 4)
    with pytest.raises(ConfigError, match=r"sequence_parallel_size=2 does not divide the run's 1 rank: "):
        check_world_size(load(two), 1)
    with pytest.raises(ConfigError, match=r"sequence_parallel_size=2 does not divide the run's 3 ranks"):
        check_world_size(load("trainer.prompts_per_step=3", two), 3)
    assert "by several processes; use trainer.strategy=ddp" in refusal(two, "trainer.strategy=single")


def test_layers_are_cut_over_ranks_by_fsdp2_alone_and_whole_weights_are_trained(tmp_path):
    two = ("trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2")
    check_world_size(load("trainer.prompts_per_step=32", *two), 4)
    with pytest.raises(ConfigError, match=r"trainer.tensor_parallel_size=2 does not divide the run's 3 ranks"):
        check_world_size(load("trainer.prompts_per_step=3", *two), 3)
    for strategy in ("auto", "single", "ddp", "deepspeed"):
        said = refusal(two[1], f"trainer.strategy={strategy}")
        setting = f"trainer.tensor_parallel_size=2 with trainer.strategy='{strategy}': "
        assert said.startswith(setting + "tensor parallelism needs trainer.strategy=fsdp2;")
        assert "use that, or trainer.sequence_parallel_size" in said
    assert "with trainer.sequence_parallel_size=4: either shares" in refusal(*two, "trainer.sequence_parallel_size=4")
    assert "=2 with model.lora.rank=8: adapters are not sharded" in refusal(*two, "model.lora.rank=8")
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    assert "=2 with model.lora.adapter='/" in refusal(*two, f"model.lora.adapter={tmp_path}")
    short = ("data.max_prompt_tokens=40", "rollout.max_response_tokens=61", "trainer.tokens_per_micro_batch=50")
    assert "over trainer.tensor_parallel_size=2); use at least 51" in refusal(*two, *short)


def test_a_micro_batch_holds_a_ranks_part_of_a_sequence():
    longest = ("data.max_prompt_tokens=40", "rollout.max_response_tokens=61", "trainer.sequence_parallel_size=4")
    load(*longest, "trainer.tokens_per_micro_batch=26")
    said = refusal(*longest, "trainer.tokens_per_micro_batch=25")
    assert "is smaller than a rank has of one sequence" in said
    assert "over trainer.sequence_parallel_size=4); use at least 26" in said


def test_an_index_into_a_list_that_is_not_there_is_refused_with_the_list_to_set():
    for key in ("data.train", "data.validation"):
        with pytest.raises(ConfigError, match=rf"{key}.0: {key} has no entry 0: it is empty; set {key}=\[...\]"):
            load_config(None, ["model.path=builtin://tiny", "reward.functions=[exact_match]", f"{key}.0=a.jsonl"])
