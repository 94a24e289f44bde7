"""Backends of other distributions: found without loading, shown when broken, never in the way of the others."""

import ast
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hwgrpo_backends import cuda, registry
from hwgrpo_backends.backend import BackendError

GOOD = """
import dataclasses
from hwgrpo_backends import cpu
BACKEND = dataclasses.replace(cpu.BACKEND, name="{name}")
"""


def offer(folder, distribution, name, module_text, *, value=None):
    """Install a distribution that offers backend `name` from a module of its own."""
    module = f"{distribution.replace('-', '_')}_plugin"
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hwgrpo.backends]\n{name} = {value or module + ':BACKEND'}\n")
    (folder / f"{module}.py").write_text(module_text)


def test_the_built_in_backends_are_there_and_keep_their_names():
    assert registry.BUILTIN == ("cpu", "cuda", "npu", "rocm")
    for name in registry.BUILTIN:
        assert registry.get(name).name == name


def test_a_plug_in_is_listed_and_loaded(tmp_path, monkeypatch):
    offer(tmp_path, "chip-one", "chip1", GOOD.format(name="chip1"))
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.names() == ("chip1", "cpu", "cuda", "npu", "rocm")
    assert registry.get("chip1").name == "chip1"


@pytest.mark.parametrize("damage", [b"\xff", b"[hwgrpo.backends]\nchip\n", b"[other]\nchip\n"])
def test_a_list_of_entry_points_that_cannot_be_read_hides_nothing_else(tmp_path, monkeypatch, damage):
    offer(tmp_path, "chip-one", "chip1", GOOD.format(name="chip1"))
    offer(tmp_path, "evil", "evil", "")
    (tmp_path / "evil-1.0.dist-info" / "entry_points.txt").write_bytes(damage)
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.names() == ("chip1", "cpu", "cuda", "npu", "rocm")
    assert registry.load_all().problems == {}


def test_of_a_distribution_that_is_there_twice_the_first_counts(tmp_path, monkeypatch):
    offer(tmp_path / "old", "chip-one", "chip1", "", value="nowhere:BACKEND")
    offer(tmp_path / "new", "chip-one", "chip1", GOOD.format(name="chip1"))
    monkeypatch.syspath_prepend(tmp_path / "old")
    monkeypatch.syspath_prepend(tmp_path / "new")
    assert registry.load_all().problems == {}
    assert registry.get("chip1").name == "chip1"


