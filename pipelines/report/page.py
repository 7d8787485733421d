"""`report.html`: one page that needs nothing beside itself, and `summary.json`."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from audiollm.evaluate.report.clips import Gallery
from audiollm.evaluate.report.formats import duration, megabytes, percent_or_dash, without_home
from audiollm.evaluate.report.page import render_template
from audiollm.evaluate.report.spectrograms import DYNAMIC_RANGE_DB
from audiollm.files.atomic import write_json, write_text
from audiollm.recipe.runner import Context
from pipelines.report.answers import answers_section
from pipelines.report.codec import TOKENIZER_STAGES, tokenizer_section
from pipelines.report.headline import headline, warnings_of
from pipelines.report.material import Material, Row
from pipelines.report.policies.history import KINDS as FRESH
from pipelines.report.policies.interpretations import KIND as INTERPRETED
from pipelines.report.policies.interpretations import interpretations_section
from pipelines.report.policies.section import policies_section
from pipelines.report.policies.written_thoughts import KIND as WRITTEN
from pipelines.report.policies.written_thoughts import thoughts_section
from pipelines.report.preferences.history import POLICIES, REWARD_MODELS
from pipelines.report.preferences.section import preferences_section, rewards_section
from pipelines.report.recordings import recordings_section
from pipelines.report.samples import samples_section
from pipelines.report.scores import scores_section
from pipelines.report.settings import ReportConfig
from pipelines.report.sounds import SOUND_STAGES, sounds_section
from pipelines.report.summary import seconds_and_memory, summarize_run
from pipelines.report.training import training_section

FOLDER = Path(__file__).parent
TITLES = {
    "recordings": "Recordings",
    "tokenizer": "Tokenizer",
    "training": "Training",
    "preferences": "Preferences",
    "rewards": "Reward models",
    "policies": "Policies",
    "interpretations": "Interpretation",
    "thoughts": "Chains of thought",
    "answers": "Answers",
    "samples": "Samples",
    "sounds": "Sounds",
    "scores": "Scores",
}
"""Titles of the sections, in their order; the section on the run itself comes last."""
KINDS = {
    "recordings": ("annotate", "compose"),
    "tokenizer": TOKENIZER_STAGES,
    "training": ("train",),
    "preferences": (POLICIES,),
    "rewards": (REWARD_MODELS,),
    "policies": FRESH,
    "interpretations": (INTERPRETED,),
    "thoughts": (WRITTEN,),
    "answers": ("evaluate_listening",),
    "samples": ("generate", "evaluate"),
    "sounds": SOUND_STAGES,
    "scores": ("evaluate",),
}
"""Kinds of stages by section: a section is shown if the recipe has a stage of one of its kinds."""
PACKAGES = ("audiollm", "torch", "torchaudio", "transformers", "numpy", "librosa", "pocketsphinx")


def write_run_report(config: ReportConfig, context: Context) -> dict[str, Any]:
    """Write both files into the stage's folder; returns the numbers of clips and bytes."""
    started = time.monotonic()
    material = Material(context.recipe, context.results)
    gallery = Gallery(config.players)
    builders: dict[str, Callable[[], Row]] = {
        "recordings": lambda: recordings_section(material, gallery),
        "tokenizer": lambda: tokenizer_section(material, gallery),
        "training": lambda: training_section(material, gallery),
        "preferences": lambda: preferences_section(material, gallery),
        "rewards": lambda: rewards_section(material, gallery),
        "policies": lambda: policies_section(material, gallery),
        "interpretations": lambda: interpretations_section(material, gallery),
        "thoughts": lambda: thoughts_section(material, gallery),
        "answers": lambda: answers_section(material, gallery),
        "samples": lambda: samples_section(material, gallery, config.samples),
        "sounds": lambda: sounds_section(material, gallery),
        "scores": lambda: scores_section(material),
    }
    with context.progress("drawing", len(builders)) as bar:
        sections = {}
        for name, builder in builders.items():
            sections[name] = _build_section(name, builder, context)
            bar.advance(bar.task_ids[0])
    visible_sections = {
        name: section for name, section in sections.items() if _has_place(name, section, material)
    }
    figures = seconds_and_memory(material, context.folder.name, time.monotonic() - started)
    summary = summarize_run(material, *figures)
    html = render_page(material, summary, visible_sections, gallery)
    for path, problem in material.damage.items():
        context.say(f"{path}: {problem}")
    write_text(context.folder / "report.html", html)
    write_json(context.folder / "summary.json", summary)
    return {"clips": gallery.num_clips, "bytes": len(html.encode())}


