"""Two workers that share the experts of one model, each in its own process, under a scheduler that keeps them in step."""

import json
from pathlib import Path

import pytest
from near_ties import Judge
from process_stack import Stack, StackOptions
from role_process import RoleProcess, free_ports
from stream_reader import Reader
from tiny_served_model import save_served

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.weights.open_model import load_model, open_model
from tessera.client import Client
from tessera.values.config import Config
from tests.parity.in_process import InProcess
from tests.parity.tiny_models import tiny_configs

TOKENS = 24
PROMPTS = ["one and two and three and", "a", "four and five, six and seven", "eight"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random mixture of experts whose tokens are bytes."""
    config = tiny_configs()["Qwen3MoeForCausalLM"][0]
    config.vocab_size, config.bos_token_id, config.eos_token_id = 256, None, None
    return save_served(config, tmp_path_factory.mktemp("model") / "tiny")


def test_streams_are_those_of_one_worker_and_a_lost_worker_ends_the_other(model: str, tmp_path: Path) -> None:
    second_port, store_port = free_ports(2)
    address = f"127.0.0.1:{second_port}"
    shared = [
        "--expert-parallel-size",
        "2",
        "--expert-parallel-store",
        f"127.0.0.1:{store_port}",
        "--kv-cache-bytes",
        str(4 << 20),
        "--dtype",
        "float32",
    ]
    second = RoleProcess("worker2", ["worker", "--model", model, *shared, "--expert-parallel-rank", "1"], address, tmp_path)
    options = StackOptions(
        model, scheduler=["--lockstep", "--worker", address, "--worker-choice", "round_robin"], worker=shared
    )
    second.start()
    try:
        with Stack(tmp_path, options) as stack, Client(stack.address) as client:
            readers = [Reader(client, prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0) for prompt in PROMPTS]
            prompts = [list(client.tokenize(prompt)) for prompt in PROMPTS]
            source = open_model(model)
            whole = InProcess(load_model(source, TorchKernels()), source.info, Config(max_num_seqs=8), 16, 40)
            judge = Judge(model)
            for prompt, reader in zip(prompts, readers, strict=True):
                (expected,) = whole.generate([prompt], [TOKENS])
                judge.assert_same(prompt, expected, reader.result().token_ids)
            second.kill()
            assert stack.worker.process is not None
            assert stack.worker.process.wait(30) == 1
            events = [json.loads(line) for line in stack.worker.log.read_text().splitlines() if line.startswith("{")]
            (reason,) = [event["reason"] for event in events if event["event"] == "the worker ends"]
            assert reason == "worker 1 of 2 in the lockstep group is gone"
    finally:
        second.stop()
