"""A run killed at any point and started again computes what the uninterrupted run computes, bit for bit."""

import json
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from omegaconf import OmegaConf
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hwgrpo.cli.main import main
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.training import loop
from hwgrpo.training.checkpoint import checkpoint_files, restore, writer
from hwgrpo.training.resume import _compare_settings, already_finished
from hwgrpo.training.strategies import held_adamw
from hwgrpo.training.update.policy_update import PolicyUpdate
from tests.support.runs import runs

LORA = ("model.lora.rank=4", "model.lora.dropout=0.1", "algorithm.kl.coef=0.01")
SEVERAL = (
    "trainer.prompts_per_update=2",
    "trainer.epochs_per_batch=2",
    "algorithm.kl.coef=0.01",
    "optim.schedule=cosine",
    "optim.warmup_steps=3",
)
IN_8_BITS = ("optim.name=adamw_8bit", "trainer.prompts_per_update=2")
ON_HOST = "trainer.offload=gradients"
VARIANTS = {
    "full": (),
    "lora with dropout and KL": LORA,
    "several updates and KL": SEVERAL,
    "several updates and an adapted_KL in the reward": (
        *SEVERAL,
        "algorithm.kl.in_reward=true",
        "algorithm.kl.target=1e-3",
        "algorithm.kl.horizon=100",
    ),
    "adapted_entropy": ("trainer.prompts_per_update=2", "algorithm.entropy_target=3.46"),
    "8 bits": IN_8_BITS,
    "bf16 base, all on the host": ("model.lora.rank=4", "model.dtype=bfloat16", ON_HOST),
    "int8 base": ("model.lora.rank=4", "model.quantize=int8"),
    "nf4 base, 8 bits on the host": ("model.lora.rank=4", "model.quantize=nf4", *IN_8_BITS, ON_HOST),
}


@pytest.fixture(scope="module", autouse=True)
def _small_parameters_have_states_in_8_bits_too():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_adamw, "SMALLEST", 1)
        yield


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_step(number: int) -> None:
    """Die inside the last optimizer update of a step, gradients computed and weights not yet changed."""
    plain = PolicyUpdate.accumulate_gradients

    def deadly(self, *arguments):
        result = plain(self, *arguments)
        if self.updates_done + 1 == number * self.total_updates // 6:
            die()
        return result

    PolicyUpdate.accumulate_gradients = deadly


def kill_before(name: str, occurrence: int, module: Any = checkpoint_files) -> None:
    """Die before the given call of a function that writes checkpoints."""
    plain = getattr(module, name)
    calls = [0]

    def deadly(*arguments):
        calls[0] += 1
        if calls[0] == occurrence:
            die()
        return plain(*arguments)

    setattr(module, name, deadly)


def kill_amid_a_file(occurrence: int) -> None:
    """Die with half of a checkpoint's file on disk."""
    plain = checkpoint_files.write_tensors
    calls = [0]

    def deadly(path: Path, tensors):
        written = plain(path, tensors)
        calls[0] += 1
        if calls[0] == occurrence:
            os.truncate(path, path.stat().st_size // 2)
            die()
        return written

    checkpoint_files.write_tensors = deadly


def kill_between_log_and_checkpoint() -> None:
    """Die after step 4 has been logged, before its checkpoint is begun."""

    def deadly(run: loop.Run, step: int) -> None:
        plain(run, step)
        if step == 4:
            die()

    plain = loop.validate_now
    loop.validate_now = deadly


# checkpoints are due after steps 2, 4 and 6; each writes three safetensors, a share, a manifest and its checksum
POINTS: dict[str, Callable[[], None]] = {
    "before the first checkpoint": lambda: kill_in_step(2),
    "in an update after it": lambda: kill_in_step(4),
    "amid the second checkpoint's model": lambda: kill_amid_a_file(5),
    "before its manifest": lambda: kill_before("write_text", 5),
    "before its manifest's checksum": lambda: kill_before("write_text", 6),
    "before its rename": lambda: kill_before("sync_folder", 3, writer),
    "after its rename": lambda: kill_before("sync_folder", 4, writer),
    "before the first one is removed": lambda: kill_before("remove", 1),
    "between log and checkpoint": kill_between_log_and_checkpoint,
}


def run_to_the_end(folder: Path, *words: str) -> dict:
    """Return the results of a run that nothing interrupts, whose six steps all train."""
    assert runs.forked(lambda: runs.run(folder, *words)) == 0
    found = runs.everything(folder)
    norms = [line["actor/grad_norm"] for line in found["metrics"] if "actor/grad_norm" in line]
    assert len(norms) == 6
    assert min(norms) > 0, "nothing was learned, so nothing is tested"
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory):
    done: dict[str, dict] = {}

    def results(variant: str) -> dict:
        if variant not in done:
            words = (*VARIANTS[variant], "trainer.save_every=2", "trainer.validate_every=2")
            done[variant] = run_to_the_end(tmp_path_factory.mktemp("whole") / "run", *words)
        return done[variant]

    return results


