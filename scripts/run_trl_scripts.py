#!/usr/bin/env python3
"""Run every GRPO program of checkouts of TRL, of Hugging Face's course or of open-r1, and print what became of each.

    python scripts/run_trl_scripts.py TRL COURSE OPEN-R1 > benchmarks/results/trl_scripts.md
    python scripts/run_trl_scripts.py TRL --only gspo --keep FOLDER   # the programs and their output stay there

A program is

    a script that imports GRPOConfig, GRPOTrainer or a GRPO trainer of trl.experimental: once with each command line of
    its docstring; `trl grpo ...` and `trl grpo --config` of the documentation are those of trl/scripts/grpo.py
    a notebook, without the lines of its shell
    a page of a course (.mdx): all of its Python blocks
    a Python block of a page (.md) with a GRPOConfig or a GRPOTrainer, with those blocks before it that define what it
    uses. `...` is left out, and what the page leaves to the reader is added: a model, rows, a reward, `trainer.train()`
    open-r1's grpo.py with each recipe of recipes/*/grpo

In a copy, each import of `trl` becomes one of `hwgrpo.trl`. Names of models on the hub are those of a tiny model in a
cache of their own. `scripts/trl_script_child.py` says what else is replaced while a program runs.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import trl_script_child

from hwgrpo.trl import rewards

TIME_LIMIT = 240.0
"""Seconds of a program."""
_KILLED = 30.0
"""Seconds until a killed process is gone."""
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["trl_script_child"])
"""Each program runs in a copy of a process that has imported torch."""
_USES = re.compile(r"\b\w*GRPO\w*Trainer\b|\btrl grpo\b")
_CALLS = re.compile(r"\bGRPO(?:Config|Trainer)\(")
_IMPORT = re.compile(r"^([ \t]*)(?:from trl((?:\.\w+)*) import|import ([^#;\n]*\btrl\b[^#;\n]*))", re.MULTILINE)
_MODULE = re.compile(r"trl((?:\.\w+)*)(?: as (\w+))?")
_BLOCK = re.compile(r"^( *)```(python|bash|yaml)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_ELLIPSIS = re.compile(r"(?<=[(\[])\s*\.\.\.,?(?=[\s,)\]])|\s*\.\.\.,?(?=\s*[)\]])")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LAUNCH_ONLY = {"--num_processes", "--accelerate_config"}
"""Options of `trl grpo` that start processes; a program runs in one."""
_NOT_PROGRAMS = ("tests", "trl/trainer", "trl/experimental", "trl/rewards", "trl/scripts")
_LANGUAGES = re.compile(r"chapters/(?!en/)")


@dataclass(frozen=True)
class Program:
    """A program, and how to start it."""

    name: str
    text: str
    arguments: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """Name -> text of files beside it."""
    packages: tuple[Path, ...] = ()
    """Folders of packages that it imports, of its own checkout."""
    is_excerpt: bool = False
    """Whether it leaves a model, rows or a reward to the reader."""


@dataclass(frozen=True)
class Outcome:
    """What became of a program."""

    program: str
    result: str
    """ran, refused or stopped."""
    detail: str
    changed: str
    seconds: float


def with_our_imports(text: str) -> str:
    """Return a program that imports `hwgrpo.trl` in place of `trl`."""

    def ours(match: re.Match[str]) -> str:
        indent, module, listed = match.groups()
        if listed is None:
            return f"{indent}from hwgrpo.trl{module} import"
        return indent + "; ".join(map(_our_import, listed.split(",")))

    return _IMPORT.sub(ours, text)


def _our_import(module: str) -> str:
    """Return the import of one module, `NAME` or `NAME as OTHER`."""
    found = _MODULE.fullmatch(module.strip())
    if found is None:
        return f"import {module.strip()}"
    below, name = found.groups()
    if name:
        return f"import hwgrpo.trl{below} as {name}"
    return (f"import hwgrpo.trl{below}; " if below else "") + "import hwgrpo.trl as trl"


def programs(folder: Path) -> Iterator[Program]:
    """Find the programs of a checkout."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if name.startswith((*_NOT_PROGRAMS, ".")) or _LANGUAGES.match(name) or not file.is_file():
            continue
        if file.suffix in (".py", ".ipynb", ".md", ".mdx"):
            text = file.read_text(encoding="utf-8", errors="replace")
            if _USES.search(text):
                yield from _programs_of(folder, file, name, text)


