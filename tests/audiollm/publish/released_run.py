"""A run as `audiollm run` leaves it, with tiny random models: tokenizer, model, clips, scores; and a corpus."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from audiollm.audio import save
from audiollm.data.text.tokenizer import SPEAKERS_FILE, train_text_tokenizer
from audiollm.files.atomic import write_json, write_jsonl
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from audiollm.recipe.runner import StageResult
from tokenizer.native.model import AudioTokenizer, TokenizerConfig

BOOKS, CODES = 3, 16
SHARE = {"accuracy": 0.75, "low": 0.43, "high": 0.93, "n": 8}


def write_stage(folder: Path, kind: str, **settings: Any) -> None:
    result = StageResult(folder.name, kind, "0", "done", settings, figures={})
    write_json(folder / "stage.json", asdict(result))


def write_tone(path: Path, seconds: float = 0.2, pitch: int = 1) -> None:
    save(path, 0.3 * torch.sin(torch.arange(round(24_000 * seconds)) * 0.05 * pitch)[None], 24_000)


def write_codec(folder: Path) -> None:
    torch.manual_seed(0)
    shape = {"num_codebooks": BOOKS, "codebook_size": CODES, "latent_dim": 8, "mel_hidden_size": 16}
    layers = {"hidden_size": 16, "encoder_layers": (1, 1), "decoder_layers": (1, 1)}
    AudioTokenizer(TokenizerConfig(**shape, **layers)).save_pretrained(folder)  # type: ignore[arg-type]


def write_run(folder: Path) -> Path:
    """The run `digits`; returns its folder."""
    run = folder / "runs" / "digits"
    write_codec(run / "train_tokenizer" / "model")
    write_stage(run / "train_tokenizer", "train_tokenizer", preset="native")
    torch.manual_seed(0)
    words = train_text_tokenizer(
        ["system user assistant Generate audio following instruction one two"] * 3, 320
    )
    config = DualFFNConfig(
        words.get_vocab_size(), num_codebooks=BOOKS, codebook_size=CODES + 2, hidden_size=32, num_layers=2,
        num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
    )  # fmt: skip
    model = run / "train" / "model"
    save_pretrained(DualFFN(config), model, words, codec=run / "train_tokenizer" / "model")
    write_json(model / SPEAKERS_FILE, ["anna"])
    (run / "train" / "checkpoint").mkdir()
    (run / "train" / "checkpoint" / "optimizer.safetensors").write_bytes(b"moments")
    (model / "optimizer.safetensors").write_bytes(b"moments")
    (model / "training_args.bin").write_bytes(b"pickle")
    (model / "link.json").symlink_to("/etc/hostname")
    snapshot = folder / "hub" / "models--big--words" / "snapshots" / ("a" * 40)  # no longer on this machine
    write_stage(run / "train", "train", start=str(snapshot), codec=str(run / "train_tokenizer" / "model"))
    rows = []
    for number in range(8):
        write_tone(run / "generate" / "audio" / f"clip{number}.wav", pitch=number + 1)
        rows.append(
            {
                "id": str(number),
                "path": f"audio/clip{number}.wav",
                "text": f"text {number}",
                "speaker": "anna",
            }
        )
    write_jsonl(run / "generate" / "generated.jsonl", rows)
    write_stage(run / "generate", "generate", model=str(model))
    scores = {
        "suite": "tts", "judge": "classifier", "judges": {"classifier": {"bandwidth_hz": 8000.5}},
        "sets": {
            "real": {"n": 8, "classifier": {**SHARE, "accuracy": 1.0}},
            "generated": {"n": 8, "classifier": {**SHARE, "by_text": {"one": SHARE}}, "not_stopped": 0.5},
        },
        "warnings": ["the recognizer also wrote the texts"],
    }  # fmt: skip
    write_json(run / "evaluate" / "scores.json", scores)
    write_stage(
        run / "evaluate", "evaluate", audio=str(run / "generate" / "generated.jsonl"), model=None, seed=3
    )
    write_json(run / "of_another" / "results.json", {"accuracy": 0.999, "low": 0.9, "high": 1.0})
    write_stage(run / "of_another", "evaluate_listening", model=str(folder / "another" / "train"))
    return run


def write_corpus(folder: Path) -> Path:
    """A run of `annotate` on two recordings; returns its folder."""
    corpus = folder / "corpus"
    rows = []
    for number, language in enumerate(["en", "en", "de"]):
        recording = folder / "raw" / f"{'ab'[number // 2]}.wav"
        write_tone(recording, 2.0)
        rows.append(
            {
                "id": f"{recording.stem}/{number}", "path": str(recording), "file": recording.name,
                "digest": "0" * 64, "start_s": 0.5 * number, "end_s": 0.5 * number + 0.25, "duration_s": 0.25,
                "kind": "speech", "speaker": "theo", "split": "train", "text": "/a/b or not", "text_source": "whisper",
                "language": language, "heard": {"whisper": "/a/b or not"},
                "measured": {"probe": {"archive": str(folder / "raw" / "all.tar")}},
            }
        )  # fmt: skip
    write_jsonl(corpus / "segments.jsonl", rows)
    funnel = {"seconds_seen": 4.0, "seconds": 0.75, "reasons": {"too quiet": 2}}
    funnel |= {"recognized_texts": {"reasons": {"unsure words": 1}}}
    write_json(corpus / "funnel.json", funnel)
    write_jsonl(corpus / "set_aside.jsonl", [{"place": str(folder / "raw/x.wav"), "kind": "not audio"}])
    write_stage(corpus, "annotate", preset="quickstart")
    return corpus


def json_of(content: bytes) -> Any:
    return json.loads(content)
