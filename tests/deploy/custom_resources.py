"""What the Prometheus operator's objects must be like, as far as the chart writes them: their definitions are in no package."""

from typing import Any


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}


_TEXT = {"type": "string"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d))+$"}
_METADATA = _object({"name": _TEXT, "namespace": _TEXT, "labels": _TEXTS})


def _resource(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _object(
        {"apiVersion": {"const": "monitoring.coreos.com/v1"}, "kind": {"const": kind}, "metadata": _METADATA, "spec": spec}
    )


_RELABELING = _object({"targetLabel": {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}, "replacement": _TEXT})
_ENDPOINT = _object({"port": _TEXT, "interval": _DURATION, "relabelings": {"type": "array", "items": _RELABELING}})
_RULE = _object(
    {
        "alert": _TEXT,
        "record": _TEXT,
        "expr": _TEXT,
        "for": _DURATION,
        "keep_firing_for": _DURATION,
        "labels": _TEXTS,
        "annotations": _TEXTS,
    },
    *("alert", "record", "for", "keep_firing_for", "labels", "annotations"),
)
_GROUP = _object({"name": _TEXT, "interval": _DURATION, "rules": {"type": "array", "items": _RULE}}, "interval")

CUSTOM_RESOURCES = {
    "ServiceMonitor": _resource(
        "ServiceMonitor",
        _object(
            {
                "selector": _object({"matchLabels": _TEXTS}),
                "namespaceSelector": _object({"matchNames": {"type": "array", "items": _TEXT}}),
                "endpoints": {"type": "array", "minItems": 1, "items": _ENDPOINT},
            }
        ),
    ),
    "PrometheusRule": _resource("PrometheusRule", _object({"groups": {"type": "array", "minItems": 1, "items": _GROUP}})),
}
"""Schema by kind."""
