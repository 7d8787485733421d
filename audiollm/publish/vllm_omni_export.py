"""A DualFFN with its codec as a folder that vLLM-Omni serves by its classes of Higgs Audio V2.

It is the folder for transformers' classes with what vLLM-Omni reads besides, or has fixed in its code. Both were read
in vllm-omni 0.30.0 (its `higgs_audio_v2` in model_executor/models, stage_input_processors, deploy and tts_adapters).

Shapes: K codebooks, T code frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from audiollm.codec import CODEBOOK_SIZE, FRAME_RATE, NUM_CODEBOOKS, SAMPLE_RATE, Codec
from audiollm.data.chat.template import Kind
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text import tokenizer as tokens
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json, write_text
from audiollm.files.json_files import OFFLINE, read_json_file
from audiollm.hub_models.needed_files import CODEC_FOLDER
from audiollm.models.generation_config import FILE_NAME as GENERATION_FILE
from audiollm.models.generation_config import read_generation
from audiollm.models.processor_files import chat_template
from audiollm.publish.incomplete import incomplete_folder
from audiollm.publish.release_files import README
from audiollm.publish.transformers_check import SYSTEM, check_export
from audiollm.publish.transformers_export import (
    OWN_WAY,
    ExportSource,
    open_export_source,
    write_transformers_folder,
)

STOP_IDS = (128009, 128012)
"""Tokens at which vLLM-Omni ends every answer of this model type (its pipeline.py)."""
CODEC_VARIABLE = "HIGGS_AUDIO_V2_TOKENIZER_PATH"
"""Names the codec that references of voices are encoded with; without it vLLM-Omni takes that of k2-fsa/OmniVoice."""
_SAMPLING = {"temperature": 1.0, "top_p": 0.95, "top_k": 50}
"""The sampling settings of its deploy/higgs_audio_v2.yaml."""
_REFERENCE_FRAMES = (1, 6)


def export_to_vllm_omni(folder: Path, out: Path, codec: Path | None = None) -> str:
    """Write a model, its processor and its codec for vLLM-Omni, and compare what its parts read of them.

    Compared are all that `export_to_transformers` compares, the settings as vLLM-Omni takes them, and its prompts
    with a reference. A folder that does not pass is removed.

    Args:
        folder: of a train stage or of a saved model.
        out: a folder that is absent or empty, or an earlier export that was cut short.
        codec: its folder; None: the one beside the model or of its run.

    Returns:
        what the comparison gave.

    Raises:
        ConfigError: what vLLM-Omni cannot serve, a folder that is not empty, or answers that differ.
    """
    source = open_export_source(folder, codec)
    _check_fixed_values(source)
    with incomplete_folder(out):
        write_transformers_folder(source, out)
        settings = _write_settings(source, out)
        checked = check_export(source.generator, out)
        _check_settings(out, settings)
        _check_clone_prompts(source, out)
    return f"{checked}; {len(_REFERENCE_FRAMES)} prompts with a reference equal"


def _check_fixed_values(source: ExportSource) -> None:
    """See that a model has the values that are fixed in vLLM-Omni's code.

    Raises:
        ConfigError: it has others; with the way that works.
    """
    codec, vocabulary = source.generator.codec, source.generator.template.tokenizer
    if reason := _codec_difference(codec):
        raise ConfigError(f"vLLM-Omni decodes {reason}", str(source.codec_path), OWN_WAY)
    if not (source.codec_path / "model.safetensors").is_file():
        text = "vLLM-Omni reads a codec from one model.safetensors, and this one is in shards"
        raise ConfigError(text, str(source.codec_path), "save the codec in one file")
    where = str(source.folder / tokens.FILE_NAME)
    if vocabulary.token_to_id(tokens.AUDIO_DELAY) is None:
        text = f"the vocabulary has no {tokens.AUDIO_DELAY}, which vLLM-Omni writes into prompts with a reference"
        raise ConfigError(text, where, OWN_WAY)
    if vocabulary.token_to_id(tokens.AUDIO_OUT) in STOP_IDS:
        text = f"{tokens.AUDIO_OUT}, the token of every frame, has an id at which vLLM-Omni stops: {STOP_IDS}"
        raise ConfigError(text, where, OWN_WAY)


def _codec_difference(codec: Codec) -> str:
    """What vLLM-Omni decodes, and the codec that has something else; empty: there is no difference."""
    shape = {
        "codebooks": (codec.num_codebooks, NUM_CODEBOOKS),
        "codes of each codebook": (codec.codebook_size, CODEBOOK_SIZE),
        "samples per second": (codec.sample_rate, SAMPLE_RATE),
        "frames per second": (codec.frame_rate, FRAME_RATE),
    }
    reasons = [
        f"{fixed:,} {name}, and the codec has {value:,}"
        for name, (value, fixed) in shape.items()
        if value != fixed
    ]
    return "; ".join(reasons)


def _write_settings(source: ExportSource, out: Path) -> dict[str, Any]:
    """Complete config.json, generation_config.json, the chat template and README.md.

    Returns:
        the entries of config.json that were added.
    """
    template = source.generator.template
    end_of_audio = template.tokenizer.token_to_id(tokens.AUDIO_EOS)
    settings = {
        "audio_tokenizer_id": None,  # where it is absent, the published codec is downloaded in place of ours
        "audio_tokenizer_subdir": CODEC_FOLDER,
        "audio_eos_token_id": end_of_audio,  # drawn behind the last row of speech; the default is the published id
        "sample_rate": SAMPLE_RATE,
        "frame_rate": FRAME_RATE,
    }
    config: dict[str, Any] = read_json_file(out / "config.json", dict)
    write_json(out / "config.json", {**config, **settings})
    generation: dict[str, Any] = read_json_file(out / GENERATION_FILE, dict)
    # vLLM adds these to STOP_IDS: in a vocabulary of one's own the end of speech has another id
    write_json(out / GENERATION_FILE, {**generation, "eos_token_id": [config["eos_token_id"], end_of_audio]})
    # its prompts with a reference get the marks around speech from its code
    write_text(out / "chat_template.jinja", chat_template(template.header_style, marks_bare_speech=False))
    card = (out / README).read_text(encoding="utf-8")
    write_text(
        out / README, card + _serving_section(out, read_generation(source.folder), source.generator.speakers)
    )
    return settings


def _serving_section(out: Path, sampling: Mapping[str, Any], speakers: Sequence[str]) -> str:
    """What README.md says on serving: the command, and what vLLM-Omni does otherwise than `audiollm serve`."""
    place = out.resolve()
    deployed = ", ".join(f"{name} {value:g}" for name, value in _SAMPLING.items())
    trained = ", ".join(f"{name} {value:g}" for name, value in sampling.items()) or "not stated"
    named_speakers = (
        f"- This model was trained with the names of {len(speakers)} speakers; a request cannot ask for one: give a\n"
        "  reference.\n"
        if speakers
        else ""
    )
    return f"""
