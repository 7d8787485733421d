"""A step of GRPO: ours against TRL's GRPOTrainer, in turns on one thread.

    OMP_WAIT_POLICY=passive python benchmarks/grpo.py [--full] [--rounds 2] [--only time,memory,group,audio]

A step is 8 answers of 64 tokens to a prompt, two rewards with weights 2 and 1, the reference (beta 0.01, k3), the
gradient of GRPO, clipping and AdamW, in float32. The models are Qwen2 of random weights, 64 wide with 2 layers and
256 wide with 4, in which the end of the turn has a probability of about 0: both sides generate exactly 8 x 64 tokens.
`ours` is a DualFFN that is loaded from the Qwen2's folder without an audio feed-forward (`audio_ffn_layers: []`),
trained as the stage `train_policy` does (its task, its settings of size `tiny`, the loop's strategy, its file of
rollouts); it also has the audio embeddings and heads that a DualFFN has. `peer` is TRL's GRPOTrainer in its own
`train()` with `loss_type: grpo`, KL without the ratio in it, and neither log nor checkpoint.
Before anything is timed, logits and the tokens of prompts are compared; a difference above 1e-4 ends the benchmark
with exit code 1.

`time` is CPU-seconds of a step: the sides take turns in one process, the first round is thrown away, and the median of
the others counts. `memory` is the peak resident size of a process of each side's own, above what it holds when
everything is imported: models, optimizer and two steps. `ratio` is peer / ours.

Reported without a ratio: `phases` of our step; `adapter`, our policy for models of transformers (a Qwen2-Audio around
the same Qwen2, its rollouts by `generate`) in the same turns; `group`, 8 answers to one prompt of 800 tokens as a
group against single requests; `audio`, a step whose prompt has a recording of 2 s, of a DualFFN with an encoder and
of the Qwen2-Audio; and `sampling ahead`, wall time of a training's step on 2 threads, with `ahead: 1` and without
(with `--full` alone). Linux only; needs TRL 1.16 (extra `test`).
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import numpy as np
import soundfile
import torch
import transformers
from dpo import END_OF_TEXT, END_OF_TURN, around
from measure import bench_parser, in_own_process, in_turns, parse_options, peak_mb_of
from rich.console import Console
from task_steps import TaskSteps
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from audiollm.data.packing import pack
from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.text.tokenizer import add_special_tokens
from audiollm.devices import default_device
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.dual_ffn.start import start_model, start_template
from audiollm.families.listener.encoding import encode_prompt
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.policies import load_policy
from audiollm.families.policy import Policy
from audiollm.families.rollout import RolloutSettings
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.rl.online import run
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.rewards.batch import RewardBatch
from audiollm.train.loop.task import Task
from audiollm.train.settings import Precision

if TYPE_CHECKING:
    from trl_peers import GRPOPeer

GROUP, NEW_TOKENS, BETA, LEARNING_RATE = 8, 64, 0.01, 1e-6
PROMPTS, LONG_PROMPT_WORDS, SECONDS_HEARD = 64, 100, 2
TOLERANCE = 1e-4
KEY = "dog"
CORPUS = (
    "Which animal makes the sound in the audio? ['dog', 'cat', 'bird', 'car']",
    "Output the thinking process (less than 50 words) in <think> </think> and final answer in <answer> </answer>.",
    "<think>a dog barks</think>\n<answer>dog</answer>",
)
WEIGHTS = {"grpo:names_key": 2.0, "grpo:length": 1.0}
OURS = ("ours", "adapter")
"""The policies: a DualFFN, and a model of transformers."""


HEARING = AudioEncoderConfig(
    d_model=32,
    encoder_layers=1,
    encoder_attention_heads=2,
    encoder_ffn_dim=64,
    num_mel_bins=16,
    max_source_positions=50 * SECONDS_HEARD,
)
"""The encoder of the DualFFN that hears."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the Qwen2."""

    hidden: int
    layers: int
    vocabulary: int
    heads: int = 4
    initializer_range: float = 0.02
    encoder: AudioEncoderConfig = HEARING

    @property
    def name(self) -> str:
        """The name of its cases."""
        return f"{self.hidden} x {self.layers}"


