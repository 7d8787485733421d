"""Layouts of a DualFFN on disk: config.json and key names of those that can be loaded and saved.

`higgs_audio_v2` is transformers' `HiggsAudioV2ForConditionalGeneration`; `audiollm_dual_ffn` has the same field and
key names and holds what that class cannot; `higgs_audio` is Boson's release (boson-ai/higgs-audio,
configuration_higgs_audio.py; the mapping is that of transformers' convert_higgs_audio_v2_to_hf.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from tokenizers import Tokenizer

from audiollm.data.text import tokenizer as tokens
from audiollm.errors import ConfigError, suggestion
from audiollm.files.json_files import REMEDY
from audiollm.models.attention import RopeScaling
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.decoder import DualFFNConfig

Values = Mapping[str, Any]

HIGGS, OURS, BOSON = "higgs_audio_v2", "audiollm_dual_ffn", "higgs_audio"
LANGUAGE_MODELS = ("llama", "qwen2", "qwen3")
DELAY_TOKENS = (tokens.AUDIO_DELAY, tokens.AUDIO_IN)
"""Placeholder of the last, delayed rows in transformers; vocabularies of before it was added have the other one.

Never the id of `<|AUDIO_OUT|>`: by this token transformers' `generate` tells that speech is ending.
"""
SPECIAL_IDS = {
    "audio_token_id": (tokens.AUDIO_OUT,),
    "audio_bos_token_id": (tokens.AUDIO_OUT_BOS,),
    "audio_delay_token_id": DELAY_TOKENS,
    "audio_in_token_id": (tokens.AUDIO_IN,),
    "bos_token_id": (tokens.BEGIN_OF_TEXT,),
    "eos_token_id": (tokens.END_OF_TURN, "<|im_end|>"),
    "pad_token_id": (tokens.PAD, "<|endoftext|>"),
}
"""Candidate tokens of each id field; the first that the vocabulary has is taken."""
PUBLISHED_IDS = {
    "audio_token_id": 128016,
    "audio_bos_token_id": 128013,
    "audio_delay_token_id": 128014,
    "audio_in_token_id": 128015,
    "bos_token_id": 1,
    "eos_token_id": 128009,
    "pad_token_id": 128001,
}
PUBLISHED_VOCABULARY = 128_256
_NAMES = {
    "vocab_size": "vocab_size",
    "num_codebooks": "num_codebooks",
    "codebook_size": "codebook_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}
"""Field names of `DualFFNConfig`, and their names in config.json."""
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
}
"""Fields of config.json with the same value in every DualFFN."""
_OPTIONAL = (
    "sliding_window",
    "sliding_window_layers",
    "audio_ffn_layers",
    "qkv_bias",
    "qk_norm",
    "audio_encoder",
)
"""Fields of `DualFFNConfig` that transformers' class lacks."""
_KEYS = (
    (re.compile(r"^audio_codebook_embeddings\."), "model.embed_audio_tokens.embed_audio_tokens."),
    (re.compile(r"^(embed_tokens|layers|norm)\."), r"model.\1."),
    (re.compile(r"^audio_decoder_proj\."), ""),
    (re.compile(r"\.(embedding|linear)_(frozen|trainable)\.weight$"), ".weight"),
)
_NO_WEIGHTS = re.compile(r"rotary_emb\.(original_)?inv_freq$|audio_codebook_weights$|audio_tokens_offsets$")


