"""The images' own install commands and entry points, in clean environments: what comes of them serves together, each role as its image has it:
process 1, user 10001, on a filesystem that nobody can write to."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from model_worker.kernels.cpu.build import LEVELS
from services.scheduler.store.embedded_redis import EmbeddedRedis
from tessera.client import Client
from tests.deploy.image_build import ROOT, Image, ImageBuild
from tests.system.role_process import free_ports
from tests.system.stream_reader import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and mounts of one's own need root"),
    pytest.mark.skipif(
        sys.base_prefix == "/usr",
        reason="the system's own Python cannot stand for that of a base image, which has a prefix to itself",
    ),
]

MODEL = "SmolLM2-135M-Instruct"
SERVICES = {
    "gateway": "tessera.v1.InferenceService",
    "scheduler": "tessera.scheduler.v1.SchedulerService",
    "worker": "tessera.worker.v1.WorkerService",
}


@dataclass
class Container:
    """A role that runs."""

    image: Image
    scratch: Path
    address: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def first(self) -> psutil.Process:
        """Process 1 of its namespace."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def health(self) -> int:
        """Exit status of the image's health check."""
        command = self.image.health(self.scratch / "health", TESSERA_HEALTH_ADDRESS=self.address)
        return subprocess.run(command, capture_output=True, timeout=60).returncode

    def serves(self, service: str) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=1)
            except grpc.RpcError:
                assert self.process.poll() is None, self.log.read_text()
                return False
            return answer.status == health_pb2.HealthCheckResponse.SERVING

    def terminate(self) -> int:
        """What an engine does: SIGTERM to process 1, then its exit status."""
        self.first.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """In memory: layers may not lie on the filesystem that they lie over."""
    folder = Path(tempfile.mkdtemp(prefix="tessera-images-", dir="/dev/shm"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def images(scratch: Path) -> dict[str, Image]:
    """By role."""
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    try:
        built: dict[str, Image] = {}
        for kind in ("slim", "worker-cpu"):
            built |= ImageBuild(ROOT / "deploy" / "images" / f"{kind}.Dockerfile", scratch / kind, {"TORCH": torch}).build()
    except subprocess.CalledProcessError as failed:
        pytest.fail(f"{failed.cmd[-1]}\n{failed.stdout[-4000:]}")
    return {"gateway": built["slim"], "scheduler": built["slim"], "worker": built["worker"]}


@pytest.fixture(scope="module")
def containers(images: dict[str, Image], scratch: Path) -> Iterator[dict[str, Container]]:
    """All three, serving, with a Redis outside."""
    redis = EmbeddedRedis(scratch / "redis", port=0)
    redis.start()
    address = {role: f"127.0.0.1:{port}" for role, port in zip(SERVICES, free_ports(3), strict=True)}
    options = {
        "worker": ["--model", MODEL, "--kv-cache-bytes", str(96 << 20)],
        "scheduler": ["--worker", address["worker"], "--redis", redis.url],
        "gateway": ["--model", MODEL, "--scheduler", address["scheduler"]],
    }
    running: dict[str, Container] = {}
    try:
        for role, image in images.items():
            listen = {f"TESSERA_{role.upper()}_LISTEN": address[role], "CXX": "no-compiler"}
            command = image.container(scratch / "run", role, *options[role], **listen)
            log = scratch / f"{role}.log"
            with log.open("wb") as file:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            running[role] = Container(image, scratch, address[role], log, process)
        for role, service in SERVICES.items():
            wait_until(lambda one=running[role], name=service: one.serves(name), f"{role} serves", 90)
        yield running
    finally:
        for container in running.values():
            container.process.kill()
            container.process.wait()
        redis.stop()


def test_slim_images_have_no_torch_and_the_worker_s_has_kernels_for_every_level(
    images: dict[str, Image], scratch: Path
) -> None:
    for role in ("gateway", "scheduler"):
        words = ("python", "-c", "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('pip') is not None)")
        assert (
            subprocess.run(images[role].program(scratch / "try", *words), capture_output=True, text=True).stdout
            == "None True\n"
        )
    find = "from model_worker.kernels.cpu import build as b; print(*sorted(p.stem.partition('-')[0] for p in (b._FOLDER / 'built').iterdir()))"
    command = images["worker"].program(scratch / "try", "python", "-c", find)
    assert subprocess.run(command, capture_output=True, text=True).stdout.split() == sorted(level.name for level in LEVELS)


def test_they_answer_together_unprivileged_and_without_writing(containers: dict[str, Container]) -> None:
    with Client(containers["gateway"].address) as client:
        assert (
            client.generate("One two three four", temperature=0.0, max_tokens=8, ignore_eos=True).finish.usage.completion_tokens
            == 8
        )
    assert "kernels for this processor are missing" not in containers["worker"].log.read_text()
    memory = containers["worker"].first.memory_info()
    own = memory.rss - memory.shared  # pages of files go where others need the room
    assert own < 2 * 135_000_000 + (96 << 20) + (1 << 29)  # as docs/operations.md has it
    for role, container in containers.items():
        assert container.first.uids().real == 10001 and container.health() == 0, role
    touch = containers["worker"].image.program(containers["worker"].scratch / "try", "touch", "/tmp/x")
    assert "Read-only file system" in subprocess.run(touch, capture_output=True, text=True).stderr


def test_a_worker_of_several_processes_needs_no_more(images: dict[str, Image], scratch: Path) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    options = ["--model", MODEL, "--kv-cache-bytes", str(32 << 20), "--tensor-parallel-size", "3"]
    command = images["worker"].container(scratch / "run", "worker", *options, TESSERA_WORKER_LISTEN=address)
    log = scratch / "ranks.log"
    with log.open("wb") as file, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file) as process:
        container = Container(images["worker"], scratch, address, log, process)
        try:
            wait_until(lambda: container.serves(SERVICES["worker"]), "the worker serves", 120)
            assert container.terminate() == 0
        finally:
            process.kill()


def test_a_gateway_that_is_told_to_end_finishes_its_answer_first(containers: dict[str, Container]) -> None:
    gateway = containers["gateway"]
    with Client(gateway.address) as client:
        pieces = client.stream("Once upon a time", temperature=0.0, max_tokens=64, ignore_eos=True)
        received = [next(pieces)]
        gateway.first.send_signal(signal.SIGTERM)
        received += pieces
    finish = received[-1].finish
    assert finish is not None and finish.usage.completion_tokens == 64
    assert gateway.process.wait(60) == 0
    assert gateway.health() == 3
    assert containers["scheduler"].terminate() == 0
    assert containers["worker"].terminate() == 0
