"""Why a role cannot begin to serve."""


class BindError(Exception):
    """The address cannot be listened on, or not be told; the message names it."""
