"""What the chart's objects say of each other, and of the processes in them, is so."""

import importlib
import re
from pathlib import Path, PurePosixPath
from typing import Any

import click
import pytest
import yaml

from services.cli.config_options import build_config
from services.cli.main import main as tessera
from services.gateway.config import GatewayConfig
from services.gateway.servicer import SERVICE_NAME as GATEWAY_SERVICE
from services.scheduler import metrics as scheduler_metrics
from services.scheduler.config import SchedulerConfig
from services.scheduler.terms import READY
from services.worker.config import WorkerConfig
from services.worker.servicer import SERVICE_NAME as WORKER_SERVICE
from tests.deploy.chart_schema import CHART
from tests.deploy.network import Network
from tests.deploy.rendered import (
    KUBERNETES,
    NAMESPACE,
    VALUE_SETS,
    Manifest,
    complaints,
    containers,
    manifests,
    named,
    pods,
    value_set,
)

every_set = pytest.mark.parametrize("name", VALUE_SETS)

CONFIGS: dict[str, Any] = {"gateway": GatewayConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}
OTHERS = {"HOME", "ROLE", "TARGET", "AITER_JIT_DIR", "TRITON_CACHE_DIR"}
"""Of the environment that no command of ours reads: the system, the container that fetches weights, AITER and Triton."""


def commands(found: list[Manifest]) -> dict[str, Manifest]:
    """The containers that run `tessera`, by its command."""
    return {container["args"][0]: container for _, container in containers(found) if container.get("command") == ["tessera"]}


def config_of(role: str, container: Manifest) -> Any:
    """What the role makes of its arguments and its environment. Raises click.UsageError, in the command's own words."""
    command = tessera.get_command(click.Context(tessera), role)
    assert command is not None
    env = {variable["name"]: variable.get("value", "0") for variable in container["env"]}  # the rank comes from the pod
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        with command.make_context(role, container["args"][1:], auto_envvar_prefix=f"TESSERA_{role.upper()}") as context:
            return build_config(CONFIGS[role], context.params)


@every_set
def test_every_role_takes_its_arguments_and_its_environment(name: str) -> None:
    found = commands(manifests(value_set(name)))
    assert found.keys() - {"generate"} == CONFIGS.keys()
    for role in CONFIGS:
        config_of(role, found[role])


def test_an_argument_that_a_role_does_not_have_would_be_seen() -> None:
    container = commands(manifests({}))["worker"]
    for wrong in ("--gone=1", "--expert-parallel-rank=7"):
        with pytest.raises(click.UsageError):
            config_of("worker", {**container, "args": [*container["args"], wrong]})


@every_set
def test_every_variable_of_the_environment_is_read_by_somebody(name: str) -> None:
    own = {variable["name"] for values in _environments(value_set(name)) for variable in values}
    for component, container in containers(manifests(value_set(name))):
        for variable in container.get("env", ()):
            role, _, option = variable["name"].removeprefix("TESSERA_").lower().partition("_")
            known = {parameter.name for parameter in _parameters(role)} if role in CONFIGS else set()
            assert variable["name"] in OTHERS | own or option in known, f"{component}: {variable['name']}"


def _environments(values: dict[str, Any]) -> list[list[dict[str, str]]]:
    weights = values.get("model", {}).get("weights", {}).get("init", {}).get("env", [])
    return [weights, *(values.get(role, {}).get("pod", {}).get("env", []) for role in CONFIGS)]


def _parameters(command: str) -> list[click.Parameter]:
    return list(importlib.import_module(f"services.cli.{command}_command").command.params)


@every_set
def test_the_test_pod_asks_as_a_client_can(name: str) -> None:
    found = manifests(value_set(name))
    if (container := commands(found).get("generate")) is None:
        assert name == "bare"
        return
    known = {flag for parameter in _parameters("generate") for flag in parameter.opts}
    flags = [arg.partition("=")[0] for arg in container["args"] if arg.startswith("-")]
    assert set(flags) <= known
    (address,) = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--gateway=")]
    assert address == f"{named(found, 'Service', '-gateway')['metadata']['name']}.{NAMESPACE}.svc:50051"


