"""tessera.v1.AdminService: passes what operators ask on to the leading scheduler."""

from typing import Any

import structlog
from google.protobuf.message import Message

from services.gateway.session import SchedulerSession
from services.rpc.caller import current_principal
from services.rpc.errors import InvalidArgument, NotFound
from services.scheduler.convert_admin import answer_to_proto, command_from_proto
from services.worker.convert import MalformedMessage
from tessera.v1 import admin_pb2, admin_pb2_grpc
from tessera.values.admin import GetStats, ListRequests, NoSuch

_log = structlog.get_logger()

SERVICE_NAME: str = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Every call waits `scheduler_wait_s` for a scheduler, then is UNAVAILABLE. Who may call is the server's to say."""

    def __init__(self, session: SchedulerSession, scheduler_wait_s: float) -> None:
        self._session = session
        self._scheduler_wait_s = scheduler_wait_s

    async def GetStats(self, request: Any, context: Any) -> Any:
        """What the group does, and how it is."""
        return await self._ask(request)

    async def ListRequests(self, request: Any, context: Any) -> Any:
        """Requests that wait or run."""
        return await self._ask(request)

    async def AbortRequests(self, request: Any, context: Any) -> Any:
        """One of them, or those of a principal."""
        return await self._ask(request)

    async def ResetPrefixCache(self, request: Any, context: Any) -> Any:
        """What no request holds."""
        return await self._ask(request)

    async def PauseAdmission(self, request: Any, context: Any) -> Any:
        """No new requests."""
        return await self._ask(request)

    async def ResumeAdmission(self, request: Any, context: Any) -> Any:
        """New requests again."""
        return await self._ask(request)

    async def DrainWorker(self, request: Any, context: Any) -> Any:
        """A worker is to be empty."""
        return await self._ask(request)

    async def UndrainWorker(self, request: Any, context: Any) -> Any:
        """It takes requests again."""
        return await self._ask(request)

    async def _ask(self, request: Message) -> Message:
        try:
            command = command_from_proto(request)
        except MalformedMessage as error:
            raise InvalidArgument.of(error) from error
        answer = await self._session.administer(command, self._scheduler_wait_s)
        if not isinstance(command, GetStats | ListRequests):
            _log.info("administration", principal=current_principal(), command=type(command).__name__)
        if isinstance(answer, NoSuch):
            raise NotFound(f"{answer.field}: {answer.text}", reason="NOT_FOUND", metadata={"field": answer.field})
        return answer_to_proto(answer)
