"""Models that speak with int8, int4 and bf16 weights: products, whole answers, folders, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import ConfigError
from audiollm.families.registry import load_speech_generator
from audiollm.files.atomic import write_json
from audiollm.generation.speaking.generator import Generator
from audiollm.models.decoder import DualFFNConfig, DualFFNLayer
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.frozen.layers import FrozenLinear
from audiollm.models.frozen.shrink import shrink_frozen, small_weights
from audiollm.models.frozen.stored import ByteWeight, GroupWeight
from audiollm.models.hub import save_pretrained
from audiollm.models.packed_decoder import PackedDecoder, RotaryAngles, packed_decoder
from audiollm.models.stored_products import MAX_KERNEL_ROWS, StoredProduct
from audiollm.publish import export_command
from audiollm.serve.limits import ServeLimits
from audiollm.serve.load import load_state
from audiollm.synthesis.command import generate
from tests.audiollm.models.test_packed_decoder import greedy_request
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.publish.released_run import BOOKS, CODES, write_codec

FORMATS = {"int8": ByteWeight, "int4": GroupWeight}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that is sure of its codes, with a codec."""
    folder = tmp_path_factory.mktemp("runs") / "voice"
    write_codec(folder / "train_tokenizer" / "model")
    torch.manual_seed(0)
    words = train_text_tokenizer(["system user assistant one two"] * 3, 280)
    shape = DualFFNConfig(
        words.get_vocab_size(), num_codebooks=BOOKS, codebook_size=CODES + 2, hidden_size=64, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
    )  # fmt: skip
    model = DualFFN(shape)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.2)
    save_pretrained(model, folder / "train" / "model", words, codec=folder / "train_tokenizer" / "model")
    write_json(folder / "train" / "model" / "speakers.json", ["anna"])
    return folder


def test_int4_holds_each_group_by_its_largest_number() -> None:
    weight_OI = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    stored = GroupWeight(weight_OI)
    scale_OG = stored.scale_OG.float().abs()
    assert stored.nbytes == 16 * 64 // 2 + 2 * 16 * 2
    # half a step, and a whole one at the end that has one value fewer; the scale itself is rounded to bf16
    steps = ((weight_OI - stored.weight()).unflatten(1, (-1, 32)).abs() / scale_OG[..., None]).flatten()
    assert float(steps.quantile(0.9)) <= 0.5 and float(steps.max()) <= 1.05
    exact_OI = torch.randint(-8, 8, (16, 64)).float()
    exact_OI[:, ::32] = -8
    assert torch.equal(GroupWeight(exact_OI).weight(), exact_OI)
    assert torch.equal(GroupWeight(torch.zeros(16, 32)).weight(), torch.zeros(16, 32))
    with pytest.raises(ConfigError, match="int4 wants rows of a multiple of 32 numbers, not 48"):
        GroupWeight(torch.zeros(16, 48))


@pytest.mark.parametrize("rows", [1, 3, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_a_product_is_that_of_the_whole_weight(format: str, bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, outputs, bias=bias) for outputs in (32, 48, 10)]
    small = [FrozenLinear(FORMATS[format](layer.weight), layer) for layer in layers]
    product, x_RI = StoredProduct.of(*small), torch.randn(rows, 64)
    expected = torch.cat([layer(x_RI) for layer in small], dim=1)  # float32 products of the stored weights
    with torch.no_grad():
        tolerance = {"atol": 0.02, "rtol": 0.01}  # rows in bf16
        torch.testing.assert_close(product(x_RI), expected, **tolerance)
        torch.testing.assert_close(product(x_RI, "swish"), nn.functional.silu(expected), **tolerance)
        operand = torch.randn_like(expected)
        torch.testing.assert_close(product.combined(x_RI, operand, "add"), operand + expected, **tolerance)
        torch.testing.assert_close(product.combined(x_RI, operand, "mul"), operand * expected, **tolerance)
        one_by_one = torch.cat([product(row[None]) for row in x_RI])
        if rows <= MAX_KERNEL_ROWS:
            # outputs that the kernels take: a row does not depend on those beside it
            assert torch.equal(product(x_RI)[:, :80], one_by_one[:, :80])


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_layers_are_those_of_the_rounded_weights_and_answers_the_same_beside_others(
    run: Path, format: str
) -> None:
    whole, small = (Generator.from_pretrained(run / "train", dtype=dtype) for dtype in ("fp32", format))  # type: ignore[arg-type]
    rounded = dict(small_weights(small.model))
    assert len(rounded) > 10
    whole.model.load_state_dict({**whole.model.state_dict(), **rounded})
    packed, expected = small.decoder.current(), whole.decoder.current()
    assert isinstance(packed, PackedDecoder) and isinstance(expected, PackedDecoder)
    torch.manual_seed(0)
    x_SC, turn = torch.randn(3, 64), RotaryAngles.by(torch.ones(3, 16), torch.zeros(3, 16))
    with torch.no_grad():
        for ours, theirs in zip(packed._layers, expected._layers, strict=True):
            outputs = [(*layer.begin(x_SC, 1, turn), layer.finish(x_SC, x_SC, 1)) for layer in (ours, theirs)]
            for actual, wanted in zip(*outputs, strict=True):
                assert float((actual - wanted).norm() / wanted.norm()) < 0.01
    request = greedy_request()
    alone = small.engine([request]).run([request])[0].codes_KT
    for beside in small.engine([request] * 3).run([request] * 3):
        assert torch.equal(beside.codes_KT, alone)


def test_a_policy_with_small_weights_is_sampled_as_it_is_trained(run: Path) -> None:
    """A packed copy would round rows to bf16, and its answers would not be those of the policy that is scored."""
    model = DualFFN.from_pretrained(run / "train").requires_grad_(False)
    first = model.model.layers[0]
    assert isinstance(first, DualFFNLayer)
    first.self_attn.q_proj.requires_grad_(True)
    shrink_frozen(model, "int8")
    assert packed_decoder(model) is None
    attention, x_RC = first.self_attn, torch.randn(2, 64)
    mixed = StoredProduct.of(attention.q_proj, attention.k_proj, attention.v_proj)
    expected = torch.cat(
        [layer(x_RC) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)], dim=1
    )
    torch.testing.assert_close(mixed(x_RC), expected, atol=0.02, rtol=0.01)
    model.requires_grad_(False)
    assert packed_decoder(model) is not None


