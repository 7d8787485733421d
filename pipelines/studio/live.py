"""Talks that are interpreted while they come in: the page sends pieces of sound, and gets what the model says.

Shapes: N samples.
"""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from audiollm.interpret.live.live_model import LiveModel
from pipelines.studio.limits import StudioRefusal

_MOST_SESSIONS = 4
_LONGEST_PIECE_S = 5.0
_LONGEST_TALK_S = 4 * 3600.0
QUIET_S = 60.0
"""Seconds without a piece of sound after which a talk's window counts as closed."""


@dataclass
class _Talk:
    owner: str
    session: Any
    last_s: float
    """When its last piece came, on the desk's clock."""
    heard_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class LiveDesk:
    """The talks that a loaded model of streams listens to, one piece of sound at a time.

    They do not wait in the queue of `SoundService`: a talk goes on while a sound is made.

    Args:
        clock: seconds.
        quiet_s: seconds without a piece of sound after which a talk's window counts as closed; its memory is freed
            within as many again.
    """

    def __init__(
        self, model: LiveModel, clock: Callable[[], float] = time.monotonic, quiet_s: float = QUIET_S
    ) -> None:
        self._model = model
        self._clock, self._quiet_s = clock, quiet_s
        self._talks: dict[str, _Talk] = {}
        self._timer: threading.Timer | None = None
        self._guard, self._one_at_a_time = threading.Lock(), threading.Lock()

    @property
    def sample_rate(self) -> int:
        return self._model.sample_rate

    def begin(self, owner: str) -> str:
        """Begin a talk, and return its name; an older one of the same person ends, and those whose window was closed.

        Raises:
            StudioRefusal: too many people talk at once.
        """
        with self._guard:
            self._drop_quiet()
            self._talks = {name: talk for name, talk in self._talks.items() if talk.owner != owner}
            if len(self._talks) >= _MOST_SESSIONS:
                raise StudioRefusal(
                    f"{_MOST_SESSIONS} talks are interpreted already: wait until one ends.", 429
                )
            name = secrets.token_hex(8)
            self._talks[name] = _Talk(owner, self._model.session(), self._clock())
            if self._timer is None:
                self._start_timer()
        return name

    def hear(self, owner: str, name: str, content: bytes) -> list[dict[str, Any]]:
        """Hear float32 samples `[N]` at `sample_rate`; what the model said meanwhile.

        Raises:
            StudioRefusal: no such talk, or no piece of sound.
        """
        talk = self._talk(owner, name)
        samples_N = np.frombuffer(content[: len(content) // 4 * 4], "<f4").copy()
        if not len(samples_N) or len(content) % 4 or not np.isfinite(samples_N).all():
            raise StudioRefusal("The piece of sound is damaged: begin the talk anew.")
        if len(samples_N) > _LONGEST_PIECE_S * self.sample_rate or talk.heard_s > _LONGEST_TALK_S:
            raise StudioRefusal("The talk is too long: begin it anew.", 413)
        with talk.lock, self._one_at_a_time:
            self._talk(owner, name)  # it may have ended while this piece waited
            talk.heard_s += len(samples_N) / self.sample_rate
            events = _speech_events(talk.session.hear(torch.from_numpy(samples_N)[None].clamp(-1, 1)))
            talk.last_s = self._clock()
        return events

    def finish(self, owner: str, name: str) -> list[dict[str, Any]]:
        """End a talk; what the model still says."""
        talk = self._talk(owner, name)
        with talk.lock, self._one_at_a_time:
            with self._guard:
                ended = self._talks.pop(name, None)
            return _speech_events(talk.session.finish()) if ended is talk else []

    def _drop_quiet(self) -> None:
        """Let go of the talks whose windows were closed."""
        since_s = self._clock() - self._quiet_s
        self._talks = {
            name: talk for name, talk in self._talks.items() if talk.last_s > since_s or talk.lock.locked()
        }

    def _start_timer(self) -> None:
        """Look for closed windows later: else the last talk stays in memory until somebody begins another."""
        self._timer = threading.Timer(self._quiet_s, self._look_for_closed)
        self._timer.daemon = True
        self._timer.start()

    def _look_for_closed(self) -> None:
        with self._guard:
            self._drop_quiet()
            self._timer = None
            if self._talks:
                self._start_timer()

    def _talk(self, owner: str, name: str) -> _Talk:
        talk = self._talks.get(name)
        if talk is None or talk.owner != owner:
            raise StudioRefusal("This talk has ended: begin it anew.", 404)
        return talk


# Private


def _speech_events(actions: Any) -> list[dict[str, Any]]:
    return [
        {
            "heard_s": round(action.heard_s, 2),
            "lag_s": round(action.elapsed_s - action.heard_s, 2),
            "text": action.text.strip() or "(speech)",
            "speech": _pcm16(action.samples_1N),
        }
        for action in actions
        if action.speaks
    ]


def _pcm16(samples_1N: torch.Tensor) -> str:
    """Base64 of 16-bit samples; empty where nothing is spoken."""
    whole_N = (samples_1N[0].clamp(-1, 1) * 32767).round().to(torch.int16).numpy()
    return base64.b64encode(whole_N.astype("<i2").tobytes()).decode()
