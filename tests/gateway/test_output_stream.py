"""A request's stream at the gateway: dense offsets, one end, and the same text however the outputs were cut."""

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.delta import Delta, PublicReason, join_deltas
from gateway.errors import InvalidRequest, OutputGap
from gateway.output_stream import OutputStream, Shown
from gateway.tokenizer import Tokenizer
from tessera.values.finish import CUT_SHORT, Finish, FinishReason
from tessera.values.logprobs import Logprobs, no_logprobs
from tessera.values.request import DetokenizeOptions, RequestOutput, RequestTimings

TIMINGS = RequestTimings(1, 2, 3)
END = 256  # `<end>`, the special token of the byte-level vocabulary


def output(offset: int, ids: list[int], finish: Finish | None = None, subscriber: int = 0) -> RequestOutput:
    return RequestOutput(b"r" * 16, subscriber, offset, tuple(ids), 5, finish, TIMINGS if finish else None)


def outputs(ids: list[int], cuts: list[int], finish: Finish | None) -> list[RequestOutput]:
    """The outputs that carry `ids`, cut before each index in `cuts`; the last one has the finish."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    found = [output(a, ids[a:b]) for a, b in pairwise(edges)]
    return [*found[:-1], output(edges[-2], ids[edges[-2] :], finish)]


def drain(stream: OutputStream, sent: list[RequestOutput]) -> list[Delta]:
    return [delta for delta in map(stream.feed, sent) if delta is not None]


def assert_dense(deltas: list[Delta], token_offset: int = 0, text_offset: int = 0) -> None:
    """Each delta begins where the one before ended, and only the last has a finish."""
    for i, delta in enumerate(deltas):
        assert (delta.token_offset, delta.text_offset) == (token_offset, text_offset)
        token_offset += len(delta.token_ids)
        text_offset += len(delta.text.encode())
        assert (delta.finish is not None) == (i == len(deltas) - 1)


def naive(tokenizer: Tokenizer, options: DetokenizeOptions, ids: list[int], finish: Finish) -> tuple[str, list[int], Finish]:
    """The documented rule on the whole answer: text, ids and end."""
    stop_token = ids[-1:] if finish.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN) else []
    plain = ids[: len(ids) - len(stop_token)]
    detokenizer = tokenizer.detokenizer(options.skip_special_tokens)
    text = ""
    for count, piece in enumerate([*map(detokenizer.step, plain), detokenizer.finish()], 1):
        text += piece
        found = [(text.find(stop), len(stop), stop) for stop in options.stop_strings if stop in text]
        if found:
            start, length, stop = min(found)
            kept = min(count, len(plain))
            shown = text[: start + length * options.include_stop_in_output]
            return shown, plain[:kept], Finish(FinishReason.STOP_STRING, kept, stop_string=stop)
    stop_text = tokenizer.decode(stop_token, options.skip_special_tokens) if options.include_stop_in_output else ""
    return text + stop_text, ids, finish


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], Finish, DetokenizeOptions]:
    """Letters, an emoji whole and in parts, `<end>` and `<é note>`, with stop strings made of the same."""
    a, b, c, *emoji = 64, 65, 66, 172, 253, 246, 222
    part = st.sampled_from([[a], [b], [c], [END], [257], emoji, emoji[:1], emoji[:2], emoji[3:]])
    ids = list(chain.from_iterable(draw(st.lists(part, min_size=1, max_size=10))))
    reason = draw(st.sampled_from(list(FinishReason)))
    finish = Finish(reason, len(ids), stop_token_id=ids[-1])
    stops = draw(st.lists(st.text("abc<n😀\ufffd", min_size=1, max_size=3), max_size=3).map(tuple))
    return ids, finish, DetokenizeOptions(stops, draw(st.booleans()), draw(st.booleans()))


@settings(max_examples=300, deadline=None)
@given(answers(), st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)))
def test_the_answer_is_the_naive_one_however_it_is_cut(
    byte_level: Tokenizer, answer: tuple[list[int], Finish, DetokenizeOptions], cuts: list[int], repeats: list[int]
) -> None:
    ids, finish, options = answer
    text, kept, end = naive(byte_level, options, ids, finish)
    sent = outputs(ids, cuts, finish)
    for i in repeats:  # duplicates: an output sent again later, at a random place
        if i < len(sent) - 1:
            sent.insert(i + 1, sent[i])
    stream = OutputStream(byte_level, options)
    deltas = drain(stream, sent)
    assert_dense(deltas)
    whole = join_deltas(deltas)
    assert (whole.text, list(whole.token_ids), whole.finish) == (text, kept, end)
    assert stream.token_ids == kept and stream.finish == end
    assert stream.feed(output(len(ids), [64])) is None


@settings(max_examples=1000, deadline=None)
@given(answers(), st.lists(st.integers(0, 20)), st.integers(0, 20), st.booleans(), st.booleans(), st.lists(st.integers(0, 20)))
def test_a_resume_elsewhere_continues_text_and_tokens(
    byte_level: Tokenizer,
    answer: tuple[list[int], Finish, DetokenizeOptions],
    cuts: list[int],
    received: int,
    has_the_last: bool,
    keeps_ids: bool,
    cuts_again: list[int],
) -> None:
    """The client got the first deltas, at most all but the word of the end, then its gateway died. The next one gets what the client
    has not kept, cut anyhow."""
    ids, finish, options = answer
    sent = [replace(delta, finish=None) for delta in drain(OutputStream(byte_level, options), outputs(ids, cuts, finish))]
    first = sent[: min(received, len(sent) - (not has_the_last))]
    ids_shown = tuple(i for d in first for i in d.token_ids)
    shown = Shown(len(ids_shown), len("".join(d.text for d in first).encode()), ids_shown if keeps_ids else ())
    second = OutputStream(byte_level, options, subscriber=1, shown=shown)
    known = len(shown.token_ids)
    again = [
        replace(each, subscriber=1, token_offset=known + each.token_offset) for each in outputs(ids[known:], cuts_again, finish)
    ]
    rest = drain(second, again)
    assert_dense(rest, shown.num_tokens, shown.text_bytes)
    whole = join_deltas([*first, *rest])
    assert (whole.text, list(whole.token_ids), whole.finish) == naive(byte_level, options, ids, finish)


@settings(max_examples=500, deadline=None)
@given(answers(), st.integers(0, 30), st.integers(0, 60), st.booleans(), st.lists(st.integers(0, 20)))
def test_wrong_offsets_are_refused_or_give_the_rest_of_the_answer(
    byte_level: Tokenizer,
    answer: tuple[list[int], Finish, DetokenizeOptions],
    num_tokens: int,
    text_bytes: int,
    keeps_ids: bool,
    cuts: list[int],
) -> None:
    """Whatever a client says it has: either it is told that this cannot be, or what it gets is exactly what lies beyond."""
    ids, finish, options = answer
    text, kept, end = naive(byte_level, options, ids, finish)
    keeps_ids = keeps_ids and num_tokens <= len(ids)
    known = num_tokens if keeps_ids else 0
    try:
        stream = OutputStream(byte_level, options, 1, Shown(num_tokens, text_bytes, tuple(ids[:known])))
        again = [
            replace(each, subscriber=1, token_offset=known + each.token_offset) for each in outputs(ids[known:], cuts, finish)
        ]
        rest = drain(stream, again)
    except InvalidRequest as error:
        assert {item.field for item in error.fields} <= {"resume.token_offset", "resume.text_offset"}
        return
    assert_dense(rest, num_tokens, text_bytes)
    cut_short = end.reason in CUT_SHORT
    assert cut_short or (num_tokens <= len(kept) and text_bytes <= len(text.encode()))
    assert "".join(delta.text for delta in rest).encode() == text.encode()[text_bytes:]
    assert [i for delta in rest for i in delta.token_ids] == kept[num_tokens:]
    assert stream.finish == end


@pytest.mark.parametrize(
    ("include", "skip_special", "text"), [(False, True, "a"), (True, True, "a"), (False, False, "a"), (True, False, "a<end>")]
)
def test_an_end_of_sequence_token_is_in_the_ids_and_in_the_text_only_where_asked(
    byte_level: Tokenizer, include: bool, skip_special: bool, text: str
) -> None:
    finish = Finish(FinishReason.EOS, 2, stop_token_id=END)
    stream = OutputStream(byte_level, DetokenizeOptions((), include, skip_special))
    delta = stream.feed(output(0, [*byte_level.encode("a", False), END], finish))
    assert delta is not None
    assert (delta.text, len(delta.token_ids), delta.public_reason, delta.finish) == (text, 2, PublicReason.STOP, finish)
    assert delta.timings == TIMINGS and not delta.found_here and delta.num_cached_tokens == 5


def test_an_ordinary_stop_token_leaves_no_text_and_is_not_searched(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab", False)
    finish = Finish(FinishReason.STOP_TOKEN, 2, stop_token_id=ids[1])
    for include, text in ((False, "a"), (True, "ab")):
        delta = OutputStream(byte_level, DetokenizeOptions(("b",), include)).feed(output(0, ids, finish))
        assert delta is not None and delta.text == text and delta.finish == finish


def test_a_stop_string_ends_the_stream_whatever_comes_later(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one STOP two", False)
    stream = OutputStream(byte_level, DetokenizeOptions(("STOP",)))
    deltas = drain(stream, [output(i, [token]) for i, token in enumerate(ids)])
    assert join_deltas(deltas).text == "one "
    assert deltas[-1].finish == Finish(FinishReason.STOP_STRING, 8, stop_string="STOP")
    assert deltas[-1].found_here and deltas[-1].timings is None and deltas[-1].public_reason is PublicReason.STOP
    assert stream.feed(output(8, ids[8:], Finish(FinishReason.MAX_TOKENS, len(ids)))) is None


@pytest.mark.parametrize("reason", [FinishReason.MAX_TOKENS, FinishReason.ABORTED, FinishReason.ERROR])
def test_a_stop_string_wins_over_another_end_at_its_own_token(byte_level: Tokenizer, reason: FinishReason) -> None:
    ids = byte_level.encode("xSTOP", False)
    delta = OutputStream(byte_level, DetokenizeOptions(("STOP",))).feed(output(0, ids, Finish(reason, 5)))
    assert delta is not None and delta.text == "x"
    assert delta.finish == Finish(FinishReason.STOP_STRING, 5, stop_string="STOP")


def test_the_schedulers_own_word_of_the_stop_string_is_not_sent_back(byte_level: Tokenizer) -> None:
    finish = Finish(FinishReason.STOP_STRING, 5, stop_string="STOP")
    delta = OutputStream(byte_level, DetokenizeOptions(("STOP",))).feed(output(0, byte_level.encode("xSTOP", False), finish))
    assert delta is not None and delta.text == "x" and not delta.found_here and delta.timings == TIMINGS


def test_ids_go_out_while_their_text_is_held_back(byte_level: Tokenizer) -> None:
    stream = OutputStream(byte_level, DetokenizeOptions(("STOP",)))
    deltas = drain(stream, [output(i, [token]) for i, token in enumerate(byte_level.encode("aSTo", False))])
    assert [(len(d.token_ids), d.text) for d in deltas] == [(1, "a"), (1, ""), (1, ""), (1, "STo")]


def test_a_held_back_head_comes_with_the_end(byte_level: Tokenizer) -> None:
    stream = OutputStream(byte_level, DetokenizeOptions(("STOP",)))
    stream.feed(output(0, byte_level.encode("aST", False)))
    delta = stream.feed(output(3, [], Finish(FinishReason.ABORTED, 3)))
    assert delta == Delta(3, (), 1, "ST", 5, Finish(FinishReason.ABORTED, 3), TIMINGS)
    assert delta.public_reason is PublicReason.ABORTED


def test_a_character_cut_by_max_tokens_is_one_replacement_character_as_without_a_stream(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀", False)[:4]
    stream = OutputStream(byte_level, DetokenizeOptions())
    deltas = drain(stream, outputs(ids, [1, 2, 3], Finish(FinishReason.MAX_TOKENS, 4)))
    assert [d.text for d in deltas] == ["a", "", "", "\ufffd"]
    assert join_deltas(deltas).text == byte_level.decode(ids, True)
    assert deltas[-1].public_reason is PublicReason.LENGTH


def test_a_request_without_any_token_ends_too(byte_level: Tokenizer) -> None:
    finish = Finish(FinishReason.UNSCHEDULABLE, 0, message="17 > 16")
    delta = OutputStream(byte_level, DetokenizeOptions(("x",))).feed(output(0, [], finish))
    assert delta == Delta(0, (), 0, "", 5, finish, TIMINGS)
    assert delta.public_reason is PublicReason.ERROR


def test_outputs_for_another_subscriber_are_no_ops(byte_level: Tokenizer) -> None:
    stream = OutputStream(byte_level, DetokenizeOptions(), subscriber=2)
    for other in (1, 3):
        assert stream.feed(output(0, [64], Finish(FinishReason.ABORTED, 1), subscriber=other)) is None
    assert stream.token_ids == [] and stream.finish is None


def test_an_overlapping_output_adds_only_what_is_new(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("abcd", False)
    stream = OutputStream(byte_level, DetokenizeOptions())
    assert stream.feed(output(0, ids[:3])) == Delta(0, tuple(ids[:3]), 0, "abc", 5)
    assert stream.feed(output(0, ids[:2])) is None
    assert stream.feed(output(1, ids[1:])) == Delta(3, (ids[3],), 3, "d", 5)


@pytest.mark.parametrize(
    "bad",
    [
        output(2, [64]),
        output(1, [64], Finish(FinishReason.MAX_TOKENS, 3)),
        output(1, [64], Finish(FinishReason.MAX_TOKENS, 1)),
        output(0, [], Finish(FinishReason.ABORTED, 0)),
    ],
)
def test_a_gap_ends_its_own_request_and_changes_nothing(byte_level: Tokenizer, bad: RequestOutput) -> None:
    stream, neighbour = (OutputStream(byte_level, DetokenizeOptions()) for _ in range(2))
    a = byte_level.encode("a", False)
    stream.feed(output(0, a))
    neighbour.feed(output(0, a))
    with pytest.raises(OutputGap):
        stream.feed(bad)
    for each in (stream, neighbour):
        assert each.feed(output(1, a)) == Delta(1, tuple(a), 1, "a", 5)


@pytest.mark.parametrize("text_bytes", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("keeps_ids", [True, False])
def test_a_resume_with_a_text_offset_that_does_not_fit_is_refused(
    byte_level: Tokenizer, text_bytes: int, keeps_ids: bool
) -> None:
    ids = byte_level.encode("a😀", False)
    kept = tuple(ids) if keeps_ids else ()
    with pytest.raises(InvalidRequest, match=r"resume\.text_offset"):
        stream = OutputStream(byte_level, DetokenizeOptions(), shown=Shown(5, 1 + text_bytes, kept))
        assert keeps_ids or stream.feed(output(0, ids[:4])) is None
        stream.feed(output(0, [*ids, 64]))


def test_text_of_no_token_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="is 1; the first 0 tokens have 0 bytes"):
        OutputStream(byte_level, DetokenizeOptions(), shown=Shown(0, 1))


@pytest.mark.parametrize("keeps_ids", [True, False])
def test_a_resume_beyond_the_end_is_refused(byte_level: Tokenizer, keeps_ids: bool) -> None:
    ids = byte_level.encode("abSTOPcd", False)
    for stops, sent, count in (
        ((), output(3 if keeps_ids else 0, [] if keeps_ids else ids[:3], Finish(FinishReason.MAX_TOKENS, 3)), 3),
        (("STOP",), output(8, [87]) if keeps_ids else output(0, ids), 6),
    ):
        shown = Shown(8, 2, tuple(ids) if keeps_ids else ())
        stream = OutputStream(byte_level, DetokenizeOptions(stops), shown=shown)
        with pytest.raises(InvalidRequest, match=f"is 8; the answer has {count} tokens"):
            stream.feed(sent)


@pytest.mark.parametrize("reason", sorted(CUT_SHORT, key=str))
def test_an_answer_computed_anew_may_be_cut_short_before_it_is_as_long_as_it_was(
    byte_level: Tokenizer, reason: FinishReason
) -> None:
    finish = Finish(reason, 1, message="why")
    stream = OutputStream(byte_level, DetokenizeOptions(), shown=Shown(3, 3))
    assert stream.feed(output(0, byte_level.encode("a", False), finish)) == Delta(3, (), 3, "", 5, finish, TIMINGS)


def test_a_resume_at_the_end_gets_the_end_alone(byte_level: Tokenizer) -> None:
    ids, finish = byte_level.encode("aST", False), Finish(FinishReason.MAX_TOKENS, 3)
    for text_bytes, text in ((1, "ST"), (3, "")):
        for kept in (tuple(ids), ()):
            stream = OutputStream(byte_level, DetokenizeOptions(("STOP",)), shown=Shown(3, text_bytes, kept))
            delta = stream.feed(output(len(kept), ids[len(kept) :], finish))
            assert delta == Delta(3, (), text_bytes, text, 5, finish, TIMINGS)


def test_a_resumed_stream_holds_the_tokens_shown_before(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("aST", False)
    stream = OutputStream(byte_level, DetokenizeOptions(("STOP",)), subscriber=1, shown=Shown(3, 1, tuple(ids)))
    assert stream.token_ids == ids
    assert stream.feed(output(3, [], subscriber=1)) is None
    assert stream.feed(output(3, byte_level.encode("x", False), subscriber=1)) == Delta(3, (87,), 1, "STx", 5)


def test_every_reason_has_a_public_name() -> None:
    for reason in FinishReason:
        assert Delta(0, (), 0, "", finish=Finish(reason, 0)).public_reason in PublicReason
    assert Delta(0, (), 0, "").public_reason is None


def test_a_real_answer_streams_to_its_decoded_text(smollm2: Tokenizer) -> None:
    text = "Il pleut à Paris ☔, naïve café — 日本語のテキスト 👩‍👩‍👧 and\n\n1. code: `x += 1`\n" * 5
    ids = [*smollm2.encode(text, False), 2]
    stream = OutputStream(smollm2, DetokenizeOptions(("<|sep|>", "\nUser:")))
    deltas = drain(stream, outputs(ids, list(range(len(ids))), Finish(FinishReason.EOS, len(ids), stop_token_id=2)))
    assert_dense(deltas)
    whole = join_deltas(deltas)
    assert whole.text == text and list(whole.token_ids) == ids
    assert all("\ufffd" not in delta.text for delta in deltas)


def told(ids: list[int]) -> Logprobs:
    """Two entries a token that say which it is; of every third none."""
    counts = np.array([0 if token_id % 3 == 0 else 2 for token_id in ids], np.int32)
    entries = np.repeat(np.array(ids, np.int32), counts)
    return Logprobs(counts, entries, (-entries / 8).astype(np.float32), counts)


@given(
    ids=st.lists(st.integers(0, 255), min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 20)),
    held=st.integers(0, 20),
    shown=st.integers(0, 20),
    read=st.integers(1, 4),
)
def test_log_probabilities_stay_with_their_tokens(
    byte_level: Tokenizer, ids: list[int], cuts: list[int], held: int, shown: int, read: int
) -> None:
    """However the outputs were cut, whatever comes twice, what a resuming client has, and where a slow one leaves many to be joined. Those
    of the prompt come with the first token, to whom it is shown."""
    shown, finish = min(shown, len(ids)), Finish(FinishReason.MAX_TOKENS, len(ids))
    stream = OutputStream(byte_level, DetokenizeOptions(), 0, Shown(shown, 0, ()))
    prompt = told([1, 2])
    sent = [
        replace(one, logprobs=told(list(one.token_ids)), prompt_logprobs=None if one.token_offset else prompt)
        for one in outputs(ids, cuts, finish)
    ]
    again = min(held, len(sent) - 1)
    deltas = drain(stream, [*sent[:again], *sent[:again], *sent[again:]])
    deltas = [join_deltas(deltas[first : first + read]) for first in range(0, len(deltas), read)]
    for delta in deltas:
        assert (delta.logprobs or no_logprobs(len(delta.token_ids))) == told(list(delta.token_ids))
        assert (delta.prompt_logprobs == prompt) == (bool(delta.token_ids) and not delta.token_offset)
    assert [token_id for delta in deltas for token_id in delta.token_ids] == ids[shown:]


def test_a_stop_string_cuts_log_probabilities_with_their_tokens(byte_level: Tokenizer) -> None:
    stream = OutputStream(byte_level, DetokenizeOptions(("bc",)))
    ids = byte_level.encode("abcd", add_special_tokens=False)
    delta = stream.feed(replace(output(0, ids), logprobs=told(ids)))
    assert delta is not None and delta.finish is not None and len(delta.token_ids) == 3
    assert delta.logprobs == told(ids[:3])
