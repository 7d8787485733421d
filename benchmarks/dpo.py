"""A step of DPO: ours on packs, against TRL's DPOTrainer on its padded batch.

    OMP_WAIT_POLICY=passive python benchmarks/dpo.py [--full] [--rounds 1] [--only time,memory,head]

A step is the batch, the policy and the frozen reference on 2 pairs (16 with `--full`), backward pass, clipping and
AdamW, in float32 on one thread. The model is a Qwen2 of random weights, 256 wide with 4 layers and a vocabulary of
32,768; the reference is another one. `ours` is a DualFFN loaded from the Qwen2's folder, trained as the stage
`train_preference` does (its task, its settings of size `tiny`, the loop's strategy); it also trains the audio part
that a DualFFN has. `peer` is TRL's DPOTrainer in its own `train()`, with its defaults except for the batch of all
pairs, float32 in place of bf16, and neither log nor checkpoint. TRL checkpoints activations by default: so do both
sides (`--keep-activations`: neither). TRL pads the pairs to one length; `--peer-batch 1` has it take a pair at a
time, with accumulation, and pad less. Before anything is timed, loss and gradient norm of the first step are
compared: a relative difference above 1e-4 ends the benchmark with exit code 1.

    long tail    prompt and answer have lengths as in packing.py, but at most 960 tokens: with the marks of the chat
                 template, TRL's default `max_length` of 1,024 cuts none
    equal        prompt and answer have 256 tokens

`time` is CPU-seconds of a step: the sides take turns in one process, the first round is thrown away, and the median of
the others counts. `memory` is the peak resident size of a process of each side's own, above what it holds when
everything is imported: models, optimizer and two steps. `ratio` is peer / ours.

Reported without a ratio: `adapter`, our policy for models of transformers (a Qwen2-Audio around the same Qwen2)
against TRL in the same turns; and `head`, the log-probabilities of 1,024 targets and their backward pass at a
vocabulary of 151,936: ours, TRL's in tiles (as DPOTrainer calls it), and the dense formula. Linux only; needs TRL 1.16
(extra `test`).
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from measure import bench_parser, in_own_process, parse_options, peak_mb_of
from packing import long_tail
from task_steps import Step, TaskSteps
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import TokenStream
from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.sample import Message, RatedAnswer, Sample, TextPart, write_samples
from audiollm.data.records.step_records import find_usable
from audiollm.data.text.tokenizer import add_special_tokens
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.listener.encoding import EncodedAnswer
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.logprobs.token_figures import TokenRequest, linear_token_figures
from audiollm.families.policy import Policy
from audiollm.files.set_aside import SetAside
from audiollm.rl.objectives.catalog import objective_term
from audiollm.rl.preference.batches import StepMaker
from audiollm.rl.preference.records import Grouping
from audiollm.rl.preference.settings import SIZES
from audiollm.rl.preference.task import PreferenceParts, PreferenceTask
from audiollm.train.settings import Precision

if TYPE_CHECKING:
    from trl_peers import DPOPeer

PAIRS, PROMPT_TOKENS, EQUAL_TOKENS, MAX_TOKENS = 16, 12, 256, 960
LEARNING_RATE = 1e-6
"""TRL's default."""
TOLERANCE = 1e-4
OURS = ("ours", "adapter")
"""The policies: a DualFFN, and a model of transformers."""
END_OF_TURN, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, as `audiollm.data.chat.template` writes it."""
HEAD_SHAPE = (1024, 256, 151_936)
"""Targets, hidden size and vocabulary of the case `head`."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the Qwen2."""

    hidden: int = 256
    intermediate: int = 1024
    layers: int = 4
    heads: int = 4
    vocabulary: int = 32_768


