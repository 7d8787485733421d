"""A folder of transformers that brings code of its own: it is refused, and never run, whatever is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


PROGRAM = """
import json, sys
from pathlib import Path
from audiollm.recipe.config import ConfigError

for name, code in json.loads(sys.argv[1]).items():
    folder = Path(name)
    try:
        exec(code)
    except ConfigError as error:
        print(json.dumps([name, str(error)]))
"""
"""One process tries all loaders: each by itself would import its libraries anew."""


def write_folder(folder: Path) -> None:
    """A model whose configuration asks for a class of its own code, which would leave a file."""
    folder.mkdir()
    classes = (
        "AutoConfig", "AutoModel", "AutoModelForCTC", "AutoModelForAudioClassification",
        "AutoModelForAudioXVector", "AutoModelForMultimodalLM", "AutoModelForSpeechSeq2Seq", "AutoProcessor",
        "AutoFeatureExtractor", "AutoTokenizer",
    )  # fmt: skip
    code = dict.fromkeys(classes, "evil.Evil")
    for name in ("config", "preprocessor_config", "processor_config", "tokenizer_config"):
        mapped = {**code, "AutoTokenizer": ["evil.Evil", None]} if name == "tokenizer_config" else code
        (folder / f"{name}.json").write_text(json.dumps({"model_type": "evil", "auto_map": mapped}))
    (folder / "evil.py").write_text(f"open({str(folder / 'was run')!r}, 'w')\nclass Evil: pass\n")
    (folder / "model.safetensors").write_bytes(b"")


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in LOADERS}
    for folder in folders.values():
        write_folder(folder)
    work = json.dumps({str(folders[name]): code for name, code in LOADERS.items()})
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, work], input="y\n" * 99, capture_output=True, text=True
    )
    assert finished.returncode == 0 and "[y/N]" not in finished.stdout, finished.stderr[-2000:]
    refusals = dict(json.loads(line) for line in finished.stdout.splitlines() if line.startswith("["))
    assert refusals.keys() == set(map(str, folders.values()))
    assert not [folder for folder in folders.values() if (folder / "was run").exists()]
