"""Gradio's page: the tabs Sound, Data, Runs and Live.

No component here reads or writes a file: sounds, pictures and reports come from the studio's own addresses.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.review.row_facts import sort_columns
from pipelines.studio.browse.clips import (
    STATES,
    ClipFilter,
    clip_html,
    clips_html,
    drop_reasons,
    give_verdict,
    listed_clips,
    review_link_html,
    review_next,
)
from pipelines.studio.browse.files import ShownFiles
from pipelines.studio.browse.runs import (
    curves_html,
    report_html,
    run_folder,
    run_mark,
    run_names,
    samples_html,
    state_html,
)

_PAGE = Path(__file__).parent / "page"
HEAD = (
    '<script type="module" src="/studio/static/editor.js"></script>'
    '<script src="/studio/static/live.js" defer></script>'
    '<link rel="stylesheet" href="/studio/static/editor.css">'
    '<link rel="stylesheet" href="/studio/static/tabs.css">'
)
STYLE = """
.gradio-container { max-width: 1400px !important; }
footer { display: none !important; }
"""
_REFRESH_S = 4.0
_ORDERS = ("ascending", "descending")


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


def studio_page(folders: StudioFolders, shown_files: ShownFiles) -> Any:
    """The page with its tabs."""
    gradio = import_gradio()
    with gradio.Blocks(title="audiollm studio", analytics_enabled=False) as page, gradio.Tabs():
        with gradio.Tab("Sound", render_children=True):
            _static(gradio, "editor.html")
        with gradio.Tab("Data", render_children=True):
            _data_tab(gradio, folders, shown_files)
        with gradio.Tab("Runs", render_children=True):
            _runs_tab(gradio, folders, shown_files)
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


def _hidden_text(gradio: Any, value: str = "") -> Any:
    """A text that the page keeps between two events. Gradio's `State` would keep a connection of each window open, and
    a browser has six for all its windows."""
    return gradio.Textbox(value, visible="hidden", show_label=False, container=False)


def _runs_tab(gradio: Any, folders: StudioFolders, shown_files: ShownFiles) -> None:
    names = run_names(folders.runs)
    hint = gradio.Markdown(
        f"There is no run in `{folders.runs}`: start the studio with `--runs FOLDER`, or run a recipe.",
        visible=not names,
    )
    first = names[0] if names else None
    start = run_folder(folders.runs, first)

    def parts_of(folder: Path | None) -> tuple[str, str, str, str]:
        """The parts of the page in their order: state, report, curves, sounds."""
        return (
            state_html(folder),
            report_html(shown_files, folder),
            curves_html(folder),
            samples_html(shown_files, folder),
        )

    choice = gradio.Dropdown(names, value=first, label="Run")
    parts = [_shown_html(gradio, content) for content in parts_of(start)]
    timer = gradio.Timer(_REFRESH_S)
    mark, listed_names = _hidden_text(gradio, run_mark(start)), _hidden_text(gradio, "\n".join(sorted(names)))

    def select_run(name: str | None) -> tuple[str, ...]:
        folder = run_folder(folders.runs, name)
        return (*parts_of(folder), run_mark(folder))

    def grown(name: str | None, before: str, listed: str) -> tuple[Any, ...]:
        """What has grown; and the choices with runs that began, or were deleted, since they were listed."""
        now = run_names(folders.runs)
        names_now = "\n".join(sorted(now))
        choices: tuple[Any, ...] = (gradio.skip(), gradio.skip(), gradio.skip())
        if names_now != listed:
            name = name if name in now else next(iter(now), None)
            choices = (gradio.update(choices=now, value=name), gradio.update(visible=not now), names_now)
        folder = run_folder(folders.runs, name)
        mark_now = run_mark(folder)
        if mark_now == before:
            return (*(gradio.skip() for _ in range(5)), *choices)
        return (*parts_of(folder), mark_now, *choices)

    quiet = {"api_visibility": "private", "show_progress": "hidden"}
    choice.change(select_run, choice, [*parts, mark], **quiet)
    timer.tick(grown, [choice, mark, listed_names], [*parts, mark, choice, hint, listed_names], **quiet)


def _data_tab(gradio: Any, folders: StudioFolders, shown_files: ShownFiles) -> None:
    names = {str(folder): folder for folder in folders.data}
    first = next(iter(names), None)
    has_data = bool(names)
    listed, counted = clips_html(shown_files, names.get(first or ""), ClipFilter())
    with gradio.Row():
        folder = gradio.Dropdown(
            [(path.name, key) for key, path in names.items()], value=first, label="Folder", visible=has_data
        )
        state = gradio.Radio(list(STATES), value=STATES[0], label="Clips", visible=has_data)
        reason = gradio.Dropdown([("any", "")], value="", label="Reason of the drop", visible=False)
    with gradio.Row():
        words = gradio.Textbox(
            label="Words", placeholder="name, text, hypothesis, speaker, refusal", visible=has_data
        )
        sort = gradio.Dropdown(
            _sort_choices(names.get(first or ""), STATES[0]), value="", label="Sort by", visible=has_data
        )
        order = gradio.Radio(list(_ORDERS), value=_ORDERS[0], label="Order", visible=has_data)
        number = gradio.Number(1, label="Page", precision=0, minimum=1, visible=has_data)
    review_link = _shown_html(gradio, review_link_html(folders.data, names.get(first or "")))
    with gradio.Column(visible=False) as review:  # above the list, which may be long
        review_clip = _shown_html(gradio)
        current = _hidden_text(gradio)
        with gradio.Column() as verdict_form:
            note = gradio.Textbox(label="Note", placeholder="what is wrong")
            with gradio.Row():
                accept, reject, skip = (gradio.Button(text) for text in ("Accept", "Reject", "Skip"))
    count_text = gradio.Markdown(counted)
    clips = _shown_html(gradio, listed)

    def filtered(
        name: str | None,
        state: str,
        reason: str,
        words: str,
        sort: str | None,
        order: str,
        page: float | None,
    ) -> tuple[str, str]:
        state_or_first: Any = state if state in STATES else STATES[0]
        choice = ClipFilter(
            state_or_first, reason or "", words, int(page or 1), sort or "", order == _ORDERS[1]
        )
        return clips_html(shown_files, names.get(name or ""), choice)

    def reviewed(folder: Path | None, row: dict[str, Any] | None) -> tuple[str, str, Any]:
        """A clip to review; without one there is nothing to judge."""
        text = _clip_to_review(shown_files, row) if row else _nothing_to_review(folder)
        return text, row["id"] if row else "", gradio.update(visible=row is not None)

    def switched(name: str | None, state: str) -> tuple[Any, ...]:
        folder = names.get(name or "")
        rows = listed_clips(folder, "dropped") if folder is not None and state == "dropped" else []
        reasons = [("any", ""), *((f"{kind} ({count})", kind) for kind, count in drop_reasons(rows))]
        row = review_next(folder) if state == "to review" else None
        return (
            gradio.update(choices=reasons, value="", visible=state == "dropped"),
            gradio.update(choices=_sort_choices(folder, state), value=""),
            gradio.update(visible=state == "to review"),
            review_link_html(folders.data, folder),
            *reviewed(folder, row),
        )

    def judged(name: str | None, id: str, text: str, verdict: str) -> tuple[Any, ...]:
        folder = names.get(name or "")
        if folder is not None and id and verdict:
            give_verdict(folder, id, verdict, text)
        return (*reviewed(folder, review_next(folder, id)), "")

    controls = [folder, state, reason, words, sort, order, number]
    quiet = {"api_visibility": "private", "show_progress": "hidden"}
    for control in (folder, state):
        control.change(
            switched,
            [folder, state],
            [reason, sort, review, review_link, review_clip, current, verdict_form],
            **quiet,
        ).then(filtered, controls, [clips, count_text], **quiet)
    for control in (reason, words, sort, order, number):
        control.change(filtered, controls, [clips, count_text], **quiet)
    for button, verdict in ((accept, "accepted"), (reject, "rejected"), (skip, "")):

        def judge(name: str | None, id: str, text: str, verdict: str = verdict) -> tuple[Any, ...]:
            return judged(name, id, text, verdict)

        button.click(
            judge, [folder, current, note], [review_clip, current, verdict_form, note], **quiet
        ).then(filtered, controls, [clips, count_text], **quiet)


def _sort_choices(folder: Path | None, state: str) -> list[tuple[str, str]]:
    rows = listed_clips(folder, state) if folder is not None and state in STATES else []
    return [("the file's order", ""), *((column, column) for column in sort_columns(rows))]


def _nothing_to_review(folder: Path | None) -> str:
    is_listed = folder is not None and bool(listed_clips(folder, "to review"))
    sentence = (
        "Every listed clip has a verdict. Run audiocot again for the agreement."
        if is_listed
        else "This folder lists no clips to review: audiocot draws some, annotate does not."
    )
    return f'<p class="st-quiet">{sentence}</p>'


def _clip_to_review(shown_files: ShownFiles, row: dict[str, Any]) -> str:
    return f'<div class="st-review">{clip_html(shown_files, row)}</div>'
