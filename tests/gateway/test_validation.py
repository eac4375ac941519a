"""What a client may ask: every field at its edges, all problems named at once, and what a good request becomes."""

import time
import unicodedata
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_tokenizers import model_info
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from gateway.chat_template import ChatTemplate
from gateway.conversation import ChatMessage, Conversation, ToolCall
from gateway.errors import INVALID_FIELDS_MAX, InvalidRequest, TokenizerMismatch, UnknownModel
from gateway.generate_input import GenerateInput, Prompt, SamplingInput
from gateway.prompt import check_token_ids, encode_chat, encode_text
from gateway.served_model import ServedModel, find_model
from gateway.tokenizer import SpecialTokens, Tokenizer
from gateway.validation import validate
from tessera.values.request import DetokenizeOptions
from tessera.values.sampling import SEED_MAX, SamplingParams

USER = ChatMessage("user", "ab")
ASSISTANT = ChatMessage("assistant", "c")
CALL = ToolCall("1", "f", {})


def refusal(model: ServedModel, prompt: Prompt | None = "a", **changes: Any) -> dict[str, str]:
    """Field -> description of the refusal; empty when the request is accepted."""
    sampling = {name: value for name, value in changes.items() if name in SamplingInput.__dataclass_fields__}
    rest = {name: value for name, value in changes.items() if name not in sampling}
    try:
        validate(GenerateInput(prompt, sampling=SamplingInput(**sampling), **rest), model, "alice")
    except InvalidRequest as error:
        return {item.field: item.description for item in error.fields}
    return {}


def ids(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.uint32)


def test_a_bare_request_becomes_a_submission_with_every_default(byte_level_model: ServedModel) -> None:
    first, second = (validate(GenerateInput("ab"), byte_level_model, "alice") for _ in range(2))
    assert first.prompt_token_ids.tolist() == [64, 65] and first.prompt_token_ids.dtype == np.int32
    assert first.sampling == SamplingParams(seed=first.sampling.seed)
    assert first.detokenize == DetokenizeOptions()
    assert (first.client_request_id, first.principal) == ("", "alice")
    assert len(first.request_id) == 16 and first.request_id != second.request_id
    assert 0 <= first.sampling.seed <= SEED_MAX and first.sampling.seed != second.sampling.seed
    assert not first.is_seed_given


def test_what_is_given_is_kept(byte_level_model: ServedModel) -> None:
    sampling = SamplingInput(0.5, 0.9, -1, 0.1, 7, 12, 3, True, (1, 256))
    request = GenerateInput(ids(1, 2), "m", "mine", sampling, ("x", "yz"), True, False, -3, "salt")
    made = validate(request, byte_level_model, "bob")
    assert made.sampling == SamplingParams(7, 0.5, 0.9, -1, 0.1, 12, 3, True, (1, 256))
    assert made.detokenize == DetokenizeOptions(("x", "yz"), True, False)
    assert (made.priority, made.cache_salt) == (-3, "salt")
    assert made.is_seed_given and made.client_request_id == "mine" and made.prompt_token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.0, 1, 100.0], [-0.1, 100.1, float("nan"), float("inf"), -float("inf")]),
        ("top_p", [1e-6, 1], [0, -1.0, 1.01, float("nan")]),
        ("top_k", [-1, 0, 1, 2**31 - 1], [-2, 2**31]),
        ("min_p", [0, 1.0], [-0.01, 1.5, float("nan")]),
        ("seed", [0, SEED_MAX], [-1, SEED_MAX + 1, 2**64 - 1]),
        ("max_tokens", [1, 2**20], [0, -1, 2**20 + 1, 2**32 - 1]),
        ("min_tokens", [0, 64], [-1, 65, 2**32 - 1]),
        ("presence_penalty", [-2, 0, 2.0], [-2.1, 2.1, float("nan"), float("inf")]),
        ("frequency_penalty", [-2, 0, 2.0], [-2.1, 2.1, float("nan")]),
        ("repetition_penalty", [0.01, 1, 100], [0, -1, 100.5, float("nan")]),
        ("logprobs", [0, 1, 20], [-1, 21, 2**32 - 1]),
        ("prompt_logprobs", [0, 1, 20], [-1, 21, 2**32 - 1]),
    ],
)
def test_every_number_at_its_edges(byte_level_model: ServedModel, name: str, good: list[float], bad: list[float]) -> None:
    for value in good:
        assert refusal(byte_level_model, **{name: value}) == {}
    for value in bad:
        assert list(refusal(byte_level_model, **{name: value})) == [f"sampling.{name}"]


