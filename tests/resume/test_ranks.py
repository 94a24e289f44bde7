"""Runs of several processes: stopped, failed, and gone on with on other numbers of ranks by other strategies."""

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.training import loop, resume
from hwgrpo.training.checkpoint import checkpoint_files, restore
from hwgrpo.training.run_folder import lock_folder
from hwgrpo.training.strategies.process_group import Processes
from tests.support.numbers.rounding import GENTLE, assert_gradients_close, assert_metrics_close, drift
from tests.support.processes import ranks
from tests.support.runs import runs

FILTERED = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.min_std=0.25",
    "algorithm.filter_groups.max_rounds=2",
    "algorithm.filter_groups.keep_surplus=true",
    "algorithm.filter_groups.replay_groups=8",
    "algorithm.correction.name=token_truncate",
    "trainer.prompts_per_step=8",
)
LORA = ("model.lora.rank=2", "optim.lr=1e-2")


def start(output: Path, way: str, steps: int, *words: str) -> None:
    """Train to `steps` with the strategy and ranks of "STRATEGY RANKS"."""
    strategy, processes = way.split()
    words = (*words, f"trainer.strategy={strategy}", f"trainer.max_steps={steps}", "trainer.validate_at_start=false")
    if strategy == "single":
        assert runs.forked(lambda: runs.run(output, *words)) == 0
    else:
        done = ranks.forked(int(processes), lambda rank: runs.run(output, *words))
        assert done == [0] * int(processes)


def pieces(output: Path, step: int) -> dict[str, list[list[int]]]:
    manifest = json.loads((output / f"checkpoints/step-{step:08d}/manifest.json").read_text())
    return {name: entry["pieces"] for name, entry in manifest["parameters"].items()}


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("ddp 2", "full"),
        ("fsdp2 2", "lora with dropout"),
        pytest.param("ddp 2", "lora with dropout", marks=pytest.mark.slow),
        pytest.param("fsdp2 2", "full", marks=pytest.mark.slow),
    ],
)
def test_going_on_with_as_many_ranks_changes_no_bit(tmp_path: Path, way: str, kind: str):
    words = ("trainer.save_every=1",) if kind == "full" else ("trainer.save_every=1", *LORA, "model.lora.dropout=0.2")
    start(tmp_path / "whole", way, 4, *words)
    start(tmp_path / "parts", way, 2, *words)
    start(tmp_path / "parts", way, 4, *words)
    whole, parts = (steps(tmp_path / each) for each in ("whole", "parts"))
    assert parts == whole
    found, expected = (runs.everything(tmp_path / each) for each in ("parts", "whole"))
    assert found["weights"] == expected["weights"]
    assert found["completions"] == expected["completions"]


def steps(output: Path) -> list[dict]:
    """Return the metrics of training, without the validation at the end of a run."""
    return [line for line in runs.metrics(output) if "actor/grad_norm" in line]


CHAIN = ("single 1", "fsdp2 2", "fsdp2 4", "ddp 2")
FURTHER = (CHAIN[-1], "fsdp2 4", "single 1", "ddp 4", "fsdp2 4", "fsdp2 2")


@pytest.mark.parametrize(
    ("kind", "chain"),
    [
        ("full", CHAIN),
        ("filtered", CHAIN),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("lora", CHAIN), ("full", FURTHER))),
    ],
    ids=["full", "filtered", "lora", "full, further"],
)
def test_each_step_on_other_ranks_by_another_strategy_is_that_of_one_process(
    tmp_path: Path, kind: str, chain: tuple[str, ...]
):
    words = (*GENTLE, *{"lora": ("model.lora.rank=2", "model.lora.dropout=0"), "filtered": FILTERED}.get(kind, ()))
    start(tmp_path / "one", "single 1", len(chain), *words)
    cuts = []
    for step, way in enumerate(chain, start=1):
        start(tmp_path / "several", way, step, *words)
        cuts.append(pieces(tmp_path / "several", step))
    if chain == CHAIN:
        for number, held in zip((1, 2, 4), cuts):
            assert len({rank for parts in held.values() for rank, *_ in parts}) == number
    if kind == "filtered":
        filtered = steps(tmp_path / "one")
        assert min(line["filter_groups/passed_ratio"] for line in filtered) < 1, "every group passes"
        assert max(line["filter_groups/replayed_ratio"] for line in filtered) > 0, "nothing is replayed"
        assert max(line["filter_groups/staleness_max"] for line in filtered) > 0
    if kind == "lora":
        assert min(len(parts) for parts in cuts[2].values()) == 2, "no rank is without a row of some parameter"
    one, several = steps(tmp_path / "one"), steps(tmp_path / "several")
    assert [line["step"] for line in several] == list(range(1, len(chain) + 1))
    assert [line["reward"] for line in several] == [line["reward"] for line in one]
    assert_metrics_close(several, one, drift(len(chain)))
    found, expected = (load_file(tmp_path / run / "final/model.safetensors") for run in ("several", "one"))
    assert_gradients_close(found, expected, drift(len(chain)))