def assert_resumes(folder: Path, expected: dict, point: str, *words: str) -> None:
    """Kill a run at a point, resume it, and compare its results with those of an uninterrupted one."""

    def doomed() -> None:
        POINTS[point]()
        runs.run(folder, *words)

    assert runs.forked(doomed) == -signal.SIGKILL
    assert runs.forked(lambda: runs.run(folder, *words)) == 0
    found = runs.everything(folder)
    assert found["metrics"] == expected["metrics"]
    assert found["completions"] == expected["completions"]
    assert found["weights"] == expected["weights"]
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("variant", "point"),
    [("full", point) for point in POINTS]
    + [(variant, "in an update after it") for variant in VARIANTS if variant != "full"],
)
def test_killed_and_resumed_equals_uninterrupted_bitwise(tmp_path: Path, uninterrupted, variant: str, point: str):
    words = (*VARIANTS[variant], "trainer.save_every=2", "trainer.validate_every=2")
    assert_resumes(tmp_path / "run", uninterrupted(variant), point, *words)


def test_a_run_on_quantized_experts_resumes_bitwise(tmp_path: Path):
    tokenizer = character_tokenizer("")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, vocab_size=len(tokenizer)))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "mixture")
    words = (f"model.path={tmp_path}/mixture", "model.lora.rank=4", "model.quantize=nf4", "trainer.save_every=2")
    words += ("rollout.n=12",)  # one of its many random responses is better than the others
    expected = run_to_the_end(tmp_path / "whole", *words)
    assert_resumes(tmp_path / "run", expected, "in an update after it", *words)


def test_a_run_resumes_with_states_in_8_bits_and_with_them_in_fp32_again(tmp_path: Path):
    for steps, name in enumerate(("adamw", "adamw_8bit", "adamw"), 1):
        words = (f"optim.name={name}", f"trainer.max_steps={steps}", "trainer.save_every=1")
        assert runs.forked(lambda words=words: runs.run(tmp_path / "run", *words)) == 0
    assert [line["step"] for line in runs.metrics(tmp_path / "run") if "actor/loss" in line] == [1, 2, 3]


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, uninterrupted, capfd):
    words = ("trainer.save_every=2", "trainer.validate_every=2")
    expected = uninterrupted("full")
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words, "trainer.max_steps=4")) == 0
    newest = tmp_path / "run/checkpoints/step-00000004/weights-rank0.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words, "observe.progress=plain")) == 0
    assert "step-00000004/weights-rank0.safetensors is damaged" in capfd.readouterr().out
    assert runs.everything(tmp_path / "run")["weights"] == expected["weights"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_ends_cleanly_and_loses_nothing(tmp_path: Path, uninterrupted, number: int):
    words = ("trainer.save_every=2", "trainer.validate_every=2")

    def signalled() -> None:
        plain = PolicyUpdate.accumulate_gradients

        def raising(self, *arguments):
            if self.updates_done == 2:
                os.kill(os.getpid(), number)
            return plain(self, *arguments)

        PolicyUpdate.accumulate_gradients = raising
        assert runs.run(tmp_path / "run", *words) == "interrupted"

    assert runs.forked(signalled) == 0
    assert restore.newest(tmp_path / "run/checkpoints")[0].step == 3
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words)) == 0
    found, expected = runs.everything(tmp_path / "run"), uninterrupted("full")
    assert found["metrics"] == expected["metrics"]
    assert found["weights"] == expected["weights"]


