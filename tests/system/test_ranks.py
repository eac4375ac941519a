"""A worker of two ranks in a running system: the answers of one rank, and nothing lost when a rank is killed."""

import json
import signal
from collections.abc import Iterator

import psutil
import pytest
from near_ties import Judge
from process_stack import Stack, StackOptions
from stream_reader import Reader, wait_until
from tiny_served_model import save_served
from transformers import LlamaConfig

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.weights.open_model import load_model, open_model
from tessera.client import Client
from tessera.values.config import Config
from tests.parity.in_process import InProcess

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
TEXT = "one and one and one and two and one and two, "
PROMPTS = [f"{TEXT * 3}{number}" for number in range(4)]
TOKENS = 40
OPTIONS = [
    {"temperature": 0.0} if index % 2 == 0 else {"temperature": 0.8, "seed": 1000 + index} for index in range(len(PROMPTS))
]
DRAFTS = ["--num-speculative-tokens", "3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama whose tokens are bytes."""
    return save_served(LlamaConfig(**SHAPE), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def running(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Client]]:
    worker = [
        "--kv-cache-bytes",
        str(8 << 20),
        "--dtype",
        "float32",
        "--tensor-parallel-size",
        "2",
        *DRAFTS,
        "--ngram-min",
        "1",
    ]
    options = StackOptions(model, scheduler=DRAFTS, worker=worker)
    with Stack(tmp_path_factory.mktemp("ranks"), options) as stack, Client(stack.address) as client:
        yield stack, client


def ranks_of(stack: Stack) -> list[psutil.Process]:
    """The processes of the worker beside rank 0."""
    assert stack.worker.process is not None
    return psutil.Process(stack.worker.process.pid).children()


def start_all(client: Client) -> list[Reader]:
    return [
        Reader(client, prompt, max_tokens=TOKENS, ignore_eos=True, **options)
        for prompt, options in zip(PROMPTS, OPTIONS, strict=True)
    ]


def check_against_one_rank(model: str, client: Client, readers: list[Reader]) -> None:
    """The rule: the same tokens, or the first that differs scores, by one rank's logits and the request's own noise, within NEAR_TIE_GAP of the
    other."""
    source = open_model(model)
    plain = InProcess(load_model(source, TorchKernels()), source.info, Config(max_num_seqs=8), 16, 200)
    judge = Judge(model)
    for text, options, reader in zip(PROMPTS, OPTIONS, readers, strict=True):
        prompt = list(client.tokenize(text))
        (expected,) = plain.generate([prompt], [TOKENS], **options)
        judge.assert_same(prompt, expected, reader.token_ids, options["temperature"], options.get("seed", 0))


def test_two_ranks_answer_as_one_with_drafts_and_cached_prefixes(model: str, running: tuple[Stack, Client]) -> None:
    stack, client = running
    assert len(ranks_of(stack)) == 1
    first, second = ([reader.result() for reader in start_all(client)] for _ in range(2))
    check_against_one_rank(model, client, first)
    check_against_one_rank(model, client, second)
    assert all(reader.finish and reader.finish.usage.cached_tokens >= 96 for reader in second)


def test_a_killed_rank_ends_the_worker_and_no_stream(model: str, running: tuple[Stack, Client]) -> None:
    stack, client = running
    readers = start_all(client)
    for reader in readers:
        reader.wait_tokens(4)
    (rank,) = ranks_of(stack)
    rank.kill()
    assert stack.worker.process is not None
    assert stack.worker.process.wait(30) == 1
    assert all(reader.finish is None for reader in readers), "the kill came too late to disturb anything"
    events = [json.loads(line) for line in stack.worker.log.read_text().splitlines() if line.startswith("{")]
    (reason,) = [event["reason"] for event in events if event["event"] == "the worker ends"]
    assert reason.startswith("rank 1 of 2 "), reason
    stack.worker.start()
    check_against_one_rank(model, client, [reader.result() for reader in readers])


def test_a_killed_rank_0_takes_the_others_along(running: tuple[Stack, Client]) -> None:
    stack, _ = running
    (rank,) = ranks_of(stack)
    rank.send_signal(signal.SIGSTOP)  # not even one that cannot run any more stays
    stack.worker.kill()
    wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "the other rank is gone")
