"""`tessera health`: what one process says of its health, as an exit status. For probes of containers, and for people."""

import sys
from typing import Any, NoReturn

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.exit_status import FAILED, REFUSED, UNREACHABLE
from services.cli.gateway_access import given_tls, tls_options
from services.cli.up_config import DEFAULT_LISTEN
from tessera.client.connection import open_channel, split_addresses


@click.command("health", short_help="Ask one process how it is.")
@click.argument("address", default=DEFAULT_LISTEN, envvar="TESSERA_HEALTH_ADDRESS")
@tls_options
@click.option(
    "--service", default="", metavar="NAME", help="Whether this service can do its work. Empty: whether the process answers."
)
@click.option(
    "--timeout-s", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True, help="Give up after so long."
)
def command(address: str, **options: Any) -> None:
    """Ask the process at ADDRESS (a gateway, scheduler or worker; TESSERA_HEALTH_ADDRESS, else 127.0.0.1:50051) how it is, by grpc.health.v1.

    Of several addresses, with commas between them, the first where somebody answers counts. Where a process speaks TLS and wants
    certificates, its --health-listen is an address without them.

    \b
    Examples:
      tessera health 127.0.0.1:50053
      tessera health 127.0.0.1:50051 --service tessera.v1.InferenceService
      tessera health 127.0.0.1:50052 --service durable

    \b
    Exit status: 0 SERVING; 1 NOT_SERVING; 2 it was refused (bad option, unknown service); 3 nobody answers.
    """
    tls, request = given_tls(options), health_pb2.HealthCheckRequest(service=options["service"])
    failures = []
    for target in split_addresses(address):
        try:
            with open_channel(target, tls) as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=options["timeout_s"])
        except grpc.RpcError as error:
            failures.append(f"{target}: {error.details()} ({error.code().name})")
            if error.code() is grpc.StatusCode.NOT_FOUND:
                _fail(failures[-1:], REFUSED)
        else:
            click.echo(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
            sys.exit(0 if answer.status == health_pb2.HealthCheckResponse.SERVING else FAILED)
    _fail(failures, UNREACHABLE)


def _fail(failures: list[str], status: int) -> NoReturn:
    for failure in failures:
        click.echo(f"Error: {failure}", err=True)
    sys.exit(status)
