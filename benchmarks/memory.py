"""Measured host memory of a run compared with `hwgrpo plan`, stage by stage, on a CPU with one thread.

Each size is a randomly initialized Qwen3 that trains for two steps in a separate process, by the code of
`hwgrpo train`. The process subtracts its resident memory after the imports; the kernel's high-water mark (VmHWM) is
reset before each stage, so that every stage has its own peak. Responses reach the length limit, as the plan assumes:
one token in thousands ends a response earlier. Each row runs twice, with glibc's default malloc and with one that
returns freed blocks at once, which separates the memory of tensors from memory that malloc caches.

    python benchmarks/memory.py --size 36m --size 120m --output results.json
    python benchmarks/memory.py --rows lora
    python benchmarks/memory.py --rows variants --freed-at-once rollout.n=2

`--rows lora` trains adapters in bfloat16 on a base model that was published in bfloat16: on a base held in fp32 and
copied to sample with, and on one held in bf16 once. `--rows variants` has the other kinds of runs that recipes plan. A
peak is that of a step, or of the checkpoint after the last one; that of loading is in the results, too. The exit code
is 1 if a peak and its plan differ by more than 10 %; in bfloat16 only those of blocks freed at once count, since no
plan knows malloc's free blocks there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
PACKAGES = [str(REPO), str(REPO / "backends"), str(REPO / "kernels")]
sys.path[:0] = PACKAGES

SIZES: dict[str, dict[str, int | bool]] = {
    "36m": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192, "tie_word_embeddings": True},
    "120m": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 14, "num_attention_heads": 12,
             "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768, "tie_word_embeddings": True},
    "285m": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 65536, "tie_word_embeddings": False},
}  # fmt: skip
EXPERTS, ACTIVATED = 8, 2
"""A mixture's experts: the feed-forward part of the same size is split among them."""


@dataclass(frozen=True)
class Row:
    """A kind of run."""

    name: str
    overrides: tuple[str, ...] = ()
    experts: bool = False
    """The model is a mixture of experts."""
    ranks: int = 1
    """Processes, whose largest peak counts."""


