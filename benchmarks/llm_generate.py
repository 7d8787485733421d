"""Audio frames per second of our engine against transformers' `generate`: the same weights, prompts and frames.

    python benchmarks/llm_generate.py [--full] [--frames 50] [--rounds 2] [--threads 2] [--device cpu]

Both sides take turns in one process and the median over the rounds counts; prefill is part of it, the weights are
random, drawing is greedy. EOS is never the most likely code here, so that both make the same number of frames, and the
codes of both are compared: they must be the same, up to the last K frames (there the engine winds down, one codebook
after the other, while `generate` breaks off). `generate` gets its prompts padded on the left, as it needs them; the
engine takes them as they are. `ratio` is by the clock, `cpu ratio` by the time of the process, which says more where
others use the machine (on one thread: waiting threads count as working). Reported beside it: milliseconds from the
request to the first complete frame and to the first sound (our tokenizer at its own size, random weights).

Also reported: CPU-seconds of eight short answers to one long prompt as a group, whose prompt is read once, and as
single requests.

The bars are 2.0 at batch 1 and 3.0 at batch 8 for the model of width 256; the wide one is reported. On a GPU, `--device
cuda`, with the shape of a 1 B model in bf16 besides (where codes may differ at a tie: counted, not refused).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from measure import bench_parser, parse_options
from torch import Tensor

from audiollm.data.chat.template import Template
from audiollm.data.records.sample import Message, TextPart
from audiollm.data.text import tokenizer as tokens
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.engine.streaming import stream_audio
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN

TEXTS = (
    "seven", "the rain has stopped, and the streets are empty", "what time does the last train leave?",
    "one two three four five", "no", "she read the letter twice before she answered it, and then she laughed",
    "the museum opens at nine", "turn left after the bridge",
)  # fmt: skip
GREEDY = SamplingConfig(temperature=0, text_guidance=1, speaker_guidance=1)
SMALL = DualFFNConfig(vocab_size=512)
WIDE = DualFFNConfig(
    vocab_size=512, hidden_size=1024, num_layers=8, num_heads=16, num_kv_heads=8, intermediate_size=2816
)
BILLION = DualFFNConfig(
    vocab_size=128_256, hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, intermediate_size=8192
)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--frames", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", default="256x6", help="of 256x6, 1024x8 and 1b")
    arguments = parse_options(parser, frames=100, rounds=5, sizes="256x6,1024x8")
    torch.set_num_threads(arguments.threads)
    shapes = {
        "256x6": (SMALL, torch.float32),
        "1024x8": (WIDE, torch.float32),
        "1b": (BILLION, torch.bfloat16),
    }
    for size in arguments.sizes.split(","):
        config, dtype = shapes[size]
        compare(size, config, torch.device(arguments.device), dtype, arguments.frames, arguments.rounds)


def compare(
    size: str, config: DualFFNConfig, device: torch.device, dtype: torch.dtype, frames: int, rounds: int
) -> None:
    model = speaking_model(config).to(device, dtype)
    template = Template(
        tokens.train_text_tokenizer(TEXTS, 400), config.num_codebooks, config.codebook_size - 2
    )
    peer = transformers_model(model, template)
    for batch in (1, 8):
        requests = [request(text, frames) for text in TEXTS[1 : batch + 1] or TEXTS[:1]]
        requests += [request(TEXTS[0], frames)] * (batch - len(requests))
        engine = Engine.sized_for(model, template, requests)
        answers: dict[str, list[Tensor]] = {}

        def ours(engine: Engine = engine, requests: list[Request] = requests) -> list[Tensor]:
            return [answer.codes_KT for answer in engine.run(requests)]

        def theirs(requests: list[Request] = requests) -> list[Tensor]:
            return generate(peer, template, requests, frames)

        seconds = in_turns({"ours": ours, "peer": theirs}, rounds, answers, device)
        same = [
            float((ours_KT.cpu() == peer_KT.cpu())[:, : frames - config.num_codebooks].float().mean())
            for ours_KT, peer_KT in zip(answers["ours"], answers["peer"], strict=True)
        ]
        if dtype == torch.float32 and min(same) < 1:
            raise SystemExit(f"{size}, batch {batch}: the codes differ: {same}")
        rates = {name: batch * frames / statistics.median(values) for name, values in seconds.items()}
        line: dict[str, Any] = {
            "bench": "llm_generate",
            "case": f"{size}, batch {batch}",
            "unit": "audio frames/s",
        }
        line |= {name: round(rates[name], 1) for name in ("ours", "peer")}
        line |= {"ratio": round(rates["ours"] / rates["peer"], 2)}
        line |= {"cpu ratio": round(rates["ours cpu"] / rates["peer cpu"], 2)}
        line |= {"same codes": round(statistics.mean(same), 4), "device": device.type, "frames": frames}
        print(json.dumps(line | {"threads": torch.get_num_threads(), "rounds": rounds}), flush=True)
    for case, measure in (("first sound", first_sound), ("group of 8", group_of_eight)):
        line = {"bench": "llm_generate", "case": f"{size}, {case}", **measure(model, template, rounds)}
        print(json.dumps(line), flush=True)


def speaking_model(config: DualFFNConfig) -> DualFFN:
    """Random weights, with which neither BOS nor EOS is ever the most likely code."""
    torch.manual_seed(0)
    model = DualFFN(config).eval()
    with torch.no_grad():
        for weight in model.model.embed_audio_tokens.parameters():
            weight.mul_(10)  # so that what has been said matters
        head_KVC = model.audio_lm_head.weight.view(config.num_codebooks, config.codebook_size, -1)
        head_KVC[:, -2:] = 0
    return model


def request(text: str, frames: int) -> Request:
    messages = [
        Message(role="system", content=[TextPart(text="Generate audio following instruction.")]),
        Message(role="user", content=[TextPart(text=text)]),
    ]
    return Request(messages, sampling=GREEDY, limits=Limits(max_frames=frames))


def transformers_model(model: DualFFN, template: Template) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    ours = model.config
    weight = next(model.parameters())
    config = transformers.HiggsAudioV2Config(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        rms_norm_eps=ours.norm_eps,
        num_codebooks=ours.num_codebooks,
        codebook_size=ours.codebook_size,
        audio_token_id=template.tokenizer.token_to_id(tokens.AUDIO_OUT),
        audio_delay_token_id=template.tokenizer.token_to_id(tokens.AUDIO_IN),
        audio_bos_token_id=template.tokenizer.token_to_id(tokens.AUDIO_OUT_BOS),
        audio_stream_bos_id=template.audio_bos,
        audio_stream_eos_id=template.audio_eos,
        pad_token_id=template.tokenizer.token_to_id(tokens.PAD),
        bos_token_id=template.tokenizer.token_to_id(tokens.BEGIN_OF_TEXT),
        eos_token_id=template.tokenizer.token_to_id(tokens.END_OF_TURN),
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        attn_implementation="sdpa",
    )
    peer = transformers.HiggsAudioV2ForConditionalGeneration(config, use_text_head=True)
    peer.load_state_dict(model.state_dict())
    return peer.to(weight.device, weight.dtype).eval()


def generate(peer: Any, template: Template, requests: list[Request], frames: int) -> list[Tensor]:
    """transformers' codes, without the delay: the first row is all BOS, codebook k is k rows late."""
    rows = [template.prompt(prompted.messages).text_ids_S for prompted in requests]
    longest = max(len(row) for row in rows)
    pad = peer.config.pad_token_id
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=pad) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    books = template.num_codebooks
    out_BFK = peer.generate(
        input_ids=ids.to(peer.device),
        attention_mask=mask.to(peer.device),
        max_new_tokens=frames + books,
        do_sample=False,
    )
    return [torch.stack([rows_FK[1 + k : 1 + k + frames, k] for k in range(books)]) for rows_FK in out_BFK]


