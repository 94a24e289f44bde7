"""A reward model and its tokenizer from a folder or the hub, with errors that name what is wrong with them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.models.score_head import draw_head, is_classifier, missing_weights, without_load_report
from hwgrpo.support.paths import did_you_mean

DTYPES = ("auto", "float32", "bfloat16", "float16")
PROCESS_KINDS = {
    "token_classification": "AutoModelForTokenClassification",
    "label_tokens": "AutoModelForCausalLM",
    "custom": "AutoModel",
}
"""How a process reward model gives scores: its auto class. The logits of custom code are its first output."""


class Pretrained:
    """Loads the parts of one reward model from `source`: the absolute path of its folder, or its hub name.

    Args:
        checks: of the reward's arguments.
        path: folder or hub name.
        revision: commit, branch or tag on the hub; None: the newest.
        trust_remote_code: whether code that comes with the model is run.

    Raises:
        ConfigError: there is no such folder, and the name cannot be one of the hub.
    """

    def __init__(self, checks: Kwargs, path: Any, revision: str | None, trust_remote_code: bool) -> None:
        checks.text("path", path)
        checks.boolean("trust_remote_code", trust_remote_code)
        self._checks, self.path = checks, path
        folder = Path(path).expanduser()
        if folder.is_dir():
            self.source = str(folder.absolute())
            if not (folder / "config.json").is_file():
                raise checks.error("path", path, "has no config.json, so it is not a model in Hugging Face format")
        elif folder.exists() or folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
            raise checks.error("path", path, f"is not a folder.{did_you_mean(folder, Path.is_dir)}")
        else:
            self.source = path
        self._options = {"revision": revision, "trust_remote_code": trust_remote_code}

    def config(self) -> Any:
        """Return the model's transformers configuration.

        Raises:
            ConfigError: it cannot be found or read.
        """
        from transformers import AutoConfig

        return self._read("configuration", lambda: AutoConfig.from_pretrained(self.source, **self._options))

    def tokenizer(self, name: str | None = None) -> Any:
        """Return the model's tokenizer.

        Raises:
            ConfigError: it cannot be found or read.
        """
        from hwgrpo.support.pretrained_tokenizer import pretrained_tokenizer

        source = self.source if name is None else name
        return self._read("tokenizer", lambda: pretrained_tokenizer(source, **self._options))

    def model(self, kind: str, dtype: str, *, head_seed: int | None = None) -> Any:
        """Return the model in evaluation mode on the CPU.

        Args:
            kind: name of the auto class, e.g. "AutoModelForSequenceClassification".
            dtype: one of `DTYPES`; auto: as stored.
            head_seed: seed of a new head with one label, where the folder is a language model's; None: it may be none.

        Raises:
            ConfigError: it cannot be found or read, or lacks weights, which would be random.
        """
        import transformers

        self._checks.choice("dtype", dtype, DTYPES)
        loader = getattr(transformers, kind)
        wanted = dtype if dtype == "auto" else getattr(torch, dtype)
        options = {"dtype": wanted, "output_loading_info": True, **self._options}
        new_head = head_seed is not None and not is_classifier(self.config())
        if new_head:
            options["num_labels"] = 1
        with without_load_report() if new_head else nullcontext():
            model, report = self._read("model", lambda: loader.from_pretrained(self.source, **options))
        head, missing = missing_weights(model, report, new_head=new_head)
        draw_head(model, head, head_seed or 0)
        if missing:
            raise self._checks.error(
                "path",
                self.path,
                f"lacks {len(missing)} weights of {type(model).__name__}, e.g. {missing[0]}, which would be random: "
                "name a complete reward model, not the model it was trained from",
            )
        return model.eval().requires_grad_(False)

    def without_weights(self, kind: str, config: Any) -> Any:
        """Return the model of a configuration on the meta device.

        Args:
            kind: name of the auto class.
            config: from `config`.

        Raises:
            ConfigError: the class has no such model, or its code may not be run.
        """
        import transformers

        trusted = self._options["trust_remote_code"]
        with torch.device("meta"):
            return self._read(
                "model", lambda: getattr(transformers, kind).from_config(config, trust_remote_code=trusted)
            )

    def _read(self, what: str, read: Any) -> Any:
        try:
            return read()
        except (OSError, ValueError, ImportError, KeyError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise self._checks.error("path", self.path, f"has no readable {what}: {reason}") from error


def longest_input(config: Any, tokenizer: Any) -> int | None:
    """Return how many tokens a model reads, by its configuration or its tokenizer; None: they do not say."""
    limits = [getattr(config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length]
    return min((each for each in limits if each and each < 10**9), default=None)
