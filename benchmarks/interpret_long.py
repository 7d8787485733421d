"""Recordings through the live loop, end to end: memory, CPU-seconds per chunk, right groups of digits.

    python benchmarks/interpret_long.py --data ../shared/data [--model RUN/stage_2 --prompt "..."] [--full]

The sound is held-out takes of the spoken digits (takes 0 to 4), in groups of one or two with pauses of 0.05 to 0.3 s
inside a group and 0.6 to 1.2 s between groups; the speaker changes every five minutes. It is made as it is heard, and
comes in blocks of 80 ms at 24 kHz: codec, model and words are all part of the loop.

`memory growth`: resident memory at the end over that after the first 5 minutes (bar: 1.01). `CPU per chunk`: the
median of the last 10 minutes over that of minutes 5 to 15 (bar: 1.05). `right groups`: the share of groups whose German
number is said between their end and the end of the next one, in the last 10 minutes less that in the first 10 (bar:
-0.02). In a shorter run the first half takes the place of the first 5 minutes.

Without `--model` a model and a codec of random weights, shaped as in `recipes/interpret/tiny.yaml`, listen and write:
then memory and CPU are told, and nothing is right.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from measure import bench_parser, parse_options
from torch import Tensor

from audiollm.audio import load
from audiollm.data.chat.template import Template
from audiollm.data.records.sample import Message, TextPart
from audiollm.data.text.tokenizer import END_OF_TURN, train_text_tokenizer
from audiollm.families.dual_ffn.interpreting import DualFFNInterpreter
from audiollm.generation.engine.defaults import read_trained
from audiollm.generation.engine.request import Limits
from audiollm.generation.speaking.generator import Generator
from audiollm.interpret.live.live_session import LiveOptions, LiveSession
from audiollm.interpret.live.sound_input import BLOCK_S
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.pretrained import model_folder
from tokenizer import AudioTokenizer
from tokenizer.native.model import TokenizerConfig

RATE = 24_000
DIGITS = range(10)
SPEAKER_S = 300.0
SETTLED_S, PART_S = 300.0, 600.0
"""Seconds after which memory counts, and of the parts at both ends that are compared."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--model", type=Path, help="a stage of training on streams of digits")
    parser.add_argument("--codec", type=Path)
    parser.add_argument("--prompt", help="the system message; by default that of its training")
    parser.add_argument("--minutes", type=float, default=6.0)
    arguments = parse_options(parser, minutes=120.0)
    torch.set_num_threads(1)
    generator, chunk_frames, instruction = untrained(), 8, arguments.prompt
    if arguments.model is not None:
        generator = Generator.from_pretrained(arguments.model, arguments.codec)
        trained = read_trained(model_folder(arguments.model))
        chunk_frames = trained.chunk_frames or chunk_frames
        instruction = trained.stream_prompt if instruction is None else instruction
    prompt = [Message(role="system", content=[TextPart(text=instruction)])] if instruction else []
    options = LiveOptions(chunk_frames, prompt, limits=Limits(max_text_tokens=8))
    session = LiveSession(DualFFNInterpreter(generator), options, time.process_time)
    course = Course(DigitTalk(arguments.data / "fsdd" / "recordings", 60.0 * arguments.minutes))
    course.run(session)
    course.tell(arguments.model is not None)


@dataclass(frozen=True)
class Group:
    """A group of digits: when it is over, and what is to be said."""

    end_s: float
    number: str


@dataclass
class DigitTalk:
    """Digits in groups, made piece by piece."""

    folder: Path
    duration_s: float
    groups: list[Group] = field(default_factory=list)
    """Groups so far; the sound of the next one is not made yet."""

    def pieces(self) -> Iterator[Tensor]:
        """Yield blocks `[1, N]` of the live loop's size."""
        size = round(BLOCK_S * RATE)
        rest_1N = torch.zeros(1, 0)
        for sound_1N in self._sounds():
            rest_1N = torch.cat([rest_1N, sound_1N], dim=1)
            num_whole = rest_1N.shape[1] // size * size
            yield from rest_1N[:, :num_whole].split(size, dim=1)
            rest_1N = rest_1N[:, num_whole:]

    def _sounds(self) -> Iterator[Tensor]:
        draw, num_samples, takes = random.Random(0), 0, self._takes()
        speaker, turn = "", -1
        while num_samples < self.duration_s * RATE:
            if num_samples // round(SPEAKER_S * RATE) != turn:
                turn = num_samples // round(SPEAKER_S * RATE)
                speaker = draw.choice([name for name in sorted(takes) if name != speaker])
            digits = [draw.choice(DIGITS)]
            if draw.random() < 0.5:  # a number of two digits begins with none of zero
                digits.insert(0, draw.choice(DIGITS[1:]))
            parts: list[Tensor] = []
            for place, digit in enumerate(digits):
                parts += [silence(draw.uniform(0.05, 0.3))] if place else []
                parts.append(draw.choice(takes[speaker][digit]))
            sound_1N = torch.cat(parts, dim=1)
            self.groups.append(Group((num_samples + sound_1N.shape[1]) / RATE, german(digits)))
            sound_1N = torch.cat([sound_1N, silence(draw.uniform(0.6, 1.2))], dim=1)
            num_samples += sound_1N.shape[1]
            yield sound_1N

    def _takes(self) -> dict[str, list[list[Tensor]]]:
        """Held-out takes at the loop's rate, by speaker and digit."""
        takes: dict[str, list[list[Tensor]]] = {}
        for path in sorted(self.folder.glob("*.wav")):
            digit, speaker, take = path.stem.split("_")
            if int(take) < 5:
                by_digit = takes.setdefault(speaker, [[] for _ in DIGITS])
                by_digit[int(digit)].append(load(path, sample_rate=RATE, mono=True).samples_CN)
        if not takes:
            raise SystemExit(f"no spoken digits in {self.folder}: name the folder with --data")
        return takes