SHAPES = (Shape(64, 2, 512), Shape(256, 4, 2000))


ALL_CASES = "time,memory,group,audio,ahead"


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="steps of each side that are timed")
    parser.add_argument("--only", default="time,memory,group,audio", help=f"what is measured, of {ALL_CASES}")
    arguments = parse_options(parser, rounds=6, only=ALL_CASES)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    only = set(arguments.only.split(","))
    with tempfile.TemporaryDirectory() as name:
        for shape in SHAPES:
            folder = Path(name) / shape.name.replace(" ", "")
            write_models(folder, shape)
            check_logits(folder)
            if "time" in only:
                compare_time(folder, shape, arguments.rounds)
            if "memory" in only:
                compare_memory(folder, shape)
            if "group" in only:
                compare_group(folder, shape, arguments.rounds)
            if "audio" in only:
                measure_audio(folder, shape, arguments.rounds)
            if "ahead" in only:
                measure_ahead(folder, shape)


# Models and prompts


def write_models(
    folder: Path,
    shape: Shape,
    models: Collection[str] = ("dual_ffn", "qwen2_audio", "hearing"),
    device: torch.device | None = None,
) -> None:
    """Write the Qwen2, the DualFFN and the Qwen2-Audio around it, and a DualFFN with an encoder; and the prompts.

    Args:
        models: which of them are written beside the Qwen2.
        device: where the weights of the Qwen2 are drawn; None: on the CPU.
    """
    folder.mkdir(parents=True)
    words = prompt_tokenizer(shape.vocabulary)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=END_OF_TEXT, eos_token=END_OF_TURN, padding_side="left"
    )
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        initializer_range=shape.initializer_range,
        vocab_size=shape.vocabulary,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=words.token_to_id(END_OF_TURN),
        pad_token_id=words.token_to_id(END_OF_TEXT),
    )
    with device or nullcontext():
        model = transformers.Qwen2ForCausalLM(config)
    ends = [config.eos_token_id, config.pad_token_id]
    with torch.no_grad():  # what ends an answer has a logit of about -70: no side ever draws it
        model.model.embed_tokens.weight[:, 0] = 0.3
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[ends] = 0.0
        model.lm_head.weight[ends, 0] = -10.0
    model.save_pretrained(folder / "qwen2")
    tokenizer.save_pretrained(folder / "qwen2")
    if "qwen2_audio" in models:
        audio_llm, processor = around(model, tokenizer)
        audio_llm.save_pretrained(folder / "qwen2_audio")
        processor.save_pretrained(folder / "qwen2_audio")
    template = start_template(folder / "qwen2")
    ours = start_model(folder / "qwen2", template, audio_ffn_layers=[])
    if "dual_ffn" in models:
        ours.save_pretrained(folder / "dual_ffn", template.tokenizer)
    if "hearing" in models:
        ours.add_audio_encoder(shape.encoder)
        ours.save_pretrained(folder / "hearing", template.tokenizer)
    noise = 0.1 * np.random.default_rng(0).standard_normal(16_000 * SECONDS_HEARD)
    soundfile.write(folder / "noise.wav", noise, 16_000, subtype="PCM_16")
    write_samples(folder / "text.jsonl", [prompt(number) for number in range(PROMPTS)])
    recording = AudioPart(path=str(folder / "noise.wav"))
    write_samples(folder / "audio.jsonl", [prompt(number, recording) for number in range(PROMPTS)])
    write_samples(folder / "long.jsonl", [prompt(0, words=LONG_PROMPT_WORDS)])


def prompt_tokenizer(vocabulary: int) -> Tokenizer:
    """Byte-level BPE, trained on the words of prompts, with the special tokens that a DualFFN has."""
    tokenizer = Tokenizer(models.BPE())
    line_ends = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [line_ends, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary - 32, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    marks = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in marks])
    add_special_tokens(tokenizer, "chatml")
    return tokenizer


