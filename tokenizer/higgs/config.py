"""The shape of a Higgs tokenizer: the configuration of transformers, and the published values of it."""

from __future__ import annotations

from transformers import DacConfig, HiggsAudioV2TokenizerConfig, HubertConfig

MODEL_TYPE = "higgs_audio_v2_tokenizer"


def published_config(teacher: HubertConfig | None = None) -> HiggsAudioV2TokenizerConfig:
    """The published shape, with another HuBERT where one is given.

    24 kHz at 25 frames a second, 8 codebooks of 1024, 2 kbps, 200 M parameters with the teacher.

    The defaults of transformers' class are another codec: 75 frames a second, 5 codebooks.
    """
    return HiggsAudioV2TokenizerConfig(
        target_bandwidths=[0.5, 1, 1.5, 2],
        acoustic_model_config=DacConfig(
            encoder_hidden_size=64,
            downsampling_ratios=[8, 5, 4, 2, 3],
            decoder_hidden_size=1024,
            upsampling_ratios=[8, 5, 4, 2, 3],
            hidden_size=256,
        ),
        semantic_model_config=teacher or HubertConfig(mask_time_prob=0.0),
    )