def test_never_resuming_refuses_a_folder_that_holds_a_run(tmp_path: Path):
    assert runs.forked(lambda: runs.run(tmp_path / "run", "trainer.max_steps=1")) == 0
    with pytest.raises(ConfigError, match="contains another run"):
        runs.run(tmp_path / "run", "trainer.resume=never")


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=31&batch=32&digits=3", "model.path"),
        ("model.lora.alpha=1", "model.lora.alpha=1.0"),
        ("model.lora.rank=3", "model.lora.rank=3"),
        ("trainer.seed=7", "trainer.seed=7"),
    ],
)
def test_settings_that_the_weights_belong_to_cannot_change_on_resume(tmp_path: Path, word: str, part: str):
    lora = () if word.startswith("model.path") else ("model.lora.rank=2",)
    assert runs.forked(lambda: runs.run(tmp_path / "run", *lora, "trainer.max_steps=1")) == 0
    with pytest.raises(ValueError, match=part) as error:
        runs.run(tmp_path / "run", *lora, "trainer.max_steps=2", word)
    assert "output_dir" in str(error.value)


@pytest.mark.parametrize(("schedule", "steps"), [("constant", ""), ("linear", ", trainer.max_steps 1 -> 2")])
def test_other_settings_may_change_and_are_named(tmp_path: Path, capfd, schedule: str, steps: str):
    schedule = f"optim.schedule={schedule}"
    assert runs.forked(lambda: runs.run(tmp_path / "run", schedule, "trainer.max_steps=1")) == 0
    words = (schedule, "trainer.max_steps=2", "optim.lr=0.5", "observe.progress=plain")
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words)) == 0
    assert f"changed since the checkpoint: optim.lr 0.001 -> 0.5{steps}\n" in capfd.readouterr().out


def test_a_run_killed_after_its_last_checkpoint_makes_what_is_missing_at_its_end(tmp_path: Path, capfd):
    assert runs.forked(lambda: runs.run(tmp_path / "run", "trainer.max_steps=2")) == 0
    expected = (tmp_path / "run/config.yaml").read_text(), runs.everything(tmp_path / "run")
    (tmp_path / "run/final").rename(tmp_path / "elsewhere")
    words = ("trainer.max_steps=1", "optim.lr=0.5", "observe.progress=plain")
    assert already_finished(runs.small(tmp_path / "run", *words)) is None
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words)) == 0
    shown = capfd.readouterr().out
    assert "has all its 2 steps; its missing outputs" in shown
    assert "2 of 2 steps" in shown
    assert ((tmp_path / "run/config.yaml").read_text(), runs.everything(tmp_path / "run")) == expected


def test_a_setting_that_the_checkpoint_does_not_know_yet_has_not_changed(tmp_path: Path):
    output = tmp_path / "run"
    assert runs.forked(lambda: runs.run(output, "trainer.max_steps=1")) == 0
    checkpoint, _ = restore.newest(output / "checkpoints")
    assert checkpoint is not None
    saved = OmegaConf.create(checkpoint.manifest["state"]["config"])
    del saved.rollout["graphs"]
    checkpoint.manifest["state"]["config"] = OmegaConf.to_yaml(saved)
    assert _compare_settings(checkpoint, runs.small(output)) == []
    changed = _compare_settings(checkpoint, runs.small(output, "rollout.graphs=true"))
    assert changed == ["changed since the checkpoint: rollout.graphs None -> True"]