def prompt(number: int, recording: AudioPart | None = None, words: int = 0) -> Sample:
    """A question with its answer key."""
    question = f"Which animal makes sound {number}? ['dog','cat'] final answer in <answer> </answer>."
    content = [
        *([recording] if recording else []),
        TextPart(text=question + " Which animal makes the sound?" * words),
    ]
    key = Message(role="assistant", content=[TextPart(text=KEY)])
    asks = Message(role="user", content=content)
    return Sample(id=f"prompt{number}", messages=[asks, key], task="question", metadata={"choices": []})


def names_key(batch: RewardBatch) -> list[float | None]:
    """1 where the answer names the key."""
    return [float(KEY in answer.text) for answer in batch]


def length(batch: RewardBatch) -> list[float | None]:
    """Characters of the answer, modulo 7."""
    return [float(len(answer.text) % 7) for answer in batch]


def names_key_of_texts(completions: Sequence[str], **_: Any) -> list[float]:
    """`names_key` as TRL calls it."""
    return [float(KEY in text) for text in completions]


def length_of_texts(completions: Sequence[str], **_: Any) -> list[float]:
    """`length` as TRL calls it."""
    return [float(len(text) % 7) for text in completions]


def check_logits(folder: Path) -> None:
    """Compare the logits of both models on random tokens.

    Raises:
        SystemExit: they differ.
    """
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen2", dtype=torch.float32).eval()
    policy = load_policy(folder / "dual_ffn")
    assert isinstance(policy, DualFFNPolicy)
    (stream,) = [policy.template.text_prompt(prompt(0).messages[:1])]
    with torch.no_grad():
        batch = pack([stream])
        own_SV = policy.root.model.text_logits(policy.root.model(batch))[: len(stream)]
        peer_SV = theirs(stream.text_ids_S[None]).logits[0]
    words = peer_SV.shape[1]
    difference = float((own_SV[:, :words] - peer_SV).abs().max())
    if not difference <= TOLERANCE:  # NaN differs too
        raise SystemExit(f"logits differ by {difference:g}")


# The two sides


def steps_of(
    folder: Path,
    kind: str,
    prompts: str = "text",
    more: Mapping[str, Any] | None = None,
    precision: Precision = "fp32",
) -> TaskSteps:
    """The steps of `train_policy`: its task, where the stage hands it to the training loop.

    Args:
        kind: `ours`, `hearing` (a DualFFN with an encoder) or `adapter`.
        prompts: `text` or `audio`.
        more: settings of the stage.
    """
    config, context = stage_of(folder, kind, prompts, more=more)
    tasks: list[Task] = []

    def catch_task(task: Task, *_: Any) -> NoReturn:
        tasks.append(task)
        raise Assembled

    with mock.patch.object(run, "train", catch_task), suppress(Assembled):
        run.train_policy(config, context)
    return TaskSteps(tasks[0], LEARNING_RATE, device=default_device(), precision=precision)


def stage_of(
    folder: Path, kind: str, prompts: str, name: str = "stage", more: Mapping[str, Any] | None = None
) -> tuple[PolicyTrainingConfig, Context]:
    """The settings of `train_policy`, with `more` of them, and a context with a folder of its own."""
    settings = {
        "size": "tiny",
        "start": folder / {"ours": "dual_ffn", "hearing": "hearing", "adapter": "qwen2_audio"}[kind],
        "samples": str(folder / f"{prompts}.jsonl"),
        "rewards": WEIGHTS,
        "group_size": GROUP,
        "batch_size": 1,
        "max_answer_tokens": NEW_TOKENS,
        "learning_rate": LEARNING_RATE,
        "kl": {"controller": {"name": "fixed", "coefficient": BETA}},
        **(more or {}),
    }
    place = folder / f"{name}-{kind}-{prompts}"
    place.mkdir(exist_ok=True)
    recipe = Recipe("grpo", Path("grpo.yaml"), "tiny", 0, folder, (), {})
    return PolicyTrainingConfig.model_validate(settings), Context(place, recipe, Console(quiet=True), {})


class Assembled(Exception):
    """The stage has made its task."""


