"""Settings by the names of TRL, OpenRLHF, verl and ms-swift: errors say ours."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from audiollm.errors import ConfigError
from audiollm.recipe.other_names import EARLIER_NAMES, NOT_NEEDED, OUR_NAMES
from audiollm.recipe.stages import find_stage, load_recipe

ROOT = Path(__file__).parents[3]
STAGES = ("train", "train_policy", "train_preference", "sample_answers")


@pytest.mark.parametrize(
    ("stage", "name", "ours"),
    [
        ("train_policy", "num_generations", "group_size"),
        ("train_policy", "max_completion_length", "max_answer_tokens"),
        ("train_policy", "reward_funcs", "rewards"),
        ("train_policy", "init_kl_coef", "kl"),
        ("train_policy", "beta", "it is called kl here"),
        ("train_policy", "epsilon", "it is called objective here"),
        ("train_policy", "scale_rewards", "it is called advantage here"),
        ("train_preference", "num_train_epochs", "passes"),
        ("train_preference", "per_device_train_batch_size", "batch_size"),
        ("train", "gradient_checkpointing", "activation_checkpointing"),
        ("train", "shards", "samples"),
        ("train", "listen", "eval_audio_samples"),
        ("train", "model", "start or shape"),
        ("train_preference", "model", "start"),
        ("train_flow", "latents", "samples"),
        ("sample_answers", "answers", "group_size"),
        ("evaluate_listening", "max_tokens", "max_answer_tokens"),
        ("train", "resume_from_checkpoint", "leave it out"),
    ],
)
def test_an_error_says_what_a_setting_is_called_here(
    tmp_path: Path, stage: str, name: str, ours: str
) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"stages": [{stage: {name: 8}}]}))
    with pytest.raises(ConfigError) as found:
        load_recipe(tmp_path / "a.yaml", runs=tmp_path)
    assert f"{name}: no such setting" in str(found.value) and ours in str(found.value)


def test_our_names_are_settings_of_a_stage() -> None:
    known = {field for stage in STAGES for field in find_stage(stage).config.model_fields}
    assert {name for names in OUR_NAMES.values() for name in names} <= known
    assert {theirs for theirs, names in OUR_NAMES.items() if not names} == set(NOT_NEEDED)
    assert not known & OUR_NAMES.keys()


def test_earlier_names_are_no_settings_beside_the_new_ones() -> None:
    for kind in ("train", "train_policy", "train_preference", "train_flow", "sample_answers"):
        fields = find_stage(kind).config.model_fields.keys()
        for earlier, names in EARLIER_NAMES.items():
            assert earlier == "max_tokens" or not ({*names} & fields and earlier in fields), (kind, earlier)


EARLIER_KEYS = re.compile(
    r"\b(train\.(shards|model)\b|train_flow\.latents|(train_\w+)\.model\b|(sample|first)_answers\.(answers|max_tokens)\b"
    r"|(?<![\w.])model\.(audio_encoder|audio_ffn_layers|sliding_window|code_heads|code_embeddings)\b)"
)


def test_no_text_of_ours_names_an_earlier_key() -> None:
    """Errors, help and overrides in tests: a remedy that names a key which is refused helps nobody."""
    stale = []
    for package in ("audiollm", "pipelines", "tokenizer", "recipes", "tests"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if EARLIER_KEYS.search(text) else ():
                is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
                if is_text and path != Path(__file__) and EARLIER_KEYS.search(node.value):
                    stale.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert stale == []
