"""The files by which transformers' `AutoProcessor` makes a prompt for an exported model: tokenizer, template, codec.

Written for models that transformers' `HiggsAudioV2ForConditionalGeneration` can hold; the processor's class is its
`HiggsAudioV2Processor` (transformers, models/higgs_audio_v2/processing_higgs_audio_v2.py). Servers such as vLLM-Omni
load it too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from audiollm.codec import FRAME_SAMPLES, SAMPLE_RATE
from audiollm.data.text import tokenizer as tokens
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json, write_text
from audiollm.files.json_files import read_json_file
from audiollm.models.layouts import delay_token, special_ids

CODEC_KIND = "higgs_audio_v2_tokenizer"
"""`model_type` of the codecs that transformers' processor can load."""
_CONTENT_PART = (
    "{%- if part is string %}{{ part }}"
    "{%- elif part['type'] == 'text' %}{{ part['text'] }}"
    "{%- elif part['type'] == 'audio' %}{{ SPOKEN if message['role'] == 'assistant' else HEARD }}"
    "{%- endif %}"
)
_HAS_RECORDING = "('audio' in part or 'url' in part or 'path' in part)"
"""Keys by which transformers' `apply_chat_template` finds the recording of a part."""


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Save a tokenizer in the files that transformers' `AutoTokenizer` reads."""
    write_text(folder / tokens.FILE_NAME, tokenizer.to_str(pretty=True))
    ids = special_ids(tokenizer, tokenizer.get_vocab_size())
    words = {
        name.replace("_token_id", "_token"): tokenizer.id_to_token(place)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if (place := ids[name]) is not None
    }
    named = {"audio_delay_token": delay_token(tokenizer)} if ids["audio_delay_token_id"] != -1 else {}
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **words, "extra_special_tokens": named},
    )


def save_processor(
    folder: Path, tokenizer: Tokenizer, codebook_size: int, codec: Path | None
) -> dict[str, str]:
    """Write the processor's files beside a model's.

    Args:
        codebook_size: codes of one codebook, without BOS and EOS.
        codec: the folder of the codec that the model was trained with, where it is known.

    Returns:
        The entry of config.json that names the codec.
    """
    processor: dict[str, Any] = {
        "processor_class": "HiggsAudioV2Processor",
        "audio_token": tokens.AUDIO_OUT,
        "audio_bos_token": tokens.AUDIO_OUT_BOS,
        "audio_eos_token": tokens.AUDIO_EOS,
        "audio_delay_token": delay_token(tokenizer),
        "audio_stream_bos_id": codebook_size,
        "audio_stream_eos_id": codebook_size + 1,
    }
    if codec is not None and _is_of_transformers(codec):
        processor["audio_tokenizer"] = {
            "audio_tokenizer_class": "HiggsAudioV2TokenizerModel",
            "audio_tokenizer_name_or_path": str(codec.resolve()),
        }
    write_json(folder / "processor_config.json", processor)
    write_json(
        folder / "preprocessor_config.json",
        {
            "feature_extractor_type": "DacFeatureExtractor",
            "processor_class": "HiggsAudioV2Processor",
            "feature_size": 1,
            "sampling_rate": SAMPLE_RATE,
            "hop_length": FRAME_SAMPLES,
            "padding_value": 0.0,
            "padding_side": "right",
            "return_attention_mask": True,
        },
    )
    write_text(folder / "chat_template.jinja", chat_template(tokens.header_style_of(tokenizer)))
    return {} if codec is None else {"audio_tokenizer_id": str(codec.resolve())}


def chat_template(header_style: str, marks_bare_speech: bool = True) -> str:
    """A Jinja template that writes messages as `Template` lays them out; its prompt ends with `<|audio_out_bos|>`.

    What is heard stands as `<|AUDIO_OUT|>` too: transformers' processor puts codes in the place of that token alone,
    and the model knows heard codes from spoken ones by the marks around them.

    Args:
        marks_bare_speech: False: speech of the assistant without a recording (`{"type": "audio"}` alone) stands as
            `<|AUDIO_OUT|>` alone, for a caller that writes the marks itself.
    """
    style = tokens.header_style(header_style)
    input_marker = f"{tokens.AUDIO_BOS}{tokens.AUDIO_OUT}{tokens.AUDIO_EOS}"
    output_marker = f"{tokens.AUDIO_OUT_BOS}{tokens.AUDIO_OUT}{tokens.AUDIO_EOS}"
    spoken = _quoted(output_marker)
    if not marks_bare_speech:
        spoken = f"({spoken} if {_HAS_RECORDING} else {_quoted(tokens.AUDIO_OUT)})"
    content_template = _CONTENT_PART.replace("SPOKEN", spoken).replace("HEARD", _quoted(input_marker))
    return (
        (f"{{{{ {_quoted(style.begin)} }}}}" if style.begin else "")
        + "{%- for message in messages %}"
        + f"{{{{ {_quoted(style.before_role)} + message['role'] + {_quoted(style.after_role)} }}}}"
        + "{%- set content = message['content'] %}"
        + "{%- for part in ([content] if content is string else content) %}"
        + content_template
        + "{%- endfor %}"
        + f"{{{{ {_quoted(style.end_of_turn + style.after_turn)} }}}}"
        + "{%- endfor %}"
        + "{%- if add_generation_prompt %}"
        + f"{{{{ {_quoted(style.header('assistant') + tokens.AUDIO_OUT_BOS)} }}}}"
        + "{%- endif %}"
    )


def _quoted(text: str) -> str:
    """A Jinja string literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


def _is_of_transformers(codec: Path) -> bool:
    try:
        return read_json_file(codec / "config.json", dict).get("model_type") == CODEC_KIND
    except ConfigError:  # moved or removed since: the model is saved all the same
        return False
