"""Chat prompts of the public API to values."""

import math
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from gateway.conversation import MESSAGES, TEMPLATE_ARGS, TOOLS, ChatMessage, Conversation, ToolCall
from gateway.errors import InvalidField, InvalidRequest
from tessera.v1 import inference_pb2

_FIRST_KEYS = ("type", "function", "name", "description", "parameters", "properties", "required")
"""In the order in which models were shown them. A Struct has no order, and a prompt must be the same each time."""

_WHOLE_MAX = 2.0**53
"""Up to here a double holds every whole number."""


def conversation_from_proto(message: inference_pb2.ChatPrompt) -> Conversation:
    """A chat prompt, unchecked but for its numbers. Raises InvalidRequest for one that JSON cannot hold."""
    return Conversation(
        messages=tuple(_message_from_proto(item, f"{MESSAGES}[{index}]") for index, item in enumerate(message.messages)),
        tools=tuple(_object(tool, f"{TOOLS}[{index}]") for index, tool in enumerate(message.tools)),
        template_args=_object(message.template_args, TEMPLATE_ARGS),
        continue_final_message=message.continue_final_message,
    )


def _message_from_proto(message: inference_pb2.ChatMessage, field: str) -> ChatMessage:
    calls = (
        ToolCall(call.id, call.name, _object(call.arguments, f"{field}.tool_calls[{index}].arguments"))
        for index, call in enumerate(message.tool_calls)
    )
    return ChatMessage(message.role, message.content, message.name, message.tool_call_id, tuple(calls))


def _object(struct: Struct, field: str) -> dict[str, Any]:
    return {key: _value(struct.fields[key], field) for key in sorted(struct.fields, key=_place)}


def _place(key: str) -> tuple[int, str]:
    return (_FIRST_KEYS.index(key), "") if key in _FIRST_KEYS else (len(_FIRST_KEYS), key)


def _value(value: Value, field: str) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return _object(value.struct_value, field)
        case "list_value":
            return [_value(item, field) for item in value.list_value.values]
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidRequest([InvalidField(field, f"has the number {number}, which JSON cannot hold")])
            return int(number) if number.is_integer() and abs(number) <= _WHOLE_MAX else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None
