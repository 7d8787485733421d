"""Tiny audio LLMs of transformers' real classes with random weights, and their processors, made without any hub."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from audiollm.audio import load_bytes
from audiollm.models.audio_llms.loading import without_vision

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'audio' %}AUDIO{% elif c['type'] == 'video' %}VIDEO"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEL_BINS, WINDOW_S = 8, 2
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(special: tuple[str, ...], named: dict[str, str] | None = None) -> Any:
    """Tokens of one byte each, and special ones; `named` gives attributes such as `audio_token`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: n for n, token in enumerate([*letters, *ENDS, *special])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens={
            "turn_token": ENDS[1],
            **{f"special_{n}": t for n, t in enumerate(special)},
            **(named or {}),
        },
    )


def _text(vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": vocab, "max_position_embeddings": 4096, **more,
    }  # fmt: skip


def _encoder(**more: Any) -> dict[str, Any]:
    return {
        "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "num_mel_bins": MEL_BINS, "max_source_positions": WINDOW_S * 50, "dropout": 0.3, **more,
    }  # fmt: skip


def _extractor() -> Any:
    return transformers.WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=WINDOW_S)


def qwen2_audio() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer(("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"))
    processor = transformers.Qwen2AudioProcessor(_extractor(), tokenizer)
    config = transformers.Qwen2AudioConfig(
        audio_config=_encoder(),
        text_config=_text(len(tokenizer), model_type="qwen2", attention_dropout=0.3),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config.eos_token_id = ends
    return model, processor


OMNI = {
    "image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
}  # fmt: skip


def _omni_processor(kind: Any) -> Any:
    tokenizer = byte_tokenizer(tuple(OMNI.values()), OMNI)
    template = CHATML.replace("AUDIO", "<|audio_bos|><|AUDIO|><|audio_eos|>")
    template = template.replace("VIDEO", "<|vision_bos|><|VIDEO|><|vision_eos|>", 1)
    return without_vision(kind)(_extractor(), tokenizer, chat_template=template)


def _omni_ids(tokenizer: Any) -> dict[str, int]:
    token = tokenizer.convert_tokens_to_ids
    return {
        "audio_token_index": token("<|AUDIO|>"), "image_token_index": token("<|IMAGE|>"),
        "video_token_index": token("<|VIDEO|>"), "audio_start_token_id": token("<|audio_bos|>"),
        "audio_end_token_id": token("<|audio_eos|>"), "vision_start_token_id": token("<|vision_bos|>"),
        "vision_end_token_id": token("<|vision_eos|>"),
    }  # fmt: skip


def omni_thinker_config(tokenizer: Any) -> Any:
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default", "rope_theta": 1e4}
    return transformers.Qwen2_5OmniThinkerConfig(
        audio_config=_encoder(n_window=20, output_dim=16),
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
            "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [0],
        },
        text_config=_text(len(tokenizer), attention_dropout=0.3, rope_parameters=rope),
        **_omni_ids(tokenizer),
    )  # fmt: skip


def qwen2_5_omni_thinker() -> tuple[Any, Any]:
    processor = _omni_processor(transformers.Qwen2_5OmniProcessor)
    config = omni_thinker_config(processor.tokenizer)
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config), processor


def qwen2_5_omni() -> tuple[Any, Any]:
    """A whole Qwen2.5-Omni, with talker and vocoder."""
    processor = _omni_processor(transformers.Qwen2_5OmniProcessor)
    thinker = omni_thinker_config(processor.tokenizer)
    talker = {
        **_text(32),
        "embedding_size": 16,
        "head_dim": 8,
        "rope_parameters": thinker.text_config.rope_parameters,
    }
    dit = {
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8, "ff_mult": 1, "emb_dim": 8,
        "enc_channels": [8, 8, 8], "enc_kernel_sizes": [3, 3, 1], "enc_dilations": [1, 1, 1], "enc_dim": 8,
        "enc_attention_channels": 4, "enc_res2net_scale": 2, "enc_se_channels": 4, "mel_dim": 8, "num_embeds": 16,
        "look_ahead_layers": [0], "look_backward_layers": [0], "enc_emb_dim": 8,
    }  # fmt: skip
    vocoder = {
        "mel_dim": 8, "upsample_initial_channel": 8, "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 1, 1]], "upsample_rates": [2], "upsample_kernel_sizes": [4],
    }  # fmt: skip
    config = transformers.Qwen2_5OmniConfig(
        thinker_config=thinker.to_dict(),
        talker_config=talker,
        token2wav_config={"dit_config": dit, "bigvgan_config": vocoder},
        enable_audio_output=True,
    )
    return transformers.Qwen2_5OmniForConditionalGeneration(config), processor


def audio_flamingo3() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer(("<sound>",))
    template = CHATML.replace("AUDIO", "<sound>")
    processor = transformers.AudioFlamingo3Processor(
        _extractor(), tokenizer, chat_template=template, max_audio_len=6
    )
    config = transformers.AudioFlamingo3Config(
        audio_config=_encoder(model_type="audioflamingo3_encoder"),
        text_config=_text(len(tokenizer), model_type="qwen2", attention_dropout=0.3),
        audio_token_id=tokenizer.convert_tokens_to_ids("<sound>"),
    )
    return transformers.AudioFlamingo3ForConditionalGeneration(config), processor


