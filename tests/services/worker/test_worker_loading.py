"""From configuration to engine: what is refused, and what a worker then says of itself."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from model_worker.group import Alone
from model_worker.kernels import invariant_backend
from model_worker.kernels.cpu.library import multiplies_bfloat16
from model_worker.kernels.row_tiles import NotInvariant
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPoolTooSmall
from model_worker.layers.share import HeadsDoNotDivide
from model_worker.models.registry import build_model
from model_worker.weights.errors import DraftMismatch, ModelUnsupported
from model_worker.weights.hugging_face_config import HuggingFaceConfig
from services.cli.up_config import UpConfig
from services.worker.config import ExpertParallelConfig, SpeculationConfig, WorkerConfig
from services.worker.device_choice import Hardware
from services.worker.device_config import DeviceConfig
from services.worker.loading import load_engine, load_part
from services.worker.rank_processes import RankProcesses
from tessera.values.config import ConfigError
from tessera.values.known_models import ModelNotFound
from tests.parity.eagle_reference import EagleReference
from tests.parity.mtp_reference import MtpReference, save_layers
from tests.parity.tiny_models import save_random, tiny_configs

OF_16_BITS = "cpu/bf16" if multiplies_bfloat16() else "cpu/f16"
"""What is kept on this processor unless something else is asked for."""

CONFIG = WorkerConfig(model="deterministic", kv_cache_bytes=1 << 16, threads=1)
WITH_TORCH = replace(CONFIG, compute=DeviceConfig(kernels="torch"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_bytes": 0}, "kv_cache_bytes must be at least 1, got 0"),
        ({"swap_bytes": -1}, "swap_bytes must be at least 0, got -1"),
        ({"swap_bytes": 10**16}, "swap_bytes must be at most 70368744177664, got 10000000000000000"),
        ({"heartbeat_ms": 10**22}, "heartbeat_ms must be at most 2147483647, got 10000000000000000000000"),
        ({"drain_grace_s": float("nan")}, "drain_grace_s must be at least 0, got nan"),
        ({"drain_grace_s": float("inf")}, "drain_grace_s must be at most 2147483647, got inf"),
        ({"block_size": 24}, "block_size must be 1 or a multiple of 16, got 24"),
        (
            {"max_num_seqs": 100, "max_num_batched_tokens": 99},
            r"max_num_batched_tokens \(99\) must be at least max_num_seqs \(100\)",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be from 1 to 64, got 0"),
        ({"tensor_parallel_size": 65}, "tensor_parallel_size must be from 1 to 64, got 65"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"heartbeat_ms": 0}, "heartbeat_ms must be at least 1"),
    ],
)
def test_numbers_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"expert_parallel_size": 0}, "expert_parallel_size must be at least 1, got 0"),
        ({"expert_parallel_rank": 1}, r"expert_parallel_rank \(1\) must be below expert_parallel_size \(1\)"),
        ({"expert_parallel_size": 2}, "expert_parallel_store must be host:port with a port from 1 to 65535, got ''"),
        ({"expert_parallel_size": 2, "expert_parallel_store": "here"}, "expert_parallel_store must be host:port"),
    ],
)
def test_workers_that_cannot_share_experts_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertParallelConfig(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be at least 0, got -1"),
        ({"proposer": "oracle"}, "proposer must be one of ngram, mtp, draft_model, eagle, got 'oracle'"),
        ({"proposer": "draft_model"}, "draft_model must say what proposer draft_model is to load"),
        ({"draft_model": "m"}, "draft_model is given, but proposer ngram takes none: set proposer to draft_model or eagle"),
        ({"verification": "hope"}, "verification must be one of coupled, rejection, got 'hope'"),
        ({"ngram_min": 0}, "ngram_min must be at least 1, got 0"),
        ({"ngram_max": 5}, "ngram_max is given, but num_speculative_tokens is 0"),
        ({"ngram_min": 3, "ngram_max": 2}, r"ngram_max \(2\) must be at least ngram_min \(3\)"),
    ],
)
def test_speculation_that_cannot_work_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculationConfig(**given)


def test_the_same_bits_whatever_happens_and_tokens_that_depend_on_drafts_exclude_each_other() -> None:
    rejecting = SpeculationConfig(num_speculative_tokens=1, verification="rejection")
    for refused in (
        lambda: replace(CONFIG, speculation=rejecting, batch_invariant=True),
        lambda: UpConfig(speculation=rejecting, batch_invariant=True),
    ):
        with pytest.raises(ConfigError, match="batch_invariant and verification rejection exclude each other"):
            refused()
    assert replace(CONFIG, speculation=replace(rejecting, verification="coupled"), batch_invariant=True).batch_invariant


def test_a_worker_says_how_many_drafts_it_makes() -> None:
    assert load_engine(CONFIG).description.limits.num_speculative_tokens == 0, "off unless asked for"
    config = replace(CONFIG, speculation=SpeculationConfig(num_speculative_tokens=3))
    assert load_engine(config).description.limits.num_speculative_tokens == 3


def test_an_engine_describes_what_was_configured() -> None:
    config = replace(CONFIG, max_model_len=100, block_size=32, max_num_seqs=7, max_num_batched_tokens=70)
    first, second = load_engine(config).description, load_engine(config).description
    assert (first.model.name, first.model.max_model_len) == ("deterministic", 100)
    assert (first.geometry.block_size, first.geometry.num_blocks, first.geometry.bytes_per_token) == (
        32,
        (1 << 16) // 32 // 8,
        8,
    )
    assert (first.limits.max_num_seqs, first.limits.max_num_batched_tokens, first.limits.max_batches_in_flight) == (7, 70, 3)
    assert len(first.boot_id) == 16 and first.boot_id != second.boot_id, "every start is another boot"


def test_the_pool_follows_from_what_the_architecture_keeps(tmp_path: Path) -> None:
    """Latent attention: one vector of 24 + 8 floats for all heads, in each of 3 layers."""
    save_random(tiny_configs()["DeepseekV3ForCausalLM"][0], tmp_path / "tiny")
    config = replace(CONFIG, model=str(tmp_path / "tiny"), kv_cache_bytes=100_000, swap_bytes=50_000, block_size=16)
    geometry = load_engine(config).description.geometry
    assert (geometry.bytes_per_token, geometry.kv_format) == (3 * 32 * 4, "torch/f32/latent")
    assert (geometry.num_blocks, geometry.num_host_blocks) == (100_000 // (16 * 384), 50_000 // (16 * 384))


def test_a_model_whose_heads_cannot_be_spread_is_refused_with_the_numbers() -> None:
    @dataclass
    class FirstOfTwo(Alone):
        size: int = 2

    config = replace(CONFIG, model="SmolLM2-135M-Instruct", tensor_parallel_size=2)
    with pytest.raises(
        HeadsDoNotDivide, match="tensor_parallel_size is 2, which does not divide the model's 9 attention heads: use 1, 3 or 9"
    ):
        load_part(config, FirstOfTwo())


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_pool_has_room_for_what_the_model_s_own_layers_keep_for_drafts(tmp_path: Path, batch_invariant: bool) -> None:
    config = tiny_configs()["Glm4MoeForCausalLM"][0]
    save_layers([MtpReference(save_random(config, tmp_path))], tmp_path)
    speculation = SpeculationConfig(num_speculative_tokens=2, proposer="mtp")
    engine = load_engine(replace(CONFIG, model=str(tmp_path), speculation=speculation, batch_invariant=batch_invariant))
    size, flavour = (4, "torch/f32") if batch_invariant else (2, OF_16_BITS)  # with experts not every sum is by kernels cpu
    assert engine.description.geometry.bytes_per_token == (3 + 1) * 2 * 2 * 16 * size
    assert engine.description.geometry.kv_format == f"{flavour}+drafts:{flavour}/1x2x16"
    assert not engine._kv.paired.block(engine._kv.null_block).any(), "trying out leaves no trace"


def test_every_rank_has_its_part_of_the_layers_that_draft(tmp_path: Path, run_async: Callable[..., Any]) -> None:
    """Trying out the kernels runs a pass of the model and of these layers, on both ranks."""
    config = tiny_configs()["Glm4MoeForCausalLM"][0]
    save_layers([MtpReference(save_random(config, tmp_path))], tmp_path)
    speculation = SpeculationConfig(num_speculative_tokens=2, proposer="mtp")
    worker = replace(CONFIG, model=str(tmp_path), speculation=speculation, batch_invariant=True, tensor_parallel_size=2)

    async def scenario() -> None:
        ranks = RankProcesses(worker)
        await ranks.start()
        try:
            engine = await asyncio.to_thread(load_engine, worker, ranks)
            assert engine.description.geometry.bytes_per_token == (3 + 1) * 2 * 2 * 16 * 4
            assert engine._kv.paired.num_kv_heads == 1
        finally:
            await ranks.stop()

    run_async(scenario())


@pytest.mark.parametrize("model", ["deterministic", "SmolLM2-135M-Instruct"])
def test_a_model_without_layers_for_it_cannot_draft_with_them(model: str) -> None:
    config = replace(CONFIG, model=model, kv_cache_bytes=1 << 20, speculation=SpeculationConfig(1, "mtp"))
    with pytest.raises(ModelUnsupported, match=f"{model} .*: use"):
        load_engine(config)


def llama(directory: Path, vocab_size: int = 199, max_len: int = 256, tokenizer: str = "{}") -> str:
    """A small Llama's directory."""
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    save_random(LlamaConfig(**shape, max_position_embeddings=max_len), directory)
    (directory / "tokenizer.json").write_text(tokenizer)
    return str(directory)


