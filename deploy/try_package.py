"""Install a wheel or an sdist into an environment of its own, and use it there as someone new to it would.

    python deploy/try_package.py dist/audiollm-0.1.0-py3-none-any.whl --python python3.12
    python deploy/try_package.py dist/audiollm-0.1.0.tar.gz --recordings ~/recordings --keep

Everything happens in an empty folder outside of any checkout, with a home of its own and without the Hugging Face hub:
doctor, the quickstart with few steps, an annotation, speech from the model, and a project of `audiollm init` whose own
stage and own reward run. The environment takes 7 GB and is removed at the end. The script needs nothing but Python.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

QUICKSTART = (
    "annotate.corpus.words=[one,two,three]", "annotate.corpus.takes=4", "annotate.corpus.test_takes=1",
    "annotate.quality_sample=4", "compose.min_seconds=10",
    "train_tokenizer.steps=10", "train_tokenizer.batch_size=8", "train_tokenizer.hidden_size=64",
    "tokenize.encodings=2", "train.steps=20", "train.batch_size=16", "train.evaluations=1",
    "train.shape.hidden_size=64", "train.shape.num_layers=2", "generate.takes=1", "evaluate.judge_steps=30",
)  # fmt: skip
"""Settings of recipes/quickstart.yaml with which every stage runs, and learns nothing, in a minute."""
SENTENCES = """\
A dog barks while people walk along the river.
The old clock on the wall struck seven times.
She opened the window and listened to the rain.
The train left the station before the sun rose.
They sang a quiet song beside the burning fire.
A small boat drifted slowly across the lake.
"""
VOICE = (
    "judge=null", "pronunciation=null", "phrase_words=null",
    "corpus={texts: sentences.txt, test_texts: 1, voices_per_text: 3}", "compose.min_seconds=10", "codec_steps=10",
    "train_tokenizer.hidden_size=64", "tokenize.encodings=1", "train.cpu_minutes=null", "train.steps=10",
    "train.evaluations=1", "train.shape.hidden_size=64", "train.shape.num_layers=2", "evaluate.judge_steps=20",
)  # fmt: skip
"""Settings of recipes/voice/small.yaml for the same, without the Whisper and the package that it asks for."""
BEFORE_TOKENIZER = """\
  - my_parts:short_texts: {samples: "${compose.samples}", most_words: 9}
"""
BEFORE_GENERATE = """\
  - train_policy:
      start: "${train.checkpoint}"
      codec: "${train_tokenizer.checkpoint}"
      samples: "${short_texts.samples}"
      answer: audio
      rewards: {"my_parts:concise": 1.0}
      group_size: 4
      batch_size: 2
      max_frames: 40
      steps: 10
"""


@dataclass
class Trial:
    """An environment, the empty folder in which its commands run, and what each of them took.

    Args:
        folder: for the environment and all that the commands write.
    """

    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def programs(self) -> Path:
        return self.folder / "environment" / "bin"

    def run(self, title: str, *command: object, folder: Path | None = None) -> str:
        """Run a program of the environment, or another one by its path; its output.

        Raises:
            SystemExit: it failed; the message has its last lines.
        """
        words = [str(word) for word in command]
        program = self.programs / words[0]
        print(f"==> {title}: {shlex.join(words)[:200]}", flush=True)
        begun = time.perf_counter()
        result = subprocess.run(
            [str(program) if program.exists() else words[0], *words[1:]],
            cwd=folder or self.work,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.seconds[title] = time.perf_counter() - begun
        if result.returncode:
            sys.exit(f"{result.stdout[-6000:]}\n{title}: failed with exit code {result.returncode}")
        return result.stdout

    def environment(self) -> dict[str, str]:
        """The variables of the caller without those that lead to another audiollm, and with a home of its own."""
        names = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
        names += ("XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME")
        variables = {name: value for name, value in os.environ.items() if name not in names}
        variables |= {"HOME": str(self.folder / "home"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        return variables | {"PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}"}

    def install(self, package: Path, python: str, pip_options: Sequence[str]) -> None:
        """Make the environment and install the package with all that it asks for."""
        for folder in (self.work, self.folder / "home"):
            folder.mkdir(parents=True)
        self.run("environment", python, "-m", "venv", self.programs.parent)
        # installed with the caller's home: pip reads its settings and its cache there
        options = ("--quiet", "--no-compile", "--disable-pip-version-check", *pip_options)
        command = [str(self.programs / "pip"), "install", *options, str(package.resolve())]
        print(f"==> installing {package.name}", flush=True)
        begun = time.perf_counter()
        if subprocess.run(command, cwd=self.work).returncode:
            sys.exit(f"{package.name} could not be installed")
        self.seconds["install"] = time.perf_counter() - begun
        self.run("dependencies agree", "pip", "check", "--disable-pip-version-check")


# ---- what is tried, in this order; each takes what the ones before it left in the folder


def look_around(trial: Trial, recordings: Path | None) -> None:
    """The commands and stages load from the environment, and the folder of a checkout is not needed."""
    place = trial.run("import", "python", "-c", "import audiollm; print(audiollm.__file__)").strip()
    _require(place.startswith(str(trial.programs.parent)), f"audiollm was imported from {place}")
    _require("does not load" not in trial.run("help", "audiollm", "--help"), "a command does not load")
    trial.run("doctor", "audiollm", "doctor")
    trial.run("plan", "audiollm", "plan", "recipes/quickstart.yaml")


def run_quickstart(trial: Trial, recordings: Path | None) -> None:
    """Every stage of the recipe, from a corpus that it speaks itself to its report."""
    trial.run("quickstart", "audiollm", "run", "recipes/quickstart.yaml", *QUICKSTART)
    _require_file(trial.work / "runs/quickstart/report.html")


def annotate(trial: Trial, recordings: Path | None) -> None:
    """Recordings to segments; without some of the caller's, those that the quickstart spoke."""
    folder = recordings.resolve() if recordings else trial.work / "runs/quickstart/annotate/audio"
    trial.run("annotate", "audiollm", "annotate", folder, "-o", "corpus")
    _require((trial.work / "corpus/segments.jsonl").read_text(encoding="utf-8").count("\n") > 0, "no segment")
    _require_file(trial.work / "corpus/report.html")


