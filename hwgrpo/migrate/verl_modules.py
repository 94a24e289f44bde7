"""Stand-ins of the modules of verl that tool files import, for a host without verl.

They can be imported only while such a file is: afterwards `import verl` fails as before.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar
from uuid import uuid4

TOOL = "__verl_tool__"
"""Attribute of a function with `@function_tool`: its name and schema."""


class Model:
    """A record whose fields are given by name, as verl's pydantic models; others are kept, too.

    Args:
        **values: fields.
    """

    parts: ClassVar[Mapping[str, Any]] = {}
    """Field -> the kind of record that it is."""
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **values: Any) -> None:
        self.given = tuple(values)
        for name, value in {**self.defaults, **values}.items():
            kind = self.parts.get(name)
            setattr(self, name, kind.model_validate(value) if kind is not None and value is not None else value)

    @classmethod
    def model_validate(cls, values: Any) -> Any:
        """Return a record of a mapping; one is itself."""
        return values if isinstance(values, Model) else cls(**values)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the fields that were given, None left out."""
        values = {name: getattr(self, name) for name in self.given}
        return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Model):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


class OpenAIFunctionPropertySchema(Model):
    """A parameter."""


class OpenAIFunctionParametersSchema(Model):
    """The parameters of a function."""

    defaults: ClassVar[Mapping[str, Any]] = {"type": "object", "properties": {}, "required": []}


class OpenAIFunctionSchema(Model):
    """A function."""

    parts: ClassVar[Mapping[str, Any]] = {"parameters": OpenAIFunctionParametersSchema}
    defaults: ClassVar[Mapping[str, Any]] = {"description": "", "parameters": {}, "strict": False}


class OpenAIFunctionToolSchema(Model):
    """A tool."""

    parts: ClassVar[Mapping[str, Any]] = {"function": OpenAIFunctionSchema}
    defaults: ClassVar[Mapping[str, Any]] = {"type": "function"}


class ToolResponse(Model):
    """What a tool returns."""

    defaults: ClassVar[Mapping[str, Any]] = {"text": None, "image": None, "video": None}


class BaseTool:
    """A tool with an instance per trajectory.

    Args:
        config: of the tool file.
        tool_schema: the schema there; None: the class has one.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the schema."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_: Any) -> tuple[str, ToolResponse]:
        """Return the id of a new instance."""
        return instance_id or uuid4().hex, ToolResponse()

    async def execute(self, instance_id: str, parameters: Mapping[str, Any], **_: Any) -> tuple[Any, float, Any]:
        """Return response, reward and metrics of a call."""
        raise NotImplementedError(f"{type(self).__name__}.execute")

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        """Return the reward of a trajectory."""
        return 0.0

    async def release(self, instance_id: str, **_: Any) -> None:
        """End an instance."""


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Mark a function as a tool; `name` and `schema` replace its own."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        given = schema.model_dump() if hasattr(schema, "model_dump") else schema
        setattr(function, TOOL, {"name": name if isinstance(name, str) else function.__name__, "schema": given})
        return function

    return mark(name) if callable(name) else mark


def rollout_trace_op(function: Any) -> Any:
    """Return a function as it is: calls are not traced."""
    return function


SCHEMAS = (
    *(OpenAIFunctionPropertySchema, OpenAIFunctionParametersSchema, OpenAIFunctionSchema),
    *(OpenAIFunctionToolSchema, ToolResponse),
)
MODULES: Mapping[str, Mapping[str, Any]] = {
    "verl": {},
    "verl.tools": {},
    "verl.utils": {},
    "verl.tools.base_tool": {"BaseTool": BaseTool, **{each.__name__: each for each in SCHEMAS}},
    "verl.tools.schemas": {each.__name__: each for each in SCHEMAS},
    "verl.tools.function_tool": {"function_tool": function_tool},
    "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
}
"""Module -> its names."""
_PACKAGES = ("verl", "verl.tools", "verl.utils")


class _StandIns(MetaPathFinder, Loader):
    """Finds the stand-ins."""

    def __init__(self) -> None:
        self.imported: list[str] = []

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname not in MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(MODULES[module.__name__])
        self.imported.append(module.__name__)


def has_verl() -> bool:
    """Return whether verl is installed."""
    return importlib.util.find_spec("verl") is not None


@contextmanager
def verl_modules() -> Iterator[list[str]]:
    """Let the body import what tool files need of verl; yield the names of the stand-ins that it does, if any."""
    if has_verl():
        yield []
        return
    finder = _StandIns()
    sys.meta_path.append(finder)
    try:
        yield finder.imported
    finally:
        sys.meta_path.remove(finder)
        for name in finder.imported:
            sys.modules.pop(name, None)