def test_the_pool_has_room_for_a_draft_model_s_kv(tmp_path: Path) -> None:
    speculation = SpeculationConfig(2, "draft_model", draft_model=llama(tmp_path / "draft"))
    model = llama(tmp_path / "model")
    for batch_invariant in (False, True):
        engine = load_engine(replace(CONFIG, model=model, speculation=speculation, batch_invariant=batch_invariant))
        assert engine.description.geometry.bytes_per_token == 2 * (2 * 32 * 2)
        assert engine.description.geometry.num_blocks == (1 << 16) // (16 * 256)


def test_the_pool_has_room_for_an_eagle_head_s_kv(tmp_path: Path) -> None:
    model = save_random(tiny_configs()["LlamaForCausalLM"][0], tmp_path / "model")
    EagleReference(model, taps=(0, 1, 2)).save(tmp_path / "head")
    speculation = SpeculationConfig(2, "eagle", draft_model=str(tmp_path / "head"))
    for batch_invariant in (False, True):
        config = replace(CONFIG, model=str(tmp_path / "model"), speculation=speculation, batch_invariant=batch_invariant)
        geometry = load_engine(config).description.geometry
        assert geometry.bytes_per_token == 3 * 2 * 2 * 24 * 2 + 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"vocab_size": 200}, r"draft cannot draft for model: it has 200 token ids of tokenizer (\w+), the model 199 of \1"),
        (
            {"tokenizer": '{"a": 1}'},
            r"draft cannot draft for model: it has 199 token ids of tokenizer (\w+), the model 199 of (?!\1)",
        ),
        ({"max_len": 255}, "draft was trained for 255 tokens and cannot draft for model with its 256"),
    ],
)
def test_a_model_that_cannot_draft_for_another_is_refused_and_both_are_named(
    tmp_path: Path, own: dict[str, Any], message: str
) -> None:
    speculation = SpeculationConfig(2, "draft_model", draft_model=llama(tmp_path / "draft", **own))
    config = replace(CONFIG, model=llama(tmp_path / "model"), speculation=speculation)
    with pytest.raises(DraftMismatch, match=message):
        load_engine(config)
    if "max_len" in own:
        assert load_engine(replace(config, max_model_len=200)).description.model.max_model_len == 200


