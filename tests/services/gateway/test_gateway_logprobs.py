"""Log-probabilities at the public API: one for each token, of the prompt with the first token, whatever the scheduler still holds."""

from dataclasses import replace

import numpy as np
from gateway_house import max_tokens, output, read_all

from tessera.v1 import inference_pb2 as pb
from tessera.values.logprobs import Logprobs, joined_logprobs, no_logprobs
from tessera.values.session import Submit


def sampling(**fields):
    return {"sampling": pb.Sampling(**fields)}


def told(*token_ids: int, rank: int = 1) -> Logprobs:
    """One token's entries, each half a unit less likely than the one before."""
    values = np.arange(1, 1 + len(token_ids), dtype=np.float32) / -2
    return Logprobs(np.array([len(token_ids)], np.int32), np.array(token_ids, np.int32), values, np.array([rank], np.int32))


def entry(token_id: int, logprob: float, text: bytes) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token_id, logprob=logprob, text=text)


def test_every_token_has_its_own_with_text_and_the_prompt_comes_with_the_first(run_async, house, tokenizer):
    first, second, other = tokenizer.encode(" day", False)[0], tokenizer.encode("s", False)[0], tokenizer.encode("é", False)[0]
    text_of = tokenizer.vocabulary.bytes_of

    async def scenario():
        async with house() as h:
            end = await h.session()
            call = h.stream(**sampling(max_tokens=3, logprobs=1, prompt_logprobs=1, logprob_token_ids=[other]))
            submit = await end.hear(Submit)
            prompt = submit.submission.prompt_token_ids.tolist()
            of_prompt = joined_logprobs([told(token_id, first, rank=3) for token_id in prompt[1:]] or [no_logprobs(0)])
            tokens = joined_logprobs([told(first, second, other), no_logprobs(1), told(first, second, other, rank=2)])
            end.send(replace(output(submit, 0, [first]), logprobs=tokens.between(0, 1), prompt_logprobs=of_prompt))
            piece = await call.read()
            assert len(piece.prompt_logprobs) == len(prompt) and piece.prompt_logprobs[0] == pb.TokenLogprobs()
            assert [one.token.token_id for one in piece.prompt_logprobs[1:]] == prompt[1:]
            assert all((one.rank, len(one.top), len(one.asked)) == (3, 1, 0) for one in piece.prompt_logprobs[1:])
            expected = pb.TokenLogprobs(token=entry(first, -0.5, b" day"), rank=1)
            expected.top.append(entry(second, -1, b"s"))
            expected.asked.append(entry(other, -1.5, text_of[other]))
            assert list(piece.logprobs) == [expected]
            end.send(replace(output(submit, 1, [second, first], max_tokens(3)), logprobs=tokens.between(1, 3)))
            rest = await read_all(call)
            found = [one for piece in rest for one in piece.logprobs]
            assert found[0] == pb.TokenLogprobs(), "nobody holds them"
            assert (found[1].rank, found[1].top[0].token_id, found[1].token.text) == (2, second, b" day")
            assert len(found) == 2 and not any(piece.prompt_logprobs for piece in rest)

    run_async(scenario())


def test_tokens_that_nobody_tells_of_have_empty_ones_where_they_were_asked_for_and_none_where_not(run_async, house, tokenizer):
    ids = tokenizer.encode("one two three", False)

    async def scenario():
        async with house() as h:
            end = await h.session()
            for given, count in (
                ({"logprobs": 0}, len(ids)),
                ({"logprob_token_ids": [5]}, len(ids)),
                ({"prompt_logprobs": 2}, 0),
            ):
                call = h.stream(**sampling(max_tokens=len(ids), **given))
                end.send(output(await end.hear(Submit), 0, ids, max_tokens(len(ids))))
                pieces = await read_all(call)
                assert [one for piece in pieces for one in piece.logprobs] == [pb.TokenLogprobs()] * count
                assert not any(piece.prompt_logprobs for piece in pieces)

    run_async(scenario())


def test_a_slow_reader_has_one_for_each_token_of_a_joined_piece(run_async, house, tokenizer):
    word = tokenizer.encode(" a", False)[0]
    count = 500

    async def scenario():
        async with house() as h:
            end = await h.session()
            slow, whole = (h.stream(**sampling(max_tokens=count, logprobs=1)) for _ in range(2))
            submits = [await end.hear(Submit) for _ in range(2)]
            for at in range(count):
                finish = max_tokens(count) if at == count - 1 else None
                logprobs = told(word, at % 49152) if at % 7 else None
                end.send(*(replace(output(submit, at, [word], finish), logprobs=logprobs) for submit in submits))
            for call in (slow, whole):
                pieces = await read_all(call)
                assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
                found = [one.top[0].token_id if one.HasField("token") else None for piece in pieces for one in piece.logprobs]
                assert found == [at if at % 7 else None for at in range(count)]

    run_async(scenario())
