"""Does a model interpret in speech, in the voice that it hears? Spoken digits, answered in German order, one seed.

    make -C benchmarks learn-interpret-speech DATA=../shared/data SOURCE=runs/learn_tts

The streams are those of learn_interpret.py: takes of the free spoken digit dataset, one speaker per stream (takes 0 to
4 are held out), in groups of one or two digits. They are answered in speech, digit by digit, in the order in which a
German number says them: *two one* is *one two* (einundzwanzig). The targets are takes of the same speaker, drawn for
each digit, with their words as text before them, due in the first chunk of 0.32 s at which they can be known.

One tokenizer (that of learn_tts.py, where it is given); a model that learns to say single takes and to write them down
(`voices`), then to answer talks of a single group (`groups`), and then whole streams (`sft`), all in the settings of
proofs/learn_interpret_speech*.yaml. On held-out streams, the output speech is judged by two classifiers that are
trained on real takes alone: of digits and of speakers. Each stretch of speech is a digit.

- digits right: of the said digits and those of the truth, aligned by the fewest edits, those that are equal, over the
  longer of both. Bar: 0.85 of that of the real takes.
- voice: stretches whose speaker is recognized as the source's. Bar: 0.85.
- LAAL and ATD by piece of speech, and the gaps of playback, beside those of the targets themselves.

Controls: the targets as they were recorded, and through the tokenizer; and the model's speech, scored against the next
stream (`exchanged`), which is chance.

CPU-minutes of one core of a Xeon, both of whose cores were busy: tokenizer 25, codes 19, `voices` 8, `groups` 8, `sft`
9, judges and speech 3.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from learn_interpret import DIGITS, RECORDINGS, digit_segments, write_segments
from proof import Proof, check_data, json_lines, print_table, proof_parser, write_changed
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from audiollm.audio import load, resample
from audiollm.codec import Codec
from audiollm.data.records.sample import TextPart
from audiollm.evaluate.interpret.latency_scores import LatencyOptions, gaps_of, latencies_of
from audiollm.evaluate.interpret.logged_outputs import LOG_NAME, LoggedOutput, write_log
from audiollm.evaluate.judges.classifier import ClassifierConfig, ClipClassifier, train_classifier
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.files.atomic import read_jsonl
from audiollm.generation.engine.request import Acted, Limits
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.interpret.held_out_streams import StreamPrompt, interpret_streams, read_streams
from audiollm.interpret.said import HeardSource, SaidPiece, SpeechFile, logged_output
from tokenizer import AudioTokenizer

NAME = "learn_interpret_speech"
SEED = 1
"""Seed of the models; seed 0 is for choosing settings."""
SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9)
"""As in learn_tts.py, without its guidance, which open requests do not take."""
LIMITS = Limits(max_frames=60, max_text_tokens=12)
"""Of an action: two digits, of at most 1.2 s each."""
JUDGE = ClassifierConfig(steps=400)
JUDGE_RATE = 16_000
DIGITS_RIGHT, VOICE = 0.85, 0.85
"""Bars: of the digits as a share of those of real takes; of the voice."""
SMOKE_TAKES = range(2, 8)
SMOKE = (
    "talks.talks=12", "talks.test_talks=3", "short_talks.talks=12", "short_talks.test_talks=3",
    "train_tokenizer.steps=10", "train_tokenizer.hidden_size=32", "train_tokenizer.teacher=none", "voices.steps=10",
    "voices.batch_size=8",
    "voices.shape.hidden_size=32", "voices.shape.num_layers=2", "groups.steps=10", "groups.batch_size=8",
    "sft.steps=10", "sft.batch_size=4",
)  # fmt: skip
"""Settings of a run that shows that everything goes from end to end, and teaches nothing."""
SMOKE_JUDGE_STEPS = 10


@dataclass(frozen=True)
class SaidDigit:
    """A stretch of speech, and the time in seconds at which it came out."""

    samples_1N: Tensor
    sample_rate: int
    time_s: float

    @property
    def duration_s(self) -> float:
        return self.samples_1N.shape[1] / self.sample_rate


@dataclass(frozen=True)
class SpokenStream:
    """A held-out stream, and what was said over it."""

    id: str
    source: Path
    speaker: str
    truth: Sequence[str]
    """Its digits in German order."""
    length_s: float
    spoken_digits: Sequence[SaidDigit]
    text: str
    """Words that were written beside the speech."""


@dataclass(frozen=True)
class Judges:
    """Classifiers that are trained on real takes."""

    digit: ClipClassifier
    speaker: ClipClassifier


def main() -> None:
    parser = proof_parser(__doc__, seeds=None)
    parser.add_argument("--seed", type=int, default=SEED)
    source_help = "a run of learn_tts.py, whose tokenizer is taken; else one is trained here"
    parser.add_argument("--source", type=Path, help=source_help)
    parser.add_argument("--smoke", action="store_true", help="everything at a size of two CPU minutes")
    options = parser.parse_args()
    check_data(options.data, RECORDINGS)
    chains = [f"{NAME}_talks", *([] if options.source else [f"{NAME}_tokenizer"])]
    overrides, judge, seed = options.overrides, JUDGE, options.seed
    if options.smoke:
        overrides, judge, seed = [*SMOKE, *overrides], replace(JUDGE, steps=SMOKE_JUDGE_STEPS), 0
    folder = options.runs / (f"{NAME}_smoke" if options.smoke else NAME)
    proof = Proof(folder, (), overrides, [f"{NAME}_talks", f"{NAME}_tokenizer", NAME])
    segments = digit_segments(options.data / RECORDINGS, SMOKE_TAKES if options.smoke else None)
    write_segments(proof.folder, segments, digit_phrases())
    for chain in chains:
        proof.run(chain)
    for kind in ("talks", "short_talks"):
        talks = list(read_jsonl(proof.folder / kind / "recordings.jsonl"))
        spoken = spoken_talks(talks, segments, proof.folder / kind)
        write_changed(proof.folder / f"spoken_{kind}.jsonl", json_lines(spoken))
    codec = (options.source.resolve() if options.source else proof.folder) / "train_tokenizer" / "model"
    proof.run(NAME, codec=codec, model_seed=seed)
    report(proof, codec, segments, trained_judges(segments, judge), seed)


# ---------------------------------------------------------------------------------------------------- data


def digit_phrases() -> list[dict[str, str]]:
    """Digits, and pairs of digits that are a number of two, with the digits in the order of the German word."""
    rows = [{"text": word, "target": word} for word in DIGITS]
    for value in range(10, 100):
        tens, units = DIGITS[value // 10], DIGITS[value % 10]
        rows.append({"text": f"{tens} {units}", "target": " ".join(german_order(value))})
    return rows


def german_order(value: int) -> list[str]:
    """Return the digits of a number in the order in which its German word has them: units before tens.

    *Zehn*, *zwölf* and the round ones (*zwanzig*) are not made of two digits, and keep the order of theirs.
    """
    digits = [DIGITS[int(digit)] for digit in str(value)]
    return digits[::-1] if value > 12 and value % 10 else digits


def spoken_talks(
    talks: Sequence[dict[str, Any]], segments: Sequence[dict[str, Any]], folder: Path
) -> list[dict[str, Any]]:
    """Return talks with a segment for each digit of the translation, and a take of its speaker and split that says it.

    Args:
        talks: as `compose_talks` writes them, with the digits of the translation as targets.
        segments: rows of all takes.
        folder: the folder that the talks' recordings are relative to.
    """
    takes: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in segments:
        takes[row["speaker"], row["text"], row["split"]].append(row)
    rewritten = []
    for talk in talks:
        draw = random.Random(talk["id"])
        word_segments = []
        for segment in talk["segments"]:
            for word in segment["target"].split():
                take = draw.choice(takes[segment["speaker"], word, talk["split"]])
                take_span = {"path": take["path"], "start_s": 0.0, "end_s": take["end_s"]}
                word_segments.append({**segment, "target": word, "said": take_span})
        rewritten.append(
            {**talk, "audio": str((folder / talk["audio"]).resolve()), "segments": word_segments}
        )
    return rewritten


# -------------------------------------------------------------------------------------------------- outputs


def said_by_model(
    prompt: StreamPrompt, actions: Sequence[Acted], codec: Codec, stream: SpokenStream
) -> SpokenStream:
    """Return a stream with what a model said over it.

    Args:
        stream: the same stream with anything said.
    """
    digits = [
        SaidDigit(codec.decode(codes_KT).float().cpu(), codec.sample_rate, end_s)
        for action, end_s in zip(actions, prompt.chunk_ends_s, strict=True)
        for codes_KT in action.parts
        if isinstance(codes_KT, Tensor) and codes_KT.shape[1]
    ]
    text = " ".join(" ".join(action.text for action in actions).split())
    return replace(stream, spoken_digits=digits, text=text)


def targets_of(prompt: StreamPrompt, talk: Mapping[str, Any]) -> SpokenStream:
    """Return a stream with its targets: takes as they were recorded, at the times at which they are due.

    Args:
        talk: its row of `spoken_talks.jsonl`.
    """
    digits: list[SaidDigit] = []
    for action, end_s in zip(prompt.sample.messages[-1].actions(), prompt.chunk_ends_s, strict=True):
        for _ in range(
            sum(
                len(content_part.text.split())
                for content_part in action
                if isinstance(content_part, TextPart)
            )
        ):
            take = load(talk["segments"][len(digits)]["said"]["path"], mono=True)
            digits.append(SaidDigit(take.samples_CN, take.sample_rate, end_s))
    truth = [segment["target"] for segment in talk["segments"]]
    speaker = talk["segments"][0]["speaker"]
    length_s = prompt.chunk_ends_s[-1]
    return SpokenStream(talk["id"], Path(talk["audio"]), speaker, truth, length_s, digits, " ".join(truth))


@torch.inference_mode()
def through_codec(stream: SpokenStream, codec: Codec) -> SpokenStream:
    """Return a stream whose speech was encoded and decoded."""
    digits = []
    for digit in stream.spoken_digits:
        samples_1N = resample(digit.samples_1N, digit.sample_rate, codec.sample_rate)
        decoded_1N = codec.decode(codec.encode(samples_1N)).float().cpu()
        digits.append(SaidDigit(decoded_1N, codec.sample_rate, digit.time_s))
    return replace(stream, spoken_digits=digits)


def logged(index: int, stream: SpokenStream, folder: Path) -> LoggedOutput:
    """Write the speech of a stream to a file, each piece where it is heard; return its line of the log."""
    speech = f"{stream.id}.wav"
    rate = stream.spoken_digits[0].sample_rate if stream.spoken_digits else JUDGE_RATE
    with closing(SpeechFile(folder / speech, rate)) as file:
        for digit in stream.spoken_digits:
            file.write(digit.samples_1N, digit.time_s)
        file.write(torch.zeros(1, 0), stream.length_s)
    pieces = [SaidPiece("", digit.time_s, None, digit.duration_s) for digit in stream.spoken_digits]
    source = HeardSource(index, stream.length_s, str(stream.source), " ".join(stream.truth), stream.id)
    return logged_output(pieces, source, speech).model_copy(update={"transcript": stream.text})


# -------------------------------------------------------------------------------------------------- scores


def trained_judges(segments: Sequence[dict[str, Any]], config: ClassifierConfig) -> Judges:
    """Train the classifiers on the training takes."""
    train = [row for row in segments if row["split"] == "train"]
    clips = [(load(row["path"], sample_rate=JUDGE_RATE, mono=True).samples_CN, JUDGE_RATE) for row in train]
    return Judges(
        train_classifier(clips, [row["text"] for row in train], config),
        train_classifier(clips, [row["speaker"] for row in train], config),
    )


def heard_of(streams: Sequence[SpokenStream], judge: ClipClassifier) -> list[list[str]]:
    """Return the label of each digit that was said, by stream."""
    clips = [
        (resample(digit.samples_1N, digit.sample_rate, JUDGE_RATE), JUDGE_RATE)
        for stream in streams
        for digit in stream.spoken_digits
    ]
    labels = iter([label for label, _ in judge.predict_many(clips)])
    return [[next(labels) for _ in stream.spoken_digits] for stream in streams]


def digits_right(labels: Sequence[Sequence[str]], truth: Sequence[Sequence[str]]) -> float:
    """Return the share of right digits: neither those that are left out nor those that are too many are free."""
    equal = longest = 0
    for hypothesis, reference in zip(labels, truth, strict=True):
        opcodes = Levenshtein.opcodes(list(reference), list(hypothesis))
        equal += sum(opcode.src_end - opcode.src_start for opcode in opcodes if opcode.tag == "equal")
        longest += max(len(hypothesis), len(reference))
    return equal / max(1, longest)


def scores_of(streams: Sequence[SpokenStream], judges: Judges, folder: Path) -> dict[str, float]:
    """Write the log of a system and its speech; return its figures. Latencies are in seconds."""
    digits, speakers = heard_of(streams, judges.digit), heard_of(streams, judges.speaker)
    truth = [stream.truth for stream in streams]
    voices = [
        name == stream.speaker
        for stream, names in zip(streams, speakers, strict=True)
        for name in names
    ]  # fmt: skip
    outputs = [logged(number, stream, folder) for number, stream in enumerate(streams)]
    write_log(folder / LOG_NAME, outputs)
    options = LatencyOptions("segment", score_empty=True)
    latencies = [latencies_of(output, options) for output in outputs]
    gaps = [gap for output in outputs for gap in gaps_of(output)]
    return {
        "digits": digits_right(digits, truth),
        "exchanged": digits_right(digits, [*truth[1:], truth[0]]),
        "voice": sum(voices) / max(1, len(voices)),
        "said": len(voices) / sum(map(len, truth)),
        **{
            name: _mean_of_numbers([latency[name] for latency in latencies]) / 1000
            for name in ("LAAL", "ATD")
        },
        "gaps": len(gaps) / len(outputs),
        "gap_s": _mean_of_numbers(gaps) / 1000,
        "empty": sum(not output.delays for output in outputs),
    }


def _mean_of_numbers(values: Sequence[float | str]) -> float:
    """Mean of the numbers among values; 0 without any."""
    return statistics.mean([value for value in values if not isinstance(value, str)] or [0.0])


# -------------------------------------------------------------------------------------------------- report


def report(
    proof: Proof, codec_at: Path, segments: Sequence[dict[str, Any]], judges: Judges, seed: int
) -> None:
    """Let the model interpret the held-out streams; print a table, and a JSON line for each bar."""
    folder, codec = proof.folder, AudioTokenizer.from_pretrained(codec_at)
    policy = DualFFNPolicy.load(folder / "sft")
    prompts, bad = read_streams(policy, folder / "stream_codes" / "shards", "test", 10_000)
    if bad:
        raise SystemExit(f"{len(bad)} held-out streams cannot be interpreted: {bad[0]}")
    talks = {talk["id"]: talk for talk in read_jsonl(folder / "spoken_talks.jsonl")}
    targets = [targets_of(prompt, talks[prompt.sample.id]) for prompt in prompts]
    seeds = [seed * len(prompts) + number for number in range(len(prompts))]
    acted = interpret_streams(policy, prompts, seeds, SAMPLING, LIMITS, "any")
    with torch.inference_mode():
        interpreted = [
            said_by_model(prompt, actions, codec, target)
            for prompt, actions, target in zip(prompts, acted, targets, strict=True)
        ]
    systems = {
        "targets, as recorded": targets,
        "targets, through the tokenizer": [through_codec(stream, codec) for stream in targets],
        "the model": interpreted,
    }
    out = folder / "said"
    scores = {
        name: scores_of(streams, judges, out / name.split(",")[-1].strip().replace(" ", "_"))
        for name, streams in systems.items()
    }
    _print_speech_table(proof, scores)
    real = real_accuracy(segments, judges)
    for line in bars(scores["the model"], real):
        print(json.dumps(line))


def real_accuracy(segments: Sequence[dict[str, Any]], judges: Judges) -> float:
    """Return the share of held-out real takes whose digit is recognized."""
    held_out = [row for row in segments if row["split"] == "test"]
    clips = [
        (load(row["path"], sample_rate=JUDGE_RATE, mono=True).samples_CN, JUDGE_RATE) for row in held_out
    ]
    predictions = judges.digit.predict_many(clips)
    return sum(label == row["text"] for (label, _), row in zip(predictions, held_out, strict=True)) / len(
        held_out
    )


def bars(scores: Mapping[str, float], real: float) -> list[dict[str, Any]]:
    """Return the lines of the bars.

    Args:
        real: share of the real takes whose digit is recognized.
    """
    relative = scores["digits"] / max(real, 1e-9)
    chance = round(scores["exchanged"], 3)
    return [
        {"bench": NAME, "case": "digits right, over real takes", "ours": round(relative, 3), "bar": DIGITS_RIGHT,
         "met": relative >= DIGITS_RIGHT, "real": round(real, 3), "exchanged": chance},
        {"bench": NAME, "case": "the source's speaker recognized", "ours": round(scores["voice"], 3), "bar": VOICE,
         "met": scores["voice"] >= VOICE},
    ]  # fmt: skip


def _print_speech_table(proof: Proof, scores: Mapping[str, Mapping[str, float]]) -> None:
    shares = {"digits right": "digits", "exchanged": "exchanged", "voice": "voice", "said / asked": "said"}
    times = {"LAAL, s": "LAAL", "ATD, s": "ATD", "gaps per stream": "gaps", "mean gap, s": "gap_s"}
    rows = []
    for name, figures in scores.items():
        cells = [
            *(f"{figures[key]:.3f}" for key in shares.values()),
            *(f"{figures[key]:.2f}" for key in times.values()),
        ]
        rows.append([name, *cells, f"{figures['empty']:.0f}"])
    columns = ("", *shares, *times, "empty")
    print_table(proof.console, "Held-out streams, answered in speech", columns, rows)


if __name__ == "__main__":
    main()
