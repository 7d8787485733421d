"""The vote over three recognizers against the best single one of them: word errors.

    python benchmarks/consensus.py [--data ../shared/data] [--full] [--sentences 300] [--clips 10]

*Simulated*: sentences of LibriSpeech-PC, and three recognizers whose substitutions, deletions and insertions are drawn
independently at known rates; with confidences (Beta 5:2 where a word is right, 2:3 where it is wrong) and without. A
substitute is drawn from the words of all sentences, or (`alike`) from three words that are common to all recognizers,
so that two of them may agree in an error.
*Real*: read speech with transcripts (ljspeech_32, read_speech_en), decoded by Pocketsphinx with the open vocabulary
three times: as it is, and played 8 % faster and 8 % slower (speed and pitch). The three share model and dictionary, so
most of their errors are common, and no vote takes those away.

`ours` is the vote's word error rate, `peer` that of the best single recognizer, `ratio` peer over ours, with its 95 %
interval when sentences (clips) are drawn anew.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from measure import bench_parser, parse_options, print_row

from audiollm.audio import load
from audiollm.data.text.forms import comparison_form
from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer
from audiollm.evaluate.report.text_errors import count_errors
from pipelines.annotate.words.rover import Confidences, Hypothesis, vote

RATES = ((0.08, 0.03, 0.02), (0.06, 0.04, 0.04), (0.10, 0.02, 0.03))
"""Substitutions, deletions and insertions a word, of each simulated recognizer."""
SPEEDS = (1.0, 1.08, 0.92)
LIBRIVOX = "pocketsphinx/test/data/librivox"
TRANSCRIPTS = {
    "whisper/tests/jfk.flac": "And so, my fellow Americans, ask not what your country can do for you, ask what "
    "you can do for your country.",
    "onnxruntime-extensions/test/data/1272-141231-0002.flac": "a man said to the universe sir i exist",
    "wenet/test/resources/librispeech-1995-1837-0001.wav": "it was the first great sorrow of his life it was not so "
    "much the loss of the cotton itself but the fantasy the hopes the dreams built around it",
    "lhotse/test/fixtures/ljspeech/storage/LJ002-0020.wav": "in eighteen thirteen",
    "lhotse/test/fixtures/ljspeech/storage/LJ002-0035.wav": "eight the press yard",
}
"""Texts of files of read_speech_en, from its README and manifests."""
VOTES = {
    "votes alone": None,
    "confidences, alpha 0.8": Confidences(),
    "confidences, alpha 0.5": Confidences(alpha=0.5),
    "largest confidence, alpha 0.5": Confidences("maximum", alpha=0.5),
}


def main() -> None:
    data = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--sentences", type=int, default=300)
    parser.add_argument("--clips", type=int, default=10, help="at most; 0: the simulation alone")
    arguments = parse_options(parser, sentences=1000, clips=40)
    torch.set_num_threads(1)
    sentences = read_sentences(arguments.data, arguments.sentences)
    for alike in (False, True):
        hypotheses = [simulate(sentences, rates, alike, seed) for seed, rates in enumerate(RATES)]
        kind = "simulated, alike errors" if alike else "simulated, independent errors"
        compare(kind, sentences, hypotheses)
    if arguments.clips:
        clips = read_clips(arguments.data)[: arguments.clips]
        decoded = decode([path for path, _ in clips])
        compare("real, three speeds of Pocketsphinx", [text for _, text in clips], decoded)


def compare(case: str, texts: Sequence[str], hypotheses: Sequence[Sequence[Hypothesis]]) -> None:
    """Print a line for each way to vote.

    Args:
        hypotheses: of each recognizer, what it heard of each text.
    """
    forms = [_form(text) for text in texts]
    words_N = np.array([len(form.split()) for form in forms])
    singles_RN = np.array(
        [
            [_errors(form, hypothesis.text) for form, hypothesis in zip(forms, outputs, strict=True)]
            for outputs in hypotheses
        ]
    )
    best_N = singles_RN[singles_RN.sum(axis=1).argmin()]
    for method, confidences in VOTES.items():
        voted = [vote(together, "en", confidences) for together in zip(*hypotheses, strict=True)]
        errors_N = np.array([_errors(form, outcome.text) for form, outcome in zip(forms, voted, strict=True)])
        low, high = ratio_interval(best_N, errors_N)
        ours, peer = (float(errors.sum() / words_N.sum()) for errors in (errors_N, best_N))
        print_row(
            "consensus", f"{case}, {method}", ours, peer, "word error rate", low=round(low, 3), high=round(high, 3),
            ratio=float(best_N.sum() / max(errors_N.sum(), 1)), texts=len(texts), words=int(words_N.sum()),
            singles=[round(float(errors.sum() / words_N.sum()), 4) for errors in singles_RN],
            pairwise_wer=round(float(np.mean([outcome.pairwise_wer or 0.0 for outcome in voted])), 4),
        )  # fmt: skip


def ratio_interval(peer_N: np.ndarray, ours_N: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """The 95 % percentile interval of the ratio of both sums when texts are drawn anew (Bisani and Ney, 2004)."""
    generator = np.random.default_rng(0)
    indices = generator.integers(len(peer_N), size=(draws, len(peer_N)))
    low, high = np.percentile(
        peer_N[indices].sum(axis=1) / np.maximum(ours_N[indices].sum(axis=1), 1), [2.5, 97.5]
    )
    return float(low), float(high)


# ----------------------------------------------------------------------------------------------- simulated


def read_sentences(data: Path, count: int) -> list[str]:
    """Different sentences of at least four words, in their spoken form."""
    path = data / "text_benchmarks" / "F5-TTS" / "data" / "librispeech_pc_test_clean_cross_sentence.lst"
    texts = [column for line in path.read_text().splitlines() for column in line.split("\t")[2::3]]
    forms = dict.fromkeys(_form(text) for text in texts)
    return [form for form in forms if len(form.split()) >= 4][:count]


def simulate(
    sentences: Sequence[str], rates: tuple[float, float, float], alike: bool, seed: int
) -> list[Hypothesis]:
    """Simulate the output of a recognizer with errors at these rates."""
    words = sorted({word for sentence in sentences for word in sentence.split()})
    generator = random.Random(seed)
    substitution, deletion, insertion = rates
    hypotheses = []
    for sentence in sentences:
        recognized: list[tuple[str, float | None]] = []
        for word in sentence.split():
            chance = generator.random()
            if chance < substitution:
                place = (
                    words.index(word) + generator.randint(1, 3) if alike else generator.randrange(len(words))
                )
                recognized.append((words[place % len(words)], generator.betavariate(2, 3)))
            elif chance >= substitution + deletion:
                recognized.append((word, generator.betavariate(5, 2)))
            if generator.random() < insertion:
                recognized.append((generator.choice(words), generator.betavariate(2, 3)))
        hypotheses.append(Hypothesis(" ".join(word for word, _ in recognized), recognized))
    return hypotheses


# ---------------------------------------------------------------------------------------------------- real


def read_clips(data: Path) -> list[tuple[Path, str]]:
    """Recordings with what is said in them."""
    lj, read = data / "ljspeech_32", data / "read_speech_en"
    with (lj / "metadata.csv").open(newline="") as file:
        rows = list(csv.reader(file, delimiter="|", quoting=csv.QUOTE_NONE))
    clips = [(lj / "wavs" / f"{row[0]}.flac", row[2]) for row in rows]
    clips += [(read / path, text) for path, text in TRANSCRIPTS.items()]
    for line in (read / LIBRIVOX / "transcription").read_text().splitlines():
        text, _, name = line.rpartition(" (")
        clips.append(
            (read / LIBRIVOX / f"{name.strip(')')}.wav", text.replace("<s>", "").replace("</s>", ""))
        )
    return [(path, text) for path, text in clips if path.is_file()]


def decode(paths: Sequence[Path]) -> list[list[Hypothesis]]:
    """Transcribe each recording at each speed with Pocketsphinx."""
    recognizer = PocketsphinxRecognizer()
    hypotheses_by_speed: list[list[Hypothesis]] = [[] for _ in SPEEDS]
    for path in paths:
        sound = load(path)
        for hypotheses, speed in zip(hypotheses_by_speed, SPEEDS, strict=True):
            words = recognizer.recognize_words(sound.samples_CN, round(sound.sample_rate * speed))
            hypotheses.append(
                Hypothesis(" ".join(word.word for word in words), [(word.word, word.score) for word in words])
            )
    return hypotheses_by_speed


def _form(text: str) -> str:
    return comparison_form(text, "en")


def _errors(form: str, hypothesis: str) -> int:
    return count_errors(form, _form(hypothesis)).total


if __name__ == "__main__":
    main()
