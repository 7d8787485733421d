"""The stage `evaluate_interpreter`: a model interprets held-out streams, and is scored by latency and quality."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputModel, InputPath, Stage, StageConfig, StagePlan

if TYPE_CHECKING:
    from audiollm.codec import Codec
    from audiollm.families.policy import StreamPolicy


class EvaluateInterpreterConfig(StageConfig):
    """Settings of `evaluate_interpreter`."""

    model: InputModel
    """A training stage's folder, or a saved model's."""
    samples: InputPath
    """Streams with their codes: a folder of shards of `tokenize`, or a .jsonl."""
    split: Literal["test", "train"] = "test"
    """Metadata `split` of the streams that are interpreted."""
    max_streams: int = Field(200, ge=1)
    """Streams that are interpreted, evenly picked."""
    language: str = "en"
    """Language of the outputs, which decides BLEU's tokenizer."""
    temperature: float = Field(0.0, ge=0)
    """0 takes the likeliest actions."""
    top_p: float = Field(1.0, gt=0, le=1, exclude_if=lambda value: value == 1)
    """Draws are among the likeliest tokens that have this probability together."""
    silence_bias: float = 0.0
    """Added to the logit of silence where an action begins: above 0 the model waits more."""
    max_answer_tokens: int = Field(64, ge=1)
    """Longest text of an action, in tokens."""
    codec: InputModel | None = Field(None, exclude_if=lambda value: value is None)
    """The codec's folder, for a model that speaks: its speech is written to `speech/`, and latencies count its pieces.
    Without it the model answers in text alone. BLEU and chrF compare what it writes beside its speech."""
    max_speech_s: float = Field(10.0, ge=0.04, exclude_if=lambda value: value == 10)
    """Longest speech of an action, in seconds; more is cut."""
    examples: int = Field(8, ge=0)
    """Streams of the page with a timeline, the longest lag first."""
    seed: int = 0
    """Seed of the draws."""


