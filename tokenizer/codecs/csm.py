"""The codec in a folder of CSM: Mimi, whose weights lie among the model's (`codec_model.`)."""

from __future__ import annotations

from pathlib import Path

from transformers import CsmConfig, MimiModel

from audiollm.errors import ConfigError
from audiollm.files.json_files import read_json_file
from audiollm.files.transformers_folders import model_from_weights
from audiollm.models.pretrained import StoredWeights
from tokenizer.codecs.mimi import MimiCodec

PREFIX = "codec_model."


class CsmCodec(MimiCodec):
    """A `Codec` of the model's folder; encodes and decodes as many codebooks as the model speaks in."""

    @classmethod
    def from_pretrained(cls, folder: Path | str, num_codebooks: int | None = None) -> CsmCodec:
        """Load the codec of a CSM's folder.

        Raises:
            ConfigError: no CSM there, or one without its codec.
        """
        folder = Path(folder)
        config = CsmConfig.from_dict(read_json_file(folder / "config.json", dict))
        weights = StoredWeights(folder)
        names = [name for name in weights.names if name.startswith(PREFIX)]
        if not names:
            raise ConfigError(
                f"no codec among the weights: none is named {PREFIX}...",
                str(folder),
                "download the model again, or give a folder of Mimi as the codec",
            )
        state = {name.removeprefix(PREFIX): weights.read(name) for name in names}
        model = model_from_weights(MimiModel, config.codec_config, state, str(folder))
        return cls(model, num_codebooks or config.num_codebooks)
