"""The whole system on this machine: which processes, with which options, on which addresses."""

import re
import socket
import sys
from pathlib import Path

from services.cli.child import Child, ChildSpec
from services.cli.data_folder import DataFolder
from services.cli.http_part import http_part, smg_command
from services.cli.redis_part import RedisPart
from services.cli.supervisor import Part
from services.cli.up_config import UpConfig, host_and_port
from services.free_ports import free_ports
from services.scheduler.store.embedded_redis import EmbeddedRedis
from services.worker.config import SpeculationConfig
from tessera.values.known_models import served_name

DRAIN_GRACE_S = 2.0
"""How long the gateway's calls may go on after Ctrl-C: whoever presses it wants to leave."""

STOP_GRACE_S = 10.0
"""How long each part has to end before it is killed; above DRAIN_GRACE_S."""

LEASE_MS = 1000
"""There is no other scheduler: the lease only holds up this one's restart after a crash."""


class PortTaken(Exception):
    """The public address cannot be listened on; the message names it and what to do."""


def check_listen(config: UpConfig) -> None:
    """Raise PortTaken where `config.listen` or `config.http` could not be listened on."""
    _check_free(config.listen, "--listen")
    if config.http:
        _check_free(config.http, "--http")


def _check_free(address: str, option: str) -> None:
    host, port = host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            raise PortTaken(
                f"cannot listen on {address} ({error.strerror}); "
                f"stop what listens there, or choose another with {option} HOST:PORT"
            ) from error


def local_parts(config: UpConfig, folder: DataFolder) -> list[Part]:
    """The parts in the order in which they end. Redis is one of them unless `config` names a running one."""
    worker, scheduler = _free_addresses(2)
    redis = None if config.redis_url else EmbeddedRedis(folder.redis)
    redis_url = config.redis_url or (redis.url if redis else "")
    group = re.sub(r"[{}: ]", "-", served_name(config.model))  # another model in the same folder is another group
    model_options = ["--batch-invariant"] if config.batch_invariant else []
    if config.tensor_parallel_size > 1:
        model_options += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    drain, lease = ["--drain-grace-s", str(DRAIN_GRACE_S)], ["--lease-ms", str(LEASE_MS)]
    drafts, proposer = _speculation(config.speculation)
    front, engine_options = _http_front(config, folder)
    traces, sampling = _tracing(config)
    public = ["--listen", config.listen, *config.public.gateway_options(), *drain]
    parts: list[Part] = [
        *front,
        _role(
            "gateway", folder, ["--scheduler", scheduler, "--model", config.model, *engine_options, *public, *traces, *sampling]
        ),
        _role(
            "scheduler",
            folder,
            ["--worker", worker, "--redis", redis_url, "--group", group, "--listen", scheduler, *lease, *drafts, *traces],
        ),
        _role("worker", folder, ["--model", config.model, "--listen", worker, *model_options, *drafts, *proposer, *traces]),
    ]
    return [*parts, RedisPart(redis)] if redis else parts


def _http_front(config: UpConfig, folder: DataFolder) -> tuple[list[Part], list[str]]:
    """The HTTP front and the gateway's options for it; nothing where it is off."""
    if not config.http:
        return [], []
    engine, metrics = _free_addresses(2)
    listen, url = host_and_port(config.http), local_url(config.http)
    command = smg_command(listen, engine, host_and_port(metrics)[1], DRAIN_GRACE_S)
    log = _fresh_log(folder.log("http"))
    return [http_part(command, log, url, served_name(config.model))], ["--engine-listen", engine]


def local_url(address: str) -> str:
    """How `address` is reached from this machine: what listens everywhere, by loopback."""
    host, port = host_and_port(address)
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{near}]:{port}" if ":" in near else f"http://{near}:{port}"


def _tracing(config: UpConfig) -> tuple[list[str], list[str]]:
    """Options of all roles, and of the gateway alone; none where it is off, so that the environment can turn it on."""
    if not config.otlp_endpoint:
        return [], []
    return ["--otlp-endpoint", config.otlp_endpoint], ["--trace-sample-ratio", str(config.trace_sample_ratio)]


def _speculation(config: SpeculationConfig) -> tuple[list[str], list[str]]:
    """Options of scheduler and worker, and of the worker alone; none where it is off, so that the environment can turn it on."""
    if not config.num_speculative_tokens:
        return [], []
    drafts = ["--num-speculative-tokens", str(config.num_speculative_tokens)]
    ngram = ["--ngram-min", str(config.ngram_min), "--ngram-max", str(config.ngram_max)]
    model = ["--draft-model", config.draft_model] if config.draft_model else []
    return drafts, ["--proposer", config.proposer, *model, *ngram, "--verification", config.verification]


def _role(role: str, folder: DataFolder, options: list[str]) -> Child:
    ready_file = folder.ready_file(role)
    command = (sys.executable, "-m", "services.cli.main", role, *options, "--ready-file", str(ready_file))
    return Child(ChildSpec(role, command, _fresh_log(folder.log(role)), ready_file))


def _fresh_log(path: Path) -> Path:
    """Keep the previous run's log beside the new one, and no older."""
    if path.exists():
        path.replace(path.with_name(f"{path.name}.1"))
    return path


def _free_addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]
