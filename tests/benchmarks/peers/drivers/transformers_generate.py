"""transformers' `generate` on one batch: `python transformers_generate.py MODEL_FOLDER DTYPE THREADS`."""

import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from questions import Question, Run, Timeline, answer_questions

MODEL, DTYPE, THREADS = sys.argv[1:]


class Clock(transformers.StoppingCriteria):
    """Asked after every token, it notes the time, and stops all answers where that is up."""

    def __init__(self, end: float) -> None:
        self.times: list[float] = []
        self._end = end

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.full((len(ids),), self.times[-1] > self._end)


def load() -> tuple[str, Run]:
    """With torch's own attention."""
    torch.set_num_threads(int(THREADS))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=getattr(torch, DTYPE), attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def run(question: Question) -> list[Timeline]:
        assert question.arrivals_s is None, "a batch begins as one"
        began = time.perf_counter()
        clock = Clock(began + question.limit_s)
        ids = torch.tensor(question.prompts)
        length = {"min_new_tokens": question.output_tokens, "max_new_tokens": question.output_tokens}
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            pad_token_id=2,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
            **length,
        )
        return [(began, clock.times)] * len(question.prompts)

    return transformers.__version__, run


if __name__ == "__main__":
    answer_questions(load)
