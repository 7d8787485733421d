"""Does a model that speaks learn from preferences between its own takes? Spoken digits, six speakers.

    make -C benchmarks learn-tts-preference DATA=../shared/data

With the tokenizer of learn_tts.py (made there, or here where it is not there yet), for each of three seeds
(proofs/learn_tts_preference*.yaml has all settings):

- a model learns to say digits in six voices, but not for long enough to say all of them right (`first`);
- it says each digit in each voice many times, and Pocketsphinx writes down what it hears. Of each four takes, one
  that is heard as asked and one that is not make a pair;
- one training on these pairs (`dpo`: DPO with cross entropy on the better take), on the codes as they were made;
- the same budget with the two of a pair exchanged at random (`shuffled`), which must gain nothing.

All models then speak ten digits in six voices, fifteen times, in the usual setting. What counts is the classifier of
digits that learn_tts.py has, trained on real takes: it had no part in the ranking or the training. The settings
were chosen with seed 0, which is not among the three. Bars: a quarter fewer wrong digits; the asked voice is right no
less often than before, up to 2 points.
"""

from __future__ import annotations

import random
import statistics
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from learn_tts import source_of
from proof import Proof, print_line, print_table, proof_parser, write_once

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample
from audiollm.evaluate.judges.classifier import ClipClassifier
from audiollm.evaluate.judges.judging import SpeechJudges
from audiollm.evaluate.speech.run import read_generated_clips, right
from audiollm.evaluate.speech.trained_judges import JUDGE_RATE, MAX_JUDGED_CLIP_S
from audiollm.files.atomic import write_json

BENCH = "learn_tts_preference"
FIRST_CHAINS = (f"{BENCH}_first", f"{BENCH}_judges")
COPIES, HELD_OUT_COPIES = 20, 2
"""Prompts of each digit in each voice; pairs of the last ones are held out."""
KINDS = ("first", "dpo", "shuffled")
FEWER, VOICE_LOSS = 0.25, 0.02
"""Bars: at least this share of the wrong digits is gone; at most this share of clips loses the asked voice."""

Scores = Mapping[str, Sequence[Mapping[str, float]]]
"""Kind of model -> the shares of wrong digits (`wrong`) and of right voices (`voice`) of each seed's."""


def main() -> None:
    options = tts_parser(__doc__).parse_args()
    source = options.source or source_of(options.runs, options.data)
    proof = Proof(
        options.runs / BENCH, options.seeds, options.overrides, (*FIRST_CHAINS, f"{BENCH}_pairs", BENCH)
    )
    source, data = source.resolve(), proof.folder / "data"
    write_prompts(source / "compose" / "samples.jsonl", data / "prompts.jsonl")
    train_firsts(proof, source)
    proof.run(f"{BENCH}_pairs", source=source)
    for seed in proof.seeds:
        pairs = proof.folder / f"pairs_{seed}" / "samples.jsonl"
        write_shuffled(pairs, data / f"shuffled-{seed}.jsonl", seed)
    proof.run(BENCH, source=source)
    scores = score(proof, KINDS)
    write_json(proof.folder / "scores.json", scores)
    print_scores(
        proof, scores, "Digits that a classifier hears wrong, voices that it hears right, held-out pairs"
    )
    report(BENCH, scores, held="dpo")


def tts_parser(description: str | None) -> ArgumentParser:
    """The options of proofs on the tokenizer of learn_tts.py."""
    parser = proof_parser(description)
    what = (
        "a run of recipes/quickstart.yaml on these recordings, whose tokenizer is taken; else learn_tts.py's"
    )
    parser.add_argument("--source", type=Path, help=what)
    return parser


def train_firsts(proof: Proof, source: Path) -> None:
    """The first models, what they say, and the judges of the end."""
    proof.run(f"{BENCH}_first", source=source)
    proof.run(f"{BENCH}_judges", source=source, judged=judged_by(proof))


def judged_by(proof: Proof) -> str:
    """The speech that stages which train judges are given."""
    return f"says_first_{proof.seeds[0]}/generated.jsonl"


