"""Plug-ins that are broken in every way they can be: each is told of with its cause, and none is in anybody's way."""

import json
from pathlib import Path

import pytest

from tests.support.devices import acme

HEAD = "import dataclasses\nfrom hwgrpo_backends import Verdict, cpu\n"
CHIP = HEAD + "BACKEND = dataclasses.replace(cpu.BACKEND, name='{name}', device_type='{name}', {field})\n"
OK = "lambda facts: Verdict(state='ok', reason='1 x chip', devices=1)"
BACKENDS = {
    "raising": ("raise OSError('libchip.so is missing')", "does not load: OSError: libchip.so is missing"),
    "leaving": ("raise SystemExit('no licence')", "does not load: SystemExit: no licence"),
    "number": ("BACKEND = 7", "is a int, not a Backend named 'number'"),
    "nameless": (CHIP.format(name="other", field="comm='x'"), "is a Backend named 'other', not a Backend named"),
    "misshapen": (CHIP.format(name="misshapen", field="kernels='torch'"), "has kernels='torch', which is not a tuple"),
    "doubtful": (CHIP.format(name="doubtful", field="probe=lambda facts: 1 / 0"), "its probe raised ZeroDivisionError"),
    "wordless": (CHIP.format(name="wordless", field="probe=lambda facts: 'ok'"), "returned a str, not a Verdict"),
    "boastful": (
        CHIP.format(name="boastful", field=f"probe={OK.replace('devices=1', 'devices=0')}"), "returned nonsense"
    ),
    "vague": (CHIP.format(name="vague", field=f"probe={OK.replace('ok', 'fine')}"), "returned nonsense"),
}  # fmt: skip
"""Name -> text of its module, and what is told of it."""
KERNEL = "from hwgrpo_kernels import Implementation\ndef fail(*_):\n    raise RuntimeError('no stream')\n"
KERNELS = {
    "k_raising": ("raise OSError('libops.so is missing')", "OSError: libops.so is missing"),
    "k_leaving": ("raise SystemExit('no licence')", "SystemExit: no licence"),
    "k_number": ("BACKEND = 7", "TypeError: 'int' object is not iterable"),
    "k_text": ("BACKEND = ['row_stats']", "TypeError: it registers a str, not an Implementation"),
    "k_unknown": (KERNEL + "BACKEND = Implementation('row_stat', 'k', fail)", "Did you mean 'row_stats'?"),
    "k_taken": (KERNEL + "BACKEND = Implementation('row_stats', 'torch', fail)", "is already registered"),
    "k_ranked": (
        KERNEL + "BACKEND = Implementation('row_stats', 'k', fail, rank='first')",
        "TypeError: op and name must be",
    ),
}
"""The same of kernel plug-ins."""
IMPOSSIBLE = {
    "k_unsure": (KERNEL + "BACKEND = Implementation('row_stats', 'unsure', fail, supports=fail)", "`supports` raised"),
    "k_homeless": (
        KERNEL + "BACKEND = Implementation('row_stats', 'homeless', fail, requires=('no.such',))", "needs module"
    ),
}  # fmt: skip
"""Kernel plug-ins that load, and whose implementation then cannot be asked whether it runs."""


