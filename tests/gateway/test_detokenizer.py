"""The incremental detokenizer against the `tokenizers` library's own decoding of all ids at once."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenizer import decode
from gateway.tokenizer import Tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [*map(detokenizer.step, ids), detokenizer.finish()]


def byte_ids(data: bytes) -> list[int]:
    """Byte tokens of the byte-fallback vocabulary."""
    return [3 + byte for byte in data]


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_pieces_of_any_ids_add_up_to_the_librarys_text(smollm2: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1), max_size=40))
    expected = smollm2._backend.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(smollm2, ids, skip)) == expected
    assert decode(smollm2.vocabulary, ids, skip) == expected


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_any_bytes_at_all_add_up_to_the_librarys_text(byte_level: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """One token per byte, so most lists are broken UTF-8; ids beyond the vocabulary stand for nothing."""
    ids = data.draw(st.lists(st.one_of(st.integers(0, 257), st.integers(128, 255), st.integers(258, 2**31 - 1)), max_size=30))
    assert "".join(pieces(byte_level, ids, skip)) == byte_level._backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(
    st.text(
        alphabet=st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cs", "Cc"], exclude_characters="\ufffd"), max_size=20
    )
)
def test_no_piece_of_sound_text_has_a_replacement_character(smollm2: Tokenizer, text: str) -> None:
    """Up to U+1FFFF: SmolLM2's vocabulary lacks the bytes of some control characters and of rarer planes, and drops them."""
    parts = pieces(smollm2, smollm2.encode(text, add_special_tokens=False), skip=False)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans())
def test_byte_fallback_equals_the_library_on_sound_byte_runs(byte_fallback: Tokenizer, data: st.DataObject, skip: bool) -> None:
    token = st.sampled_from([[0], [1], [2], *([i] for i in range(259, 265))])
    character = st.characters(codec="utf-8").map(lambda char: byte_ids(char.encode()))
    ids = list(chain.from_iterable(data.draw(st.lists(st.one_of(token, character), max_size=15))))
    assert "".join(pieces(byte_fallback, ids, skip)) == byte_fallback._backend.decode(ids, skip_special_tokens=skip)


def test_four_byte_tokens_become_one_emoji_at_the_fourth(byte_fallback: Tokenizer) -> None:
    assert pieces(byte_fallback, byte_ids("😀".encode())) == ["", "", "", "😀", ""]


def test_an_emoji_cut_at_three_bytes_is_one_replacement_character(byte_fallback: Tokenizer) -> None:
    ids = byte_ids("😀".encode()[:3])
    assert pieces(byte_fallback, ids) == ["", "", "", "\ufffd"]
    assert byte_fallback.decode(ids, skip_special_tokens=True) == "\ufffd"


def test_a_broken_byte_run_keeps_the_characters_before_it(byte_fallback: Tokenizer) -> None:
    """The library takes the emoji back when the next byte fits nothing; what a client has seen cannot be taken back."""
    ids = byte_ids("😀".encode() + b"\xff")
    assert byte_fallback._backend.decode(ids) == "\ufffd" * 5
    assert pieces(byte_fallback, ids) == ["", "", "", "😀", "\ufffd", ""]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["▁a", "b"], "ab"),
        (["▁", "▁a"], " a"),
        (["a", "▁a"], "a a"),
        (["▁"], ""),
        (["<s>", "▁a"], "a"),
        (["▁", "<s>", "▁"], " "),
    ],
)
def test_one_leading_space_is_dropped_from_the_whole_text_only(byte_fallback: Tokenizer, words: list[str], text: str) -> None:
    ids = [byte_fallback._backend.token_to_id(word) for word in words]
    assert "".join(pieces(byte_fallback, ids)) == text == byte_fallback._backend.decode(ids)


def test_ids_that_name_no_token_add_nothing(byte_level: Tokenizer) -> None:
    h = byte_level.encode("h", add_special_tokens=False)
    assert pieces(byte_level, [-1, *h, 2**40]) == ["", "h", "", ""]


def test_special_tokens_show_only_where_asked_and_added_tokens_always(byte_level: Tokenizer) -> None:
    assert byte_level.decode([256, 257], skip_special_tokens=True) == "<é note>"
    assert byte_level.decode([256, 257], skip_special_tokens=False) == "<end><é note>"


def test_a_rebuilt_detokenizer_goes_on_alike(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("tears of joy 😂😂 and naïveté 👩‍👩‍👧", add_special_tokens=False)
    whole = pieces(smollm2, ids)
    for cut in range(len(ids)):
        again = smollm2.detokenizer(True)
        assert [again.step(i) for i in ids[:cut]] == whole[:cut]
        assert [again.step(i) for i in ids[cut:]] == whole[cut:-1]