def test_more_log_probabilities_than_are_kept_are_refused(byte_level_model: ServedModel) -> None:
    """All that the answer may have count: of this prompt's length the model leaves it so many tokens."""
    long = replace(byte_level_model, info=replace(byte_level_model.info, max_model_len=2**18))
    given = {"logprobs": 3, "max_tokens": 2**18}
    assert refusal(long, **given) == {}
    assert refusal(long, **given, logprob_token_ids=(5,)) == {
        "sampling.logprobs": "would tell 5 of each of 262143 tokens, 1310715 together; at most 1048576 are told"
    }
    assert list(refusal(long, logprob_token_ids=(5,) * 9, max_tokens=2**18)) == ["sampling.logprob_token_ids"]
    prompt = np.zeros(2**17, np.int64)
    assert refusal(long, prompt, prompt_logprobs=7) == {}
    assert list(refusal(long, prompt, prompt_logprobs=8)) == ["sampling.prompt_logprobs"]


def test_min_tokens_may_not_exceed_max_tokens(byte_level_model: ServedModel) -> None:
    assert refusal(byte_level_model, min_tokens=5, max_tokens=5) == {}
    assert refusal(byte_level_model, min_tokens=5, max_tokens=4) == {
        "sampling.min_tokens": "is 5, above max_tokens, which is 4"
    }


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"stop": ("x",) * 16}, []),
        ({"stop": ("x",) * 17}, ["stop"]),
        ({"stop": ("x" * 1024, "é" * 512)}, []),
        ({"stop": ("ok", "", "x" * 1025, "é" * 513)}, ["stop[1]", "stop[2]", "stop[3]"]),
        ({"stop_token_ids": (0,) * 64}, []),
        ({"stop_token_ids": (0,) * 65}, ["sampling.stop_token_ids"]),
        ({"stop_token_ids": (0, 257)}, []),
        ({"stop_token_ids": (0, 258, -1)}, ["sampling.stop_token_ids[1]"]),
        ({"stop_token_ids": (2**32 - 1,)}, ["sampling.stop_token_ids[0]"]),
        ({"allowed_token_ids": tuple(range(258))}, []),
        ({"allowed_token_ids": (0, 258)}, ["sampling.allowed_token_ids[1]"]),
        ({"allowed_token_ids": (0,) * 1025}, ["sampling.allowed_token_ids"]),
        ({"logit_bias": ((0, 1e9), (257, -1e9))}, []),
        ({"logit_bias": ((258, 0.0),)}, ["sampling.logit_bias"]),
        ({"logit_bias": ((1, float("nan")),)}, ["sampling.logit_bias"]),
        ({"logit_bias": tuple((0, 0.0) for _ in range(1025))}, ["sampling.logit_bias"]),
        ({"bad_words": ("a",) * 128}, []),
        ({"bad_words": ("a",) * 129}, ["sampling.bad_words"]),
        ({"bad_words": ("ok", "", " ", "\ud800", "x" * 1025)}, [f"sampling.bad_words[{i}]" for i in (1, 2, 3, 4)]),
        ({"bad_words": ("a" * 33,)}, ["sampling.bad_words"]),
        ({"allowed_token_ids": (64, 65), "bad_words": ("a", "b")}, ["sampling.allowed_token_ids"]),
        ({"allowed_token_ids": (64, 65), "bad_words": ("a", "bc")}, []),
        ({"allowed_token_ids": (64, 256), "stop_token_ids": (64,), "min_tokens": 1}, ["sampling.min_tokens"]),
        ({"allowed_token_ids": (64, 65, 256), "stop_token_ids": (64,), "min_tokens": 1}, []),
        ({"allowed_token_ids": (64, 256), "stop_token_ids": (64,)}, []),
        ({"logprob_token_ids": (257,) * 128}, []),
        ({"logprob_token_ids": (0,) * 129}, ["sampling.logprob_token_ids"]),
        ({"logprob_token_ids": (0, 258)}, ["sampling.logprob_token_ids[1]"]),
        ({"request_id": "é" * 64}, []),
        ({"request_id": "é" * 64 + "x"}, ["request_id"]),
        ({"cache_salt": "é" * 64, "priority": -(2**31)}, []),
        ({"cache_salt": "é" * 64 + "x"}, ["cache_salt"]),
    ],
)
def test_lists_and_ids_at_their_edges(byte_level_model: ServedModel, changes: dict[str, Any], fields: list[str]) -> None:
    assert list(refusal(byte_level_model, **changes)) == fields


