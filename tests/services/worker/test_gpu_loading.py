"""A worker on a GPU, from its options to its tokens: shown on a device without hardware, whose memory is scripted."""

import json
import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor

from model_worker.engine import Engine
from model_worker.gpu_memory import MIB, NoMemoryForKV
from model_worker.graphs.graphed_model import GraphedModel
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.orders import send
from services.worker import loading, model_part, rank_process
from services.worker.config import SpeculationConfig, WorkerConfig
from services.worker.device_choice import DeviceChoice
from services.worker.device_config import DeviceConfig
from services.worker.loading import load_engine
from services.worker.rank_processes import RankSetup
from tessera.values.config import Config, ConfigError
from tests.model_worker.far_device import FAR, FarRecorder, far, far_mode
from tests.model_worker.run_again import RunAgain
from tests.parity.eagle_reference import EagleReference
from tests.parity.in_process import InProcess
from tests.parity.mtp_reference import MtpReference, save_layers
from tests.parity.tiny_models import save_random, tiny_configs

__all__ = ["far"]

PROMPTS = [[(5 * place + 3) % 199 for place in range(length)] for length in (9, 24, 2)]
LIMITS = {"max_num_seqs": 3, "max_num_batched_tokens": 20, "max_model_len": 96, "threads": 1}
BUDGET = 3 * MIB


@dataclass(frozen=True, slots=True)
class FarChoice(DeviceChoice):
    """Chosen by `use_gpu`."""

    def device_of(self, rank: int) -> torch.device:
        return FAR


@dataclass
class ScriptedMemory:
    """Leaves BUDGET of nine tenths: of 100 MiB others have 1, weights take 50, activations 20, collectives 2; what is recorded takes 14."""

    device: torch.device
    total: int = 100 * MIB
    frees: list[int] = field(default_factory=lambda: [99, 27, 27, 13])
    helds: list[int] = field(default_factory=lambda: [50, 70])
    num_settled: int = 0

    def free(self) -> int:
        return self.frees.pop(0) * MIB

    def held(self) -> int:
        return self.helds.pop(0) * MIB

    def peak_held(self) -> int:
        return 70 * MIB

    def settle(self) -> None:
        self.num_settled += 1


@pytest.fixture
def use_gpu(far: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "device_choice", lambda config: FarChoice("cuda", "torch"))
    monkeypatch.setattr(model_part, "TorchDeviceMemory", ScriptedMemory)
    monkeypatch.setattr(model_part, "DeviceRecorder", lambda device: FarRecorder())


def made(architecture: str, folder: Path) -> str:
    save_random(tiny_configs()[architecture][0], folder)
    return str(folder)


def outputs(engine: Engine, drafts: int = 0) -> list[list[int]]:
    limits = engine.description.limits
    config = Config(
        max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens, num_speculative_tokens=drafts
    )
    return InProcess.of_engine(engine, config).generate(PROMPTS, [8, 3, 5])


@pytest.mark.usefixtures("use_gpu")
def test_a_worker_on_a_gpu_takes_what_is_left_and_records_its_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorkerConfig(model=made("LlamaForCausalLM", tmp_path), swap_bytes=1 << 17, **LIMITS)
    rehearsed: list[int] = []
    monkeypatch.setattr(model_part, "rehearse", lambda logits: rehearsed.append(len(logits)))
    with structlog.testing.capture_logs() as logs:
        engine = load_engine(config)
    token_bytes = 3 * 2 * 2 * 24 * 4
    assert engine.description.geometry.num_blocks == (BUDGET - 16 * token_bytes) // (16 * token_bytes), "one is the null block"
    assert engine.description.geometry.bytes_per_token == token_bytes
    assert isinstance(engine._model, GraphedModel) and engine._kv.store.device == FAR
    said = [line["of"] for line in logs if line["event"] == "memory for KV"]
    assert said == [
        "rank 0: 0.9 of 100 MiB, less other processes 1 MiB, weights 50 MiB, activations 20 MiB, communication 2 MiB, graphs 14 MiB, is 3 MiB",
        "every rank gives its KV pool 3 MiB, the least of 1: that of rank 0",
    ]
    assert [line["rows"] for line in logs if line["event"] == "decodes are recorded"] == [(1, 2, 4)] * 2
    assert rehearsed and max(rehearsed) == LIMITS["max_num_seqs"], "tokens are drawn there too"
    assert not engine._kv.block(engine._kv.null_block).any()
    assert outputs(engine) == outputs(on_cpu(config))
    content = engine.read_blocks([0])[0]
    assert isinstance(content.kv, np.ndarray) and content.kv.dtype == np.float32


@pytest.mark.usefixtures("use_gpu")
def test_a_pool_of_a_given_size_is_not_measured_and_eager_is_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorkerConfig(model=made("Qwen3MoeForCausalLM", tmp_path), kv_cache_bytes=1 << 20, **LIMITS)
    eager = replace(config, compute=DeviceConfig(enforce_eager=True))
    sized = replace(config, compute=DeviceConfig(graph_sizes=(2,)))
    expected = outputs(on_cpu(config))
    engines = [load_engine(each) for each in (eager, sized)]
    assert [isinstance(engine._model, GraphedModel) for engine in engines] == [False, True]
    assert [outputs(engine) for engine in engines] == [expected, expected]
    assert engines[0].description.geometry.num_blocks == (1 << 20) // (16 * 3 * 2 * 2 * 16 * 4)