@dataclass
class Course:
    """Runs the loop over a talk, and keeps a number per chunk."""

    talk: DigitTalk
    spoken_texts: list[tuple[float, str]] = field(default_factory=list)
    chunk_s: list[tuple[float, float]] = field(default_factory=list)
    """Time heard, and CPU-seconds, of each chunk."""
    memory_mb: list[tuple[float, float]] = field(default_factory=list)
    """Time heard, and resident memory, about every ten seconds."""

    def run(self, session: LiveSession) -> None:
        told_s = 0.0
        for piece_1N in self.talk.pieces():
            for action in session.hear(piece_1N):
                self.chunk_s.append((action.heard_s, action.compute_s))
                if action.speaks:
                    self.spoken_texts.append((action.heard_s, action.text.strip()))
                if action.heard_s >= told_s:
                    self.memory_mb.append((action.heard_s, resident_mb()))
                    told_s += 10.0

    def tell(self, is_trained: bool) -> None:
        """Print a line of JSON per figure."""
        end_s = self.chunk_s[-1][0]
        settled_s = min(SETTLED_S, end_s / 2)
        settled = next(megabytes for at_s, megabytes in self.memory_mb if at_s >= settled_s)
        growth = self.memory_mb[-1][1] / settled
        early = statistics.median(s for at_s, s in self.chunk_s if settled_s <= at_s <= settled_s + PART_S)
        late = statistics.median(s for at_s, s in self.chunk_s if at_s >= end_s - PART_S)
        self._print(
            "memory growth", growth, "last over settled", settled_mb=round(settled, 1), heard_s=round(end_s)
        )
        self._print("CPU per chunk", late / early, "late over early", late_ms=round(1000 * late, 2))
        all_s = sum(seconds for _, seconds in self.chunk_s)
        self._print("real-time factor", all_s / end_s, "CPU-s per s of sound")
        if is_trained:
            first, last = self._right(0.0, PART_S), self._right(end_s - PART_S, end_s)
            self._print(
                "right groups", last - first, "last less first", first=round(first, 3), last=round(last, 3)
            )

    def _right(self, start_s: float, end_s: float) -> float:
        """Return the share of right groups among those that are over between two times."""
        right: list[bool] = []
        groups = self.talk.groups
        for group, after in pairwise(groups):
            if start_s <= group.end_s < end_s:
                texts = [text for at_s, text in self.spoken_texts if group.end_s <= at_s < after.end_s]
                right.append(" ".join(texts) == group.number)
        return sum(right) / max(1, len(right))

    def _print(self, case: str, ours: float, unit: str, **entries: float) -> None:
        line = {"bench": "interpret_long", "case": case, "ours": round(ours, 4), "unit": unit}
        print(json.dumps(line | entries), flush=True)


def german(digits: Sequence[int]) -> str:
    """The German number of one or two digits, in words."""
    from num2words import num2words

    return str(num2words(int("".join(map(str, digits))), lang="de"))


def silence(seconds: float) -> Tensor:
    return torch.zeros(1, round(seconds * RATE))


def resident_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def untrained() -> Generator:
    """A model and a codec of random weights, in the shape of the tiny recipe; it writes after every chunk."""
    torch.manual_seed(0)
    codec = AudioTokenizer(TokenizerConfig()).eval()
    template = Template(train_text_tokenizer(["one two"] * 3, 300), codec.num_codebooks, codec.codebook_size)
    config = DualFFNConfig(
        vocab_size=template.tokenizer.get_vocab_size(), num_codebooks=codec.num_codebooks,
        codebook_size=codec.codebook_size + 2, hidden_size=128, num_layers=4, num_heads=2, num_kv_heads=2, head_dim=64,
        intermediate_size=384, sliding_window=200,
    )  # fmt: skip
    model = DualFFN(config)
    with torch.no_grad():
        model.text_lm_head.weight[template.tokenizer.token_to_id(END_OF_TURN)] = 0
    return Generator(model, codec, template)


if __name__ == "__main__":
    main()
