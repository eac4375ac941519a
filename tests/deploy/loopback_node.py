"""Runs a rendered chart's containers as processes of this machine: the arguments and the environment are those in the YAML, with addresses, ports
and folders put in place of what a cluster would give them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services import bound_process
from services.scheduler.store import embedded_redis
from tests.deploy.rendered import NAMESPACE, Manifest, pods
from tests.system.role_process import free_ports

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0

Secrets = Mapping[str, Mapping[str, bytes]]
"""Files by Secret and key."""


@dataclass
class Pod:
    """One pod of a component: its folders, its own port for each of the container's, and its process once it runs."""

    container: Manifest
    folders: dict[str, Path]  # by mount path
    ports: dict[int, int]  # by container port
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None)


class LoopbackNode:
    """One pod for each component of `found`. `claims` are the folders of PersistentVolumeClaims, by name."""

    def __init__(self, found: list[Manifest], folder: Path, secrets: Secrets, claims: Mapping[str, Path]) -> None:
        self._folder, self._secrets, self._claims = folder, secrets, claims
        self._services = {
            manifest["metadata"]["name"]: manifest["metadata"]["labels"]["app.kubernetes.io/component"]
            for manifest in found
            if manifest["kind"] == "Service"
        }
        self.pods = {component: self._pod(component, template["spec"]) for component, template in pods(found).items()}

    def start(self, component: str) -> None:
        """Start it, and return at once."""
        pod = self.pods[component]
        assert pod.process is None, f"{component} runs already"
        with pod.log.open("wb") as log:
            bound = [sys.executable, "-I", "-S", bound_process.__file__, str(os.getpid())]
            pod.process = subprocess.Popen(
                [*bound, *self._command(pod)],
                env=self._env(pod),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
            )

    def run(self, component: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        pod = self.pods[component]
        return subprocess.run(self._command(pod), env=self._env(pod), capture_output=True, text=True, timeout=READY_TIMEOUT_S)

    def wait(self, component: str, probe: str) -> None:
        """Wait until the pod's `probe` (startup, readiness, liveness) finds it serving."""
        pod, deadline = self.pods[component], time.monotonic() + READY_TIMEOUT_S
        asked = pod.container[f"{probe}Probe"]["grpc"]
        with grpc.insecure_channel(f"127.0.0.1:{pod.ports[asked['port']]}") as channel:
            while (said := _health(channel, asked.get("service", ""))) != "SERVING":
                assert pod.process is not None and pod.process.poll() is None, f"{component} ended:\n{self.tail(component)}"
                assert time.monotonic() < deadline, f"{component}: {probe} is {said}:\n{self.tail(component)}"
                time.sleep(0.05)

    def address(self, component: str, port: int) -> str:
        """Where a container's port is."""
        return f"127.0.0.1:{self.pods[component].ports[port]}"

    def stop(self, component: str) -> int:
        """SIGTERM, and the exit status; 0 for one that does not run."""
        process, self.pods[component].process = self.pods[component].process, None
        if process is None:
            return 0
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return -signal.SIGKILL

    def tail(self, component: str) -> str:
        """The end of its log, for people."""
        return "\n".join(self.pods[component].log.read_text(errors="replace").splitlines()[-20:])

    def _pod(self, component: str, spec: Manifest) -> Pod:
        (container,) = spec["containers"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        folders = {
            mount["mountPath"]: self._volume(component, mount["name"], volumes.get(mount["name"], {}))
            for mount in container["volumeMounts"]
        }
        ports = [port["containerPort"] for port in container.get("ports", ())]
        return Pod(container, folders, dict(zip(ports, free_ports(len(ports)), strict=True)), self._folder / f"{component}.log")

    def _volume(self, component: str, name: str, volume: dict[str, Any]) -> Path:
        if "persistentVolumeClaim" in volume:
            return self._claims[volume["persistentVolumeClaim"]["claimName"]]
        folder = self._folder / component / name
        folder.mkdir(parents=True)
        if "secret" in volume:
            for item in volume["secret"]["items"]:
                (folder / item["path"]).write_bytes(self._secrets[volume["secret"]["secretName"]][item["key"]])
        return folder

    def _command(self, pod: Pod) -> list[str]:
        command = pod.container["command"]
        program = [sys.executable, "-m", "services.cli.main"] if command == ["tessera"] else ["/bin/sh", *command[1:]]
        return [*program, *(self._here(pod, arg) for arg in pod.container["args"])]

    def _env(self, pod: Pod) -> dict[str, str]:
        own = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        path = f"{_redis_folder(self._folder)}:/usr/bin:/bin"
        return {**own, "PATH": path} | {v["name"]: self._here(pod, v["value"]) for v in pod.container.get("env", ())}

    def _here(self, pod: Pod, text: str) -> str:
        """`text` with this machine's places in it."""
        for service, component in self._services.items():
            pattern = rf"\b{re.escape(service)}\.{NAMESPACE}\.svc:(\d+)"
            text = re.sub(pattern, lambda found, to=component: self.address(to, int(found[1])), text)
        text = re.sub(r"0\.0\.0\.0:(\d+)", lambda found: f"127.0.0.1:{pod.ports[int(found[1])]}", text)
        mounts = "|".join(re.escape(mount) for mount in sorted(pod.folders, key=len, reverse=True))
        text = re.sub(rf"(?<![\w/])({mounts})(?![\w.-])", lambda found: str(pod.folders[found[1]]), text)
        if 6379 in pod.ports:
            text = text.replace("echo 'appendonly yes'", f"echo 'appendonly yes'; echo 'port {pod.ports[6379]}'")
        return text


def _health(channel: grpc.Channel, service: str) -> str:
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=2.0)
    except grpc.RpcError as error:
        return error.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def _redis_folder(folder: Path) -> Path:
    """A folder of the PATH that has a redis-server, as the image of the in-chart Redis does."""
    found = folder / "bin"
    if not found.exists():
        found.mkdir()
        (found / "redis-server").symlink_to(embedded_redis._server_binary())
    return found
