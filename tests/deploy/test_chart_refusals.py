"""Values that cannot work are refused before anything is made, in words that name them."""

from typing import Any

import helm_python
import pytest

from tests.deploy.rendered import Values, render

TLS = {"enabled": True, "existingSecret": "parts", "peerName": "parts.tessera"}
PVC = {"source": "pvc", "pvc": {"claimName": "weights"}}


def rocm(**worker: Any) -> Values:
    return {"model": {"name": "/models/m", "weights": PVC}, "worker": {"variant": "rocm", **worker}}


def refusal(values: Values) -> str:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    return str(refused.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gatways": {}}, "additional properties 'gatways' not allowed"),
        ({"gateway": {"replica": 2}}, "at '/gateway': additional properties 'replica' not allowed"),
        ({"gateway": {"replicas": -1}}, "at '/gateway/replicas': minimum: got -1, want 1"),
        ({"scheduler": {"standbys": -1}}, "at '/scheduler/standbys': minimum: got -1, want 0"),
        ({"worker": {"replicas": "two"}}, "at '/worker/replicas': got string, want integer"),
        ({"worker": {"variant": "tpu"}}, "at '/worker/variant': value must be one of 'cpu', 'rocm'"),
        ({"worker": {"options": {"kv-cache": 1}}}, "at '/worker/options': additional properties 'kv-cache' not allowed"),
        ({"worker": {"options": {"model": "x"}}}, "at '/worker/options': additional properties 'model' not allowed"),
        (
            {"scheduler": {"options": {"policy": "x"}}},
            "at '/scheduler/options/policy': value must be one of 'mixed', 'prefill_first'",
        ),
        ({"scheduler": {"options": {"max-num-seqs": 1.5}}}, "at '/scheduler/options/max-num-seqs': got number, want integer"),
        ({"tls": {"existingSecret": "No_Name"}}, "at '/tls/existingSecret': 'No_Name' does not match pattern"),
        (
            {"redis": {"external": {"url": "http://redis:6379"}}},
            "at '/redis/external/url': 'http://redis:6379' does not match pattern",
        ),
        ({"tls": {"existingSecret": "s" * 254}}, "at '/tls/existingSecret': maxLength: got 254, want 253"),
        ({"gateway": {"pod": {"annotations": {"example.com/" + "n" * 64: ""}}}}, "nnn' does not match pattern"),
        ({"gateway": {"pod": {"annotations": {"p" * 254 + "/name": ""}}}}, "ppp/name' does not match pattern"),
        ({"worker": {"shmSize": "much"}}, "at '/worker/shmSize': 'much' does not match pattern"),
        ({"security": {"runAsUser": 0}}, "at '/security/runAsUser': minimum: got 0, want 1"),
        (
            {"tracing": {"otlpEndpoint": "http://collector"}},
            "at '/tracing/otlpEndpoint': 'http://collector' does not match pattern",
        ),
    ],
)
def test_the_schema_refuses_what_is_unknown_or_wrong(values: Values, words: str) -> None:
    assert words in refusal(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            rocm(tensorParallelSize=3),
            "worker.tensorParallelSize (3) does not divide worker.gpu.perNode (8): 2 GPUs of each node",
        ),
        (rocm(tensorParallelSize=16), "worker.tensorParallelSize (16) does not divide worker.gpu.perNode (8)"),
        (rocm(pod={"resources": {"limits": {"amd.com/gpu": 1}}}), "worker.pod.resources.limits has amd.com/gpu: leave it out"),
        (
            rocm(pod={"resources": {"requests": {"amd.com/gpu": 1}}}),
            "worker.pod.resources.requests has amd.com/gpu: leave it out",
        ),
        (
            {"gateway": {"pod": {"resources": {"limits": {"memory": "0.5Gi"}}}}},
            "gateway.pod.resources.requests.memory (1Gi) is above gateway.pod.resources.limits.memory (0.5Gi): give both",
        ),
        (
            {"worker": {"pod": {"resources": {"limits": {"cpu": "1500m"}}}}},
            "worker.pod.resources.requests.cpu (2) is above worker.pod.resources.limits.cpu (1500m)",
        ),
        (
            {"scheduler": {"pod": {"resources": {"requests": {"memory": 2**32 + 1}}}}},
            "scheduler.pod.resources.requests.memory (4294967297) is above scheduler.pod.resources.limits.memory (4Gi)",
        ),
        ({"scheduler": {"pod": {"resources": {"requests": {"cpu": 2.5}, "limits": {"cpu": 0}}}}}, "limits.cpu (0)"),
        *(
            (
                {role: {"pod": {"env": [{"name": name, "value": "x"}]}}},
                f"{role}.pod.env has {name}, which the chart sets by itself",
            )
            for role, name in (
                ("gateway", "TESSERA_GATEWAY_LISTEN"),
                ("scheduler", "HOME"),
                ("worker", "AITER_JIT_DIR"),
                ("worker", "TRITON_CACHE_DIR"),
                ("worker", "TESSERA_WORKER_EXPERT_PARALLEL_RANK"),
                ("test", "TESSERA_GENERATE_MAX_TOKENS"),
            )
        ),
        ({"redis": {"inChart": {"pod": {"env": [{"name": "HOME", "value": "/"}]}}}}, "redis.inChart.pod.env has HOME"),
        ({"model": {"weights": {"init": {"env": [{"name": "TARGET", "value": "/"}]}}}}, "model.weights.init.env has TARGET"),
        (
            {"model": {"weights": {"init": {"resources": {"limits": {"cpu": "100m"}}}}}},
            "model.weights.init.resources.requests.cpu (500m) is above model.weights.init.resources.limits.cpu (100m)",
        ),
        (rocm(expertParallel=True), "worker.expertParallel needs worker.replicas of 2 or more, got 1"),
        (
            rocm(expertParallel=True, replicas=2, autoscaling={"enabled": True}),
            "worker.expertParallel and worker.autoscaling.enabled exclude each other",
        ),
        (
            {**rocm(expertParallel=True, replicas=2), "scheduler": {"options": {"lockstep": False}}},
            "take lockstep out of scheduler.options",
        ),
        ({"worker": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "worker.autoscaling.minReplicas (9) is above"),
        ({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "gateway.autoscaling.minReplicas (9) is above"),
        (
            {"gateway": {"autoscaling": {"enabled": True}, "pod": {"resources": {"requests": {"cpu": None}}}}},
            "gateway.autoscaling.enabled needs gateway.pod.resources.requests.cpu",
        ),
        ({"scheduler": {"standbys": 0}}, "scheduler.standbys is 0: the loss of the one scheduler"),
        (
            {"gateway": {"terminationGracePeriodSeconds": 30}},
            "gateway.terminationGracePeriodSeconds (30) is shorter than drain.preStopSeconds (10) + drain.longestGenerationSeconds (600) + 15: "
            "answers would be cut off; set it to 625 or more",
        ),
        (
            {"worker": {"terminationGracePeriodSeconds": 60, "drainSeconds": 60}},
            "worker.terminationGracePeriodSeconds (60) is shorter",
        ),
        ({"model": {"name": "/models/m"}}, "model.name is /models/m, but model.weights.source image puts nothing there"),
        ({"worker": {"variant": "rocm"}}, "model.weights.source is image, and the image for ROCm has no weights"),
        ({"model": {"name": "SmolLM2-135M-Instruct", "weights": PVC}}, "model.name must be a path below /models/"),
        ({"model": {"name": "/models/m", "weights": {"source": "pvc"}}}, "model.weights.pvc.claimName is empty"),
        ({"model": {"name": "/models/m", "weights": {"source": "init"}}}, "model.weights.init.image is empty"),
        ({"redis": {"mode": "external"}}, "redis.external.url is empty"),
        ({"redis": {"external": {"url": "redis://redis:6379/0"}}}, "redis.external.url is given, but redis.mode is inChart"),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://user:secret@redis:6379/0"}}},
            "redis.external.url has a password",
        ),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://user:a/secret@redis:6379/0"}}},
            "redis.external.url has a password",
        ),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://:a@secret@redis:6379/0"}}},
            "redis.external.url has a password",
        ),
        (
            {
                "redis": {
                    "mode": "external",
                    "external": {"url": "sentinel://u:a,secret@redis:26379/s"},
                    "auth": {"existingSecret": "s"},
                }
            },
            "redis.external.url has a password",
        ),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://redis:6379/0", "caSecret": "ca"}}},
            "redis.external.caSecret and clientCertSecret are for a redis.external.url that begins with rediss://",
        ),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://redis:6390/0"}}},
            "networkPolicy.redisPorts lacks 6390, the port of redis.external.url",
        ),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://redis"}}, "networkPolicy": {"redisPorts": [1]}},
            "lacks 6379",
        ),
        (
            {
                "redis": {"mode": "external", "external": {"url": "sentinel://a:26379,b:26390/journal"}},
                "networkPolicy": {"redisPorts": [26379]},
            },
            "networkPolicy.redisPorts lacks 26390, a Sentinel's port of redis.external.url",
        ),
        ({"redis": {"mode": "external", "external": {"url": "sentinel://user@a/journal"}}}, "redisPorts lacks 26379"),
        (
            {"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}},
            "metrics.serviceMonitor.enabled needs metrics.enabled",
        ),
        (
            {"metrics": {"enabled": False, "prometheusRule": {"enabled": True}}},
            "metrics.prometheusRule.enabled needs metrics.enabled",
        ),
        ({"metrics": {"enabled": False, "dashboard": {"enabled": True}}}, "metrics.dashboard.enabled needs metrics.enabled"),
        (
            {"metrics": {"enabled": False}, "worker": {"autoscaling": {"enabled": True}}},
            "worker.autoscaling.enabled needs metrics.enabled",
        ),
        ({"tls": {"enabled": True, "peerName": "parts.tessera"}}, "tls.existingSecret is empty, but tls.enabled is true"),
        ({"tls": {"enabled": True, "existingSecret": "parts"}}, "tls.peerName is empty, but tls.enabled is true"),
        ({"tls": {"clientCaSecret": "ca"}}, "tls.clientCaSecret is given, but tls.enabled is false"),
        ({"auth": {"clients": {"enabled": True}}}, "auth.clients.existingSecret is empty"),
        ({"auth": {"internal": {"enabled": True}}, "tls": TLS}, "auth.internal.existingSecret is empty"),
        ({"auth": {"internal": {"enabled": True, "existingSecret": "s"}}}, "auth.internal.enabled needs tls.enabled"),
        (
            {"auth": {"clients": {"enabled": True, "existingSecret": "s"}}},
            "test.tokenSecret is empty, but auth.clients.enabled is true",
        ),
        ({"tls": {**TLS, "clientCaSecret": "ca"}}, "test.clientCertSecret is empty, but tls.clientCaSecret is given"),
        (
            {"gateway": {"exposed": {"enabled": True, "type": "ClusterIP", "loadBalancerSourceRanges": ["10.0.0.0/8"]}}},
            "gateway.exposed.loadBalancerSourceRanges is for type LoadBalancer, got ClusterIP",
        ),
        (
            {"gateway": {"engine": {"enabled": True}}, "auth": {"clients": {"enabled": True, "existingSecret": "s"}}},
            "gateway.engine.enabled would answer everybody past auth.clients",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(values: Values, words: str) -> None:
    said = refusal(values)
    assert words in said
    assert "secret@" not in said


def test_all_that_is_wrong_is_told_at_once() -> None:
    said = refusal({"tls": {"enabled": True}, "scheduler": {"standbys": 0}, "redis": {"mode": "external"}})
    for words in (
        "tls.existingSecret is empty",
        "tls.peerName is empty",
        "scheduler.standbys is 0",
        "redis.external.url is empty",
    ):
        assert words in said