def test_only_a_run_with_all_that_its_end_makes_is_finished(tmp_path: Path):
    output = tmp_path / "run"
    assert runs.forked(lambda: runs.run(output, "trainer.max_steps=2", "model.lora.rank=2")) == 0

    def said(*words: str) -> str | None:
        return already_finished(runs.small(output, "model.lora.rank=2", *words))

    assert said("trainer.max_steps=2") == (
        f"{output} is finished: 2 of 2 steps are done, the model is in {output}/final and {output}/final-adapter. "
        "Nothing was trained.\n"
        "To continue, set trainer.max_steps to more than 2; to train from step 0, set trainer.output_dir to another "
        "folder."
    )
    assert "2 steps are done, trainer.max_steps=1 needs 1," in str(said("trainer.max_steps=1"))
    eight = ("trainer.max_steps=0", "data.max_rows=8")
    allowed = already_finished(runs.small(output, "model.lora.rank=2", *eight), allow_changes=True)
    assert "more than 1;" in str(allowed).partition("trainer.epochs")[2]
    assert said(*eight, "trainer.epochs=2") is None
    assert said("trainer.max_steps=3") is None
    elsewhere = tmp_path / "elsewhere"
    assert runs.forked(lambda: runs.run(elsewhere, "trainer.max_steps=2", "model.lora.rank=2")) == 0
    assert said("trainer.max_steps=2", f"trainer.resume={elsewhere}/checkpoints/step-00000002") is None
    closing = (output / "summary.json").read_text()
    for other in ('{"status": "interrupted", "steps": 2}', '{"status": "completed", "steps": 1}', "[]", "{", None):
        (output / "summary.json").unlink()
        if other is not None:
            (output / "summary.json").write_text(other)
        assert said("trainer.max_steps=2") is None, other
        (output / "summary.json").write_text(closing)
    (output / "final-adapter").rename(output / "moved")
    assert said("trainer.max_steps=2") is None
    assert str(said("trainer.max_steps=2", "trainer.save_final_model=false")).startswith(
        f"{output} is finished: 2 of 2 steps are done. Nothing"
    )


OTHERS = {
    "optim.lr=0.5": "optim.lr 0.001 -> 0.5",
    "rollout.engine=vllm": "rollout.engine 'local' -> 'vllm'",
    "reward.functions=[exact_match]": "reward.functions.0.name",
    "reward.functions.0.kwargs={a: 1}": "reward.functions.0.kwargs.a None -> 1",
    "algorithm.kl.coef=0.1": "algorithm.kl.coef 0.0 -> 0.1",
    "trainer.seed=7": "trainer.seed 0 -> 7",
    "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=31&batch=32&digits=3": "model.path",
    "data.train=task://sort?digits=4": "data.train",
    "data.max_prompt_tokens=15": "data.max_prompt_tokens 16 -> 15",
}
ALIKE = (
    "observe.loggers=[jsonl,tensorboard]",
    "observe.progress=plain",
    "trainer.save_every=1",
    "trainer.threads=2",
    "trainer.strategy=ddp",
    "trainer.validation_n=1",
    "kernels.strict=true",
    "backend.name=cpu",
    "model.attention=eager",
    "trainer.max_steps=1",
)


def test_a_finished_run_of_other_settings_or_data_is_an_error_that_names_them(tmp_path: Path):
    output, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    write_rows(rows, first="134")
    own = ("trainer.max_steps=2", f"data.train={rows}")
    assert runs.forked(lambda: runs.run(output, *own)) == 0
    for word in ALIKE:
        assert "Nothing was trained" in str(already_finished(runs.small(output, *own, word))), word
    for word, problem in OTHERS.items():
        config = runs.small(output, *own, word)
        with pytest.raises(ConfigError, match=re.escape(problem)) as error:
            already_finished(config)
        assert "--allow-finished" in str(error.value)
        if word.startswith(("optim", "data.train")):
            assert "Nothing was trained" in str(already_finished(config, allow_changes=True))
    both = runs.small(output, *own, "optim.lr=0.5", "trainer.seed=7")
    with pytest.raises(ConfigError, match=r"optim\.lr .*, trainer\.seed "):
        already_finished(both)
    assert already_finished(runs.small(output, *own, "optim.lr=0.5", "trainer.max_steps=3")) is None
    write_rows(rows, first="143")
    with pytest.raises(ConfigError, match=r"data\.train='.*rows\.jsonl' has changed since"):
        already_finished(runs.small(output, *own))
    misspelt = runs.small(output, *own)
    misspelt.data.train = str(tmp_path / "rwos.jsonl")
    (problem,) = make_plan(misspelt, BACKEND, 1).problems
    assert "no such file or folder. Did you mean" in problem


