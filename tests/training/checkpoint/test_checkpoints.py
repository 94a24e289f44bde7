"""Checkpoints: written while the training goes on, whole or not at all, and refused where they are damaged."""

import json
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from hwgrpo_backends.device import Device
from torch import nn

from hwgrpo.errors import CheckpointError, RunError
from hwgrpo.models.lora import apply_lora
from hwgrpo.training.checkpoint import checkpoint_files, restore, shard_files
from hwgrpo.training.checkpoint import saver as checkpoint_saver
from hwgrpo.training.checkpoint.saver import Saver
from hwgrpo.training.strategies.param_shard import ParamShard, copy_to_host, full_param_shards
from tests.support.models.tiny import settings, tiny_qwen3
from tests.support.runs.full_disk import largest_file, small_disk
from tests.support.runs.saving import Gate, flipped, load, policy_of, saved, saver, trained, update


def values(strategy) -> dict[str, torch.Tensor]:
    """Return copies of all that a checkpoint holds of a strategy."""
    found = {}
    for shard in strategy.param_shards():
        found |= {f"{shard.name}.{key}": value.clone() for key, value in shard.values.items()}
        found[f"{shard.name}.step"] = shard.step.clone()
    return found


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Return what a checkpoint of the tiny model gives to a new one of other weights."""
    other = trained(policy_of(tiny_qwen3(seed=9)), updates=0)
    load(folder, other, other.policy.model)
    return values(other)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def waited_for(condition) -> bool:
    """Look until something is so, for a minute at most."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def strategy():
    return trained(policy_of(tiny_qwen3()))


def test_a_checkpoint_gives_back_weights_and_moments_bit_for_bit(tmp_path: Path, strategy):
    update(strategy)
    expected = values(strategy)
    assert {key.rpartition(".")[2] for key in expected} == {"parameter", "exp_avg", "exp_avg_sq", "step"}
    assert {float(value) for key, value in expected.items() if key.endswith(".step")} == {2.0}
    folder = saved(tmp_path, strategy)
    assert same(loaded(folder), expected)
    assert names(folder) == [
        "manifest.json", "manifest.sha256",
        "moments-rank0.safetensors", "rng-rank0.safetensors", "weights-rank0.safetensors",
    ]  # fmt: skip


def test_training_goes_on_while_a_slow_disk_writes_what_was_there_at_the_end_of_the_step(
    tmp_path: Path, strategy, monkeypatch: pytest.MonkeyPatch
):
    gate, notes = Gate(monkeypatch), []
    own = saver(tmp_path, strategy, note=notes.append)
    expected = values(strategy)
    own.save(1)
    assert gate.reached.wait(60)
    for _ in range(3):
        update(strategy)
        own.poll()
    assert names(tmp_path) == [".step-00000001.partial"]
    assert notes == []
    assert not same(values(strategy), expected)
    gate.open()
    folder = tmp_path / "step-00000001"
    assert waited_for(folder.exists)
    own.wait()
    assert notes == [f"saved {folder}"]
    assert same(loaded(folder), expected)


@pytest.mark.parametrize("last", [False, True])
def test_copies_to_the_host_that_have_not_arrived_are_waited_for(
    tmp_path: Path, strategy, last: bool, monkeypatch: pytest.MonkeyPatch
):
    """A checkpoint of states that are held on the host was written before their last copies had arrived."""
    wanted, late = values(strategy), []

    def copied(shards: list[ParamShard]) -> list[ParamShard]:
        for value in (value for shard in shards for value in shard.values.values()):
            late.append((value, value.clone()))
            value.fill_(torch.nan)
        return shards

    def synchronize(_: Device) -> None:
        while late:
            value, content = late.pop()
            value.copy_(content)

    monkeypatch.setattr(Device, "synchronize", synchronize)
    monkeypatch.setattr(checkpoint_saver, "copy_to_host", lambda shards: copied(copy_to_host(shards)))
    if last:
        copied(strategy.owned_shards())
    own = saver(tmp_path, strategy)
    own.save(5, last=last)
    own.wait()
    assert same(loaded(checkpoint_files.folder_of(tmp_path, 5)), wanted)


def test_a_disk_that_hangs_ends_the_run_after_the_time_limit(tmp_path: Path, strategy, monkeypatch: pytest.MonkeyPatch):
    gate = Gate(monkeypatch)
    own = saver(tmp_path, strategy, timeout=0.2)
    own.save(1)
    assert gate.reached.wait(60)
    with pytest.raises(RunError, match=r"waited 0.2 s for the files of checkpoint 1: .*trainer.process_group_timeout"):
        own.wait()
    gate.open()


