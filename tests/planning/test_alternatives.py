"""What a plan proposes where a configuration does not fit: nothing that a run would reject, and nothing unneeded."""

import pytest

from hwgrpo.config import Config, load_config
from hwgrpo.config.validate import check_strategy
from hwgrpo.planning.alternatives import Alternative, first_alternative
from hwgrpo.planning.planned_sharding import changed_settings, strategy_kind

FULL = ("model.lora.rank=0", "model.gradient_checkpointing=false", "rollout.max_sequences=1024")
LORA = ("model.gradient_checkpointing=false", "rollout.max_sequences=1024")


def recipe(*words: str) -> Config:
    return load_config("qwen3_8b_math", words, data_may_be_missing=True)


def tried(config: Config, devices: int, **conditions: bool) -> list[Alternative]:
    """Return the alternatives that are planned, in order, if none of them fits."""
    seen: list[Alternative] = []
    conditions = {"on_host": False, "separate": False, **conditions}
    text = first_alternative(config, devices, lambda each: seen.append(each) is not None, **conditions)
    assert text.startswith("nothing on up to 128 devices")
    return seen


def chosen(config: Config, *needed: str, devices: int = 1, **conditions: bool) -> str:
    """Return the alternative that is proposed if those fit whose text has some parts."""
    conditions = {"on_host": False, "separate": False, **conditions}
    return first_alternative(config, devices, lambda each: all(part in each.text for part in needed), **conditions)


def test_settings_that_keep_the_results_come_first_then_strategies_then_those_that_round():
    config = recipe(*LORA)
    assert chosen(config, "tokens_per_micro_batch") == "trainer.tokens_per_micro_batch=8192"
    assert chosen(config, "max_sequences=256") == "rollout.max_sequences=256"
    assert chosen(config, "max_sequences=16") == "rollout.max_sequences=16"
    assert chosen(config, "checkpointing") == "model.gradient_checkpointing=true"
    assert chosen(config, "offload=opt") == "trainer.offload=optimizer"
    both = "model.gradient_checkpointing=true, trainer.offload=optimizer"
    assert chosen(config, "checkpointing", "offload=opt") == both
    assert chosen(config, "8bit") == "optim.name=adamw_8bit"
    assert chosen(config, "nf4") == "model.quantize=nf4"
    order = [each.text for each in tried(config, 8)]
    last_exact = max(i for i, text in enumerate(order) if "offload=optimizer" in text and "8bit" not in text)
    of_strategy, rounded = order.index("fsdp2"), next(i for i, text in enumerate(order) if "8bit" in text)
    assert order.index("ddp") < of_strategy < rounded
    assert min(i for i, text in enumerate(order) if "on 16 devices" in text) > rounded
    assert last_exact > 0


@pytest.mark.parametrize(
    "words",
    [
        (*FULL, "trainer.offload=optimizer"),
        (*FULL, "optim.name=adamw_8bit"),
        (*FULL, "trainer.strategy=fsdp2", "trainer.tensor_parallel_size=8"),
        (*LORA, "model.quantize=nf4"),
        (*LORA, "trainer.sequence_parallel_size=4"),
        FULL,
        LORA,
    ],
    ids=lambda words: words[-1],
)
def test_no_alternative_is_one_that_a_run_rejects(words):
    config = recipe(*words)
    for each in tried(config, 8):
        check_strategy(each.config)
        kind, trainer = strategy_kind(each.config.trainer, each.devices), each.config.trainer
        assert kind.holds_states or (trainer.offload, each.config.optim.name) == ("none", "adamw"), each.text
        assert kind.takes_quantized or each.config.model.quantize == "none", each.text
        assert kind.shards_layers or trainer.tensor_parallel_size == 1, each.text
        assert each.config.model.lora.rank or each.config.model.quantize == "none", each.text


def test_other_settings_of_the_trainer_are_kept():
    config = recipe(*FULL, "trainer.offload=optimizer", "trainer.tokens_per_micro_batch=4096")
    for each in tried(config, 8):
        assert (each.config.trainer.offload, each.config.trainer.tokens_per_micro_batch) == ("optimizer", 4096)
    offloaded = recipe(*FULL, "trainer.strategy=fsdp2", "trainer.fsdp2.offload=true")
    by_text = {each.text: each.config.trainer.fsdp2.offload for each in tried(offloaded, 8)}
    assert (by_text["fsdp2"], by_text["fsdp2+offload"]) == (False, True)


def test_what_the_configuration_has_or_what_could_save_nothing_is_not_proposed():
    config = changed_settings(recipe(), {"rollout.max_sequences": 16, "trainer.tokens_per_micro_batch": 4096})
    texts = " ".join(each.text for each in tried(config, 1))
    assert not [key for key in ("checkpointing", "max_sequences", "tokens_per") if key in texts], "the recipe has them"
    assert "max_sequences" not in " ".join(each.text for each in tried(recipe(*LORA), 1, separate=True))
    host = " ".join(each.text for each in tried(recipe(*LORA), 1, on_host=True))
    assert "trainer.offload" not in host
    assert "tokens_per_micro_batch" not in host
    longer = recipe(*LORA, "rollout.max_response_tokens=31744", "trainer.tokens_per_micro_batch=null")
    assert "tokens_per_micro_batch" not in " ".join(each.text for each in tried(longer, 1)), "one sequence has more"
