"""The stage `new_thinker`: a small Qwen2.5-Omni thinker with random weights, and a vocabulary of the samples' words.

It hears, sees and writes, is of transformers' own class, and is trained as any audio LLM in a folder is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PLACES = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif c['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PIECES = r'[{}\[\], "]*[a-z_]+": [\[{"]*|\d| ?\p{L}+|\s+|[^\s\p{L}\d]+'
"""JSON up to a value is a piece, every digit is one: a record is some 20 tokens per event."""
_PATCH, _MERGE = 14, 2


class NewThinkerConfig(StageConfig):
    """Settings of the stage `new_thinker`. By default the model has some 3 M parameters."""

    samples: InputPath
    """Samples (.jsonl) whose texts the vocabulary is learned from."""
    vocabulary: int = Field(1000, ge=300, le=100_000)
    """Tokens of the vocabulary at most."""
    width: int = Field(192, ge=32, multiple_of=32)
    """Hidden size of the decoder; its heads are 48 wide where they fit, else 32."""
    layers: int = Field(4, ge=1)
    """Layers of the language model."""
    encoder_width: int = Field(128, ge=32, multiple_of=32)
    """Hidden size of both encoders."""
    audio_layers: int = Field(3, ge=1)
    """Layers of the audio encoder."""
    vision_layers: int = Field(2, ge=1)
    """Layers of the vision encoder."""
    mel_bins: int = Field(64, ge=8)
    """Mel bands that the audio encoder hears."""
    window_s: int = Field(10, ge=1, le=30)
    """Longest recording in seconds; the audio encoder hears it in one piece."""
    min_pixels: int = Field(56 * 56, ge=784)
    """Fewest pixels of a picture, which is scaled up to them."""
    max_pixels: int = Field(224 * 224, ge=784)
    """Most pixels of a picture, which is scaled down to them."""
    seed: int = 0
    """Seed of the random weights."""

    @model_validator(mode="after")
    def _pixels_go_together(self) -> NewThinkerConfig:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        return self


def run_new_thinker(config: NewThinkerConfig, context: Context) -> dict[str, Any]:
    """Write `model`: weights, config, processor and chat template, as transformers' `from_pretrained` reads them.

    Raises:
        StageError: no sample has a text.
    """
    texts = texts_of_samples(config.samples, "new_thinker")
    figures = write_thinker(context.folder / "model", config, texts)
    context.say(f"{figures['parameters']:,} parameters, {figures['vocabulary']} tokens")
    return figures


def texts_of_samples(path: Path, stage: str) -> list[str]:
    """Read all texts of samples.

    Args:
        path: a .jsonl.
        stage: for the error.

    Raises:
        StageError: no sample has a text.
    """
    from audiollm.data.records.manifest import read_samples
    from audiollm.data.records.sample import TextPart
    from audiollm.errors import StageError

    samples, _ = read_samples(path)
    texts = [
        content_part.text
        for s in samples
        for m in s.messages
        for content_part in m.content
        if isinstance(content_part, TextPart)
    ]
    if not texts:
        raise StageError(f"{stage}: no sample of {path} has a text", "give samples that are read", 2)
    return texts


def write_thinker(folder: Path, config: NewThinkerConfig, texts: Iterable[str]) -> dict[str, Any]:
    """Write a thinker with random weights, and its processor; returns its numbers of parameters and tokens."""
    import torch
    import transformers

    from audiollm.models.audio_llms.loading import without_vision

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_vocabulary(texts, config.vocabulary, [*_ENDS, *_PLACES.values()]),
        pad_token=_ENDS[0],
        eos_token=_ENDS[2],
        extra_special_tokens={"turn_token": _ENDS[1], **_PLACES},
    )
    extractor = transformers.WhisperFeatureExtractor(
        feature_size=config.mel_bins, chunk_length=config.window_s
    )
    kind: Any = without_vision(transformers.Qwen2_5OmniProcessor)
    processor = kind(extractor, tokenizer, chat_template=_TEMPLATE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: Any = transformers.Qwen2_5OmniThinkerForConditionalGeneration(
            _thinker_config(config, tokenizer)
        )
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids([_ENDS[2], _ENDS[0]])
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(str(folder))
    processor.save_pretrained(str(folder))
    _add_picture_settings(folder / "processor_config.json", config)
    return {"parameters": sum(p.numel() for p in model.parameters()), "vocabulary": len(tokenizer)}


def plan_new_thinker(config: NewThinkerConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    return StagePlan(
        parameters=planned_size(config),
        memory_mb=900,
        disk_mb=20,
        core_seconds=15,
        note="random weights of Qwen2.5-Omni's thinker",
    )


def planned_size(config: NewThinkerConfig) -> int:
    """Parameters of the model within a tenth, without building it: its matrices, with a full vocabulary."""
    width, encoder = config.width, config.encoder_width
    decoder = config.layers * 11 * width**2 + 2 * config.vocabulary * width
    encoders = (config.audio_layers + config.vision_layers) * 10 * encoder**2
    merged = encoder * _MERGE**2
    return decoder + encoders + 3 * encoder * (config.mel_bins + encoder) + merged * (merged + width)


STAGE = Stage(
    kind="new_thinker",
    config=NewThinkerConfig,
    run=run_new_thinker,
    artifacts={"checkpoint": "model"},
    help="begin a small model that hears, sees and writes, with random weights of Qwen2.5-Omni's class",
    plan=plan_new_thinker,
)


def train_vocabulary(texts: Iterable[str], size: int, marks: Sequence[str]) -> Tokenizer:
    """Learn a byte-level vocabulary of texts; words, single digits and beginnings of JSON values are pieces.

    Args:
        size: tokens at most.
        marks: special tokens, which come first.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(marks),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# Private


