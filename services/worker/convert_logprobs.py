"""Log-probabilities as messages."""

import numpy as np

from services.worker.columns import check_counts, column_from_bytes, column_to_bytes, floats_from_bytes, floats_to_bytes
from services.worker.convert_types import MalformedMessage
from tessera.values.logprobs import Logprobs, PromptLogprobs
from tessera.worker.v1 import types_pb2, worker_pb2


def logprobs_to_proto(logprobs: Logprobs) -> types_pb2.Logprobs:
    """Message of `logprobs`."""
    return types_pb2.Logprobs(
        counts=column_to_bytes(logprobs.counts),
        token_ids=column_to_bytes(logprobs.token_ids),
        logprobs=floats_to_bytes(logprobs.logprobs),
        ranks=column_to_bytes(logprobs.ranks),
    )


def logprobs_from_proto(message: types_pb2.Logprobs, num_tokens: int, field: str) -> Logprobs:
    """Those of `num_tokens` tokens; the counts add up to the entries."""
    logprobs = Logprobs(
        counts=column_from_bytes(message.counts, f"{field}.counts"),
        token_ids=column_from_bytes(message.token_ids, f"{field}.token_ids"),
        logprobs=floats_from_bytes(message.logprobs, f"{field}.logprobs"),
        ranks=column_from_bytes(message.ranks, f"{field}.ranks"),
    )
    for name, column in (("counts", logprobs.counts), ("ranks", logprobs.ranks)):
        if len(column) != num_tokens:
            raise MalformedMessage(f"{field}.{name}: {len(column)} values for {num_tokens} tokens")
    for name, column in (("token_ids", logprobs.token_ids), ("logprobs", logprobs.logprobs)):
        check_counts(logprobs.counts, column, f"{field}.counts", f"{field}.{name}")
    return logprobs


def kept_logprobs_from_proto(message: types_pb2.Logprobs, field: str) -> Logprobs:
    """Those of as many tokens as the message has counts for."""
    return logprobs_from_proto(message, len(message.counts) // 4, field)


def prompt_logprobs_to_proto(prompt: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    """Message of `prompt`."""
    return worker_pb2.PromptLogprobs(row_counts=column_to_bytes(prompt.row_counts), tokens=logprobs_to_proto(prompt.tokens))


def prompt_logprobs_from_proto(message: worker_pb2.PromptLogprobs, num_rows: int) -> PromptLogprobs:
    """Those of `num_rows` rows; their counts add up to the tokens."""
    field = "prompt_logprobs"
    row_counts = column_from_bytes(message.row_counts, f"{field}.row_counts")
    if len(row_counts) != num_rows or row_counts.min(initial=0) < 0:
        raise MalformedMessage(f"{field}.row_counts: {row_counts.tolist()} for {num_rows} rows")
    num_tokens = int(row_counts.sum(dtype=np.int64))
    return PromptLogprobs(row_counts, logprobs_from_proto(message.tokens, num_tokens, f"{field}.tokens"))
