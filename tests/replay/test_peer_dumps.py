"""Steps of TRL and verl: rewards and advantages as the peers compute them, and files that are none."""

import io
import json
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch

from hwgrpo.config import load_config
from hwgrpo.errors import DataError
from hwgrpo.models.loading import load_tokenizer
from hwgrpo.replay.data_proto import ALLOWED, read_data_proto
from hwgrpo.replay.peer_comparison import compare_dump
from hwgrpo.replay.peer_dumps import read_dump
from tests.support.runs import runs
from tests.support.runs.captures import error_of, replay

RECIPE = (
    *("--recipe", "tiny_sort", "rollout.n=4", "algorithm.advantage.eps=1e-4"),
    "reward.functions=[{name: exact_match, weight: 1.0}, {name: length, weight: 0.5}]",
    next(each for each in runs.SMALL if each.startswith("model.path=")),  # a model that other tests have made, too
)
REWARDS, MODEL = RECIPE[-2:]
RESPONSES = ["123", "321", "12", "1234", "5", "579", "57", "579"]
TRUTHS = ["123"] * 4 + ["579"] * 4


def rewards_of_trl() -> dict[str, list[float]]:
    return {
        "exact_match": [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0],
        "length": [0.1, 0.7, -0.3, 0.2, 0.9, 0.4, 0.0, 0.4],
    }


def advantages_of_trl(rewards: dict[str, list[float]], scale: str = "group") -> list[float]:
    """As TRL's grpo_trainer.py: fp32, nansum over functions, unbiased standard deviation plus 1e-4."""
    per_function = torch.tensor([*rewards.values()]).T
    total = (per_function * torch.tensor([1.0, 0.5])).nansum(1).view(-1, 4)
    centred = total - total.mean(1, keepdim=True)
    return (centred / (total.std(1, keepdim=True) + 1e-4) if scale == "group" else centred).flatten().tolist()


def write_trl(path: Path, **changes: Any) -> Path:
    rewards = rewards_of_trl()
    rows = {
        "step": [3] * 8,
        "prompt": ["sort 321"] * 4 + ["sort 975"] * 4,
        "completion": RESPONSES,
        **rewards,
        "advantage": advantages_of_trl(rewards),
    }
    rows = {name: values for name, values in (rows | changes).items() if values is not None}
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    return path


