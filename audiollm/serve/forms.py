"""Forms with recordings (`multipart/form-data`), checked as bodies of JSON are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from audiollm.serve.bodies import ServeBody
from audiollm.serve.errors import ApiError, as_validation_error

Fields = TypeVar("Fields", bound=ServeBody)
MAX_FIELDS = 32


async def read_form(
    request: Request, kind: type[Fields], file_names: Sequence[str]
) -> tuple[Fields, dict[str, bytes]]:
    """Read a form's fields, and the content of its files.

    Args:
        file_names: fields that are files; each has to be there.

    Raises:
        ApiError: no form, a field that is wrong or not known, or a file that is missing or empty.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.startswith(("multipart/form-data", "application/x-www-form-urlencoded")):
        raise ApiError(
            400, "the body is no form: send multipart/form-data with the recording as a file", "body"
        )
    try:
        form = await request.form(max_files=len(file_names), max_fields=MAX_FIELDS)
    except HTTPException as error:
        raise ApiError(400, f"the form cannot be read ({error.detail}): send it again", "body") from error
    async with _closing(form):
        values: dict[str, Any] = {}
        files: dict[str, bytes] = {}
        for name, value in form.multi_items():
            if name in file_names:
                if not isinstance(value, UploadFile):
                    raise ApiError(400, f"{name}: is text: send it as a file with a name", name)
                files[name] = await value.read()
            elif isinstance(value, UploadFile):
                raise ApiError(
                    400, f"{name}: this server takes no such file: leave it out", name, "unknown_field"
                )
            elif name.endswith("[]"):
                values.setdefault(name[:-2], []).append(value)
            else:
                values[name] = value
    for name in file_names:
        if not files.get(name):
            raise ApiError(400, f"{name}: there is no recording: send it as a file of the form", name)
    try:
        return kind.model_validate(values), files
    except ValidationError as error:
        raise as_validation_error(error.errors(include_url=False)) from error


def form_description(kind: type[ServeBody], file_names: Sequence[str]) -> dict[str, Any]:
    """What OpenAPI says of a form, for `openapi_extra` of its route."""
    schema = kind.model_json_schema()
    files = {name: {"type": "string", "format": "binary"} for name in file_names}
    schema["properties"] = {**files, **schema["properties"]}
    schema["required"] = [*file_names, *schema.get("required", ())]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


class _closing:
    def __init__(self, form: Any) -> None:
        self._form = form

    async def __aenter__(self) -> Any:
        return self._form

    async def __aexit__(self, *error: object) -> None:
        await self._form.close()
