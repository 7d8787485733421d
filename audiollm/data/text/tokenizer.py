"""The text side of the vocabulary: special tokens by header style, a vocabulary trained or one that exists.

Both are `tokenizers.Tokenizer`: byte-level BPE that we train, or any Hugging Face `tokenizer.json` (Llama 3,
Qwen) that has the special tokens. Their ids are looked up, never assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from audiollm.errors import ConfigError, suggestion

BEGIN_OF_TEXT = "<|begin_of_text|>"
START_HEADER = "<|start_header_id|>"
END_HEADER = "<|end_header_id|>"
END_OF_TURN = "<|eot_id|>"
PAD = "<|end_of_text|>"
AUDIO_BOS = "<|audio_bos|>"
AUDIO_EOS = "<|audio_eos|>"
AUDIO_OUT_BOS = "<|audio_out_bos|>"
AUDIO_IN = "<|AUDIO|>"
AUDIO_OUT = "<|AUDIO_OUT|>"
AUDIO_DELAY = "<|reserved_special_token_6|>"
"""Stands for the last, delayed rows of codes where transformers lists a model's input: Higgs Audio V2's name of it."""
AUDIO_TOKENS = (AUDIO_BOS, AUDIO_EOS, AUDIO_OUT_BOS, AUDIO_IN, AUDIO_OUT)
SCENE_START = "<|scene_desc_start|>"
SCENE_END = "<|scene_desc_end|>"
INSTRUCTION_START = "<|generation_instruction_start|>"
INSTRUCTION_END = "<|generation_instruction_end|>"
MARKS_IN_TEXT = (SCENE_START, SCENE_END, INSTRUCTION_START, INSTRUCTION_END)
"""Marks of Higgs Audio V2 that a message's own text may hold; a vocabulary without them spells them out."""
FILE_NAME = "tokenizer.json"
SPEAKERS_FILE = "speakers.json"
"""Beside it: the speaker names of the training data."""
TRAINED_FILE = "trained.json"
"""Beside it: `longest_positions`, those of the longest sample that was trained on; shares of what was hidden; and
`codec_digest`, of the codec whose codes it was trained on (`audiollm.codec.codec_digest`)."""


@dataclass(frozen=True)
class HeaderStyle:
    """Tokens that delimit the turns of a chat."""

    begin: str
    """Before the first turn; may be empty."""
    before_role: str
    after_role: str
    end_of_turn: str
    after_turn: str
    """Follows every turn and is never a target; may be empty."""
    pad: str
    control_tokens: tuple[str, ...]
    """Each must be one token of the vocabulary, and no message's text may hold one."""
    end_of_message: str = ""
    """Token used instead of `end_of_turn` where the same role continues, if the vocabulary has it."""

    def header(self, role: str) -> str:
        return f"{self.before_role}{role}{self.after_role}"

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Return the special tokens that a vocabulary must have."""
        return (*self.control_tokens, *AUDIO_TOKENS)


HEADER_STYLES = {
    "llama3": HeaderStyle(
        begin=BEGIN_OF_TEXT,
        before_role=START_HEADER,
        after_role=f"{END_HEADER}\n\n",
        end_of_turn=END_OF_TURN,
        after_turn="",
        pad=PAD,
        control_tokens=(BEGIN_OF_TEXT, PAD, START_HEADER, END_HEADER, END_OF_TURN),
        end_of_message="<|eom_id|>",
    ),
    "chatml": HeaderStyle(
        begin="",
        before_role="<|im_start|>",
        after_role="\n",
        end_of_turn="<|im_end|>",
        after_turn="\n",
        pad="<|endoftext|>",
        control_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ),
}
"""`llama3`: Higgs Audio V2 and Llama 3. `chatml`: Qwen and others."""


def header_style(name: str) -> HeaderStyle:
    """The style of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in HEADER_STYLES:
        raise ConfigError(f"no such header style: {name!r}", remedy=suggestion(name, HEADER_STYLES))
    return HEADER_STYLES[name]


def header_style_of(tokenizer: Tokenizer, where: str = "") -> str:
    """The name of the style whose turn marks the vocabulary has (the first that fits).

    Raises:
        ConfigError: it has those of none.
    """
    for name, style in HEADER_STYLES.items():
        if all(tokenizer.token_to_id(token) is not None for token in style.control_tokens):
            return name
    marks = "; ".join(f"{name}: {' '.join(s.control_tokens)}" for name, s in HEADER_STYLES.items())
    raise ConfigError("the vocabulary has the turn marks of no known header style", where, f"known: {marks}")


def missing_tokens(tokenizer: Tokenizer, style: str) -> list[str]:
    """The special tokens of the style that the vocabulary lacks."""
    needed = header_style(style).special_tokens
    return [token for token in needed if tokenizer.token_to_id(token) is None]


def add_special_tokens(tokenizer: Tokenizer, style: str) -> int:
    """Append what `missing_tokens` names, `AUDIO_DELAY` and the marks that a text may hold; ids of all others stay.

    Returns:
        How many were added: the rows by which a model's text embedding and head must grow.
    """
    new_tokens = [*missing_tokens(tokenizer, style), AUDIO_DELAY, *MARKS_IN_TEXT]
    return int(tokenizer.add_special_tokens([AddedToken(token, special=True) for token in new_tokens]))


def train_text_tokenizer(texts: Iterable[str], vocab_size: int, style: str = "llama3") -> Tokenizer:
    """Learn a byte-level BPE from the training texts; every text, of any script, can be written with it.

    It has the style's special tokens, and those of `MARKS_IN_TEXT` that the texts use.

    Args:
        texts: read once, and not kept.
        vocab_size: words at most, without the marks.
    """
    used: set[str] = set()

    def noted() -> Iterator[str]:
        for text in texts:
            used.update(mark for mark in MARKS_IN_TEXT if mark in text)
            yield text

    tokenizer = Tokenizer(models.BPE())
    # line ends are words of their own: a header's is then the same with and without the text after it
    line_ends = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [line_ends, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[
            AddedToken(token, special=True) for token in (*header_style(style).special_tokens, AUDIO_DELAY)
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(noted(), trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS_IN_TEXT if mark in used])
    return tokenizer


def load_text_tokenizer(folder: Path, style: str | None = None) -> Tokenizer:
    """The `tokenizer.json` in a model's folder, ours or a Hugging Face one.

    Args:
        style: the header style that its special tokens must be those of; None: the one that it has.

    Raises:
        ConfigError: none there, one that cannot be read, or one without the special tokens.
    """
    tokenizer, path = read_text_tokenizer(folder), folder / FILE_NAME
    missing = missing_tokens(tokenizer, style or header_style_of(tokenizer, str(path)))
    if missing:
        raise ConfigError(
            f"the vocabulary lacks {' '.join(missing)}",
            str(path),
            "audiollm.data.text.tokenizer.add_special_tokens appends them (the embedding grows with it)",
        )
    return tokenizer


def read_text_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of any language model; unlike `load_text_tokenizer`, special tokens may be missing.

    Raises:
        ConfigError: none there, or one that cannot be read.
    """
    path = folder / FILE_NAME
    if not path.exists():
        raise ConfigError(
            f"no {FILE_NAME} in this model's folder", str(folder), "give a trained model's folder"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises plain Exception
        raise ConfigError(f"not a vocabulary: {error}", str(path), "give another model's folder") from None
    # a file may bring settings of the batches that it was trained with; a stream is neither cut nor filled up
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
