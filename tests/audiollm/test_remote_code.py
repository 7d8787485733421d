"""A folder of transformers that brings code of its own: it is refused, and never run, whatever is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOADERS = {
    "chat": "from audiollm.evaluate.subjects.chat import FolderChat; FolderChat.load(folder, 9)",
    "policy": "from audiollm.families.listener.policy import ListenerPolicy as P; P.load(folder)",
    "recognizer": "from audiollm.evaluate.judges.pretrained import PretrainedRecognizer as R; R(folder)",
    "speaker judge": "from audiollm.evaluate.judges.pretrained import PretrainedSpeakerJudge as J; J(folder)",
    "emotion judge": "from audiollm.evaluate.judges.pretrained import PretrainedEmotionJudge as J; J(folder)",
    "tagger": "from audiollm.evaluate.judges.taggers import TransformersTagger as T; T(folder)",
    "CTC": "from audiollm.models.recognition.ctc import CtcModel; CtcModel(folder, 'cpu')",
    "teacher": "from tokenizer.teacher.model import load_teacher; load_teacher(folder)",
}


@pytest.mark.parametrize("loader", LOADERS)
def test_code_in_a_folder_is_never_run(tmp_path: Path, loader: str) -> None:
    classes = (
        "AutoConfig", "AutoModel", "AutoModelForCTC", "AutoModelForAudioClassification",
        "AutoModelForAudioXVector", "AutoModelForMultimodalLM", "AutoModelForSpeechSeq2Seq", "AutoProcessor",
        "AutoFeatureExtractor", "AutoTokenizer",
    )  # fmt: skip
    code = dict.fromkeys(classes, "evil.Evil")
    for name in ("config", "preprocessor_config", "processor_config", "tokenizer_config"):
        mapped = {**code, "AutoTokenizer": ["evil.Evil", None]} if name == "tokenizer_config" else code
        (tmp_path / f"{name}.json").write_text(json.dumps({"model_type": "evil", "auto_map": mapped}))
    marker = tmp_path / "was run"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "model.safetensors").write_bytes(b"")
    call = f"from pathlib import Path; folder = Path({str(tmp_path)!r})\n{LOADERS[loader]}"
    tried = f"try:\n    exec({call!r})\nexcept ConfigError as error:\n    print('refused', error)"
    script = f"from audiollm.recipe.config import ConfigError\n{tried}"
    made = subprocess.run([sys.executable, "-c", script], input="y\n" * 9, capture_output=True, text=True)
    assert made.returncode == 0 and made.stdout.startswith("refused"), made.stdout + made.stderr[-2000:]
    assert not marker.exists() and "[y/N]" not in made.stdout