def _thinker_config(config: NewThinkerConfig, tokenizer: Any) -> Any:
    import transformers

    token = tokenizer.convert_tokens_to_ids
    head = 48 if config.width % 96 == 0 else 32
    heads, third = config.width // head, head // 6
    rope = {
        "mrope_section": [head // 2 - 2 * third, third, third],
        "rope_type": "default",
        "type": "default",
        "rope_theta": 1e4,
    }
    width = config.encoder_width
    return transformers.Qwen2_5OmniThinkerConfig(
        audio_config={
            "d_model": width,
            "encoder_layers": config.audio_layers,
            "encoder_attention_heads": width // 32,
            "encoder_ffn_dim": 3 * width,
            "num_mel_bins": config.mel_bins,
            "max_source_positions": 50 * config.window_s,
            "n_window": 50 * config.window_s,  # one piece: pieces of 2 s all have the same positions
            "output_dim": config.width,
        },
        vision_config={
            "depth": config.vision_layers,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_heads": width // 32,
            "out_hidden_size": config.width,
            "patch_size": _PATCH,
            "spatial_merge_size": _MERGE,
            "window_size": 112,
            "fullatt_block_indexes": [config.vision_layers - 1],
        },
        text_config={
            "hidden_size": config.width,
            "intermediate_size": 8 * config.width // 3 // 32 * 32,
            "num_hidden_layers": config.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 8192,
            "rope_parameters": rope,
        },
        audio_token_index=token(_PLACES["audio_token"]),
        image_token_index=token(_PLACES["image_token"]),
        video_token_index=token(_PLACES["video_token"]),
        audio_start_token_id=token(_PLACES["audio_bos_token"]),
        audio_end_token_id=token(_PLACES["audio_eos_token"]),
        vision_start_token_id=token(_PLACES["vision_bos_token"]),
        vision_end_token_id=token(_PLACES["vision_eos_token"]),
    )


def _add_picture_settings(path: Path, config: NewThinkerConfig) -> None:
    """Name the processors of pictures, which need torchvision, and are stood in for without it."""
    content = json.loads(path.read_text(encoding="utf-8"))
    size = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
    patches = {"patch_size": _PATCH, "merge_size": _MERGE, "temporal_patch_size": 2, "size": size}
    content["image_processor"] = {"image_processor_type": "Qwen2VLImageProcessor", **patches}
    content["video_processor"] = {"video_processor_type": "Qwen2VLVideoProcessor", **patches}
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
