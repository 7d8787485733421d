"""The codec in a folder of Higgs Audio v3 TTS: Higgs Audio V2's, whose weights lie among the model's."""

from __future__ import annotations

from pathlib import Path

import torch

from audiollm.errors import ConfigError
from audiollm.models.pretrained import StoredWeights, model_folder
from tokenizer.higgs.loading import assign, merge_weight_norm, published_config
from tokenizer.higgs.model import HiggsTokenizer

PREFIX = "tied.embedding.modality_embeddings.0.model."


class HiggsV3Codec(HiggsTokenizer):
    """A `Codec` of the model's folder. The files have no config of it: it is the published one."""

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> HiggsV3Codec:
        """Load the codec of a model's folder.

        Raises:
            ConfigError: no codec among the weights, or another than the published one.
        """
        folder = model_folder(Path(folder))
        weights = StoredWeights(folder)
        names = [name for name in weights.names if name.startswith(PREFIX)]
        if not names:
            raise ConfigError(
                f"no codec among the weights: none is named {PREFIX}...",
                str(folder),
                "download the model again, or give the folder of Higgs Audio V2's tokenizer as the codec",
            )
        state = merge_weight_norm({name.removeprefix(PREFIX): weights.read(name) for name in names})
        with torch.device("meta"):
            codec = cls(published_config())
        assign(codec, state, str(folder))
        return codec.eval()
