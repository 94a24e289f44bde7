"""`trainer.strategy=auto`: the simplest strategy whose plan fits, `rollout.max_sequences=null`: the most sequences for
which it does; and on resume those of the checkpoint."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hwgrpo_backends import registry
from hwgrpo_backends.device import Memory

from hwgrpo.config import Config, load_config
from hwgrpo.errors import ConfigError
from hwgrpo.planning.planned_device import USABLE
from hwgrpo.planning.planner import Planner
from hwgrpo.planning.strategy_choice import resolve_sequences, resolve_strategy
from tests.support.processes import ranks
from tests.support.runs import runs

ACCELERATOR = registry.get("cuda")  # hw: any accelerator
GIB = 2**30


def recipe(*words: str) -> Config:
    return load_config("qwen3_8b_math", ["model.lora.rank=0", *words], data_may_be_missing=True)


def device(memory: float | None) -> Any:
    """Return a double of a device with this usable memory in bytes."""
    total = None if memory is None else round(memory / USABLE)
    return SimpleNamespace(memory=lambda: Memory(total=total))


def needed(strategy: str, devices: int, *words: str) -> int:
    config = recipe(f"trainer.strategy={strategy}", *words)
    return Planner(config).memory(ACCELERATOR, devices, config.trainer, separate=False).peak


EACH_PASS, EACH_UPDATE = ("trainer.fsdp2.sync_every=micro_batch", "trainer.fsdp2.sync_every=update")


def resolved(config: Config, devices: int, memory: float | None) -> tuple[str, list[str]]:
    notes = resolve_strategy(config, ACCELERATOR, devices, device(memory))
    return config.trainer.strategy, notes


def test_replicas_are_taken_where_their_plan_fits_else_shards():
    replicas, shards = needed("ddp", 8), needed("fsdp2", 8, EACH_UPDATE)
    assert shards < replicas
    name, [note] = resolved(recipe(), 8, 1.01 * replicas)
    assert name == "ddp"
    assert note.startswith("trainer.strategy=ddp (auto): about ")
    assert "would need" not in note
    name, [note] = resolved(recipe(), 8, 0.99 * replicas)
    assert name == "fsdp2"
    assert note.startswith("trainer.strategy=fsdp2, trainer.fsdp2.sync_every=update (auto): about ")
    assert f"; trainer.strategy=ddp would need {replicas / GIB:.2f} GiB" in note
    name, [note] = resolved(recipe(), 1, 1.01 * needed("single", 1))
    assert name == "single"


def test_muon_stays_with_full_matrices_where_their_plan_does_not_fit():
    replicas = needed("ddp", 8, "optim.name=muon")
    name, [note] = resolved(recipe("optim.name=muon"), 8, 0.99 * replicas)
    assert name == "ddp"
    assert note.startswith("warning: trainer.strategy=ddp (auto) needs about ")


def test_fsdp2_synchronizes_once_per_update_where_that_fits():
    once, each = needed("fsdp2", 8, EACH_UPDATE), needed("fsdp2", 8, EACH_PASS)
    assert each < once

    def sync(memory: float | None, *words: str) -> tuple[str, list[str]]:
        config = recipe("trainer.strategy=fsdp2", *words)
        notes = resolved(config, 8, memory)[1]
        return config.trainer.fsdp2.sync_every, notes

    name, [note] = sync(1.01 * once)
    assert (name, "would need" in note) == ("update", False)
    name, [note] = sync(0.99 * once)
    assert name == "micro_batch"
    assert f"; trainer.fsdp2.sync_every=update would need {once / GIB:.2f} GiB" in note
    assert sync(None) == ("update", [])
    assert sync(GIB, EACH_UPDATE) == ("update", [])
    assert sync(1000 * GIB, "trainer.fsdp2.offload=true")[0] == "micro_batch"
    with pytest.raises(ConfigError, match=r"offload=true with .*sync_every='update'.* use auto or micro_batch"):
        recipe("trainer.strategy=fsdp2", "trainer.fsdp2.offload=true", EACH_UPDATE)


def test_zero_2_reduces_gradients_once_per_update_where_that_fits():
    key = "trainer.deepspeed.sync_every="
    once, each = needed("deepspeed", 8, key + "update"), needed("deepspeed", 8, key + "micro_batch")
    assert each < once
    for memory, chosen in ((1.01 * once, "update"), (0.99 * once, "micro_batch"), (None, "update")):
        config = recipe("trainer.strategy=deepspeed")
        resolved(config, 8, memory)
        assert config.trainer.deepspeed.sync_every == chosen
    others = recipe("trainer.strategy=deepspeed", "trainer.deepspeed.stage=1")
    assert resolved(others, 8, GIB) == ("deepspeed", [])
    assert others.trainer.deepspeed.sync_every == "auto"


def test_where_no_plan_fits_the_run_starts_and_is_told_what_would():
    name, [note] = resolved(recipe(), 8, 0.99 * needed("fsdp2", 8, EACH_PASS))
    assert name == "fsdp2"
    assert note.startswith("warning: trainer.strategy=fsdp2, trainer.fsdp2.sync_every=micro_batch (auto) needs about ")
    assert "what would fit: trainer.tokens_per_micro_batch=8192 (`hwgrpo plan` shows" in note
    name, [note] = resolved(recipe(), 1, 40 * GIB)
    assert (name, "what would fit: fsdp2+offload on 2 devices" in note) == ("single", True)


def test_a_model_that_cannot_be_planned_is_trained_without_and_the_note_says_why(monkeypatch):
    def fail(self, config, **_):
        raise AttributeError("no hidden_size")

    monkeypatch.setattr(Planner, "__init__", fail)
    name, [note] = resolved(recipe(), 8, GIB)
    assert name == "ddp"
    reason = "whose memory cannot be estimated: AttributeError: no hidden_size"
    assert note == f"warning: trainer.strategy=ddp (auto), {reason}"


def test_beside_quantized_weights_fsdp2_shards_the_rest():
    config = recipe("model.lora.rank=32", "model.quantize=nf4")
    name, [note] = resolved(config, 8, 2 * GIB)
    assert name == "fsdp2"
    assert note.startswith("warning: trainer.strategy=fsdp2, trainer.fsdp2.sync_every=micro_batch (auto) needs about ")
    assert "zero" not in note


def test_without_a_device_of_its_own_memory_the_number_of_processes_decides():
    assert resolved(recipe(), 8, None) == ("ddp", [])
    assert resolved(recipe(), 1, None) == ("single", [])
    config = recipe()
    assert resolve_strategy(config, ACCELERATOR, 2, None) == []
    assert config.trainer.strategy == "ddp"


def test_a_strategy_by_name_is_kept():
    assert resolved(recipe("trainer.strategy=ddp"), 8, GIB) == ("ddp", [])


def test_a_resumed_run_keeps_its_checkpoints_strategy(tmp_path):
    words = ("trainer.strategy=fsdp2", EACH_PASS, "trainer.max_steps=2", "trainer.save_every=1")
    assert ranks.forked(2, lambda _: runs.run(tmp_path / "run", *words)) == [0, 0]
    again = runs.small(tmp_path / "run")
    assert resolved(again, 2, 1000 * GIB) == ("fsdp2", []), "though ddp fits"
    assert again.trainer.fsdp2.sync_every == "micro_batch"
    newest = max((tmp_path / "run/checkpoints").iterdir())
    (newest / "manifest.json").write_text("{}")
    assert resolved(runs.small(tmp_path / "run"), 2, 1000 * GIB)[0] == "fsdp2", "that of the checkpoint before"
    from_path = runs.small(tmp_path / "other", f"trainer.resume={min((tmp_path / 'run/checkpoints').iterdir())}")
    assert resolved(from_path, 2, 1000 * GIB)[0] == "fsdp2"
    assert resolved(runs.small(tmp_path / "run", "trainer.resume=never"), 2, 1000 * GIB)[0] == "ddp"


def test_other_processes_than_the_checkpoints_strategy_needs_are_an_error(tmp_path):
    assert runs.forked(lambda: runs.run(tmp_path / "run", "trainer.strategy=single", "trainer.max_steps=1")) == 0
    again = runs.small(tmp_path / "run")
    message = "trainer.strategy=single, which 2 processes cannot run; .* set trainer.strategy=ddp to change it"
    with pytest.raises(ConfigError, match=message):
        resolved(again, 2, None)
    assert resolved(runs.small(tmp_path / "run"), 1, None) == ("single", [])


def many(*words: str) -> Config:
    words = ("trainer.prompts_per_step=256", "rollout.n=8", "trainer.strategy=single", "data.validation=null", *words)
    return recipe("rollout.engine=local", "rollout.max_sequences=null", *words)


def sequences(config: Config, memory: float | None) -> tuple[int | None, list[str]]:
    notes = resolve_sequences(config, ACCELERATOR, 1, device(memory))
    return config.rollout.max_sequences, notes


def generation(number: int, *words: str) -> int:
    config = many(f"rollout.max_sequences={number}", *words)
    return Planner(config).memory(ACCELERATOR, 1, config.trainer, separate=False).rollout_peak


def test_as_many_sequences_are_decoded_at_once_as_there_is_memory_for():
    assert generation(384) < generation(512) < generation(1024)
    number, [note] = sequences(many(), 1.01 * generation(512))
    assert number == 512
    usable = f"the {int(1.01 * generation(512)) / GIB:.2f} GiB usable on a device"
    assert note == f"rollout.max_sequences=512 (null): as many as the plan has room for in {usable}"

    assert sequences(many(), 0.99 * generation(512))[0] == 384
    assert sequences(many(), 1000 * GIB)[0] == 1024
    assert sequences(many("trainer.prompts_per_step=4"), 1000 * GIB)[0] == 32, "there are no more responses"
    assert sequences(many(), GIB)[0] == 8, "the start warns that nothing fits"


def test_validations_whose_prompts_all_differ_need_room_too():
    validated = ("data.validation=rows.jsonl", "data.validation_max_rows=256")
    room = 1.01 * generation(512)
    alone, with_it = (sequences(many(*words), room)[0] for words in ((), validated))
    assert alone == 512
    assert with_it is not None
    kinds = (("rollout.n=1", "algorithm.advantage.singleton=raw"), ("rollout.n=4",))  # greedy, and validation_n
    validation = {each: max(generation(each, *kind) for kind in kinds) for each in (with_it, 512)}
    assert validation[with_it] <= room < validation[512]
    few = sequences(many("data.validation=rows.jsonl", "data.validation_max_rows=8"), room)[0]
    assert few == 512, "there are not more responses than that"


def test_a_number_of_sequences_that_is_given_is_kept_and_others_engines_choose_theirs():
    assert sequences(many("rollout.max_sequences=2048"), GIB) == (2048, [])
    assert sequences(many("rollout.engine=vllm"), GIB) == (None, [])
    assert sequences(many(), None) == (256, []), "the memory is not known"


def test_the_sequences_of_a_model_that_cannot_be_planned_are_a_guess(monkeypatch):
    config = many()

    def fail(self, config, **_):
        raise AttributeError("no hidden_size")

    monkeypatch.setattr(Planner, "__init__", fail)
    number, [note] = sequences(config, GIB)
    assert number == 256
    assert note.startswith("warning: rollout.max_sequences=256 (null), whose memory cannot be estimated: Attribute")


def test_a_resumed_run_decodes_as_many_sequences_at_once_as_before(tmp_path):
    words = ("rollout.max_sequences=24", "trainer.max_steps=1")
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words)) == 0
    assert sequences(runs.small(tmp_path / "run", "rollout.max_sequences=null"), 1000 * GIB) == (24, [])


FSDP2 = "trainer.strategy=fsdp2"
SERVER = ("rollout.engine=vllm_server", f"rollout.server.python={sys.executable}")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((("trainer.strategy=ddp",), (FSDP2,)), "rank 0: trainer.strategy=ddp, .*; rank 1: trainer.strategy=fsdp2, "),
        (((FSDP2, EACH_PASS), (FSDP2, EACH_UPDATE)), "rank 0: .*=micro_batch, .*; rank 1: .* sync_every=update, "),
        (((FSDP2,), (FSDP2, *SERVER)), "rank 0: .*engine=local, .*; rank 1: .*engine=vllm_server"),
        (
            ((FSDP2, *SERVER), (FSDP2, *SERVER, "rollout.tensor_parallel_size=2")),
            "rank 0: .*tensor_parallel_size=1; rank 1: .*tensor_parallel_size=2",
        ),
    ],
)
def test_ranks_that_choose_differently_are_an_error(tmp_path, words, named):
    def start(rank: int) -> None:
        with pytest.raises(ConfigError, match=named + ".*: set trainer.strategy, trainer.fsdp2.sync_every"):
            runs.run(tmp_path / "run", *words[rank])

    assert ranks.forked(2, start) == [0, 0]
