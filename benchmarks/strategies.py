"""Seconds of an update, and of gathering the new weights for a rollout engine, under each strategy, in one run.

    torchrun --nproc-per-node 2 benchmarks/strategies.py ddp fsdp2 zero-1 zero-2 --repeat 7 --output results.json

Every strategy trains the same randomly initialized Qwen3 on the same sequences, in fp32 with one thread per rank. In
each round every strategy runs one update (several micro-batches, gradient clipping, AdamW) and gathers the full
weights on every rank; the first round is a warm-up. A time is that of the slowest rank. Gradient norms are
compared first: a relative difference above 1e-4 from the first strategy ends the run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "backends"), str(REPO / "kernels")]

import torch  # noqa: E402  (the paths come first)
import torch.distributed as dist  # noqa: E402
from hwgrpo_backends.cpu import BACKEND  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from hwgrpo.catalog import STRATEGIES  # noqa: E402
from hwgrpo.cli.process_exit import ended_as_rank  # noqa: E402
from hwgrpo.config import load_config  # noqa: E402
from hwgrpo.planning.strategy_choice import resolve_strategy  # noqa: E402
from hwgrpo.training.policy.layouts import PADDED  # noqa: E402
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel  # noqa: E402
from hwgrpo.training.strategies.strategy import Strategy  # noqa: E402
from hwgrpo.training.update.policy_update import PolicyUpdate  # noqa: E402
from hwgrpo.values import TrainBatch  # noqa: E402

SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192, "tie_word_embeddings": True,
}  # fmt: skip
SMOKE_SHAPE = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
PROMPT_TOKENS, SAMPLES = 32, 4
EACH_PASS = ["trainer.strategy=fsdp2", "trainer.fsdp2.sync_every=micro_batch"]
ZERO_2 = ["trainer.strategy=deepspeed", "trainer.deepspeed.stage=2"]
WAYS = {
    "ddp": ["trainer.strategy=ddp"],
    "fsdp2": ["trainer.strategy=fsdp2"],
    "passes": EACH_PASS,
    "gathered": [*EACH_PASS, "trainer.fsdp2.reshard_after_forward=false"],
    **{f"zero-{n}": ["trainer.strategy=deepspeed", f"trainer.deepspeed.stage={n}"] for n in (1, 2, 3)},
    "zero-2-passes": [*ZERO_2, "trainer.deepspeed.sync_every=micro_batch"],
    "sequences": ["trainer.strategy=fsdp2", "trainer.sequence_parallel_size=2"],
    "layers": ["trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2"],
}
"""Name on the command line -> settings. `passes`, `gathered` and `zero-2-passes` synchronize each micro-batch;
`gathered` keeps gathered weights from the forward to the backward pass."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="way", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--repeat", type=int, default=7, help="measured rounds")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per rank, with 4 samples each")
    parser.add_argument("--response-tokens", type=int, default=96)
    parser.add_argument("--output", help="write the results as JSON to this file")
    parser.add_argument("--smoke", action="store_true", help="only ddp with a tiny model, one round")
    args = parser.parse_args(argv)
    if args.smoke:
        args.ways, args.repeat, args.prompts, args.response_tokens = args.ways or ["ddp"], 1, 1, 8
    if not args.ways or not set(args.ways) <= set(WAYS):
        parser.error(f"ways {args.ways}: use one or more of {', '.join(WAYS)}")
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 benchmarks/strategies.py WAYS")
    if any(way.startswith("zero-") for way in args.ways) and find_spec("deepspeed") is None:
        raise SystemExit("zero-1 to zero-3 need DeepSpeed: pip install -e '.[deepspeed]', or omit them")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    updates = {way: updater(way, args) for way in args.ways}
    batch = sequences(args)
    check_losses(updates, batch)
    times: dict[str, dict[str, list[float]]] = {way: {"update": [], "weights": []} for way in updates}
    for number in range(args.repeat + 1):
        for way, update in updates.items():
            strategy = update.strategy
            seconds = {
                "update": timed(strategy, lambda update=update: update(batch)),
                "weights": timed(strategy, lambda strategy=strategy: [None for _ in strategy.gather_full_parameters()]),
            }
            if number:
                for name, each in seconds.items():
                    times[way][name].append(each)
    if dist.get_rank() == 0:
        print(table(times))
        if args.output:
            Path(args.output).write_text(json.dumps(record(args, times), indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the model's sizes."""
    return SMOKE_SHAPE if args.smoke else SHAPE


def updater(way: str, args: argparse.Namespace) -> PolicyUpdate:
    """Return the policy under a strategy."""
    settings = [*WAYS[way], "model.path=builtin://tiny?task=sort", "data.train=task://sort"]
    settings += ["reward.functions=[exact_match]", "optim.lr=1e-6", "data.max_prompt_tokens=64"]
    settings += [f"trainer.prompts_per_step={args.prompts * dist.get_world_size()}"]
    config = load_config(None, [*settings, "trainer.tokens_per_micro_batch=1024", "rollout.max_response_tokens=128"])
    resolve_strategy(config, BACKEND, dist.get_world_size(), device=None)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**shape_of(args), max_position_embeddings=256))
    policy = PolicyModel(model, compute_dtype=torch.float32, options=HeadOptions())
    strategy: Strategy = STRATEGIES.load(config.trainer.strategy).make(torch.device("cpu"), "gloo")
    strategy.prepare(config)
    strategy.wrap(policy, config)
    return PolicyUpdate(config, strategy, policy, torch.device("cpu"), PADDED, total_updates=1000)