@every_set
def test_probes_ask_where_health_is_served_for_names_that_are_answered(name: str) -> None:
    names = {"gateway": {"", GATEWAY_SERVICE}, "scheduler": {"", READY}, "worker": {"", WORKER_SERVICE}}
    for role, container in commands(manifests(value_set(name))).items():
        if role == "generate":
            continue
        port = int(config_of(role, container).access.health_listen.rpartition(":")[2])
        probes = [container[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")]
        assert {probe["port"] for probe in probes} == {port}
        assert {probe.get("service", "") for probe in probes} <= names[role]
        assert "service" not in container["livenessProbe"]["grpc"], "a process that waits for others is not ended for it"


@every_set
def test_what_listens_is_a_port_and_what_is_named_is_a_service(name: str) -> None:
    found = manifests(value_set(name))
    roles = commands(found)
    for role, container in roles.items():
        if role == "generate":
            continue
        config = config_of(role, container)
        listens = [config.listen, config.metrics_listen, config.access.health_listen, getattr(config, "engine_listen", "")]
        ports = {int(listen.rpartition(":")[2]) for listen in listens if listen}
        assert {port["containerPort"] for port in container["ports"]} == ports
        names = {port["name"] for port in container["ports"]}
        service = named(found, "Service", f"-{role}")
        assert service["spec"]["clusterIP"] == "None"
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
        assert {port["port"] for port in service["spec"]["ports"]} <= ports
    for target, role in (*((t, "scheduler") for t in config_of("gateway", roles["gateway"]).scheduler),
                         *((t, "worker") for t in config_of("scheduler", roles["scheduler"]).workers)):  # fmt: skip
        service = named(found, "Service", f"-{role}")
        assert target == f"dns:///{service['metadata']['name']}.{NAMESPACE}.svc:{service['spec']['ports'][0]['port']}"
        assert service["spec"]["publishNotReadyAddresses"], "what has yet to load, and what drains, is still spoken to"
    assert (
        named(found, "StatefulSet", "-worker")["spec"]["serviceName"] == named(found, "Service", "-worker")["metadata"]["name"]
    )


@every_set
def test_what_selects_finds_the_pods_of_its_role_alone(name: str) -> None:
    found = manifests(value_set(name))
    labels = {component: template["metadata"]["labels"] for component, template in pods(found).items()}
    for manifest in found:
        spec = manifest.get("spec", {})
        selector = {
            "Service": lambda spec: spec["selector"],
            "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
        }.get(manifest["kind"], lambda spec: spec["selector"]["matchLabels"])
        if manifest["kind"] not in ("Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment", "StatefulSet"):
            continue
        role = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        selected = [component for component, own in labels.items() if selector(spec).items() <= own.items()]
        assert selected == [role], manifest["metadata"]["name"]
    for scaler in (manifest for manifest in found if manifest["kind"] == "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        (scaled,) = [m for m in found if (m["kind"], m["metadata"]["name"]) == (target["kind"], target["name"])]
        assert "replicas" not in scaled["spec"], "an upgrade would undo what it scaled"


@every_set
def test_every_file_that_a_process_is_to_read_is_mounted(name: str) -> None:
    for component, template in pods(manifests(value_set(name))).items():
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"]):
            claims = {"data", "jit-cache"}  # of volumeClaimTemplates
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes.keys() | claims, component
            for arg in container["args"] if container.get("command") == ["tessera"] else ():
                for path in _paths(arg):
                    folder = next((mount for mount in mounts if path.is_relative_to(mount)), None)
                    assert folder is not None, f"{component}: {arg}"
                    secret = volumes[mounts[folder]].get("secret")
                    keys = {item["path"] for item in secret["items"]} if secret else {path.name}
                    assert path.name in keys, f"{component}: {arg}"


def _paths(arg: str) -> list[PurePosixPath]:
    words = arg.replace("?", "=").replace("&", "=").split("=")
    return [PurePosixPath(word) for word in words if word.startswith("/")]


def test_workers_that_share_experts_know_their_number_and_the_first_one() -> None:
    found = manifests(value_set("experts"))
    worker, roles = named(found, "StatefulSet", "-worker"), commands(found)
    config = config_of("worker", roles["worker"]).experts
    service = named(found, "Service", "-worker")["metadata"]["name"]
    assert config.expert_parallel_size == worker["spec"]["replicas"] == 4
    assert config.expert_parallel_store == f"{worker['metadata']['name']}-0.{service}.{NAMESPACE}.svc:50060"
    (rank,) = [v for v in roles["worker"]["env"] if v["name"] == "TESSERA_WORKER_EXPERT_PARALLEL_RANK"]
    assert rank["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    assert config_of("scheduler", roles["scheduler"]).scheduling.lockstep
    assert worker["spec"]["podManagementPolicy"] == "Parallel", "none is ready before all are"
    assert worker["spec"]["updateStrategy"] == {"type": "OnDelete"}, "one at a time they would end each other"
    assert "updateStrategy" not in named(manifests(value_set("rocm")), "StatefulSet", "-worker")["spec"]


@pytest.mark.parametrize(("name", "values"), [("demo-tessera", {}), ("tessera-llm", {"fullnameOverride": "llm"})])
def test_jobs_have_the_name_that_alerts_look_for_and_the_scaler_reads_its_own_schedulers(
    name: str, values: dict[str, Any]
) -> None:
    found = manifests({**value_set("operator"), "worker": {"autoscaling": {"enabled": True}}, **values})
    jobs = {
        monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]: relabeling["replacement"]
        for monitor in found
        if monitor["kind"] == "ServiceMonitor"
        for relabeling in monitor["spec"]["endpoints"][0]["relabelings"]
    }
    assert jobs == {role: f"{name}-{role}" for role in CONFIGS}
    for metric in named(found, "HorizontalPodAutoscaler", "-worker")["spec"]["metrics"]:
        assert metric["external"]["metric"]["selector"] == {"matchLabels": {"job": jobs["scheduler"]}}


def test_two_installations_do_not_share_keys() -> None:
    for values, namespace, group in (
        ({}, NAMESPACE, "llm.demo-tessera"),
        ({}, "other", "other.demo-tessera"),
        ({"fullnameOverride": "big"}, NAMESPACE, "llm.big"),
        ({"group": "mine"}, NAMESPACE, "mine"),
    ):
        found = commands(manifests(values, namespace=namespace))
        assert config_of("scheduler", found["scheduler"]).group == group


def _manual() -> str:
    """The section on Kubernetes."""
    return (CHART.parents[2] / "docs" / "operations.md").read_text().partition("\n## Kubernetes\n")[2].partition("\n## ")[0]


def _in_the_manual() -> list[Any]:
    """Its YAML."""
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", _manual(), re.DOTALL)]


def test_commands_in_the_manual_are_for_objects_of_its_installation() -> None:
    commands = re.findall(r"kubectl [^`\n]*", _manual())
    assert len(commands) >= 3 and all(command.startswith("kubectl --namespace llm delete ") for command in commands)
    found = manifests({}, "llm", "llm")
    names = {f"{manifest['kind'].lower()} {manifest['metadata']['name']}" for manifest in found}
    names |= {f"pod {manifest['metadata']['name']}-0" for manifest in found if manifest["kind"] == "StatefulSet"}
    for command in commands:
        *_, what = command.partition(" delete ")
        if "--selector" in what:
            labels = dict(label.split("=") for label in what.partition("--selector ")[2].split(","))
            assert labels.items() <= pods(found)["worker"]["metadata"]["labels"].items()
            assert "app.kubernetes.io/instance" in labels, "another installation's have the component too"
        elif what != "pvc":
            assert " ".join(what.split()[:2]) in names, command


def test_the_values_in_the_manual_can_be_installed() -> None:
    values, _ = _in_the_manual()
    found = manifests(values)
    assert not [line for manifest in found for version in KUBERNETES for line in complaints(manifest, version)]
    assert commands(found).keys() == {*CONFIGS, "generate"}
    for role in CONFIGS:
        config_of(role, commands(found)[role])


def test_the_rules_in_the_manual_make_the_metrics_that_the_scaler_reads_of_those_that_schedulers_show() -> None:
    _, adapter = _in_the_manual()
    found = manifests({"worker": {"autoscaling": {"enabled": True}}})
    read = {
        metric["external"]["metric"]["name"] for metric in named(found, "HorizontalPodAutoscaler", "-worker")["spec"]["metrics"]
    }
    assert {rule["name"]["as"] for rule in adapter["external"]} == read
    shown = Path(scheduler_metrics.__file__).read_text()
    for rule in adapter["external"]:
        assert f'"{rule["seriesQuery"].partition("{")[0]}"' in shown


ALLOWED = {
    ("test", "gateway", "grpc"),
    ("client", "gateway", "grpc"),
    ("gateway", "scheduler", "grpc"),
    ("scheduler", "worker", "grpc"),
    ("scheduler", "redis", "redis"),
    *(("prometheus", role, "metrics") for role in CONFIGS),
}
"""Who may connect where, and nobody else: from, to, port."""


def _network(values: dict[str, Any]) -> Network:
    return Network(manifests(values), {"client": {"app": "client"}, "prometheus": {"app": "prometheus"}})


def test_connections_are_those_that_are_needed_and_no_others() -> None:
    closed = {
        "clientsFrom": [{"podSelector": {"matchLabels": {"app": "client"}}}],
        "metricsFrom": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
    }
    assert _network({"networkPolicy": closed}).connections() == ALLOWED


def test_an_engine_port_is_for_those_that_are_named() -> None:
    from_client = [{"podSelector": {"matchLabels": {"app": "client"}}}]
    for peers, expected in (([], set()), (from_client, {("client", "gateway", "engine")})):
        found = _network({"gateway": {"engine": {"enabled": True, "from": peers}}}).connections()
        assert {connection for connection in found if connection[2] == "engine"} == expected


def test_workers_that_share_experts_reach_each_other() -> None:
    network = _network(value_set("experts"))
    assert ("worker", "worker", "grpc") in network.connections() and ("gateway", "worker", "grpc") not in network.connections()


@pytest.mark.parametrize(
    ("name", "role", "port"),
    [
        ("redis-external-tls", "scheduler", 6380),
        ("redis-sentinel", "scheduler", 26379),
        ("redis-sentinel", "scheduler", 6379),
        ("operator", "worker", 4317),
        ("operator", "gateway", 4317),
        ("minimal", "scheduler", 53),
        ("minimal", "gateway", 53),
    ],
)
def test_what_is_outside_is_reached(name: str, role: str, port: int) -> None:
    values = value_set(name)
    for peers in ("redisTo", "tracesTo"):
        values.get("networkPolicy", {}).pop(peers, None)
    assert _network(values).reaches_outside(role, port)
    assert not _network(values).reaches_outside("worker", 6379)
