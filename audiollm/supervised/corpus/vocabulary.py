"""The vocabulary and chat template of a training: given, taken from a model, or learned from the sources' texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer

from audiollm.data.chat.template import Template
from audiollm.data.records.source import Source
from audiollm.data.text.tokenizer import FILE_NAME, header_style_of, load_text_tokenizer, train_text_tokenizer
from audiollm.errors import ConfigError, StageError
from audiollm.families.dual_ffn.start import start_vocabulary
from audiollm.files.atomic import atomic_path, file_digest, read_record, write_json
from audiollm.files.set_aside import SetAside
from audiollm.recipe.runner import Context
from audiollm.supervised.corpus.sources import codec_facts
from audiollm.supervised.corpus.survey import texts_of
from audiollm.supervised.settings import SourceSettings

DIGEST_FILE = "digest.json"
"""Name of the file beside a learned vocabulary that holds its SHA-256."""


def make_template(
    settings: SourceSettings,
    sources: Sequence[Source],
    vocab_size: int,
    set_aside: SetAside,
    context: Context,
) -> Template:
    """The chat template: `text_tokenizer`, else the vocabulary of `start`, else one learned from the texts.

    Args:
        vocab_size: the largest size of a learned vocabulary, which is kept in the stage's folder.

    Raises:
        StageError: no text to learn from, sources of different codecs, or a learned vocabulary that was changed.
    """
    codec = codec_facts(sources, settings.start)
    folder = context.folder / "vocabulary"
    if settings.text_tokenizer:
        tokenizer = load_text_tokenizer(settings.text_tokenizer)
    elif settings.start:
        tokenizer = start_vocabulary(settings.start)
    else:
        if context.ranks.first and not (folder / FILE_NAME).exists():
            with context.progress("reading texts", sum(map(len, sources))) as bar:
                texts = texts_of(sources, set_aside, lambda: bar.advance(bar.task_ids[0]))
                first = next(texts, None)
                if first is None:
                    raise StageError("no sample of the train split", "see `compose`", 2)
                learned = train_text_tokenizer(chain([first], texts), vocab_size)
            _save_vocabulary(learned, folder)
        context.ranks.barrier()
        tokenizer = _learned_vocabulary(folder)
    return Template(tokenizer, codec["num_codebooks"], codec["codebook_size"], header_style_of(tokenizer))


def _save_vocabulary(learned: Tokenizer, folder: Path) -> None:
    with atomic_path(folder / FILE_NAME) as temporary:
        learned.save(str(temporary))
        digest = file_digest(temporary)
    write_json(folder / DIGEST_FILE, {"sha256": digest})


def _learned_vocabulary(folder: Path) -> Tokenizer:
    """The learned vocabulary, checked by its digest: in a changed one the trained numbers would stand for other words.

    Raises:
        StageError: the file is not the one that was written.
    """
    path, remedy = folder / FILE_NAME, "restore it, or remove it: it is learned again from the same texts"
    if (folder / DIGEST_FILE).exists() and file_digest(path) != read_record(folder / DIGEST_FILE).get(
        "sha256"
    ):
        raise StageError(f"{path} is damaged: its SHA-256 is not the one in {DIGEST_FILE} beside it", remedy)
    try:
        return load_text_tokenizer(folder)
    except ConfigError as error:
        raise StageError(f"{path} is damaged: {error.message}", remedy) from None