def write_prompts(real: Path, path: Path) -> None:
    """Write each digit in each voice `COPIES` times, without a recording."""
    sample_by_key = {
        (str(sample.metadata["text"]), str(sample.metadata["speaker"])): sample
        for sample in reversed(read_samples(real)[0])
        if sample.metadata["split"] == "train"
    }
    prompts = []
    for (text, speaker), sample in sorted(sample_by_key.items()):
        for number in range(COPIES):
            split = "test" if number >= COPIES - HELD_OUT_COPIES else "train"
            about = {"text": text, "speaker": speaker, "split": split}
            update = {"id": f"{text}_{speaker}_{number}", "messages": sample.messages[:-1], "metadata": about}
            prompts.append(sample.model_copy(update=update))
    write_once(path, prompts)


def write_shuffled(pairs: Path, path: Path, seed: int) -> None:
    """Write the pairs with the scores of each one's answers exchanged by the toss of a coin; held-out ones stay."""
    coins = random.Random(seed)
    samples = read_samples(pairs)[0]
    write_once(path, [_exchanged(sample) if _is_exchanged(sample, coins) else sample for sample in samples])


def score(proof: Proof, kinds: Sequence[str], says: str = "says") -> Scores:
    """The share of wrong digits and of right voices of every model, by the judges that real takes trained."""
    folder = proof.folder / "judges" / "judges"
    trained = {name: ClipClassifier.load(folder / name) for name in ("classifier", "speaker")}
    judges = SpeechJudges(None, None, trained, None, MAX_JUDGED_CLIP_S, JUDGE_RATE)

    def shares(stage: str) -> dict[str, float]:
        clips = read_generated_clips(proof.folder / stage / "generated.jsonl")
        judged = [(clip, judges.judge(clip, embedded=False)) for clip in clips]
        wrong, voice = (
            statistics.mean(bool(right(clip, scores, judge, judges)) for clip, scores in judged)
            for judge in trained
        )
        return {"wrong": 1 - wrong, "voice": voice}

    return {kind: [shares(f"{says}_{kind}_{seed}") for seed in proof.seeds] for kind in kinds}


def print_scores(proof: Proof, scores: Scores, title: str) -> None:
    """The table for people."""
    rows = []
    for place, seed in enumerate(proof.seeds):
        for kind, kind_scores in scores.items():
            figures = proof.figures(f"first_{seed}" if kind == "first" else f"by_{kind}_{seed}")
            shares, spent = kind_scores[place], f"{figures['cpu_seconds']:.0f}"
            rows.append(
                [f"{kind}_{seed}", shares["wrong"], shares["voice"], figures.get("accuracy", ""), spent]
            )
    columns = ("model", "wrong digits", "right voices", "pairs ordered right", "CPU-s")
    print_table(proof.console, title, columns, rows)


def report(bench: str, scores: Scores, held: str | None, setting: str = "") -> None:
    """The JSON lines.

    Args:
        held: the kind that the bars are for.
        setting: how the models spoke, where there are several ways.
    """
    show = partial(print_line, bench)
    first = scores["first"]
    show(f"{setting}first: wrong digits", [row["wrong"] for row in first])
    for kind in list(scores)[1:]:
        pairs = list(zip(first, scores[kind], strict=True))
        fewer = [1 - after["wrong"] / max(1e-9, before["wrong"]) for before, after in pairs]
        gained = [after["voice"] - before["voice"] for before, after in pairs]
        bar = FEWER if kind == held else None
        show(f"{setting}{kind}: fewer wrong digits, of those before", fewer, peer=bar)
        show(f"{setting}{kind}: right voices gained", gained)
        if kind == held:
            bar = statistics.mean(row["voice"] for row in first) - VOICE_LOSS
            show(f"{setting}{kind}: right voices", [row["voice"] for row in scores[kind]], peer=bar)


# ------------------------------------------------------------------------------------------------ private


def _is_exchanged(sample: Sample, coins: random.Random) -> bool:
    return sample.metadata.get("split") != "test" and coins.random() < 0.5


def _exchanged(sample: Sample) -> Sample:
    better, worse = sample.answers
    scores = (
        better.model_copy(update={"score": worse.score}),
        worse.model_copy(update={"score": better.score}),
    )
    return sample.model_copy(update={"answers": list(scores)})


if __name__ == "__main__":
    main()
