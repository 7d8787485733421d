"""The live loop and rollouts of streams against transformers: CPU-seconds per second of sound, actions per CPU-second.

    python benchmarks/interpret.py [--full] [--rounds 1] [--chunks 8] [--cases "live text,live speech,rollout,ppo"]

Both sides take turns in one process, on one thread, with random weights and no codec; the median of the rounds counts.

`live text`: a chunk of 0.96 s is heard, and three tokens are written (some 2.5 words a second), over and over, at
512 x 8 with a window of 30 s. The peer is `KyutaiSpeechToTextForConditionalGeneration` of the same width, depth and
window, which listens and writes at once: a step of text and 8 codes for each of its frames, 12.5 a second, as
published. Its cache is transformers' own.

`live speech`: every second chunk is answered with 24 frames of 8 codebooks (half of the time). The peer is
`MoshiForConditionalGeneration`: a step of the decoder and 8 of the depth decoder (a quarter as wide, 2 layers) for each
frame. It draws its 8 codes only while ours speaks, too.

`rollout`: 32 streams of 16 chunks of 0.32 s. One chunk in four, drawn for each stream, is answered with three sampled
tokens, the others with silence, as in interpretation; log-probabilities are recorded. The peer is `generate`, called
chunk by chunk with its cache, on a Llama of the same shape (256 x 6), with the same silences; it records nothing. Unit:
actions per CPU-second. `rollout, all speak` has no silences, and no bar.

Without a ratio: milliseconds per chunk of both live cases; the time of a step of PPO over streams by phase. On a GPU:
`gpu.py --only interpret`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from measure import bench_parser, parse_options
from torch import Tensor

from audiollm.data.chat.template import Template
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text import tokenizer as tokens
from audiollm.families.dual_ffn.stream_rollouts import sample_streams
from audiollm.families.prompts import PromptedContents
from audiollm.families.rollout import RolloutSettings
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Acted, Limits, OpenRequest
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.engine.state import Marks
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.packed_decoder import GenerationDecoder

BOOKS, CODES, WORDS = 8, 1024, 4096
FRAME_RATE, PEER_FRAME_RATE = 25.0, 12.5
"""Frames per second of our codec, and of Mimi, with which the peers were trained."""
CHUNK_FRAMES, TEXT_TOKENS, SPEECH_FRAMES = 24, 3, 24
"""Heard frames of a chunk, tokens of an action in text, and frames of an action in speech."""
PAD, END = 0, 1
"""Tokens of the Llama."""


@dataclass(frozen=True)
class Shape:
    """Width and depth of both sides, and their sliding window."""

    width: int
    layers: int
    window_s: float = 30.0

    def __str__(self) -> str:
        return f"{self.width} x {self.layers}"


@dataclass(frozen=True)
class Place:
    """Where a peer's loop runs, and by which clock: of the process on a CPU, of the wall on a GPU."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    warm_steps: int = 0
    """Steps before those that count; 0: until the window is full."""

    def now(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()


ON_CPU = Place(torch.device("cpu"))
LIVE, SAMPLED, TRAINED, SMALL = Shape(512, 8), Shape(256, 6), Shape(128, 4), Shape(64, 2, 2.0)
GREEDY = SamplingConfig(temperature=0, top_p=1.0, text_guidance=1, speaker_guidance=1)
STREAMS, ROLLOUT_CHUNKS, ROLLOUT_FRAMES, SPEAKING_SHARE = 32, 16, 8, 0.25
SYSTEM = [Message(role="system", content=[TextPart(text="Interpret what you hear.")])]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=8, help="chunks of each live case and round")
    parser.add_argument("--cases", default="live text,live speech,rollout,ppo")
    parser.add_argument(
        "--smoke", action="store_true", help="small models and a window of 2 s: all cases run"
    )
    arguments = parse_options(parser, rounds=5, chunks=24)
    torch.set_num_threads(1)
    wide, narrow = (SMALL, SMALL) if arguments.smoke else (LIVE, SAMPLED)
    for case in arguments.cases.split(","):
        if case == "rollout":
            rollout(narrow, arguments.rounds)
        elif case == "ppo":
            ppo_phases()
        else:
            live(case, wide, arguments.chunks, arguments.rounds)


