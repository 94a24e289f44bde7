"""GRPO on agents: tiny models with tools and in environments, SmolLM2-135M with a calculator, and tasks about pictures.

    python benchmarks/agent_curves.py --output benchmarks/results/agents.json
    python benchmarks/agent_curves.py --pictures --output benchmarks/results/vision.json
    python scripts/fetch_smollm2.py FOLDER
    python benchmarks/agent_curves.py --model FOLDER --output benchmarks/results/agents_smollm2.json

Every way trains a recipe, one after another. The control draws the rewards of a step's trajectories in another order
(`reward.shuffle`), so that they say nothing of what was done. SmolLM2 is warm-started first, by `hwgrpo sft` on
conversations that call the calculator rightly, wrongly, or four times as often not at all (`--demonstrations FILE`
writes them). The way "spelling" needs `pip install "hwgrpo[reasoning]"`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from real_model import picture, read_run

from hwgrpo.agents.agent_rows import tool_schemas
from hwgrpo.config.schema import AgentConfig, ToolConfig
from hwgrpo.data.tasks import parse_task

SMOLLM2 = "smollm2_135m_calculator"
WAYS: dict[str, list[str]] = {
    **{
        f"calculator, seed {seed}": [
            "tiny_calculator",
            f"trainer.seed={seed}",
            f"model.path=builtin://tiny?task=calculator&seed={seed}",
        ]
        for seed in range(5)
    },
    "calculator, rewards shuffled": ["tiny_calculator", "reward.shuffle=true"],
    "search": ["tiny_lookup"],
    "guessing": ["tiny_guess"],
    "spelling": ["tiny_spell"],
    "SmolLM2 calculator": [SMOLLM2, "model.dtype=bfloat16"],
    "SmolLM2 calculator, rewards shuffled": [SMOLLM2, "model.dtype=bfloat16", "reward.shuffle=true"],
}
PICTURES: dict[str, list[str]] = {
    **{
        f"{task}, seed {seed}": [
            f"tiny_{task}",
            f"trainer.seed={seed}",
            f"model.path=builtin://tiny?task={task}&steps=300&batch=32&lr=1e-3&seed={seed}",
        ]
        for task in ("squares", "look")
        for seed in range(3)
    },
    "squares, rewards shuffled": ["tiny_squares", "reward.shuffle=true"],
    "look, rewards shuffled": ["tiny_look", "reward.shuffle=true"],
}
CURVE = ["trainer.validate_every=10"]
METRICS = {"calls": "tools/call_frequency", "turns": "agent/turns/mean"}
"""Column of the curve, beside those of `real_model.py` -> metric."""
DEMONSTRATIONS = 300


def main(argv: Sequence[str] | None = None) -> None:
    """Train, write the curves and their picture, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct, for its ways")
    parser.add_argument("--pictures", action="store_true", help="the ways of tasks about pictures")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *PICTURES), metavar="WAY", help=f"of: {'; '.join(WAYS)}")
    parser.add_argument("--output", help="JSON file of the results; those of other ways that it holds are kept")
    parser.add_argument("--demonstrations", help="only write the conversations of SmolLM2's warm start to this file")
    parser.add_argument("--smoke", action="store_true", help="two steps of a tiny model")
    args = parser.parse_args(argv)
    if args.demonstrations:
        write_demonstrations(Path(args.demonstrations))
        return
    known = PICTURES if args.pictures else WAYS
    of_model = [way for way in known if (known[way][0] == SMOLLM2) == (args.model is not None)]
    ways = args.ways or (of_model[:1] if args.smoke else of_model)
    if not args.smoke and (args.output is None or (args.model is None and any(known[w][0] == SMOLLM2 for w in ways))):
        parser.error("--output is required, and --model for the ways with SmolLM2")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(args.output or f"{folder}/agents.json")
        results: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
        warm: list[str] = []
        for way in ways:
            recipe, *settings = known[way]
            if recipe == SMOLLM2:
                warm = warm or [f"model.path={warm_start(Path(folder), args.model)}", "trainer.threads=1"]
            print(f"training: {way}", file=sys.stderr, flush=True)
            more = smoke(recipe) if args.smoke else warm if recipe == SMOLLM2 else CURVE
            run("train", recipe, Path(folder) / str(ways.index(way)), [*settings, *more])
            columns = METRICS if recipe != "tiny_squares" else {}  # it has one turn
            results[way] = read_run(Path(folder) / str(ways.index(way)), columns)
            results = {name: results[name] for name in known if name in results}
            output.write_text(json.dumps(results, indent=1) + "\n")  # keeps the finished ways if a later one fails
            output.with_suffix(".svg").write_text(picture(results, known))
    print(table(results))