def sequences(args: argparse.Namespace) -> TrainBatch:
    """Return this rank's sequences, all of one length, of random tokens and advantages."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    prompts, response_tokens = args.prompts, args.response_tokens
    count = prompts * SAMPLES

    def tokens(size: int) -> torch.Tensor:
        return torch.randint(shape_of(args)["vocab_size"], (size,), generator=generator)

    return TrainBatch(
        prompt_tokens=tokens(prompts * PROMPT_TOKENS),
        prompt_offsets=torch.arange(prompts + 1) * PROMPT_TOKENS,
        prompt_index=torch.arange(prompts).repeat_interleave(SAMPLES),
        tokens=tokens(count * response_tokens),
        offsets=torch.arange(count + 1) * response_tokens,
        advantages=torch.randn(count, generator=generator),
        logprobs=torch.full((count * response_tokens,), -9.0),
    )


def check_losses(updates: dict[str, PolicyUpdate], batch: TrainBatch) -> None:
    """Exit with an error if a strategy's gradient norm differs from the first one's."""
    norms = {}
    for way, update in updates.items():
        update.accumulate_gradients(batch, range(len(batch)))
        norms[way] = float(update.strategy.clip_gradients(0.0))
        update.strategy.discard_gradients()
    first = next(iter(norms.values()))
    for way, norm in norms.items():
        if abs(norm - first) > 1e-4 * first:
            raise SystemExit(f"{way} computes a gradient of norm {norm}, the first strategy {first}: nothing is timed")


def timed(strategy: Strategy, work: Any) -> float:
    """Return the seconds of the slowest rank."""
    strategy.barrier()
    began = time.perf_counter()
    work()
    return max(strategy.gather_objects(time.perf_counter() - began))


def table(times: dict[str, dict[str, list[float]]]) -> str:
    """Return medians as Markdown, with the ratio to the first strategy."""
    first = statistics.median(next(iter(times.values()))["update"])
    lines = ["| strategy | update s | of the first | weights s | of an update |", "|---|---|---|---|---|"]
    for way, each in times.items():
        update, weights = (statistics.median(each[name]) for name in ("update", "weights"))
        lines.append(f"| {way} | {update:.3f} | {update / first:.2f} | {weights:.4f} | {weights / update:.1%} |")
    return "\n".join(lines)


def record(args: argparse.Namespace, times: Any) -> dict[str, Any]:
    """Return the results with the machine and the versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "shape": shape_of(args),
        "prompts per rank": args.prompts,
        "samples": SAMPLES,
        "response tokens": args.response_tokens,
        "seconds": times,
    }


if __name__ == "__main__":
    with ended_as_rank():
        main()