MIXED = ("model.dtype=bfloat16", "model.gradient_checkpointing=true")
LORA = (*MIXED, "model.lora.rank=16")
FSDP2 = (*MIXED, "trainer.strategy=fsdp2")
ROWS: dict[str, tuple[Row, ...]] = {
    "full": (Row("all parameters"),),
    "lora": (
        Row("LoRA, base in fp32 and a bf16 copy", (*LORA, "model.lora.base_dtype=float32")),
        Row("LoRA, base in bf16 once", LORA),
    ),
    "variants": (
        Row("all parameters, bf16 compute", MIXED),
        Row("the same, 8-bit states", (*MIXED, "optim.name=adamw_8bit")),
        # the host's memory is a CPU's own: this checks the parts of a plan, and saves nothing
        Row("the same, offload=optimizer", (*MIXED, "trainer.offload=optimizer")),
        Row("the same, offload=gradients", (*MIXED, "trainer.offload=gradients")),
        Row("fsdp2 on 2 ranks, synced per update", (*FSDP2, "trainer.fsdp2.sync_every=update"), ranks=2),
        Row("fsdp2 on 2 ranks, per micro-batch", (*FSDP2, "trainer.fsdp2.sync_every=micro_batch"), ranks=2),
        Row("LoRA, base in nf4", (*LORA, "model.quantize=nf4")),
        Row("LoRA, base in int8", (*LORA, "model.quantize=int8")),
        Row("LoRA on attention, 8 experts in bf16", (*LORA, "model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]",
            "trainer.max_steps=6"),  # what libraries hold grows up to the fourth
            experts=True),
    ),
}  # fmt: skip
"""Name of a table -> its rows."""
SMOKE = "smoke"
SMOKE_SHAPE: dict[str, int | bool] = {
    **SIZES["36m"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 128,
}  # fmt: skip
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS, STEPS = 4, 4, 32, 64, 2
WITHIN = 0.10
LOADING = "loading"
STAGES = ("gen", "update_actor", "save")
AS_IT_IS, FREED = "malloc as it is", "freed at once"
ALLOCATORS: dict[str, dict[str, str]] = {
    AS_IT_IS: {},
    FREED: {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"},
}
"""Environment variables of each run. With the second, glibc returns large blocks once freed: only tensors remain."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the selected sizes; return 1 if a plan is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), action="append", help="default: all")
    parser.add_argument("--rows", choices=tuple(ROWS), default="full", help="the table (default: full)")
    parser.add_argument("--row", action="append", help="only rows with this text in their name")
    parser.add_argument("--freed-at-once", action="store_true", help="only with that malloc: half the time")
    parser.add_argument("--output", help="write the results as JSON to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the runs, as for `hwgrpo train`")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, default malloc; ignores the limit")
    args = parser.parse_args(argv)
    if args.child:
        # in one piece: ranks write into the same pipe
        print(json.dumps(measured(Path(args.child), args.overrides)) + "\n", end="", flush=True)
        return 0
    rows = [row for row in ROWS[args.rows] if not args.row or any(text in row.name for text in args.row)]
    names = [AS_IT_IS] if args.smoke else [FREED] if args.freed_at_once else list(ALLOCATORS)
    sizes = [SMOKE] if args.smoke else args.size or SIZES
    results = [measure(size, row, names, args.overrides) for size in sizes for row in rows]
    print(table(results))
    if args.output:
        Path(args.output).write_text(json.dumps({**machine(), "results": results}, indent=1) + "\n")
    judged = list(ALLOCATORS) if args.rows == "full" else [FREED]
    wrong = any(abs(result["off"].get(allocator, 0)) > WITHIN for result in results for allocator in judged)
    return int(wrong and not args.smoke)


def measure(size: str, row: Row, allocators: Sequence[str], more: Sequence[str]) -> dict[str, Any]:
    """Make a model, train it in a child process for each allocator, and compare their memory with the plan."""
    from hwgrpo_backends import registry
    from hwgrpo_backends.environment import profile

    with tempfile.TemporaryDirectory(prefix="hwgrpo-memory-") as folder:
        overrides = [*row.overrides, *more]
        make(size, folder, "bfloat16" if "model.dtype=bfloat16" in overrides else "float32", experts=row.experts)
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.ranks}"]
        runs, applied = {}, {s.name: s.value for s in profile(registry.get("cpu"), "train")}
        for allocator in allocators:
            done = subprocess.run(
                [
                    *(sys.executable, *(ranks if row.ranks > 1 else ()), str(Path(__file__).resolve())),
                    *("--child", folder, *overrides, f"trainer.output_dir={folder}/run-{len(runs)}"),
                ],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                cwd=folder,
                env=os.environ | applied | {"OMP_NUM_THREADS": "1"} | ALLOCATORS[allocator],
            )
            found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"after_imports')]
            assert len(found) == row.ranks
            runs[allocator] = max(found, key=step_peak)
        result = {"size": size, "row": row.name, "overrides": overrides, "experts": row.experts, "ranks": row.ranks}
        return result | compared(settings(Path(folder), overrides), row.ranks, runs)


def make(size: str, folder: str, dtype: str, *, experts: bool = False) -> None:
    """Write a model with random weights in files of a dtype, prompts and a reward function into a folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hwgrpo.models.tiny import character_tokenizer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape: dict[str, Any] = SMOKE_SHAPE if size == SMOKE else SIZES[size]
    if experts:
        width = shape["intermediate_size"] // EXPERTS
        shape = shape | {"num_experts": EXPERTS, "num_experts_per_tok": ACTIVATED, "moe_intermediate_size": width}
    kind = "qwen3_moe" if experts else "qwen3"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, max_position_embeddings=4096))
    model.to(getattr(torch, dtype)).save_pretrained(f"{folder}/model")
    character_tokenizer("").save_pretrained(f"{folder}/model")
    # Most tokens decode to no text: rewards by text would be equal, with zero advantages, so they are random.
    Path(folder, "reward.py").write_text(
        "import random\ndraw = random.Random(0)\n\ndef score(solution_str, ground_truth):\n    return draw.random()\n"
    )
    draw = random.Random(0)
    rows = [{"prompt": "".join(draw.choices("abcdefgh", k=PROMPT_TOKENS)), "answer": "a"} for _ in range(64)]
    Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def step_peak(run: dict[str, Any]) -> int:
    """Return the peak of a run's steps in bytes."""
    return max(size for stage, size in run["measured"].items() if stage != LOADING)


