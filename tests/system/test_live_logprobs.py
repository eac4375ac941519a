"""Log-probabilities through the whole live system: transformers' numbers, whoever is killed in between."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from process_stack import Stack, StackOptions
from stream_reader import Reader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig

from tessera.client import Answer, Client, TokenLogprobs
from tests.parity.reference import Reference
from tests.parity.tiny_models import save_random

TOLERANCE = 1e-4
ASKED = (5, 11)
WANTED = {"logprobs": 3, "prompt_logprobs": 2, "logprob_token_ids": ASKED, "ignore_eos": True}
PROMPT = "The keeper wrote in his book: the wind, the ships that passed, the state of the lamp."


def save_tokenizer(directory: Path) -> None:
    """One token per byte, and an end."""
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", normalized=False, special=True)])
    backend.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model: what takes long here are processes."""
    directory = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=256,
    )
    save_random(config, directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def speculating(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Every stream verifies drafts from prompt lookup."""
    drafts = ["--num-speculative-tokens", "2"]
    options = StackOptions(
        str(directory),
        scheduler=["--result-retention-ms", "60000", "--lease-ms", "1000", *drafts],
        worker=["--kv-cache-bytes", str(16 << 20), "--dtype", "float32", "--proposer", "ngram", *drafts],
    )
    with Stack(tmp_path_factory.mktemp("speculating"), options) as stack:
        yield stack


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


def assert_of_transformers(answer: Answer, prompt: Sequence[int], reference: Reference) -> None:
    """Every number of prompt and answer, each token's rank, and that there is one for every token."""
    ids = [*prompt, *answer.token_ids]
    expected = torch.log_softmax(reference.logits(ids).double(), dim=-1)
    assert answer.prompt_logprobs[0] == TokenLogprobs(None, 0, (), ())
    for told, first, num_top, asked in ((answer.prompt_logprobs[1:], 1, 2, ()), (answer.logprobs, len(prompt), 3, ASKED)):
        assert len(told) == (len(prompt) if first == 1 else len(ids)) - first
        for place, one in enumerate(told, first):
            foretold, own = expected[place - 1], ids[place]
            assert one.token is not None and one.token.token_id == own
            assert [entry.token_id for entry in one.asked] == list(asked)
            best = foretold.topk(num_top).values.tolist()
            wanted = [float(foretold[own]), *best, *(float(foretold[token_id]) for token_id in asked)]
            found = [entry.logprob for entry in (one.token, *one.top, *one.asked)]
            assert found == pytest.approx(wanted, abs=TOLERANCE), f"token {place}"
            likelier = [int((foretold > foretold[own] + gap).sum()) for gap in (TOLERANCE, -TOLERANCE)]
            assert likelier[0] < one.rank <= likelier[1], f"token {place}"


def test_they_are_those_of_transformers_also_over_a_cached_prefix(speculating: Stack, reference: Reference) -> None:
    """Cold; then of the answer alone, which takes the prompt from the cache; then of the prompt again, all of which is computed for it."""
    with Client(speculating.address) as client:
        prompt = client.tokenize(PROMPT)
        asked = WANTED | {"temperature": 0.8, "seed": 3, "max_tokens": 40, "skip_special_tokens": False}
        cold = client.generate(PROMPT, **asked)
        cached = client.generate(PROMPT, **{name: value for name, value in asked.items() if name != "prompt_logprobs"})
        again = client.generate(PROMPT, **asked)
        plain = client.generate(PROMPT, temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    assert cold.finish.usage.cached_tokens == again.finish.usage.cached_tokens == 0 < cached.finish.usage.cached_tokens
    for answer in (cold, again):
        assert_of_transformers(answer, prompt, reference)
        assert answer.token_ids == cached.token_ids == plain.token_ids
    assert not cached.prompt_logprobs and not plain.logprobs
    assert [one.rank for one in cached.logprobs] == [one.rank for one in cold.logprobs]
    values = ([one.token.logprob for one in answer.logprobs if one.token is not None] for answer in (cold, cached))
    assert next(values) == pytest.approx(next(values), abs=TOLERANCE)
    assert b"".join(one.token.text for one in cold.logprobs if one.token is not None).decode(errors="replace") == cold.text


def test_nobody_who_is_killed_takes_any_along(speculating: Stack, reference: Reference) -> None:
    """Scheduler, worker and gateway, one after the other, in the midst of all streams; their client resumes."""
    prompts = [f"Line {number}. {PROMPT}" for number in range(3)]
    with Client(speculating.address) as client:
        readers = [
            Reader(client, prompt, temperature=0.7 * (number % 2), seed=number, max_tokens=500, **WANTED)
            for number, prompt in enumerate(prompts)
        ]
        for count, role in ((5, speculating.scheduler), (100, speculating.worker), (200, speculating.gateway)):
            for reader in readers:
                reader.wait_tokens(count)
            assert all(reader.finish is None for reader in readers), "the kill comes too late to disturb anything"
            role.kill()
            role.start()
            role.wait_ready()
        for reader, prompt in zip(readers, prompts, strict=True):
            assert len(reader.result().token_ids) == 500
            assert_of_transformers(reader.answer(), client.tokenize(prompt), reference)
