"""The chart renders for every set of values, and Kubernetes takes what it renders; its schema says all that there is to set."""

import json
import re
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

from tests.deploy.chart_schema import CHART, OWNED, ROLES, SCHEMA, filled, options
from tests.deploy.rendered import (
    KUBERNETES,
    NAMESPACE,
    RELEASE,
    VALUE_SETS,
    complaints,
    containers,
    manifests,
    named,
    pods,
    render,
    value_set,
)

every_set = pytest.mark.parametrize("name", VALUE_SETS)
APP_VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def test_there_are_sets_enough() -> None:
    assert len(VALUE_SETS) >= 12


@every_set
def test_a_set_is_rendered_and_kubernetes_takes_it(name: str) -> None:
    found = manifests(value_set(name))
    assert {"Deployment", "StatefulSet", "Service"} <= {manifest["kind"] for manifest in found}
    assert not [line for manifest in found for version in KUBERNETES for line in complaints(manifest, version)]


@every_set
def test_lint_has_nothing_to_say(name: str) -> None:
    report = helm_python.lint(CHART, value_set(name), strict=True)
    assert report["errors"] == [] and report["total_charts_linted"] == 1
    assert [message for message in report["messages"] if message["error"] != "icon is recommended"] == []


@every_set
def test_an_install_would_be_made_of_it(name: str) -> None:
    with helm_python.Config(namespace=NAMESPACE, storage_driver="memory") as config:
        release = config.install(CHART, RELEASE, value_set(name), dry_run="client")
    assert release["status"] == "pending-install"
    whole = {(m["kind"], m["metadata"]["name"]) for m in manifests(value_set(name)) if m["kind"] != "Pod"}  # the test is a hook
    assert {(m["kind"], m["metadata"]["name"]) for m in yaml.safe_load_all(release["manifest"]) if m} == whole
    assert "kubectl" in release["notes"]


def test_what_kubernetes_does_not_know_would_be_seen() -> None:
    gateway = named(manifests({}), "Deployment", "-gateway")
    container = gateway["spec"]["template"]["spec"]["containers"][0]
    for part, problem in (({"livenesProbe": {}}, "livenesProbe"), ({"ports": [{"containerPort": "grpc"}]}, "'grpc'")):
        changed = json.loads(json.dumps(gateway))
        changed["spec"]["template"]["spec"]["containers"] = [{**container, **part}]
        (complaint,) = complaints(changed, KUBERNETES[0])
        assert problem in complaint
    monitor = named(manifests(value_set("operator")), "ServiceMonitor", "-worker")
    monitor["spec"]["endpoints"][0]["interval"] = "soon"
    assert "soon" in complaints(monitor, KUBERNETES[0])[0]


def test_the_options_in_the_schema_are_those_of_the_commands() -> None:
    schema = json.loads(SCHEMA.read_text())
    assert filled(schema) == schema, "run `make chart-schema`"
    for role in ROLES:
        assert options(role).keys() >= OWNED[role] - {"tls-client-ca", "trace-sample-ratio", "token-file"}


def _objects(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield path, schema
        for key, value in schema.items():
            yield from _objects(value, f"{path}/{key}")


def test_the_schema_leaves_no_object_open() -> None:
    found = dict(_objects(json.loads(SCHEMA.read_text()), ""))
    assert len(found) > 50, "the walk finds them"
    for path, schema in found.items():
        if path != "/properties/global":  # a parent chart's
            assert (
                schema.get("additionalProperties") is False
                or "$ref" in str(schema["additionalProperties"])
                or schema["additionalProperties"].get("type")
            ), path


def _keys(values: Any, path: str = "") -> Iterator[str]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield f"{path}/{key}"
            yield from _keys(value, f"{path}/{key}")


def _schema_keys(schema: dict[str, Any], definitions: dict[str, Any], path: str = "") -> Iterator[str]:
    schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for key, inner in schema.get("properties", {}).items():
        yield f"{path}/{key}"
        if key != "options":
            yield from _schema_keys(inner, definitions, f"{path}/{key}")


def test_every_value_that_can_be_set_is_in_values_yaml() -> None:
    schema = json.loads(SCHEMA.read_text())
    known = set(_schema_keys(schema, schema["definitions"])) - {"/global"}
    free = ("/requests/", "/limits/", "/labels/")
    assert {key for key in _keys(DEFAULTS) if not any(part in key for part in free)} == known


@every_set
def test_nothing_runs_as_root_or_writes_into_its_image(name: str) -> None:
    found = manifests(value_set(name))
    for component, template in pods(found).items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0, component
        assert spec["automountServiceAccountToken"] is False, component
    for component, container in containers(found):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}, component
        assert security["allowPrivilegeEscalation"] is False, component


