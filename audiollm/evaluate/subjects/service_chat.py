"""A local model that several threads ask at once: a service computes the answers side by side."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

from audiollm.evaluate.subjects.chat import ChatError
from audiollm.families.answering import AnsweringModel, AnswerRequest
from audiollm.families.answering_engine import words_engine
from audiollm.generation.service.jobs import Done, Failed, Progress
from audiollm.generation.service.service import GenerationService
from audiollm.generation.speaking.plans import Ask, Plan
from audiollm.models.audio_llms.inputs import Turn

_SLOTS, _MAX_LENGTH, _PREFILL_POSITIONS = 4, 8192, 512
_CHECK_S = 0.1
"""Seconds between two checks whether an answer is still wanted."""


class ServiceChat:
    """A model that answers in words, greedy; the answers to several threads side by side where its class allows it.

    Args:
        service: carries the answers out; it is its owner's to close, once no thread waits for an answer.
    """

    def __init__(self, model: AnsweringModel, max_tokens: int, service: GenerationService) -> None:
        self._name, self._max_tokens, self._service = model.name, max_tokens, service
        self._lane = service.add_engine(lambda: words_engine(model, _SLOTS, _MAX_LENGTH, _PREFILL_POSITIONS))

    def go_on(self, turns: Sequence[Turn], check_stop: Callable[[], None] = lambda: None) -> str:
        """Return the assistant's next turn.

        Args:
            check_stop: called several times a second; what it raises ends the answer before its next token.

        Raises:
            ChatError: there is no answer.
            ServiceFull: the service has as many jobs as it takes.
        """
        request = AnswerRequest(turns, max_tokens=self._max_tokens)
        ended: queue.SimpleQueue[Progress] = queue.SimpleQueue()
        job = self._service.submit(self._lane, lambda emit: _words_plan(request), ended.put)
        try:
            progress = None
            while progress is None:
                check_stop()
                try:
                    progress = ended.get(timeout=_CHECK_S)
                except queue.Empty:
                    continue
        finally:
            self._service.cancel(self._lane, job)
        if isinstance(progress, Failed):
            raise ChatError(f"{self._name}: {progress.error}") from progress.error
        assert isinstance(progress, Done)
        return str(progress.result)


def _words_plan(request: AnswerRequest) -> Plan[str]:
    (answer,) = yield Ask([request])
    return answer.text.strip()