def test_a_bias_beyond_its_range_is_clamped(byte_level_model: ServedModel) -> None:
    made = validate(GenerateInput("a", sampling=SamplingInput(logit_bias=((3, 1e9), (4, -5.5)))), byte_level_model, "alice")
    assert made.sampling.logit_bias == ((3, 100.0), (4, -5.5))


def test_a_bad_word_is_ruled_out_with_a_space_before_it_and_without(byte_level_model: ServedModel) -> None:
    encode = byte_level_model.tokenizer.encode
    made = validate(GenerateInput("a", sampling=SamplingInput(bad_words=(" ab", "c"))), byte_level_model, "alice")
    word, later = tuple(encode("ab", False)), tuple(encode(" ab", False))
    assert made.sampling.bad_words_ids[0] == word
    if len(word) == len(later):  # else the word is found within the longer one
        assert made.sampling.bad_words_ids[1] == later
    assert made.sampling.bad_words_ids[-1] == tuple(encode("c", False))


def test_numbers_and_ids_are_refused_together(byte_level_model: ServedModel) -> None:
    refused = refusal(byte_level_model, presence_penalty=3, allowed_token_ids=(1, 258), bad_words=("",), stop_token_ids=(258,))
    assert set(refused) == {
        "sampling.presence_penalty",
        "sampling.allowed_token_ids[1]",
        "sampling.bad_words[0]",
        "sampling.stop_token_ids[0]",
    }