def test_listing_names_loads_no_plug_in(tmp_path, monkeypatch):
    offer(tmp_path, "chip-two", "chip2", "raise SystemExit('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "chip2" in registry.names()
    assert "chip_two_plugin" not in sys.modules


def test_a_plug_in_that_fails_is_a_logged_problem_and_an_error_only_when_asked_for(tmp_path, monkeypatch, caplog):
    offer(tmp_path, "chip-three", "chip3", "raise ImportError('libchip.so')")
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = registry.load_all()
    assert set(loaded.backends) == set(registry.BUILTIN)
    assert "libchip.so" in loaded.problems["chip3"]
    assert "chip-three" in loaded.problems["chip3"]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.exc_info
    with pytest.raises(BackendError, match=r"chip3.*libchip\.so"):
        registry.get("chip3")


@pytest.mark.parametrize(
    ("distribution", "text", "reason"),
    [("chip-four", "BACKEND = 7", "is a int"), ("chip-five", GOOD.format(name="other"), "a Backend named 'other'")],
)
def test_a_plug_in_that_is_not_the_backend_it_says_is_a_problem(tmp_path, monkeypatch, distribution, text, reason):
    offer(tmp_path, distribution, "chip", text)
    monkeypatch.syspath_prepend(tmp_path)
    assert reason in registry.load_all().problems["chip"]


def test_two_plug_ins_of_one_name_are_a_problem_naming_both(tmp_path, monkeypatch):
    offer(tmp_path, "chip-six", "chip", GOOD.format(name="chip"))
    offer(tmp_path, "chip-seven", "chip", GOOD.format(name="chip"))
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.names() == ("chip", "cpu", "cuda", "npu", "rocm")
    assert set(registry.load_all().backends) == set(registry.BUILTIN)
    with pytest.raises(BackendError, match=r"chip-six.*chip-seven|chip-seven.*chip-six"):
        registry.get("chip")


@pytest.mark.parametrize(
    "distribution, name, why", [("chip-eight", "cuda", "is built in"), ("chip-nine", "auto", "means: choose for me")]
)
def test_a_plug_in_may_not_take_a_name_that_has_a_meaning(tmp_path, monkeypatch, distribution, name, why):
    offer(tmp_path, distribution, name, GOOD.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    loaded = registry.load_all()
    assert set(loaded.backends) == set(registry.BUILTIN)
    assert loaded.backends["cuda"] is cuda.BACKEND
    [(key, problem)] = loaded.problems.items()
    assert key == f"{name} ({distribution})"
    assert f"offers a backend named {name!r}, which {why}: rename it" in problem


@pytest.mark.parametrize(
    "field, value, what",
    [
        ("device_nodes", "'chip*'", "a tuple of texts"),
        ("kernels", "None", "a tuple of texts"),
        ("packages", "(1,)", "a tuple of texts"),
        ("comm", "''", "a text"),
        ("visible_env", "('A', 'B')", "a text or None"),
        ("env_train", "{'CHIP': '1'}", "a mapping of names to EnvVar"),
        ("probe", "None", "a function"),
        ("env_deterministic", "{'CHIP': 3}", "a mapping of names to EnvVar"),
        ("attention_archs", "{'sdpa': 'chip_one'}", "a mapping of texts to tuples of texts"),
        ("modules", "'rms_norm'", "a tuple of texts"),
        ("out_of_memory", "('full',)", "a mapping of patterns to texts"),
        ("out_of_memory", "{'full (': 'the driver'}", "a mapping of patterns to texts"),
        ("chips", "(989.0,)", "a tuple of Chip"),
        ("mark", "'range'", "a function or None"),
        ("record", "True", "a function or None"),
        ("graphs_by_default", "'cuda'", "true or false"),
    ],
)
def test_a_backend_with_a_field_that_others_stumble_over_is_a_problem(tmp_path, monkeypatch, field, value, what):
    text = f"{GOOD.format(name='chip')}BACKEND = dataclasses.replace(BACKEND, {field}={value})\n"
    offer(tmp_path, f"chip-{field}-{len(value)}", "chip", text)  # a module of its own each time
    monkeypatch.syspath_prepend(tmp_path)
    loaded = registry.load_all()
    assert "chip" not in loaded.backends
    assert f"has {field}={ast.literal_eval(value)!r}, which is not {what}" in loaded.problems["chip"]


@pytest.mark.parametrize(
    "field, body, told",
    [
        ("arch", "1 / 0", r"its arch\(3\) raised ZeroDivisionError"),
        ("arch", "None", r"its arch\(3\) is None, not a word"),
        ("compute_dtypes", "open('/no/driver')", r"its compute_dtypes\(3\) raised FileNotFoundError"),
        ("compute_dtypes", "('float32',)", r"its compute_dtypes\(3\) is .* not a tuple of dtypes"),
        ("compute_dtypes", "()", r"its compute_dtypes\(3\) is \(\), not a tuple of dtypes"),
    ],
)
def test_a_function_that_fails_when_it_is_called_is_told_by_the_backends_name(
    tmp_path, monkeypatch, field, body, told, request
):
    text = f"{GOOD.format(name='chip')}BACKEND = dataclasses.replace(BACKEND, {field}=lambda index: {body})\n"
    offer(tmp_path, f"chip-{abs(hash(request.node.name))}", "chip", text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match=rf"backend 'chip' cannot be used: {told}"):
        getattr(registry.get("chip"), field)(3)


def test_a_name_that_nobody_offers_is_an_error_listing_the_names():
    with pytest.raises(BackendError, match="cpu, cuda, npu, rocm"):
        registry.get("abacus")


def test_importing_the_package_and_every_torch_free_module_imports_no_torch():
    code = (
        "import sys, hwgrpo_backends, hwgrpo_backends.environment, hwgrpo_backends.testing, hwgrpo.cli.detect\n"
        "hwgrpo_backends.load_all(); hwgrpo_backends.gather_tier0()\n"
        "heavy = {'torch', 'numpy', 'triton', 'transformers', 'hwgrpo_kernels'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environ_with_source())


def test_the_package_imports_nothing_of_the_other_two():
    code = (
        "import sys, hwgrpo_backends.environment, hwgrpo_backends.testing\n"
        "others = [m for m in sys.modules if m.split('.')[0] in ('hwgrpo', 'hwgrpo_kernels')]\n"
        "assert not others, others"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environ_with_source())


def environ_with_source():
    root = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / part) for part in (".", "backends", "kernels"))}