def run_evaluate_interpreter(config: EvaluateInterpreterConfig, context: Context) -> dict[str, Any]:
    """Write instances.log, figures.json, results.json, rows.jsonl and report.html; returns the figures.

    Raises:
        StageError: the model is no DualFFN, the codec is not its own, or no stream of the split can be interpreted.
    """
    from audiollm.codec import FRAME_RATE
    from audiollm.devices import default_device
    from audiollm.errors import StageError
    from audiollm.evaluate.interpret.interpretation_suite import (
        InterpretationBench,
        LogOfSystem,
        evaluate_interpretation,
    )
    from audiollm.evaluate.interpret.latency_scores import LatencyOptions
    from audiollm.evaluate.interpret.logged_outputs import LOG_NAME, counted_unit, write_log
    from audiollm.evaluate.report.statistics import share
    from audiollm.evaluate.report.suite import conclude
    from audiollm.evaluate.report.text_errors import choose_form
    from audiollm.families.policies import load_policy
    from audiollm.families.policy import StreamPolicy
    from audiollm.files.atomic import write_json
    from audiollm.files.set_aside import SetAside
    from audiollm.generation.engine.request import Limits
    from audiollm.generation.engine.sampling import SamplingConfig
    from audiollm.interpret.held_out_streams import (
        interpret_streams,
        logged_stream,
        read_streams,
        right_segments,
        said_over,
        write_speech,
    )

    policy = load_policy(config.model)
    if not isinstance(policy, StreamPolicy):
        raise StageError("the model takes no streams", "give a model of `train`", 2)
    policy.root.requires_grad_(False).to(default_device())  # rows of a frozen encoder are read
    prompts, bad = read_streams(policy, Path(config.samples), config.split, config.max_streams)
    set_aside = SetAside(context.folder / "set_aside.jsonl", "evaluate_interpreter")
    set_aside.add(bad)
    if not prompts:
        raise StageError(
            f"no stream of the split {config.split} can be interpreted",
            "see set_aside.jsonl; `compose_streams` takes the split of a recording from its key `split`",
            2,
        )
    codec = _codec_of_policy(config, policy)
    acted = interpret_streams(
        policy,
        prompts,
        [config.seed * len(prompts) + number for number in range(len(prompts))],
        SamplingConfig(temperature=config.temperature, top_p=config.top_p),
        Limits(
            max_frames=max(1, round(config.max_speech_s * FRAME_RATE)),
            max_text_tokens=config.max_answer_tokens,
        ),
        "text" if codec is None else "any",
        config.silence_bias,
    )
    texts = [[action.text.strip() for action in actions] for actions in acted]
    outputs = []
    for index, (prompt, actions, stream_texts) in enumerate(zip(prompts, acted, texts, strict=True)):
        speech, durations_s = None, None
        if codec is not None:
            speech = f"speech/{index}.wav"
            durations_s = write_speech(prompt, actions, codec, context.folder / speech)
        pieces = said_over(prompt, stream_texts, durations_s)
        outputs.append(logged_stream(index, prompt, pieces, _source_path(prompt.prompted.prompt), speech))
    write_log(context.folder / LOG_NAME, outputs)
    unit = counted_unit(config.language)
    right = [
        is_right
        for prompt, stream_texts in zip(prompts, texts, strict=True)
        for is_right in right_segments(prompt, stream_texts, unit)
    ]
    bench = InterpretationBench(
        config.language,
        LatencyOptions(unit, score_empty=True),
        choose_form("spoken", config.language),
    )
    outcome = evaluate_interpretation([LogOfSystem(context.folder.name, context.folder, outputs)], bench)
    conclude(outcome, context.folder, config.examples, context.console)
    (scores,) = outcome.result["systems"].values()
    figures = {name: scores["latency"][name]["mean"] for name in ("AL", "LAAL")}
    figures |= {"chrF": scores["quality"]["chrF"], "BLEU": scores["quality"]["BLEU"]}
    figures |= {"right_segments": share(right)["accuracy"], "empty": scores["empty"], "streams": len(outputs)}
    write_json(context.folder / "figures.json", {**figures, "right_segments": share(right)})
    return {**figures, "set_aside": len(set_aside.rows)}


def _codec_of_policy(config: EvaluateInterpreterConfig, policy: StreamPolicy) -> Codec | None:
    """Return the codec of a model that speaks.

    Raises:
        StageError: its codes are not those of the model.
    """
    from audiollm.codec import load_codec
    from audiollm.errors import StageError

    if config.codec is None:
        return None
    codec, template = load_codec(config.codec), policy.template
    if (codec.num_codebooks, codec.codebook_size) != (template.num_codebooks, template.codebook_size):
        raise StageError(
            f"{config.codec}: {codec.num_codebooks} codebooks of {codec.codebook_size}, and the model speaks "
            f"{template.num_codebooks} of {template.codebook_size}",
            "give the codec that its codes were made with",
            2,
        )
    return codec


def _source_path(messages: Any) -> str:
    """The path of the recording that is heard."""
    paths = [
        content_part.path
        for message in messages
        for content_part in message.content
        if hasattr(content_part, "path")
    ]
    return str(paths[-1]) if paths else ""


def _plan_evaluate_interpreter(
    config: EvaluateInterpreterConfig, plans: Mapping[str, StagePlan]
) -> StagePlan:
    return StagePlan(
        memory_mb=1500,
        disk_mb=5,
        core_seconds=5 + 0.1 * config.max_streams,
        note=f"at most {config.max_streams} streams",
    )


STAGE = Stage(
    kind="evaluate_interpreter",
    config=EvaluateInterpreterConfig,
    run=run_evaluate_interpreter,
    artifacts={"log": "instances.log", "figures": "figures.json", "report": "report.html"},
    help="interpret held-out streams with a model: latency, quality, and a log for evaluate interpret",
    plan=_plan_evaluate_interpreter,
)