def peer_of(
    folder: Path, steps: int, policies: Sequence[str] = ("dual_ffn", "qwen2_audio"), **config: Any
) -> GRPOPeer:
    """TRL's trainer over the prompts in text, which the policies must have in the same tokens.

    Args:
        policies: folders of those that are compared with it.
        config: entries of TRL's `GRPOConfig` in place of those of a step on the CPU in float32.
    """
    from trl_peers import GRPOPeer

    settings = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": GROUP,
        "num_generations": GROUP,
        "max_completion_length": NEW_TOKENS,
        "beta": BETA,
        "reward_weights": list(WEIGHTS.values()),
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "bf16": False,
        "use_cpu": True,
    }
    rewards = [names_key_of_texts, length_of_texts]
    rows = rows_for_trl(folder, policies)
    return GRPOPeer(folder / "qwen2", rewards, rows, tokenizer_of(folder), **settings | config)


def tokenizer_of(folder: Path) -> Any:
    """TRL's tokenizer: not `AutoTokenizer`, which takes Qwen2's own way to part digits."""
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder / "qwen2", padding_side="left")


def rows_for_trl(folder: Path, policies: Sequence[str]) -> list[dict[str, str]]:
    """The prompts as TRL takes them, in text; its tokenizer must give the policies' own tokens.

    Raises:
        SystemExit: it does not.
    """
    tokenizer = tokenizer_of(folder)
    loaded = [load_policy(folder / name) for name in policies]
    rows, source = [], ManifestSource(folder / "text.jsonl")
    for number in range(len(source)):
        ids = prompt_ids(loaded[0], source[number])
        rows.append({"prompt": tokenizer.decode(ids)})
        sides = [tokenizer(rows[-1]["prompt"])["input_ids"], *(prompt_ids(p, source[number]) for p in loaded)]
        if any(side_ids != ids for side_ids in sides):
            raise SystemExit(f"prompt {number}: the tokens of the sides differ")
    return rows


def prompt_ids(policy: Policy[Any, Any, Any], loaded: Any) -> list[int]:
    """The tokens of a prompt."""
    prompt_sample = loaded.sample.model_copy(update={"messages": loaded.sample.messages[:-1]})
    prompted = policy.take(type(loaded)(prompt_sample, loaded.encodings, loaded.audio), [])
    if isinstance(policy, ListenerPolicy):
        ids: list[int] = encode_prompt(policy.processor, prompted).tokens["input_ids"].tolist()
        return ids
    assert isinstance(policy, DualFFNPolicy)
    text_ids: list[int] = policy.template.text_prompt(prompted.prompt, prompted.audio).text_ids_S.tolist()
    return text_ids


# Measurements


def compare_time(folder: Path, shape: Shape, rounds: int) -> None:
    """Time TRL, ours and the adapter in turns; both sides must generate as many tokens."""
    sides = {kind: steps_of(folder, kind) for kind in OURS}
    peer = peer_of(folder, rounds + 1)
    seconds: dict[str, list[float]] = {side: [] for side in ("peer", *sides)}
    phases: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    started = 0.0

    def turn() -> None:
        nonlocal started
        seconds["peer"].append(time.process_time() - started)
        for kind, side in sides.items():
            started = time.process_time()
            side()
            seconds[kind].append(time.process_time() - started)
            phases[kind].append(side.seconds)
        started = time.process_time()

    peer.between = turn
    started = time.process_time()
    peer.train()
    generated = [[*peer.generated]] + [tokens_generated(folder, kind, rounds + 1) for kind in OURS]
    if any(count != GROUP * NEW_TOKENS for counts in generated for count in counts):
        raise SystemExit(f"unequal counts of generated tokens: {generated}")
    medians = {side: statistics.median(values[1:]) for side, values in seconds.items()}
    for kind in OURS:
        is_ours = kind == "ours"
        line: dict[str, Any] = {"bench": "grpo", "case": f"{'time' if is_ours else 'adapter'}, {shape.name}"}
        line |= {"ours": round(medians[kind], 3), "peer": round(medians["peer"], 3)}
        if is_ours:
            line |= {"ratio": round(medians["peer"] / medians[kind], 2)}
        print(json.dumps({**line, "unit": "CPU-s a step"}), flush=True)
        phase_medians = {
            name: round(statistics.median(row[name] for row in phases[kind][1:]), 3)
            for name in phases[kind][0]
        }
        line = {"bench": "grpo", "case": f"phases of {kind}, {shape.name}", **phase_medians}
        print(json.dumps({**line, "unit": "CPU-s"}), flush=True)