def speak(trial: Trial, recordings: Path | None) -> None:
    """A text in the voice of the quickstart's model."""
    out = trial.work / "out.wav"
    trial.run(
        "generate", "audiollm", "generate", "--model", "runs/quickstart/train", "--text", "one two", "-o", out
    )
    with wave.open(str(out)) as sound:
        _require(sound.getnframes() > 0, f"{out} has no sound")


def begin_project(trial: Trial, recordings: Path | None) -> None:
    """A project of one's own, whose stage and reward are put into its recipe as its README says."""
    trial.run("init", "audiollm", "init", "mine", "--recipe", "voice")
    project = trial.work / "mine"
    (project / "sentences.txt").write_text(SENTENCES, encoding="utf-8")
    recipe = project / "recipes/voice/small.yaml"
    stages = recipe.read_text(encoding="utf-8").replace("${compose.samples}", "${short_texts.samples}")
    for place, lines in (("train_tokenizer", BEFORE_TOKENIZER), ("generate", BEFORE_GENERATE)):
        begin, middle, end = stages.partition(f"  - {place}:")
        _require(bool(middle), f"{recipe} has no stage {place}")
        stages = begin + lines + middle + end
    recipe.write_text(stages, encoding="utf-8")
    output = trial.run("project", "audiollm", "run", "recipes/voice/small.yaml", *VOICE, folder=project)
    _require(" samples have at most 9 words" in output, "the stage of my_parts.py did not run")
    metrics = (project / "runs/voice-small/train_policy/metrics.jsonl").read_text(encoding="utf-8")
    _require("my_parts:concise" in metrics, "the reward of my_parts.py is not among the metrics")
    _require_file(project / "runs/voice-small/report.html")


TRIALS: tuple[Callable[[Trial, Path | None], None], ...] = (
    look_around, run_quickstart, annotate, speak, begin_project,
)  # fmt: skip


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        sys.exit(problem)


def _require_file(path: Path) -> None:
    _require(path.is_file() and path.stat().st_size > 0, f"{path} was not written")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", type=Path, help="the wheel or the sdist")
    parser.add_argument(
        "--python", default=sys.executable, help="the Python of the environment (default: this one)"
    )
    parser.add_argument("--recordings", type=Path, help="a folder for `annotate` (default: the quickstart's)")
    parser.add_argument(
        "--folder", type=Path, help="for the environment and the runs (default: a temporary one)"
    )
    parser.add_argument("--pip", default="", help="options of `pip install`, as in '--extra-index-url URL'")
    parser.add_argument("--keep", action="store_true", help="remove nothing at the end")
    options = parser.parse_args(arguments)
    trial = Trial(Path(options.folder or tempfile.mkdtemp(prefix="audiollm-")).resolve())
    try:
        trial.install(options.package, options.python, shlex.split(options.pip))
        for step in TRIALS:
            step(trial, options.recordings)
        print(f"{options.package.name} works with {trial.run('version', 'python', '--version').strip()}:")
        for title, seconds in trial.seconds.items():
            print(f"  {seconds:7.1f} s  {title}")
    finally:
        if not options.keep:
            shutil.rmtree(trial.folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
