"""vLLM's OpenAI server with a model that computes next to nothing, from a Python that has vLLM: what a gateway is compared with."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.tokenizer_source import load_tokenizer
from services import bound_process
from tessera.values.known_models import locate
from tests.system.process_stack import MODEL
from tests.system.role_process import free_ports

NAME = "tiny"
START_TIMEOUT_S = 180.0
TOKENS_METRIC = "vllm:generation_tokens_total"

# One layer of one head: the least that vLLM's CPU kernels take. The weights are made up when it starts.
_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """One that serves. `pid` is its HTTP process, which tokenizes, detokenizes and streams; the engine is in others."""

    address: str
    pid: int
    version: str

    def tokens(self) -> int:
        """Output tokens so far, by its own count."""
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(TOKENS_METRIC))


@contextmanager
def serving(python: str, folder: Path, streams_max: int) -> Iterator[OpenAIServer]:
    """A server for as long as the body runs, with the tokenizer of our own model. `folder` keeps its model and its log."""
    model = folder / "model"
    _write_model(model)
    (port,) = free_ports(1)
    arguments = [
        "--model",
        str(model),
        "--served-model-name",
        NAME,
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    arguments += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-num-seqs",
        str(streams_max),
        "--disable-uvicorn-access-log",
    ]
    command = [sys.executable, "-I", "-S", bound_process.__file__, str(os.getpid())]
    command += [python, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    log = folder / "vllm.log"
    with log.open("wb") as out:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | _ENVIRONMENT
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        _wait_serving(process, port, log)
        yield OpenAIServer(f"127.0.0.1:{port}", process.pid, _version(port))
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_serving(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, f"vLLM does not serve:\n{log.read_text()[-2000:]}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)


def _version(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=5) as response:
        return str(json.load(response)["version"])


def _write_model(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(locate(MODEL))
    (directory / "tokenizer.json").write_text(tokenizer.to_json())
    texts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(texts))
    (directory / "config.json").write_text(json.dumps(_SHAPE | {"vocab_size": tokenizer.vocab_size}))
