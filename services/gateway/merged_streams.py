"""The pieces of several answers, in the order in which they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from gateway.delta import Delta
from services.gateway.request_stream import RequestStream


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(number of the answer, its next piece) until all have ended. The first error of any of them ends all. To be closed by its reader."""
    if len(streams) == 1:
        delta = await streams[0].next_delta()
        while delta.finish is None:
            yield 0, delta
            delta = await streams[0].next_delta()
        yield 0, delta
        return
    awaited = {asyncio.ensure_future(stream.next_delta()): index for index, stream in enumerate(streams)}
    try:
        while awaited:
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=awaited.__getitem__):
                index = awaited.pop(task)
                delta = task.result()
                yield index, delta
                if delta.finish is None:
                    awaited[asyncio.ensure_future(streams[index].next_delta())] = index
    finally:
        for task in awaited:
            task.cancel()
