"""transformers' `generate` on one batch: `python transformers_generate.py MODEL_FOLDER DTYPE THREADS`."""

import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from questions import Run, Timeline, answer_questions

MODEL, DTYPE, THREADS = sys.argv[1:]


class Clock(transformers.StoppingCriteria):
    """Stops nothing; asked after every token, it notes the time."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)


def load() -> tuple[str, Run]:
    """With torch's own attention."""
    torch.set_num_threads(int(THREADS))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=getattr(torch, DTYPE), attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], output_tokens: int) -> list[Timeline]:
        clock, began = Clock(), time.perf_counter()
        ids = torch.tensor(prompts)
        length = {"min_new_tokens": output_tokens, "max_new_tokens": output_tokens}
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            pad_token_id=2,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
            **length,
        )
        return [(began, clock.times)] * len(prompts)

    return transformers.__version__, run


if __name__ == "__main__":
    answer_questions(load)