# ------------------------------------------------------------------------------------------------ live


def live(case: str, shape: Shape, chunks: int, rounds: int) -> None:
    speaks = case == "live speech"
    model, template = interpreter(shape, speaks)
    hearer = LiveLoop(model, template, speaks)
    peer = moshi_loop(shape) if speaks else kyutai_loop(shape)
    times: dict[str, list[float]] = {"ours": [], "peer": []}

    def ours() -> float:
        times["ours"] += hearer.run(chunks)
        return chunks * CHUNK_FRAMES / FRAME_RATE

    def theirs() -> float:
        steps = round(chunks * CHUNK_FRAMES / FRAME_RATE * PEER_FRAME_RATE)
        times["peer"] += peer(steps)
        return steps / PEER_FRAME_RATE

    ours_s, peer_s = in_turns(ours, theirs, rounds)
    line = {"bench": "interpret", "case": case, "ours": round(ours_s, 4), "peer": round(peer_s, 4)}
    line |= {"ratio": round(peer_s / ours_s, 2), "unit": "CPU-s per s of sound"}
    print(json.dumps(line), flush=True)
    chunk_ms = sorted(1000 * seconds for seconds in times["ours"])
    per_chunk = {
        "bench": "interpret",
        "case": f"{case}, per chunk",
        "unit": "ms of CPU",
        "median": round(statistics.median(chunk_ms), 1),
        "p95": round(chunk_ms[int(0.95 * len(chunk_ms))], 1),
    }
    print(json.dumps(per_chunk), flush=True)


