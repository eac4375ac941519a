"""Bearer tokens: who holds which, from a file of lines

    TOKEN PRINCIPAL ROLE[,ROLE...]        # for example: 9f8c...  team-a  public,admin

TOKEN is the token itself, or `sha256:` and the 64 hexadecimal digits of its SHA-256, so that the file need not be a secret. A `#` that begins a
word begins a comment. Several tokens may have one principal, as while one is replaced by the next.
"""

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

from services.rpc.watched_files import stamp_of
from tessera.values.config import ConfigError

_log = structlog.get_logger()

TOKEN_CHARS_MIN = 16
"""A shorter token can be guessed."""

PRINCIPAL_CHARS_MAX = 128

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


class Role(StrEnum):
    """What a caller may do; none of them includes another."""

    PUBLIC = "public"  # the inference APIs
    ADMIN = "admin"  # administration, at a gateway
    INTERNAL = "internal"  # what the processes of the system ask of each other


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: `principal` owns request ids, cached prefixes and shares of the load; it holds no space."""

    principal: str
    roles: frozenset[Role]


class TokenFile:
    """The tokens of a file, read again when it changes; one that cannot be used leaves those of before."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where the file cannot be read or has a line that is none."""
        self._path = path
        self._stamp = stamp_of((path,))
        self._callers = _read(path)

    def caller_of(self, token: str) -> Caller | None:
        """Who holds `token`. Found by its digest: how long that takes says nothing of any token."""
        stamp = stamp_of((self._path,))
        if stamp != self._stamp:
            self._stamp = stamp
            self._read_again()
        return self._callers.get(hashlib.sha256(token.encode(errors="surrogateescape")).digest())

    def _read_again(self) -> None:
        try:
            self._callers = _read(self._path)
        except ConfigError as error:
            _log.error("new tokens cannot be used; the old ones stay", error=str(error))
        else:
            _log.info("tokens read again", file=str(self._path), tokens=len(self._callers))


def _read(path: Path) -> dict[bytes, Caller]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tokens {path} cannot be read: {error}") from error
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].split()
        if not words:
            continue
        try:
            digest, caller = _entry(words)
        except ValueError as error:
            raise ConfigError(f"tokens {path}, line {number}: {error}") from error
        if digest in callers:
            raise ConfigError(f"tokens {path}, line {number}: the token is there twice")
        callers[digest] = caller
    return callers


def _entry(words: list[str]) -> tuple[bytes, Caller]:
    """One line. Raises ValueError, without the token in its text: that goes to logs."""
    if len(words) != 3:
        raise ValueError(f"must be TOKEN PRINCIPAL ROLES, has {len(words)} words")
    token, principal, names = words
    if len(principal) > PRINCIPAL_CHARS_MAX:
        raise ValueError(f"the principal has {len(principal)} characters; at most {PRINCIPAL_CHARS_MAX} are taken")
    unknown = set(names.split(",")) - set(Role)
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))!r} is no role; there are {', '.join(Role)}")
    return _digest_of(token), Caller(principal, frozenset(Role(name) for name in names.split(",")))


def _digest_of(token: str) -> bytes:
    if token.startswith("sha256:"):
        found = _DIGEST.fullmatch(token)
        if found is None:
            raise ValueError("sha256: must be followed by 64 hexadecimal digits")
        return bytes.fromhex(found[1])
    if len(token) < TOKEN_CHARS_MIN:
        raise ValueError(f"the token has {len(token)} characters; it must have {TOKEN_CHARS_MIN} or more")
    return hashlib.sha256(token.encode()).digest()
