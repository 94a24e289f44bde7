"""What a run takes of a host's memory against what `hwgrpo plan` says, stage by stage, on a CPU with one thread.

Each size is a Qwen3 with random weights, made on the spot, that trains for two steps in a process of its own by the
parts that `hwgrpo train` uses. The process reads its resident memory after the imports and takes that off; the
kernel's high-water mark (VmHWM) is set back before each stage, so that every stage has a peak of its own. Responses end
at their longest, as the plan takes them to: one token in thousands ends one earlier. Each size runs twice, with glibc's
malloc as it is and with one that gives freed blocks back at once, which tells tensors from what malloc keeps.

    python benchmarks/memory.py --size 36m --size 120m --output results.json

It ends with 1 where a peak and its plan are more than 10 % apart.
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
SMOKE = "smoke"
SMOKE_SHAPE: dict[str, int | bool] = {
    **SIZES["36m"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 128,
}  # fmt: skip
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS, STEPS = 4, 4, 32, 64, 2
WITHIN = 0.10
STAGES = ("gen", "update_actor")
ALLOCATORS: dict[str, dict[str, str]] = {
    "malloc as it is": {},
    "freed at once": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"},
}
"""Variables of each run. The second makes glibc give every larger block back when it is freed: what tensors hold."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the sizes asked for; return 1 where a plan is off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), action="append", help="default: all")
    parser.add_argument("--output", help="write the results as JSON to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the runs, as for `hwgrpo train`")
    parser.add_argument("--smoke", action="store_true", help="a tiny model with malloc as it is, held to no plan")
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(measured(Path(args.child), args.overrides)))
        return 0
    results = [measure(size, args.overrides) for size in ([SMOKE] if args.smoke else args.size or SIZES)]
    print(table(results))
    if args.output:
        Path(args.output).write_text(json.dumps({**machine(), "results": results}, indent=1) + "\n")
    apart = any(abs(off) > WITHIN for result in results for off in result["off"].values())
    return int(apart and not args.smoke)


def measure(size: str, overrides: list[str]) -> dict[str, Any]:
    """Make a model, train it in child processes, and lay the plan beside what each took."""
    with tempfile.TemporaryDirectory(prefix="hwgrpo-memory-") as folder:
        make(size, folder)
        runs = {}
        for allocator, variables in list(ALLOCATORS.items())[: 1 if size == SMOKE else None]:
            done = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), "--child", f"{folder}", *overrides],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            )
            runs[allocator] = json.loads(done.stdout.splitlines()[-1])
        return {"size": size, "overrides": overrides, **compared(settings(Path(folder), overrides), runs)}


def make(size: str, folder: str) -> None:
    """Write a model with random weights, prompts and a reward function into a folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from hwgrpo.models.tiny import character_tokenizer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape: dict[str, Any] = SMOKE_SHAPE if size == SMOKE else SIZES[size]
    model = Qwen3ForCausalLM(Qwen3Config(**shape, max_position_embeddings=4096))
    model.save_pretrained(f"{folder}/model")
    character_tokenizer("").save_pretrained(f"{folder}/model")
    # Most tokens are no text: rewards by text would be equal and nothing would be trained, so they are random.
    Path(folder, "reward.py").write_text(
        "import random\ndraw = random.Random(0)\n\ndef score(solution_str, ground_truth):\n    return draw.random()\n"
    )
    draw = random.Random(0)
    rows = [{"prompt": "".join(draw.choices("abcdefgh", k=PROMPT_TOKENS)), "answer": "a"} for _ in range(64)]
    Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def compared(config: Any, runs: dict[str, Any]) -> dict[str, Any]:
    """Return measured runs with the plan and how far it is off."""
    from hwgrpo_backends import registry

    from hwgrpo.planning.memory import KEPT_FREE
    from hwgrpo.planning.scale_plan import planned_memory

    memory, shape = planned_memory(config, registry.get("cpu"))
    planned = {
        "malloc as it is": memory.peak,
        "freed at once": memory.peak - memory.update.get(KEPT_FREE, 0),
    }
    peaks = {allocator: max(run["measured"].values()) for allocator, run in runs.items()}
    return {
        "parameters": shape.parameters,
        "state_bytes": 16 * shape.parameters,
        "runs": runs,
        "planned": {"always": memory.always, "rollout": memory.rollout, "update": memory.update},
        "planned_peak": {allocator: planned[allocator] for allocator in peaks},
        "peak": peaks,
        "off": {allocator: planned[allocator] / peak - 1 for allocator, peak in peaks.items()},
    }


def settings(folder: Path, overrides: list[str]) -> Any:
    """Return the settings of a run in a folder of `make`."""
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
            f"trainer.output_dir={folder}/run-{os.getpid()}",
            "trainer.threads=1",
            "trainer.save_final_model=false",
            "model.dtype=float32",
            "observe.loggers=[jsonl]",
            "observe.progress=none",
            *overrides,
        ],
    )


def measured(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Train in this process; return bytes above those after the imports, by stage."""
    from contextlib import contextmanager

    import torch
    import transformers
    from hwgrpo_backends import registry

    from hwgrpo.training.loop import train
    from hwgrpo.training.setup import build_run

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    config = settings(folder, overrides)
    import_the_rest()
    after_imports = resident("VmRSS")
    run = build_run(config, registry.get("cpu"), 0, 1)
    peaks: dict[str, int] = {"loading": resident("VmHWM") - after_imports}
    held: dict[str, int] = {"loading": resident("VmRSS") - after_imports}
    watch, step = run.watch, [0]

    @contextmanager
    def watched(stage: str):
        step[0] += stage == "step"
        if stage in STAGES:
            forget_peak()
        with watch(stage):
            yield
        if stage in STAGES:
            name = f"{stage} {step[0]}"
            peaks[name] = resident("VmHWM") - after_imports
            held[name] = resident("VmRSS") - after_imports

    watched.take, watched.failed = watch.take, None  # pyright: ignore[reportFunctionMemberAccess]
    run.watch = watched  # pyright: ignore[reportAttributeAccessIssue]
    train(run)
    return {"after_imports": after_imports, "measured": peaks, "held_after": held}


def import_the_rest() -> None:
    """Import what a run loads on first use, so that it counts as import and not as the run's own."""
    import torch
    import transformers.models.qwen3.modeling_qwen3

    assert transformers.models.qwen3.modeling_qwen3
    weight = torch.ones(64, 64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    (weight @ weight).sum().backward()  # the thread that runs backward passes, and the library of matrix products
    optimizer.step()


def resident(field: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Set VmHWM back to what is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def machine() -> dict[str, Any]:
    """Return where and with what this was measured."""
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
    """Return the figures as a table."""
    mib = 2**20
    lines = [
        "| parameters | state MiB | allocator | measured peak MiB | planned MiB | off |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        for allocator, peak in r["peak"].items():
            planned = r["planned_peak"][allocator]
            lines.append(
                f"| {r['parameters'] / 1e6:.1f}M | {r['state_bytes'] / mib:,.0f} | {allocator} | {peak / mib:,.0f} "
                f"| {planned / mib:,.0f} | {r['off'][allocator]:+.1%} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