def test_a_finished_checkpoint_is_reported_once_and_without_waiting(tmp_path: Path, strategy):
    notes = []
    own = saver(tmp_path, strategy, note=notes.append)
    own.save(1)
    assert waited_for(lambda: own.poll() is None and notes != [])
    own.poll()
    own.wait()
    assert notes == [f"saved {tmp_path}/step-00000001"]


def test_a_checkpoint_waits_for_the_one_before(tmp_path: Path, strategy, monkeypatch: pytest.MonkeyPatch):
    plain, at_once, order = checkpoint_files.write_tensors, [0], []

    def counted(path: Path, tensors):
        at_once[0] += 1
        assert at_once[0] == 1, "two checkpoints are written at the same time"
        time.sleep(0.05)
        order.append(path.parent.name)
        at_once[0] -= 1
        return plain(path, tensors)

    monkeypatch.setattr(checkpoint_files, "write_tensors", counted)
    own = saver(tmp_path, strategy, keep=9)
    for step in (1, 2, 3):
        own.save(step)
    own.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert order == [f".step-0000000{step}.partial" for step in (1, 1, 1, 2, 2, 2, 3, 3, 3)]


@pytest.mark.parametrize(("asynchronous", "last"), [(False, False), (True, True)])
def test_one_that_is_waited_for_is_whole_at_once(tmp_path: Path, strategy, asynchronous: bool, last: bool):
    saver(tmp_path, strategy, asynchronous=asynchronous).save(3, last=last)
    assert names(tmp_path) == ["step-00000003"]
    assert same(loaded(tmp_path / "step-00000003"), values(strategy))


def test_all_of_it_is_on_the_disk_before_it_has_its_name(tmp_path: Path, strategy, monkeypatch: pytest.MonkeyPatch):
    synced, order = os.fsync, []
    named = os.replace

    def fsync(descriptor: int) -> None:
        order.append(os.stat(descriptor).st_ino)
        synced(descriptor)

    def replace(source, target) -> None:
        named(source, target)
        if Path(target) == tmp_path / "step-00000005":
            order.append("named")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    folder = saved(tmp_path, strategy)
    before = order[: order.index("named")]
    assert {path.stat().st_ino for path in folder.iterdir()} <= {*before}
    assert before[-1] == folder.stat().st_ino
    assert order[order.index("named") + 1 :] == [tmp_path.stat().st_ino]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_are_kept(tmp_path: Path, strategy, keep: int, asynchronous: bool):
    own = saver(tmp_path, strategy, keep=keep, asynchronous=asynchronous)
    for step in range(1, 6):
        own.save(step)
    own.wait()
    assert names(tmp_path) == [f"step-{step:08d}" for step in range(6 - keep, 6)]


def save_and_raise(own: Saver, error: type[BaseException]) -> None:
    with own:
        own.save(1)
        raise error


def test_an_error_waits_for_the_checkpoint_under_way(tmp_path: Path, strategy):
    own = saver(tmp_path, strategy)
    with pytest.raises(ZeroDivisionError):
        save_and_raise(own, ZeroDivisionError)
    assert names(tmp_path) == ["step-00000001"]


