"""Names and modules of TRL that `hwgrpo.trl` lacks: using one raises an error that says what to do instead."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from hwgrpo.trl.trl_errors import MissingName

_PACKAGE = __name__.rpartition(".")[0]
_TRAINERS = ("SFT", "DPO", "KTO", "Reward", "Distillation")
_DATA = (
    *("apply_chat_template", "extract_prompt", "is_conversational", "maybe_apply_chat_template", "pack_dataset"),
    *(
        "maybe_convert_to_chatml",
        "maybe_extract_prompt",
        "maybe_unpair_preference_dataset",
        "is_conversational_from_value",
    ),
    *("prepare_multimodal_messages", "unpair_preference_dataset"),
)
_CHAT_TEMPLATES = ("add_response_schema", "clone_chat_template", "get_training_chat_template", "supports_tool_calling")
INSTEAD = {
    **{
        f"{kind}{part}": "hwgrpo.trl trains with GRPO alone: leave it out, or import it from trl"
        for kind in _TRAINERS
        for part in ("Config", "Trainer")
    },
    **dict.fromkeys(("RLOOConfig", "RLOOTrainer"), "hwgrpo train RECIPE algorithm.advantage.name=rloo"),
    **dict.fromkeys(_DATA, "GRPOTrainer renders conversations and drops nothing: leave it out, or import it from trl"),
    **dict.fromkeys(_CHAT_TEMPLATES, "set processing_class.chat_template, or import it from trl"),
    "LogCompletionsCallback": "leave it out: completions.jsonl of output_dir has the completions",
    "SyncRefModelCallback": "GRPOConfig(sync_ref_model=True)",
    **dict.fromkeys(("BEMACallback", "WeaveCallback"), "leave it out, or import it from trl"),
    "create_reference_model": "leave it out: with beta above 0 the run has a reference model of its own",
    "init_zero_verbose": "leave it out",
}
"""Name of TRL -> what a script does instead."""
_OWN_MODULES = ("rewards", "experimental")
_MODULES = (
    *("chat_template_utils", "core", "data_utils", "extras", "import_utils", "models", "models.utils", "scripts"),
    *("scripts.utils", "trainer", "trainer.callbacks", "trainer.grpo_config", "trainer.grpo_trainer", "trainer.utils"),
)
"""Modules of TRL that have no counterpart: their names are those of the package."""


class MissingImport(ImportError):
    """`from hwgrpo.trl import NAME` of a name that TRL has and `hwgrpo.trl` has not."""


def missing(name: str) -> MissingName:
    """Return the error of a name that is not here."""
    return MissingName(f"{name} of trl has no counterpart in hwgrpo.trl: {INSTEAD[name]}")


def attribute(name: str) -> Any:
    """Return a submodule that a script reads as an attribute.

    Raises:
        MissingName: a name of TRL without a counterpart.
        AttributeError: any other name.
    """
    if name in _OWN_MODULES:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    if name in INSTEAD:
        raise missing(name)
    raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")


class _Module(ModuleType):
    """A module of TRL: it has the names that `hwgrpo.trl` has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        ours = sys.modules[_PACKAGE]
        if name in ours.__all__:
            return getattr(ours, name)
        if name in INSTEAD:
            raise missing(name)
        theirs = self.__name__.removeprefix("hwgrpo.")
        raise MissingName(f"{name} of {theirs} has no counterpart in hwgrpo.trl: leave it out, or import it from trl")


class _MissingNameFinder(MetaPathFinder):
    """Finder of no module: it raises the error of a missing name, which `from ... import` would replace."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise MissingImport if the last part of `fullname` is a missing name of a module of this package."""
        parent, _, name = fullname.rpartition(".")
        if parent == _PACKAGE or parent.startswith(f"{_PACKAGE}."):
            try:
                getattr(sys.modules[parent], name)
            except MissingName as error:
                raise MissingImport(str(error), name=fullname) from None
            except AttributeError:
                return


def add_modules() -> None:
    """Make TRL's modules importable under `hwgrpo.trl`, as attributes of their packages, too."""
    for name in _MODULES:
        module = _Module(f"{_PACKAGE}.{name}")
        module.__path__ = []
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        setattr(sys.modules[parent], child, module)
    sys.meta_path.append(_MissingNameFinder())
