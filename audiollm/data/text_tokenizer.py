"""The text side of the vocabulary: byte-level BPE with the special tokens of Llama 3 and Higgs Audio V2."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from audiollm.config import ConfigError

BEGIN_OF_TEXT = "<|begin_of_text|>"
START_HEADER = "<|start_header_id|>"
END_HEADER = "<|end_header_id|>"
END_OF_TURN = "<|eot_id|>"
PAD = "<|end_of_text|>"
AUDIO_BOS = "<|audio_bos|>"
AUDIO_EOS = "<|audio_eos|>"
AUDIO_OUT_BOS = "<|audio_out_bos|>"
AUDIO_IN = "<|AUDIO|>"
AUDIO_OUT = "<|AUDIO_OUT|>"
SPECIAL_TOKENS = (
    BEGIN_OF_TEXT,
    PAD,
    START_HEADER,
    END_HEADER,
    END_OF_TURN,
    AUDIO_BOS,
    AUDIO_EOS,
    AUDIO_OUT_BOS,
    AUDIO_IN,
    AUDIO_OUT,
)
FILE_NAME = "tokenizer.json"
SPEAKERS_FILE = "speakers.json"
"""Beside it: the speaker names of the training data."""


def train_text_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE from the training texts; every text, of any script, can be written with it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_text_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in a model's folder.

    Raises:
        ConfigError: none there, or one without the special tokens.
    """
    path = folder / FILE_NAME
    if not path.exists():
        raise ConfigError(
            f"no {FILE_NAME} in this model's folder", str(folder), "give a trained model's folder"
        )
    tokenizer = Tokenizer.from_file(str(path))
    missing = [token for token in SPECIAL_TOKENS if tokenizer.token_to_id(token) is None]
    if missing:
        raise ConfigError(f"the vocabulary lacks {missing[0]}", str(path), "add the special tokens first")
    return tokenizer
