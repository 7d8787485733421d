"""The family of the DualFFN: ours, Higgs Audio V2 in transformers' or Boson's files, and plain language models that
begin one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from audiollm.errors import ConfigError
from audiollm.families.dual_ffn.limits import MAX_SLOTS
from audiollm.families.family import ModelFolder, PackedFamily, PolicySettings

if TYPE_CHECKING:
    from audiollm.data.inspection import StreamRow
    from audiollm.data.records.source import LoadedSample
    from audiollm.families.answering import AnsweringModel
    from audiollm.families.dual_ffn.interpreting import DualFFNInterpreter
    from audiollm.families.dual_ffn.policy import DualFFNPolicy
    from audiollm.families.packed_training import PackedTraining
    from audiollm.generation.speaking.generator import Generator
    from audiollm.models.frozen.formats import SmallFormat
    from audiollm.train.supervised_settings import TrainConfig


class DualFFNFolder:
    """A `ModelFolder` of a DualFFN, or of a plain Llama or Qwen that is read as one."""

    has_likelihoods = True
    shares_prompt = True
    rollout_slots = MAX_SLOTS

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def speaks(self) -> bool:
        """See `ModelFolder.speaks`; a plain language model learns to speak in a training first."""
        return not self._is_language_model

    def policy(self, settings: PolicySettings) -> DualFFNPolicy:
        """See `ModelFolder.policy`."""
        from audiollm.families.dual_ffn.policy import DualFFNPolicy

        if settings.pictures is not None:
            raise ConfigError(
                "pictures: a DualFFN sees none", str(self.path), "leave it out, or give a model that sees"
            )
        return DualFFNPolicy.load(
            self.path,
            settings.trained,
            settings.lora,
            reference=settings.reference,
            needs_reference=settings.needs_reference,
            max_tokens=settings.max_tokens,
        )

    def answering_model(self, codec: Path | None = None) -> AnsweringModel:
        """See `ModelFolder.answering_model`."""
        from audiollm.codec import default_codec_folder
        from audiollm.families.dual_ffn.answering import DualFFNAnswers
        from audiollm.files.atomic import folder_digest
        from audiollm.models.pretrained import model_folder

        generator = self._text_generator() if self._is_language_model else self.generator(codec)
        place = codec or default_codec_folder(self.path)
        codec_digest = folder_digest(model_folder(place)) if place.is_dir() else None
        return DualFFNAnswers(generator, self.path, f"{folder_digest(self.path)} {codec_digest}")

    def generator(self, codec: Path | None = None) -> Generator:
        """See `ModelFolder.generator`."""
        from audiollm.generation.speaking.generator import Generator

        if self._is_language_model:
            raise ConfigError(
                "a plain language model answers in words alone", str(self.path), "train it to speak: `train`"
            )
        return Generator.from_pretrained(self.path, codec)

    def small_generator(self, codec: Path | None, dtype: SmallFormat) -> Generator:
        """See `SmallGeneratorFolder.small_generator`."""
        from audiollm.generation.speaking.generator import Generator

        return Generator.from_pretrained(self.path, codec, dtype=dtype)

    def interpreter(self, codec: Path | None = None) -> DualFFNInterpreter:
        """See `InterpreterFolder.interpreter`."""
        from audiollm.families.dual_ffn.interpreting import DualFFNInterpreter

        return DualFFNInterpreter(self.generator(codec))

    def sample_rows(self, loaded: LoadedSample, answers: Sequence[int], place: str) -> list[list[StreamRow]]:
        """See `ModelFolder.sample_rows`; codes are those of the first encoding."""
        from audiollm.data.inspection import stream_rows
        from audiollm.families.dual_ffn.start import start_template
        from audiollm.families.dual_ffn.streams import encode_contents
        from audiollm.families.prompts import prompted_contents
        from audiollm.models.audio_encoder import frozen_features
        from audiollm.models.hub import read_config
        from audiollm.models.layouts import config_of

        encoder = (
            None
            if self._is_language_model
            else config_of(read_config(self.path), str(self.path)).audio_encoder
        )
        features = None if encoder is None else frozen_features(encoder, self.path)
        template, contents = (
            start_template(self.path),
            prompted_contents(loaded, loaded, answers, place, features),
        )
        return [
            stream_rows(template, stream) for stream in encode_contents(template, contents, features, 2**31)
        ]

    def _text_generator(self) -> Generator:
        """Return a language model that answers in words."""
        from audiollm.devices import default_device
        from audiollm.families.dual_ffn.start import start_model, start_template
        from audiollm.generation.speaking.generator import Generator

        template = start_template(self.path)
        model = start_model(self.path, template).to(default_device())
        return Generator(model, None, template)

    @property
    def _is_language_model(self) -> bool:
        from audiollm.models.hub import is_language_model

        return is_language_model(self.path)


class DualFFNFamily:
    """A `PackedFamily`."""

    def open(self, folder: Path) -> ModelFolder:
        """See `ModelFamily.open`."""
        return DualFFNFolder(folder)

    def packed_training(self, config: TrainConfig) -> PackedTraining:
        """See `PackedFamily.packed_training`."""
        from audiollm.families.dual_ffn.training import DualFFNTraining

        return DualFFNTraining(config)


FAMILY: PackedFamily = DualFFNFamily()