def smoke(recipe: str) -> list[str]:
    """Return the settings of a short run."""
    task = recipe.removeprefix("tiny_")
    path = f"model.path=builtin://tiny?task={task}&steps=2&batch=8"
    return [path, "trainer.max_steps=2", "data.validation_max_rows=8"]


def run(command: str, recipe: str, output: Path, settings: Sequence[str]) -> None:
    """Run `hwgrpo COMMAND RECIPE` on the CPU."""
    fixed = [f"trainer.output_dir={output}", "trainer.save_every=0", "backend.name=cpu", "observe.progress=none"]
    arguments = [sys.executable, "-m", "hwgrpo", command, recipe, *fixed, "observe.loggers=[jsonl]", *settings]
    status = subprocess.run(arguments, env=os.environ, check=False).returncode
    if status:
        raise SystemExit(f"the run ended with exit code {status}: {' '.join(arguments)}")


def warm_start(folder: Path, model: str | None) -> Path:
    """Return the folder of SmolLM2 after supervised training on the demonstrations."""
    rows = folder / "demonstrations.jsonl"
    write_demonstrations(rows)
    settings = [
        f"model.path={model}",
        "model.dtype=bfloat16",
        f"data.train={rows}",
        "data.validation=null",
        "trainer.validate_every=0",
    ]
    run(
        "sft",
        SMOLLM2,
        folder / "warm",
        [*settings, "trainer.prompts_per_step=16", "trainer.max_steps=14", "trainer.threads=1"],
    )
    return folder / "warm" / "final"


def write_demonstrations(path: Path) -> None:
    """Write conversations with a calculator: of six a right call, a wrong one, and four answers without one."""
    tools = tool_schemas(AgentConfig(tools=[ToolConfig("calculator")]))
    rows = []
    for number, row in enumerate(parse_task("task://calculator").splits["warm"][:DEMONSTRATIONS]):
        question, answer = row["prompt"], row["ground_truth"]
        messages = [{"role": "user", "content": question}]
        if number % 6 < 2:
            expression = question if number % 6 == 0 else question.replace("*", "+")
            result = answer if number % 6 == 0 else str(sum(map(int, question.split("*"))))
            call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
            messages += [
                {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
                {"role": "tool", "content": result},
                {"role": "assistant", "content": result},
            ]
        else:
            messages.append({"role": "assistant", "content": str(int(answer) + (number % 9 - 4) * 10)})
        rows.append({"messages": messages, "tools": tools})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(results: Mapping[str, Any]) -> str:
    """Return accuracies, calls and turns before and after, and times of each way, as Markdown."""
    lines = [
        "| way | greedy before, after | sampled | calls per trajectory | turns | steps, minutes | warnings |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, result in results.items():
        ends = [result["validations"][0], result["validations"][-1]]
        greedy, sampled = (
            ", ".join(f"{e[name]:.3f}" for e in ends if name in e) or "-" for name in ("greedy", "sampled")
        )
        calls, turns = (
            ", ".join(f"{p[name]:.2f}" for p in (result["curve"][0], result["curve"][-1]) if name in p) or "-"
            for name in METRICS
        )
        warnings = ", ".join(result["warnings"]) or "-"
        length = f"{len(result['curve'])}, {result['minutes']:.1f}"
        lines.append(f"| {way} | {greedy} | {sampled} | {calls} | {turns} | {length} | {warnings} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