def write_verl(path: Path, change: float = 0.0, **columns: Any) -> Path:
    """As verl's `_dump_generations`, in the order of a batch that was balanced over ranks."""
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    rows = [
        {
            "input": "sort 321" if i < 4 else "sort 975",
            "output": RESPONSES[i],
            "gts": TRUTHS[i],
            "score": float(RESPONSES[i] == TRUTHS[i]) + change * (i == 6),
            "step": 3,
            **columns,
        }
        for i in order
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_advantages_of_trl_are_those_of_its_rewards(tmp_path: Path, capsys):
    report = replay(capsys, write_trl(tmp_path / "completions_00003.parquet"), *RECIPE)
    assert (report["peer"], report["step"], report["passed"]) == ("TRL", 3, True), report
    [stage] = report["stages"]
    assert stage["name"] == "advantages"
    assert stage["tolerance"] < 1e-4
    assert [len(group["advantages"]["here"]) for group in report["groups"]] == [4, 4]
    assert "rewards are not recomputed: the file has no ground truths" in report["notes"]
    assert any("tokens are those of model.path=" in note for note in report["notes"])


@pytest.mark.parametrize(
    "setting", ["algorithm.advantage.eps=1e-2", "algorithm.advantage.std_correction=0", "algorithm.advantage.name=rloo"]
)
def test_another_formula_than_trls_is_named_with_group_and_response(setting: str, tmp_path: Path, capsys):
    recipe = [each for each in RECIPE if not each.startswith("algorithm.")]
    eps = () if setting.startswith(("algorithm.advantage.eps", "algorithm.advantage.name")) else RECIPE[3:4]
    report = replay(capsys, write_trl(tmp_path / "completions_00003.parquet"), *recipe, *eps, setting)
    assert report["first_difference"] == "advantages"
    assert "advantage of group" in report["stages"][0]["tensor"]


def test_a_reward_that_trl_did_not_get_does_not_count(tmp_path: Path, capsys):
    rewards = rewards_of_trl()
    rewards["length"][1] = float("nan")
    path = write_trl(tmp_path / "c.parquet", **rewards, advantage=advantages_of_trl(rewards))
    assert replay(capsys, path, *RECIPE)["passed"]


def test_rewards_of_verl_are_computed_from_its_texts(tmp_path: Path, capsys):
    recipe = (*RECIPE[:3], MODEL, "reward.functions=[exact_match]")
    report = replay(capsys, write_verl(tmp_path / "3.jsonl"), *recipe)
    assert (report["peer"], report["passed"]) == ("verl", True), report
    assert [stage["name"] for stage in report["stages"]] == ["rewards"]
    assert "advantages are not compared: a file of verl has none" in report["notes"][-1]
    assert report["groups"][1]["rewards"] == {"peer": [0.0, 1.0, 0.0, 1.0], "here": [0.0, 1.0, 0.0, 1.0]}
    assert sum(report["groups"][1]["advantages"]["here"]) == pytest.approx(0, abs=1e-6)
    report = replay(capsys, write_verl(tmp_path / "4.jsonl", change=0.5), *recipe)
    assert report["first_difference"] == "rewards"
    assert (report["stages"][0]["tensor"], report["stages"][0]["index"]) == ("reward of group 1, response ", [2])


class DataProto:
    """As verl's class of this name: pickled with its tensors saved by torch."""

    def __init__(self, batch: Any, columns: dict[str, Any], meta: dict[str, Any]) -> None:
        self.batch, self.columns, self.meta = batch, columns, meta

    def __getstate__(self) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
        buffer = io.BytesIO()
        torch.save(self.batch, buffer)
        return buffer.getvalue(), self.columns, self.meta


class TensorDict:
    """As a consolidated TensorDict: one tensor of bytes, and a table with the place of each tensor in it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        leaves, parts, start = {}, [], 0
        for name, tensor in tensors.items():
            data = tensor.contiguous().view(-1).view(torch.uint8)
            padding = -len(data) % 8
            leaves[name] = (str(tensor.dtype), [*tensor.shape], start, start + len(data), padding)
            parts += [data, torch.zeros(padding, dtype=torch.uint8)]
            start += len(data) + padding
        self.parts = {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves}, torch.cat(parts)

    def __reduce__(self) -> Any:
        return sys.modules["tensordict._reductions"]._rebuild_tensordict_files_consolidated, self.parts


def _rebuild_tensordict_files_consolidated(*parts: Any) -> None: ...


class Command:
    """What runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with verl's and tensordict's names while the test writes; `DataProto` belongs to the first."""
    for module, thing in (
        ("verl.protocol", DataProto),
        ("tensordict._reductions", _rebuild_tensordict_files_consolidated),
    ):
        made = ModuleType(module)
        setattr(made, thing.__name__, thing)
        monkeypatch.setitem(sys.modules, module.partition(".")[0], ModuleType(module.partition(".")[0]))
        monkeypatch.setitem(sys.modules, module, made)
        monkeypatch.setattr(thing, "__module__", module)


def objects(values: list[Any]) -> numpy.ndarray:
    array = numpy.empty(len(values), dtype=object)
    array[:] = values
    return array


def write_rollout(folder: Path, **changes: Any) -> Path:
    """Write a step as verl's rollout skip: rewards are the numbers of tokens, which the end of a response counts in."""
    folder.mkdir()
    tokenizer = load_tokenizer(load_config("tiny_sort", [MODEL]).model)
    prompts = [tokenizer.encode(text) for text in ["321"] * 4 + ["75"] * 4]
    responses = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in RESPONSES]
    masks, tensors = [], {}
    for name, rows, width, left in (("prompts", prompts, 4, True), ("responses", responses, 6, False)):
        mask = torch.tensor([[(width - 1 - i if left else i) < len(row) for i in range(width)] for row in rows])
        tensors[name] = torch.zeros(mask.shape, dtype=torch.int64).masked_scatter(
            mask, torch.tensor([token for row in rows for token in row])
        )
        masks.append(mask)
    ends = torch.arange(6) == masks[1].sum(1, keepdim=True) - 1
    tensors["rm_scores"] = torch.where(ends, masks[1].sum(1, keepdim=True).float(), 0.0)
    tensors["attention_mask"] = torch.cat(masks, 1).long()
    columns = {"__num_turns__": numpy.full(8, 2, dtype=numpy.int32), "acc": numpy.array([0.5] * 8)}
    columns |= changes.pop("columns", {})
    meta = {"global_steps": 3, "timing": {"gen": numpy.float64(0.5)}} | changes.pop("meta", {})
    tensors = {name: values for name, values in (tensors | changes).items() if values is not None}
    (folder / "gen_batch.dp").write_bytes(pickle.dumps(DataProto(TensorDict(tensors), columns, meta)))
    truths = {"uid": objects(["a", "b"]), "reward_model": objects([{"ground_truth": each} for each in ("123", "579")])}
    (folder / "new_batch.dp").write_bytes(pickle.dumps(DataProto(TensorDict({"x": torch.zeros(2)}), truths, {})))
    return folder / "gen_batch.dp"


