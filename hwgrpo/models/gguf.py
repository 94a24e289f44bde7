"""Models in GGUF: converted into a cached folder in Hugging Face format, once for a file."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.models.model_cache import cache_root, prepare_root, publish, unfinished_folder
from hwgrpo.support.file_systems import lock
from hwgrpo.support.paths import find_gguf
from hwgrpo.support.permissions import follow_umask
from hwgrpo.support.waits import STUCK_AFTER, Wait

WEIGHTS = "model.safetensors"
POLL_S = 0.5
"""Seconds between attempts to lock the cache."""
LLAMA_3_ROTARY = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Rotary embeddings of Llama 3.1 and later ones, without the factor."""
ORIGINAL = "set model.path to the original checkpoint in safetensors"


def resolve(file: Path, *, weights: bool) -> Path:
    """Return the folder of a GGUF model in Hugging Face format, after converting what the cache lacks of it.

    Weights are dequantized to fp32. One process converts; others of the host wait.

    Args:
        file: a `.gguf` file.
        weights: False: configuration and tokenizer are enough, which are converted in seconds.

    Raises:
        ConfigError: transformers cannot read the file, the package gguf is missing, or the cache cannot be written.
        RunError: another process converts for too long.
    """
    folder = _folder(file)
    if not _is_converted(folder, weights):
        prepare_root(folder.parent, "converted models")
        with _locked(folder.parent):
            try:
                if not folder.is_dir():
                    _convert_settings(file, folder)
                if not _is_converted(folder, weights):
                    _convert_weights(file, folder)
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"model.path={str(file)!r} cannot be converted into {folder.parent}: {error}; free space there (4 "
                    "bytes per parameter), or set HWGRPO_CACHE to another folder"
                ) from error
    return folder


def conversion_note(path: str) -> str | None:
    """Return that the model of a `model.path` is trained unquantized; None if it is not in GGUF."""
    file = find_gguf(Path(path).expanduser())
    if file is None:
        return None
    folder = _folder(file)
    done = "was converted" if _is_converted(folder, weights=True) else "is converted once, when a run starts,"
    return f"GGUF {file.name} {done} to fp32 in {folder}: the model is trained and saved unquantized"


def _folder(file: Path) -> Path:
    """Return the cached folder of a file, named for all that decides its content."""
    state = file.stat()
    parts = (file.resolve(), state.st_size, state.st_mtime_ns, transformers.__version__)
    return cache_root("gguf") / f"{file.stem}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def _is_converted(folder: Path, weights: bool) -> bool:
    return (folder / WEIGHTS if weights else folder).exists()


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold a lock on a folder, where its file system has locks; otherwise processes convert the same at once."""
    wait = Wait(f"another process that converts a GGUF model in {root}", STUCK_AFTER)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while True:
            try:
                lock(descriptor)
                break
            except BlockingIOError:
                if wait.over:
                    raise RunError(
                        f"another process has converted a GGUF model in {root} for {STUCK_AFTER:g} s: it seems to "
                        "hang; end it, or set HWGRPO_CACHE to another folder"
                    ) from None
                wait.pause(POLL_S)
        yield
    finally:
        os.close(descriptor)


def _convert_settings(file: Path, folder: Path) -> None:
    """Write configuration and tokenizer to the folder."""
    if find_spec("gguf") is None:
        raise ConfigError(f"model.path={str(file)!r} is in GGUF, which needs the package gguf: pip install gguf")
    settings: Any = _read(file, AutoConfig.from_pretrained)
    tokenizer: Any = _read(file, AutoTokenizer.from_pretrained)
    _restore_rotary_scaling(file, settings)
    if type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING:
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
        settings.architectures = [architecture.__name__]
    settings.dtype = torch.float32
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # of another model where transformers has a default
        if not isinstance(getattr(settings, name, None), list):
            setattr(settings, name, getattr(tokenizer, name))
    with unfinished_folder(folder.parent) as unfinished:
        settings.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        _remove_tokens_from(settings.get_text_config().vocab_size, unfinished / "tokenizer.json")
        publish(unfinished, folder)


def _remove_tokens_from(vocabulary: int, file: Path) -> None:
    """Remove the special tokens that transformers adds to a tokenizer beyond the model's embeddings."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocabulary]
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _convert_weights(file: Path, folder: Path) -> None:
    """Write the weights to a folder that has the configuration."""
    print(f"hwgrpo: converting {file} to {folder}, once; it may take minutes", file=sys.stderr, flush=True)
    options: dict[str, Any] = {"config": AutoConfig.from_pretrained(folder), "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # versions without it always dequantize
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, report = _read(file, AutoModelForCausalLM.from_pretrained, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"model.path={str(file)!r} lacks {len(missing)} weights, e.g. {missing[0]}: {ORIGINAL}")
    with unfinished_folder(folder.parent) as unfinished:
        model.save_pretrained(unfinished, max_shard_size=1 << 60)  # one file, since one rename is atomic
        follow_umask(unfinished)
        (unfinished / WEIGHTS).rename(folder / WEIGHTS)


def _restore_rotary_scaling(file: Path, settings: Any) -> None:
    """Give a configuration the scaling of rotary embeddings that its file has, which transformers may not read.

    Args:
        file: with a factor per frequency in `rope_freqs.weight`, where it is a Llama 3.1 or a later one.
        settings: the configuration that transformers read.

    Raises:
        ConfigError: it is another scaling: positions would not be those that the model was trained with.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    named = [field for name, field in reader.fields.items() if name.endswith(".rope.scaling.type")]
    kinds = {bytes(field.parts[-1]).decode() for field in named} - {"none"}
    factors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_")}
    found = [*kinds, *factors]
    rotary: dict[str, Any] = getattr(settings, "rope_parameters", None) or {}
    read = {each.get("rope_type") for each in (rotary, *rotary.values()) if isinstance(each, dict)} - {None, "default"}
    if not found or read:
        return
    if found == ["rope_freqs.weight"] and "rope_theta" in rotary:
        expected = torch.tensor(factors["rope_freqs.weight"])
        settings.rope_parameters = rotary | LLAMA_3_ROTARY | {"factor": float(expected.max())}
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](settings)
        plain = rotary["rope_theta"] ** -torch.linspace(0, 1, len(expected) + 1)[:-1]
        if frequencies.shape == plain.shape and torch.allclose(plain / frequencies, expected, rtol=1e-3):
            return
    raise ConfigError(
        f"model.path={str(file)!r} scales its rotary embeddings ({', '.join(found)}), which transformers does not read "
        f"from GGUF: {ORIGINAL}"
    )


def _read(file: Path, load: Callable[..., Any], **options: Any) -> Any:
    """Load a part of a model from its file by a function of transformers.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with redirect_stdout(sys.stderr):
            return load(str(file.parent), gguf_file=file.name, **options)
    except MemoryError:
        raise
    except Exception as error:  # of any kind, since no two readers check files alike
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ConfigError(
            f"model.path={str(file)!r}: transformers cannot read this GGUF file ({type(error).__name__}: {reason}); "
            f"{ORIGINAL}"
        ) from error