def export(*words: object) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(export_command.export)
    result = CliRunner().invoke(app, [*map(str, words)])
    return result.exit_code, result.output + str(result.exception or "")


@pytest.fixture(scope="module", params=["int8", "int4"])
def exported(run: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / str(request.param)
    code, told = export(run / "train", "--to", request.param, "-o", out)
    assert code == 0 and "MB of weights in place of" in told, told
    return out


def test_an_exported_folder_speaks_as_the_model_in_memory(run: Path, exported: Path, tmp_path: Path) -> None:
    record = json.loads((exported / "stored_weights.json").read_text())
    assert record["format"] == exported.name and record["weights_mb"] < record["weights_mb_in_fp32"]
    size = (exported / "stored.safetensors").stat().st_size
    assert size < 0.6 * (run / "train" / "model" / "model.safetensors").stat().st_size
    assert not (exported / "model.safetensors").exists() and (exported / "audio_tokenizer").is_dir()
    request = greedy_request()
    opened = load_speech_generator(exported)
    assert isinstance(opened, Generator) and isinstance(opened.decoder.current(), PackedDecoder)
    memory = Generator.from_pretrained(run / "train", dtype=exported.name)  # type: ignore[arg-type]
    answers = [each.engine([request]).run([request])[0].codes_KT for each in (opened, memory)]
    assert torch.equal(*answers)
    app = typer.Typer()
    app.command()(generate)
    words = ["--model", str(exported), "--text", "one", "-o", str(tmp_path / "one.wav"), "--temperature", "0"]
    result = CliRunner().invoke(app, [*words, "--max-duration-s", "0.4"])
    assert result.exit_code == 0 and (tmp_path / "one.wav").stat().st_size > 44, result.exception
    again = CliRunner().invoke(app, [*words[:1], str(run / "train"), *words[2:], "--dtype", "int8"])
    assert again.exit_code == 0, again.exception
    state = load_state([f"small={exported}"], ServeLimits(max_length=512))
    assert state.models["small"].speaks
    state.service.close()


def test_a_folder_of_small_weights_is_for_generation_alone(run: Path, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for `generate`, `serve` and `Generator` alone"):
        DualFFN.from_pretrained(exported)
    with pytest.raises(ConfigError, match="in fewer bytes already"):
        Generator.from_pretrained(exported, dtype="int8")
    code, told = export(exported, "--to", "int8", "-o", tmp_path / "again")
    assert code == 1 and "in fewer bytes already" in told


def test_a_model_that_only_answers_is_refused(tmp_path: Path) -> None:
    save_tiny("qwen2_audio", tmp_path / "listener")
    with pytest.raises(ConfigError, match="held in float32 alone"):
        load_speech_generator(tmp_path / "listener", dtype="int8")
    with pytest.raises(ConfigError, match="no model here speaks"):
        load_state([str(tmp_path / "listener")], ServeLimits(), dtype="int8")


@pytest.mark.parametrize("damage", ["empty", "cut", "without a part", "another shape", "unknown format"])
def test_a_damaged_file_is_named(exported: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    path = folder / "stored.safetensors"
    tensors = load_file(path)
    part = next(name for name in tensors if ("/" in name and name.endswith("values_OI")) or "packed" in name)
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "without a part":
        del tensors[part]
        save_file(tensors, path, metadata={"format": exported.name})
    elif damage == "another shape":
        tensors[part] = tensors[part][:-1].contiguous()
        save_file(tensors, path, metadata={"format": exported.name})
    else:
        save_file(tensors, path, metadata={"format": "int3"})
    with pytest.raises(ConfigError, match=r"not whole|not this model's|is none of") as told:
        Generator.from_pretrained(folder)
    assert "stored.safetensors" in str(told.value)