@dataclass(frozen=True)
class Setting:
    """How the sides take a step."""

    checkpointed: bool = True
    """Whether both compute layers again in the backward pass."""
    peer_batch: int = 0
    """Pairs that TRL takes at a time, with accumulation; 0: all of a step."""
    pairs: int = PAIRS
    """Pairs of a step."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = "fp32"
    """`fp32` or `bf16`, by autocast."""

    @property
    def printed_entries(self) -> dict[str, Any]:
        """Entries of a printed line."""
        return {
            "checkpointed": self.checkpointed,
            "pairs": self.pairs,
            **({"peer batch": self.peer_batch} if self.peer_batch else {}),
        }


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="steps of each side that are timed")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of a step")
    parser.add_argument("--only", default="time,memory,head", help="what is measured, of these three")
    parser.add_argument("--keep-activations", action="store_true", help="no activation checkpointing")
    parser.add_argument(
        "--peer-batch", type=int, default=0, help="pairs that TRL takes at a time; 0: all of a step"
    )
    arguments = parse_options(parser, rounds=3, pairs=PAIRS)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    only = set(arguments.only.split(","))
    setting = Setting(not arguments.keep_activations, arguments.peer_batch, arguments.pairs)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = {
            "equal": [EQUAL_TOKENS] * 2 * arguments.pairs,
            "long tail": long_tail(2 * arguments.pairs, MAX_TOKENS),
        }
        write_models(folder, Shape())
        for case, tokens in lengths.items():
            (folder / case).mkdir()
            write_records(folder / case / "records.jsonl", tokens)
            if "time" in only:
                compare_time(folder, case, arguments.rounds, setting)
            if "memory" in only:
                compare_memory(folder, case, setting)
        if "head" in only:
            compare_heads(*HEAD_SHAPE)


# Models and pairs


def write_models(
    folder: Path, shape: Shape, with_audio: bool = True, device: torch.device | None = None
) -> None:
    """Write `qwen2` and `qwen2_audio` with the same text model, and a reference with other weights of each.

    Args:
        with_audio: False: `qwen2` alone.
        device: where the weights are drawn; None: on the CPU.
    """
    words = word_tokenizer()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=END_OF_TEXT, eos_token=END_OF_TURN
    )
    torch.manual_seed(0)
    text = transformers.Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        vocab_size=shape.vocabulary,
        bos_token_id=None,
        eos_token_id=words.token_to_id(END_OF_TURN),
        pad_token_id=words.token_to_id(END_OF_TEXT),
    )
    with device or nullcontext():
        model = transformers.Qwen2ForCausalLM(text)
    audio: tuple[Any, Any] | None = around(model, tokenizer) if with_audio else None
    for role in ("policy", "reference"):
        model.save_pretrained(folder / "qwen2" / role)
        tokenizer.save_pretrained(folder / "qwen2" / role)
        if audio is not None:
            audio_llm, processor = audio
            audio_llm.save_pretrained(folder / "qwen2_audio" / role)
            processor.save_pretrained(folder / "qwen2_audio" / role)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))


def around(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """A Qwen2-Audio whose text model is `model` itself, with a tiny encoder; and its processor."""
    bins, window_s = 16, 2
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    audio |= {"num_mel_bins": bins, "max_source_positions": window_s * 50}
    marks = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
    config = transformers.Qwen2AudioConfig(
        audio_config=audio,
        text_config=model.config.to_dict(),
        audio_token_index=tokenizer.convert_tokens_to_ids(marks[1]),
    )
    audio_llm = transformers.Qwen2AudioForConditionalGeneration(config)
    weights = {f"model.language_model.{key}": value for key, value in model.model.named_parameters()}
    weights |= {"lm_head.weight": model.lm_head.weight}
    parameters = dict(audio_llm.named_parameters())
    if missing := weights.keys() - parameters.keys():
        raise RuntimeError(f"Qwen2-Audio has no parameters {sorted(missing)[:3]}")
    audio_llm.load_state_dict(weights, strict=False, assign=True)
    audio_llm.generation_config.eos_token_id = model.config.eos_token_id
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=window_s)
    return audio_llm, transformers.Qwen2AudioProcessor(extractor, tokenizer, chat_template=CHAT_TEMPLATE)


def word_tokenizer() -> Tokenizer:
    """Byte-level BPE in which each of `spoken_words`, with the space before it, is one token."""
    consonants, vowels = "bcdfghjklmnpqrstvwxyz", "aeiou"
    syllables = [c + v for c in consonants for v in vowels]
    words = [first + second for first in syllables for second in syllables]
    merges = [(s[0], s[1]) for s in syllables]
    merges += [(word[:2], word[2:]) for word in words] + [("Ġ", word) for word in words]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*letters, *syllables, *words, *(f"Ġ{word}" for word in words)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(entries)}, merges))
    line_ends = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [line_ends, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in marks])
    add_special_tokens(tokenizer, "chatml")
    return tokenizer


def write_records(path: Path, lengths: Sequence[int]) -> None:
    """Write pairs of random words: `lengths` are tokens of prompt and answer, two after another of each pair."""
    generator = torch.Generator().manual_seed(1)
    words = [token for token in word_tokenizer().get_vocab() if token.startswith("Ġ") and len(token) == 5]
    words.sort()

    def text(tokens: int) -> TextPart:
        indices = torch.randint(len(words), (tokens,), generator=generator).tolist()
        return TextPart(text="".join(words[place] for place in indices).replace("Ġ", " "))

    samples = []
    for number, pair in enumerate(zip(lengths[::2], lengths[1::2], strict=True)):
        answers = [
            RatedAnswer(content=[text(tokens - PROMPT_TOKENS)], score=1.0 - place)
            for place, tokens in enumerate(pair)
        ]
        prompt = [Message(role="user", content=[text(PROMPT_TOKENS)])]
        samples.append(Sample(id=f"pair{number}", messages=prompt, task="question", answers=answers))
    write_samples(path, samples)


# The two sides


class Ours:
    """The task of `train_preference` on a policy, stepped as the training loop does."""

    def __init__(self, policy: Policy[Any, Any, Any], records: Path, setting: Setting) -> None:
        for module in (policy.root, *policy.frozen.values()):
            module.to(setting.device)
        rule, term = SIZES["tiny"], objective_term("dpo", {})
        sources = [ManifestSource(records)]
        grouping = Grouping("pairs", term.needs.fields)
        set_aside = SetAside(records.parent / "set_aside.jsonl", "dpo", strict=True)
        usable = find_usable(sources, grouping.groups, set_aside)
        steps: StepMaker[Any, Any, Any] = StepMaker(
            policy, sources, usable, grouping, StepDraws(setting.pairs, max_tokens=rule.max_tokens)
        )
        task = PreferenceTask(PreferenceParts(policy, steps, [term], set_aside))
        self.step = TaskSteps(task, LEARNING_RATE, setting.checkpointed, setting.device, setting.precision)


def policy_of(folder: Path, kind: str) -> Policy[Any, Any, Any]:
    """Load the policy `ours` (a DualFFN) or `adapter` (a model of transformers), in float32."""
    torch.manual_seed(0)  # the audio part of the DualFFN begins at random
    if kind == "ours":
        root = folder / "qwen2"
        tokens = SIZES["tiny"].max_tokens
        return DualFFNPolicy.load(root / "policy", reference=root / "reference", max_tokens=tokens)
    root = folder / "qwen2_audio"
    return ListenerPolicy.load(root / "policy", reference=root / "reference")


def rows_for_trl(folder: Path, policy: Policy[Any, Any, Any], records: Path) -> list[dict[str, str]]:
    """The pairs as TRL takes them, in text; its tokenizer must give the policy's own tokens.

    Raises:
        SystemExit: it does not.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "qwen2" / "policy")
    rows, source = [], ManifestSource(records)
    for number in range(len(source)):
        encoded = policy.encode(policy.take(source[number], [0, 1]))
        (prompt, chosen), (_, rejected) = (parted(answer) for answer in encoded)
        rows.append(
            {
                key: tokenizer.decode(ids)
                for key, ids in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected))
            }
        )
        for key, ids in (("chosen", chosen), ("rejected", rejected)):
            if tokenizer(rows[-1]["prompt"] + rows[-1][key])["input_ids"] != prompt + ids:
                raise SystemExit(f"pair {number}: TRL's tokens are not ours")
    return rows


