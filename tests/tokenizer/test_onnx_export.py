"""`audiollm export --to onnx`: the native codec under onnxruntime, with our codes and our sound."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from audiollm.errors import ConfigError
from audiollm.publish import export_command
from tests.tokenizer.test_stage import save_tiny_higgs
from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.native.onnx_codec import OnnxCodec
from tokenizer.native.onnx_export import compare_codecs, export_codec

SMALL = TokenizerConfig(
    num_codebooks=3, codebook_size=64, latent_dim=16, mel_hidden_size=24, hidden_size=32,
    encoder_layers=(2, 2), decoder_layers=(2, 2),
)  # fmt: skip


def codec(**changes: object) -> AudioTokenizer:
    torch.manual_seed(3)
    return AudioTokenizer(replace(SMALL, **changes)).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quantizer", "harmonic", "linear"),
    [
        ("rvq", True, True), ("split_rvq", True, False), ("fsq", True, False),
        ("rvq", False, False), ("split_rvq", False, True), ("fsq", False, False),
    ],
)  # fmt: skip
def test_codes_and_sound_are_ours_whole_and_in_pieces(
    tmp_path: Path, quantizer: str, harmonic: bool, linear: bool
) -> None:
    ours = codec(quantizer=quantizer, harmonic_source=harmonic, linear_path=linear)
    comparison = export_codec(ours, tmp_path)
    assert comparison.frames == 1500 and comparison.largest_difference < 1e-4
    exported = OnnxCodec(tmp_path)
    samples_N = torch.randn(24_000 * 2 + 77) * 0.1
    codes_KT = ours.encode(samples_N[None])
    assert np.mean(exported.encode(samples_N.numpy()) == codes_KT.numpy()) > 0.99
    for frames in (1, 2, 3, 7):
        sound_N = exported.decode(codes_KT[:, :frames].numpy())
        expected_N = ours.decode(codes_KT[:, :frames])[0].numpy()
        np.testing.assert_allclose(sound_N, expected_N, atol=1e-4)
    decoder = exported.decoder()
    one_by_one = [decoder.push(codes_KT[:, frame : frame + 1].numpy()) for frame in range(codes_KT.shape[1])]
    whole_N = exported.decode(codes_KT.numpy())
    np.testing.assert_allclose(np.concatenate([*one_by_one, decoder.flush()]), whole_N, atol=1e-5)
    again_N = np.concatenate([decoder.push(codes_KT.numpy()), decoder.flush()])  # after `flush`, a clip anew
    np.testing.assert_array_equal(again_N, whole_N)


def test_the_code_of_its_readme_runs_with_the_folder_alone(tmp_path: Path) -> None:
    export_codec(codec(), tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
    check = "import sys\nassert codes.shape == (3, 25) and sound.shape == (24_000,)\nassert 'torch' not in sys.modules"
    run = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys\nsys.path.insert(0, '.')\n{block}\n{check}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_another_codec_is_told_from_the_one_that_was_exported(tmp_path: Path) -> None:
    ours = codec()
    export_codec(ours, tmp_path)
    with torch.no_grad():
        ours.decoder.head.project.weight.mul_(1.5)
    with pytest.raises(ConfigError, match="the exported codec differs: codes of 50 of 50 frames equal"):
        compare_codecs(ours, tmp_path, seconds=2.0)
    with torch.no_grad():
        ours.encoder.input.weight.mul_(-1)
    with pytest.raises(ConfigError, match="the exported codec differs: codes of [0-4] of 50"):
        compare_codecs(ours, tmp_path, seconds=2.0)


def export(*words: object) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(export_command.export)
    result = CliRunner().invoke(app, [*map(str, words)])
    return result.exit_code, result.output + str(result.exception or "")


def test_the_command_writes_it_or_says_why_not(tmp_path: Path) -> None:
    codec().save_pretrained(tmp_path / "codec")
    code, told = export(tmp_path / "codec", "--to", "onnx", "-o", tmp_path / "out")
    assert code == 0 and "1500 frames equal" in told and "exported" in told, told
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md", "decoder.onnx", "encoder.onnx", "onnx_codec.json", "onnx_codec.py",
    }  # fmt: skip
    code, told = export(tmp_path / "codec", "--to", "onnx", "-o", tmp_path / "out")
    assert code == 1 and "exists and is not empty" in told
    save_tiny_higgs(tmp_path / "higgs")
    code, told = export(tmp_path / "higgs", "--to", "onnx", "-o", tmp_path / "other")
    assert code == 1 and "has no export to ONNX" in told and "audiollm_tokenizer" in told
    assert not (tmp_path / "other").exists()
