"""A full memory ends a run with one message, and what was saved before stays."""

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device

from hwgrpo.cli.main import main
from hwgrpo.errors import RunError
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.training.out_of_memory import _remedies
from hwgrpo.training.update.policy_update import PolicyUpdate
from tests.support.models.tiny import settings
from tests.support.runs.runs import SMALL, metrics, run, small

SHORT = ("trainer.max_steps=3", "trainer.save_every=1", "trainer.validate_at_start=false")


def too_much(*_, **__):
    return torch.empty(10**15, dtype=torch.uint8)


def in_call(number, whole):
    """Let calls pass to `whole`, except for one that asks for more memory than there is."""
    calls = []

    def call(self, *args, **kwargs):
        calls.append(1)
        return too_much() if len(calls) == number else whole(self, *args, **kwargs)

    return call


def test_the_command_says_what_was_done_how_full_it_is_and_what_to_lower(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PolicyUpdate, "accumulate_gradients", too_much)
    (tmp_path / "empty.yaml").write_text("{}\n")
    words = [*SMALL, *SHORT, f"trainer.output_dir={tmp_path / 'run'}", "backend.name=cpu"]
    assert main(["train", str(tmp_path / "empty.yaml"), *words]) == 1
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    first, lower, after = printed[printed.index("hwgrpo: error:") :].splitlines()
    assert first.startswith("hwgrpo: error: out of memory while updating the policy, on cpu (")
    assert "GiB of host memory): [enforce fail" in first or "MiB of host memory): [enforce fail" in first
    assert "DefaultCPUAllocator: can't allocate memory" in first
    assert "lower trainer.tokens_per_micro_batch (now 1024), which changes only the speed; " in lower
    assert "model.gradient_checkpointing=true" in lower
    assert "model.lora.rank=16" in lower
    assert after.strip() == "Started again, the run restarts from step 0 (no checkpoint yet)."


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            ("trainer.strategy=fsdp2", "trainer.fsdp2.sync_every=update"),
            "the full weights and gradients, by trainer.fsdp2.sync_every=micro_batch",
        ),
        (
            ("trainer.strategy=deepspeed", "trainer.deepspeed.sync_every=update"),
            "the full gradients, by trainer.deepspeed.sync_every=micro_batch",
        ),
        (("model.lora.rank=4",), "the base model's weights, by model.quantize=nf4"),
        (("model.lora.rank=4", "model.quantize=nf4"), None),
    ],
)
def test_the_remedies_are_those_of_the_settings(words, remedy):
    remedies = _remedies(settings(*words), Device(BACKEND), "update_actor")
    assert [each for each in remedies if "sync_every" in each or "quantize" in each] == ([remedy] if remedy else [])


def test_states_that_are_small_or_on_the_host_already_are_no_remedy():
    for setting, other in (
        ("optim.name=adamw_8bit", "trainer.offload=optimizer"),
        ("trainer.offload=optimizer", "adamw_8bit"),
    ):
        remedies = " ".join(_remedies(settings(setting), Device(BACKEND), "update_actor"))
        assert setting not in remedies
        assert other in remedies


def test_the_checkpoint_before_stays_and_the_run_goes_on_from_it(tmp_path, monkeypatch):
    run(tmp_path / "whole", *SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "generate", in_call(3, LocalEngine.generate))
        with pytest.raises(RunError, match="out of memory while generating, on cpu") as caught:
            run(tmp_path / "cut", *SHORT)
    message = str(caught.value)
    assert "lower rollout.max_sequences (now 256)" in message
    assert "tokens_per_micro_batch" not in message, "rollout does not depend on it"
    assert message.endswith("Started again, the run resumes after step 2.")
    assert run(tmp_path / "cut", *SHORT) == "completed"
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def test_a_rank_that_fails_reads_no_checkpoint_while_the_others_wait_for_its_end(tmp_path, monkeypatch):
    def read(path):
        raise AssertionError(f"{path} was read")

    def full(*_, **__):
        monkeypatch.setattr("hwgrpo.training.checkpoint.checkpoint_files.fingerprint", read)
        return too_much()

    run(tmp_path / "run", *SHORT, "trainer.max_steps=1")
    monkeypatch.setattr(LocalEngine, "generate", full)
    with pytest.raises(RunError, match="resumes after step 1"):
        run(tmp_path / "run", *SHORT)


def test_a_model_that_does_not_fit_is_told_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr("hwgrpo.training.model_setup.load_policy", too_much)
    with pytest.raises(RunError, match=r"out of memory while loading the model.*\n.*model\.lora\.rank=16"):
        run(tmp_path / "run")
    assert not (tmp_path / "run" / ".lock").exists()
    assert not list((tmp_path / "run").glob("*.yaml")), "a first start that fails leaves nothing"


@pytest.mark.parametrize(
    ("function", "saved", "then"),
    [
        ("hwgrpo.training.finish.save_model", "the final model", "resumes after step 3"),
        ("hwgrpo.training.checkpoint.saver.Saver.save", "a checkpoint", "restarts from step 0"),
    ],
)
def test_what_cannot_be_saved_for_memory_is_named(tmp_path, monkeypatch, function, saved, then):
    monkeypatch.setattr(function, too_much)
    with pytest.raises(RunError, match=rf"while saving {saved}(?s:.*){then}"):
        run(tmp_path / "run", *SHORT)


def test_other_errors_pass_as_they_are(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(PolicyUpdate, "accumulate_gradients", broken)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2") as caught:
        run(tmp_path / "run", *SHORT)
    assert not isinstance(caught.value, RunError)


def test_every_setting_it_names_exists():
    words = ("model.gradient_checkpointing=true", "model.lora.rank=16", "algorithm.kl.coef=0")
    numbers = ("trainer.tokens_per_micro_batch=64", "rollout.max_sequences=8", "rollout.max_response_tokens=8")
    assert settings(*words, *numbers).model.lora.rank == 16
    assert small("unused", *words).model.gradient_checkpointing
