"""The stage `translate`: who translates, what is set aside, and when each word of a translation may be said."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

from audiollm.audio import save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import TextPart
from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import read_jsonl
from audiollm.files.set_aside import read_set_aside
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from pipelines.compose.rows import SegmentRow
from pipelines.translate import translators
from pipelines.translate.settings import TranslateConfig
from pipelines.translate.translators import FolderTranslator
from pipelines.translate.word_alignment import WordPair, align_words, due_times

NOUNS = {"house": "casa", "dog": "cão", "song": "canção", "car": "carro", "door": "porta", "bird": "pássaro"}
ADJECTIVES = {"red": "vermelha", "old": "velha", "small": "pequena", "new": "nova", "happy": "feliz"}
VERBS = {"sees": "vê", "hears": "ouve", "wants": "quer", "finds": "acha"}
WORDS = NOUNS | ADJECTIVES | VERBS
WORD_S = 0.48
"""Seconds from a word to the next."""
ANSWER = "import sys,json\nfor line in sys.stdin:\n  if line.strip(): print({}, flush=True)"


def phrases(count: int) -> list[tuple[list[str], list[str], list[int]]]:
    """Sources, translations with noun and adjective exchanged and articles of no source, and the right links."""
    draw = random.Random(1)
    drawn = []
    for _ in range(count):
        source: list[str] = []
        target: list[str] = []
        right: list[int] = []
        for part in range(2):
            adjective, noun = draw.choice(list(ADJECTIVES)), draw.choice(list(NOUNS))
            if part:
                source.append(draw.choice(list(VERBS)))
                target.append(VERBS[source[-1]])
                right.append(len(source) - 1)
            source += [adjective, noun]
            target += [NOUNS[noun], ADJECTIVES[adjective]]
            right += [len(source) - 1, len(source) - 2]
        drawn.append((source, target, right))
    return drawn


def test_words_are_linked_with_their_translations_across_exchanged_places() -> None:
    drawn = phrases(120)
    links = align_words([WordPair(source, target) for source, target, _ in drawn])
    pairs = [
        (places, right)
        for found, (_, _, rights) in zip(links, drawn, strict=True)
        for places, right in zip(found, rights, strict=True)
    ]
    assert sum(places == [right] for places, right in pairs) >= 0.97 * len(pairs)
    assert links == align_words([WordPair(source, target) for source, target, _ in drawn])


def test_a_word_is_due_when_all_that_it_needs_is_over() -> None:
    ends_s = [0.5, 1.0, 1.5, 2.0]
    assert due_times([[0], [2], [1]], ends_s) == [0.5, 1.5, 1.0]
    assert due_times([[], [1, 3], []], ends_s) == [2.0, 2.0, 2.0]  # an article waits for its noun
    assert due_times([[], []], ends_s) == [2.0, 2.0]


def write_segments(folder: Path, texts: list[str], timed: bool = True) -> Path:
    """A recording for each text, its words with times."""
    rows = []
    for number, text in enumerate(texts):
        words = text.split()
        save(folder / f"{number}.wav", torch.zeros(1, round(16_000 * WORD_S * len(words))) + 0.01, 16_000)
        times = [
            {"word": word, "start_s": n * WORD_S, "end_s": n * WORD_S + 0.4, "score": 1.0}
            for n, word in enumerate(words)
        ]
        rows.append(
            {
                "id": f"s{number}",
                "path": str(folder / f"{number}.wav"),
                "start_s": 0.0,
                "end_s": len(words) * WORD_S,
                "speaker": "ann",
                "text": text,
                "split": "test" if number == 0 else "train",
                "measured": {"alignment": {"words": times}} if timed else {},
            }
        )
    (folder / "segments.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "segments.jsonl"


def run(folder: Path, **stages: dict[str, Any]) -> Path:
    recipe = {
        "name": "r",
        "size": "tiny",
        "seed": 1,
        "stages": [{kind: values} for kind, values in stages.items()],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(folder / "recipe.yaml", name="r", runs=folder), Console(quiet=True))
    return folder / "r"


def test_a_table_becomes_streams_that_say_no_word_before_its_source_is_over(tmp_path: Path) -> None:
    drawn = phrases(60)
    write_segments(tmp_path, [" ".join(source) for source, _, _ in drawn])
    table = ["text,target"] + [f"{' '.join(source)},{' '.join(target)}" for source, target, _ in drawn]
    (tmp_path / "pairs.csv").write_text("\n".join(table))
    folder = run(
        tmp_path,
        translate={"segments": str(tmp_path / "segments.jsonl"), "translator": str(tmp_path / "pairs.csv")},
        compose_streams={"recordings": "${translate.recordings}", "chunk_s": WORD_S, "frame_rate": 12.5},
    )  # fmt: skip
    rows = read_jsonl(folder / "translate" / "segments.jsonl")
    assert [row["target"] for row in rows] == [" ".join(target) for _, target, _ in drawn]
    assert rows[0]["translated_by"]["table"] == "pairs.csv" and len(rows[0]["translated_by"]["digest"]) == 12
    early = late = 0
    for sample, (_, target, rights) in zip(
        read_samples(folder / "compose_streams" / "streams.jsonl")[0], drawn, strict=True
    ):
        texts = [part.text for part in sample.messages[-1].content if isinstance(part, TextPart)]
        assert " ".join(filter(None, texts)) == " ".join(target)
        chunk_of = [chunk for chunk, text in enumerate(texts) for _ in text.split()]
        early += sum(
            chunk < right for chunk, right in zip(chunk_of, rights, strict=True)
        )  # word n is over in chunk n
        late += sum(chunk > max(rights[: place + 1]) for place, chunk in enumerate(chunk_of))
    words = sum(len(target) for _, target, _ in drawn)
    assert early <= 0.02 * words and late <= 0.05 * words


def test_what_cannot_be_used_is_set_aside_with_its_reason(tmp_path: Path) -> None:
    write_segments(tmp_path, ["a dog", "a house", "no no", "the end"])
    answers = {
        "a dog": '"um cão"',
        "a house": '""',
        "no no": json.dumps("não " * 40),
        "the end": '{"error": "too hard"}',
    }
    script = tmp_path / "translate.py"
    script.write_text(ANSWER.format(f"{answers!r}[json.loads(line)['text']]"))
    folder = run(
        tmp_path,
        translate={
            "segments": str(tmp_path / "segments.jsonl"),
            "translator": f"command:{sys.executable} {script}",
        },
    )
    [row] = read_jsonl(folder / "translate" / "segments.jsonl")
    assert row["target"] == "um cão" and row["target_ends_s"] == [0.4, 0.88]
    reasons = {row["id"]: row["reason"] for row in read_set_aside(folder / "translate" / "set_aside.jsonl")}
    assert reasons["s1"] == "the translation is empty" and "too hard" in reasons["s3"]
    assert "40 words for 2" in reasons["s2"]


def test_texts_without_word_times_are_translated_and_make_no_streams(tmp_path: Path) -> None:
    write_segments(tmp_path, ["a dog"], timed=False)
    script = tmp_path / "translate.py"
    script.write_text(ANSWER.format("json.dumps(json.loads(line)['text'].upper())"))
    folder = run(
        tmp_path,
        translate={
            "segments": str(tmp_path / "segments.jsonl"),
            "translator": f"command:{sys.executable} {script}",
        },
    )
    assert read_jsonl(folder / "translate" / "segments.jsonl")[0]["target"] == "A DOG"
    assert read_jsonl(folder / "translate" / "recordings.jsonl") == []
    [row] = read_set_aside(folder / "translate" / "set_aside.jsonl")
    assert "add the step `alignment`" in row["reason"]


def save_marian(folder: Path) -> Path:
    """A random Marian of a few words that ends its translations."""
    words = ["</s>", "<pad>", "<unk>", *WORDS, *WORDS.values()]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(3)
    config = MarianConfig(
        vocab_size=len(words), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64, pad_token_id=1,
        eos_token_id=0, decoder_start_token_id=1, forced_eos_token_id=None, num_beams=2, max_length=64,
    )  # fmt: skip
    model = MarianMTModel(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter)
    model.final_logits_bias[:, 0] = 4.0
    model.final_logits_bias[:, 1] = -100.0
    model.half().save_pretrained(folder)
    return folder


def test_a_model_translates_in_batches_resumes_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of other lengths in a batch change nothing; after a kill only what is missing is translated."""
    texts = [" ".join(source) for source, _, _ in phrases(7)] + ["red house", "dog"]
    segments = write_segments(tmp_path, texts)
    model = save_marian(tmp_path / "marian")
    values = {"segments": str(segments), "translator": str(model), "beams": 2}
    config = TranslateConfig.model_validate(values, context={"artifacts": set(), "inputs": []})
    alone = FolderTranslator(model, config)
    rows = [SegmentRow.model_validate(row) for row in read_jsonl(segments)]
    one_by_one = [alone.translate([row])[0] for row in rows]
    assert len({translation.text for translation in one_by_one}) > 3
    calls: list[int] = []
    translate = FolderTranslator.translate

    def counted(translator: FolderTranslator, batch: list[SegmentRow]) -> Any:
        calls.append(len(batch))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return translate(translator, batch)

    monkeypatch.setattr(translators.FolderTranslator, "translate", counted)
    settings = {"segments": str(segments), "translator": str(model), "beams": 2, "batch_size": 2}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, translate=settings)
    folder = run(tmp_path, translate=settings)
    assert calls == [2, 2, 2, 2, 2, 1]
    translated = {row["id"]: row for row in read_jsonl(folder / "translate" / "segments.jsonl")}
    expected = {row.id: t.text for row, t in zip(rows, one_by_one, strict=True) if t.text}
    assert {id: row["target"] for id, row in translated.items()} == expected
    facts = next(iter(translated.values()))["translated_by"]
    assert facts["model"].endswith("marian") and len(facts["digest"]) == 12


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"translator": "not/there"}, "no such file or folder"),
        ({"translator": "command:x", "into": "pt"}, "into is of a translation model"),
        ({"translator": "pairs.csv", "timeout_s": 3.0}, "timeout_s is of `command:PROGRAM`"),
        ({"translator": "command:no-such-program"}, "cannot be started"),
        ({"translator": "empty.csv"}, "a row needs `target`"),
        ({"translator": "marian", "into": "pt"}, "knows no language 'pt'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_translate_are_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    write_segments(tmp_path, ["a dog"])
    (tmp_path / "pairs.csv").write_text("text,target\na dog,um cão\n")
    (tmp_path / "empty.csv").write_text("text,words\na dog,um cão\n")
    if values["translator"] == "marian":
        save_marian(tmp_path / "marian")
    if not values["translator"].startswith("command:"):
        values = values | {"translator": str(tmp_path / values["translator"])}
    with pytest.raises((ConfigError, StageError), match=message):
        run(tmp_path, translate={"segments": str(tmp_path / "segments.jsonl"), **values})