def parted(answer: TokenStream | EncodedAnswer) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the answer."""
    if isinstance(answer, EncodedAnswer):
        ids = answer.tokens["input_ids"].tolist()
        first = len(ids) - answer.num_answer_tokens
        return ids[:first], ids[first:]
    targets = (answer.text_targets_S != IGNORE).nonzero()[:, 0]
    ids = answer.text_ids_S.tolist()
    first, last = int(targets[0]), int(targets[-1])
    return ids[:first], ids[first : last + 1]


# Measurements


def compare_time(folder: Path, case: str, rounds: int, setting: Setting) -> None:
    """Time TRL, ours and the adapter, after a first step that must be equal."""
    seconds, first = in_turns(folder, case, rounds, setting)
    check_equal(case, first)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    for kind in OURS:
        ours, peer = medians[kind], medians["peer"]
        line: dict[str, Any] = {"bench": "dpo", "case": f"{'time' if kind == 'ours' else kind}, {case}"}
        line |= {"ours": round(ours, 2), "peer": round(peer, 2)}
        if kind == "ours":
            line |= {"ratio": round(peer / ours, 2)}
        print(json.dumps({**line, "unit": "CPU-s", **setting.printed_entries}), flush=True)


def in_turns(
    folder: Path, case: str, rounds: int, setting: Setting
) -> tuple[dict[str, list[float]], dict[str, Step]]:
    """CPU-seconds of the steps of all sides without their first, and figures of the first."""
    records = folder / case / "records.jsonl"
    policies = {kind: policy_of(folder, kind) for kind in OURS}
    rows, same = (rows_for_trl(folder, policy, records) for policy in policies.values())
    if rows != same:
        raise SystemExit("the adapter's tokens are not those of the DualFFN")
    sides = {kind: Ours(policy, records, setting) for kind, policy in policies.items()}
    peer = peer_of(folder, case, rows, rounds + 1, setting)
    seconds: dict[str, list[float]] = {side: [] for side in ("peer", *sides)}
    first: dict[str, Step] = {}
    started = 0.0

    def turn() -> None:
        nonlocal started
        seconds["peer"].append(time.process_time() - started)
        first.setdefault("peer", peer.steps_taken[0])
        for kind, side in sides.items():
            started = time.process_time()
            step = side.step()
            seconds[kind].append(time.process_time() - started)
            first.setdefault(kind, step)
        started = time.process_time()

    peer.between = turn
    started = time.process_time()
    peer.train()
    return {side: values[1:] for side, values in seconds.items()}, first


def peer_of(folder: Path, case: str, rows: Sequence[dict[str, str]], steps: int, setting: Setting) -> DPOPeer:
    from trl_peers import DPOPeer

    root = folder / "qwen2"
    config = {
        "per_device_train_batch_size": setting.peer_batch or len(rows),
        "gradient_accumulation_steps": len(rows) // (setting.peer_batch or len(rows)),
        "bf16": setting.precision == "bf16",
        "use_cpu": setting.device.type == "cpu",
        "gradient_checkpointing": setting.checkpointed,
        "output_dir": str(folder / case / "trl"),
    }
    return DPOPeer(
        root / "policy", root / "reference", rows, max_steps=steps, learning_rate=LEARNING_RATE, **config
    )


def check_equal(case: str, first: Mapping[str, Step]) -> None:
    """Print loss and gradient norm of the first step of each side.

    Raises:
        SystemExit: they differ.
    """
    peer = first["peer"]
    for kind in OURS:
        differences = [
            abs(ours - theirs) / abs(theirs) for ours, theirs in zip(first[kind], peer, strict=True)
        ]
        line = {"bench": "dpo", "case": f"first step, {kind}, {case}", "loss": [first[kind].loss, peer.loss]}
        line |= {"gradient norm": [first[kind].norm, peer.norm]}
        print(
            json.dumps(line | {"difference": [float(f"{difference:.2g}") for difference in differences]}),
            flush=True,
        )
        if not all(difference <= TOLERANCE for difference in differences):  # NaN differs too
            raise SystemExit(f"{kind} and TRL differ by more than {TOLERANCE:g}: {first[kind]}, {peer}")


def compare_memory(folder: Path, case: str, setting: Setting) -> None:
    """Measure both sides, each in a process of its own."""
    records = folder / case / "records.jsonl"
    rows = rows_for_trl(folder, policy_of(folder, "ours"), records)
    peaks = {}
    for side in ("ours", "peer"):
        peaks[side] = in_own_process(peak_memory, folder, case, side, rows, setting)
    line = {"bench": "dpo", "case": f"memory, {case}", **{side: round(mb) for side, mb in peaks.items()}}
    line |= {"ratio": round(peaks["peer"] / peaks["ours"], 2)}
    print(json.dumps({**line, "unit": "MB at the peak", **setting.printed_entries}), flush=True)


def peak_memory(
    folder: Path, case: str, side: str, rows: Sequence[dict[str, str]], setting: Setting
) -> float:
    """MB of models, optimizer and two steps, above what the imports take."""
    torch.set_num_threads(1)

    def two_steps() -> None:
        if side == "peer":
            peer_of(folder, case, rows, 2, setting).train()
            return
        ours = Ours(policy_of(folder, "ours"), folder / case / "records.jsonl", setting)
        for _ in range(2):
            ours.step()

    return peak_mb_of(two_steps)


def compare_heads(targets: int, hidden: int, vocabulary: int) -> None:
    """Measure the heads, each in a process of its own; their gradients must be equal."""
    costs: dict[str, tuple[float, float, list[float]]] = {}
    for side in HEADS:
        costs[side] = in_own_process(head_cost, side, targets, hidden, vocabulary)
    for side, (_, _, norms) in costs.items():
        if any(abs(a - b) > TOLERANCE * b for a, b in zip(norms, costs["dense"][2], strict=True)):
            raise SystemExit(
                f"head: gradient norms {norms} of {side}, {costs['dense'][2]} of the dense formula"
            )
    memory = {side: round(megabytes, 1) for side, (megabytes, _, _) in costs.items()}
    seconds = {side: round(spent, 1) for side, (_, spent, _) in costs.items()}
    for what, values, unit in (("memory", memory, "MB at the peak"), ("time", seconds, "CPU-s")):
        line = {"bench": "dpo", "case": f"head, {what}, {targets} targets, vocabulary {vocabulary}"}
        print(json.dumps({**line, **values, "unit": unit}))


def head_cost(side: str, targets: int, hidden: int, vocabulary: int) -> tuple[float, float, list[float]]:
    """MB above inputs and weight, CPU-seconds, and the gradients' norms."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def problem(rows: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
        hidden_XC = torch.randn(rows, hidden, generator=generator).requires_grad_()
        weight_VC = torch.randn(words, hidden, generator=generator).mul_(0.02).requires_grad_()
        return hidden_XC, weight_VC, torch.randint(words, (rows,), generator=generator)

    HEADS[side](*problem(4, 64)).sum().backward()  # what is allocated once does not count
    hidden_XC, weight_VC, target_X = problem(targets, vocabulary)
    upstream_X = torch.randn(targets, generator=generator)
    started = time.process_time()
    peak = peak_mb_of(lambda: (HEADS[side](hidden_XC, weight_VC, target_X) * upstream_X).sum().backward())
    seconds = time.process_time() - started
    assert hidden_XC.grad is not None and weight_VC.grad is not None
    return peak, seconds, [float(hidden_XC.grad.norm()), float(weight_VC.grad.norm())]


def trl_head(hidden_XC: Tensor, weight_VC: Tensor, target_X: Tensor) -> Tensor:
    from trl_peers import chunked_logprobs

    return chunked_logprobs(hidden_XC, weight_VC, target_X)


def our_head(hidden_XC: Tensor, weight_VC: Tensor, target_X: Tensor) -> Tensor:
    return linear_token_figures(hidden_XC, weight_VC, target_X[:, None], TokenRequest()).logprob_T[:, 0]


def dense_head(hidden_XC: Tensor, weight_VC: Tensor, target_X: Tensor) -> Tensor:
    return (hidden_XC @ weight_VC.T).log_softmax(-1).gather(1, target_X[:, None])[:, 0]


HEADS = {"ours": our_head, "trl": trl_head, "dense": dense_head}


if __name__ == "__main__":
    main()
