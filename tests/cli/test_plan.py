"""`hwgrpo plan`: figures that add up, chips of the tables, mistakes told; no device, hub or data is needed."""

import io
import json
import os
import re
import socket
from contextlib import redirect_stdout

import pytest

from hwgrpo.cli.main import main
from hwgrpo.config import load_config

RECIPE = "qwen3_8b_math"
LOCAL = "rollout.engine=local"
CUT = ("--devices", "16", "model.lora.rank=0", "trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path):
    def refuse(self, address):
        raise AssertionError(f"something connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)


def said(*words: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert main(["plan", *words]) == 0
    return out.getvalue()


def planned(*words: str) -> dict:
    return json.loads(said(*words, "--json"))


def chip(*words: str) -> dict:
    [one] = planned(*words, "--chip", "H100 SXM")["chips"]
    return one


def refused(capsys, *words: str) -> str:
    assert main(["plan", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    [line] = told.err.splitlines()
    return line


def test_the_page_has_every_component_the_peak_the_chips_and_what_is_assumed():
    page = said(RECIPE, LOCAL, "--devices", "8")
    plan = planned(RECIPE, LOCAL, "--devices", "8")
    first = plan["chips"][0]
    names = {name for parts in first["components"].values() for name in parts}
    assert {"parameters (fp32)", "optimizer states (AdamW)", "copy that samples", "gradients (fp32)"} <= names
    for part in (
        *names,
        "peak",
        *(each["name"] for each in plan["chips"]),
        "40%",
        "60%",
        "50 GB/s",
        "estimated memory",
    ):
        assert part in page, part
    assert "No figure was measured on" in page
    assert max(map(len, page.splitlines())) <= 125


def test_the_peak_is_what_is_always_there_and_the_largest_phase():
    for words in ((), ("model.lora.rank=0",), ("rollout.max_sequences=512",)):
        one = chip(RECIPE, *words)
        parts = {phase: sum(sizes.values()) for phase, sizes in one["components"].items()}
        assert one["peak"] == parts["always"] + max(parts["rollout"], parts["update"], parts["optimizer"])


def test_the_seconds_of_a_step_are_those_of_its_stages():
    one = chip(RECIPE, "--devices", "8")
    assert one["step"] == pytest.approx(sum(one["seconds"].values()))
    assert all(seconds >= 0 for seconds in one["seconds"].values())


def test_shares_of_peak_rates_scale_their_stages_and_no_other():
    usual, half = chip(RECIPE), chip(RECIPE, "--mfu", "0.2")
    for stage in ("prefill", "update"):
        assert half["seconds"][stage] == pytest.approx(2 * usual["seconds"][stage])
    assert half["seconds"]["decode"] == usual["seconds"]["decode"], "bound by memory"
    slow = chip(RECIPE, "--mbu", "0.3")
    assert slow["seconds"]["decode"] == pytest.approx(2 * usual["seconds"]["decode"])
    ddp, slower = (chip(RECIPE, "--devices", "8", "--link", link)["seconds"]["exchange"] for link in ("50", "25"))
    assert slower == pytest.approx(2 * ddp)
    assert ddp > 0


def test_a_decode_step_reads_every_weight_and_the_cache_once():
    """Of 8B on one device: 16 waves of 64 sequences, 2,048 steps each, half-full on average."""
    words = (RECIPE, "model.lora.rank=0", "rollout.max_sequences=64", "--chip", "mine=1000000,1000,80", "--mbu", "1")
    [one] = planned(*words)["chips"]
    per_token = 2 * 2 * 36 * 8 * 128
    cache = per_token * (8 * 1024 + 64 * 1024)
    steps = 2048 * (128 * 8 // 64)
    assert one["seconds"]["decode"] == pytest.approx(steps * (2 * 8_190_735_360 + cache) / 1e12)


def test_a_groups_prompt_is_read_once_and_not_for_every_sample():
    few, many = (chip(RECIPE, LOCAL, f"rollout.n={n}", "rollout.max_sequences=8") for n in (2, 8))
    assert few["seconds"]["prefill"] == many["seconds"]["prefill"] > 0
    per_token = 2 * 2 * 36 * 8 * 128
    two, eight = (each["components"]["rollout"]["key-value cache of 8 sequences"] for each in (few, many))
    assert two - eight == per_token * (12 - 3) * 1024, "held for four groups instead of one, and as many responses"


def test_training_all_parameters_takes_three_forward_passes_with_checkpointing_four():
    three = chip(RECIPE, "model.lora.rank=0", "model.gradient_checkpointing=false")["seconds"]["update"]
    reference = ("model.lora.rank=0", "model.gradient_checkpointing=false", "algorithm.kl.coef=0.1")
    one = chip(RECIPE, *reference)["seconds"]["scoring"]
    assert three == pytest.approx(3 * one)
    four = chip(RECIPE, "model.lora.rank=0")["seconds"]["update"]
    assert 3.8 * one < four < 4 * one, "the head is not computed again"


def test_a_plan_that_does_not_fit_names_the_nearest_that_does_and_that_one_fits():
    words = (RECIPE, "model.lora.rank=0", "--devices", "8")
    one = chip(*words, "--strategy", "ddp")
    assert (one["fits"], one["instead"]) == (False, "fsdp2")
    better = chip(*words, "--strategy", "fsdp2")
    assert (better["fits"], better["instead"]) == (True, "")
    assert better["peak"] <= 0.9 * better["memory"] < one["peak"]
    assert "configurations that fit\n  H100 SXM: fsdp2" in said(*words, "--strategy", "ddp", "--chip", "H100 SXM")


def test_auto_is_planned_for_each_chip_as_a_run_would_choose():
    words = (
        RECIPE,
        "model.lora.rank=0",
        "--devices",
        "8",
        LOCAL,
        "--chip",
        "H100 SXM",
        "--chip",
        "mine=1000,3000,1000",
    )
    plan = planned(*words)
    assert plan["strategy"] == "auto"
    assert [each["strategy"] for each in plan["chips"]] == ["fsdp2", "ddp"]
    for each, strategy in zip(plan["chips"], ("fsdp2", "ddp"), strict=True):
        [alone] = planned(*words[:5], "--strategy", strategy, "--chip", "H100 SXM")["chips"]
        assert (each["components"], each["peak"]) == (alone["components"], alone["peak"])
    head, first, second = (
        line.split() for line in said(*words).splitlines() if line.startswith(("chip", "H100", "mine"))
    )
    assert (head[1], first[2], second[1]) == ("strategy", "fsdp2", "ddp")
    assert "strategy" not in said(*words[:-2]).split("chip ")[1]


def test_a_plan_on_the_same_devices_comes_before_one_on_more_and_fits_as_proposed():
    words = (RECIPE, "--chip", "RTX 4090")
    [one] = planned(*words)["chips"]
    changes = one["instead"].split(", ")
    assert [change.split("=")[0] for change in changes][-1] == "model.quantize"
    [better] = planned(*words, *changes)["chips"]
    assert (one["fits"], better["fits"]) == (False, True)


def test_another_strategy_keeps_the_other_settings_of_the_trainer():
    words = ("qwen3_4b_math", "--devices", "8")
    alone, named = chip(*words, "trainer.strategy=ddp"), chip(*words, "--strategy", "ddp")
    assert alone["components"] == named["components"]
    assert "optimizer states (AdamW)" in named["components"]["host"]


def test_rows_with_other_numbers_of_samplers_say_so_and_how_they_are_compared():
    words = ("deepseek_7b_math", "--devices", "16", "--rollout", "separate", "rollout.max_sequences=4096")
    words += ("--chip", "H100 SXM", "--chip", "H200 SXM")
    chips = planned(*words)["chips"]
    counts = [chip["rollout_devices"] for chip in chips]
    assert counts[0] > counts[1]
    assert chips[0]["step"] < chips[1]["step"], "so that a table without the counts would rank them wrongly"
    text = said(*words)
    head, *rows = (line.split() for line in text.splitlines() if "SXM  " in line or "samplers" in line.split())
    assert [int(row[7]) for row in rows] == counts
    assert head.index("samplers") == 4
    assert f"--rollout-devices {counts[0]}." in text
    same = (*words, "--rollout-devices", str(counts[0]))
    chips = planned(*same)["chips"]
    assert chips[0]["step"] > chips[1]["step"]
    assert "The rows differ" not in said(*same)
    assert "samplers" not in said(RECIPE, "--chip", "H100 SXM"), "devices that train sample"


def test_separate_rollout_needs_no_copy_and_no_cache_on_training_devices():
    words = ("qwen3_32b_math", "model.lora.rank=0", "--devices", "8", "--nodes", "4", "--strategy", "fsdp2")
    here, separate = chip(*words, LOCAL), chip(*words, "--rollout", "separate")
    assert here["components"]["always"]["copy that samples"] == 2 * 32_762_123_264
    assert "copy that samples" not in separate["components"]["always"]
    assert separate["components"]["rollout"] == {}
    assert separate["rollout_devices"] == 2
    assert here["instead"] == "fsdp2, rollout on separate devices (--rollout separate)"
    more = chip(*words, "--rollout", "separate", "--rollout-devices", "8")
    assert more["seconds"]["decode"] < separate["seconds"]["decode"]


def test_chips_are_found_by_parts_of_their_names_and_can_be_described():
    assert [each["name"] for each in planned(RECIPE, "--chip", "mi3")["chips"]][:2] == ["MI300X", "MI300A"]
    [own] = planned(RECIPE, "--chip", "mine=100,1000,24")["chips"]
    assert (own["name"], own["memory"], own["fits"]) == ("mine", 24 * 2**30, False)
    [h100] = planned(RECIPE, "--chip", "h100 sxm")["chips"]
    assert h100["memory"] == 80 * 2**30


def test_a_rate_that_is_not_certain_gives_no_time():
    [b200] = planned(RECIPE, "--chip", "B200", "--chip", "B200")["chips"][:1]
    assert b200["seconds"]["decode"] is None
    assert b200["step"] is None
    assert "n/a: the rate" in said(RECIPE, "--chip", "B200")


def test_a_small_model_is_planned_on_the_host():
    words = ("tiny_sort", "model.path=builtin://tiny?task=sort&steps=2", "backend.name=cpu", "--chip", "mine=0.1,20,8")
    [one] = planned(*words)["chips"]
    assert one["fits"] is True
    assert "libraries, about" in one["components"]["always"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((RECIPE, "--devices", "0"), ("--devices 0", "1 or more")),
        ((RECIPE, "--devices", "3"), ("trainer.prompts_per_step=128", "multiple of 3")),
        ((RECIPE, "--mfu", "1.5"), ("--mfu 1.5", "at most 1")),
        ((RECIPE, "--strategy", "fsdp"), ("--strategy='fsdp'", "Did you mean 'fsdp2'")),
        ((RECIPE, "--chip", "H1000"), ("--chip='H1000'", "H100 SXM")),
        ((RECIPE, "--chip", "mine=1,2"), ("--chip 'mine=1,2'", "three numbers")),
        ((RECIPE, "--rollout-devices", "4"), ("--rollout-devices 4", "--rollout separate")),
        (
            (RECIPE, *CUT, "--strategy", "zero3"),
            ("--strategy zero3: trainer.tensor_parallel_size=2", "tensor parallelism needs trainer.strategy=fsdp2"),
        ),
        (
            ("qwen3_4b_math", "--devices", "8", "--strategy", "zero3"),
            ("--strategy zero3: trainer.offload='optimizer'", "leave it out"),
        ),
        (
            (RECIPE, *CUT, "trainer.tensor_parallel_size=16"),
            ("does not divide the model's 8 key-value heads", "=2 or 4"),
        ),
        ((RECIPE, "--devices", "64", "trainer.sequence_parallel_size=64"), ("the model's 32 attention heads",)),
        ((RECIPE, "backend.name=cpu"), ("backend 'cpu' has no known chip", "--chip mine=")),
    ],
)
def test_a_mistake_is_named_with_its_remedy(capsys, words, parts):
    line = refused(capsys, *words)
    for part in parts:
        assert part in line


def test_devices_that_layers_are_cut_over_gather_tokens_for_it_and_half_of_each_layer():
    words = (RECIPE, "--devices", "8", "rollout.max_response_tokens=31744", "model.layout=padded", "model.lora.rank=0")
    words = (*words, "trainer.strategy=fsdp2", "trainer.prompts_per_step=128", LOCAL)
    one, two = (
        (*words, f"trainer.tensor_parallel_size={size}", f"trainer.tokens_per_micro_batch={32768 // size}")
        for size in (1, 2)
    )
    assert "padded layout, tensor parallel size 2" in said(*two)
    assert (planned(*two)["tensor_parallel_size"], planned(*two)["sequence_parallel_size"]) == (2, 1)
    whole, part = chip(*one), chip(*two)
    assert part["seconds"]["update"] == whole["seconds"]["update"]
    names = "optimizer states (AdamW)", "parameters (fp32)"
    assert all(part["components"]["always"][name] > whole["components"]["always"][name] for name in names)
    gathered = [each["components"]["update"]["weights gathered"] for each in (whole, part)]
    # 8B: 36 layers of 192,946,432, and two tables of 151,936 x 4,096, gathered twice as often in half as large parts
    layers, rest = 36 * 192_946_432, 2 * 151_936 * 4096 + 4096
    norms = 2 * 4096 + 2 * 128  # of a layer, which are not cut
    assert gathered == [2 * (rest + 2 * 192_946_432), 2 * (rest + 192_946_432 + norms)]
    tokens = 16 * 8 * 32767 * 36 * 4 * 4096 * 2 * 3
    # of rings of eight devices, and of four in twice as many micro-batches
    state = 128 * 8 / 8 * (2 * 2 + 4) * (3 / 4 * 2 * (layers / 2 + rest) - 7 / 8 * (layers + rest))
    assert part["seconds"]["exchange"] - whole["seconds"]["exchange"] == pytest.approx(
        (tokens + state) / 50e9, rel=1e-4
    )


def test_devices_that_share_sequences_hold_a_part_of_their_activations_and_exchange_heads_for_it():
    words = (RECIPE, "--devices", "8", "--strategy", "ddp", "rollout.max_response_tokens=31744", "model.layout=padded")
    one, two = (
        (*words, f"trainer.sequence_parallel_size={size}", f"trainer.tokens_per_micro_batch={32768 // size}")
        for size in (1, 2)
    )
    assert "padded layout, sequence parallel size 2" in said(*two)
    assert "shared by" not in said(*one)
    assert planned(*two)["sequence_parallel_size"] == 2
    whole, part = chip(*one), chip(*two)
    kept = [
        next(size for name, size in each["components"]["update"].items() if name.startswith("activations"))
        for each in (whole, part)
    ]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=1e-3)
    assert part["seconds"]["update"] == whole["seconds"]["update"]
    # Gradients of adapters are the same, the rest is heads. Per device and step 16 prompts of 8 samples, 32767 tokens
    # each; 36 layers of 32 heads and 8 key heads, twice 128 wide, 2 bytes; forward, its repetition, backward; a half
    sent = 16 * 8 * 32767 * 36 * (32 + 8) * 2 * 128 * 2 * 3 / 2
    assert part["seconds"]["exchange"] - whole["seconds"]["exchange"] == pytest.approx(sent / 50e9, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "rollout.engine=auto, planned as vllm, which must be installed, rollout.gpu_memory_utilization=0."),
        (
            ("model.quantize=nf4",),
            "rollout.engine=auto, planned as local, with the policy itself (not vllm: model.quant",
        ),
        ((LOCAL,), "local, with the policy itself\n"),
        (
            ("--rollout", "colocated", "rollout.gpu_memory_utilization=0.4"),
            "vllm, shared: on the training devices, where",
        ),
        (("--rollout", "separate"), "split: on devices of its own\n"),
    ],
)
def test_the_page_says_whether_devices_are_shared_or_split(words, line):
    assert f"\nrollout    {line}" in said(RECIPE, "--chip", "H100 SXM", *words)


LARGE = ("qwen3_32b_math", "--devices", "8")


def test_auto_is_planned_as_the_engine_that_each_chip_would_use_over_as_many_devices_as_it_needs():
    """Qwen3-32B: its bf16 weights alone take 61 GiB."""
    plan = planned(*LARGE, "--chip", "H100 SXM", "--chip", "H200 SXM", "--chip", "910B3")
    engines = [(each["engine"], each["rollout_tensor_parallel_size"]) for each in plan["chips"]]
    assert engines == [("vllm", 2), ("vllm", 1), ("vllm_server", 2)]
    assert all(each["fits"] for each in plan["chips"])
    weights = [each["components"]["rollout"]["weights of the engine"] for each in plan["chips"]]
    assert weights == [2 * 32_762_123_264 // size for _, size in engines]
    lines = [line for line in said(*LARGE).splitlines() if "planned as" in line]
    assert len(lines) > 1, "a line for chips that differ"
    for line in lines:
        assert "which must be installed" in line


def test_a_tensor_parallel_size_is_planned_as_set_and_proposed_where_it_is_not():
    words = (*LARGE, "--rollout", "colocated")
    alone, two = chip(*words), chip(*words, "rollout.tensor_parallel_size=2")
    assert (alone["fits"], alone["instead"]) == (False, "rollout.tensor_parallel_size=2")
    assert (two["fits"], two["rollout_tensor_parallel_size"]) == (True, 2)
    auto = chip(*LARGE)
    assert (two["peak"], two["gpu_memory_utilization"]) == (auto["peak"], auto["gpu_memory_utilization"])
    [small] = planned(*words, "--chip", "small=989,3350,44.9")["chips"]
    assert small["instead"] == "rollout.tensor_parallel_size=4"


def test_a_smaller_usable_share_needs_more_devices_for_the_engine():
    assert chip(*LARGE, "--usable", "0.9")["rollout_tensor_parallel_size"] == 2
    assert chip(*LARGE, "--usable", "0.45")["rollout_tensor_parallel_size"] == 4


def test_what_would_fit_instead_has_the_engine_that_a_run_would_select_then():
    words = (RECIPE, "model.lora.rank=0", "--devices", "4", "--chip", "small=989,3350,24")
    [one] = planned(*words)["chips"]
    assert (one["engine"], one["fits"], one["instead"]) == ("local", False, "fsdp2+offload")
    [better] = planned(*words, "--strategy", one["instead"])["chips"]
    assert (better["engine"], better["fits"]) == ("vllm", True)


def test_a_dry_run_proposes_what_the_plan_proposes_and_names_another_engine(capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = (RECIPE, "model.lora.rank=0", "--devices", "4", "--chip", "small=989,3350,24")
    for more, instead in (
        ((), "fsdp2+offload, then with rollout.engine=vllm"),
        (("rollout.engine=local",), planned(*words, "rollout.engine=local")["chips"][0]["instead"]),
    ):
        main(["train", *words, *more, "--dry-run"])
        assert f"; what would fit: {instead} (" in capsys.readouterr().out


def test_an_engine_that_cannot_sleep_with_the_model_is_proposed_awake():
    """On Ascend vLLM cannot sleep with a mixture of experts; sharded over two devices it fits beside the trainer."""
    words = ("qwen3_30b_a3b_math_lora", "--devices", "8", "--chip", "910B3")
    [one] = planned(*words)["chips"]
    assert (one["engine"], one["fits"], one["instead"]) == ("local", False, "rollout.sleep_mode=never")
    [better] = planned(*words, one["instead"])["chips"]
    assert (better["engine"], better["rollout_tensor_parallel_size"], better["fits"]) == ("vllm_server", 2, True)


def memory_of(capsys, *words: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))  # each command sets the variables of its ranks
        main([*words, "--dry-run"])
    [figure] = re.findall(r"^memory +about ([\d.]+) GiB per device", capsys.readouterr().out, flags=re.MULTILINE)
    return figure


@pytest.mark.parametrize("recipe", ["qwen2_5_7b_gsm8k_full", "qwen3_32b_math"])
@pytest.mark.parametrize(("backend", "name"), [("npu", "910B3"), ("cuda", "H100 SXM")])
def test_plans_and_dry_runs_give_one_figure_for_one_run(capsys, recipe, backend, name):
    [one] = planned(recipe, "--devices", "8", "--chip", name)["chips"]
    capsys.readouterr()
    figure = f"{one['peak'] / 2**30:.2f}"
    asked = (f"backend.name={backend}", "--devices", "8")
    assert memory_of(capsys, "launch", recipe, *asked) == figure
    assert memory_of(capsys, "launch", recipe, "--devices", "8", "--chip", name) == figure
    for options in (asked, ("--devices", "8", "--chip", name)):
        assert memory_of(capsys, "train", recipe, *options) == figure
    other = memory_of(capsys, "train", recipe, "--devices", "8", "--chip", "MI300X")
    assert other == f"{planned(recipe, '--devices', '8', '--chip', 'MI300X')['chips'][0]['peak'] / 2**30:.2f}"


@pytest.mark.parametrize("name", ["910B3", "MI300X"])
def test_plans_and_dry_runs_of_sft_give_one_figure(capsys, name):
    given = ("qwen2_5_7b_gsm8k_full", "--devices", "8", "--chip", name)
    [one] = planned(*given, "--for", "sft")["chips"]
    capsys.readouterr()
    for command in (("sft",), ("launch", "sft")):
        assert memory_of(capsys, *command, *given) == f"{one['peak'] / 2**30:.2f}"


def test_a_dry_run_of_a_reward_model_needs_no_device(capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = (RECIPE, "model.lora.rank=0", "--devices", "8", "--chip", "H100", "--dry-run")
    assert main(["reward-model", *words]) == 1
    printed = capsys.readouterr()
    assert "cuda, 8 processes" in printed.out
    assert "strategy fsdp2" in printed.out
    assert "the plan is for H100 SXM (--chip)" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", RECIPE, "--devices", "2"), "--devices 2 needs --dry-run"),
        (("sft", RECIPE, "--devices", "2"), "use hwgrpo launch sft RECIPE --devices N --run"),
        (("reward-model", RECIPE, "--devices", "2"), "torchrun --nproc-per-node N -m hwgrpo reward-model"),
        (("train", RECIPE, "--chip", "H100"), "--chip H100 needs --dry-run"),
        (("train", RECIPE, "--dry-run", "--devices", "0"), "--devices 0: use 1 or more"),
        (("train", RECIPE, "--dry-run", "--chip", "H1000"), "H100 SXM"),
        (("launch", RECIPE, "--chip", "H100", "--devices", "2"), "--chip H100 is for `hwgrpo launch RECIPE --dry-run`"),
        (("launch", "sft", RECIPE, "--chip", "H100"), "--chip H100 is for `hwgrpo launch RECIPE --dry-run`"),
    ],
)
def test_devices_and_chip_are_options_of_a_dry_run(capsys, words, message):
    assert main([*words]) == 2
    assert message in capsys.readouterr().err


def test_supervised_training_has_no_rollout_and_no_reference():
    words = (RECIPE, "model.lora.rank=0", "algorithm.kl.coef=0.1", "rollout.engine=local")
    train, sft = chip(*words), chip(*words, "--for", "sft")
    names = {name for parts in train["components"].values() for name in parts}
    assert {"reference model", "copy that samples"} <= names
    supervised = [name for parts in sft["components"].values() for name in parts]
    assert [name for name in supervised if any(part in name for part in ("reference", "sample", "cache"))] == []
    assert sft["components"]["rollout"] == {}
    assert sft["components"]["always"]["parameters (fp32)"] == train["components"]["always"]["parameters (fp32)"]
    assert {stage for stage, seconds in sft["seconds"].items() if seconds} == {"update", "optimizer"}
    plan = planned(*words, "--for", "sft")
    assert (plan["rollout"], plan["rollout_bytes"]) == ("none", 0)
    assert "rollout    none: sft trains on given responses" in said(*words, "--for", "sft")


def test_a_supervised_step_has_one_response_to_each_prompt():
    words = (RECIPE, "--for", "sft")
    one = chip(*words, "trainer.tokens_per_micro_batch=1000000", "trainer.prompts_per_step=8")
    [name] = (name for name in one["components"]["update"] if name.startswith("activations"))
    settings = load_config(RECIPE, data_may_be_missing=True)
    each = settings.data.max_prompt_tokens + settings.rollout.max_response_tokens - 1
    assert f" {8 * each:,} tokens" in name
    half, full = chip(*words, "trainer.prompts_per_step=64"), chip(*words, "trainer.prompts_per_step=128")
    assert full["seconds"]["update"] == pytest.approx(2 * half["seconds"]["update"])
    split = chip(*words, "trainer.prompts_per_step=64", "trainer.prompts_per_update=32")
    assert split["seconds"]["scoring"] == 0, "no old log-probs"


def test_what_would_fit_for_supervised_training_names_no_rollout(capsys):
    page = said(RECIPE, "--for", "sft", "model.lora.rank=0", "--chip", "small=100,1000,30")
    assert "configurations that fit" in page
    assert "rollout" not in page.partition("configurations that fit")[2].partition("Assumed")[0]
    for option in (("--rollout", "separate"), ("--rollout-devices", "2")):
        assert "have no effect with --for sft" in refused(capsys, RECIPE, "--for", "sft", *option)
