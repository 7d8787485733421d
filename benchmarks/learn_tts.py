"""Does a model learn to speak, in the asked voice? Spoken digits, six speakers, three seeds.

    make -C benchmarks learn-tts DATA=../shared/data

proofs/learn_tts.yaml, the stages of recipes/quickstart.yaml, on the free spoken digit dataset (takes 0 to 4 are held
out from everything): one tokenizer, and three models that differ by their seed alone. Each speaks ten digits in six
voices, three times (180 clips), in one setting that is fixed in that file. Bars: what is said is recognized at least
0.97 as often as the real test takes are, by a classifier of digits that is trained on the real training takes; and the
asked voice is, by a like one, in 92 %.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from proof import SEEDS, Proof, check_data, print_line, proof_parser

from audiollm.files.atomic import read_json

BENCH, RECORDINGS = "learn_tts", "fsdd/recordings"
TEXT, VOICE = "what is said, relative to real takes", "the asked voice"
BARS = {TEXT: 0.97, VOICE: 0.92}


def main() -> None:
    options = proof_parser(__doc__, seeds=None).parse_args()
    check_data(options.data, RECORDINGS)
    proof = Proof(options.runs / BENCH, SEEDS, options.overrides, [BENCH], threads=None)
    proof.run(BENCH, recordings=(options.data / RECORDINGS).resolve())
    report(proof)


def source_of(runs: Path, data: Path) -> Path:
    """The folder of this proof's run, with its tokenizer and codes: what is there is not made again."""
    check_data(data, RECORDINGS)
    proof = Proof(runs / BENCH)
    proof.run(f"{BENCH}_tokenizer", recordings=(data / RECORDINGS).resolve())
    return proof.folder


def report(proof: Proof) -> None:
    """A JSON line a seed and measure, and one of the mean over seeds with its interval."""
    scores = [read_json(proof.folder / stage / "scores.json") for stage in proof.stages("evaluate")]
    show = partial(print_line, BENCH, unit="share of 180 clips")
    for name, bar in BARS.items():
        values = [measure(row, name) for row in scores]
        for seed, value in zip(proof.seeds, values, strict=True):
            show(f"seed {seed}: {name}", [value], peer=bar)
        show(f"mean of {len(values)} seeds: {name}", values, peer=bar)


def measure(scores: dict[str, Any], name: str) -> float:
    """The score of one model: of its words relative to real takes, or of its voice."""
    if name == TEXT:
        return float(scores["relative"]["classifier"])
    return float(scores["sets"]["generated"]["speaker"]["accuracy"])


if __name__ == "__main__":
    main()
