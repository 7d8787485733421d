"""The documentation as a site: all commands, stages and documents are on it, and every link of it leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from audiollm.recipe.stages import stage_entry_points
from tests.documented import ROOT

INSTALLED = importlib.util.find_spec("mkdocs") and importlib.util.find_spec("mkdocstrings")


@pytest.fixture(scope="module")
def builder() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        yield importlib.import_module("build_site")
    finally:
        sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def pages(builder: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Titles by path; the sources are written below `builder.SOURCE`."""
    builder.SOURCE = tmp_path_factory.mktemp("site")
    titles: dict[str, str] = builder.write_source()
    return titles


def test_every_document_command_and_stage_has_a_page(pages: dict[str, str], builder: Any) -> None:
    stages = {f"reference/stages/{kind}.md" for kind in stage_entry_points()}
    assert stages < pages.keys() and "README.md" in pages and "docs/site/first_steps.md" in pages
    commands = {"run", "annotate", "generate", "serve", "evaluate_tts", "sound_edit"}
    assert {f"reference/commands/{name}.md" for name in commands} < pages.keys()
    listed = re.findall(r"[\w./-]+\.md", str(builder.navigation(pages)))
    assert sorted(listed) == sorted(pages), "each page is in the navigation, once"
    assert all((builder.SOURCE / name).is_file() for name in pages)
    lines = (builder.SOURCE / "llms.txt").read_text().splitlines()
    assert lines[0] == "# audiollm" and sum(line.startswith("- [") for line in lines) == len(pages)


def test_every_setting_of_a_stage_says_what_it_is() -> None:
    unexplained = [
        f"{kind}.{name}"
        for kind, entry in stage_entry_points().items()
        for name, field in entry.load().config.model_fields.items()
        if not field.description
    ]
    assert not unexplained


def test_a_page_of_a_command_has_its_options_and_examples(pages: dict[str, str], builder: Any) -> None:
    text = (builder.SOURCE / "reference/commands/serve.md").read_text()
    assert text.startswith("# audiollm serve\n") and "| `--key-file` |" in text
    assert "```console\n$ audiollm serve runs/quickstart/train\n```" in text and "\b" not in text


def test_bars_within_code_of_tables_are_bars(pages: dict[str, str], builder: Any) -> None:
    text = (builder.SOURCE / "reference/stages/train.md").read_text()
    assert "<code>int &#124; null</code>" in text and "\\|" not in text


def test_links_to_files_bring_them_and_links_to_nothing_end_the_build(builder: Any) -> None:
    files, assets = {"docs/a.md", "audiollm/codec.py", "tests/rl/x.py"}, set[str]()
    documents = {"docs/a.md": "", "audiollm/README.md": ""}

    def linked(text: str) -> str:
        return str(builder.linked("docs/a.md", text, documents, files, assets))

    assert linked("[c](../audiollm/codec.py)") == "[c](../audiollm/codec.py)" and assets == {
        "audiollm/codec.py"
    }
    assert linked("[p](../audiollm)") == "[p](../audiollm/README.md)"
    assert linked("the [tests](../tests/rl)") == "the tests"
    assert linked("[w](https://a.org) `[x](gone.md)`") == "[w](https://a.org) `[x](gone.md)`"
    with pytest.raises(SystemExit, match=r"docs/a.md: the link to gone.md leads nowhere"):
        linked("see [x](gone.md)")


def test_notebooks_are_pages_with_the_file_to_download(pages: dict[str, str], builder: Any) -> None:
    assert {name for name in pages if name.startswith("docs/notebooks/")} == {
        f"docs/notebooks/{name}.md" for name in ("annotation", "reasoner", "voice")
    }
    text = (builder.SOURCE / "docs/notebooks/voice.md").read_text()
    assert (
        text.startswith("# Train a voice\n") and "```bash\naudiollm plan recipes/quickstart.yaml\n```" in text
    )
    assert "[download it](voice.ipynb)" in text and (builder.SOURCE / "docs/notebooks/voice.ipynb").is_file()
    assert "(../notebooks/voice.md)" in (builder.SOURCE / "docs/site/first_steps.md").read_text()


def test_messages_that_are_explained_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/site/troubleshooting.md").read_text(), re.MULTILINE)
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for package in ("audiollm", "pipelines", "tokenizer")
        for path in (ROOT / package).rglob("*.py")
    )
    assert len(rows) > 8 and not [message for message in rows if message not in code]


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="MkDocs is not installed: make docs")
def test_the_site_is_built_strictly_and_asks_no_other_host() -> None:
    built = subprocess.run([sys.executable, "docs/build_site.py"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//(?!127)[^\"' >]+")
    site = ROOT / "build" / "site"
    pages = list(site.rglob("*.html"))
    assert len(pages) > 150
    found = {match[0] for page in pages for match in fetched.finditer(page.read_text(encoding="utf-8"))}
    assert not {text for text in found if 'rel="canonical"' not in text}