def test_an_error_does_not_wait_for_ever_and_a_second_interrupt_not_at_all(
    tmp_path: Path, strategy, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate(monkeypatch)
    for grace, error in ((0.1, ZeroDivisionError), (1e6, KeyboardInterrupt)):
        monkeypatch.setattr(checkpoint_saver, "GRACE_S", grace)
        own = saver(tmp_path / error.__name__, strategy)
        with pytest.raises(error):
            save_and_raise(own, error)
        assert names(tmp_path / error.__name__) == [".step-00000001.partial"]
    gate.open()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_gets_its_room_back(
    tmp_path: Path, strategy, asynchronous: bool
):
    size = sum(path.stat().st_size for path in saved(tmp_path / "elsewhere", strategy).iterdir())
    with small_disk(tmp_path / "disk", size * 3 // 2) as disk:
        own = saver(disk / "checkpoints", strategy, asynchronous=asynchronous)
        own.save(1, last=True)
        expected, free = values(strategy), shutil.disk_usage(disk).free
        update(strategy)
        with pytest.raises(RunError, match=r"step 2 could not be written to .*No space left.* from step-00000001"):
            save_and_wait(own, 2)
        assert names(disk / "checkpoints") == ["step-00000001"]
        assert shutil.disk_usage(disk).free == free
        assert same(loaded(disk / "checkpoints/step-00000001"), expected)


def save_and_wait(own: Saver, step: int) -> None:
    own.save(step)
    own.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_that_cannot_be_written_ends_the_run_with_what_is_left_and_nothing_half(
    tmp_path: Path, strategy, asynchronous: bool
):
    own = saver(tmp_path, strategy, asynchronous=asynchronous)
    own.save(1, last=True)
    with largest_file(4096), pytest.raises(RunError, match=r"step 2 .*File too large.* resumes from step-00000001"):
        save_and_wait(own, 2)
    assert names(tmp_path) == ["step-00000001"]
    restore.verify(tmp_path / "step-00000001")
    own.save(2, last=True)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_failure_in_the_background_is_reported_at_the_end_of_the_next_step(tmp_path: Path, strategy):
    own = saver(tmp_path, strategy)
    with largest_file(4096):
        own.save(1)
        with pytest.raises(RunError, match=r"step 1 .*File too large.* resumes from the start"):
            waited_for(lambda: own.poll())
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path, strategy):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(RunError, match=r"step 1 could not be written.*(Not a directory|File exists)"):
        saver(tmp_path / "checkpoints", strategy).save(1)


def test_what_a_kill_left_of_a_checkpoint_is_not_mistaken_for_one(tmp_path: Path, strategy):
    saved(tmp_path, strategy, 1)
    os.rename(saved(tmp_path, strategy, 2), tmp_path / ".step-00000002.partial")
    found, problems = restore.newest(tmp_path)
    assert found is not None
    assert (found.step, problems) == (1, [])
    saver(tmp_path, strategy).save(2, last=True)
    restore.verify(tmp_path / "step-00000002")
    os.rename(tmp_path / "step-00000002", tmp_path / ".step-00000003.partial")
    assert restore.set_aside_later(tmp_path, 1) == []
    assert names(tmp_path) == ["step-00000001"]


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_a_parameter(tmp_path: Path, strategy):
    checkpoint = restore.verify(saved(tmp_path, strategy))
    lora = apply_lora(tiny_qwen3(), settings("model.lora.rank=2").model.lora)
    with pytest.raises(CheckpointError, match="parameters are in one and not in the other"):
        restore.restore_weights(checkpoint, lora)
    with pytest.raises(CheckpointError, match=r"embed_tokens.*shape \(37, 32\).*\(40, 32\)"):
        restore.restore_weights(checkpoint, tiny_qwen3(vocab=40))


@pytest.mark.parametrize(
    "name", ["weights-rank0.safetensors", "moments-rank0.safetensors", "rng-rank0.safetensors", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_any_damage_to_a_checkpoint_is_seen_and_named(tmp_path: Path, strategy, name: str, damage: str):
    folder = saved(tmp_path, strategy)
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-7])
    else:
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        restore.verify(folder)
    assert restore.newest(tmp_path)[0] is None


def test_every_flipped_bit_of_a_manifest_and_of_its_checksum_is_refused_with_the_files_name(tmp_path: Path, strategy):
    folder, generator = saved(tmp_path, strategy), random.Random(0)
    for name in ("manifest.json", "manifest.sha256"):
        content = (folder / name).read_bytes()
        for bit in generator.sample(range(8 * len(content)), 100):
            with flipped(folder / name, bit), pytest.raises(CheckpointError, match=re.escape(f"{folder}/manifest.")):
                restore.verify(folder)
    restore.verify(folder)


def test_a_checkpoint_without_a_checksum_of_its_manifest_is_used_with_a_note(tmp_path: Path, strategy):
    folder = saved(tmp_path, strategy)
    assert restore.verify(folder).note is None
    (folder / "manifest.sha256").unlink()
    note = restore.verify(folder).note
    assert note is not None
    assert str(folder / "manifest.sha256") in note
    assert same(loaded(folder), values(strategy))


def test_a_checksum_that_cannot_be_read_is_not_a_missing_one(tmp_path: Path, strategy):
    folder = saved(tmp_path, strategy)
    (folder / "manifest.sha256").unlink()
    (folder / "manifest.sha256").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.sha256 cannot be read"):
        restore.verify(folder)


def test_settings_that_name_a_variable_which_is_not_set_here_are_not_damaged(tmp_path: Path, strategy):
    path = saved(tmp_path, strategy) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["state"]["config"] = "token: ${oc.env:HWGRPO_TEST_NOT_SET}"
    path.write_text(json.dumps(manifest))
    path.with_name("manifest.sha256").unlink()
    restore.verify(path.parent)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path, strategy):
    saved(tmp_path, strategy, 5).rename(tmp_path / "step-00000007")
    found, problems = restore.newest(tmp_path)
    assert found is None
    assert "step-00000007/manifest.json is of step 5" in problems[0]
    (tmp_path / "step-00000007").rename(tmp_path / "best")
    assert restore.verify(tmp_path / "best").step == 5