def _build_section(name: str, builder: Callable[[], Row], context: Context) -> Row:
    """A section, or the reason why it failed: a page with a gap is worth more than none."""
    try:
        return builder()
    except Exception as error:
        problem = without_home(f"{type(error).__name__}: {error}")
        context.say(f"the report's section {name} could not be made: {problem}")
        return {"absent": f"This section could not be made: {problem}"}


def _has_place(name: str, section: Row, material: Material) -> bool:
    """Whether a section is shown: a stage of its kind, or recordings that other stages set aside."""
    return material.has(*KINDS[name]) or bool((section.get("set_aside") or {}).get("rows"))


def render_page(material: Material, summary: Row, sections: Mapping[str, Row], gallery: Gallery) -> str:
    """The page as text. Whatever comes from a run is escaped.

    Args:
        sections: by name, of `TITLES`; the others are left out of the page.
    """
    return render_template(
        "run.html",
        folders=[FOLDER],
        filters={"percent": percent_or_dash, "duration": duration, "megabytes": megabytes},
        page_kind="audiollm report",
        name=material.recipe.name,
        about=_describe_run(material),
        failed=summary["failed"],
        tiles=headline(material, summary),
        warnings=warnings_of(material),
        titles={name: title for name, title in TITLES.items() if name in sections} | {"run": "Run"},
        num_silent=gallery.num_silent,
        dynamic_range=f"{DYNAMIC_RANGE_DB:g}",
        stages=_stages(material, summary),
        total_s=summary["seconds"]["total"],
        configuration=_configuration(material),
        versions=_versions(),
        **{name: sections.get(name) for name in TITLES},
    )


def _describe_run(material: Material) -> list[str]:
    recipe = material.recipe
    return [
        f"recipe {recipe.path.name}",
        f"size {recipe.size}",
        f"seed {recipe.seed}",
        f"{len(recipe.stages)} stages",
    ]


def _stages(material: Material, summary: Row) -> list[Row]:
    """One row per stage of the recipe: its state, and its seconds and memory beside the largest."""
    seconds, memory = dict(summary["seconds"]), summary["memory_mb"]
    seconds.pop("total")
    longest, largest = max(seconds.values()) or 1.0, max(memory.values()) or 1.0
    rows = []
    for stage in material.recipe.stages:
        result = material.results.get(stage.name)
        state = result.state if result is not None else "" if stage.name in seconds else "not run"
        time_s, memory_mb = seconds.get(stage.name), memory.get(stage.name)
        rows.append(
            {
                "name": stage.name,
                "help": stage.stage.help,
                "state": state,
                "seconds": time_s,
                "seconds_percent": 100 * (time_s or 0.0) / longest,
                "memory_mb": memory_mb,
                "memory_percent": 100 * (memory_mb or 0.0) / largest,
            }
        )
    return rows


def _configuration(material: Material) -> list[Row]:
    return [
        {
            "name": stage.name,
            "kind": stage.stage.kind,
            "settings": [
                (key, _format_setting(material, value)) for key, value in flat_settings(stage.settings())
            ],
        }
        for stage in material.recipe.stages
    ]


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as `outer.inner`, which is how they are written on the command line."""
    pairs: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            pairs += flat_settings(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _format_setting(material: Material, value: Any) -> str:
    if isinstance(value, str):
        return material.shorten_paths(value)
    return without_home(json.dumps(value, ensure_ascii=False))


def _versions() -> list[tuple[str, str]]:
    """Versions and hardware of the run, without host names or paths: the page may be shown to others."""
    from importlib.metadata import PackageNotFoundError, version

    rows = [("Python", platform.python_version()), ("platform", f"{platform.system()} {platform.machine()}")]
    rows.append(("CPU cores", str(os.cpu_count() or "unknown")))
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        rows.append(("GPU", torch.cuda.get_device_name(0)))
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return rows
