"""The stage `evaluate_sound`: generated sounds beside real ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from audiollm.evaluate.judges.yamnet import AUTO_SOURCE
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, InputSource, Stage, StageConfig, StagePlan


class EvaluateSoundConfig(StageConfig):
    """Settings of the stage `evaluate_sound`."""

    sounds: InputPath
    """`generated.jsonl` of the stage `generate_sound`, or a list of one's own in its columns."""
    classes: Annotated[InputSource, AUTO_SOURCE] | None = None
    """Judge of what is heard: `auto` (YAMNet), a .tflite or .onnx tagger, a folder of a classifier, or
    `package.module:factory`."""
    space: Annotated[InputSource, AUTO_SOURCE] | None = None
    """Space of the Fréchet distance: the folder of a ClapModel, a judge as `classes`, or a factory; null: the logits of
    `classes`."""
    clap: InputSource | None = None
    """Space of sounds and texts: the folder of a ClapModel, or a factory."""
    classes_from: InputPath | None = None
    """Scenes whose events have solo tracks (compose_scenes), in place of `classes`: a judge of what is heard is trained
    on those of the training split, and its accuracy on the held-out ones is shown."""
    judge_steps: int = Field(300, ge=10)
    """Steps of the training of that judge."""
    synchrony: str | None = None
    """Judge of synchrony with the video, by import path."""
    training: InputPath | None = None
    """Training sounds, to find copies of them: a folder, or samples (.jsonl), of which held-out splits are left out."""
    edits: InputPath | None = None
    """`edited.jsonl` of the stage `edit_sounds`, judged beside the sounds."""
    max_sounds: int = Field(500, ge=1)
    """Most sounds that are scored."""
    examples: int = Field(8, ge=0)
    """Sounds of the report that can be heard, the worst first."""

    @model_validator(mode="after")
    def _one_judge(self) -> EvaluateSoundConfig:
        if self.classes and self.classes_from:
            raise ValueError("give classes or classes_from, not both")
        return self


def run_evaluate_sound(config: EvaluateSoundConfig, context: Context) -> dict[str, Any]:
    """Write results.json, rows.jsonl and report.html.

    Raises:
        ConfigError: a list or a judge that cannot be read.
    """
    from audiollm.evaluate.report.suite import conclude, spread_items
    from audiollm.evaluate.sound.commands import load_judges, training_sounds
    from audiollm.evaluate.sound.edited_sounds import judge_edits, read_edited
    from audiollm.evaluate.sound.event_judge import event_judge
    from audiollm.evaluate.sound.generated_sounds import read_generated
    from audiollm.evaluate.sound.sound_judges import OwnClasses
    from audiollm.evaluate.sound.suite import evaluate_sounds, with_edits
    from audiollm.pages.formats import with_interval

    sounds = spread_items(read_generated(config.sounds), config.max_sounds)
    training_paths = training_sounds(config.training, "training") if config.training is not None else []
    edits = spread_items(read_edited(config.edits), config.max_sounds) if config.edits is not None else []
    judges = load_judges(config.classes, config.space, config.clap, config.synchrony)
    if config.classes_from is not None:
        context.say("training a judge of what is heard")
        classifier, accuracy = event_judge(config.classes_from, context.folder / "judge", config.judge_steps)
        right = with_interval(accuracy, "accuracy")
        about = f"a classifier of the training scenes' sounds, right for {right} of the held-out ones"
        judges = judges.with_classes(OwnClasses(classifier), about)
    with context.progress("scoring", len(sounds) + len(training_paths) + len(edits)) as bar:

        def advance(_: str) -> None:
            bar.advance(bar.task_ids[0])

        outcome = evaluate_sounds(sounds, judges, training_paths, advance)
        if edits:
            outcome = with_edits(outcome, judge_edits(edits, judges.classes, advance))
    conclude(outcome, context.folder, config.examples, context.console)
    return dict(outcome.result)


def plan_evaluate_sound(config: EvaluateSoundConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    return StagePlan(
        memory_mb=1500,
        disk_mb=20,
        core_seconds=15 + 0.2 * min(config.max_sounds, 100),
        note=f"up to {config.max_sounds} sounds",
    )


STAGE = Stage(
    kind="evaluate_sound",
    config=EvaluateSoundConfig,
    run=run_evaluate_sound,
    artifacts={"results": "results.json", "rows": "rows.jsonl", "report": "report.html"},
    help="score generated sounds: distances, classes, texts, onsets, copies",
    plan=plan_evaluate_sound,
)
