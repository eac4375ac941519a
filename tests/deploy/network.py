"""Who reaches whom by the NetworkPolicies of a rendered chart, as a cluster that enforces them would have it."""

from collections.abc import Mapping
from typing import Any

from tests.deploy.rendered import Manifest, pods

Labels = Mapping[str, str]


class Network:
    """The chart's pods and `strangers` (labels by name) in one namespace."""

    def __init__(self, found: list[Manifest], strangers: Mapping[str, Labels]) -> None:
        templates = pods(found)
        self._labels: dict[str, Labels] = {
            **{component: template["metadata"]["labels"] for component, template in templates.items()},
            **strangers,
        }
        self._ports = {
            component: {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0].get("ports", ())}
            for component, template in templates.items()
        }
        self._policies = [manifest["spec"] for manifest in found if manifest["kind"] == "NetworkPolicy"]

    def connections(self) -> set[tuple[str, str, str]]:
        """(from, to, name of the port) of all that are let through, but health, which the node's own kubelet asks."""
        return {
            (source, target, name)
            for source in self._labels
            for target, ports in self._ports.items()
            for name, port in ports.items()
            if name != "health" and self._leaves(source, target, port) and self._enters(source, target, name, port)
        }

    def reaches_outside(self, source: str, port: int) -> bool:
        """Whether `source` may connect to `port` of anything anywhere."""
        return any(
            _has_port(rule, "", port) and "to" not in rule
            for policy in self._policies_of(source)
            for rule in policy.get("egress", ())
        )

    def _policies_of(self, pod: str) -> list[Any]:
        return [policy for policy in self._policies if _selects(policy["podSelector"], self._labels[pod])]

    def _leaves(self, source: str, target: str, port: int) -> bool:
        policies = self._policies_of(source)
        return not policies or any(
            _has_port(rule, "", port) and self._is_peer(rule.get("to"), target)
            for policy in policies
            for rule in policy.get("egress", ())
        )

    def _enters(self, source: str, target: str, name: str, port: int) -> bool:
        policies = self._policies_of(target)
        return not policies or any(
            _has_port(rule, name, port) and self._is_peer(rule.get("from"), source)
            for policy in policies
            for rule in policy.get("ingress", ())
        )

    def _is_peer(self, peers: list[Any] | None, pod: str) -> bool:
        """All pods here are of one namespace, which any selector of namespaces is taken to find."""
        if peers is None:
            return True
        return any(_selects(peer.get("podSelector", {}), self._labels[pod]) for peer in peers if "ipBlock" not in peer)


def _has_port(rule: Any, name: str, port: int) -> bool:
    return "ports" not in rule or any(item["port"] in (name, port) for item in rule["ports"])


def _selects(selector: Any, labels: Labels) -> bool:
    assert "matchExpressions" not in selector, "not needed so far"
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
