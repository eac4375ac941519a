"""Chat messages to prompt text, through the model's own Jinja template, set up as `transformers` sets it up."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.conversation import Conversation
from gateway.errors import ChatTemplateError, RenderedTooLong, TokenizerError

_MESSAGE_CHARS_MAX = 300
"""Most of a template's own error text that is passed on."""

_FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What a template can raise while rendering: its own refusals, the sandbox's, and Python's for operations that do not fit."""


class ChatTemplate:
    """A compiled template. Immutable. It runs in Jinja's sandbox: it comes with the model's files and is not trusted."""

    __slots__ = ("_special_texts", "_template", "source")

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        """`special_texts` are the variables `bos_token`, `eos_token`, ... Raises TokenizerError where `source` is no template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TokenizerError(f"the model's chat template cannot be compiled: line {error.lineno}: {error}") from error
        self._special_texts = dict(special_texts)
        self.source = source

    def render(self, conversation: Conversation, bytes_max: int, add_generation_prompt: bool = True) -> str:
        """The prompt text, with the opening of the assistant's turn where asked, or up to the end of the last message's content where
        that is to be continued.

        Raises ChatTemplateError where the template refuses the conversation or fails, or where the text exceeds `bytes_max` (UTF-8).
        """
        if not conversation.continue_final_message:
            return self._render(conversation, bytes_max, add_generation_prompt)
        mark = secrets.token_hex(16)  # what nobody can have written before
        *before, last = conversation.messages
        marked = replace(conversation, messages=(*before, replace(last, content=last.content + mark)))
        text, found, _ = self._render(marked, bytes_max + len(mark), False).rpartition(mark)
        if not found:
            raise ChatTemplateError("the chat template leaves the last message out, so it cannot be continued")
        return text

    def _render(self, conversation: Conversation, bytes_max: int, add_generation_prompt: bool) -> str:
        variables: dict[str, Any] = {
            "documents": None,
            **conversation.template_args,
            **self._special_texts,
            "messages": [message.as_variable() for message in conversation.messages],
            "tools": list(conversation.tools) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        bytes_left = bytes_max
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                bytes_left -= len(piece.encode())
                if bytes_left < 0:
                    raise RenderedTooLong(f"the rendered prompt is longer than {bytes_max} bytes, more than the model can take")
        except _FAULTS as error:
            raise ChatTemplateError(f"the chat template refused them: {str(error)[:_MESSAGE_CHARS_MAX]}") from error
        return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters; templates expect plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    """Local time, as templates that put today's date into the system prompt expect."""
    return datetime.now().strftime(pattern)