@every_set
def test_pods_have_the_time_that_their_drain_takes(name: str) -> None:
    found = pods(manifests(value_set(name)))
    for role, margin_s in (("gateway", 10), ("worker", 10)):
        spec = found[role]["spec"]
        (container,) = spec["containers"]
        (drain,) = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--drain-grace-s=")]
        hook = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert spec["terminationGracePeriodSeconds"] >= hook + float(drain) + margin_s, role


def test_gateways_drain_for_the_longest_generation() -> None:
    found = manifests({"drain": {"longestGenerationSeconds": 3600}})
    for role in ("gateway", "worker"):
        assert "--drain-grace-s=3600" in pods(found)[role]["spec"]["containers"][0]["args"]


def test_numbers_and_switches_reach_the_command_line_as_they_are() -> None:
    options = {"kv-cache-bytes": 2**40, "batch-invariant": True, "enforce-eager": False, "gpu-memory-utilization": 0.85}
    args = pods(manifests({"worker": {"options": {**options, "graph-size": [1, 16]}}}))["worker"]["spec"]["containers"][0][
        "args"
    ]
    assert args[-6:] == [
        "--batch-invariant",
        "--no-enforce-eager",
        "--gpu-memory-utilization=0.85",
        "--graph-size=1",
        "--graph-size=16",
        "--kv-cache-bytes=1099511627776",
    ]