def _programs_of(folder: Path, file: Path, name: str, text: str) -> Iterator[Program]:
    if file.suffix == ".py" and "__main__" in text:
        yield from _script(folder, name, text)
    elif file.suffix == ".ipynb":
        yield Program(name, notebook_code(text))
    elif file.suffix == ".mdx":
        blocks = [block for kind, block in blocks_of(text) if kind == "python"]
        yield Program(name, "\n".join(without_shell(each) for each in blocks))
    elif file.suffix == ".md":
        yield from page_programs(name, text)
        script = folder / "trl/scripts/grpo.py"
        if script.is_file():
            yield from _documented_commands(name, text, script.read_text(encoding="utf-8"))


def _script(folder: Path, name: str, text: str) -> Iterator[Program]:
    recipes = sorted(folder.glob("recipes/*/grpo/*.yaml"))
    if recipes and "parse_args_and_config" in text:
        packages = tuple(each.parent for each in sorted(folder.glob("src/*/__init__.py")))
        for recipe in recipes:
            files = {recipe.name: recipe.read_text(encoding="utf-8")}
            label = f"{name} --config {recipe.relative_to(folder).as_posix()}"
            yield Program(label, text, ("--config", recipe.name), files, packages)
        return
    commands = command_lines(ast.get_docstring(ast.parse(text)) or "", name)
    for number, arguments in enumerate(commands or [()], start=1):
        label = name if len(commands) < 2 else f"{name}, command {number}"
        yield Program(label, text, tuple(arguments), files_beside(folder / name, text))


def files_beside(script: Path, text: str) -> dict[str, str]:
    """Return name -> text of the text files beside a script that it names."""
    return {each.name: each.read_text(encoding="utf-8") for each in script.parent.glob("*.txt") if each.name in text}


def command_lines(text: str, script: str) -> list[list[str]]:
    """Return the arguments of each command of a text that starts `script`."""
    joined = re.sub(r"\\\n", " ", text)
    lines = [line.partition(script)[2] for line in joined.splitlines() if script in line and line.lstrip()[0] != "#"]
    return [[each.rstrip(",") for each in shlex.split(line, comments=True)] for line in lines]


def _documented_commands(name: str, text: str, script: str) -> Iterator[Program]:
    files: dict[str, str] = {}
    number = 0
    for kind, block in blocks_of(text):
        if kind == "yaml" and (title := re.match(r"# *(\S+\.yaml)", block)):
            files[title[1]] = block
        for command in ("trl grpo", "trl/scripts/grpo.py") if kind == "bash" else ():
            for arguments in command_lines(block, command):
                number += 1
                kept = _without_launch(arguments)
                yield Program(f"{name}, command {number}", script, tuple(kept), dict(files))