TOKENS = """
def tokens(batch, completions):
    assert [prompt.ground_truth for prompt in batch.prompts] == ["123", "579"]
    return completions.lengths.float()
"""


@pytest.mark.usefixtures("verl")
def test_a_rollout_of_verl_is_compared_with_its_own_tokens(tmp_path: Path, capsys):
    (tmp_path / "tokens.py").write_text(TOKENS)
    recipe = (*RECIPE[:3], MODEL, f"reward.functions=['{tmp_path}/tokens.py:tokens']")
    report = replay(capsys, write_rollout(tmp_path / "genstep_000003"), *recipe)
    assert (report["peer"], report["step"], report["passed"]) == ("verl", 3, True), report
    assert report["notes"][0] == "tokens are those of the file"
    assert [group["prompt"] for group in report["groups"]] == ["321", "75"]
    assert report["groups"][0]["rewards"]["here"] == [4.0, 4.0, 3.0, 5.0], "with the end of each response"


@pytest.mark.usefixtures("verl")
def test_tokens_that_the_policy_did_not_sample_are_those_of_verls_mask(tmp_path: Path):
    path = write_rollout(tmp_path / "genstep_000003")
    config = load_config("tiny_sort", [RECIPE[2], MODEL, "algorithm.advantage.name=opo"])
    tokenizer = load_tokenizer(config.model)
    whole = read_dump(path, (), 4, tokenizer)
    assert whole.sampled is None
    lengths = torch.tensor([len(tokens) for tokens in whole.tokens or ()])
    mask = torch.arange(6) != 1  # the second token of each response was observed, and what is padded is not counted
    shown = read_dump(
        write_rollout(tmp_path / "genstep_000004", response_mask=mask.expand(8, 6).long()), (), 4, tokenizer
    )
    assert shown.sampled == [[True, False, *[True] * (length - 2)] for length in lengths.tolist()]
    compared = [compare_dump(dump, config, tokenizer).groups for dump in (whole, shown)]
    found = [[each["advantages"]["here"] for each in groups] for groups in compared]
    totals = whole.total if whole.total is not None else torch.zeros(0)
    for group, (of_all, of_sampled) in enumerate(zip(*found, strict=True)):
        rewards, tokens = totals[4 * group :][:4], lengths[4 * group :][:4]
        for advantages, counted in ((of_all, tokens), (of_sampled, tokens - 1)):
            baseline = (rewards * counted).sum() / counted.sum()
            wanted = rewards - baseline  # at most 5: fp32 rounds by 3e-7
            assert torch.allclose(torch.tensor(advantages, dtype=torch.float64), wanted, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("verl")
def test_a_rollout_of_verl_with_other_rewards_is_named_with_its_response(tmp_path: Path, capsys):
    path = write_rollout(tmp_path / "genstep_000003")
    report = replay(capsys, path, *RECIPE[:3], MODEL, "reward.functions=[exact_match]")
    assert report["first_difference"] == "rewards"
    assert report["groups"][1]["rewards"]["here"] == [0.0, 1.0, 0.0, 1.0], "texts without the end"
    with_one = [*RECIPE[:2], "rollout.n=2", RECIPE[3], REWARDS, MODEL]
    assert "has 2 prompts" in error_of(capsys, path, *with_one)
    for name in ("rm_scores", "attention_mask"):
        path = write_rollout(tmp_path / name, **{name: None})
        assert f"has no {name}" in error_of(capsys, path, *RECIPE)


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize("place", ["alone", "in the meta information", "in a column", "in the tensors", "as the batch"])
def test_a_pickle_that_names_a_function_is_refused_and_calls_nothing(place: str, tmp_path: Path, capsys):
    command = Command(f"touch {tmp_path}/ran")
    tensors = TensorDict({"x": torch.zeros(1)})
    path = tmp_path / "gen_batch.dp"
    if place == "alone":
        content: Any = command
    elif place == "in the meta information":
        content = DataProto(tensors, {}, {"x": command})
    elif place == "in a column":
        content = DataProto(tensors, {"x": objects([command])}, {})
    elif place == "in the tensors":
        tensors.parts[0]["non_tensors"]["x"] = command
        content = DataProto(tensors, {}, {})
    else:
        content = DataProto(command, {}, {})
    path.write_bytes(pickle.dumps(content))
    error = error_of(capsys, path, *RECIPE)
    assert f"it names {os.system.__module__}.system" in error
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(command))
    assert (tmp_path / "ran").exists(), "the command works"


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float32])
def test_tensors_of_a_rollout_are_read_bit_for_bit(dtype: torch.dtype, tmp_path: Path):
    values = (10 * torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))).to(dtype)
    data = DataProto(TensorDict({"odd": torch.ones(3, dtype=torch.bool), "x": values}), {}, {})
    (tmp_path / "x.dp").write_bytes(pickle.dumps(data))
    assert torch.equal(read_data_proto(tmp_path / "x.dp").tensors["x"], values)
    whole = (tmp_path / "x.dp").read_bytes()
    (tmp_path / "x.dp").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"x\.dp is"):
        read_data_proto(tmp_path / "x.dp")