def offer(folder: Path, group: str, name: str, text: str, *, distribution: str | None = None) -> None:
    distribution = distribution or name
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {distribution}_plugin:BACKEND\n")
    (folder / f"{distribution}_plugin.py").write_text(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them installed."""
    folder = tmp_path_factory.mktemp("broken")
    for name, (text, _) in BACKENDS.items():
        offer(folder, "hwgrpo.backends", name, text)
    for name, (text, _) in {**KERNELS, **IMPOSSIBLE}.items():
        offer(folder, "hwgrpo.kernels", name, text)
    offer(folder, "hwgrpo.backends", "cuda", "raise SystemExit", distribution="usurper")
    for twin in ("first", "second"):
        offer(folder, "hwgrpo.backends", "twin", CHIP.format(name="twin", field=f"probe={OK}"), distribution=twin)
    return folder


@pytest.fixture(scope="module")
def detected(folder: Path) -> dict:
    done = acme.run("detect", "--json", folders=[folder])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_detect_chooses_and_judges_as_without_them(detected: dict):
    plain = json.loads(acme.run("detect", "--json", folders=[]).stdout)
    mine = [each for each in detected["candidates"] if each["name"] in ("cpu", "cuda", "npu", "rocm")]
    assert mine == plain["candidates"]
    assert (detected["selected"], detected["warnings"], detected["error"]) == ("cpu", [], None)


TWINS = ("(first_plugin:BACKEND)", "(second_plugin:BACKEND)", "both offer a backend named 'twin': uninstall one")


@pytest.mark.parametrize(
    "name, told",
    [
        *((name, [told]) for name, (_, told) in BACKENDS.items()),
        ("twin", TWINS),
        ("cuda (usurper)", ["usurper (usurper_plugin:BACKEND) offers a backend named 'cuda', which is built in"]),
    ],
)
def test_detect_lists_each_with_its_cause(detected: dict, name: str, told: list[str]):
    [found] = [each for each in detected["candidates"] if each["name"] == name]
    assert (found["verdict"], found["devices"]) == ("unusable", 0)
    assert all(part in found["reason"] for part in told), found["reason"]


@pytest.mark.parametrize("name", ["raising", "boastful", "twin"])
def test_asking_for_one_is_an_error_with_its_cause(folder: Path, name: str):
    told = BACKENDS[name][1] if name in BACKENDS else TWINS[-1]
    done = acme.run("detect", "--backend", name, folders=[folder])
    assert done.returncode == 1
    assert f"no backend (requested: {name})" in done.stdout
    assert told in done.stdout.splitlines()[-1]
    done = acme.run("train", "tiny_sort", f"backend.name={name}", folders=[folder])
    assert done.returncode != 0
    assert told in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_doctor_has_a_line_for_each_and_is_sound_for_the_cpu(folder: Path):
    done = acme.run("doctor", "--json", folders=[folder])
    document = json.loads(done.stdout)
    assert (done.returncode, document["selected"], document["failures"]) == (0, "cpu", [])
    lines = {check["what"]: check["found"] for check in document["checks"]}
    reasons = {each["name"]: each["reason"] for each in document["candidates"]}
    for name, (_, told) in BACKENDS.items():
        assert told in lines.get(f"plug-in {name}", reasons[name])
    assert "uninstall one" in lines["plug-in twin"]
    assert "is built in" in lines["plug-in cuda (usurper)"]
    for name, (_, told) in KERNELS.items():
        assert told in lines[f"kernel plug-in {name}"]
    [row_stats] = [op for op in document["kernels"]["ops"] if op["op"] == "row_stats"]
    verdicts = {each["name"]: (each["state"], each["reason"]) for each in row_stats["verdicts"]}
    assert verdicts["torch"][0] == "chosen"
    for name, (_, told) in IMPOSSIBLE.items():
        state, reason = verdicts[name.removeprefix("k_")]
        assert (state, told in reason) == ("impossible", True), reason
    asked = acme.run("doctor", "--json", "--backend", "number", folders=[folder])
    assert asked.returncode == 1
    assert "plug-in number" in json.loads(asked.stdout)["failures"]


def test_kernels_lists_each_that_failed_and_chooses_as_without_them(folder: Path):
    done = acme.run("kernels", "--json", folders=[folder])
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    errors = {each["name"]: each["error"] for each in document["plugins"]}
    for name, (_, told) in KERNELS.items():
        assert told in errors[name]
    plain = json.loads(acme.run("kernels", "--json", folders=[]).stdout)
    assert {op["op"]: op["chosen"] for op in document["ops"]} == {op["op"]: op["chosen"] for op in plain["ops"]}


def test_a_kernel_that_does_not_load_is_an_error_only_where_it_is_pinned(folder: Path, tmp_path: Path):
    offer(tmp_path, "hwgrpo.kernels", "hollow", KERNEL + "BACKEND = Implementation('row_stats', 'hollow', fail)\n")
    code = (
        "import sys, torch, hwgrpo_kernels as k\n"
        "k.configure(preference=['hollow', 'torch'])\n"
        "print(k.resolve('row_stats', 'cpu', torch.float32, 100).line)\n"
        "k.configure(pins={'row_stats': 'hollow'})\n"
        "k.resolve('row_stats', 'cpu', torch.float32, 100)\n"
    )
    done = acme.run(code=code, folders=[tmp_path])
    assert done.stdout == "row_stats -> torch (hollow: failed to load: RuntimeError: no stream)\n"
    assert "row_stats=hollow cannot run: failed to load: RuntimeError: no stream. Remove the pin" in done.stderr


@pytest.mark.slow
def test_a_device_that_cannot_be_asked_ends_a_run_with_its_name(tmp_path: Path):
    field = f"probe={OK}, compute_dtypes=lambda index: open('/no/driver')"
    text = CHIP.format(name="mute", field=field).replace("device_type='mute'", "device_type='cpu'")
    offer(tmp_path, "hwgrpo.backends", "mute", text)
    done = acme.run("train", "tiny_sort", "backend.name=mute", f"trainer.output_dir={tmp_path}/run", folders=[tmp_path])
    assert done.returncode != 0
    assert "backend 'mute' cannot be used: its compute_dtypes(0) raised FileNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("damage", [b"\xff\xfe[hwgrpo.kernels]\n", b"[hwgrpo.kernels]\ntorn\n"])
def test_a_list_of_kernels_in_pieces_is_told_with_the_remedy_and_hides_no_other(tmp_path: Path, damage: bytes):
    offer(tmp_path, "hwgrpo.kernels", "torn", "")
    (tmp_path / "torn-1.0.dist-info" / "entry_points.txt").write_bytes(damage)
    text = KERNEL + "BACKEND = Implementation('row_stats', 'whole', lambda: fail)\n"
    offer(tmp_path, "hwgrpo.kernels", "whole", text)
    # torch itself fails on such a list, unless it is told not to look for plug-ins
    done = acme.run("kernels", "--json", folders=[tmp_path], TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    plugins = {each["name"]: each for each in json.loads(done.stdout)["plugins"]}
    assert set(plugins) == {"torn", "whole"}
    assert plugins["torn"]["error"].startswith("its entry_points.txt is unreadable (")
    assert plugins["torn"]["error"].endswith("repair it: pip install --force-reinstall torn")
    assert (plugins["whole"]["implementations"], plugins["whole"]["error"]) == (["row_stats=whole"], None)
