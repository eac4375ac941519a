"""What can go wrong in a gateway: one small tree, mapped to statuses by the service."""

from dataclasses import dataclass

INVALID_FIELDS_MAX = 16
"""Most fields named in one refusal; together with bounded texts it keeps the error below gRPC's 8 KiB of metadata."""


@dataclass(frozen=True, slots=True)
class InvalidField:
    """One refused field: its path in the message that was checked, e.g. `sampling.top_p`, and why, for people."""

    field: str
    description: str


class GatewayError(Exception):
    """Base of every expected failure of a gateway."""


class TokenizerError(GatewayError):
    """A model's tokenizer or chat template cannot be loaded; the message names the file, the problem and what to do."""


class TokenizerMismatch(GatewayError):
    """The gateway's tokenizer is not the one the worker serves (FAILED_PRECONDITION)."""


class UnknownModel(GatewayError):
    """No served model has the asked name (NOT_FOUND)."""


class InvalidRequest(GatewayError):
    """The client's input is refused (INVALID_ARGUMENT). `fields` names every refused one, at most INVALID_FIELDS_MAX."""

    def __init__(self, fields: list[InvalidField]) -> None:
        assert fields, "a refusal names at least one field"
        self.fields = tuple(fields[:INVALID_FIELDS_MAX])
        super().__init__("; ".join(f"{item.field}: {item.description}" for item in self.fields))

    def under(self, prefix: str) -> "InvalidRequest":
        """The same, with `prefix` before the path of every field."""
        return InvalidRequest([InvalidField(prefix + item.field, item.description) for item in self.fields])


class ChatTemplateError(GatewayError):
    """The chat template refused these messages or failed on them; the message is the template's own."""


class RenderedTooLong(ChatTemplateError):
    """The chat template made more of them than the model can take."""


class OutputGap(GatewayError):
    """An output starts or ends beyond the tokens held: some were lost on the way. Ends its own request only (INTERNAL)."""
