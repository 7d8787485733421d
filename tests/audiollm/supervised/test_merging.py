"""Models that were trained side by side become one: formulas, folders, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import ConfigError, StageError
from audiollm.models.dual_ffn import DualFFN, DualFFNConfig
from audiollm.models.hub import save_pretrained
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.supervised.merge_stage import STAGE, MergeModelsConfig
from audiollm.supervised.merging import merge_models

BASE = {"a.weight": torch.tensor([1.0, -2.0, 3.0, 0.5]), "steps": torch.tensor([7])}
ONE = torch.tensor([0.4, 0.1, -0.3, 0.0])
OTHER = torch.tensor([0.2, -0.6, 0.5, 0.0])


def folder_of(path: Path, weights: dict[str, Tensor], words: tuple[str, ...] = ("a",)) -> Path:
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text(json.dumps({"model": list(words), "added_tokens": []}))
    return path


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    parts = {"base": 0 * ONE, "one": ONE, "other": OTHER}
    return [folder_of(tmp_path / n, {**BASE, "a.weight": BASE["a.weight"] + d}) for n, d in parts.items()]


def merged(folders: list[Path], weights: tuple[float, ...] = (1.0, 1.0), **settings: object) -> Tensor:
    out = folders[0].parent / "merged"
    assert merge_models(folders[0], folders[1:], weights, out, **settings) == 1  # type: ignore[arg-type]
    found = load_file(out / "model.safetensors")
    assert found["steps"].tolist() == [7]
    return found["a.weight"] - BASE["a.weight"]


def test_linear_adds_what_was_learned(folders: list[Path]) -> None:
    delta = merged(folders, (0.25, 2.0), method="linear")
    torch.testing.assert_close(delta, 0.25 * ONE + 2.0 * OTHER)


def test_ties_keeps_the_largest_changes_that_agree(folders: list[Path]) -> None:
    # the two largest of four stay: [.4, 0, -.3, 0] and [0, -.6, .5, 0]; signs +, -, +; the mean of those that agree
    torch.testing.assert_close(merged(folders, method="ties"), torch.tensor([0.4, -0.6, 0.5, 0.0]))


def test_dare_drops_some_and_keeps_the_mean(tmp_path: Path) -> None:
    delta = torch.full((20_000,), 0.5)
    parts = {"base": 0.0, "one": 1.0, "other": 1.0}
    made = [folder_of(tmp_path / n, {"w": factor * delta}) for n, factor in parts.items()]
    out = tmp_path / "merged"
    merge_models(made[0], made[1:], (0.5, 0.5), out, "dare_linear", density=0.25, seed=1)
    found = load_file(out / "model.safetensors")["w"]
    values, counts = found.unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 1.0, 2.0]))  # 0.5 / 0.25 by a half each
    assert found.mean().item() == pytest.approx(0.5, abs=0.02)
    assert counts[0].item() / len(found) == pytest.approx(0.75**2, abs=0.02)
    again = tmp_path / "again"
    merge_models(made[0], made[1:], (0.5, 0.5), again, "dare_linear", density=0.25, seed=1)
    assert torch.equal(found, load_file(again / "model.safetensors")["w"])


def test_linear_is_what_peft_makes_of_two_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False))
    start = model[0].weight.detach().clone()  # type: ignore[operator]
    settings = LoraConfig(r=2, lora_alpha=4, target_modules=["0"])
    adapted = get_peft_model(model, settings, adapter_name="one")
    adapted.add_adapter("other", settings)
    layer = adapted.get_base_model()[0]  # type: ignore[index]
    for name in ("one", "other"):
        nn.init.normal_(layer.lora_B[name].weight)
    made = [folder_of(tmp_path / "base", {"0.weight": start})]
    made += [
        folder_of(tmp_path / name, {"0.weight": start + layer.get_delta_weight(name).detach()})
        for name in ("one", "other")
    ]
    merge_models(made[0], made[1:], (0.3, 0.9), tmp_path / "out", "linear")
    adapted.add_weighted_adapter(["one", "other"], [0.3, 0.9], "both", combination_type="cat")
    expected = start + layer.get_delta_weight("both").detach()
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors")["0.weight"], expected)


def test_other_models_are_refused_by_name(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    odd = folder_of(tmp_path / "odd", {**BASE, "b": ONE})
    with pytest.raises(ConfigError, match="1 tensors are in one model alone: b"):
        merge_models(folders[0], [folders[1], odd], (1.0, 1.0), out)
    shape = folder_of(tmp_path / "shape", {**BASE, "a.weight": torch.zeros(5)})
    with pytest.raises(ConfigError, match=r"a\.weight: its shape is \[5\], in the base \[4\]"):
        merge_models(folders[0], [shape, folders[1]], (1.0, 1.0), out)
    words = folder_of(tmp_path / "words", BASE, ("b",))
    with pytest.raises(ConfigError, match="its vocabulary is not the base's"):
        merge_models(folders[0], [folders[1], words], (1.0, 1.0), out)
    assert not out.exists()


def test_the_stage_writes_a_folder_that_loads(tmp_path: Path) -> None:
    words = train_text_tokenizer(["one two three"], 300)
    models = [tiny(words, seed) for seed in (0, 1, 2)]
    for place, model in enumerate(models):
        save_pretrained(model, tmp_path / str(place) / "model", words)
    (tmp_path / "1" / "model" / "trained.json").write_text('{"longest_positions": 9}')
    config = MergeModelsConfig.model_validate(
        {"base": str(tmp_path / "0"), "models": [str(tmp_path / "1"), {"model": str(tmp_path / "2"), "weight": 0.5}],
         "method": "linear"}
    )  # fmt: skip
    folder = tmp_path / "run"
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    figures = STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))
    assert figures["changed_tensors"] > 0
    loaded = DualFFN.from_pretrained(folder / "model").state_dict()
    start, one, other = (model.state_dict() for model in models)
    for name, value in loaded.items():
        expected = start[name] + (one[name] - start[name]) + 0.5 * (other[name] - start[name])
        torch.testing.assert_close(value, expected)
    assert json.loads((folder / "model" / "trained.json").read_text()) == {"longest_positions": 9}
    shutil.rmtree(tmp_path / "2" / "model")
    with pytest.raises(StageError, match=r"no model here: config\.json is missing"):
        STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))


def test_a_density_that_nothing_reads_is_refused(folders: list[Path]) -> None:
    given = {"base": str(folders[0]), "models": [str(each) for each in folders[1:]], "density": 0.2}
    assert MergeModelsConfig.model_validate(given).density == 0.2
    with pytest.raises(ValueError, match="density is set, but method: linear keeps all changes"):
        MergeModelsConfig.model_validate({**given, "method": "linear"})


def tiny(words: Tokenizer, seed: int) -> DualFFN:
    torch.manual_seed(seed)
    return DualFFN(DualFFNConfig(words.get_vocab_size(), 2, 10, 32, 1, 2, 2, 16, 64))
