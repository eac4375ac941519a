"""What a chat prompt consists of, and which of it is taken."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import InvalidField

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a chat message may have; what each becomes is the template's matter."""

TOOLS_MAX = 128
TOOL_CALLS_MAX = 128
TEMPLATE_ARGS_MAX = 64
RESERVED_ARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Variables of a template that have fields of their own; those that end with `_token` are the tokenizer's."""

MESSAGES, TOOLS, TEMPLATE_ARGS = "chat.messages", "chat.tools", "chat.template_args"
"""Where the parts stand in the public `Generation` message."""

JsonObject = Mapping[str, Any]
"""A JSON object as Python holds one."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant made. `id` may be empty."""

    id: str
    name: str
    arguments: JsonObject

    def as_variable(self) -> dict[str, Any]:
        """As templates expect it (OpenAI's form, arguments as an object)."""
        named = {"id": self.id} if self.id else {}
        return {**named, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. `tool_call_id` and `name` say which call a tool's message answers."""

    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def as_variable(self) -> dict[str, Any]:
        """As templates expect it: what was not given is not there."""
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        calls = {"tool_calls": [call.as_variable() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": self.role, "content": self.content, **{key: value for key, value in given.items() if value}, **calls}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat prompt. `template_args` are further variables of the template; with `continue_final_message` the answer goes on with the
    last message, an assistant's, instead of opening a turn."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[JsonObject, ...] = ()
    template_args: JsonObject = field(default_factory=dict)
    continue_final_message: bool = False

    def problems(self) -> list[InvalidField]:
        """What is wrong whatever the model is, by its path from the `Generation` message on."""
        if not self.messages:
            return [InvalidField(MESSAGES, "is empty; at least one message is needed")]
        problems = [problem for index, message in enumerate(self.messages) for problem in _message_problems(index, message)]
        if len(self.tools) > TOOLS_MAX:
            problems.append(InvalidField(TOOLS, f"has {len(self.tools)} tools; at most {TOOLS_MAX} are taken"))
        if self.continue_final_message and self.messages[-1].role != "assistant":
            text = f"needs an assistant's message at the end, not one of {self.messages[-1].role[:32]!r}"
            problems.append(InvalidField("chat.continue_final_message", text))
        return problems + self._arg_problems()

    def texts(self) -> dict[str, list[str]]:
        """Everything of it that a template can render, as text by field: its size bounds the prompt's."""
        texts = [text for item in self.messages for text in (item.content, item.name, item.tool_call_id)]
        calls = [call.as_variable() for item in self.messages for call in item.tool_calls]
        return {
            MESSAGES: [*texts, *map(_as_json, calls)],
            TOOLS: [_as_json(tool) for tool in self.tools if tool],
            TEMPLATE_ARGS: [_as_json(self.template_args)] if self.template_args else [],
        }

    @property
    def largest_part(self) -> str:
        """The field with the most text: what to shorten where the whole is too long."""
        texts = self.texts()
        return max(texts, key=lambda field: sum(map(len, texts[field])))  # the first of equals: the messages

    def _arg_problems(self) -> list[InvalidField]:
        if len(self.template_args) > TEMPLATE_ARGS_MAX:
            text = f"has {len(self.template_args)} entries; at most {TEMPLATE_ARGS_MAX} are taken"
            return [InvalidField(TEMPLATE_ARGS, text)]
        problems = ((name, _name_problem(name)) for name in self.template_args)
        return [InvalidField(f"{TEMPLATE_ARGS}[{name[:32]!r}]", problem) for name, problem in problems if problem]


def _as_json(value: JsonObject) -> str:
    return json.dumps(value, ensure_ascii=False)


def _name_problem(name: str) -> str:
    """Why a template is not given a variable of this name; empty where it is."""
    if not name.isidentifier() or name.startswith("_"):
        return "is no name for a variable: letters, digits and underscores are, with a letter first"
    if name.endswith("_token"):
        return "is the tokenizer's to set, as every name that ends with _token"
    return "is set from other fields of the request" if name in RESERVED_ARGS else ""


def _message_problems(index: int, message: ChatMessage) -> list[InvalidField]:
    where = f"{MESSAGES}[{index}]"
    problems = []
    if message.role not in ROLES:
        problems.append(InvalidField(f"{where}.role", f"is {message.role[:32]!r}; known are {', '.join(ROLES)}"))
    if message.tool_calls and message.role != "assistant":
        problems.append(InvalidField(f"{where}.tool_calls", "are an assistant's alone"))
    if message.tool_call_id and message.role != "tool":
        problems.append(InvalidField(f"{where}.tool_call_id", "is a tool message's alone"))
    if len(message.tool_calls) > TOOL_CALLS_MAX:
        count = len(message.tool_calls)
        problems.append(InvalidField(f"{where}.tool_calls", f"has {count} calls; at most {TOOL_CALLS_MAX} are taken"))
    unnamed = next((at for at, call in enumerate(message.tool_calls) if not call.name), None)
    if unnamed is not None:
        problems.append(InvalidField(f"{where}.tool_calls[{unnamed}].name", "is empty; a call names its tool"))
    return problems
