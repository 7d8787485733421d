"""A model that hears, of any family, as a recognizer: it is asked to write down what is said.

Shapes: C channels, N samples.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from audiollm.audio import Waveform
from audiollm.data.records.text_origin import DIGEST_CHARACTERS
from audiollm.errors import ConfigError
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.families.answering import AnswerError, AnswerRequest
from audiollm.families.registry import open_model_folder
from audiollm.files.atomic import folder_digest
from audiollm.models.audio_llms.inputs import MIN_RECORDING_S, Turn

REQUEST = "Transcribe the speech."
"""One of the phrasings of the task `asr`."""
_MAX_TOKENS = 256


class ListeningModelRecognizer:
    """A trained model as a recognizer, greedy.

    Args:
        source: folder of a model that was trained on the task `asr`, of any family that hears; its run's, too.

    Raises:
        ConfigError: no model there, or one that takes no recordings.
    """

    def __init__(self, source: str | Path) -> None:
        opened = open_model_folder(Path(source))
        self.folder = opened.path
        self.digest = folder_digest(self.folder)[:DIGEST_CHARACTERS]
        """By which trainings and annotations know its weights."""
        self._model = opened.answering_model()
        self.name = self._model.name
        if not self._model.hears:
            raise ConfigError(
                f"model={source}: this model takes no recordings", "recognizer", "give one that hears"
            )

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        """The transcript, as the model writes it; empty for a clip that is too short to be heard.

        Raises:
            MetricError: the model cannot take the clip: it is longer than its context, for example.
        """
        if samples_CN.shape[1] < MIN_RECORDING_S * sample_rate:
            return ""
        turns: list[Turn] = [("user", [Waveform(samples_CN, sample_rate), REQUEST])]
        try:
            (answer,) = self._model.answer([AnswerRequest(turns, max_tokens=_MAX_TOKENS)])
        except AnswerError as error:
            raise MetricError(error.reason) from error
        return answer.text
