"""Turns of agents with the local engine: what further turns cost, and how much of the time it samples beside tools.

    python benchmarks/agent_turns.py
    python benchmarks/agent_turns.py --size 36m --threads 2

Random weights that never end a turn; every way samples as many tokens. The first table compares three turns with one
turn of all their tokens: with the keys and values of earlier turns (a session), and with each turn's history prefilled.
Each turn observes tokens of a tool that takes no time; they are not counted. Ways alternate, and the first round is a
warm-up. On a machine that does other work, read the processor's time. The second table has the share of a `generate` in
which the engine samples, prefills included, with tools that take time, in rounds and asynchronously.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from local_engine import SAMPLES, SIZES, SMOKE_SHAPE, random_model  # first: it sets variables that torch reads

import torch  # isort: skip
import transformers  # isort: skip

from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.rollout.workflow import Sampler, Trajectory
from hwgrpo.rollout.workflow_engine import WorkflowEngine
from hwgrpo.values import Completions, Prompt, PromptBatch, Sampling

SHAPES = {**SIZES, "smoke": SMOKE_SHAPE}
TURNS, SLOW = 3, 4
"""Turns of a trajectory, and trajectories whose first tool is slow."""


class Timed:
    """An engine whose sessions record how long they sample."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.seconds = engine, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        return self.engine.generate(batch, sampling)

    def open_session(self, longest: int, **options: Any) -> Any:
        session = self.engine.open_session(longest, **options)
        advance = session.advance

        def timed() -> list[int]:
            began = time.perf_counter()
            ended = advance()
            self.seconds += time.perf_counter() - began
            return ended

        session.advance = timed  # type: ignore[method-assign]
        return session


class Prefilling:
    """An engine without sessions, so that workflows prefill the history of every turn."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        return self.engine.generate(batch, sampling)


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), default="1m", help="random weights")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--turn-tokens", type=int, default=64, help="sampled per turn")
    parser.add_argument("--observed-tokens", type=int, default=16, help="between two turns")
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--tool", type=float, default=0.05, metavar="SECONDS", help="of a call of a tool")
    parser.add_argument(
        "--slow-tool", type=float, default=2.0, metavar="SECONDS", help=f"of one in {SLOW} trajectories"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="one round of a tiny model")
    args = parser.parse_args(argv)
    if args.smoke:
        args.size, args.prompt_tokens, args.turn_tokens, args.observed_tokens = "smoke", 4, 4, 2
        args.trajectories, args.slots, args.tool, args.slow_tool, args.repeat = SAMPLES, 4, 0.001, 0.01, 1
    if args.trajectories % SAMPLES:
        raise SystemExit(f"--trajectories {args.trajectories} must be a multiple of {SAMPLES}, those of a prompt")
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    engine = engine_of(args)
    print(f"{args.size}: {args.trajectories} trajectories in {args.slots} slots, {args.threads} thread(s)")
    turns = f"{TURNS} turns of {args.turn_tokens} tokens, {args.observed_tokens} observed in between"
    print(f"prompts of {args.prompt_tokens} tokens, {turns}\n")
    print(costs_of_turns(engine, args))
    print()
    print(shares_of_time(engine, args))
    return 0


def costs_of_turns(engine: LocalEngine, args: argparse.Namespace) -> str:
    """Return the table of sampled tokens per second."""
    ways: dict[str, Callable[[], Any]] = {
        "one turn of all tokens": lambda: generate(engine, [TURNS * args.turn_tokens], args),
        "turns that continue": lambda: generate(engine, [args.turn_tokens] * TURNS, args),
        "turns that prefill": lambda: generate(Prefilling(engine), [args.turn_tokens] * TURNS, args),
    }
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for round_number in range(args.repeat + 1):
        for way, run in ways.items():
            began = time.perf_counter(), time.process_time()
            run()
            if round_number:
                seconds[way].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    tokens = args.trajectories * TURNS * args.turn_tokens
    lines = ["| | tokens/s (wall) | of one turn | tokens/s (CPU) | of one turn |", "|---|---|---|---|---|"]
    first: tuple[float, ...] = ()
    for way, measured in seconds.items():
        rates = tuple(tokens / median(column) for column in zip(*measured, strict=True))
        first = first or rates
        cells = [f"{rate:,.0f} | {rate / one:.2f}" for rate, one in zip(rates, first, strict=True)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shares_of_time(engine: LocalEngine, args: argparse.Namespace) -> str:
    """Return the table of how much of the time the engine samples."""
    lines = ["| tools | workflows | share of time with sampling | seconds |", "|---|---|---|---|"]
    cases = {
        f"{args.tool:g} s": lambda trajectory, turn: args.tool,
        f"{args.tool:g} s; {SLOW} trajectories one of {args.slow_tool:g} s": lambda trajectory, turn: (
            args.slow_tool if trajectory < SLOW and not turn else args.tool
        ),
    }
    for case, takes in cases.items():
        for asynchronous in (False, True):
            timed = Timed(engine)
            began = time.perf_counter()
            generate(timed, [args.turn_tokens] * TURNS, args, takes, asynchronous)
            wall = time.perf_counter() - began
            way = "asynchronous" if asynchronous else "in rounds"
            lines.append(f"| {case} | {way} | {timed.seconds / wall:.1%} | {wall:.1f} |")
    return "\n".join(lines)


def generate(
    engine: Any,
    turns: Sequence[int],
    args: argparse.Namespace,
    takes: Callable[[int, int], float] | None = None,
    asynchronous: bool = False,
) -> Completions:
    """Sample trajectories of so many tokens per turn.

    Args:
        engine: samples.
        turns: tokens of each turn.
        args: the benchmark's.
        takes: seconds of a tool, from the trajectory's number and the turn; None: tools take no time.
        asynchronous: not in rounds.
    """
    numbers = iter(range(args.trajectories))

    async def workflow(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        return await sampler.gather(one)

    async def one(sampler: Sampler) -> Trajectory:
        number, trajectory = next(numbers), sampler.trajectory()
        for turn, tokens in enumerate(turns):
            if turn:
                if takes is not None:
                    await asyncio.sleep(takes(number, turn - 1))
                trajectory.observe(list(range(10, 10 + args.observed_tokens)), "")
            await sampler.sample(trajectory, max_tokens=tokens)
        return trajectory

    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(10, 90, (args.trajectories // SAMPLES, args.prompt_tokens), generator=draw)
    batch = PromptBatch(tuple(Prompt(str(i), "", tuple(row), None, {}) for i, row in enumerate(rows.tolist())))
    most = sum(turns) + args.observed_tokens * (len(turns) - 1)
    tokenizer = character_tokenizer("")
    each = WorkflowEngine(engine, workflow, "benchmark", tokenizer, 600.0, asynchronous=asynchronous)
    done = each.generate(batch, Sampling(SAMPLES, most))
    sampled = len(done.tokens) if done.loss_mask is None else int(done.loss_mask.sum())
    if sampled != args.trajectories * sum(turns):
        raise SystemExit(f"{sampled:,} tokens of {args.trajectories * sum(turns):,} were sampled")
    return done


def engine_of(args: argparse.Namespace) -> LocalEngine:
    """Return an engine of a random Qwen3 whose responses never end by themselves."""
    longest = args.prompt_tokens + TURNS * (args.turn_tokens + args.observed_tokens)
    model = random_model(SHAPES[args.size], longest)
    tokenizer = character_tokenizer("")
    tokenizer.eos_token = None  # a token like any other
    return LocalEngine(
        model, tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32, max_sequences=args.slots
    )


if __name__ == "__main__":
    raise SystemExit(main())
