"""Random protobuf messages, by their descriptors: every field, edges of every type, and bytes that are no message."""

import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

F = FieldDescriptor

INTEGERS = (0, 1, 2, 7, 100, 49_151, 49_152, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, -1, -2, -(2**31), -(2**63))
FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 1e-9, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))
STRINGS = (
    "",
    "a",
    "user",
    "assistant",
    "tool",
    "Hello, world",
    "\x00",
    "é\U0001f600",
    " ",
    "{{ 7 }}",
    "<|im_start|>",
    "x" * 5_000,
    "same",
)
COUNTS = (1, 2, 3, 40)
PRESENCE = 0.25
DEPTH_MAX = 5

_BITS = {F.CPPTYPE_INT32: (-(2**31), 2**31 - 1), F.CPPTYPE_INT64: (-(2**63), 2**63 - 1), F.CPPTYPE_UINT32: (0, 2**32 - 1)}


def random_message(message: Message, dice: random.Random, depth: int = 0) -> None:
    """Set some fields of `message`, at random."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() < PRESENCE or (depth == 0 and dice.random() < PRESENCE):
            _set(message, field, dice, depth)


def mangled(data: bytes, dice: random.Random) -> bytes:
    """Bytes near `data` that may be no message."""
    copy = bytearray(data or b"\x00")
    for _ in range(dice.choice((1, 1, 3, 20))):
        copy[dice.randrange(len(copy))] = dice.randrange(256)
    return bytes(copy[: dice.randrange(len(copy) + 1)] if dice.random() < 0.3 else copy)


def _set(message: Message, field: FieldDescriptor, dice: random.Random, depth: int) -> None:
    if field.message_type is None:
        if field.is_repeated:
            getattr(message, field.name).extend(_scalar(field, dice) for _ in range(dice.choice(COUNTS)))
        else:
            setattr(message, field.name, _scalar(field, dice))
    elif depth < DEPTH_MAX:
        _set_messages(message, field, dice, depth)


def _set_messages(message: Message, field: FieldDescriptor, dice: random.Random, depth: int) -> None:
    held = getattr(message, field.name)
    if field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        for _ in range(dice.choice(COUNTS)):
            if value.message_type is None:
                held[_scalar(key, dice)] = _scalar(value, dice)
            else:
                random_message(held[_scalar(key, dice)], dice, depth + 1)
    elif field.is_repeated:
        for _ in range(dice.choice(COUNTS[:3])):
            random_message(held.add(), dice, depth + 1)
    else:
        held.SetInParent()
        random_message(held, dice, depth + 1)


def _scalar(field: FieldDescriptor, dice: random.Random) -> Any:
    match field.cpp_type:
        case F.CPPTYPE_BOOL:
            return dice.random() < 0.5
        case F.CPPTYPE_FLOAT:
            return struct.unpack("f", struct.pack("f", dice.choice(FLOATS)))[0]
        case F.CPPTYPE_DOUBLE:
            return dice.choice(FLOATS)
        case F.CPPTYPE_STRING:
            return dice.choice(STRINGS) if field.type == F.TYPE_STRING else dice.randbytes(dice.randrange(40))
        case F.CPPTYPE_ENUM:
            return dice.choice((*(value.number for value in field.enum_type.values), 99, -1))
    lowest, highest = _BITS.get(field.cpp_type, (0, 2**64 - 1))
    return dice.choice([number for number in INTEGERS if lowest <= number <= highest])