def in_turns(
    ways: dict[str, Callable[[], list[Tensor]]],
    rounds: int,
    answers: dict[str, list[Tensor]],
    device: torch.device,
) -> dict[str, list[float]]:
    """Seconds of each, on the clock and of the CPU; the first round is thrown away."""
    seconds: dict[str, list[float]] = {f"{name}{clock}": [] for name in ways for clock in ("", " cpu")}
    for turn in range(rounds + 1):
        for name, run in ways.items():
            started = time.perf_counter(), time.process_time()
            answers[name] = run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - started[0])
                seconds[f"{name} cpu"].append(time.process_time() - started[1])
    return seconds


def group_of_eight(model: DualFFN, template: Template, rounds: int) -> dict[str, Any]:
    """CPU-seconds of 8 answers of 32 frames to one prompt of a thousand positions: a group, and single requests."""
    seeds, prompt_request = range(8), request(" ".join(TEXTS) * 8, 32)
    engine = Engine.sized_for(model, template, [prompt_request], answers_per_request=len(seeds))
    ways: dict[str, Callable[[], list[Tensor]]] = {
        "group": lambda: [answer.codes_KT for answer in engine.run_groups([(prompt_request, seeds)])[0]],
        "single": lambda: [
            answer.codes_KT for answer in engine.run([replace(prompt_request, seed=seed) for seed in seeds])
        ],
    }
    answers: dict[str, list[Tensor]] = {}
    seconds = in_turns(ways, rounds, answers, next(model.parameters()).device)
    return {
        "unit": "CPU-seconds",
        "group": round(statistics.median(seconds["group cpu"]), 3),
        "single": round(statistics.median(seconds["single cpu"]), 3),
        "prompt positions": len(template.prompt(prompt_request.messages)),
        "threads": torch.get_num_threads(),
    }


def first_sound(model: DualFFN, template: Template, rounds: int) -> dict[str, Any]:
    """Milliseconds to the first frame and to the first samples of one streamed answer."""
    from tokenizer.native.model import AudioTokenizer, TokenizerConfig

    codec = AudioTokenizer(TokenizerConfig()).eval()
    if (codec.num_codebooks, codec.codebook_size) != (template.num_codebooks, template.codebook_size):
        codec = AudioTokenizer(
            replace(
                TokenizerConfig(), num_codebooks=template.num_codebooks, codebook_size=template.codebook_size
            )
        ).eval()
    codec.to(next(model.parameters()).device)
    prompt_request = request(TEXTS[1], 50)
    engine = Engine.sized_for(model, template, [prompt_request])
    firsts = []
    for _ in range(rounds + 1):
        *_, last = stream_audio(engine.stream(prompt_request), codec)
        assert last.answer is not None  # it comes with the last piece
        firsts.append((last.answer.first_frame_s, last.first_audio_s))
    frame, sound = (1000 * statistics.median(times) for times in zip(*firsts[1:], strict=True))
    return {
        "first frame ms": round(frame, 1),
        "first sound ms": round(sound, 1),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