def _without_launch(arguments: Sequence[str]) -> list[str]:
    """Return arguments without the options that start processes, and their values."""
    before = ["", *arguments]
    pairs = zip(before, arguments, strict=False)
    return [each for last, each in pairs if each not in _LAUNCH_ONLY and last not in _LAUNCH_ONLY]


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Return language and text of each code block of a page."""
    listed = []
    for indent, kind, block in _BLOCK.findall(text):
        listed.append((kind, re.sub(f"^{indent}", "", block, flags=re.MULTILINE)))
    return listed


def notebook_code(text: str) -> str:
    """Return the code cells of a notebook as a program."""
    cells = [each for each in json.loads(text)["cells"] if each["cell_type"] == "code"]
    return "\n".join(without_shell("".join(each["source"])) for each in cells)


def without_shell(text: str) -> str:
    """Return code without the lines for a shell and for IPython."""
    return re.sub(r"^\s*[!%].*$", "", text, flags=re.MULTILINE)


def page_programs(name: str, text: str) -> Iterator[Program]:
    """Return a program for each block of a page that has a GRPOConfig or a GRPOTrainer."""
    before: list[str] = []
    number = 0
    for kind, block in blocks_of(text):
        if kind != "python":
            continue
        code = _ELLIPSIS.sub("", block)
        if _CALLS.search(code):
            number += 1
            yield Program(f"{name}, block {number}", completed(code, before), is_excerpt=True)
        before.append(code)


def completed(code: str, before: Sequence[str]) -> str:
    """Return a block as a program: with the blocks that define its names, and what is left to the reader."""
    missing, parts = free_names(code), [code]
    for block in reversed(before):
        if not _CALLS.search(block) and missing & bound_names(block):
            missing = (missing - bound_names(block)) | free_names(block)
            parts.insert(0, block)
    parts.insert(0, "".join(f"{_readers_part(each)}\n" for each in sorted(missing)))
    bound = bound_names(code)
    if "trainer" not in bound:
        arguments = "args=training_args" if "training_args" in bound else ""
        parts.append(f"from trl import GRPOTrainer\ntrainer = GRPOTrainer({arguments})\n")
    if ".train()" not in code:
        parts.append("trainer.train()\n")
    return "\n".join(parts)


def _readers_part(name: str) -> str:
    """Return lines that define what a page leaves to the reader: a model, rows, or a function."""
    if name in ("GRPOConfig", "GRPOTrainer"):
        return f"from trl import {name}"
    if hasattr(rewards, name):
        return f"from trl.rewards import {name}"
    if name == "model":
        return 'model = "org/tiny"'
    if name == "dataset":
        return 'dataset = [{"prompt": f"What is 1 + {n}?"} for n in range(16)]'
    return f"def {name}(*_, completions=None, **__): return 1.0 if completions is None else [1.0] * len(completions)"


def bound_names(code: str) -> set[str]:
    """Return the names that the statements of a block define; none where it is no Python."""
    names: set[str] = set()
    for node in _tree(code).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Assign):
            names |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return names


def free_names(code: str) -> set[str]:
    """Return the names that a block reads and nowhere defines."""
    tree, bound = _tree(code), bound_names(code)
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return {name for name in read - bound if not hasattr(builtins, name)}


def _tree(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except SyntaxError:
        return ast.Module([], [])


def hub_cache(folder: Path, model: Path, names: set[str]) -> None:
    """Make a cache of the hub in which each name is the model."""
    for name in names:
        place = folder / "hub" / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs/main").write_text("0" * 40)
        (place / "snapshots").mkdir(exist_ok=True)
        if not (link := place / "snapshots" / ("0" * 40)).exists():
            link.symlink_to(model, target_is_directory=True)


def save_tiny_model(folder: Path) -> None:
    """Write a random Qwen2 of single bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", "<|im_end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}{{ m['role'] }}: "
        "{{ m['content'] }}{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}"
        "</tool_call>{% endfor %}\n{% endfor %}"
    )
    set_seed(0)
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def hub_names(listed: Sequence[Program]) -> set[str]:
    """Return what may be the name of a model on the hub in some programs."""
    texts = [text for each in listed for text in (each.text, *each.files.values(), *each.arguments)]
    return {name for text in texts for name in _HUB_NAME.findall(text)} | {"org/tiny", "your_model"}


