"""The model with no download: its address, its cache, its tokenizer, what its warm start teaches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hwgrpo.errors import ConfigError
from hwgrpo.models import builtin, model_cache, tiny

QUICK = "builtin://tiny?steps=2&batch=4&hidden=32&layers=1"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HWGRPO_CACHE", str(tmp_path))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_resolved_folder_loads_with_transformers_as_a_tied_qwen3_of_the_given_shape():
    folder = builtin.resolve("builtin://tiny?steps=0")
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("qwen3", 64, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert config.vocab_size == len(tokenizer) == 99
    assert model.generation_config.eos_token_id == config.eos_token_id == tokenizer.eos_token_id


def test_the_tokenizer_has_a_token_per_character_round_trips_and_survives_saving(tmp_path):
    made = tiny.character_tokenizer("é")
    made.save_pretrained(tmp_path / "tokenizer")
    tokenizer: Any
    for tokenizer in (made, AutoTokenizer.from_pretrained(tmp_path / "tokenizer")):
        text = "sort 31=\n  {a} <b> é"
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
        assert tokenizer("ü").input_ids == [tokenizer.unk_token_id]
        assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
        messages = [{"role": "system", "content": "ab "}, {"role": "user", "content": "cd"}]
        assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "ab cd"


def test_the_warm_start_counts_response_and_end_tokens_only_and_reads_characters_as_the_tokenizer_does():
    tokenizer = tiny.character_tokenizer("")
    inputs, targets = tiny._tensors(tokenizer, [("a=", "bc"), ("abc=", "d")], False)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert inputs.tolist() == [[*tokenizer("a=bc").input_ids, eos], tokenizer("abc=d").input_ids]
    assert targets.tolist() == [
        [-100, *tokenizer("bc").input_ids, eos, -100],
        [-100, -100, -100, *tokenizer("d").input_ids, eos],
    ]
    assert pad not in targets.tolist()[0]


def test_the_same_address_gives_bitwise_the_same_weights_whatever_threads_and_global_seed(tmp_path, monkeypatch):
    first = weights(builtin.resolve(QUICK))
    monkeypatch.setenv("HWGRPO_CACHE", str(tmp_path / "another"))
    torch.set_num_threads(2)
    torch.manual_seed(123)
    assert weights(builtin.resolve(QUICK)) == first
    assert torch.get_num_threads() == 2
    drawn = torch.rand(1)
    torch.manual_seed(123)
    assert torch.equal(drawn, torch.rand(1)), "making a model leaves the global generator alone"


def test_every_option_is_part_of_the_cache_key_and_none_is_ignored():
    plain = builtin.resolve(QUICK)
    for change in ("seed=1", "steps=3", "batch=5", "lr=0.01", "layers=2", "hidden=64", "task=copy", "digits=3"):
        other = builtin.resolve(_with(change))
        assert other != plain
        assert weights(other) != weights(plain), change


def _with(change: str) -> str:
    key, value = change.split("=")
    options = {"steps": "2", "batch": "4", "hidden": "32", "layers": "1"} | {key: value}
    return "builtin://tiny?" + "&".join(f"{k}={v}" for k, v in options.items())


def test_a_second_resolve_uses_the_cache(monkeypatch):
    folder = builtin.resolve(QUICK)
    monkeypatch.setattr(tiny, "make", lambda **_: pytest.fail("made again"))
    assert builtin.resolve(QUICK) == folder
    assert builtin.resolve("builtin://tiny?layers=1&hidden=32&batch=4&steps=2&seed=0&task=sort") == folder


def test_what_is_imported_while_a_model_is_made_says_nothing_on_standard_output(monkeypatch, capsys):
    """There a command's JSON goes; DeepSpeed, where it is installed, has something to say."""
    save = PreTrainedTokenizerFast.save_pretrained

    def told_and_saved(*given: Any, **more: Any) -> Any:
        print("no accelerator")
        return save(*given, **more)

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", told_and_saved)
    builtin.resolve(QUICK)
    told = capsys.readouterr()
    assert told.out == ""
    assert "no accelerator" in told.err


def test_a_model_made_on_a_rank_other_than_the_first_is_complete(tmp_path, monkeypatch):
    monkeypatch.setenv("HWGRPO_CACHE", str(tmp_path))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        folder = builtin.resolve("builtin://tiny?steps=2")
    finally:
        torch.distributed.destroy_process_group()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_an_interrupted_making_leaves_nothing_and_the_next_one_succeeds(tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
        with pytest.raises(KeyboardInterrupt):
            builtin.resolve(QUICK)
    assert list((tmp_path / "builtin").iterdir()) == []
    assert (builtin.resolve(QUICK) / "tokenizer.json").is_file()


def test_of_two_processes_that_make_the_same_model_the_second_takes_the_firsts_folder(tmp_path, monkeypatch):
    make = tiny.make

    def make_while_another_process_finishes(**options):
        with monkeypatch.context() as patched:
            patched.setattr(tiny, "make", make)
            builtin.resolve(QUICK)
        return make(**options)

    monkeypatch.setattr(tiny, "make", make_while_another_process_finishes)
    folder = builtin.resolve(QUICK)
    assert list((tmp_path / "builtin").iterdir()) == [folder]


def test_a_folder_that_cannot_be_renamed_for_another_reason_is_an_error(tmp_path):
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "unfinished").mkdir()
    with pytest.raises(OSError, match="taken"):
        model_cache.publish(tmp_path / "unfinished", tmp_path / "taken")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("builtin://tinny", "'tinny' is not known.*Did you mean 'tiny'"),
        ("builtin://tiny?task=sorted", "task='sorted' is not known.*Did you mean 'sort'"),
        ("builtin://tiny?layer=2", "option='layer' is not known.*Did you mean 'layers'"),
        ("builtin://tiny?task=copy&digits=4", "option='digits' is not known"),
        ("builtin://tiny?task_options=1", "option='task_options' is not known"),
        ("builtin://tiny?hidden=big", "hidden='big' is not an integer; e.g. hidden=64"),
        ("builtin://tiny?lr=fast", "lr='fast' is not a number"),
        ("builtin://tiny?hidden=48", "hidden=48 is out of range: it must be a positive multiple of 32"),
        ("builtin://tiny?lr=0", "lr=0.0 is out of range"),
        ("builtin://tiny?steps=-1", "steps=-1 is out of range"),
        ("builtin://tiny?sort", "option='sort' is not known"),
        ("builtin://tiny?digits=99", "digits=99 is out of range"),
    ],
)
def test_a_wrong_address_is_refused_with_what_is_allowed(address, message):
    with pytest.raises(ConfigError, match=message):
        builtin.resolve(address)
