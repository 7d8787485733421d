"""Errors in OpenAI's form: a status, a sentence with the remedy, and the field that it is about."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from audiollm.audio import AudioError
from audiollm.errors import ConfigError

RETRY_AFTER_S = 1
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP; 4xx: the request can be mended.
        message: what is wrong, and what to do about it.
        field: of the request.
        code: for programs.
        retry_after_s: after how many seconds the same request may succeed; 0: it will not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers of HTTP."""
        return {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else {}

    def body(self) -> bytes:
        """OpenAI's form of an error, as JSON in ASCII."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return json.dumps({"error": error}).encode()


def as_api_error(error: BaseException, fields: Mapping[str, str] | None = None) -> ApiError:
    """Translate the errors of the models; what nobody foresaw is a 500 that tells nothing of the inside.

    Args:
        fields: names of the request's fields by the places that `ConfigError` knows.
    """
    # not at the top: they import torch, and servers without a model refuse requests, too
    from audiollm.families.answering import AnswerError
    from audiollm.generation.service.service import ServiceFull

    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServiceFull):
        return ApiError(429, f"{error}: ask again later", None, "queue_full", RETRY_AFTER_S)
    if isinstance(error, ConfigError):
        field = (fields or {}).get(error.where, error.where or None)
        message = f"{error.message}: {error.remedy}" if error.remedy else error.message
        return ApiError(400, message, field)
    if isinstance(error, AnswerError):
        return ApiError(400, error.reason, "messages")
    if isinstance(error, AudioError):
        return ApiError(400, f"the recording cannot be read ({error.reason}): give a sound file", "file")
    return ApiError(500, "the server failed at this request; its log says why", None, "internal_error")


def as_validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Name the first field that is wrong in a body.

    Args:
        problems: as pydantic tells them.
    """
    problem = problems[0]
    place = [str(key) for key in problem["loc"] if key != "body"]
    field = ".".join(place) or "body"
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"{field}: this server does not know it: leave it out", field, "unknown_field")
    message = str(problem["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{field}: {message}", field)
