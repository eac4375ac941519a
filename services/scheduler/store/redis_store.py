"""The store in Redis: one script call per call, on one connection for the journal and one for the lease. The scripts say how the keys are laid out."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from services.scheduler.core.block_map import BlockPage
from services.scheduler.core.folded_log import read_back
from services.scheduler.core.journal_call import (
    Append,
    Applied,
    BeginRewrite,
    EndRewrite,
    Failed,
    FoldedRequest,
    Gap,
    Generation,
    JournalCall,
    JournalReply,
    OlderEpoch,
    RewriteChunk,
)
from services.scheduler.core.record import StoredState
from services.scheduler.store import scripts
from services.scheduler.store.journal_codec import (
    REQUEST_TAG,
    SUBMISSION_TAG,
    log_from_bytes,
    log_to_bytes,
    page_from_field,
    page_to_field,
    request_from_bytes,
    request_to_bytes,
    submission_from_bytes,
    submission_to_bytes,
)
from services.scheduler.store.port import (
    JOURNAL_FORMAT,
    EpochMoved,
    EpochTaken,
    LeaseView,
    LookReply,
    ReadReply,
    Released,
    ReleaseReply,
    Renewed,
    RenewReply,
    StoredJournal,
    TakeReply,
    WrongFormat,
)
from services.scheduler.store.redis_address import RedisAddress, read_address
from services.scheduler.store.resp_connection import ConnectionLost, ErrorReply, RespConnection
from services.worker.convert import MalformedMessage
from tessera.values.identity import Epoch
from tessera.values.request import Submission

CALL_TIMEOUT_S = 1.0
"""Most time for one command; after it the connection is closed and the answer is `Failed`."""

SCAN_COUNT = 250
LOG_ENTRIES_PER_READ = 64
"""How much one command of `read` may ask for: a large state must not stop the server for everyone."""

_World = (ConnectionLost, ErrorReply)
_KINDS = ("log", "requests", "blocks")
_TYPES = {b"meta": b"hash", b"lease": b"string", b"log": b"list", b"requests": b"hash", b"blocks": b"hash"}


class _Line:
    """Scripts over the same `keys`, on one connection. Connects by itself, at the first command and again after each failure."""

    def __init__(self, address: RedisAddress, timeout_s: float, keys: list[bytes]) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self.keys = keys
        self._connection: RespConnection | None = None

    async def command(self, *args: bytes | str | int) -> Any:
        """The reply to one command. Raises ErrorReply and ConnectionLost."""
        if self._connection is None or self._connection.is_lost:
            self._connection = await self._address.connect(self._timeout_s)
        try:
            return await self._connection.command(*args)
        except ErrorReply as error:
            if "READONLY" in str(error):  # a master no more: ask again where it is
                self.close()
            raise

    async def run(self, script: str, args: Sequence[bytes | int]) -> list[Any]:
        """Run a script by its digest; send its text where the server does not know it (restarted, failed over)."""
        reply: list[Any]
        try:
            reply = await self.command("EVALSHA", _sha(script), len(self.keys), *self.keys, *args)
        except ErrorReply as error:
            if not str(error).startswith("NOSCRIPT"):
                raise await self.named(error) from error
            reply = await self.command("EVAL", script, len(self.keys), *self.keys, *args)
        return reply

    async def named(self, error: ErrorReply) -> ErrorReply:
        """`error`, and where some key holds another type than ours, which one; redis does not say it."""
        if "WRONGTYPE" not in str(error):
            return error
        wrong = []
        for key in self.keys:
            found, own = await self.command("TYPE", key), _TYPES[key.rpartition(b":")[2]]
            if found not in (own, b"none"):
                wrong.append(f"{key.decode()} is a {found.decode()}, not the {own.decode()} of a scheduler group")
        return ErrorReply(f"{error} ({'; '.join(wrong)}: give --group another name, or delete the key)")

    @property
    def connection(self) -> RespConnection:
        """That of the last command. It raises ConnectionLost for ever once it is lost."""
        assert self._connection is not None, "no command was sent"
        return self._connection

    def close(self) -> None:
        """Give up the connection."""
        if self._connection is not None:
            self._connection.close()


class RedisStore:
    """`Store` in Redis or Valkey. Connects by itself, at the first call and again after each failure. An answer takes at most five times
    `timeout_s`: to find the server, connect, see its role, try, and send a script that the server does not know. `read` sends many commands.

    `url` is what `read_address` reads (a malformed one is a ConfigError); `group` names the keys; `password_file` holds the server's password.
    """

    def __init__(self, url: str, group: str, timeout_s: float = CALL_TIMEOUT_S, *, password_file: Path | None = None) -> None:
        address = read_address(url, password_file)
        prefix = f"tessera:{{{group}}}"
        meta = f"{prefix}:meta".encode()
        self._sides = {side: [f"{prefix}:{side}:{kind}".encode() for kind in _KINDS] for side in ("a", "b")}
        self._journal = _Line(address, timeout_s, [meta, *self._sides["a"], *self._sides["b"]])
        self._lease = _Line(address, timeout_s, [meta, f"{prefix}:lease".encode()])

    async def look(self) -> LookReply:
        """See `Store`."""
        try:
            reply = await self._lease.run(scripts.LOOK, [])
        except _World as error:
            return _failed(error)
        match reply[0]:
            case b"format":
                return _wrong_format(reply)
            case _:
                return LeaseView(_epoch(reply), is_held=reply[3] == 1, is_empty=reply[4] == 0)

    async def take_epoch(self, expected: Epoch, new: Epoch, lease_ms: int) -> TakeReply:
        """See `Store`."""
        assert new.supersedes(expected), "a taken epoch is above the one before"
        args: list[bytes | int] = [expected.number, expected.instance, new.number, new.instance, lease_ms]
        try:
            reply = await self._lease.run(scripts.TAKE, args)
        except _World as error:
            return _failed(error)
        match reply[0]:
            case b"format":
                return _wrong_format(reply)
            case b"moved":
                return EpochMoved(_epoch(reply))
            case _:
                return EpochTaken()

    async def renew(self, epoch: Epoch, lease_ms: int) -> RenewReply:
        """See `Store`."""
        reply = await self._run_fenced(scripts.RENEW, [epoch.number, epoch.instance, lease_ms])
        return Renewed() if isinstance(reply, list) else reply

    async def release(self, epoch: Epoch) -> ReleaseReply:
        """See `Store`."""
        reply = await self._run_fenced(scripts.RELEASE, [epoch.number, epoch.instance])
        return Released() if isinstance(reply, list) else reply

    async def call(self, epoch: Epoch, call: JournalCall) -> JournalReply:
        """See `Store`."""
        script, args = _encode(call)
        fence: list[bytes | int] = [epoch.number, epoch.instance, call.generation.epoch_number, call.generation.counter]
        try:
            reply = await self._journal.run(script, [*fence, *args])
        except _World as error:
            return _failed(error)
        match reply[0]:
            case b"ok":
                return Applied(int(reply[1]))
            case b"gap":
                return Gap(int(reply[1]))
            case b"older":
                return OlderEpoch(_epoch(reply))
            case b"format":
                return Failed(_wrong_format(reply).why)
            case _:
                return Failed(reply[1].decode())

    async def read(self, epoch: Epoch) -> ReadReply:
        """See `Store`."""
        try:
            reply = await self._journal.run(scripts.READ, [epoch.number, epoch.instance])
            match reply[0]:
                case b"older":
                    return OlderEpoch(_epoch(reply))
                case b"format":
                    return _wrong_format(reply)
                case b"empty":
                    return StoredJournal(None, StoredState())
            _, side, number, counter, last = reply
            # On this connection alone: another could lead to a server that was restarted meanwhile, or to another one.
            state = await self._read_side(self._journal.connection, side.decode(), int(last))
            if await self._journal.run(scripts.READ, [epoch.number, epoch.instance]) != reply:
                return Failed("the journal changed while it was read")
        except ErrorReply as error:
            return _failed(await self._journal.named(error))
        except (ConnectionLost, MalformedMessage, DecodeError) as error:
            return _failed(error)
        return StoredJournal(Generation(int(number), int(counter)), state)

    async def close(self) -> None:
        """See `Store`."""
        self._journal.close()
        self._lease.close()

    async def _run_fenced(self, script: str, args: list[bytes | int]) -> list[Any] | OlderEpoch | Failed:
        try:
            reply = await self._lease.run(script, args)
        except _World as error:
            return _failed(error)
        match reply[0]:
            case b"older":
                return OlderEpoch(_epoch(reply))
            case b"format":
                return Failed(_wrong_format(reply).why)
            case _:
                return reply

    async def _read_side(self, connection: RespConnection, side: str, last: int) -> StoredState:
        log_key, requests_key, blocks_key = self._sides[side]
        log: list[bytes] = []
        while entries := await connection.command("LRANGE", log_key, len(log), len(log) + LOG_ENTRIES_PER_READ - 1):
            log.extend(entries)
        fields = await _scan(connection, requests_key)
        submissions = {key[1:]: submission_from_bytes(data) for key, data in fields.items() if key[:1] == SUBMISSION_TAG}
        folded: dict[bytes, FoldedRequest] = {}
        for key, data in fields.items():
            if key[:1] == REQUEST_TAG:
                if key[1:] not in submissions:
                    raise MalformedMessage(f"stored request {key[1:].hex()} has no submission")
                folded[key[1:]] = request_from_bytes(data, submissions[key[1:]])
        pages = [page_from_field(field, data) for field, data in (await _scan(connection, blocks_key)).items()]
        return read_back(last, log_from_bytes(log), folded, pages)


async def _scan(connection: RespConnection, key: bytes) -> dict[bytes, bytes]:
    """All fields of a hash, a bounded number at a time."""
    fields: dict[bytes, bytes] = {}
    cursor = b"0"
    while True:
        cursor, page = await connection.command("HSCAN", key, cursor, "COUNT", SCAN_COUNT)
        fields.update(zip(page[::2], page[1::2], strict=True))
        if cursor == b"0":
            return fields


_SHAS: dict[str, str] = {}


def _sha(script: str) -> str:
    if script not in _SHAS:
        _SHAS[script] = hashlib.sha1(script.encode()).hexdigest()
    return _SHAS[script]


def _epoch(reply: list[Any]) -> Epoch:
    return Epoch(int(reply[1]), reply[2])


def _wrong_format(reply: list[Any]) -> WrongFormat:
    return WrongFormat(reply[1].decode(errors="replace"), JOURNAL_FORMAT)


def _failed(error: Exception) -> Failed:
    return Failed(f"{type(error).__name__}: {error}")


def _encode(call: JournalCall) -> tuple[str, list[bytes | int]]:
    """The script of `call`, and its arguments after the generation."""
    match call:
        case Append():
            log = [log_to_bytes(entry) for entry in call.log]
            deleted = [tag + request_id for request_id in call.forgotten for tag in (SUBMISSION_TAG, REQUEST_TAG)]
            lists = [log, _request_fields(call.submissions, call.requests), deleted, _page_fields(call.pages)]
            return scripts.APPEND, [call.first, call.log_from, *_counted(lists)]
        case BeginRewrite():
            return scripts.BEGIN, []
        case RewriteChunk():
            submissions = [folded.request.submission for folded in call.requests]
            lists = [_request_fields(submissions, call.requests), _page_fields(call.pages)]
            return scripts.CHUNK, _counted(lists)
        case EndRewrite():
            return scripts.END, [call.last]


def _counted(lists: Iterable[list[bytes]]) -> list[bytes | int]:
    args: list[bytes | int] = []
    for values in lists:
        args.append(len(values))
        args.extend(values)
    return args


def _request_fields(submissions: Iterable[Submission], requests: Iterable[FoldedRequest]) -> list[bytes]:
    fields = []
    for submission in submissions:
        fields += [SUBMISSION_TAG + submission.request_id, submission_to_bytes(submission)]
    for folded in requests:
        fields += [REQUEST_TAG + folded.request_id, request_to_bytes(folded)]
    return fields


def _page_fields(pages: Iterable[BlockPage]) -> list[bytes]:
    return [part for page in pages for part in page_to_field(page)]
