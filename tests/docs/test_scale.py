"""The figures of docs/scale.md are those that its commands give."""

import io
import json
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from hwgrpo.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
GIB = 2**30


def section(title: str) -> str:
    [text] = re.findall(rf"^## {re.escape(title)}[^\n]*\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
    return text


def planned(
    title: str, devices: int | None = None, without: str = "", instead: tuple[str, ...] = (), strategy: str = ""
) -> dict:
    """Run a section's command, with other devices, settings or strategy or without an option; return what it says."""
    [block] = re.findall(r"^```bash\n(.*?)^```$", section(title), flags=re.DOTALL | re.MULTILINE)
    words = shlex.split(block.replace("\\\n", " "))
    assert words[:2] == ["hwgrpo", "plan"]
    if devices is not None:
        words[words.index("--nodes") + 1] = str(devices // 8)
    if strategy:
        words[words.index("--strategy") + 1] = strategy
    if without:
        at = words.index(without)
        del words[at : at + 2]
    for setting in instead:
        [at] = [i for i, word in enumerate(words) if word.startswith(setting.partition("=")[0] + "=")]
        words[at] = setting
    with redirect_stdout(io.StringIO()) as out:
        assert main([*words[1:], "--json"]) == 0
    return json.loads(out.getvalue())


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("title", ["Qwen3-235B-A22B", "DeepSeek-V3"])
def test_every_figure_of_a_table_is_the_commands(title):
    for row in rows(title):
        devices = int(row[0].replace(",", ""))
        plan = planned(title, devices)
        assert plan["devices"] == devices
        chip = plan["chips"][0]
        parts = {**chip["components"]["always"], **chip["components"]["update"]}
        starts = (
            "parameters (fp32)",
            "optimizer",
            "gradients (fp32)",
            "weights gathered",
            "unsharded gradients",
            "activ",
        )
        sizes = [next(size for name, size in parts.items() if name.startswith(start)) for start in starts]
        assert row[1:8] == [f"{size / GIB:.1f}" for size in (*sizes, chip["peak"])]
        assert row[8:] == ["yes" if each["fits"] else "no" for each in plan["chips"]]
        assert [each["memory"] / GIB for each in plan["chips"]] == [80, 141, 192]


@pytest.mark.parametrize("title", ["Qwen3-235B-A22B", "DeepSeek-V3"])
def test_sizes_and_devices_of_rollout_are_the_commands(title):
    text = " ".join(section(title).split())
    plan = planned(title, without="--rollout-devices")
    assert f"{plan['parameters'] / 1e9:.2f}B parameters" in text
    assert f"{plan['rollout_bytes'] / GIB:,.1f} GiB: " in text
    counts = [chip["rollout_devices"] for chip in plan["chips"]]
    assert "{} H100, {} H200 or {} MI300X at the least".format(*counts) in text


@pytest.mark.parametrize("title", ["Qwen3-235B-A22B", "DeepSeek-V3"])
def test_the_page_says_what_padding_costs_and_what_a_strategy_without_it_needs(title):
    text = " ".join(section(title).split())
    plan = planned(title, 512)
    share = re.match(r"[\d.]+ times an even share", plan["padding"])
    assert share is not None
    assert share[0] in text
    flat = planned(title, 512, strategy="zero3")
    assert flat["padding"] is None
    assert re.search(rf"{flat['chips'][0]['peak'] / GIB:.1f} GiB at 512", text)
    assert planned(title, 128)["padding"] is None


@pytest.mark.parametrize("title", ["Qwen3-235B-A22B", "DeepSeek-V3"])
def test_the_weights_that_rank_0_keeps_are_the_commands(title):
    kept = planned(title)["chips"][0]["components"]["host"]["weights last sent to the server, on rank 0"]
    assert f"{kept / GIB:,.1f} GiB of" in section(title)


def test_the_seconds_of_the_large_step_are_the_commands():
    text = " ".join(section("Qwen3-235B-A22B").split())
    chip = planned("Qwen3-235B-A22B")["chips"][1]
    assert chip["fits"]
    seconds = chip["seconds"]
    assert set(seconds) == {"prefill", "decode", "scoring", "update", "optimizer", "exchange", "sync"}
    assert f"128 {chip['name'].split()[0]} for training" in text
    assert f"takes {chip['step']:.0f} s: decoding {seconds['decode']:.0f} s" in text
    assert f"products {seconds['update']:.0f} s, and {seconds['exchange']:.0f} s to move state" in text


def test_long_responses_take_what_the_command_says():
    for size, tokens, *told in rows("Long responses"):
        settings = f"trainer.sequence_parallel_size={size}", f"trainer.tokens_per_micro_batch={tokens.replace(',', '')}"
        chip = planned("Long responses", instead=settings)["chips"][0]
        [kept] = [value for name, value in chip["components"]["update"].items() if name.startswith("activations")]
        seconds = [f"{chip['seconds'][stage]:.0f} s" for stage in ("update", "exchange")]
        assert told == [f"{kept / GIB:.1f}", f"{chip['peak'] / GIB:.1f}", "yes" if chip["fits"] else "no", *seconds]


def test_large_layers_take_what_the_command_says():
    for size, tokens, *told in rows("Large layers"):
        settings = f"trainer.tensor_parallel_size={size}", f"trainer.tokens_per_micro_batch={tokens.replace(',', '')}"
        chip = planned("Large layers", instead=settings)["chips"][0]
        parts = chip["components"]["update"]
        held = [sum(value for name, value in parts.items() if name.startswith(k)) for k in ("weights", "activations")]
        seconds = [f"{chip['seconds'][stage]:.0f} s" for stage in ("update", "exchange")]
        sizes = [f"{size / GIB:.1f}" for size in (*held, chip["peak"])]
        assert told == [*sizes, "yes" if chip["fits"] else "no", *seconds]


def test_the_page_says_what_is_held_while_a_model_is_cut():
    plan = planned("Qwen3-235B-A22B")
    text = " ".join(PAGE.split())
    start = plan["chips"][0]["components"]["loading"]
    assert f"on 128 devices that takes {sum(start.values()) / GIB:.0f} GiB of each" in text
    assert f"{4 * plan['parameters'] / GIB:.0f} GiB for 235B, on that one host" in text


def test_the_commands_for_several_nodes_print_what_starts_them(capsys):
    [block] = re.findall(
        r"^```bash\n(.*?)^```$", section("Start a run on several nodes"), flags=re.DOTALL | re.MULTILINE
    )
    shown = []
    for line in block.splitlines():
        assert main(shlex.split(line.partition(" > ")[0])[1:]) == 0
        shown.append(capsys.readouterr().out)
    assert "--nnodes 2" in shown[0]
    assert "--rdzv-endpoint node0:" in shown[0]
    assert "#SBATCH --nodes=2" in shown[1]
    assert "#SBATCH --time=24:00:00" in shown[1]


def chips(title: str) -> list[dict]:
    """Run all commands of a section; return the chip of each."""
    [block] = re.findall(r"^```bash\n(.*?)^```$", section(title), flags=re.DOTALL | re.MULTILINE)
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        with redirect_stdout(io.StringIO()) as out:
            assert main([*shlex.split(line)[1:], "--json"]) == 0
        found += json.loads(out.getvalue())["chips"]
    return found


def test_memory_beside_published_figures_is_the_commands_and_no_more_than_they():
    [chip] = chips("Beside published memory")
    phases = "{:.1f} GiB in rollout, {:.1f} GiB in the update".format(
        *(chip[f"{phase}_peak"] / GIB for phase in ("rollout", "update"))
    )
    ours, unsloth, _ = rows("Beside published memory")
    assert (ours[1], unsloth[1]) == (phases, "54.3 GB")
    assert chip["peak"] <= 54.3e9
    [cache] = (size for name, size in chip["components"]["rollout"].items() if name.startswith("key-value"))
    assert f"{cache / GIB:.1f} GiB of key-value cache" in section("Beside published memory")


def test_seconds_beside_published_steps_are_the_commands_and_within_half_as_much_again():
    title = "Beside published steps"
    alternating, overlapping = chips(title)
    for chip, row in zip((alternating, overlapping), rows(title), strict=True):
        seconds = chip["seconds"]
        stages = (("prefill", "decode"), ("scoring", "update", "optimizer"), ("exchange", "sync"))
        rollout, train, move = (sum(seconds[name] for name in names) for names in stages)
        step = chip["step"] if chip is alternating else max(rollout, train + move)
        published = float(row[1].removesuffix(" s"))
        planned_cells = [
            f"{step:.0f} s",
            f"{step / published:.2f}",
            *(f"{part:.0f} s" for part in (rollout, train, move)),
        ]
        assert row[2:] == planned_cells
        assert 1 / 1.5 < step / published < 1.5
    assert (alternating["fits"], overlapping["fits"]) == (True, True)
    size, memory = alternating["rollout_tensor_parallel_size"], alternating["peak"] / GIB
    words = f"with vLLM over {size} devices each and needs {memory:.1f} GiB on 80 GiB devices"
    assert words in " ".join(section(title).split())


def test_engines_beside_those_of_verls_scripts_are_the_commands():
    found = chips("Beside verl's scripts")
    cells = [
        [
            chip["name"],
            chip["engine"],
            str(chip["rollout_tensor_parallel_size"]),
            f"{chip['gpu_memory_utilization'] or '-'}",
            f"{chip['peak'] / GIB:.1f}",
            "yes" if chip["fits"] else "no",
        ]
        for chip in found
    ]
    assert [row[1:7] for row in rows("Beside verl's scripts") if len(row) == 9] == cells
    [misfit] = [chip for chip in found if not chip["fits"]]
    assert f"The plan proposes `{misfit['instead']}`" in section("Beside verl's scripts")
    assert {chip["strategy"] for chip in found if chip["name"] == "MI300X"} == {"ddp"}