@pytest.mark.parametrize(
    ("prompt", "field", "words"),
    [
        (None, "text", "is missing"),
        ("", "text", "has no tokens"),
        (Conversation(()), "chat.messages", "is empty"),
        (ids(), "tokens.token_ids", "has no tokens"),
        ("a" * 64, "text", "has 64 tokens; m takes 64 for prompt and output together, so at most 63"),
        (ids(*[1] * 64), "tokens.token_ids", "has 64 tokens"),
        (Conversation((ChatMessage("user", "a" * 60),)), "chat.messages", "has 66 tokens"),
        ("a" * 100_000, "text", "has 100000 bytes; m takes 64 tokens"),
        ("\ud800", "text", "lone surrogate"),
        (Conversation((ChatMessage("user", "\ud800"),)), "chat.messages", "lone surrogate"),
        (Conversation((USER, ChatMessage("robot", "a"))), "chat.messages[1].role", "is 'robot'; known are system"),
        (Conversation((ChatMessage("", "a"),)), "chat.messages[0].role", "is ''"),
        (Conversation((USER,), continue_final_message=True), "chat.continue_final_message", "not one of 'user'"),
        (Conversation((USER,), ({},) * 129), "chat.tools", "has 129 tools; at most 128"),
        (Conversation((USER,), ({"d": "x" * 999},)), "chat.tools", "has 1008 bytes of 1010 in all; m takes 64 tokens"),
        (Conversation((USER,), template_args={"a": "x" * 999}), "chat.template_args", "has 1008 bytes of 1010 in all"),
        (Conversation((replace(ASSISTANT, tool_calls=(replace(CALL, name="f" * 999),)),)), "chat.messages", "bytes; m takes"),
        (Conversation((USER,), template_args={"a" * i: 1 for i in range(1, 66)}), "chat.template_args", "has 65 entries"),
        (Conversation((USER,), template_args={"messages": []}), "chat.template_args['messages']", "is set from other fields"),
        (
            Conversation((USER,), template_args={"eos_token": ""}),
            "chat.template_args['eos_token']",
            "is the tokenizer's to set",
        ),
        (Conversation((USER,), template_args={"a b": 1}), "chat.template_args['a b']", "is no name for a variable"),
        (Conversation((replace(USER, tool_calls=(CALL,)),)), "chat.messages[0].tool_calls", "an assistant's alone"),
        (Conversation((ASSISTANT, replace(USER, tool_call_id="1"))), "chat.messages[1].tool_call_id", "a tool message's"),
        (Conversation((replace(ASSISTANT, tool_calls=(CALL,) * 129),)), "chat.messages[0].tool_calls", "has 129 calls"),
        (
            Conversation((replace(ASSISTANT, tool_calls=(CALL, replace(CALL, name=""))),)),
            "chat.messages[0].tool_calls[1].name",
            "is empty",
        ),
        (ids(0, 257, 258, 999), "tokens.token_ids[2]", "is 258, not a token id from 0 to 257 (1 later ids neither)"),
        (np.array([-1], np.int64), "tokens.token_ids[0]", "is -1"),
        (np.array([2**32 - 1], np.uint32), "tokens.token_ids[0]", "is 4294967295"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_refused_by_name(
    byte_level_model: ServedModel, prompt: Prompt | None, field: str, words: str
) -> None:
    refused = refusal(byte_level_model, prompt)
    assert list(refused) == [field]
    assert words in refused[field]


def test_the_longest_prompt_leaves_room_for_one_token(byte_level_model: ServedModel) -> None:
    for prompt in ("a" * 63, ids(*[1] * 63), Conversation((ChatMessage("user", "a" * 57),))):
        made = validate(GenerateInput(prompt, sampling=SamplingInput(max_tokens=5)), byte_level_model, "")
        assert len(made.prompt_token_ids) == 63 and made.sampling.max_tokens == 5


def test_an_empty_prompt_is_one_bos_where_the_tokenizer_adds_one(byte_fallback_model: ServedModel) -> None:
    for prompt in ("", ids()):
        assert validate(GenerateInput(prompt), byte_fallback_model, "").prompt_token_ids.tolist() == [1]


def test_text_gets_bos_as_the_tokenizer_has_it_and_token_ids_never(byte_fallback_model: ServedModel) -> None:
    assert encode_text("a", byte_fallback_model).tolist()[0] == 1
    assert 1 not in encode_text("a", byte_fallback_model, add_special_tokens=False).tolist()
    assert validate(GenerateInput(ids(5, 6)), byte_fallback_model, "").prompt_token_ids.tolist() == [5, 6]


def test_a_chat_gets_only_what_its_template_writes(byte_fallback: Tokenizer) -> None:
    def first_ids(source: str) -> list[int]:
        tokenizer = Tokenizer(byte_fallback._backend, byte_fallback.special, ChatTemplate(source, {"bos_token": "<s>"}), "d1")
        return encode_chat(Conversation((USER,)), ServedModel(model_info(tokenizer), tokenizer)).tolist()[:2]

    assert first_ids("{{ bos_token }}{{ messages[0].content }}")[0] == 1
    assert first_ids("{{ messages[0].content }}")[0] != 1


def test_a_model_without_chat_template_takes_no_messages(byte_fallback_model: ServedModel) -> None:
    assert "no chat template" in refusal(byte_fallback_model, Conversation((USER,)))["chat.messages"]


def test_a_template_that_refuses_names_the_messages(byte_level: Tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}", {})
    tokenizer = Tokenizer(byte_level._backend, byte_level.special, template, "d2")
    refused = refusal(ServedModel(model_info(tokenizer), tokenizer), Conversation((USER,)))
    assert refused == {"chat.messages": "the chat template refused them: Roles must alternate"}


def test_all_problems_are_named_at_once(byte_level_model: ServedModel) -> None:
    refused = refusal(byte_level_model, "", temperature=float("nan"), top_p=2.0, max_tokens=0, stop=("",), request_id="x" * 200)
    assert sorted(refused) == ["request_id", "sampling.max_tokens", "sampling.temperature", "sampling.top_p", "stop[0]", "text"]


def test_a_refusal_stays_small_however_much_is_wrong(byte_level_model: ServedModel) -> None:
    messages = Conversation(tuple(ChatMessage("x" * 10_000, "") for _ in range(1000)))
    refused = refusal(byte_level_model, messages)
    assert len(refused) == INVALID_FIELDS_MAX
    assert sum(len(field) + len(text) for field, text in refused.items()) < 4000


def test_huge_prompts_are_refused_quickly(smollm2: Tokenizer) -> None:
    """5 MiB of text, and a million token ids: neither is tokenized or walked through in Python."""
    model = ServedModel(model_info(smollm2, 8192), smollm2)
    text, numbers = "word " * 2**20, np.zeros(1_000_000, np.uint32)
    began = time.process_time()
    assert "has 5242880 bytes" in refusal(model, text)["text"]
    assert "has 1000000 tokens" in refusal(model, numbers)["tokens.token_ids"]
    assert "has 5242880 bytes" in refusal(model, Conversation((ChatMessage("user", text),)))["chat.messages"]
    long_model = ServedModel(model_info(smollm2, 2**21), smollm2)
    assert len(validate(GenerateInput(numbers), long_model, "").prompt_token_ids) == 1_000_000
    numbers[999_999] = 49152
    assert list(refusal(long_model, numbers)) == ["tokens.token_ids[999999]"]
    assert time.process_time() - began < 1.0


def test_the_longest_token_sets_the_bound_on_bytes(smollm2: Tokenizer) -> None:
    """A prompt of nothing but the longest token still passes; the bound refuses nothing that fits."""
    model = ServedModel(model_info(smollm2, 100), smollm2)
    longest = max(smollm2.vocabulary.bytes_of, key=len).decode()
    assert len(validate(GenerateInput(longest * 99), model, "").prompt_token_ids) == 99
    assert "has 100 tokens" in refusal(model, longest * 100)["text"]
    assert "bytes" in refusal(model, longest * 100 + "x")["text"]


def test_the_bound_on_bytes_allows_for_a_normalizer_that_shortens() -> None:
    """Nine bytes of conjoining jamo become one syllable, three bytes, one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first, second, third = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("각")[0][0]
    words = [*alphabet, first + second, first + second + third]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [(first, second), (first + second, third)]))
    backend.normalizer, backend.decoder = normalizers.NFC(), decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(backend, SpecialTokens(), None, "d3")
    model = ServedModel(model_info(tokenizer, 8), tokenizer)
    assert validate(GenerateInput(unicodedata.normalize("NFD", "각") * 7), model, "").prompt_token_ids.tolist() == [257] * 7


def test_token_ids_for_detokenizing_are_checked_the_same_way() -> None:
    assert check_token_ids("token_ids", np.array([0, 9]), 10) == []
    assert [item.field for item in check_token_ids("token_ids", np.array([0, 10]), 10)] == ["token_ids[1]"]
    assert check_token_ids("token_ids", np.array([], np.int64), 10) == []


def test_models_are_found_by_name_or_as_the_only_one(byte_level_model: ServedModel, byte_fallback: Tokenizer) -> None:
    other = ServedModel(replace(model_info(byte_fallback), name="other"), byte_fallback)
    assert find_model("m", [byte_level_model, other]) is byte_level_model
    assert find_model("", [other]) is other
    with pytest.raises(UnknownModel, match=r"'nope' is not served here; served are: m, other"):
        find_model("nope", [byte_level_model, other])
    with pytest.raises(UnknownModel, match=r"name one of the served models \(m, other\)"):
        find_model("", [byte_level_model, other])
    with pytest.raises(UnknownModel, match="none"):
        find_model("m", [])


def test_a_worker_with_another_tokenizer_or_vocabulary_is_refused(byte_level: Tokenizer) -> None:
    info = model_info(byte_level)
    ServedModel(replace(info, vocab_size=info.vocab_size + 100), byte_level)  # a padded embedding is fine
    with pytest.raises(TokenizerMismatch, match="start both with the same model"):
        ServedModel(replace(info, tokenizer_digest="other"), byte_level)
    with pytest.raises(TokenizerMismatch, match="knows 258 ids, the model only 257"):
        ServedModel(replace(info, vocab_size=257), byte_level)
