"""When a request ends by its own tokens: stop token sequences, EOS, stop token ids, `max_tokens`, length caps, in this order.

Of several tokens sampled in one step the earliest that completes any of these ends the request, and what follows it is cut: so where a
request ends never depends on how its tokens came, one by one or many at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tessera.values.finish import CUT_SHORT, Finish, FinishReason
from tessera.values.model import ModelInfo
from tessera.values.request import Submission

SETS_MAX = 256
"""So many sets of ids are kept to be shared: most requests stop at the same ones."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """The stop rules of one request under one model and pool.

    - `min_tokens`: below it only caps end the request (they beat it).
    - `eos_ids` is empty with `ignore_eos`; `stop_ids` are the request's own, they hold even then.
    - `max_tokens` counts output; `len_max` and `pool_len_max` count prompt and output. `len_max` is the model's length or the request's
      own `max_model_length`, whichever is less.
    - `pool_len_max` is the pool's capacity in tokens plus one, since the last token needs no KV. It is no function of the request, and
      a request can have come from a larger pool: so it ends a request where it stands, and never cuts tokens.
    """

    prompt_len: int
    min_tokens: int
    max_tokens: int
    len_max: int
    pool_len_max: int
    tokens_max: int  # prompt and output together never grow beyond this
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    ending_ids: frozenset[int]  # both
    stop_sequences: tuple[list[int], ...]

    @classmethod
    def of(cls, submission: Submission, model: ModelInfo, pool_len_max: int) -> "StopRules":
        """The rules of `submission`."""
        sampling, prompt_len = submission.sampling, len(submission.prompt_token_ids)
        eos_ids = _NO_IDS if sampling.ignore_eos else _set_of(model.eos_token_ids)
        stop_ids = _set_of(sampling.stop_token_ids)
        len_max = min(model.max_model_len, submission.max_model_length or model.max_model_len)
        return cls(
            prompt_len=prompt_len,
            min_tokens=sampling.min_tokens,
            max_tokens=sampling.max_tokens,
            len_max=len_max,
            pool_len_max=pool_len_max,
            tokens_max=min(prompt_len + sampling.max_tokens, len_max, pool_len_max),
            eos_ids=eos_ids,
            stop_ids=stop_ids,
            ending_ids=_either(eos_ids, stop_ids),
            stop_sequences=tuple(list(stop) for stop in sampling.stop_token_sequences),
        )

    @property
    def last_ids(self) -> frozenset[int]:
        """Every id that can be the last one of an output which ends before its caps."""
        return self.ending_ids.union(stop[-1] for stop in self.stop_sequences if stop)

    def first_stop(self, output: Sequence[int], checked: int = 0) -> Finish | None:
        """The earliest stop in an output, after its first `checked` tokens; no rule looks at the prompt's ids. None: it goes on."""
        if (
            self.prompt_len + len(output) < self.tokens_max
            and not self.stop_sequences
            and self.ending_ids.isdisjoint(output[checked:])
        ):
            return None
        output_max = self.tokens_max - self.prompt_len
        for output_len in range(checked + 1, len(output) + 1):
            if output[output_len - 1] in self.ending_ids or output_len >= output_max or self.stop_sequences:
                finish = self._stop_at(output, output_len)
                if finish is not None:
                    return finish
        output_len = len(output)
        if self.prompt_len + output_len < self.pool_len_max:
            return None
        if output_len == 0:
            message = f"the prompt has {self.prompt_len} tokens, the pool now holds {self.pool_len_max - 1}"
            return Finish(FinishReason.UNSCHEDULABLE, 0, message=message)
        return Finish(FinishReason.MAX_MODEL_LEN, output_len)

    def _stop_at(self, output: Sequence[int], output_len: int) -> Finish | None:
        """The rule that ends a request at its first `output_len` output tokens."""
        if output_len >= self.min_tokens:
            for stop in self.stop_sequences:
                if len(stop) <= output_len and list(output[output_len - len(stop) : output_len]) == stop:
                    return Finish(FinishReason.STOP_SEQUENCE, output_len)
            token_id = output[output_len - 1]
            if token_id in self.eos_ids:
                return Finish(FinishReason.EOS, output_len, stop_token_id=token_id)
            if token_id in self.stop_ids:
                return Finish(FinishReason.STOP_TOKEN, output_len, stop_token_id=token_id)
        if output_len >= self.max_tokens:
            return Finish(FinishReason.MAX_TOKENS, output_len)
        if self.prompt_len + output_len >= self.len_max:
            return Finish(FinishReason.MAX_MODEL_LEN, output_len)
        return None


_NO_IDS: frozenset[int] = frozenset()


@lru_cache(maxsize=SETS_MAX)
def _set_of(token_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(token_ids)


@lru_cache(maxsize=SETS_MAX)
def _either(one: frozenset[int], other: frozenset[int]) -> frozenset[int]:
    return one | other


_CAPS = frozenset({FinishReason.MAX_TOKENS, FinishReason.MAX_MODEL_LEN})


def stop_string_wins(output_len: int, finish: Finish) -> bool:
    """Whether a stop string completed by token `output_len` replaces `finish`, which was found first.

    The earliest index wins. At the same index a stop found in the tokens is kept and a cap gives way: the text ended there by
    itself. An abort or an error is final, whatever the text would have done.
    """
    if finish.reason in CUT_SHORT:
        return False
    return output_len < finish.output_len or (output_len == finish.output_len and finish.reason in _CAPS)