def compared(config: Any, ranks: int, runs: dict[str, Any]) -> dict[str, Any]:
    """Return measured runs with the plan and its relative error."""
    from hwgrpo_backends import registry

    from hwgrpo.planning.memory import KEPT_FREE
    from hwgrpo.planning.planner import planned_memory

    memory, shape = planned_memory(config, registry.get("cpu"), ranks)
    update = {name: size for name, size in memory.update.items() if name != KEPT_FREE}
    planned = {AS_IT_IS: memory.peak, FREED: replace(memory, update=update).peak}
    peaks = {allocator: step_peak(run) for allocator, run in runs.items()}
    return {
        "parameters": shape.parameters,
        "state_bytes": 16 * shape.parameters,
        "runs": runs,
        "planned": {"always": memory.always, "rollout": memory.rollout, "update": memory.update, "step": memory.step},
        "planned_peak": {allocator: planned[allocator] for allocator in peaks},
        "peak": peaks,
        "off": {allocator: planned[allocator] / peak - 1 for allocator, peak in peaks.items()},
    }


def settings(folder: Path, overrides: list[str]) -> Any:
    """Return the settings of a run in a folder that `make` wrote."""
    from hwgrpo.config import load_config

    return load_config(
        None,
        [
            f"model.path={folder}/model",
            f"data.train={folder}/rows.jsonl",
            f"data.max_prompt_tokens={PROMPT_TOKENS}",
            f"reward.functions=['{folder}/reward.py:score']",
            f"rollout.n={SAMPLES}",
            f"rollout.max_response_tokens={RESPONSE_TOKENS}",
            f"trainer.prompts_per_step={PROMPTS}",
            f"trainer.max_steps={STEPS}",
            "trainer.threads=1",
            "trainer.save_final_model=false",
            "model.dtype=float32",
            "observe.loggers=[jsonl]",
            "observe.progress=none",
            *overrides,
        ],
    )


def measured(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Train in this process; return resident bytes by stage, without those of the imports."""
    from contextlib import contextmanager

    import torch
    import transformers
    from hwgrpo_backends import registry

    from hwgrpo.training.loop import train
    from hwgrpo.training.setup import build_run
    from hwgrpo.training.step_stages import build_stages

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    config = settings(folder, overrides)
    import_lazy_libraries()
    after_imports = resident("VmRSS")
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")))
    run = build_run(config, registry.get("cpu"), rank, ranks)
    peaks: dict[str, int] = {LOADING: resident("VmHWM") - after_imports}
    held: dict[str, int] = {LOADING: resident("VmRSS") - after_imports}
    watch, step = run.watch, [0]

    @contextmanager
    def watched(stage: str):
        step[0] += stage == "step"
        if stage in STAGES:
            reset_peak()
        with watch(stage):
            yield
        if stage in STAGES:
            name = f"{stage} {step[0]}"
            peaks[name] = resident("VmHWM") - after_imports
            held[name] = resident("VmRSS") - after_imports

    watched.take, watched.failed = watch.take, None  # pyright: ignore[reportFunctionMemberAccess]
    run.watch = watched  # pyright: ignore[reportAttributeAccessIssue]
    run.stages = build_stages(run)
    train(run)
    return {"after_imports": after_imports, "measured": peaks, "held_after": held}


def import_lazy_libraries() -> None:
    """Import libraries that a run loads on first use, so that they do not count as the run's memory."""
    import torch
    import transformers.models.qwen3.modeling_qwen3

    assert transformers.models.qwen3.modeling_qwen3
    weight = torch.ones(64, 64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    (weight @ weight).sum().backward()  # the thread of backward passes, and the BLAS library
    optimizer.step()


def resident(field: str) -> int:
    """Return the value of a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    """Reset VmHWM to the current resident memory (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def machine() -> dict[str, Any]:
    """Return the processor and the versions of this measurement."""
    import torch
    import transformers

    from hwgrpo.bench.machine import processor

    return {
        "schema": "hwgrpo.bench.memory/1",
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "threads": 1,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "allocator": os.confstr("CS_GNU_LIBC_VERSION") or "",
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    mib = 2**20
    lines = [
        "| parameters | run | allocator | measured peak MiB | of the first run's | planned MiB | error of the plan |",
        "|---|---|---|---|---|---|---|",
    ]
    first: dict[tuple[str, str], int] = {}
    for r in results:
        for allocator, peak in r["peak"].items():
            share = peak / first.setdefault((r["size"], allocator), peak)
            lines.append(
                f"| {r['parameters'] / 1e6:.1f}M | {r['row']} | {allocator} | {peak / mib:,.0f} | {share:.2f} "
                f"| {r['planned_peak'][allocator] / mib:,.0f} | {r['off'][allocator]:+.1%} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
