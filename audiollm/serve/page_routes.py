"""The page at `/`: try each address in a browser, hear the answers, copy the command."""

# no `from __future__ import annotations`: FastAPI reads the types

from collections.abc import Callable
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

PAGE_FILES = {
    "/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript"),
}  # fmt: skip
"""Path -> file and media type. None of them needs the key, which the page asks for."""
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; media-src blob:"
"""What the page may load: its own files, and the sound that it was sent."""


def add_page_routes(router: APIRouter) -> None:
    """Add the routes."""
    for path, (name, media_type) in PAGE_FILES.items():
        content = files("audiollm.serve").joinpath("page", name).read_bytes()
        router.add_api_route(path, _page_endpoint(content, media_type), include_in_schema=False)


def _page_endpoint(content: bytes, media_type: str) -> Callable[[], Response]:
    """Its parameters would be fields of the request: it has none."""

    def page() -> Response:
        return Response(content, media_type=media_type, headers={"Content-Security-Policy": POLICY})

    return page