@pytest.mark.parametrize(
    ("cpu", "size", "threads"),
    [
        ("4", 1, 4),
        (4, 1, 4),
        (2.5, 1, 2),
        ("7500m", 1, 7),
        ("2.5", 1, 2),
        ("500m", 1, 1),
        (8, 3, 2),
        ("1k", 2, 500),
        ("2k", 1, 1024),
    ],
)
def test_a_worker_on_cpus_has_threads_for_its_limit(cpu: Any, size: int, threads: int) -> None:
    worker = {"tensorParallelSize": size, "pod": {"resources": {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}}}
    assert f"--threads={threads}" in pods(manifests({"worker": worker}))["worker"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("memory", [8589934592, 1.5e9, "1.5Gi", "129e6", "2Pi", "1E"])
def test_quantities_are_what_kubernetes_reads(memory: Any) -> None:
    size = 8589934592 if isinstance(memory, float) else memory
    own = {"requests": {"cpu": 0.5, "memory": memory}, "limits": {"memory": memory}}
    found = manifests({"gateway": {"pod": {"resources": own}}, "redis": {"inChart": {"persistence": {"size": size}}}})
    assert not [line for manifest in found for version in KUBERNETES for line in complaints(manifest, version)]
    assert pods(found)["gateway"]["spec"]["containers"][0]["resources"] == own
    (claim,) = named(found, "StatefulSet", "-redis")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == str(size)


def test_names_may_be_as_long_as_those_of_kubernetes() -> None:
    name, key = "s" * 253, f"{'p' * 249}.com/{'n' * 63}"
    tls = {"enabled": True, "existingSecret": name, "peerName": f"{'p' * 63}.{'q' * 63}.example"}
    found = manifests({"tls": tls, "gateway": {"pod": {"annotations": {key: "on"}}}})
    assert not [line for manifest in found for version in KUBERNETES for line in complaints(manifest, version)]
    gateway = pods(found)["gateway"]
    assert gateway["metadata"]["annotations"] == {key: "on"}
    assert [volume["secret"]["secretName"] for volume in gateway["spec"]["volumes"] if volume["name"] == "tls"] == [name]
    assert f"--tls-peer-name={tls['peerName']}" in gateway["spec"]["containers"][0]["args"]


def test_a_worker_that_is_told_its_threads_or_has_no_limit_gets_no_others() -> None:
    limited = {"options": {"threads": 3}, "pod": {"resources": {"limits": {"cpu": 8}}}}
    for worker, expected in ((limited, ["--threads=3"]), ({}, [])):
        args = pods(manifests({"worker": worker}))["worker"]["spec"]["containers"][0]["args"]
        assert [arg for arg in args if arg.startswith("--threads")] == expected


def test_a_pod_of_the_gpu_variant_has_a_gpu_for_each_process_and_room_for_what_is_compiled() -> None:
    worker = named(manifests(value_set("rocm-tp8")), "StatefulSet", "-worker")["spec"]
    spec = worker["template"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["amd.com/gpu"] == 8
    assert {"--tensor-parallel-size=8", "--device=cuda"} <= set(container["args"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    env = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    assert all(env[name].startswith(mounts["jit-cache"]) for name in ("AITER_JIT_DIR", "TRITON_CACHE_DIR", "HOME"))
    assert [claim["metadata"]["name"] for claim in worker["volumeClaimTemplates"]] == ["jit-cache"]
    assert mounts["shm"] == "/dev/shm"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in spec["volumes"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 7200


@pytest.mark.parametrize("storage_class", ["", "fast"])
@pytest.mark.parametrize(
    ("name", "own", "expected"), [("m", "", "1Gi"), ("m", "3Gi", "3Gi"), ("m.gguf", "", "20Gi"), ("m.gguf", 2**40, str(2**40))]
)
def test_fetched_weights_have_room_for_what_a_role_reads(storage_class: str, name: str, own: Any, expected: str) -> None:
    resources = {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}
    init = {"image": "fetch", "size": "20Gi", "gatewaySize": own, "storageClass": storage_class, "resources": resources}
    found = pods(manifests({"model": {"name": f"/models/{name}", "weights": {"source": "init", "init": init}}}))
    for role, size in (("worker", "20Gi"), ("gateway", expected)):
        (volume,) = [one for one in found[role]["spec"]["volumes"] if one["name"] == "weights"]
        claim = volume.get("ephemeral", {}).get("volumeClaimTemplate", {}).get("spec")
        assert (claim["resources"]["requests"]["storage"] if storage_class else volume["emptyDir"]["sizeLimit"]) == size
        assert found[role]["spec"]["initContainers"][0]["resources"] == resources


def test_the_pods_of_all_roles_have_what_a_pod_can_be_given() -> None:
    pod: dict[str, Any] = {
        "resources": {"requests": {"cpu": "3", "memory": "7Gi"}, "limits": {"memory": "7Gi"}},
        "nodeSelector": {"pool": "llm"},
        "tolerations": [{"key": "llm", "operator": "Exists"}],
        "priorityClassName": "high",
        "labels": {"team": "llm", "app.kubernetes.io/component": "mine"},
        "annotations": {"example.com/mesh": "off", "helm.sh/hook": "mine"},
        "env": [{"name": "MALLOC_ARENA_MAX", "value": "2"}],
        "supplementalGroups": [44],
    }
    places = {"redis": {"inChart": {"pod": pod}}, **{role: {"pod": pod} for role in ("gateway", "scheduler", "worker", "test")}}
    found = manifests({**places, "image": {"pullSecrets": ["pull"]}})
    assert not [line for manifest in found for version in KUBERNETES for line in complaints(manifest, version)]
    assert pods(found).keys() == {"gateway", "scheduler", "worker", "redis", "test"}
    for component, template in pods(found).items():
        spec, metadata = template["spec"], template["metadata"]
        assert {key: spec[key] for key in ("nodeSelector", "tolerations", "priorityClassName")}.items() <= pod.items()
        assert spec["securityContext"]["supplementalGroups"] == [44]
        assert spec["serviceAccountName"] == "demo-tessera" and spec["imagePullSecrets"] == [{"name": "pull"}]
        assert spec["containers"][0]["resources"] == pod["resources"] and pod["env"][0] in spec["containers"][0]["env"]
        assert metadata["labels"]["team"] == "llm" and metadata["annotations"]["example.com/mesh"] == "off"
        assert metadata["annotations"]["helm.sh/hook"] == ("test" if component == "test" else "mine")


def test_an_update_of_gateways_is_given_up_only_after_workers_were() -> None:
    for seconds in (10, 7200):
        found = manifests({"worker": {"startupSeconds": seconds}})
        assert named(found, "Deployment", "-gateway")["spec"]["progressDeadlineSeconds"] == seconds + 600


LONGEST = "a" * 53
"""Of what Helm takes for a release."""


@pytest.mark.parametrize("release", ["llm.team-a", "3m", "7.2", LONGEST, f"tessera-{'b' * 31}-{'c' * 13}"])
def test_whatever_a_release_is_called_its_objects_have_names_that_kubernetes_takes(release: str) -> None:
    found = manifests({**value_set("operator"), "gateway": {"exposed": {"enabled": True}}}, release)
    for manifest in found:
        form = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?" if manifest["kind"] == "Service" else r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
        assert re.fullmatch(form, manifest["metadata"]["name"]), manifest["metadata"]["name"]
    revision = f"{named(found, 'StatefulSet', '-worker')['metadata']['name']}-0123456789"
    assert len(revision) <= 63, "a label of its pods"


def test_releases_whose_names_are_made_to_fit_have_names_of_their_own() -> None:
    releases = ("demo", "a.b", "a-b", f"{LONGEST[:-1]}b", LONGEST, "3m", "r-3m", "tessera")
    names = {named(manifests({}, release), "Service", "-gateway")["metadata"]["name"] for release in releases}
    assert len(names) == len(releases)
    assert {"demo-tessera-gateway", "a-b-tessera-gateway", "tessera-gateway"} <= names, "those that fit are as they are"


@pytest.mark.parametrize(
    ("image", "folder"),
    [
        ({}, f"aiter-{APP_VERSION}"),
        ({"tag": "0.1.0-patched"}, "aiter-0.1.0-patched"),
        ({"digest": f"sha256:{'0a' * 32}"}, f"aiter-{'0a' * 32}"),
    ],
)
def test_kernels_that_aiter_compiled_are_those_of_the_image(image: dict[str, str], folder: str) -> None:
    found = pods(manifests({**value_set("rocm-tp8"), "image": {"workerRocm": image}}))["worker"]["spec"]["containers"][0]
    (variable,) = [variable for variable in found["env"] if variable["name"] == "AITER_JIT_DIR"]
    assert variable["value"] == f"/var/cache/tessera/{folder}"


def test_alerts_and_dashboard_are_installed_as_they_are_in_their_files() -> None:
    found = manifests(value_set("operator"))
    alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert named(found, "PrometheusRule", "")["spec"] == alerts
    dashboard = named(found, "ConfigMap", "-dashboard")
    assert json.loads(dashboard["data"]["tessera.json"]) == json.loads((CHART / "files" / "dashboard.json").read_text())
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert not {"PrometheusRule", "ConfigMap"} & {manifest["kind"] for manifest in manifests({})}


def test_images_can_be_anywhere_and_pinned() -> None:
    images = {component: container["image"] for component, container in containers(manifests(value_set("exposed-ipv6")))}
    assert images["gateway"].startswith("registry.example.com/tessera/tessera-slim@sha256:0123")
    assert images["worker"] == "registry.example.com/tessera/tessera-worker-cpu:0.1.0-patched"


def test_a_new_version_of_the_chart_alone_restarts_nobody() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    for component, template in pods(manifests({"image": {"slim": {"tag": "x"}, "workerCpu": {"tag": "x"}}})).items():
        assert component == "test" or f"tessera-{version}" not in json.dumps(template["metadata"]), component


def test_the_notes_say_what_is_open() -> None:
    notes = render({})["NOTES.txt"]
    assert "everybody who can connect is answered" in notes and "for development" in notes
    notes = render(
        {
            **value_set("tls-tokens"),
            "redis": value_set("redis-sentinel")["redis"],
            "networkPolicy": {"redisPorts": [6379, 26379]},
        }
    )["NOTES.txt"]
    assert "Nothing is encrypted" not in notes and "for development" not in notes


@every_set
def test_the_notes_ask_as_the_test_does(name: str) -> None:
    values = value_set(name)
    (line,) = [line for line in render(values)["NOTES.txt"].splitlines() if line.strip().startswith("tessera generate")]
    test = pods(manifests({**values, "test": {**values.get("test", {}), "enabled": True}}))["test"]
    flags = {arg.partition("=")[0] for arg in test["spec"]["containers"][0]["args"] if arg.startswith("--")}
    assert set(re.findall(r"--[a-z-]+", line)) == flags - {"--gateway", "--max-tokens", "--timeout-s"}