@pytest.mark.parametrize("proposer", ["mtp", "eagle", "draft_model", "ngram"])
@pytest.mark.usefixtures("use_gpu")
def test_whoever_drafts_drafts_there_too(tmp_path: Path, proposer: str) -> None:
    architecture = "Glm4MoeForCausalLM" if proposer == "mtp" else "LlamaForCausalLM"
    shape, folder = tiny_configs()[architecture][0], tmp_path / "model"
    model = save_random(shape, folder)
    if proposer == "mtp":
        save_layers([MtpReference(model)], folder)
    if proposer == "eagle":
        EagleReference(model, (0, 1, 2), torch.arange(0, 199, 2)).save(tmp_path / "head")
    drafts_from = {"eagle": str(tmp_path / "head"), "draft_model": str(folder)}.get(proposer)
    config = WorkerConfig(
        model=str(folder), kv_cache_bytes=1 << 20, speculation=SpeculationConfig(2, proposer, drafts_from), **LIMITS
    )
    expected = on_cpu(config)
    assert outputs(load_engine(config), drafts=2) == outputs(expected, drafts=2)


@pytest.mark.usefixtures("use_gpu")
def test_a_gpu_without_room_says_what_takes_it(tmp_path: Path) -> None:
    config = WorkerConfig(model=made("LlamaForCausalLM", tmp_path), compute=DeviceConfig(gpu_memory_utilization=0.87), **LIMITS)
    with pytest.raises(
        NoMemoryForKV, match=r"no memory is left for KV: rank 0: 0\.87 of 100 MiB.*raise gpu_memory_utilization"
    ):
        load_engine(config)
    with pytest.raises(ConfigError, match=r"graph_sizes must be from 1 to max_num_seqs \(3\), got 4"):
        load_engine(replace(config, kv_cache_bytes=1 << 20, compute=DeviceConfig(graph_sizes=(4,))))


@pytest.mark.parametrize(("said", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16), (None, torch.float32)])
@pytest.mark.usefixtures("use_gpu")
def test_weights_and_kv_have_the_files_dtype(tmp_path: Path, said: str | None, dtype: torch.dtype) -> None:
    folder = Path(made("LlamaForCausalLM", tmp_path))
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    values.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(values | ({"torch_dtype": said} if said else {})))
    engine = load_engine(WorkerConfig(model=str(folder), kv_cache_bytes=1 << 20, **LIMITS))
    assert engine._kv.dtype == dtype and {slot.view.dtype for slot in engine._model.slots().values()} == {dtype}
    assert all(slot.view.device == FAR for slot in engine._model.slots().values())
    assert len(outputs(engine)[0]) == 8


def on_cpu(config: WorkerConfig) -> Engine:
    """The worker that these options make there, with a pool of a size of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "device_choice", lambda config: DeviceChoice("cpu", "torch"))
        return load_engine(replace(config, kv_cache_bytes=1 << 20, compute=DeviceConfig()))


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class FarGroup(GlooGroup):
    """Ranks on far devices meet on the host."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return super().all_reduce(x.cpu()).to(FAR)

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x.cpu()).to(FAR)

    def gather(self, x: Tensor) -> Tensor | None:
        gathered = super().gather(x.cpu())
        return None if gathered is None else gathered.to(FAR)


@pytest.mark.usefixtures("use_gpu")
def test_ranks_measure_record_and_compute_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, each with a GPU of its own, of which the second is a thread here; its GPU is the smaller one, and decides."""
    shape = tiny_configs()["Glm4MoeForCausalLM"][0]
    save_layers([MtpReference(save_random(shape, tmp_path / "model"))], tmp_path / "model")
    speculation = SpeculationConfig(2, "mtp")
    config = WorkerConfig(model=str(tmp_path / "model"), tensor_parallel_size=2, speculation=speculation, **LIMITS)
    for module in (loading, rank_process):
        monkeypatch.setattr(module, "device_choice", lambda config: FarChoice("cuda", "torch"))
        monkeypatch.setattr(module, "rank_group", lambda choice: FarGroup)

    def memory(device: torch.device) -> ScriptedMemory:
        taken = threading.current_thread() is thread  # by collectives, one more
        return ScriptedMemory(device, frees=[99, 27 - taken, 27 - taken, 13 - taken])

    monkeypatch.setattr(model_part, "TorchDeviceMemory", memory)
    recorders: list[RunAgain] = []
    monkeypatch.setattr(model_part, "DeviceRecorder", lambda device: recorders.append(RunAgain()) or recorders[-1])
    monkeypatch.setattr(rank_process, "configure_logs", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    store = tmp_path / "store"
    near, line = multiprocessing.Pipe()

    def second_rank() -> None:
        with far_mode():
            rank_process.main(line)

    thread = threading.Thread(target=second_rank)
    with structlog.testing.capture_logs() as logs:
        send(near, RankSetup(config, 1, store))
        thread.start()
        try:
            engine = load_engine(config, SimpleNamespace(lines=[near], store=store, lose=None))  # type: ignore[arg-type]
            found = outputs(engine, drafts=2)
        finally:
            near.close()
            thread.join()
    said = [line["of"] for line in logs if line["event"] == "memory for KV"]
    assert len(said) == 3 and said[-1] == "every rank gives its KV pool 2 MiB, the least of 2: that of rank 1"
    assert [recorder.num_recorded for recorder in recorders] == [3] * 4, "measured, and for good"
    assert sum(recorder.num_replays for recorder in recorders) > 0
    token_bytes = (3 + 1) * 2 * 1 * 16 * 4
    assert engine.description.geometry.num_blocks == (2 * MIB - 16 * token_bytes) // (16 * token_bytes)
    alone = replace(config, tensor_parallel_size=1)
    assert found == outputs(on_cpu(alone), drafts=2)