def run(program: Program, number: int, workspace: Path) -> Outcome:
    """Run a program in a folder of its own."""
    folder = workspace / f"{number:03}"
    folder.mkdir(parents=True)
    for name, text in program.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    for package in program.packages:
        shutil.copytree(package, folder / package.name)
    for file in folder.rglob("*.py"):
        file.write_text(with_our_imports(file.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "program.py").write_text(with_our_imports(program.text), encoding="utf-8")
    child = _PROCESSES.Process(target=trl_script_child.run, args=(str(folder), program.arguments, program.is_excerpt))
    started = time.monotonic()
    child.start()
    child.join(TIME_LIMIT)
    late = f"no end after {TIME_LIMIT:.0f} s" if child.is_alive() else ""
    child.kill()
    child.join(_KILLED)
    if not late and child.exitcode:
        late = f"the process ended with {child.exitcode}"
    seconds = time.monotonic() - started
    written = folder / "result.json"
    values = json.loads(written.read_text(encoding="utf-8").replace(f"{folder}/", "")) if written.is_file() else {}
    return _outcome(program.name, values, late, seconds)


def _outcome(name: str, values: dict, late: str, seconds: float) -> Outcome:
    replaced = values.get("changed", [])
    if stand_ins := values.get("stand_ins"):
        replaced = [*replaced, f"stand-ins for {', '.join(stand_ins)}"]
    changed = ", ".join(replaced)
    error = values.get("error") or late
    if values.get("updates") is not None:
        detail = f"{values['updates']} updates, loss {values['loss']:.3g}" + (f"; then {error}" if error else "")
        return Outcome(name, "ran", detail, changed, seconds)
    result = "refused" if values.get("refused") else "stopped"
    return Outcome(name, result, error or "it trains nothing", changed, seconds)


def table(outcomes: Sequence[Outcome], sources: Sequence[str]) -> str:
    """Return a page with the counts and a line per program."""
    counts = Counter(each.result for each in outcomes)
    total = ", ".join(f"{counts[each]} {each}" for each in ("ran", "refused", "stopped"))
    packages = ", ".join(f"{each} {version(each)}" for each in ("torch", "transformers", "datasets", "peft"))
    lines = [
        "# TRL's programs, run",
        "",
        f"{', '.join(sources)}: {len(outcomes)} programs: {total}.",
        "Written by `python scripts/run_trl_scripts.py FOLDER ...`: two updates each on a CPU, after the import is",
        "changed. Model and rows are made on the spot; the script says what else is replaced, and the last column what",
        f"was in each. hwgrpo of commit {head_of(Path(__file__).parent, '%h')}; {packages}.",
        "",
        "| program | result | updates and loss, or the message | seconds | replaced |",
        "|---|---|---|---|---|",
    ]
    for each in outcomes:
        detail = each.detail.replace("|", "\\|")
        lines.append(f"| {each.program} | {each.result} | {detail} | {each.seconds:.0f} | {each.changed} |")
    return "\n".join(lines) + "\n"


def source_of(folder: Path) -> str:
    """Return the folder's name with its commit, where it is a checkout."""
    commit = head_of(folder, "%h, %cs")
    return f"`{folder.name}`" + (f" ({commit})" if commit else "")


def head_of(folder: Path, form: str) -> str:
    """Return the newest commit of a checkout in a form of git; "" where it is none."""
    asked = ["git", "-C", str(folder), "log", "-1", f"--format={form}"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def main(arguments: list[str]) -> int:
    """Run the programs of folders and print the table."""
    parser = argparse.ArgumentParser(description="Run every GRPO program of checkouts of TRL, the course or open-r1.")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="regular expression that the programs' names match")
    parser.add_argument("--keep", type=Path, help="new folder for the programs and their output")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    options = parser.parse_args(arguments)
    missing = [str(each) for each in options.folders if not each.is_dir()]
    if missing:
        parser.error(f"no folder {missing[0]}: give checkouts, e.g. of https://github.com/huggingface/trl")
    listed = [each for folder in options.folders for each in programs(folder) if re.search(options.only, each.name)]
    with tempfile.TemporaryDirectory() as temporary:
        workspace = (options.keep or Path(temporary)).absolute()
        workspace.mkdir(parents=True, exist_ok=True)
        save_tiny_model(workspace / "model")
        hub_cache(workspace / "home", workspace / "model", hub_names(listed))
        os.environ |= {"HF_HOME": str(workspace / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]  # of the process that imports torch
        os.environ["PYTHONPATH"] = os.pathsep.join(each for each in paths if each)
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(lambda n: run(listed[n], n, workspace), range(len(listed))))
    print(table(outcomes, [source_of(each) for each in options.folders]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
