"""Gradio's page: the tabs Sound, Data, Runs and Live.

No component here reads or writes a file: sounds, pictures and reports come from the studio's own addresses.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.studio.browsing import (
    STATES,
    ClipFilter,
    ShownFiles,
    clip_html,
    clips_html,
    curves_html,
    drop_reasons,
    give_verdict,
    listed_clips,
    report_html,
    review_next,
    run_folder,
    run_mark,
    run_names,
    samples_html,
)

_PAGE = Path(__file__).parent / "page"
HEAD = (
    '<script src="/studio/static/editor.js" defer></script>'
    '<script src="/studio/static/live.js" defer></script>'
    '<link rel="stylesheet" href="/studio/static/editor.css">'
    '<link rel="stylesheet" href="/studio/static/tabs.css">'
)
STYLE = """
.gradio-container { max-width: 1400px !important; }
footer { display: none !important; }
"""
_REFRESH_S = 4.0


@dataclass(frozen=True)
class StudioFolders:
    """The folders that the tabs beside Sound show."""

    runs: Path
    data: tuple[Path, ...] = ()
    has_live: bool = False


def import_gradio() -> Any:
    """Gradio, which reads when it is imported that nothing is to be reported to its makers."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_OFFLINE"] = "1"
    return importlib.import_module("gradio")


def studio_theme() -> Any:
    """Gradio's default look in fonts of this machine: none is fetched."""
    gradio = import_gradio()
    fonts = ["ui-sans-serif", "system-ui", "sans-serif"]
    return gradio.themes.Default(font=fonts, font_mono=["ui-monospace", "monospace"], primary_hue="cyan")


def studio_page(folders: StudioFolders, shown: ShownFiles) -> Any:
    """The page with its tabs."""
    gradio = import_gradio()
    with gradio.Blocks(title="audiollm studio", analytics_enabled=False) as page, gradio.Tabs():
        with gradio.Tab("Sound", render_children=True):
            _static(gradio, "editor.html")
        with gradio.Tab("Data", render_children=True):
            _data_tab(gradio, folders, shown)
        with gradio.Tab("Runs", render_children=True):
            _runs_tab(gradio, folders, shown)
        with gradio.Tab("Live", render_children=True):
            if folders.has_live:
                _static(gradio, "live.html")
            else:
                gradio.Markdown(
                    "Start the studio with `--live MODEL` to interpret a talk from a file or the microphone. "
                    "`audiollm run recipes/interpret/tiny.yaml` makes such a model."
                )
    return page


# Private


def _static(gradio: Any, name: str) -> None:
    gradio.HTML((_PAGE / name).read_text(encoding="utf-8"), apply_default_css=False, padding=False)


def _shown_html(gradio: Any, value: str = "") -> Any:
    return gradio.HTML(value, apply_default_css=False, padding=False)


def _runs_tab(gradio: Any, folders: StudioFolders, shown: ShownFiles) -> None:
    names = run_names(folders.runs)
    hint = gradio.Markdown(
        f"There is no run in `{folders.runs}`: start the studio with `--runs FOLDER`, or run a recipe.",
        visible=not names,
    )
    first = names[0] if names else None
    start = run_folder(folders.runs, first)
    choice = gradio.Dropdown(names, value=first, label="Run")
    curves = _shown_html(gradio, curves_html(start))
    samples = _shown_html(gradio, samples_html(shown, start))
    report = _shown_html(gradio, report_html(shown, start))
    timer = gradio.Timer(_REFRESH_S)

    mark, known = gradio.State(run_mark(start)), gradio.State(sorted(names))

    def begun(name: str | None, before: list[str]) -> Any:
        """The choices with runs that began, or were deleted, since they were listed."""
        now = run_names(folders.runs)
        if sorted(now) == before:
            return gradio.skip(), gradio.skip(), gradio.skip()
        value = name if name in now else next(iter(now), None)
        return gradio.update(choices=now, value=value), gradio.update(visible=not now), sorted(now)

    def chosen(name: str | None) -> tuple[str, str, str, str]:
        folder = run_folder(folders.runs, name)
        return (
            curves_html(folder),
            samples_html(shown, folder),
            report_html(shown, folder),
            run_mark(folder),
        )

    def grown(name: str | None, before: str) -> Any:
        folder = run_folder(folders.runs, name)
        now = run_mark(folder)
        if now == before:
            return tuple(gradio.skip() for _ in range(4))
        return curves_html(folder), samples_html(shown, folder), report_html(shown, folder), now

    quiet = {"api_visibility": "private", "show_progress": "hidden"}
    choice.change(chosen, choice, [curves, samples, report, mark], **quiet)
    timer.tick(grown, [choice, mark], [curves, samples, report, mark], **quiet)
    timer.tick(begun, [choice, known], [choice, hint, known], **quiet)