def test_a_draft_model_that_cannot_keep_its_kv_beside_the_model_s_is_refused(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    save_random(tiny_configs()["DeepseekV3ForCausalLM"][0], draft)
    shape = json.loads((draft / "config.json").read_text())
    (draft / "tokenizer.json").write_text("{}")
    model = llama(tmp_path / "model", shape["vocab_size"], shape["max_position_embeddings"])
    speculation = SpeculationConfig(2, "draft_model", draft_model=str(draft))
    with pytest.raises(
        ConfigError, match=r"draft cannot draft for model with kernels cpu.*: use kernels torch, or another draft_model"
    ):
        load_engine(replace(CONFIG, model=model, speculation=speculation))
    kept = load_engine(replace(WITH_TORCH, model=model, speculation=speculation)).description.geometry.kv_format
    assert kept.startswith("torch/f32+drafts:torch/f32/latent")


def batch_invariant(architecture: str, folder: Path, **compute: str) -> str:
    """The KV format of a batch-invariant worker."""
    save_random(tiny_configs()[architecture][0], folder)
    config = replace(CONFIG, model=str(folder), batch_invariant=True, compute=DeviceConfig(**compute))
    return load_engine(config).description.geometry.kv_format


@pytest.mark.parametrize(
    ("architecture", "compute", "kept"),
    [
        ("LlamaForCausalLM", {}, OF_16_BITS),
        ("LlamaForCausalLM", {"dtype": "float16"}, "cpu/f16"),
        ("Qwen3ForCausalLM", {"dtype": "float32"}, "cpu/f32"),
        ("LlamaForCausalLM", {"kernels": "torch"}, "torch/f32"),
        ("MixtralForCausalLM", {}, "torch/f32"),
        ("DeepseekV3ForCausalLM", {"dtype": "float32"}, "torch/f32/latent"),
    ],
)
def test_a_batch_invariant_worker_has_torch_compute_what_is_not_all_ours(
    tmp_path: Path, architecture: str, compute: dict[str, str], kept: str
) -> None:
    assert batch_invariant(architecture, tmp_path, **compute) == kept


@pytest.mark.parametrize(
    ("architecture", "kernels", "threads"),
    [("LlamaForCausalLM", "cpu", 1), ("LlamaForCausalLM", "torch", 2), ("MixtralForCausalLM", "cpu", 2)],
)
def test_torch_keeps_threads_where_it_computes_much(tmp_path: Path, architecture: str, kernels: str, threads: int) -> None:
    save_random(tiny_configs()[architecture][0], tmp_path)
    load_engine(replace(CONFIG, model=str(tmp_path), threads=2, compute=DeviceConfig(kernels=kernels)))
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("compute", [{"kernels": "cpu"}, {"dtype": "float16"}, {"quantization": "int8"}])
def test_a_batch_invariant_worker_does_not_pass_over_what_it_cannot_do(tmp_path: Path, compute: dict[str, str]) -> None:
    ((option, given),) = compute.items()
    with pytest.raises(ConfigError, match=f"batch_invariant is for this model .*; {option} is {given}: leave {option} out"):
        batch_invariant("MixtralForCausalLM", tmp_path, **compute)


def test_a_worker_without_kernels_for_its_processor_says_why_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare = Hardware(0, is_rocm=False, lacks_cpu_kernels=lambda: "there is no compiler: get one")
    monkeypatch.setattr(Hardware, "found", lambda: bare)
    with structlog.testing.capture_logs() as logs:
        engine = load_engine(replace(CONFIG, model=llama(tmp_path)))
    assert [line["reason"] for line in logs if line["log_level"] == "warning"] == ["there is no compiler: get one"]
    assert engine.description.geometry.kv_format == "torch/f32"


def test_a_likeness_has_the_tokenizer_of_the_model_it_stands_for() -> None:
    info = load_engine(replace(CONFIG, model="deterministic:SmolLM2-135M-Instruct")).description.model
    assert (info.name, info.architecture, info.vocab_size) == ("SmolLM2-135M-Instruct", "Deterministic", 49152)
    assert len(info.tokenizer_digest) == 64 and info.weights_digest == "deterministic"


@pytest.mark.parametrize("model", ["no-such-model", "deterministic:no-such-model"])
def test_an_unknown_model_is_named(model: str) -> None:
    with pytest.raises(ModelNotFound, match="no-such-model"):
        load_engine(replace(CONFIG, model=model))


def test_a_length_beyond_the_model_s_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 9000, but deterministic was trained for 8192"):
        load_engine(replace(CONFIG, max_model_len=9000))


def test_a_pool_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(KVPoolTooSmall, match="kv_cache_bytes is 127, but one block of 16 tokens needs 128 bytes"):
        load_engine(replace(CONFIG, kv_cache_bytes=127))


def test_a_host_pool_has_the_whole_blocks_that_fit_and_is_refused_where_none_does() -> None:
    sizes = {swap_bytes: load_engine(replace(CONFIG, swap_bytes=swap_bytes)) for swap_bytes in (0, 128, 1000)}
    assert [engine.description.geometry.num_host_blocks for engine in sizes.values()] == [0, 1, 7]
    with pytest.raises(KVPoolTooSmall, match="swap_bytes is 127, but one block of 16 tokens needs 128 bytes"):
        load_engine(replace(CONFIG, swap_bytes=127))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A Llama of one small layer, as transformers saves it."""
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **shape}))
    (tmp_path / "tokenizer.json").write_text("{}")
    model = build_model(HuggingFaceConfig(tmp_path).model_config(), TorchKernels())
    save_file({name: torch.ones(slot.shape) for name, slot in model.slots().items()}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_batch_invariant_worker_tries_its_tiles_out_before_it_serves(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[int, ...]] = []
    find = invariant_backend.find_row_tiles
    monkeypatch.setattr(invariant_backend, "find_row_tiles", lambda weight: tried.append(tuple(weight.shape)) or find(weight))
    load_engine(replace(WITH_TORCH, model=str(directory)))
    load_engine(replace(CONFIG, model=str(directory), batch_invariant=True))
    assert not tried, "kernels cpu need not"
    engine = load_engine(replace(WITH_TORCH, model=str(directory), batch_invariant=True))
    assert sorted(tried) == [(16, 16), (16, 24), (40, 16), (48, 16)], (
        "o_proj, down_proj, the head, and qkv_proj with gate_up_proj"
    )
    assert not engine._kv.block(engine._kv.null_block).any(), "trying out leaves no trace"


def test_a_machine_that_cannot_be_batch_invariant_says_so_at_the_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(weight: torch.Tensor) -> None:
        raise NotInvariant("nothing fits")

    monkeypatch.setattr(invariant_backend, "find_row_tiles", refuse)
    with pytest.raises(ConfigError, match="batch_invariant: nothing fits"):
        load_engine(replace(WITH_TORCH, model=str(directory), batch_invariant=True))
