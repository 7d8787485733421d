"""A model of streams that stays loaded: the command `interpret` and the studio open their sessions on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from audiollm.data.hearing.features import SAMPLE_RATE
from audiollm.data.records.sample import Message, TextPart
from audiollm.errors import ConfigError
from audiollm.families.interpreting import InterpretingModel
from audiollm.families.registry import load_interpreter
from audiollm.generation.engine.defaults import read_trained
from audiollm.interpret.live.live_session import LiveOptions, LiveSession
from audiollm.models.pretrained import model_folder
from audiollm.recipe.stages import required


@dataclass(frozen=True)
class LiveModel:
    """A loaded model with the chunks and the system message of its training streams.

    Sessions share its weights. Their calls of the model must not overlap: who has several takes turns.
    """

    model: InterpretingModel
    chunk_frames: int
    messages: tuple[Message, ...] = ()
    speaks: bool = False
    """Whether the model was trained to speak: asked for text alone, it writes nonsense."""

    @classmethod
    def load(
        cls, model: Path, codec: Path | None = None, chunk_s: float | None = None, prompt: str | None = None
    ) -> LiveModel:
        """Load a model and its codec.

        Args:
            codec: by default the run's own train_tokenizer.
            chunk_s: seconds of a chunk; None: as in the training.
            prompt: the system message; None: that of the training streams.

        Raises:
            ConfigError: it cannot be loaded, was not trained on streams, or a chunk is no whole number of frames.
        """
        trained = read_trained(model_folder(model))
        frames = trained.chunk_frames
        if frames is None and chunk_s is None:
            raise ConfigError(
                "the model was not trained on streams (trained.json has no chunk_frames)",
                str(model),
                "train it on streams (recipes/interpret); `audiollm interpret --chunk-s` tries it all the same",
            )
        interpreter = load_interpreter(model, codec)
        if chunk_s is not None:
            frames = _frames_of_chunk(chunk_s, _frame_rate(interpreter))
        system_prompt = prompt if prompt is not None else trained.stream_prompt
        messages = (Message(role="system", content=[TextPart(text=system_prompt)]),) if system_prompt else ()
        return cls(interpreter, required(frames), messages, bool(trained.stream_speaks))

    @property
    def sample_rate(self) -> int:
        """Samples per second that a session hears."""
        return SAMPLE_RATE if self.model.encoder is not None else int(self.model.codec.sample_rate)

    @property
    def frame_rate(self) -> float:
        """Code frames, or rows of features, per second."""
        return _frame_rate(self.model)

    def options(self) -> LiveOptions:
        """How a session on this model listens and writes; `dataclasses.replace` changes it."""
        return LiveOptions(self.chunk_frames, self.messages, "any" if self.speaks else "text")

    def session(self, options: LiveOptions | None = None) -> LiveSession:
        """Begin a stream.

        Raises:
            ConfigError: the codec cannot hear in pieces, or the prefix does not fit.
        """
        return LiveSession(self.model, options or self.options())


# Private


def _frame_rate(model: InterpretingModel) -> float:
    return float(model.codec.frame_rate) if model.encoder is None else model.encoder.rows_per_second


def _frames_of_chunk(chunk_s: float, frame_rate: float) -> int:
    """Return the code frames, or rows of features, of a chunk.

    Raises:
        ConfigError: they are no whole number.
    """
    frames = round(chunk_s * frame_rate)
    if frames < 1 or abs(frames - chunk_s * frame_rate) > 1e-6:
        raise ConfigError(
            f"{chunk_s:g} s are not whole frames", "--chunk-s", f"give a multiple of {1 / frame_rate:g}"
        )
    return frames