def qwen3_omni_moe_thinker() -> tuple[Any, Any]:
    processor = _omni_processor(transformers.Qwen3OmniMoeProcessor)
    ids = {key.replace("_index", "_id"): id for key, id in _omni_ids(processor.tokenizer).items()}
    audio = _encoder(
        n_window=50, n_window_infer=100, output_dim=16, downsample_hidden_size=4, conv_chunksize=500
    )
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    config = transformers.Qwen3OmniMoeThinkerConfig(
        audio_config=audio,
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
            "deepstack_visual_indexes": [], "num_position_embeddings": 16,
        },
        text_config=_text(len(processor.tokenizer), **experts, rope_parameters=rope),
        **ids,
    )  # fmt: skip
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config), processor


def video_llama3() -> tuple[Any, Any]:
    """A model that sees and does not hear."""
    tokenizer = byte_tokenizer(("<image>", "<video>"), {"image_token": "<image>", "video_token": "<video>"})
    template = CHATML.replace("AUDIO", "").replace("VIDEO", "<video>", 1)
    processor = without_vision(transformers.VideoLlama3Processor)(tokenizer, chat_template=template)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 14,
    }
    config = transformers.VideoLlama3Config(
        text_config=_text(len(tokenizer), model_type="qwen2"),
        vision_config={"model_type": "video_llama_3_vision", **vision},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
    )
    return transformers.VideoLlama3ForConditionalGeneration(config), processor


class MistralCommonBackend(transformers.PreTrainedTokenizerFast):
    """A stand-in for the tokenizer of mistral-common (its own package): the same calls, tokens of one byte each."""

    def apply_chat_template(self, conversations: Any, **_: Any) -> Any:
        rows, sounds = [], []
        for conversation in conversations:
            assert conversation[-1]["role"] == "user", "mistral-common refuses others"
            text = ""
            for message in conversation:
                said = "<inst>" if message["role"] == "user" else ""
                for part in message["content"]:
                    if part["type"] == "audio":
                        wave = load_bytes(base64.b64decode(part["base64"]), "test")
                        sounds.append(wave.samples_CN[0].numpy())
                        said += "<begin>" + "<audio>" * (375 * -(-wave.num_samples // 480_000))
                    else:
                        said += part["text"]
                text += said + ("</inst>" if message["role"] == "user" else "<|im_end|>")
            rows.append(self.encode(text, add_special_tokens=False))
        made = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        return {**made, **({"audio": sounds} if sounds else {})}


def voxtral() -> tuple[Any, Any]:
    """Windows of 30 s, as its processor has them."""
    plain = byte_tokenizer(("<inst>", "</inst>", "<begin>", "<audio>"))
    tokenizer = MistralCommonBackend(
        tokenizer_object=plain.backend_tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    processor = transformers.VoxtralProcessor(
        transformers.WhisperFeatureExtractor(feature_size=MEL_BINS), tokenizer
    )
    processor.audio_token = "<audio>"
    audio = {**_encoder(model_type="voxtral_encoder"), "max_source_positions": 1500, "encoder_ffn_dim": 64}
    config = transformers.VoxtralConfig(
        audio_config=audio,
        text_config=_text(len(tokenizer), model_type="llama", attention_dropout=0.3, head_dim=8),
        audio_token_id=tokenizer.convert_tokens_to_ids("<audio>"),
    )
    return transformers.VoxtralForConditionalGeneration(config), processor


TINY: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_audio": qwen2_audio,
    "qwen2_5_omni_thinker": qwen2_5_omni_thinker,
    "qwen2_5_omni": qwen2_5_omni,
    "qwen3_omni_moe_thinker": qwen3_omni_moe_thinker,
    "audio_flamingo3": audio_flamingo3,
}
"""Models that hear, by name."""
SEES_ALONE = {"video_llama3": video_llama3}


def tiny(name: str, seed: int = 0) -> tuple[Any, Any]:
    """A model with random weights (biases too), in float32, and its processor."""
    torch.manual_seed(seed)
    model, processor = (TINY | SEES_ALONE)[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval(), processor


def save_tiny(name: str, folder: Path) -> tuple[Any, Any]:
    """Write a tiny model with its processor, as its authors would: with the parts for images, where it has them."""
    model, processor = tiny(name)
    model.save_pretrained(folder)
    thinker = getattr(model.config, "thinker_config", model.config)
    save_processor(processor, folder, getattr(getattr(thinker, "vision_config", None), "patch_size", 14))
    return model, processor


def save_thinker(folder: Path, **generation: Any) -> Path:
    """Write a tiny thinker of Qwen2.5-Omni whose words are drawn from nearly equal shares.

    Args:
        generation: fields of its `generation_config.json`.
    """
    model, _ = save_tiny("qwen2_5_omni_thinker", folder)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.3)
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    return folder


def save_processor(processor: Any, folder: Path, patch_size: int = 14) -> None:
    """Write a processor with the configuration of its parts for images and videos."""
    processor.save_pretrained(folder)
    if "VideoLlama3" in type(processor).__name__:
        _add_parts(
            folder,
            {"image_processor_type": "VideoLlama3ImageProcessor"},
            {
                "video_processor_type": "VideoLlama3VideoProcessor",
                "patch_size": patch_size,
                "size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56 * 16},
            },
        )
    if "Omni" in type(processor).__name__:
        _add_parts(
            folder,
            {"image_processor_type": "Qwen2VLImageProcessor"},
            {
                "video_processor_type": "Qwen2VLVideoProcessor",
                "patch_size": patch_size,
                "size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112},
            },
        )


def _add_parts(folder: Path, images: dict[str, Any], videos: dict[str, Any]) -> None:
    path = folder / "processor_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "image_processor": images, "video_processor": videos}))