def tokens_generated(folder: Path, kind: str, steps: int) -> list[int]:
    """The tokens of each step by our files of rollouts."""
    paths = sorted((folder / f"stage-{kind}-text" / "rollouts").glob("*.jsonl"))[:steps]
    return [sum(json.loads(row)["tokens"] for row in path.read_text().splitlines()) for path in paths]


def compare_memory(folder: Path, shape: Shape) -> None:
    """Measure both sides, each in a process of its own."""
    peaks = {}
    for side in ("ours", "peer"):
        peaks[side] = in_own_process(peak_memory, folder, side)
    line: dict[str, Any] = {"bench": "grpo", "case": f"memory, {shape.name}"}
    line |= {side: round(mb, 1) for side, mb in peaks.items()}
    line |= {"ratio": round(peaks["peer"] / peaks["ours"], 2)}
    print(json.dumps({**line, "unit": "MB at the peak"}), flush=True)


def peak_memory(folder: Path, side: str) -> float:
    """MB of models, optimizer and two steps, above what the imports take."""
    torch.set_num_threads(1)

    def two_steps() -> None:
        if side == "peer":
            peer_of(folder, 2).train()
            return
        step = steps_of(folder, "ours")
        for _ in range(2):
            step()

    return peak_mb_of(two_steps)


@torch.no_grad()
def compare_group(folder: Path, shape: Shape, rounds: int) -> None:
    """Time the answers to one long prompt as a group, and one by one."""
    policy = load_policy(folder / "dual_ffn")
    engine = policy.rollout_engine()
    loaded = ManifestSource(folder / "long.jsonl")[0]
    prompt_sample = loaded.sample.model_copy(update={"messages": loaded.sample.messages[:-1]})
    prompted = policy.take(type(loaded)(prompt_sample, loaded.encodings, loaded.audio), [])
    seconds: dict[str, list[float]] = {"ours": [], "single": []}
    for step in range(rounds + 1):
        settings = RolloutSettings(0, step, max_text_tokens=NEW_TOKENS)
        for name, parts in (("ours", [range(GROUP)]), ("single", [[number] for number in range(GROUP)])):
            began = time.process_time()
            for numbers in parts:
                engine.sample([prompted], [list(numbers)], settings)
            seconds[name].append(time.process_time() - began)
    tokens = len(prompt_ids(policy, loaded))
    line: dict[str, Any] = {"bench": "grpo", "case": f"group, a prompt of {tokens} tokens, {shape.name}"}
    line |= {name: round(statistics.median(values[1:]), 3) for name, values in seconds.items()}
    print(json.dumps({**line, "unit": "CPU-s"}), flush=True)


def measure_audio(folder: Path, shape: Shape, rounds: int) -> None:
    """Time steps whose prompt has a recording; TRL does not hear it."""
    sides = {"ours": steps_of(folder, "hearing", "audio"), "adapter": steps_of(folder, "adapter", "audio")}
    seconds = in_turns(sides, rounds)
    line: dict[str, Any] = {"bench": "grpo", "case": f"audio of {SECONDS_HEARD} s, {shape.name}"}
    line |= {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    print(json.dumps({**line, "unit": "CPU-s a step"}), flush=True)


def measure_ahead(folder: Path, shape: Shape) -> None:
    """Time whole trainings on 2 threads, which sample in turns with the updates, and ahead in a second process."""
    seconds = {}
    torch.set_num_threads(2)
    for name, more in (("in turns", {}), ("ahead", {"ahead": 1, "correction": {}})):
        config, context = stage_of(folder, "ours", "text", name.replace(" ", "-"), {**more, "steps": 12})
        run.train_policy(config, context)
        rows = (context.folder / "performance.jsonl").read_text().splitlines()
        steps = [json.loads(row)["seconds_per_step"] for row in rows if "seconds_per_step" in row]
        seconds[name] = round(statistics.median(steps[2:]), 3)
    torch.set_num_threads(1)
    line = {
        "bench": "grpo",
        "case": f"sampling ahead, {shape.name}",
        **seconds,
        "unit": "wall s a step, 2 threads",
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
