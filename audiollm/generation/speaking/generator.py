"""A trained DualFFN and a codec that speak, converse and answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from audiollm.codec import Codec, codec_digest, default_codec_folder, load_codec
from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import FeatureShape, PartSize
from audiollm.data.records.sample import Message
from audiollm.data.text.phrases import PhraseLayout
from audiollm.data.text.tokenizer import SPEAKERS_FILE, header_style_of, load_text_tokenizer
from audiollm.devices import default_device
from audiollm.errors import ConfigError
from audiollm.files.json_files import read_json_file
from audiollm.generation.engine.defaults import Defaults, read_defaults, read_trained
from audiollm.generation.engine.engine import GROWTH_POSITIONS, Engine
from audiollm.generation.engine.request import Request
from audiollm.generation.speaking.speech_generator import CODEC_REMEDY, SpeechGenerator
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.frozen.formats import GenerationFormat
from audiollm.models.frozen.shrink import shrink_frozen
from audiollm.models.frozen.stored_folder import has_stored_weights, load_stored_model
from audiollm.models.packed_decoder import GenerationDecoder
from audiollm.models.pretrained import model_folder
from audiollm.models.static_steps import StepKind


class Generator(SpeechGenerator):
    """A trained DualFFN and a codec; the other arguments are those of `SpeechGenerator`."""

    def __init__(
        self,
        model: DualFFN,
        codec: Codec | None,
        template: Template,
        speakers: Sequence[str] = (),
        longest_positions: int | None = None,
        defaults: Defaults | None = None,
        words: Collection[str] | None = None,
        phrase_layout: PhraseLayout | None = None,
    ) -> None:
        super().__init__(codec, speakers, longest_positions, defaults, words, phrase_layout)
        self.model, self.template = model.eval(), template
        self.steps: StepKind = "plain"
        """How the engines of answers compute their steps: see `Engine`."""
        self.decoder = GenerationDecoder(model)
        """Decoder shared by the engines of all answers, so that weights are laid out once."""

    @classmethod
    def from_pretrained(
        cls,
        model: Path | str,
        codec: Path | str | None = None,
        steps: StepKind = "plain",
        dtype: GenerationFormat = "fp32",
    ) -> Generator:
        """Load a model and its codec from their folders (or those of their stages), with the default sampling.

        Args:
            codec: by default `audio_tokenizer` in the model's folder, or the `train_tokenizer` of its run.
            steps: see `Engine`.
            dtype: how its linear layers are held in memory; a folder of `audiollm export --to int8` has its own.

        Raises:
            ConfigError: nothing there, damaged files, a codec or a vocabulary that is not the model's, or `cuda_graph`
                without a CUDA device.
        """
        if steps == "cuda_graph" and default_device().type != "cuda":
            raise ConfigError("'cuda_graph' needs a CUDA device, and there is none", "steps", "take 'plain'")
        folder = model_folder(Path(model))
        defaults, trained = read_defaults(folder), read_trained(folder)
        speakers = folder / SPEAKERS_FILE
        names = [str(name) for name in read_json_file(speakers, list)] if speakers.exists() else []
        if has_stored_weights(folder):
            if dtype != "fp32":
                raise ConfigError("its weights are in fewer bytes already", str(folder), "leave out dtype")
            loaded = load_stored_model(folder).to(default_device())
        else:
            loaded = DualFFN.from_pretrained(folder)
            if dtype != "fp32":
                shrink_frozen(loaded.requires_grad_(False), dtype)
            loaded = loaded.to(default_device())
        config = loaded.config
        codec_folder = Path(codec) if codec is not None else default_codec_folder(folder)
        loaded_codec = None
        if codec_folder.is_dir():
            loaded_codec = _codec_for(config, folder, codec_folder, trained.codec_digest)
        elif codec is not None or config.audio_encoder is None:
            raise ConfigError(f"no codec at {codec_folder}", "codec", CODEC_REMEDY)
        tokenizer = load_text_tokenizer(folder)
        words = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if words > config.vocab_size:
            problem = f"a vocabulary of {words} words, and the model has {config.vocab_size}"
            raise ConfigError(problem, str(folder), "tokenizer.json and the weights must be of one model")
        style = header_style_of(tokenizer)
        template = Template(tokenizer, config.num_codebooks, config.codebook_size - 2, style)
        generator = cls(
            loaded,
            loaded_codec,
            template,
            names,
            trained.longest_positions,
            defaults,
            trained.words or None,
            trained.phrase_layout,
        )
        generator.steps = steps
        return generator

    @property
    def encoder(self) -> FeatureShape | None:
        """See `SpeechGenerator.encoder`."""
        config = self.model.config.audio_encoder
        return None if config is None else config.features

    def engine(self, requests: Sequence[Request]) -> Engine:
        """See `SpeechGenerator.engine`."""
        return Engine.sized_for(self.model, self.template, requests, decoder=self.decoder, steps=self.steps)

    def step_engine(self, slots: int, max_length: int, prefill_positions: int) -> Engine:
        """See `SpeechGenerator.step_engine`; the cache begins short, and grows with the requests."""
        return Engine(
            self.model,
            self.template,
            slots,
            min(GROWTH_POSITIONS, max_length),
            self.decoder,
            grows_to=max_length,
            prefill_positions=prefill_positions,
        )

    def check_messages(self, messages: Sequence[Message], num_recordings: int) -> None:
        """See `SpeechGenerator.check_messages`."""
        self.template.layout(messages, [1] * num_recordings)

    def messages_length(self, messages: Sequence[Message], sizes: Sequence[PartSize]) -> int:
        """See `SpeechGenerator.messages_length`."""
        return self.template.length(messages, sizes)

    def num_tokens(self, text: str) -> int:
        """See `SpeechGenerator.num_tokens`."""
        return len(self.template.tokenizer.encode(text, add_special_tokens=False).ids)


def _codec_for(config: DualFFNConfig, folder: Path, codec_folder: Path, digest: str | None) -> Codec:
    """Load the codec in a folder, and refuse one that is not the model's by shape or by `digest`."""
    codec_path = model_folder(codec_folder)
    try:
        codec = load_codec(codec_path)
    except (RuntimeError, TypeError, ValueError) as error:  # weights and settings that do not match
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the codec cannot be loaded: {reason:.300}", str(codec_path), CODEC_REMEDY
        ) from error
    shapes = (config.num_codebooks, config.codebook_size - 2), (codec.num_codebooks, codec.codebook_size)
    if shapes[0] != shapes[1]:
        (books, codes), (codec_books, codec_codes) = shapes
        problem = f"the codec has {codec_books} codebooks of {codec_codes} codes, the model {folder} {books} of {codes}"
        raise ConfigError(problem, str(codec_path), CODEC_REMEDY)
    if digest is not None and codec_digest(codec) != digest:
        problem = f"another codec than that of the model {folder}: its codes stand for other sounds"
        raise ConfigError(problem, str(codec_path), CODEC_REMEDY)
    return codec
