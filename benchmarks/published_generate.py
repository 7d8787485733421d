"""Speech of published speech models, greedy: our decoder against the published classes' `generate`.

    OMP_NUM_THREADS=1 python benchmarks/published_generate.py [--full] [--frames 25] [--rounds 3] [--families csm]

The same weights (random, of the shapes of published_train.py, one set of tensors), the same prompts, and as many
frames for every answer: the end is never the likeliest. The codes of both sides are compared, all of them: a
difference ends the benchmark with exit code 1. The published classes get the prompts of a batch padded on the left, as
they need them. The sides take turns in one process on one thread, and the median of CPU-seconds counts; reading the
prompts is part of it, a codec is not. Beside it, without a peer: milliseconds on the clock from a request to its first
sound, with our tokenizer of random weights as codec.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import bench_parser, in_turns, parse_options, print_row
from published_models import FAMILIES, in_its_environment, load_policy, published_class, write_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from audiollm.data.records.sample import Message, TextPart
from audiollm.families.talkers.decoding import Speaking, speak_to_end
from audiollm.families.talkers.generator import TalkerEngine
from audiollm.families.talkers.kind import TalkerKind, TalkerSampling
from audiollm.families.talkers.packed_steps import TalkerSteps
from audiollm.families.talkers.policy import TalkerPolicy
from audiollm.families.talkers.turns import SpeechPrompt
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.engine.streaming import stream_audio

TEXTS = (
    "the rain has stopped, and the streets are empty", "seven", "what time does the last train leave?", "no",
    "one two three four five", "she read the letter twice before she answered it", "the museum opens at nine",
    "turn left after the bridge",
)  # fmt: skip
BATCHES = (1, 8)
GREEDY = SamplingConfig(temperature=0.0, text_guidance=1.0, speaker_guidance=1.0)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--family", help="measure this one in this process")
    parser.add_argument("--frames", type=int, default=25, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse_options(parser, frames=75, rounds=5)
    if arguments.family is None:
        options = ["--frames", str(arguments.frames), "--rounds", str(arguments.rounds)]
        for family in arguments.families.split(","):
            in_its_environment(__file__, family, options)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments.family, Path(folder) / "model", arguments.frames, arguments.rounds)


def measure(family: str, folder: Path, frames: int, rounds: int) -> None:
    """Measure and print one family."""
    write_model(family, folder)
    policy = load_policy(folder)
    peer = published_class(family, folder, policy.root.model).eval()
    for batch in BATCHES:
        texts, answers = TEXTS[:batch], dict[str, list[Tensor]]()
        sides: dict[str, Callable[[], list[Tensor]]] = {
            "ours": partial(speak, policy, texts, frames),
            "peer": partial(speak_csm if family == "csm" else speak_qwen3_tts, peer, policy, texts, frames),
        }

        def keep(side: str, sides: Any = sides, answers: Any = answers) -> None:
            answers[side] = sides[side]()

        seconds = in_turns({side: partial(keep, side) for side in sides}, rounds)
        check_equal(f"{family}, batch {batch}", answers["ours"], answers["peer"], frames)
        rates = {side: batch * frames / statistics.median(times) for side, times in seconds.items()}
        print_row(
            "published_generate", f"{family}, batch {batch}", rates["ours"], rates["peer"], "frames per CPU-second",
            more_is_better=True, digits=1, frames=frames,
            **{f"{side} CPU-seconds": [round(value, 2) for value in seconds[side]] for side in seconds},  # type: ignore[arg-type]
        )  # fmt: skip
    print_row(
        "published_generate", f"{family}, first sound", first_sound(policy, rounds), None, "ms", digits=1
    )


def speak(policy: TalkerPolicy, texts: Sequence[str], frames: int) -> list[Tensor]:
    """Our codes `[K, T]` of each text."""
    kind = kind_of(policy)
    greedy = TalkerSampling.plain(0.0)
    answers = [Speaking(kind.prompt_rows(SpeechPrompt(text)), greedy, frames, 0) for text in texts]
    speak_to_end(policy.root.model, kind, answers)
    return [answer.codes_KT(policy.num_codebooks) for answer in answers]


@torch.no_grad()
def speak_csm(peer: Any, policy: TalkerPolicy, texts: Sequence[str], frames: int) -> list[Tensor]:
    """Codes `[K, T]` of each text by transformers' `generate`."""
    rows = [kind_of(policy).prompt_rows(SpeechPrompt(text)).rows.text_L for text in texts]
    ids_BS = pad_sequence(rows, True, peer.config.pad_token_id, padding_side="left")
    mask_BS = pad_sequence([torch.ones_like(row) for row in rows], True, 0, padding_side="left")
    peer.generation_config.max_length = None
    depth_codes = policy.num_codebooks - 1
    codes_BTK = peer.generate(
        input_ids=ids_BS, attention_mask=mask_BS, max_new_tokens=frames, do_sample=False,
        depth_decoder_do_sample=False, depth_decoder_min_new_tokens=depth_codes,
        depth_decoder_max_new_tokens=depth_codes,
    )  # fmt: skip
    return [codes_TK.T for codes_TK in codes_BTK]


def speak_qwen3_tts(peer: Any, policy: TalkerPolicy, texts: Sequence[str], frames: int) -> list[Tensor]:
    """Codes `[K, T]` of each text by the published `generate`, whose last step gives no frame."""
    ids = kind_of(policy).text.marked_ids
    prompts = [
        torch.tensor([ids(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")])
        for text in texts
    ]
    codes, _ = peer.generate(
        input_ids=prompts, languages=["auto"] * len(texts), non_streaming_mode=True, max_new_tokens=frames + 1,
        repetition_penalty=1.0, do_sample=False, subtalker_dosample=False,
    )  # fmt: skip
    return [codes_TK.T for codes_TK in codes]


def check_equal(case: str, ours: Sequence[Tensor], peer: Sequence[Tensor], frames: int) -> None:
    """Compare the codes of both sides.

    Raises:
        SystemExit: they differ, or are fewer frames than wanted.
    """
    for text, ours_KT, peer_KT in zip(TEXTS, ours, peer, strict=False):
        if ours_KT.shape[1] != frames or not torch.equal(ours_KT, peer_KT):
            shapes = f"{list(ours_KT.shape)} and {list(peer_KT.shape)}"
            first = (ours_KT[:, :1] == peer_KT[:, :1]).float().mean()
            raise SystemExit(f"{case}: the codes of {text!r} differ: {shapes}, first frame equal {first:.0%}")


def first_sound(policy: TalkerPolicy, rounds: int) -> float:
    """Milliseconds from a request to its first samples: the median over the rounds after the first."""
    from tokenizer.native.model import AudioTokenizer, TokenizerConfig

    model = policy.root.model.eval()
    shape = TokenizerConfig(num_codebooks=model.num_codebooks, codebook_size=model.codebook_size)
    codec = AudioTokenizer(shape).eval()
    engine = TalkerEngine(model, kind_of(policy), lambda request: SpeechPrompt(TEXTS[0]), TalkerSteps(model))
    message = Message(role="user", content=[TextPart(text=TEXTS[0])])
    request = Request([message], sampling=GREEDY, limits=Limits(max_frames=8))
    firsts = []
    for _ in range(rounds + 1):
        *_, last = stream_audio(engine.stream(request), codec)
        assert last.first_audio_s is not None  # it comes with the last piece
        firsts.append(last.first_audio_s)
    return 1000 * statistics.median(firsts[1:])


def kind_of(policy: TalkerPolicy) -> TalkerKind:
    """What the policy's family tells of its talkers."""
    return policy._kind


if __name__ == "__main__":
    main()
