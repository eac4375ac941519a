"""A batch of prompts in this process, without a server. An argument names the model."""

import sys

from gateway.generate_input import SamplingInput
from services.llm import LLM

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct")
prompts = ["Once upon a time", "The capital of France is"]
for prompt, completion in zip(prompts, llm.generate(prompts, SamplingInput(temperature=0, max_tokens=16)), strict=True):
    print(f"{prompt!r} -> {completion.text!r}")
