"""The model that everything starts with, from its GGUF file, answers a question."""

import torch
from paged_driver import PagedDriver

from gateway.conversation import ChatMessage, Conversation
from gateway.tokenizer_source import load_tokenizer
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.weights.open_model import load_model, open_model
from tessera.values.known_models import locate

NAME = "SmolLM2-135M-Instruct"


def test_it_knows_the_capital_of_france() -> None:
    source = open_model(NAME)
    tokenizer = load_tokenizer(locate(NAME))
    assert source.info.name == NAME
    assert source.info.tokenizer_digest == tokenizer.digest
    assert source.info.eos_token_ids == (2,)
    config = source.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.rope_theta) == (30, 9, 3, 100_000.0)

    model = load_model(source, TorchKernels())
    assert all(torch.isfinite(slot.view).all() for slot in model.slots().values())
    assert tokenizer.chat_template is not None
    chat = tokenizer.chat_template.render(Conversation((ChatMessage("user", "What is the capital of France?"),)), 4096)
    prompt = tokenizer.encode(chat, add_special_tokens=False)
    kv = KVPool(config.num_layers, 8, 16, config.num_kv_heads, config.head_dim)
    (run,) = PagedDriver(model, kv).generate([prompt], 8)
    assert tokenizer.decode(run.outputs, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"
