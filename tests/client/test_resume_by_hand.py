"""A client in any language can resume: this one knows the generated stubs and the comments of `inference.proto`, nothing of tessera.client."""

import asyncio

import grpc
import pytest
from scripted_gateways import answer_to, gateways

from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc

GENERATION = pb.Generation(request_id="by hand", text="Hi", sampling=pb.Sampling(seed=5, max_tokens=30))
BROKEN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
}


async def ask(addresses, generation, keep_ids, received):
    """The token ids (or, where they are not kept, how many) and the text of the whole answer; `received` is told after each piece."""
    token_ids, token_count, text, number = [], 0, "", 0
    while True:
        request = pb.StreamGenerateRequest(generation=generation)
        if number > 0:
            request.resume.number = number
            request.resume.token_offset = token_count
            request.resume.text_offset = len(text.encode())
            if keep_ids:
                request.resume.token_ids.extend(token_ids)
        try:
            async with grpc.aio.insecure_channel(addresses[number % len(addresses)]) as channel:
                async for piece in inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(request):
                    assert (piece.token_offset, piece.text_offset) == (token_count, len(text.encode()))
                    token_ids.extend(piece.token_ids)
                    token_count += len(piece.token_ids)
                    text += piece.text
                    received(token_count)
                    if piece.HasField("finish"):
                        return (token_ids if keep_ids else token_count), text
        except grpc.aio.AioRpcError as error:
            if error.code() not in BROKEN:
                raise
        number += 1


@pytest.mark.parametrize("keep_ids", [True, False])
def test_stubs_and_comments_are_enough_to_resume(run_async, keep_ids):
    async def scenario():
        async with gateways(2) as (first, second):
            next_break = {4: (first, 1), 5: (second, 12), 17: (first, None)}

            def received(token_count):
                if token_count in next_break:
                    gateway, gateway.holds_after = next_break.pop(token_count)
                    first.cut()
                    second.cut()

            async def break_before_anything_came():
                await first.until_asked()
                first.cut()

            first.holds_after, second.holds_after = 0, 4
            got, _ = await asyncio.gather(
                ask([first.address, second.address], GENERATION, keep_ids, received), break_before_anything_came()
            )
            answer = answer_to(GENERATION)
            ids = [token_id for token_id, _ in answer]
            assert got == (ids if keep_ids else len(ids), "".join(word for _, word in answer))
            assert [request.resume.number for request in first.asked] == [0, 2, 4]
            assert [request.resume.number for request in second.asked] == [1, 3]
            assert first.book.admitted == 1 and not next_break

    run_async(scenario())