def test_the_command_exits_with_2_for_a_finished_run_of_other_settings_unless_that_is_allowed(tmp_path: Path, capfd):
    output = tmp_path / "run"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{}")
    assert runs.forked(lambda: runs.run(output, "trainer.max_steps=1")) == 0

    def code(*words: str) -> int:
        small = [*runs.SMALL, f"trainer.output_dir={output}", "trainer.max_steps=1", "backend.name=cpu"]
        return runs.forked(lambda: os._exit(main(["train", str(recipe), *small, *words])))

    assert code() == 0
    assert code("optim.lr=0.5") == 2
    assert "optim.lr 0.001 -> 0.5" in capfd.readouterr().err
    assert code("optim.lr=0.5", "--dry-run") == 2
    assert code("optim.lr=0.5", "--allow-finished") == 0
    assert code("optim.lr=0.5", "--allow-finished", "--dry-run") == 0
    assert "Nothing was trained" in capfd.readouterr().out


def write_rows(path: Path, *, first: str, last: str = "156") -> None:
    rows = [
        {"prompt": "sort 314=", "answer": first},
        *({"prompt": f"sort {i}=", "answer": "1"} for i in range(100, 110)),
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "sort 561=", "answer": last}]))


def test_data_that_is_not_what_it_was_is_told_with_both(tmp_path: Path, capfd):
    train, held_out = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    write_rows(train, first="134")
    write_rows(held_out, first="134")
    words = (f"data.train={train}", f"data.validation={held_out}", "observe.progress=plain")

    def shown(steps: int) -> list[str]:
        assert runs.forked(lambda: runs.run(tmp_path / "run", *words, f"trainer.max_steps={steps}")) == 0
        return [line for line in capfd.readouterr().out.splitlines() if "has changed since" in line]

    assert shown(1) == []
    assert shown(2) == []
    write_rows(train, first="134", last="165")
    (line,) = shown(3)
    both = re.fullmatch(
        rf"warning: data.train='{train}' has changed since the checkpoint: 12 rows \(sha256 (\w{{12}})\) then, "
        r"12 rows \(sha256 (\w{12})\) now; the run continues with the present one",
        line.strip(),
    )
    assert both is not None, line
    assert both[1] != both[2]
    assert shown(4) == [], "the checkpoint after it is of the data as it is now"
    write_rows(held_out, first="143")
    assert "data.validation=" in shown(5)[0]
    newest = tmp_path / "run/checkpoints/step-00000005/manifest.json"
    manifest = json.loads(newest.read_text())
    del manifest["state"]["data"]  # as checkpoints of earlier versions are
    newest.write_text(json.dumps(manifest))
    newest.with_name("manifest.sha256").unlink()
    write_rows(train, first="134")
    assert shown(6) == []


def test_going_back_to_an_older_checkpoint_sets_the_later_ones_aside(tmp_path: Path, uninterrupted):
    words = ("trainer.save_every=2", "trainer.validate_every=2", "trainer.keep_checkpoints=1")
    root = tmp_path / "run/checkpoints"
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words, "trainer.keep_checkpoints=9")) == 0
    back = f"trainer.resume={root / 'step-00000002'}"
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words, back)) == 0
    assert sorted(p.name for p in root.iterdir()) == [
        "step-00000004.abandoned",
        "step-00000006",
        "step-00000006.abandoned",
    ]
    assert runs.everything(tmp_path / "run") == uninterrupted("full")


def test_a_misspelt_resume_is_corrected(tmp_path: Path):
    with pytest.raises(ConfigError, match="Did you mean 'never'"):
        runs.run(tmp_path / "run", "trainer.resume=nevr")


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path):
    words = ("trainer.save_every=1", "trainer.keep_checkpoints=3")
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words)) == 0
    kept = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000005", "step-00000006"]


def test_a_full_disk_names_the_checkpoint_that_is_left(tmp_path: Path):
    output = tmp_path / "run"

    def run() -> None:
        plain = loop.train_step

        def limited(parts: loop.Run, step: int) -> None:
            if step == 3:
                parts.saver.wait()
                size = (output / "checkpoints/step-00000002/weights-rank0.safetensors").stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, resource.RLIM_INFINITY))
            plain(parts, step)

        loop.train_step = limited
        with pytest.raises(RunError, match=r"step 4 could not be written.*File too large.*from step-00000002"):
            runs.run(output, "trainer.save_every=2")

    assert runs.forked(run) == 0
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000002"]
    assert runs.forked(lambda: runs.run(output, "trainer.save_every=2")) == 0
