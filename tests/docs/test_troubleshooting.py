"""docs/troubleshooting.md: commands give its errors, and its thresholds are those of the warnings."""

import ast
import re
import shlex

import pytest
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device

from hwgrpo.cli.main import main
from hwgrpo.observe import detectors
from hwgrpo.training.out_of_memory import STAGES, _remedies
from tests.docs.pages import REPO, blocks, code, page, section, table
from tests.support.models.tiny import settings

PAGE = page("troubleshooting.md")
ERRORS = table(PAGE, "you typed", "the error says")
WARNINGS = table(PAGE, "warning", "sign")
THRESHOLDS = {
    "reward flat": (detectors.FLAT_STEPS, detectors.SMALL_GAIN, 100 * detectors.SLOW_RISE, int(detectors.PLAIN)),
    "reward falling": (detectors.LOST_SHARE,),
    "groups too easy": (detectors.LEARNED_SHARE,),
    "groups too hard": (detectors.EQUAL_SHARE, detectors.HARDLY_ANY),
    "groups equal": (),
    "KL exploding": (detectors.RECENT, int(detectors.LARGE_KL), int(detectors.KL_JUMP), detectors.KL_FLOOR),
    "truncation": (detectors.TRUNCATED_SHARE,),
    "entropy collapse": (detectors.ENTROPY_SHARE, detectors.ROOM),
    "rollout and trainer differ": (detectors.LARGE_GAP,),
    "gradient spike": (int(detectors.SPIKE), detectors.SPIKE_BEFORE, int(detectors.SPIKE_RECORD)),
    "gradient clipped": (detectors.CLIPPED_STEPS, int(detectors.CLIPPED_TIMES)),
    "length collapse": (detectors.SHORT_SHARE,),
}


KEYS = re.compile(r"\b(?:algorithm|model|optim|rollout|trainer)\.[a-z0-9_.]*[a-z0-9_]")
"""Settings named in a text."""


def run(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command of the page; return its exit code and what it printed, in one line."""
    words = shlex.split(command, comments=True)
    assert words[0] == "hwgrpo"
    try:
        status = main(words[1:])
    except SystemExit as ending:
        status = int(ending.code or 0)
    printed = capsys.readouterr()
    return status, " ".join((printed.out + printed.err).split())


@pytest.mark.parametrize("row", ERRORS, ids=lambda row: row["you typed"].strip("`"))
def test_a_mistake_gives_the_error_of_the_page(row: dict[str, str], capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [typed], [says] = code(row["you typed"]), code(row["the error says"])
    status, printed = run(typed, capsys)
    assert status == 2
    assert says in printed


@pytest.mark.parametrize("command", [line for block in blocks(PAGE, "bash") for line in block.splitlines()])
def test_a_command_of_the_page_runs(command: str, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _ = run(command, capsys)
    assert status == 0 or "doctor" in command  # which finds something on many machines


def test_every_warning_is_on_the_page_with_its_thresholds():
    assert [row["warning"] for row in WARNINGS] == list(detectors.DETECTORS) == list(THRESHOLDS)
    for row in WARNINGS:
        numbers = re.findall(r"\d+(?:\.\d+)?", row["sign"])
        assert [f"{value:g}" for value in THRESHOLDS[row["warning"]] if f"{value:g}" not in numbers] == [], row


def test_the_stages_of_a_full_memory_are_on_the_page():
    rows = table(section(PAGE, "Out of memory"), "stage", "lower, in this order")
    assert sorted(stage for row in rows for stage in row["stage"].split(", ")) == sorted(STAGES.values())


def test_what_a_full_memory_lowers_is_on_the_page():
    text = section(PAGE, "Out of memory")
    runs = (
        settings("algorithm.kl.coef=0.1"),
        settings("model.lora.rank=4", "rollout.engine=vllm"),
        settings("trainer.strategy=fsdp2", "trainer.fsdp2.sync_every=update"),
        settings("trainer.strategy=deepspeed", "trainer.deepspeed.sync_every=update"),
        settings("trainer.offload=optimizer"),
    )
    lowered = {
        stage: {key for run in runs for each in _remedies(run, Device(BACKEND), stage) for key in KEYS.findall(each)}
        for stage in STAGES
    }
    common = set.intersection(*lowered.values())
    assert common == set(KEYS.findall(text[text.index("In every stage") :].partition("\n\n")[0]))
    for row in table(text, "stage", "lower, in this order"):
        named = set(KEYS.findall(row["lower, in this order"]))
        for stage in (key for key, words in STAGES.items() if words in row["stage"].split(", ")):
            assert lowered[stage] - common == named - common, stage


def test_the_messages_of_the_page_are_in_the_code():
    sources = [*(REPO / "hwgrpo").rglob("*.py"), *(REPO / "backends").rglob("*.py")]
    texts = [node.value for file in sources for node in ast.walk(ast.parse(file.read_text())) if is_text(node)]
    said = [
        says for row in table(PAGE, "the error or note says", "cause") for says in code(row["the error or note says"])
    ]
    assert [says for says in said if not any(says in text for text in texts)] == []
    assert len(said) > 5


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
