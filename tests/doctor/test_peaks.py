"""The diagnosis says whether a share of each chip's peak can be reported."""

from hwgrpo_backends.facts import TorchDevice

from tests.support.devices.hosts import cpu, cuda, diagnosis, npu, rocm


def told(report):
    return [finding.found for finding in report.findings if finding.what == "peak rate"]


def test_chips_of_one_kind_are_told_in_one_line():
    (line,) = told(diagnosis(rocm()))
    assert line.startswith("8 x AMD Instinct MI300X: TFLOP/s: bfloat16 1307,")


def test_a_chip_that_no_data_sheet_is_known_of_says_so():
    (line,) = told(diagnosis(cuda()))
    assert line == "2 x NVIDIA H100: not known: reports show no share of it"
    (line,) = told(diagnosis(npu()))
    assert "8 x Ascend910B1: not known" in line


def test_two_kinds_of_chips_have_a_line_each():
    mixed = TorchDevice(
        available=True, count=2, names=("AMD Instinct MI300X", "AMD Radeon RX 7900 XTX"), archs=("gfx942", "gfx1100"),
        built_for=("gfx942", "gfx1100"),
    )  # fmt: skip
    lines = told(diagnosis(rocm(mixed)))
    assert [line.split(":")[0] for line in lines] == ["1 x AMD Instinct MI300X", "1 x AMD Radeon RX 7900 XTX"]


def test_a_host_processor_has_no_such_line():
    assert told(diagnosis(cpu())) == []
