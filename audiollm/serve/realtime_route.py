"""`/v1/realtime`: a conversation by voice over a websocket, in OpenAI's events."""

# no `from __future__ import annotations`: FastAPI reads the types

from fastapi import APIRouter, WebSocket

from audiollm.serve.app_state import AppState
from audiollm.serve.errors import ApiError
from audiollm.serve.realtime_session import REALTIME_PATH, RealtimeSession
from audiollm.serve.socket_sessions import answer_in_order


def add_realtime_route(router: APIRouter, state: AppState) -> None:
    """Add the route."""

    @router.websocket(REALTIME_PATH)
    async def realtime(socket: WebSocket, model: str = "") -> None:
        await socket.accept(subprotocol="realtime" if "realtime" in socket.scope["subprotocols"] else None)
        session = RealtimeSession(state, socket)
        try:
            await session.begin(model)
            await answer_in_order(session.read, session.answer)
        except ApiError as error:
            await session.refuse(error)
            await socket.close()
        except (ConnectionError, TimeoutError, RuntimeError):
            return  # the client has left, or reads nothing
        finally:
            await session.end()