def _data_tab(gradio: Any, folders: StudioFolders, shown: ShownFiles) -> None:
    names = {str(folder): folder for folder in folders.data}
    first = next(iter(names), None)
    listed, counted = clips_html(shown, names.get(first or ""), ClipFilter())
    with gradio.Row():
        folder = gradio.Dropdown(
            [(path.name, key) for key, path in names.items()],
            value=first,
            label="Folder",
            visible=bool(names),
        )
        state = gradio.Radio(list(STATES), value=STATES[0], label="Clips", visible=bool(names))
        reason = gradio.Dropdown([("any", "")], value="", label="Reason of the drop", visible=False)
        words = gradio.Textbox(label="Words", placeholder="name or text", visible=bool(names))
        number = gradio.Number(1, label="Page", precision=0, minimum=1, visible=bool(names))
    with gradio.Column(visible=False) as review:  # above the list, which may be long
        asked = _shown_html(gradio)
        current = gradio.State("")
        with gradio.Column() as verdict_form:
            note = gradio.Textbox(label="Note", placeholder="what is wrong")
            with gradio.Row():
                accept, reject, skip = (gradio.Button(text) for text in ("Accept", "Reject", "Skip"))
    told = gradio.Markdown(counted)
    clips = _shown_html(gradio, listed)

    def filtered(name: str | None, wanted: str, why: str, text: str, page: float | None) -> tuple[str, str]:
        known = wanted if wanted in STATES else STATES[0]
        return clips_html(shown, names.get(name or ""), ClipFilter(known, why or "", text, int(page or 1)))

    def reviewed(row: dict[str, Any] | None) -> tuple[str, str, Any]:
        """A clip to review; without one there is nothing to judge."""
        return _asked(shown, row), row["id"] if row else "", gradio.update(visible=row is not None)

    def switched(name: str | None, wanted: str) -> tuple[Any, ...]:
        chosen = names.get(name or "")
        rows = listed_clips(chosen, "dropped") if chosen is not None and wanted == "dropped" else []
        reasons = [("any", ""), *((f"{kind} ({count})", kind) for kind, count in drop_reasons(rows))]
        row = review_next(chosen) if wanted == "to review" else None
        return (
            gradio.update(choices=reasons, value="", visible=wanted == "dropped"),
            gradio.update(visible=wanted == "to review"),
            *reviewed(row),
        )

    def judged(name: str | None, id: str, text: str, verdict: str) -> tuple[Any, ...]:
        chosen = names.get(name or "")
        if chosen is not None and id and verdict:
            give_verdict(chosen, id, verdict, text)
        return (*reviewed(review_next(chosen, id)), "")

    given = [folder, state, reason, words, number]
    quiet = {"api_visibility": "private", "show_progress": "hidden"}
    for each in (folder, state):
        each.change(switched, [folder, state], [reason, review, asked, current, verdict_form], **quiet).then(
            filtered, given, [clips, told], **quiet
        )
    for each in (reason, words, number):
        each.change(filtered, given, [clips, told], **quiet)
    for button, verdict in ((accept, "accepted"), (reject, "rejected"), (skip, "")):

        def judge(name: str | None, id: str, text: str, verdict: str = verdict) -> tuple[Any, ...]:
            return judged(name, id, text, verdict)

        button.click(judge, [folder, current, note], [asked, current, verdict_form, note], **quiet).then(
            filtered, given, [clips, told], **quiet
        )


def _asked(shown: ShownFiles, row: dict[str, Any] | None) -> str:
    if row is None:
        return (
            '<p class="st-quiet">Every listed clip has a verdict. Run audiocot again for the agreement.</p>'
        )
    return f'<div class="st-review">{clip_html(shown, row)}</div>'
