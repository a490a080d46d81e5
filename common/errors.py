"""Errors that a user or a peer can cause.

    TandemError
    ├── InvalidRequestError        400  a field is missing, of the wrong type or out of range
    │   ├── ContextLengthError     400  prompt (and answer) exceed the context; names both numbers
    │   └── RequestTooLargeError   413  a body over the documented cap
    ├── ModelNotFoundError         404
    ├── OverloadedError            429  no room now; carries `retry_after_seconds`
    ├── UnavailableError           503  no node can serve this now
    ├── ConfigError                a flag, file or environment value is wrong (process start)
    ├── CheckpointError            a model file is missing, corrupt or unsupported
    ├── GrammarError               an answer cannot go on as its grammar demands
    └── PeerError                  a peer broke the protocol, refused or went silent

Each message names the offending value and the limit. Asserts are for our own invariants only.
"""

from __future__ import annotations


class TandemError(Exception):
    """Root of the tree. `status` is the HTTP status and `code` the OpenAI error code a client sees."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(TandemError):
    status = 400
    code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class RequestTooLargeError(InvalidRequestError):
    status = 413
    code = "request_too_large"


class ModelNotFoundError(TandemError):
    status = 404
    code = "model_not_found"


class OverloadedError(TandemError):
    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class UnavailableError(TandemError):
    status = 503
    code = "service_unavailable"


class ConfigError(TandemError):
    code = "invalid_config"


class CheckpointError(TandemError):
    code = "invalid_checkpoint"


class GrammarError(TandemError):
    """No token may follow, an output does not match, or a limit on the grammar's cost was met."""

    code = "grammar_error"


class PeerError(TandemError):
    """A peer broke the protocol, refused or went silent."""

    code = "peer_error"
