"""The chart as Helm renders it, and what Kubernetes' own schemas say of that. Nothing is asked of a cluster."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import helm_python
import kubernetes_validate
import yaml
from jsonschema.validators import Draft7Validator
from kubernetes_validate import utils as kubernetes_schemas

from tests.deploy.chart_schema import CHART
from tests.deploy.custom_resources import CUSTOM_RESOURCES

Values: TypeAlias = dict[str, Any]
Manifest: TypeAlias = dict[str, Any]

VALUE_SETS = {path.stem: path for path in sorted((Path(__file__).parent / "values").glob("*.yaml"))}
KUBERNETES = ("1.30", "1.33", "1.37")
"""The oldest that the chart takes, one between, and the newest that the validator knows."""

RELEASE, NAMESPACE = "demo", "llm"


class _Loader(yaml.CSafeLoader):
    """Reads `=` as the text that it is to Kubernetes and Helm; in YAML 1.1, which this library has, it was something of its own."""


_Loader.add_constructor("tag:yaml.org,2002:value", yaml.CSafeLoader.construct_yaml_str)

# It reads its files again for every object: megabytes.
kubernetes_schemas.schema_contents = lru_cache(maxsize=None)(kubernetes_schemas.schema_contents)


def value_set(name: str) -> Values:
    """One of VALUE_SETS."""
    return dict(yaml.load(VALUE_SETS[name].read_text(), _Loader))


@lru_cache(maxsize=1)
def chart() -> helm_python.Chart:
    """Loaded once."""
    return helm_python.Chart.load(CHART)


def render(values: Values, release: str = RELEASE, namespace: str = NAMESPACE) -> dict[str, str]:
    """Text by template, of those that give any. Raises helm_python.HelmError for values that are refused."""
    files = chart().render(values, name=release, namespace=namespace)
    return {name.removeprefix("tessera/templates/"): text for name, text in files.items() if text.strip()}


def manifests(values: Values, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Manifest]:
    """Every object, the test's pod too. Raises as `render`."""
    texts = (text for name, text in render(values, release, namespace).items() if name.endswith(".yaml"))
    return [manifest for text in texts for manifest in yaml.load_all(text, _Loader) if manifest]


def named(found: list[Manifest], kind: str, suffix: str) -> Manifest:
    """The one object of `kind` whose name ends with `suffix`."""
    (one,) = [manifest for manifest in found if manifest["kind"] == kind and manifest["metadata"]["name"].endswith(suffix)]
    return one


def pods(found: list[Manifest]) -> dict[str, Manifest]:
    """Pod templates (metadata, spec) by component, that of the test among them."""
    templates = [
        manifest if manifest["kind"] == "Pod" else manifest["spec"]["template"]
        for manifest in found
        if manifest["kind"] in ("Pod", "Deployment", "StatefulSet")
    ]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in templates}


def containers(found: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(component, container) of every pod, those that begin it too."""
    for component, template in pods(found).items():
        for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"]):
            yield component, container


def complaints(manifest: Manifest, version: str) -> list[str]:
    """What is wrong with one object for Kubernetes `version`; unknown fields are."""
    where = f"{manifest['kind']} {manifest['metadata']['name']}"
    if (custom := CUSTOM_RESOURCES.get(manifest["kind"])) is not None:
        return [f"{where}: {error.json_path}: {error.message}" for error in Draft7Validator(custom).iter_errors(manifest)]
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{where}, Kubernetes {version}: {error.json_path}: {error.message}"]
    return []