def transformers_config(config: DualFFNConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Build the content of config.json, for transformers' Higgs class wherever it can hold the model.

    Args:
        tokenizer: gives the ids of the special tokens; without one they are those of the published vocabulary, if
            the model's is as large, or -1 (no position is then taken for audio).
    """
    higgs = fits_higgs(config)
    data: dict[str, Any] = {
        "architectures": [
            "HiggsAudioV2ForConditionalGeneration" if higgs else "DualFFNForConditionalGeneration"
        ],
        "model_type": HIGGS if higgs else OURS,
        **{name: getattr(config, ours) for ours, name in _NAMES.items()},
        "rope_parameters": _rope_parameters(config),
        "dropout": config.dropout,
        **_FIXED,
        **special_ids(tokenizer, config.vocab_size),
        "audio_stream_bos_id": config.codebook_size - 2,
        "audio_stream_eos_id": config.codebook_size - 1,
    }
    if not higgs:
        values = asdict(config)
        data |= {name: values[name] for name in _OPTIONAL if name in values}
    return data


def fits_higgs(config: DualFFNConfig) -> bool:
    """Return whether transformers' `HiggsAudioV2ForConditionalGeneration` can hold the model."""
    every = config.audio_ffn_layers is None or len(set(config.audio_ffn_layers)) == config.num_layers
    unsupported = [name for name in _OPTIONAL if name != "audio_ffn_layers" and getattr(config, name, None)]
    return every and not unsupported and config.hidden_size % config.num_heads == 0


def special_ids(tokenizer: Tokenizer | None, vocab_size: int) -> dict[str, int | None]:
    """The ids of special tokens by the names of their fields in config.json."""
    if tokenizer is None:
        if vocab_size >= PUBLISHED_VOCABULARY:
            return dict(PUBLISHED_IDS)
        return {name: -1 if name.startswith("audio_") else None for name in SPECIAL_IDS}
    ids: dict[str, int | None] = {}
    for name, words in SPECIAL_IDS.items():
        token_ids = [place for word in words if (place := tokenizer.token_to_id(word)) is not None]
        ids[name] = token_ids[0] if token_ids else -1 if name.startswith("audio_") else None
    return ids


def delay_token(tokenizer: Tokenizer) -> str:
    """The token whose id is config.json's `audio_delay_token_id`. Raises: ValueError: the vocabulary has none."""
    for token in DELAY_TOKENS:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise ValueError(f"the vocabulary has none of {', '.join(DELAY_TOKENS)}")


def config_of(data: Values, where: str) -> DualFFNConfig:
    """The shape of the model that a config.json describes.

    Raises:
        ConfigError: another kind of model, one with parts that a DualFFN does not have, or values that cannot be.
    """
    try:
        config = _config_of(data, where)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:  # of whatever is missing or of another type
        message = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"invalid model config: {message}", where, REMEDY) from error
    _check_config_sizes(config, where)
    return config


def _config_of(data: Values, where: str) -> DualFFNConfig:
    kind = data.get("model_type")
    if kind == OURS and "num_layers" in data:
        return _as_first_written(data, where)
    if kind == OURS:
        optional_fields = {name: _frozen(data[name]) for name in _OPTIONAL if data.get(name) is not None}
        return _config_from_fields(data, where, dropout=data.get("dropout", 0.0), **optional_fields)
    if kind == HIGGS:
        return _config_from_fields(_with_defaults(data), where, dropout=data.get("dropout", 0.0))
    if kind == BOSON:
        return _boson(data, where)
    if kind in LANGUAGE_MODELS:
        raise ConfigError(
            f"model_type: {kind!r} is a language model without an audio part",
            where,
            "begin a training from it with `start`, or load it with DualFFN.from_language_model",
        )
    supported = ", ".join((HIGGS, OURS, BOSON))
    raise ConfigError(
        f"model_type: {kind!r} is none of {supported}", where, "give the folder of another model"
    )


def language_model_config(
    data: Values, where: str, num_codebooks: int, codebook_size: int, audio_ffn_layers: Iterable[int] | None
) -> DualFFNConfig:
    """The shape of the DualFFN that is built on a language model.

    Raises:
        ConfigError: not Llama, Qwen2 or Qwen3, or a variant that a DualFFN does not have.
    """
    kind = data.get("model_type")
    if kind not in LANGUAGE_MODELS:
        supported = ", ".join(LANGUAGE_MODELS)
        raise ConfigError(
            f"model_type: {kind!r} is none of {supported}", where, "give such a language model's folder"
        )
    from transformers import CONFIG_MAPPING

    full = CONFIG_MAPPING[str(kind)].from_dict(dict(data)).to_dict()
    full["head_dim"] = full.get("head_dim") or full["hidden_size"] // full["num_attention_heads"]
    layer_types = full.get("layer_types") or []
    windowed = tuple(n for n, kind in enumerate(layer_types) if kind == "sliding_attention")
    try:
        return _config_from_fields(
            {**full, "num_codebooks": num_codebooks, "codebook_size": codebook_size},
            where,
            sliding_window=full["sliding_window"] if windowed else None,
            sliding_window_layers=windowed if windowed and len(windowed) < len(layer_types) else None,
            audio_ffn_layers=None if audio_ffn_layers is None else tuple(sorted(set(audio_ffn_layers))),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )
    except ValueError as error:  # layers that are not there
        raise ConfigError(str(error), where, f"it has {full['num_hidden_layers']} layers") from error


def own_key(key: str) -> str | None:
    """A key of Boson's layout or of transformers' as it is called here; None for what is no weight."""
    if _NO_WEIGHTS.search(key):
        return None
    for pattern, replacement in _KEYS:
        key = pattern.sub(replacement, key)
    return key