## Serving with vLLM-Omni

Written for vllm-omni 0.30, and compared with what its code reads; it was not run in the server. vLLM-Omni takes an
environment of its own (transformers 5.13 or 5.14).

```console
$ {CODEC_VARIABLE}={place} vllm serve {place} --omni
```

- **{CODEC_VARIABLE}** must name this folder. Without it, references of voices (`ref_audio`, `ref_text`) are
  encoded with another codec of the same shape: no message says so, and the voices are wrong.
- After a move, correct `audio_tokenizer_name_or_path` in processor_config.json, which is an absolute path.
- Sampling is that of its deploy file ({deployed}), this model's own: {trained}.
  Another one takes a copy of that file (`--deploy-config`). There is no guidance by text or speaker, and no
  repetition-aware sampling.
- The system text is "{SYSTEM}"; a reference is a turn before the text (the task
  `clone_by_turn`).
{named_speakers}- Several speakers in one text, named voices, speed, language and instructions are refused there;
  `audiollm serve` takes scripts, speakers by name, languages and scenes.
"""


def _check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Raises: ConfigError: transformers' config, which vLLM-Omni's is made of, does not give the settings back."""
    from transformers import AutoConfig

    values = AutoConfig.from_pretrained(str(out), **OFFLINE).to_dict()
    lost = sorted(name for name, value in settings.items() if values.get(name, ()) != value)
    if lost:
        raise _unlike(out, f"transformers' config gives {lost[0]} as {values.get(lost[0])!r}")


def _check_clone_prompts(source: ExportSource, out: Path) -> None:
    """Raises: ConfigError: prompts with a reference are not those of the training."""
    from transformers import AutoTokenizer

    words: Any = AutoTokenizer.from_pretrained(str(out), **OFFLINE)
    template = source.generator.template
    delay_id: int = template.tokenizer.token_to_id(tokens.AUDIO_DELAY)  # type: ignore[assignment]  # it was checked
    messages = [
        Message(role="system", content=[TextPart(text=SYSTEM)]),
        Message(role="user", content=[TextPart(text="Good morning.")]),
        Message(role="assistant", content=[AudioPart(path="reference.wav")]),
        Message(role="user", content=[TextPart(text="one")]),
    ]
    for frames in _REFERENCE_FRAMES:
        codes_KT = torch.zeros(template.num_codebooks, frames, dtype=torch.long)
        prompt = template.prompt(messages, [codes_KT])
        ids_S = prompt.text_ids_S.clone()
        speech_rows = (prompt.kinds_S == Kind.AUDIO_OUT).nonzero()[:, 0]
        # which id of speech stands there has no effect: the embedding of the codes takes its place
        ids_S[speech_rows[1 - template.num_codebooks :]] = delay_id
        if clone_prompt(words, "Good morning.", "one", frames, template.num_codebooks) != ids_S.tolist():
            raise _unlike(out, f"prompts with a reference of {frames} frames differ")


def clone_prompt(words: Any, reference_text: str, text: str, frames: int, num_codebooks: int) -> list[int]:
    """The token ids that vLLM-Omni makes of a request with a reference.

    Its code puts the marks and the rows of speech in the place of the template's first `<|AUDIO_OUT|>`
    (vllm-omni 0.30.0, higgs_audio_v2_tokenizer.py, `build_voice_clone_prompt`).

    Args:
        words: transformers' tokenizer of the folder.
        frames: code frames of the reference.
    """
    chat = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": reference_text},
        {"role": "assistant", "content": [{"type": "audio"}]},
        {"role": "user", "content": text},
    ]
    rendered: str = words.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    rows = tokens.AUDIO_OUT * (frames + 2) + tokens.AUDIO_DELAY * (num_codebooks - 1)
    marked = rendered.replace(tokens.AUDIO_OUT, f"{tokens.AUDIO_OUT_BOS}{rows}{tokens.AUDIO_EOS}", 1)
    ids: list[int] = words(marked, add_special_tokens=False)["input_ids"]
    return ids


def _unlike(out: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"vLLM-Omni would not read what the model was trained on: {reason}",
        str(out),
        "the export was removed; report it",
    )
