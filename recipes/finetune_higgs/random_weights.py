"""Writes what tiny.yaml reads: the two folders of Higgs Audio V2 by transformers' own classes, tiny and at random.

    python recipes/finetune_higgs/random_weights.py FOLDER

makes FOLDER/model (HiggsAudioV2ForConditionalGeneration and a vocabulary) and FOLDER/tokenizer
(HiggsAudioV2TokenizerModel: 25 Hz, 8 codebooks of 1,024, as published).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import (
    DacConfig,
    HiggsAudioV2Config,
    HiggsAudioV2ForConditionalGeneration,
    HiggsAudioV2TokenizerConfig,
    HiggsAudioV2TokenizerModel,
    HubertConfig,
    PreTrainedTokenizerFast,
)

from audiollm.data.chat.tasks import load_tasks
from audiollm.data.text.tokenizer import AUDIO_DELAY, train_text_tokenizer

CODES, BOOKS = 1024, 8


def write_model(folder: Path, hidden_size: int = 64, num_layers: int = 2) -> None:
    """A generation model, with a vocabulary learned from the tasks' prompts."""
    prompts = [
        text for task in load_tasks().values() for chat in task.phrasings for m in chat for text in m.values()
    ]
    words = train_text_tokenizer(prompts, 500)
    token = words.token_to_id
    config = HiggsAudioV2Config(
        vocab_size=words.get_vocab_size(),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        num_codebooks=BOOKS,
        codebook_size=CODES + 2,
        audio_token_id=token("<|AUDIO_OUT|>"),
        audio_bos_token_id=token("<|audio_out_bos|>"),
        audio_delay_token_id=token(AUDIO_DELAY),
        pad_token_id=token("<|end_of_text|>"),
        bos_token_id=token("<|begin_of_text|>"),
        eos_token_id=token("<|eot_id|>"),
        audio_stream_bos_id=CODES,
        audio_stream_eos_id=CODES + 1,
    )
    HiggsAudioV2ForConditionalGeneration(config, use_text_head=True).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of narrow layers; only its codes are of the published shape."""
    model = HiggsAudioV2TokenizerModel(
        HiggsAudioV2TokenizerConfig(
            target_bandwidths=[0.5, 1, 1.5, 2],
            codebook_size=CODES,
            codebook_dim=8,
            acoustic_model_config=DacConfig(
                encoder_hidden_size=4,
                downsampling_ratios=[8, 5, 4, 2, 3],
                decoder_hidden_size=64,
                upsampling_ratios=[8, 5, 4, 2, 3],
                hidden_size=16,
            ),
            semantic_model_config=HubertConfig(
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=4,
                intermediate_size=48,
                conv_dim=[16] * 7,
                num_conv_pos_embeddings=16,
                num_conv_pos_embedding_groups=4,
            ),
        )
    )
    for quantizer in model.quantizer.quantizers:
        quantizer.codebook.embed.normal_()  # transformers leaves them at 0: all codes would be the same
    model.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(0)
    write_model(Path(sys.argv[1]) / "model")
    write_tokenizer(Path(sys.argv[1]) / "tokenizer")
    print(f"wrote {sys.argv[1]}/model and {sys.argv[1]}/tokenizer")