class LiveLoop:
    """Our engine on one endless stream of random codes.

    Args:
        speaks: answer every second chunk in speech; else each one in text.
    """

    def __init__(self, model: DualFFN, template: Template, speaks: bool) -> None:
        window = model.config.sliding_window or 0
        self._engine = Engine(model, template, 1, window + 100)
        limits = Limits(max_frames=SPEECH_FRAMES, max_text_tokens=TEXT_TOKENS)
        request = OpenRequest(SYSTEM, 0, (), GREEDY, limits, "any" if speaks else "text")
        self._number = self._engine.open(request)
        self._speaks, self._draw, self._chunk = speaks, torch.Generator().manual_seed(1), 0
        self.run(window // CHUNK_FRAMES + 2)  # the window is full

    def run(self, chunks: int) -> list[float]:
        """Return the CPU-seconds of each chunk."""
        seconds = []
        for _ in range(chunks):
            codes_KT = torch.randint(2, CODES, (BOOKS, CHUNK_FRAMES), generator=self._draw)
            if self._speaks:
                codes_KT[:, -1] = self._chunk % 2
            began = time.process_time()
            self._engine.feed(self._number, codes_KT)
            acted = None
            while acted is None:
                acted = next((event for event in self._engine.step() if isinstance(event, Acted)), None)
            seconds.append(time.process_time() - began)
            self._chunk += 1
            frames = sum(piece.shape[1] for piece in acted.parts if isinstance(piece, Tensor))
            if self._speaks and frames != (SPEECH_FRAMES if self._chunk % 2 else 0):
                raise SystemExit(f"chunk {self._chunk} was answered with {frames} frames")
            if not self._speaks and acted.reason != "length":
                raise SystemExit(f"chunk {self._chunk} was answered with {acted.text!r}")
        return seconds


def interpreter(shape: Shape, speaks: bool) -> tuple[DualFFN, Template]:
    """A model of random weights whose last heard codes decide: 1 is silence; 0 is speech, where it speaks at all.

    Behind other codes, and behind a word, it writes.
    """
    template = Template(tokens.train_text_tokenizer(["one two three four"] * 3, 400), BOOKS, CODES)
    width = shape.width
    config = DualFFNConfig(
        vocab_size=WORDS, num_codebooks=BOOKS, codebook_size=CODES + 2, hidden_size=width, num_layers=shape.layers,
        num_heads=width // 64, num_kv_heads=width // 64, intermediate_size=width * 11 // 4,
        sliding_window=round(shape.window_s * FRAME_RATE),
    )  # fmt: skip
    torch.manual_seed(0)
    model = DualFFN(config).eval()
    end = template.tokenizer.token_to_id(tokens.END_OF_TURN)
    closes = template.tokenizer.token_to_id(tokens.AUDIO_EOS)
    opens = Marks.of(template).opens_speech
    speech_C, silence_C = torch.eye(width)[:2]
    with torch.no_grad():
        model.audio_lm_head.weight.view(BOOKS, CODES + 2, -1)[:, -2:] = (
            0  # neither BOS nor EOS is the most likely
        )
        model.text_lm_head.weight.mul_(0.01)
        model.text_lm_head.weight[end] = 4 * silence_C
        table_KVC = model.model.embed_audio_tokens.embed_audio_tokens.weight.view(BOOKS, CODES + 2, -1)
        table_KVC[..., 1] = model.model.embed_tokens.weight[:, 1] = -1.0  # against silence
        table_KVC[:, 1] = 50 * silence_C
        if speaks:
            table_KVC[:, 0] = 50 * speech_C
            model.text_lm_head.weight[opens] = 4 * speech_C
            model.model.embed_tokens.weight[closes] = 50 * silence_C
    return model, template


def kyutai_loop(shape: Shape, place: Place = ON_CPU) -> Callable[[int], list[float]]:
    """The loop of Kyutai's speech-to-text model: returns the seconds of each of its steps."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.KyutaiSpeechToTextConfig(
        vocab_size=WORDS, codebook_vocab_size=CODES + 1, hidden_size=shape.width, num_hidden_layers=shape.layers,
        num_attention_heads=shape.width // 64, num_codebooks=BOOKS, ffn_dim=2 * shape.width * 11 // 4,
        sliding_window=round(shape.window_s * PEER_FRAME_RATE),
        audio_bos_token_id=CODES, audio_pad_token_id=WORDS + BOOKS * (CODES + 1), pad_token_id=3, bos_token_id=0,
        codec_config=tiny_mimi(), attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with place.device:
        model = transformers.KyutaiSpeechToTextForConditionalGeneration(config).eval().to(place.dtype)
    cache = transformers.DynamicCache(config=config)
    draw = torch.Generator().manual_seed(1)
    state = torch.zeros(1, 1, 1, dtype=torch.long, device=place.device)

    @torch.inference_mode()
    def run(steps: int) -> list[float]:
        nonlocal state
        seconds = []
        for _ in range(steps):
            input_codes = torch.randint(CODES, (1, 1, BOOKS), generator=draw).to(place.device)
            began = place.now()
            out = model(input_ids=torch.cat([state, input_codes], dim=2), cache=cache, use_cache=True)
            state = out.logits[:, -1:].argmax(-1, keepdim=True)
            seconds.append(place.now() - began)
        return seconds

    run(place.warm_steps or round(shape.window_s * PEER_FRAME_RATE) + 10)
    return run


def moshi_loop(shape: Shape, place: Place = ON_CPU) -> Callable[[int], list[float]]:
    """The loop of Moshi: returns the seconds of each of its steps. It draws codes half of the time."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.MoshiConfig(
        vocab_size=WORDS, hidden_size=shape.width, num_hidden_layers=shape.layers,
        num_attention_heads=shape.width // 64, audio_vocab_size=CODES, ffn_dim=2 * shape.width * 11 // 4,
        sliding_window=round(shape.window_s * PEER_FRAME_RATE), num_codebooks=BOOKS,
        max_position_embeddings=round(shape.window_s * PEER_FRAME_RATE), audio_encoder_config=tiny_mimi().to_dict(),
        depth_decoder_config={
            "vocab_size": WORDS, "hidden_size": shape.width // 4, "input_size": shape.width, "num_hidden_layers": 2,
            "num_attention_heads": 2, "audio_vocab_size": CODES, "ffn_dim": shape.width * 11 // 8,
            "num_codebooks": BOOKS,
        },
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with place.device:
        model = transformers.MoshiForConditionalGeneration(config).eval().to(place.dtype)
    cache = transformers.DynamicCache(config=config)
    draw = torch.Generator().manual_seed(1)
    word = torch.zeros(1, 1, dtype=torch.long, device=place.device)
    silence = torch.full((1, BOOKS, 1), CODES, device=place.device)
    output_codes = silence
    step = 0

    @torch.inference_mode()
    def run(steps: int) -> list[float]:
        nonlocal word, output_codes, step
        seconds = []
        for _ in range(steps):
            input_codes = torch.randint(CODES, (1, BOOKS, 1), generator=draw).to(place.device)
            began = place.now()
            out = model(
                input_ids=word,
                moshi_audio_codes=output_codes,
                user_audio_codes=input_codes,
                cache=cache,
                use_cache=True,
            )
            word = out.logits[:, -1:].argmax(-1)
            # the last hidden state of the decoder, from which the depth decoder draws 8 codes, one after the other
            if step // CHUNK_FRAMES % 2 == 0:
                depth = transformers.DynamicCache(config=model.depth_decoder.config)
                token, frame_codes = word, []
                for _ in range(BOOKS):
                    depth_out = model.depth_decoder(
                        input_ids=token,
                        last_hidden_state=out.last_hidden_state[:, -1:],
                        cache=depth,
                        use_cache=True,
                    )
                    token = depth_out.logits[:, -1:].argmax(-1)
                    frame_codes.append(token)
                output_codes = torch.stack(frame_codes, dim=1)
            else:
                output_codes = silence
            step += 1
            seconds.append(place.now() - began)
        return seconds

    run(place.warm_steps or round(shape.window_s * PEER_FRAME_RATE) + 10)
    return run


def tiny_mimi() -> Any:
    """The smallest codec that the peers' classes can hold: no codec is measured."""
    import transformers

    return transformers.MimiConfig(
        hidden_size=16, num_filters=4, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, intermediate_size=16, codebook_dim=8, vector_quantization_hidden_dimension=8, codebook_size=16,
        num_quantizers=BOOKS, num_semantic_quantizers=1, upsample_groups=16,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ rollout


def rollout(shape: Shape, rounds: int) -> None:
    model, template = interpreter(shape, speaks=False)
    decoder, peer = GenerationDecoder(model), llama(model.config)
    system = template.stream_prompt(SYSTEM)
    for case, share in (("rollout", SPEAKING_SHARE), ("rollout, all speak", 1.0)):
        speaks_BT = torch.rand(STREAMS, ROLLOUT_CHUNKS, generator=torch.Generator().manual_seed(0)) < share
        prompts = [stream_prompt(number, speaks) for number, speaks in enumerate(speaks_BT.tolist())]
        settings = RolloutSettings(0, 0, answer="text", max_text_tokens=TEXT_TOKENS)

        def ours(
            prompts: list[PromptedContents] = prompts,
            settings: RolloutSettings = settings,
            planned_BT: Tensor = speaks_BT,
        ) -> float:
            numbers = [[number] for number in range(STREAMS)]
            groups = sample_streams(
                model, template, decoder, STREAMS, prompts, [[0]] * STREAMS, numbers, settings
            )
            tokens = [group[0].tokens for group in groups]
            acted, num_tokens = (
                sum(len(answer.input_frames) for answer in tokens),
                sum(answer.num_actions for answer in tokens),
            )
            if (
                acted != planned_BT.numel()
                or abs(num_tokens / (planned_BT.numel() + 2 * int(planned_BT.sum())) - 1) > 0.02
            ):
                raise SystemExit(
                    f"{acted} actions of {num_tokens} tokens for {int(planned_BT.sum())} that speak"
                )
            return acted

        def theirs(planned_BT: Tensor = speaks_BT) -> float:
            return generate_chunks(peer, len(system), planned_BT)

        ours_s, peer_s = in_turns(ours, theirs, rounds)
        line = {
            "bench": "interpret",
            "case": case,
            "ours": round(1 / ours_s, 1),
            "peer": round(1 / peer_s, 1),
        }
        line |= {"ratio": round(peer_s / ours_s, 2), "unit": "actions per CPU-s"}
        print(json.dumps(line), flush=True)


def stream_prompt(number: int, speaks: Sequence[bool]) -> PromptedContents:
    """A recording of random codes; the model is silent where the last codes of a chunk are 1."""
    draw = torch.Generator().manual_seed(number)
    codes_KT = torch.randint(2, CODES, (BOOKS, ROLLOUT_CHUNKS * ROLLOUT_FRAMES), generator=draw)
    for chunk, is_spoken in enumerate(speaks):
        codes_KT[:, (chunk + 1) * ROLLOUT_FRAMES - 1] = 2 if is_spoken else 1
    messages = [*SYSTEM, Message(role="user", content=[AudioPart(path="heard.wav")])]
    return PromptedContents(str(number), messages, (codes_KT,), (), chunk_frames=ROLLOUT_FRAMES)


def llama(ours: DualFFNConfig) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=ours.vocab_size, hidden_size=ours.hidden_size, num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads, num_key_value_heads=ours.num_kv_heads,
        intermediate_size=ours.intermediate_size, attn_implementation="sdpa", pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@torch.inference_mode()
def generate_chunks(peer: Any, positions: int, speaks_BT: Tensor) -> float:
    """Let `generate` act after each chunk of all streams at once; returns the number of actions.

    Args:
        positions: of the system message, as many as ours has.

    A stream that has acted waits for the others, with padding, as `generate` does it.
    """
    import transformers

    draw = torch.Generator().manual_seed(1)
    cache = transformers.DynamicCache(config=peer.config)
    ids = torch.randint(2, WORDS, (STREAMS, positions), generator=draw)
    mask = torch.ones_like(ids)
    for chunk in range(ROLLOUT_CHUNKS):
        input_ids = torch.randint(2, WORDS, (STREAMS, ROLLOUT_FRAMES), generator=draw)
        ids, mask = torch.cat([ids, input_ids], dim=1), torch.cat([mask, torch.ones_like(input_ids)], dim=1)
        before = ids.shape[1]
        ends = transformers.LogitsProcessorList([EndsAsPlanned(before, speaks_BT[:, chunk])])
        ids = peer.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=TEXT_TOKENS + 1, do_sample=True,
            temperature=1.0, top_k=0, logits_processor=ends,
        )  # fmt: skip
        mask = torch.cat([mask, (ids[:, before:] != PAD).long()], dim=1)
    return speaks_BT.numel()


class EndsAsPlanned:
    """Lets a row end at once where it is silent, else after so many tokens as ours writes."""

    def __init__(self, before: int, speaks_B: Tensor) -> None:
        self._before, self._speaks_B = before, speaks_B

    def __call__(self, ids: Tensor, logits_BV: Tensor) -> Tensor:
        num_new = ids.shape[1] - self._before
        ends_B = torch.full_like(self._speaks_B, num_new >= TEXT_TOKENS) | ~self._speaks_B
        logits_BV = logits_BV.index_fill(1, torch.tensor([PAD, END]), -torch.inf)
        logits_BV[ends_B] = -torch.inf
        logits_BV[ends_B, END] = 0.0
        return logits_BV


# ------------------------------------------------------------------------------------------------ a step of PPO


def ppo_phases() -> None:
    """Run `train_interpreter` on random streams, and tell the time of a step by phase."""
    import tempfile

    import yaml
    from rich.console import Console

    from audiollm.data.records.part_codes import save_part_codes
    from audiollm.data.records.sample import Sample, write_samples
    from audiollm.files.atomic import read_jsonl
    from audiollm.models.hub import save_pretrained
    from audiollm.recipe.runner import run_recipe
    from audiollm.recipe.stages import load_recipe

    model, template = interpreter(TRAINED, speaks=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_pretrained(model, folder / "model", template.tokenizer)
        samples = []
        for number in range(STREAMS):
            prompt = stream_prompt(number, [place % 4 == 3 for place in range(ROLLOUT_CHUNKS)])
            save_part_codes(folder / f"{number}.safetensors", prompt.audio[0])  # type: ignore[arg-type]
            actions = [TextPart(text="one" if place % 4 == 3 else "") for place in range(ROLLOUT_CHUNKS)]
            recording = AudioPart(path=f"{number}.wav", codes=f"{number}.safetensors")
            messages = [
                *SYSTEM,
                Message(role="user", content=[recording]),
                Message(role="assistant", content=actions, chunk_frames=ROLLOUT_FRAMES),
            ]
            metadata: dict[str, Any] = {"source_ends": list(range(3, ROLLOUT_CHUNKS, 4))}
            metadata |= {"split": "test"} if number >= STREAMS - 2 else {}
            samples.append(Sample(id=str(number), messages=messages, task="interpret", metadata=metadata))
        write_samples(folder / "streams.jsonl", samples)
        stage = {
            "samples": str(folder / "streams.jsonl"), "start": str(folder), "steps": 10, "batch_size": STREAMS,
            "max_answer_tokens": TEXT_TOKENS, "precision": "fp32", "report_to": [], "evaluations": 1,
            "checkpoint_seconds": 0,
        }  # fmt: skip
        recipe = {"name": "any", "size": "tiny", "seed": 1, "stages": [{"train_interpreter": stage}]}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        run_recipe(load_recipe(folder / "recipe.yaml", name="r", runs=folder), Console(quiet=True))
        rows = read_jsonl(folder / "r" / "train_interpreter" / "performance.jsonl")
    phases = sorted({key for row in rows for key in row if key.startswith("seconds/")})
    line: dict[str, Any] = {
        "bench": "interpret",
        "case": f"step of PPO, {TRAINED}, {STREAMS} streams",
        "unit": "s on the clock",
    }
    for key in phases:
        line[key.removeprefix("seconds/")] = round(
            statistics.median(row[key] for row in rows if key in row), 3
        )
    print(json.dumps(line), flush=True)


# ------------------------------------------------------------------------------------------------ a GPU


def device_chunks(
    model: DualFFN, template: Template, streams: int, device: torch.device, speaks: bool = False
) -> tuple[float, float]:
    """Slowest and median seconds of a chunk of all streams at once, with full windows.

    Args:
        speaks: the model (of `interpreter`) answers every second chunk in speech once the window is full; else each
            one in text.
    """
    window = model.config.sliding_window or 0
    engine = Engine(model, template, streams, window + 100)
    limits = Limits(max_frames=SPEECH_FRAMES, max_text_tokens=TEXT_TOKENS)
    answer: Literal["any", "text"] = "any" if speaks else "text"
    numbers = [engine.open(OpenRequest(SYSTEM, seed, (), GREEDY, limits, answer)) for seed in range(streams)]
    draw = torch.Generator().manual_seed(1)
    seconds = []
    full = window // CHUNK_FRAMES + 2
    for chunk in range(full + 10):
        silent = chunk < full or chunk % 2 == 1
        input_codes = [torch.randint(2, CODES, (BOOKS, CHUNK_FRAMES), generator=draw) for _ in numbers]
        if speaks:
            for codes_KT in input_codes:
                codes_KT[:, -1] = int(silent)
        synchronize(device)
        began = time.perf_counter()
        for number, codes_KT in zip(numbers, input_codes, strict=True):
            engine.feed(number, codes_KT)
        acted: list[Acted] = []
        while engine.acting:
            acted += [event for event in engine.step() if isinstance(event, Acted)]
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        frames = {
            sum(piece.shape[1] for piece in action.parts if isinstance(piece, Tensor)) for action in acted
        }
        if speaks and frames != {0 if silent else SPEECH_FRAMES}:
            raise SystemExit(f"chunk {chunk} was answered with {frames} frames")
    return max(seconds[-10:]), statistics.median(seconds[-10:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------------------ both sides


def in_turns(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Median CPU-seconds per unit that each returns; the first round is thrown away."""
    spent: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for side, run_side in zip(spent, (ours, theirs), strict=True):
            began = time.process_time()
            units = run_side()
            if turn:
                side.append((time.process_time() - began) / units)
    return statistics.median(spent[0]), statistics.median(spent[1])


if __name__ == "__main__":
    main()