def test_a_file_that_goes_away_between_checking_and_reading_is_named(tmp_path: Path, strategy):
    checkpoint = restore.verify(saved(tmp_path, strategy))
    for name in ("weights-rank0.safetensors", "rng-rank0.safetensors"):
        (checkpoint.folder / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"weights-rank0\.safetensors cannot be read"):
        restore.restore_weights(checkpoint, tiny_qwen3())
    with pytest.raises(CheckpointError, match=r"rng-rank0\.safetensors cannot be read"):
        restore.load_rng(checkpoint, 0)


def test_random_states_that_the_manifest_does_not_name_are_not_read(tmp_path: Path, strategy):
    folder = saved(tmp_path, strategy)
    shutil.copy(folder / "rng-rank0.safetensors", folder / "rng-rank1.safetensors")
    assert restore.load_rng(restore.verify(folder), 1) is None


def first(manifest: dict) -> dict:
    return manifest["parameters"]["model.norm.weight"]


def rename_file(manifest: dict, before: str, after: str) -> None:
    manifest["files"][after] = manifest["files"].pop(before)


MANIFESTS = {
    "a hole": (
        lambda m: first(m).update(pieces=[[0, 0, 8], [0, 16, 16]]),
        "no shard has .*norm.weight from 8 on",
    ),
    "an overlap": (
        lambda m: first(m).update(pieces=[[0, 0, 8], [0, 4, 28]]),
        "no shard has .*norm.weight from 8 on",
    ),
    "not sorted": (
        lambda m: first(m).update(pieces=[[0, 8, 24], [0, 0, 8]]),
        "no shard has .*norm.weight from 0 on",
    ),
    "too little": (lambda m: first(m).update(pieces=[[0, 0, 31]]), "31 of the 32 elements of model.norm.weight"),
    "too much": (lambda m: first(m).update(pieces=[[0, 0, 33]]), "33 of the 32 elements of model.norm.weight"),
    "no shard": (lambda m: first(m).update(pieces=[]), "0 of the 32 elements of model.norm.weight"),
    "another rank": (
        lambda m: first(m).update(pieces=[[1, 0, 32]]),
        "norm.weight is in weights-rank1.safetensors",
    ),
    "another shape": (lambda m: first(m).update(shape=[4, 8, 2]), "32 of the 64 elements of model.norm.weight"),
    "no shape": (lambda m: first(m).pop("shape"), "table of parameters cannot be read"),
    "shards of another kind": (lambda m: first(m).update(pieces=3), "table of parameters cannot be read"),
    "another tensor's": (
        lambda m: m["parameters"].update({"model.norm": m["parameters"].pop("model.norm.weight")}),
        "rank0.safetensors is not the file of the manifest's table: model.norm",
    ),
    "a parameter less": (
        lambda m: m["parameters"].pop("model.norm.weight"),
        "rank0.safetensors is not the file of the manifest's table: model.norm.weight",
    ),
    "no random state": (lambda m: m["files"].pop("rng-rank0.safetensors"), "does not list rng-rank0"),
    "no files": (lambda m: m.update(files=["weights-rank0.safetensors"]), "lacks keys of a manifest"),
    "another format": (lambda m: m.update(schema="hwgrpo.checkpoint/1"), "this version reads hwgrpo.checkpoint/2"),
    "a file above the folder": (
        lambda m: rename_file(m, "rng-rank0.safetensors", "../step-00000001/rng-rank0.safetensors"),
        "leaves the folder",
    ),
    "a file elsewhere": (lambda m: m["files"].update({"/etc/passwd": {}}), "'/etc/passwd' leaves the folder"),
    "a file below the folder": (lambda m: m["files"].update({"a/b": {}}), "'a/b' leaves the folder"),
    "the folder itself": (lambda m: m["files"].update({"..": {}}), "'..' leaves the folder"),
    "a rank that is a path": (lambda m: first(m).update(pieces=[["0/../0", 0, 32]]), "cannot be read"),
    "an endless count": (lambda m: first(m).update(pieces=[[0, 0, 1e999]]), "cannot be read"),
    "updates that are no number": (lambda m: first(m).update(updates=1e999), "cannot be read"),
    "a step below zero": (lambda m: m.update(step=-1), "step=-1"),
    "a step that is a truth": (lambda m: m.update(step=True), "step=True"),
    "ranks without end": (lambda m: m.update(world_size=10**18), "does not list rng-rank1"),
    "no ranks": (lambda m: m.update(world_size=0), "world_size=0"),
    "no sampler": (lambda m: m["state"].pop("sampler"), "state.sampler"),
    "a sampler elsewhere": (lambda m: m["state"]["sampler"].update(position=9), "state.sampler.position=9"),
    "an epoch below zero": (lambda m: m["state"]["sampler"].update(epoch=-1), "state.sampler.epoch=-1"),
    "no updates": (lambda m: m["state"].pop("updates_done"), "state.updates_done"),
    "updates of another kind": (lambda m: m["state"].update(updates_done="4"), "state.updates_done='4'"),
    "skipped of another kind": (lambda m: m["state"].update(skipped_in_a_row=0.5), "state.skipped_in_a_row=0.5"),
    "settings that are no YAML": (lambda m: m["state"].update(config="a: [b"), "state.config"),
    "settings with half a name": (lambda m: m["state"].update(config="a: ${b"), "state.config"),
    "secrets of another kind": (lambda m: m["state"].update(secrets=["a"]), "state.secrets"),
    "a salt that is no number": (lambda m: m["state"].update(secrets={"a": "0g:12"}), "state.secrets"),
    "settings that are a list": (lambda m: m["state"].update(config="- a"), "state.config"),
    "data of another kind": (lambda m: m["state"].update(data={"train": {"rows": "3"}}), "state.data.train"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_is_wrong_is_refused_by_name(tmp_path: Path, strategy, case: str):
    path = saved(tmp_path, strategy) / "manifest.json"
    manifest = json.loads(path.read_text())
    change, said = MANIFESTS[case]
    change(manifest)
    path.write_text(json.dumps(manifest))
    (path.parent / "manifest.sha256").unlink(missing_ok=True)  # as checkpoints of earlier versions are
    with pytest.raises(CheckpointError, match=said) as error:
        restore.verify(path.parent)
    assert str(path.parent) in str(error.value)


class Odd(nn.Module):
    """Parameters of all ranks and of none, tied ones, and one without elements."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scalar = nn.Parameter(torch.randn(()))
        self.vector = nn.Parameter(torch.randn(5))
        self.cube = nn.Parameter(torch.randn(3, 2, 4))
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.tied = self.cube
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)


def moved(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def cut(shards: list[ParamShard], rank: int, ranks: int) -> list[ParamShard]:
    """Cut every shard into runs of ceil(count / ranks) elements, the last ranks' shorter or of none."""
    own = []
    for shard in shards:
        size = -(-shard.count // ranks)
        start, end = min(rank * size, shard.count), min((rank + 1) * size, shard.count)
        parts = {key: value[start:end] for key, value in shard.values.items()}
        own.append(ParamShard(shard.name, shard.shape, start, parts, shard.step))
    return own


@pytest.mark.parametrize("before", [1, 2, 4, 7])
@pytest.mark.parametrize("after", [1, 3, 4, 9])
def test_any_cut_reads_what_any_other_has_written(tmp_path: Path, before: int, after: int):
    module, fresh = Odd(seed=1), Odd(seed=2)
    shards, blank = full_param_shards(module, moved(module)), full_param_shards(fresh, moved(fresh))
    for shard in blank:
        shard.step.fill_(17)
    tables = []
    for rank in reversed(range(before)):  # the table is in the order of elements, not of ranks
        own = cut(shards, rank, before)
        tables.append(shard_files.table_of(own, rank))
        for name, tensors in shard_files.files_of(own, rank).items():
            checkpoint_files.write_tensors(tmp_path / name, tensors)
    table = shard_files.merge_tables(tables)
    files = {path.name for path in tmp_path.iterdir()}
    shard_files.check_table(tmp_path, json.loads(json.dumps(table)), files)
    for name in files:
        shard_files.check_file(tmp_path / name, table)
    shard_files.check_parameters(tmp_path, table, restore.trainable_shapes(fresh))
    for rank in range(after):
        shard_files.read(tmp_path, table, cut(blank, rank, after))
    assert {shard.name for shard in shards} == {"scalar", "vector", "cube", "empty"}
    for old, new in zip(shards, blank, strict=True):
        assert float(new.step) == (17 if old.name == "empty" else 1)
        for key, value in old.values.items():
            assert torch.equal(new.values[key], value), (old.name, key)