def test_a_signal_to_one_rank_saves_ends_both_cleanly_and_loses_nothing(tmp_path: Path):
    words = ("trainer.save_every=1", "trainer.strategy=fsdp2", "trainer.max_steps=4", "trainer.validate_at_start=false")

    def signalled(rank: int) -> None:
        plain = loop.train_step

        def raising(run: loop.Run, step: int) -> None:
            if (rank, step) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            plain(run, step)

        loop.train_step = raising
        assert runs.run(tmp_path / "run", *words) == "interrupted"

    assert ranks.forked(2, signalled) == [0, 0]
    assert restore.newest(tmp_path / "run/checkpoints")[0].step == 2
    start(tmp_path / "run", "fsdp2 2", 4, *words)
    start(tmp_path / "whole", "fsdp2 2", 4, *words)
    assert runs.everything(tmp_path / "run") == runs.everything(tmp_path / "whole")


def fail_on_rank_1(output: Path) -> None:
    """Let no file of a checkpoint after that of step 2 be written by this process."""
    size = (output / "checkpoints/step-00000002/weights-rank1.safetensors").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, resource.RLIM_INFINITY))


def spoil_the_folder(output: Path) -> None:
    """Let no folder be made among the checkpoints."""
    (output / "checkpoints").rename(output / "aside")
    (output / "checkpoints").write_text("")


@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.parametrize(
    ("rank", "fault", "said"),
    [
        (1, fail_on_rank_1, r"rank 1: .*File too large.* resumes from step-00000002"),
        (0, spoil_the_folder, r"(Not a directory|File exists)"),
    ],
)
def test_a_rank_that_cannot_write_ends_all_with_its_reason(
    tmp_path: Path, rank: int, fault: Callable[[Path], None], said: str, asynchronous: str
):
    output = tmp_path / "run"
    words = ("trainer.save_every=2", "trainer.strategy=ddp", f"trainer.save_async={asynchronous}")

    def failing(own: int) -> None:
        plain = loop.train_step

        def faulty(run: loop.Run, step: int) -> None:
            if step == 3:
                run.saver.wait()
                if own == rank:
                    fault(output)
            plain(run, step)

        loop.train_step = faulty
        with pytest.raises(RunError, match=f"checkpoint of step 4 could not be written.*{said}"):
            runs.run(output, *words)

    assert ranks.forked(2, failing) == [0, 0]
    if (output / "aside").exists():
        (output / "checkpoints").unlink()
        (output / "aside").rename(output / "checkpoints")
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000002"]
    start(output, "ddp 2", 5)


def test_a_folder_that_is_in_use_ends_all_ranks_with_the_same_refusal(tmp_path: Path):
    held = lock_folder(tmp_path / "run")

    def refused(rank: int) -> None:
        with pytest.raises(ConfigError, match="in use by another run"):
            runs.run(tmp_path / "run", "trainer.strategy=ddp")

    assert ranks.forked(2, refused, limit_s=60) == [0, 0]
    held.close()
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("of-two") / "run"
    start(output, "fsdp2 2", 2, "trainer.save_every=1", "trainer.save_final_model=false")
    return output


