"""Whatever the schema accepts is rendered to what Kubernetes takes, or refused in words that name it."""

import json
from typing import Any

import helm_python
import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from tests.deploy.chart_schema import SCHEMA
from tests.deploy.rendered import KUBERNETES, Values, complaints, manifests, named
from tests.deploy.schema_values import from_schema

_SCHEMA = json.loads(SCHEMA.read_text())
_DEFINITIONS = _SCHEMA["definitions"]

some = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def part(path: str) -> dict[str, Any]:
    """The schema of one value, such as `worker/pod`."""
    schema: dict[str, Any] = _SCHEMA
    for key in path.split("/"):
        reference = schema.get("$ref", "").rpartition("/")[2]
        schema = (_DEFINITIONS[reference] if reference else schema)["properties"][key]
    return schema


def values_of(*paths: str) -> st.SearchStrategy[Values]:
    """Valid values for `paths`, and for nothing else."""
    return st.tuples(*(from_schema(part(path), _DEFINITIONS) for path in paths)).map(
        lambda drawn: _nested(dict(zip(paths, drawn, strict=True)))
    )


def _nested(flat: dict[str, Any]) -> Values:
    whole: Values = {}
    for path, value in flat.items():
        *folders, last = path.split("/")
        inner = whole
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = value
    return whole


def problems(values: Values) -> list[str]:
    """What Kubernetes says of what is rendered."""
    return [line for manifest in manifests(values) for version in KUBERNETES for line in complaints(manifest, version)]


FREE = (
    *(f"{role}/{key}" for role in ("gateway", "scheduler", "worker") for key in ("options", "podDisruptionBudget")),
    *(
        f"{role}/pod/{key}"
        for role in ("gateway", "scheduler", "worker", "redis/inChart", "test")
        for key in ("nodeSelector", "tolerations", "priorityClassName", "labels", "annotations", "supplementalGroups")
    ),
    *(
        "gateway/replicas",
        *(f"gateway/exposed/{key}" for key in ("enabled", "port", "annotations", "loadBalancerSourceRanges")),
        "gateway/engine",
        "worker/replicas",
        "worker/gpu/resource",
        "worker/shmSize",
        "worker/jitCache",
    ),
    *("worker/startupSeconds", "worker/drainSeconds", "worker/autoscaling/queueDepth", "worker/autoscaling/kvUse"),
    *(
        "drain",
        "image",
        "redis/inChart/image",
        "redis/inChart/persistence",
        "redis/auth",
        "group",
        "nameOverride",
        "fullnameOverride",
        "metrics/enabled",
        "tracing",
        "networkPolicy",
    ),
    *("topologySpread", "security", "serviceAccount", "listenHost", "model/weights/pvc/subPath"),
)
"""Values that go together with all others."""


@some
@given(st.data())
def test_values_that_depend_on_no_others_are_always_rendered(data: st.DataObject) -> None:
    paths = data.draw(st.lists(st.sampled_from(FREE), min_size=1, max_size=4, unique=True))
    assert problems(data.draw(values_of(*paths))) == []


def test_an_equals_sign_stays_one() -> None:
    pod = {"tolerations": [{"key": "a", "operator": "Equal", "value": "="}]}
    scheduler = named(manifests({"scheduler": {"pod": pod}}), "Deployment", "scheduler")
    assert pod["tolerations"] == scheduler["spec"]["template"]["spec"]["tolerations"]


@some
@given(st.data())
def test_all_values_at_once_are_rendered_or_refused_by_name(data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(sorted(_SCHEMA["properties"])), min_size=1, max_size=6, unique=True))
    values = data.draw(values_of(*keys))
    try:
        assert problems(values) == []
    except helm_python.HelmRenderError as refused:
        said = str(refused)
        assert "these values do not go together:\n- " in said, said
        for line in said.partition("do not go together:\n- ")[2].strip().split("\n- "):
            assert line.partition(".")[0].strip() in _SCHEMA["properties"], line


@some
@given(st.data())
def test_numbers_below_their_least_and_unknown_keys_are_refused_by_name(data: st.DataObject) -> None:
    paths = {
        "gateway/replicas": 1,
        "scheduler/standbys": 0,
        "worker/replicas": 1,
        "worker/tensorParallelSize": 1,
        "worker/gpu/perNode": 1,
        "drain/preStopSeconds": 0,
    }
    path = data.draw(st.sampled_from(sorted(paths)))
    wrong = _nested({path: data.draw(st.integers(max_value=paths[path] - 1))})
    unknown = _nested({path.rpartition("/")[0] + "/unknown": 1})
    for values, words in ((wrong, f"/{path}'"), (unknown, "additional properties 'unknown'")):
        try:
            manifests(values)
        except helm_python.HelmValuesError as refused:
            assert words in str(refused)
        else:
            raise AssertionError(f"{values} are accepted")
