"""Log-probabilities as messages of `tessera.v1`."""

from collections.abc import Iterable

from gateway.delta import Delta
from gateway.tokenizer import Tokenizer
from tessera.v1 import inference_pb2 as pb
from tessera.values.logprobs import Logprobs, no_logprobs
from tessera.values.sampling import SamplingParams


def fill_logprobs(
    response: pb.StreamGenerateResponse | pb.GenerateResponse, params: SamplingParams, delta: Delta, tokenizer: Tokenizer
) -> None:
    """Add to a response those of a delta that the request asked for: as many as there are tokens, and of the prompt all or none."""
    bytes_of = tokenizer.vocabulary.bytes_of
    if params.wants_logprobs and delta.token_ids:
        logprobs = delta.logprobs or no_logprobs(len(delta.token_ids))
        response.logprobs.extend(_messages(logprobs, len(params.logprob_token_ids), bytes_of))
    if delta.prompt_logprobs is not None:
        response.prompt_logprobs.add()  # nothing comes before the first token
        response.prompt_logprobs.extend(_messages(delta.prompt_logprobs, 0, bytes_of))


def _messages(logprobs: Logprobs, num_asked: int, bytes_of: list[bytes]) -> Iterable[pb.TokenLogprobs]:
    """One for each token; of its entries the last `num_asked` are those of the ids asked for."""
    token_ids, values, end = logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), 0
    for count, rank in zip(logprobs.counts.tolist(), logprobs.ranks.tolist(), strict=True):
        begin, end = end, end + count
        if not count:
            yield pb.TokenLogprobs()
            continue
        entries = [
            pb.TokenLogprob(token_id=one, logprob=value, text=bytes_of[one] if one < len(bytes_of) else b"")
            for one, value in zip(token_ids[begin:end], values[begin:end], strict=True)
        ]
        top_end = count - num_asked
        yield pb.TokenLogprobs(token=entries[0], rank=rank, top=entries[1:top_end], asked=entries[top_end:])
