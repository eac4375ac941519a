"""Turns a prompt, in any of its three forms, into the token ids that the model reads.

Text gets BOS iff the tokenizer adds it. For chat the template decides, BOS included. Token ids are taken as they are. A prompt of no
tokens becomes one BOS if the tokenizer adds BOS, else it is refused. Texts too long for the model are refused before they are tokenized.
"""

import numpy as np

from gateway.conversation import MESSAGES, Conversation
from gateway.errors import ChatTemplateError, InvalidField, InvalidRequest, RenderedTooLong
from gateway.generate_input import Prompt
from gateway.served_model import ServedModel

_TEXT, _TOKEN_IDS = "text", "tokens.token_ids"
"""Where the other two forms stand in the public `Generation` message."""


def encode_prompt(prompt: Prompt | None, model: ServedModel) -> np.ndarray:
    """Token ids int32 `[n]`, 1 <= n < `max_model_len`, all below the vocabulary size. Raises InvalidRequest naming the form's field."""
    if prompt is None:
        raise _refused(_TEXT, "is missing; give text, chat messages or token ids")
    if isinstance(prompt, str):
        ids = encode_text(prompt, model)
    elif isinstance(prompt, Conversation):
        ids = encode_chat(prompt, model)
    else:
        ids = _checked_ids(prompt, model)
    if not len(ids):
        ids = encode_text("", model)  # BOS, where the tokenizer adds one
    if not len(ids):
        raise _refused(_field_of(prompt), "has no tokens; the model needs at least one to start from")
    limit = model.info.max_model_len
    if len(ids) >= limit:
        raise _refused(
            _field_of(prompt),
            f"has {len(ids)} tokens; {model.info.name} takes {limit} for prompt and output together, so at most {limit - 1} here",
        )
    return ids


def encode_text(text: str, model: ServedModel, add_special_tokens: bool = True) -> np.ndarray:
    """Token ids int32 `[n]` of plain text, of any length that could fit the model. Raises InvalidRequest for `text`."""
    _check_bytes({_TEXT: [text]}, model)
    return np.array(model.tokenizer.encode(text, add_special_tokens), np.int32)


def encode_chat(conversation: Conversation, model: ServedModel) -> np.ndarray:
    """Token ids int32 `[n]` of a conversation and the opening of the assistant's turn. Raises InvalidRequest for `chat...`."""
    template = model.tokenizer.chat_template
    if template is None:
        raise _refused(MESSAGES, f"cannot be used: {model.info.name} has no chat template; send text")
    problems = conversation.problems()
    if problems:
        raise InvalidRequest(problems)
    _check_bytes(conversation.texts(), model)
    try:
        text = template.render(conversation, model.prompt_bytes_max)
    except RenderedTooLong as error:
        raise _refused(conversation.largest_part, str(error)) from error
    except ChatTemplateError as error:
        raise _refused(MESSAGES, str(error)) from error
    return np.array(model.tokenizer.encode(text, add_special_tokens=False), np.int32)


def check_token_ids(field: str, token_ids: np.ndarray, vocab_size: int) -> list[InvalidField]:
    """The first id of `token_ids` (any integer dtype, `[n]`) that names no token, as `field[i]`; empty where all do."""
    wrong = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if not len(wrong):
        return []
    first = int(wrong[0])
    others = f" ({len(wrong) - 1} later ids neither)" if len(wrong) > 1 else ""
    return [InvalidField(f"{field}[{first}]", f"is {token_ids[first]}, not a token id from 0 to {vocab_size - 1}{others}")]


def _field_of(prompt: Prompt) -> str:
    """What to change about a prompt that cannot be used: of a conversation the largest part."""
    if isinstance(prompt, str):
        return _TEXT
    return prompt.largest_part if isinstance(prompt, Conversation) else _TOKEN_IDS


def _checked_ids(token_ids: np.ndarray, model: ServedModel) -> np.ndarray:
    problems = check_token_ids(_TOKEN_IDS, token_ids, model.info.vocab_size)
    if problems:
        raise InvalidRequest(problems)
    return token_ids.astype(np.int32)


def _check_bytes(texts: dict[str, list[str]], model: ServedModel) -> None:
    """Refuse texts, by field, that are too much together; named is the field that has the most."""
    sizes = {field: _size(field, of_field) for field, of_field in texts.items()}
    total, largest = sum(sizes.values()), max(sizes, key=sizes.__getitem__)
    if total > model.prompt_bytes_max:
        among = "" if total == sizes[largest] else f" of {total} in all"
        raise _refused(
            largest,
            f"has {sizes[largest]} bytes{among}; {model.info.name} takes {model.info.max_model_len} tokens, "
            f"which is {model.prompt_bytes_max} bytes at the very most",
        )


def _size(field: str, texts: list[str]) -> int:
    try:
        return sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError as error:
        raise _refused(field, "is not valid Unicode: it contains a lone surrogate") from error


def _refused(field: str, description: str) -> InvalidRequest:
    return InvalidRequest([InvalidField(field, description)])