class Reduced:
    """What is pickled as a call with a state."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def write_columns(path: Path, protocol: int = 4, **columns: Any) -> Path:
    path.write_bytes(pickle.dumps(DataProto(TensorDict({"x": torch.ones(1)}), columns, {}), protocol))
    return path


ARRAY = numpy.zeros(1)
RECONSTRUCT, SCALAR, BUFFER = ARRAY.__reduce__()[0], ARRAY[0].__reduce__()[0], ARRAY.__reduce_ex__(5)[0]
EMPTY = (numpy.ndarray, (0,), b"b")
POINTERS = Reduced(numpy.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 1, 0))
"""A dtype that says to have no objects, of which numpy reads bytes as the addresses of objects."""
FLOAT = numpy.dtype("f8")
ARRAYS = {
    "bytes as addresses": (Reduced(BUFFER, (b"A" * 8, POINTERS, (1,), "C")), "dtype 'V8'"),
    "bytes as addresses, in an array": (
        Reduced(RECONSTRUCT, EMPTY, (1, (1,), POINTERS, False, b"A" * 8)),
        "dtype 'V8'",
    ),
    "bytes as addresses, in a scalar": (objects([Reduced(SCALAR, (POINTERS, b"A" * 8))]), "dtype 'V8'"),
    "bytes of objects": (Reduced(BUFFER, (b"A" * 8, numpy.dtype("O"), (1,), "C")), "dtype O8, with other data"),
    "fields in a name": (Reduced(BUFFER, (b"A" * 8, Reduced(numpy.dtype, ("f4,O",)), (1,), "C")), "dtype 'f4,O'"),
    "a date": (numpy.array(["2026-01-01"], "M8[D]"), "dtype 'M8'"),
    "10^15 numbers": (Reduced(RECONSTRUCT, EMPTY, (1, (10**15,), FLOAT, False, b"")), "with other data"),
    "10^15 empty rows": (Reduced(RECONSTRUCT, EMPTY, (1, (10**15, 0), FLOAT, False, b"")), "with other data"),
    "10^15 objects": (Reduced(RECONSTRUCT, EMPTY, (1, (10**15,), numpy.dtype("O"), False, [])), "with other data"),
    "a negative shape": (Reduced(BUFFER, (b"A" * 8, FLOAT, (-1, -1), "C")), "array of shape (-1, -1)"),
    "an unknown order": (Reduced(BUFFER, (b"A" * 8, FLOAT, (1,), "K")), "with other data"),
    "a call alone": (numpy.ndarray, "numpy.ndarray as a value"),
    "a dtype": (FLOAT, "numpy.dtype as a value"),
    "a number": (1.0, "its column 'x' is no array"),
}


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize(("values", "message"), ARRAYS.values(), ids=ARRAYS)
def test_an_array_is_refused_unless_its_bytes_are_numbers_or_text(values: Any, message: str, tmp_path: Path):
    with pytest.raises(DataError, match=r"x\.dp is not read: it.*give gen_batch\.dp as verl") as error:
        read_data_proto(write_columns(tmp_path / "x.dp", x=values))
    assert message in str(error.value)


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize("protocol", [4, 5])
def test_arrays_of_a_rollout_are_read_as_lists(protocol: int, tmp_path: Path):
    arrays = {
        "integers": numpy.array([1, -2], dtype=">i4"),
        "bytes": numpy.array([1, 255], dtype="u1"),
        "bools": numpy.array([True, False]),
        "texts": numpy.array(["ab", "ü"]),
        "raw": numpy.array([b"ab", b"c"]),
        "complex": numpy.array([1 + 2j]),
        "transposed": numpy.arange(6.0).reshape(2, 3).T,
        "empty": numpy.zeros(0),
        "objects": objects([{"a": [1]}, None]),
        "table": objects([[1], "b", None, 4]).reshape(2, 2).T,
    }
    nested = objects([{"truth": numpy.array(["a", "b"]), numpy.str_("n"): numpy.float64(0.5)}, (numpy.bool_(True),)])
    found = read_data_proto(write_columns(tmp_path / "x.dp", protocol, nested=nested, **arrays)).columns
    assert {name: found[name] for name in arrays} == {name: values.tolist() for name, values in arrays.items()}
    assert found["nested"] == [{"truth": ["a", "b"], "n": 0.5}, (True,)]
    assert [type(each) for each in found["nested"][0].values()] == [list, float]


STATES = {"of a class": b"", "of an instance": b")\x81"}  # NEWOBJ without arguments


@pytest.mark.parametrize("made", STATES.values(), ids=STATES)
@pytest.mark.parametrize("name", [b"numpy\ndtype", b"verl.protocol\nDataProto", b"numpy._core.numeric\n_frombuffer"])
def test_a_pickle_sets_no_attribute_of_what_stands_for_a_name(name: bytes, made: bytes, tmp_path: Path):
    inert = ALLOWED[name.decode().replace("\n", ".")]
    before = dict(vars(inert))
    state = pickle.dumps(({"state": 1}, {"arguments": (2,), "__class__": 3}), 2)[2:-1]  # dict and slots
    (tmp_path / "x.dp").write_bytes(b"\x80\x04c" + name + b"\n" + made + state + b"b.")
    with pytest.raises(DataError, match=r"x\.dp is"):
        read_data_proto(tmp_path / "x.dp")
    assert dict(vars(inert)) == before


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (("torch.float32", [3], 0, 12, 0), "exceeds its bytes"),
        (("torch.float32", [1], -4, 0, 0), "exceeds its bytes"),
        (("torch.float32", [-1, -1], 0, 4, 0), "exceeds its bytes"),
        (("torch.nn", [1], 0, 4, 0), "has dtype 'torch.nn'"),
    ],
)
def test_a_tensor_beyond_its_bytes_is_refused(leaf: Any, message: str, tmp_path: Path):
    tensors = TensorDict({"x": torch.ones(1)})
    tensors.parts[0]["leaves"]["x"] = leaf
    (tmp_path / "x.dp").write_bytes(pickle.dumps(DataProto(tensors, {}, {})))
    with pytest.raises(DataError, match=message):
        read_data_proto(tmp_path / "x.dp")


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize("values", [torch.ones(4), torch.ones(1, dtype=torch.uint8).expand(10**15), [1]])
def test_bytes_of_tensors_must_be_there(values: Any, tmp_path: Path):
    tensors = TensorDict({"x": torch.ones(1)})
    tensors.parts = (tensors.parts[0], values)
    (tmp_path / "x.dp").write_bytes(pickle.dumps(DataProto(tensors, {}, {})))
    with pytest.raises(DataError, match="no TensorDict of bytes"):
        read_data_proto(tmp_path / "x.dp")


def test_an_error_names_the_file_once(tmp_path: Path):
    with pytest.raises(DataError) as error:
        read_data_proto(write_pickle(tmp_path / "x.dp"))
    assert str(error.value).count("x.dp") == 1
    assert "damaged" not in str(error.value)


ZEROS = torch.zeros(8, 6)
ROLLOUTS = {
    "a short mask": (
        {"attention_mask": torch.ones(8, 9)},
        "attention_mask has shape [8, 9], and responses [8, 6]; it must",
    ),
    "a flat mask": ({"attention_mask": torch.ones(80)}, "attention_mask has shape [80]"),
    "other responses": ({"responses": torch.ones(8, 5, dtype=torch.int64)}, "attention_mask has shape [8, 10], and"),
    "flat prompts": ({"prompts": torch.ones(8, dtype=torch.int64)}, "prompts has shape [8], not [responses, tokens]"),
    "no responses": ({"responses": torch.ones(0, 6, dtype=torch.int64)}, "responses has shape [0, 6]"),
    "fewer prompts": ({"prompts": torch.ones(4, 4, dtype=torch.int64)}, "prompts has shape [4, 4]"),
    "flat rewards": ({"rm_scores": torch.ones(8)}, "rm_scores has shape [8]"),
    "a short response mask": ({"response_mask": torch.ones(8, 5)}, "response_mask has shape [8, 5], and responses"),
    "fractions of tokens": ({"responses": ZEROS}, "responses of dtype torch.float32 has values that are no token ids"),
    "negative tokens": ({"responses": ZEROS.long() - 1}, "responses of dtype torch.int64 has values"),
    "huge tokens": ({"responses": ZEROS.long() + 2**40}, "responses of dtype torch.int64 has values"),
    "a short uid": ({"columns": {"uid": objects(["a"] * 7)}}, "column 'uid' has 7 values for 8 responses"),
    "a step of text": ({"meta": {"global_steps": "abc"}}, "global_steps='abc' is no step"),
    "no step": ({"meta": {"global_steps": None}}, "global_steps=null is no step"),
    "a huge step": ({"meta": {"global_steps": 10**5000}}, "global_steps=int of more than 4300 digits is no step"),
}


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize(("changes", "message"), ROLLOUTS.values(), ids=ROLLOUTS)
def test_a_malformed_rollout_is_an_error_that_says_what_is_wrong(changes: Any, message: str, tmp_path: Path, capsys):
    error = error_of(capsys, write_rollout(tmp_path / "genstep_000003", **changes), *RECIPE)
    assert message in error
    assert "gen_batch.dp" in error
    assert "as verl's skip.rollout writes it" in error


def without(name: str) -> Any:
    """Return what writes a file of verl whose second row lacks a column."""

    def write(path: Path) -> Path:
        rows = [json.loads(line) for line in write_verl(path).read_text().splitlines()]
        del rows[1][name]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_rewards_are_not_computed_where_a_row_has_no_ground_truth(tmp_path: Path, capsys):
    error = error_of(capsys, without("gts")(tmp_path / "3.jsonl"), *RECIPE)
    assert "the file has no ground truths" in error


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    path = write_verl(tmp_path / "3.jsonl")
    opened = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == path:
            raise PermissionError(13, "Permission denied")
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    error = error_of(capsys, path, *RECIPE)
    assert f"{path}: cannot be read" in error
    assert "check its permissions" in error


def write_pickle(path: Path) -> Path:
    path.write_bytes(pickle.dumps({"batch": 1}))
    return path


def write_text(path: Path) -> Path:
    path.write_text("{}")
    return path


@pytest.mark.parametrize(
    ("write", "name", "arguments", "message"),
    [
        (write_pickle, "dump.pt", RECIPE, "is a pickle, and no DataProto of verl"),
        (
            write_trl,
            "c.parquet",
            (*RECIPE, "--trust-code"),
            "--trust-code: the code that is run is that of your recipe",
        ),
        (write_text, "step.json", RECIPE, "a step of TRL is a .parquet file"),
        (lambda path: write_trl(path, step=[3] * 4 + [4] * 4), "c.parquet", RECIPE, "has the steps 3, 4"),
        (lambda path: write_trl(path, advantage=None), "c.parquet", RECIPE, "has the columns"),
        (lambda path: write_trl(path, length=None), "c.parquet", RECIPE, "no column of the reward function 'length'"),
        (lambda path: write_trl(path, completion=[1] * 8), "c.parquet", RECIPE, "completion is no text"),
        (write_trl, "c.parquet", (*RECIPE[:2], "rollout.n=3", REWARDS, MODEL), "rollout.n=3"),
        (
            without("output"),
            "3.jsonl",
            RECIPE,
            "3.jsonl, line 2: output is no text; give the file as the peer wrote it",
        ),
        (without("score"), "3.jsonl", RECIPE, "3.jsonl, line 2: it has no score; give the file"),
        (without("step"), "3.jsonl", RECIPE, "3.jsonl, line 2: it has no step; give the file"),
        (lambda path: write_verl(path, step=None), "3.jsonl", RECIPE, "line 1: step=null is no step"),
        (lambda path: write_verl(path, step=2.5), "3.jsonl", RECIPE, "line 1: step=2.5 is no step"),
        (lambda path: write_verl(path, step=float("inf")), "3.jsonl", RECIPE, "line 1: step=inf is no finite number"),
        (lambda path: write_verl(path, score=10**400), "3.jsonl", RECIPE, "is no finite number; give the file"),
        (lambda path: write_verl(path, score=True), "3.jsonl", RECIPE, "score=true is no finite number"),
        (
            write_trl,
            "c.parquet",
            (*RECIPE[:4], "reward.functions=[length, {name: length, weight: 0.5}]", MODEL),
            "reward.functions has two with the name 'length'",
        ),
        (write_trl, "c.parquet", (), "name the recipe"),
        (write_trl, "c.parquet", ("--recipe", "tiny_sort", "--checkpoint", "x"), "--checkpoint x"),
        (write_trl, "c.parquet", (*RECIPE[:3], REWARDS, MODEL, "algorithm.preset=remax"), "reads greedy_S"),
    ],
)
def test_a_file_that_cannot_be_compared_is_an_error_that_says_why(write, name, arguments, message, tmp_path, capsys):
    assert message in error_of(capsys, write(tmp_path / name), *arguments)
