"""Runs the published decoder of Qwen3-TTS's codec in an environment of its own. Its encoder is transformers' Mimi.

    python published_qwen3_codec.py FOLDER IN.safetensors OUT.safetensors

In: `codes` `[T, K]`. Out: the samples of the codes.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

sys.modules.setdefault("sox", types.ModuleType("sox"))  # of a tokenizer that is not used here
# ruff: noqa: E402

import torch
from qwen_tts._transformers_compat import patch_transformers_rope_registry
from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2DecoderConfig
from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Decoder
from safetensors.torch import load_file, save_file


def main(folder: Path, given: Path, out: Path) -> None:
    """Decode."""
    patch_transformers_rope_registry()
    data = json.loads((folder / "config.json").read_text())["decoder_config"]
    decoder = Qwen3TTSTokenizerV2Decoder(Qwen3TTSTokenizerV2DecoderConfig(**data)).eval()
    weights = load_file(folder / "model.safetensors")
    decoder.load_state_dict(
        {
            name.removeprefix("decoder."): value
            for name, value in weights.items()
            if name.startswith("decoder.")
        }
    )
    codes_BKT = load_file(given)["codes"].T[None]
    with torch.no_grad():
        samples = decoder.chunked_decode(codes_BKT)[0, 0]
    save_file({"samples": samples.contiguous()}, out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