def swap(folder: Path) -> None:
    (folder / "weights-rank0.safetensors").rename(folder / "w")
    (folder / "weights-rank1.safetensors").rename(folder / "weights-rank0.safetensors")
    (folder / "w").rename(folder / "weights-rank1.safetensors")


def flip(path: Path) -> None:
    """Change a number of the manifest: another position in the data."""
    text = path.read_text()
    assert '"position": 8' in text
    path.write_text(text.replace('"position": 8', '"position": 9'))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a rank's file gone": (
        lambda f: (f / "moments-rank1.safetensors").unlink(),
        "moments-rank1.safetensors is missing",
    ),
    "a rank's file cut": (lambda f: os.truncate(f / "weights-rank1.safetensors", 900), "weights-rank1.* is damaged"),
    "ranks' files swapped": (swap, "weights-rank[01].safetensors is damaged"),
    "a bit of the manifest flipped": (lambda f: flip(f / "manifest.json"), "manifest.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_all_ranks_name_a_damaged_checkpoint_and_take_the_one_before(tmp_path: Path, of_two_ranks: Path, damage: str):
    root = tmp_path / "checkpoints"
    shutil.copytree(of_two_ranks / "checkpoints", root)
    change, said = DAMAGE[damage]
    change(root / "step-00000002")

    def body(rank: int) -> None:
        found, problems = restore.newest(root, Processes(torch.device("cpu"), "gloo"))
        assert found is not None
        assert found.step == 1
        (tmp_path / f"said-{rank}").write_text("\n".join(problems))

    assert ranks.forked(2, body) == [0, 0]
    problems = {(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)}
    assert len(problems) == 1
    assert re.search(said, problems.pop())


def test_ranks_that_read_different_manifests_all_refuse_the_checkpoint(tmp_path: Path, of_two_ranks: Path):
    root = tmp_path / "checkpoints"
    shutil.copytree(of_two_ranks / "checkpoints", root)

    def body(rank: int) -> None:
        plain = Path.read_bytes

        def stale(path: Path) -> bytes:
            """Read what this rank's cache of a network disk still holds of the newest manifest."""
            if path == root / "step-00000002/manifest.sha256" and rank == 1:
                raise FileNotFoundError(path)
            content = plain(path)
            is_stale = path == root / "step-00000002/manifest.json" and rank == 1
            return content.replace(b'"position": 8', b'"position": 4') if is_stale else content

        Path.read_bytes = stale
        found, problems = restore.newest(root, Processes(torch.device("cpu"), "gloo"))
        assert found is not None
        assert found.step == 1
        assert "rank 1 reads another content than rank 0" in problems[0]

    assert ranks.forked(2, body) == [0, 0]


def test_all_ranks_agree_that_a_run_is_finished_though_only_the_first_looks(tmp_path: Path):
    output = tmp_path / "run"
    start(output, "ddp 2", 1)

    def looks(rank: int) -> None:
        if rank == 1:
            resume.already_finished = lambda *_, **__: pytest.fail("ranks that look at different times may differ")
        assert runs.run(output, "trainer.strategy=ddp", "trainer.max_steps=1") == "finished"

    assert ranks.forked(2, looks, limit_s=60) == [0, 0]


def test_each_file_of_a_checkpoint_is_read_by_one_rank_when_it_is_verified(tmp_path: Path, of_two_ranks: Path):
    def body(rank: int) -> None:
        plain = checkpoint_files.fingerprint

        def noted(path: Path) -> dict:
            with open(tmp_path / str(rank), "a") as file:
                file.write(f"{path.name}\n")
            return plain(path)

        checkpoint_files.fingerprint = noted
        restore.newest(of_two_ranks / "checkpoints", Processes(torch.device("cpu"), "gloo"))

    assert ranks.forked(2, body) == [0, 0]
    read = [(tmp_path / str(rank)).read_text().split() for rank in (0, 1)]
    manifest = json.loads((of_two_ranks / "checkpoints/step-00000002/manifest.json").read_text())
    assert sorted([*read[0], *read[1]]) == sorted(manifest["files"])
    assert abs(len(read[0]) - len(read[1])) <= 1
