"""Recognizers with random weights, saved as their makers save them, and segments to hear."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from audiollm.audio import save
from pipelines.annotate.recognizers.choice import RecognizerChoice, make_recognizer
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.steps.step import Listener, Value

KEYS = {"text", "language", "language_probability", "words", "confidence", "mean_log_probability"}
KEYS |= {"no_speech_probability", "compression_ratio"}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ'"


def segment(
    folder: Path,
    seconds: float = 1.0,
    seed: int = 0,
    given: RecordingMetadata = RecordingMetadata(),  # noqa: B008  immutable
    values: Mapping[str, Value] | None = None,
) -> Segment:
    """Noise that grows and fades."""
    path = folder / f"{seed}_{seconds:g}.wav"
    count = int(16_000 * seconds)
    noise_N = np.random.default_rng(seed).normal(0, 0.1, count) * np.sin(np.linspace(0, 9 * seconds, count))
    save(path, torch.from_numpy(noise_N).float()[None], 16_000)
    return Segment(str(path), 0.0, seconds, "speech", None, given, values or {}, Listener(str(path)))


def ctc_folder(folder: Path, tells_padding: bool = True, letters: str = LETTERS) -> Path:
    """A wav2vec2 that writes letters; one of layer norms takes padding, one of group norms does not."""
    from transformers import Wav2Vec2Config, Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

    folder.mkdir(parents=True)
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", "|", *letters]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(vocabulary)}))
    Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    Wav2Vec2FeatureExtractor(return_attention_mask=tells_padding).save_pretrained(folder)
    torch.manual_seed(1)
    config = Wav2Vec2Config(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        conv_dim=(16, 16, 16), conv_kernel=(10, 8, 4), conv_stride=(8, 8, 5), num_feat_extract_layers=3,
        feat_extract_norm="layer" if tells_padding else "group", num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, pad_token_id=0, do_stable_layer_norm=tells_padding,
    )  # fmt: skip
    model = Wav2Vec2ForCTC(config)
    model.lm_head.weight.data *= 20  # else one token is the likeliest everywhere
    model.lm_head.bias.data[1:4], model.lm_head.bias.data[4] = -1000.0, 5.0  # no special tokens; many words
    model.save_pretrained(folder)
    return folder


def whisper_folder(folder: Path) -> Path:
    """A Whisper of few languages that writes words of a few letters."""
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizer,
    )
    from transformers.models.whisper.tokenization_whisper import LANGUAGES as ALL

    folder.mkdir(parents=True)
    tokenizer = WhisperTokenizer(vocab={token: index for index, token in enumerate(_bytes())}, merges=[])
    languages = [f"<|{name}|>" for name in list(ALL)[:99]]
    marks = ["<|endoftext|>", "<|startoftranscript|>", *languages, "<|translate|>", "<|transcribe|>"]
    marks += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    marks += [f"<|{0.02 * step:.2f}|>" for step in range(1501)]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    ids = tokenizer.get_vocab()
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    torch.manual_seed(2)
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=len(tokenizer), num_mel_bins=80, d_model=64, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
            max_target_positions=448, **special,
        )
    )  # fmt: skip
    spoken = [ids[token] for token in ["Ġ", *"abcdefgh"]]
    embedding_VD = model.model.decoder.embed_tokens.weight.data
    others = torch.ones(len(embedding_VD), dtype=torch.bool)
    others[spoken] = False
    embedding_VD[others] *= 0.1
    embedding_VD[~others] *= 10
    model.generation_config = GenerationConfig(
        is_multilingual=True, lang_to_id={name: ids[name] for name in languages},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"], alignment_heads=[[1, 0]], max_length=40, suppress_tokens=[],
        begin_suppress_tokens=[end], max_initial_timestamp_index=50, **special,
    )  # fmt: skip
    model.save_pretrained(folder)
    return folder


def _bytes() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def made(**settings: Any) -> Any:
    """The step of settings as a recipe has them, after the way to a worker."""
    step = make_recognizer(TypeAdapter(RecognizerChoice).validate_python(settings))
    assert step.missing() is None
    travelled = pickle.loads(pickle.dumps(step))  # noqa: S301  what the engine does before setup
    travelled.setup()
    return travelled


def check(value: dict[str, Any], duration_s: float) -> None:
    assert set(value) - {"acoustic_fit"} == KEYS and json.loads(json.dumps(value, allow_nan=False)) == value
    for word in value["words"]:
        assert set(word) == {"word", "start_s", "end_s", "confidence"}
        assert word["start_s"] is None or 0 <= word["start_s"] <= word["end_s"] <= duration_s + 1e-3
        assert word["confidence"] is None or 0 <= word["confidence"] <= 1