def _check_config_sizes(config: DualFFNConfig, where: str) -> None:
    """Raises: ConfigError: a size that is none, or sizes that do not go together."""
    for ours, name in _NAMES.items():
        value = getattr(config, ours)
        kinds = (int, float) if ours == "norm_eps" else (int,)
        if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
            kind = "positive number" if ours == "norm_eps" else "positive whole number"
            raise ConfigError(f"{name}: {value!r} is no {kind}", where, REMEDY)
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ConfigError(
            f"{config.num_heads} heads of {config.head_dim} cannot share {config.num_kv_heads} for keys and values",
            where,
            REMEDY,
        )


def _rope_parameters(config: DualFFNConfig) -> dict[str, Any]:
    if config.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {"rope_type": "llama3", "rope_theta": config.rope_theta, **asdict(config.rope_scaling)}


def _config_from_fields(data: Values, where: str, **extra_fields: Any) -> DualFFNConfig:
    """Build a `DualFFNConfig` from fields as transformers names them."""
    for name, expected in _FIXED.items():
        if name in ("hidden_act", "attention_bias", "mlp_bias") and data.get(name, expected) != expected:
            raise ConfigError(
                f"{name}: {data[name]!r}, a DualFFN has {expected!r}", where, "give another model"
            )
    missing = sorted(name for name in _NAMES.values() if data.get(name) is None)
    if missing:
        raise ConfigError(f"{', '.join(missing)}: not given", where, "download the model's config.json again")
    theta, scaling = _rope(data, where)
    shape = {ours: data[name] for ours, name in _NAMES.items()}
    return DualFFNConfig(**shape, rope_theta=theta, rope_scaling=scaling, **extra_fields)


def _rope(data: Values, where: str) -> tuple[float, RopeScaling | None]:
    """Read the rotary settings from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"rope_type: {kind!r} {rope}, a DualFFN rotates whole heads by default or llama3", where,
            "give another model",
        )  # fmt: skip
    theta = float(rope.get("rope_theta") or data.get("rope_theta") or 10_000.0)
    if kind == "default":
        return theta, None
    return theta, RopeScaling(**{field.name: rope[field.name] for field in fields(RopeScaling)})


def _with_defaults(data: Values) -> Values:
    """transformers leaves fields out that are as in its class."""
    if {*_NAMES.values(), "rope_parameters"} <= data.keys():
        return data
    from transformers import HiggsAudioV2Config

    return {**HiggsAudioV2Config().to_dict(), **data}


def _boson(data: Values, where: str) -> DualFFNConfig:
    """Read the config of Boson's release, whose decoder is a Llama in `text_config`."""
    from transformers import LlamaConfig

    text = LlamaConfig.from_dict(data.get("text_config") or {}).to_dict()
    layers, every = data.get("audio_dual_ffn_layers"), tuple(range(text["num_hidden_layers"]))
    kind = data.get("audio_adapter_type", "stack")
    audio_layers = tuple(sorted(set(layers or ())))
    if kind == "stack" or (kind == "dual_ffn_fast_forward" and audio_layers != every):
        raise ConfigError(
            f"audio_adapter_type: {kind!r}, in which audio skips layers or has layers of its own", where,
            "only `dual_ffn`, or fast forward with an audio feed-forward in every layer, is a DualFFN",
        )  # fmt: skip
    unsupported = (
        "audio_embed_avg", "use_audio_out_embed_projector", "use_audio_out_self_attention", "use_rq_transformer",
        "audio_decoder_proj_num_layers",
    )  # fmt: skip
    for name in unsupported:
        if data.get(name):
            raise ConfigError(
                f"{name}: {data[name]!r}, which a DualFFN does not have", where, "give another model"
            )
    codes = {
        "num_codebooks": data.get("audio_num_codebooks", 12),
        "codebook_size": data.get("audio_codebook_size", 1024) + 2,
    }
    return _config_from_fields(
        {**text, **codes},
        where,
        audio_ffn_layers=None if audio_layers == every else audio_layers,
        audio_encoder=None if data.get("skip_audio_tower") else _boson_encoder(data),
    )


def _boson_encoder(data: Values) -> AudioEncoderConfig:
    """The Whisper of its understanding variant; what is padding is not attended to (`_apply_audio_tower`)."""
    defaults = {
        "d_model": 1280,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
    }
    encoder_data = data.get("audio_encoder_config") or {}
    shape = {name: encoder_data.get(name, value) for name, value in defaults.items()}
    return AudioEncoderConfig(**shape, stride=2, reduction="mean")


def _as_first_written(data: Values, where: str) -> DualFFNConfig:
    """Read the config of older folders of ours, whose field names are those of the dataclass."""
    field_names = [field.name for field in fields(DualFFNConfig)]
    shape = {key: _frozen(value) for key, value in data.items() if key != "model_type"}
    for key in shape:
        if key not in field_names:
            raise ConfigError(f"{key}: no such setting of {OURS}", where, suggestion(key, field_names))
    return DualFFNConfig(**shape)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
