"""Frames as columns read like the outputs that they were made of."""

from dataclasses import replace

import numpy as np

from tessera.values.finish import Finish, FinishReason
from tessera.values.logprobs import Logprobs
from tessera.values.output_columns import NO_OUTPUTS, OutputColumns
from tessera.values.request import RequestOutput, RequestTimings

PLAIN = RequestOutput(b"a" * 16, 1, 4, (7, 8))
EMPTY = RequestOutput(b"b" * 16, 2**64 - 1, 2**32 - 1, ())
ENDED = RequestOutput(b"c" * 16, 0, 0, (2**31 - 1,), 16, Finish(FinishReason.EOS, 1), RequestTimings(1, 2, 3))


LIKELY = Logprobs(*(np.array(of, dtype) for of, dtype in (([2, 0], "i4"), ([7, 3], "i4"), ([-1, -2], "f4"), ([1, 0], "i4"))))
TOLD = replace(PLAIN, logprobs=LIKELY, prompt_logprobs=LIKELY)


def test_columns_read_as_the_outputs_they_were_made_of() -> None:
    outputs = [PLAIN, EMPTY, ENDED]
    columns = OutputColumns.of(outputs)
    assert columns == outputs and outputs == columns and columns == tuple(outputs)
    assert len(columns) == 3 and columns[2] == ENDED and columns[1:] == outputs[1:] and ENDED in columns
    assert columns != outputs[:2] and columns != [PLAIN, ENDED, EMPTY]


def test_others_follow_with_their_ends() -> None:
    columns = OutputColumns.of([ENDED]).followed_by([PLAIN, ENDED])
    assert columns == [ENDED, PLAIN, ENDED] and columns.rare.keys() == {0, 2}
    assert OutputColumns.of([PLAIN]).followed_by([]) == [PLAIN]
    assert NO_OUTPUTS.followed_by([EMPTY]) == [EMPTY]


def test_log_probabilities_stay_with_their_tokens() -> None:
    columns = OutputColumns.of([ENDED, TOLD]).followed_by([PLAIN, EMPTY, TOLD])
    assert columns == [ENDED, TOLD, PLAIN, EMPTY, TOLD] and columns != [ENDED, TOLD, TOLD, EMPTY, PLAIN]
    assert columns.logprobs is not None and columns.logprobs.counts.tolist() == [0, 2, 0, 0, 0, 2, 0]
    assert OutputColumns.of([PLAIN]).followed_by([TOLD]) == [PLAIN, TOLD]
    assert OutputColumns.of([PLAIN, ENDED]).followed_by([EMPTY]).logprobs is None


def test_without_outputs_there_is_nothing_to_send() -> None:
    assert not NO_OUTPUTS and NO_OUTPUTS == [] and list(NO_OUTPUTS) == []
    ids = np.zeros(0, np.int32)
    assert OutputColumns((), ids, ids, ids, ids, {}) == NO_OUTPUTS
