"""How models word an answer: what is around it, what declares it, what denies it, and how they refuse to answer."""

from __future__ import annotations

import html
import re
import unicodedata

from audiollm.data.text.option_forms import SIGNS
from audiollm.evaluate.listening.answer_parts import last_boxed

_JSON_KEYS = ("answer", "final_answer", "final answer", "choice", "option", "response", "prediction")
_JSON_FIELD = re.compile(
    rf"""[{{,]\s*["']?({"|".join(_JSON_KEYS)})["']?\s*:\s*\[?\s*("(?:[^"\\]|\\.)*"|'[^']*'|[^,}}\]\s"']+)""",
    re.IGNORECASE,
)
"""A field of a JSON object, with its value as it is written there."""
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_MARKUP = re.compile(
    r"\*\*|__|~~|`+|\$+|\\[()\[\]]|(?m:^\s*(?:[*+•-]|\#+)\s+)|(?<![\w*])\*(?=\S)([^*\n]*\S)\*(?![\w*])"
)
"""Markdown and LaTeX around words, which say nothing of the answer."""

LEAD = re.compile(
    r"""
    (?:\b(?:answer|ans|option|choice|solution|antwort|réponse|respuesta|resposta|risposta)\b
       |答案|选项|答え|정답|답|ответ|(?<!不)(?:应该|应)?选择?)
    (?:\s*(?:is|'s|was|would\ be|should\ be|must\ be|will\ be|could\ be|might\ be|may\ be|seems\ to\ be|ist|est|es|é|è
            |(?:应该|应)?[是为]|选项|は|[은는]|[:=\-–—→]))*
    (?:\s*\b(?:most\ likely|likely|probably|clearly|therefore|option|choice|letter|answer|the)\b:?)*
    [\s"'“‘(\[{]*
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Words that say that an answer follows: `the correct answer is`, `Answer:`, `option`."""
LETTER_LEAD = re.compile(
    r"""
    (?:\b(?:it(?:'s|\ is|\ must\ be|\ would\ be)|that(?:'s|\ is)
         |i(?:'d|\ would)?\ (?:choose|pick|select|say|go\ with|guess))
       |\bguess(?:\ is|:)|\b(?:probably|perhaps|maybe|likely|sure,?\ but)\b
       |\b(?:so|therefore|thus|hence|correct)\b[,:]?|→|=>)
    \s+["'(\[]*
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Words that say that an answer follows where a letter does: `it's B`."""
THINK_LEAD = re.compile(
    r"\b(?:i|we)(?:'d|'ll| would)? (?:think|believe|guess|suspect|say|conclude)(?: that)?"
    r"(?: (?:it|this|that|the (?:sound|answer|audio|recording))(?:'s| is| was| must be| sounds like| could be)?)? +",
    re.IGNORECASE,
)
"""Words that say what the writer takes for the answer, behind others that he weighed: `but I think it's`."""
LETTER_END = r"""(?=[)\]}.,;:!?"'”’。，で]|\s|$)"""
FURTHER_LETTER = re.compile(
    r"""
    [)\]]*\s*(?:,|/|&|\bor\b|\band\b|或|和)\s*(?:option\s+)?[(\[]?
    ([B-Z](?=[)\].,;:!?\s]|$)|A(?=[)\].,;:!?]|\s*$|\s+(?:or|and)\b)|[a-z](?=[)\]]))
    """,
    re.VERBOSE,
)
"""The next of several letters: ` or (C)`."""
MARKED_LETTER = re.compile(
    r"(?<!\w)[(\[]([A-Za-z])[)\]]|(?<![\w(\[])([A-Z])\)|(?m:^\s*([A-Z])[.:](?=\s))|\boption ([A-Z])\b"
    r"|(?<=[一-鿿])([A-Z])(?![A-Za-z])|(?<![A-Za-z])([A-Z])(?=[一-鿿])"
)
"""A letter that stands for an option: `(B)`, `B)`, `B.` at the beginning of a line, one among Chinese characters."""
LETTER_IS_ANSWER = re.compile(
    r"(?<!\w)[(\[]?([A-Z])[)\]]?\s+(?:is|seems|looks|would be)\s+(?:the\s+)?(?:most\s+|best\s+|only\s+)?"
    r"(?:correct|right|answer|likely|one|best)\b"
)
"""`B is the right one`."""
LETTER_FIRST = re.compile(
    r"""
    [\s"'\[]*
    (?:\(([A-Za-z])\)[.:]?
      |([A-Za-z])[).:\]](?=\s|$)
      |([B-HJ-Z])(?=\s*[,;\n–—]|\s+(?:-|because|since|as)\b))
    """,
    re.VERBOSE,
)
"""A marked letter at the beginning of a reply: `(b) because`, `B.`, `B, since`."""

_NOT_DENIED = re.compile(
    r"\b(?:no doubt|without (?:a |any )?doubt|not only|not just|nothing but|(?:none|no) other than|not sure but)\b"
)
_ANYTHING_BUT = re.compile(r"\b(?:any|every)thing (?:but|except)\b|\ball (?:but|except)\b")
_TAG_QUESTION = re.compile(r"[^.!?]*,\s*(?:\w+n't \w+|right|correct|yes|no)\?")
_CLAUSE_END = re.compile(
    r"""
    [.;:!?,\n()。，；]
    |\b(?:but|because|since|so|while|although|though|whereas|and|as|only|therefore|thus|hence)\b
    |(?<!think\ )(?<!believe\ )(?<!that\ )(?<!say\ )(?<!like\ )(?<!whether\ )(?<!if\ )\b(?:it\ is|it's)\b
    """,
    re.VERBOSE,
)
_DENIAL = re.compile(
    r"""
    \b(?:not|no|never|neither|nor|without|none|cannot|rather\ than|instead\ of|except|excluding|unlike|other\ than
        |ruled?\ out|exclud(?:e|es|ed)|discard(?:s|ed)?|absence\ of|lacks?)\b
    |n't\b|不|没有|并非
    """,
    re.VERBOSE,
)
_DENIAL_BEHIND = re.compile(
    r"""
    [)\]"'*]*\s*
    (?:(?:is|are|was|were)\s+(?:\w+\s+)?
         (?:wrong|incorrect|unlikely|absent|excluded|ruled\ out|impossible|false|missing)\b
      |(?:is|are|was|were|can|could|does|do|did)(?:\s+not\b|n't\b|not\b|\s+never\b)
      |(?:can|could|may|must)\ be\ (?:ruled\ out|excluded|discarded|eliminated)\b
      |不|错|(?:可以)?排除)
    """,
    re.VERBOSE,
)
MAX_DENIAL_WORDS = 8
"""Words between a denial and the option that it denies, at most."""
_SIGHT = 300
"""Characters before and behind a mention that are looked at."""
_REFUSAL = re.compile(
    r"""
    \bi(?:'m|\ am)\ sorry\b|\bas\ an\ ai\b|\btext-only\b|\bdo(?:n't|\ not)\ know\b|无法
    |\b(?:can't|cannot|can\ not|unable\ to|not\ able\ to|couldn't|could\ not|(?:impossible|difficult|hard)\ to)
     \ (?:\w+ly\ )?
     (?:(?:hear|listen\ to|process|access|analy[sz]e|play)
        \ (?:(?:the|any|this|your|to)\ )*(?:audio|sounds?|recording|clip|file|it)\b
       |determine|tell|know|say|be\ determined|be\ told|identify)
    |\bno\ (?:audio|sound|recording)(?:\ \w+)?\ (?:was|is|has\ been)\ (?:provided|attached|uploaded|given)
    |\bplease\ (?:provide|upload|share|attach)\b
    """,
    re.VERBOSE,
)


def answer_text(answer: str) -> str:
    """The words of an answer, without what is around them: see `inner_answer`; Markdown, LaTeX, full-width letters."""
    text = unicodedata.normalize("NFKC", inner_answer(answer)).translate(SIGNS)
    text = text.replace("\u2019", "'").replace("\u2018", "'")
    return _MARKUP.sub(lambda mark: mark[1] or "", _LATEX_TEXT.sub(r"\1", text)).strip()


def inner_answer(answer: str) -> str:
    r"""The answer in JSON, in the last `\boxed{}`, or the text as it is; HTML's entities as the signs that they are."""
    text = html.unescape(answer)
    value = _json_answer(text)
    boxed = last_boxed(text)
    return value if value is not None else boxed if boxed is not None else text


def without_idle_denials(text: str) -> str:
    """A text in lower case without words that look like a denial (`no doubt`), as long as it was; the reverse, too."""
    text = _ANYTHING_BUT.sub(lambda match: "not".ljust(len(match[0])), text)
    return _NOT_DENIED.sub(lambda match: " " * len(match[0]), text)


def refuses(text: str) -> bool:
    """Whether a text in lower case refuses to answer."""
    return _REFUSAL.search(text) is not None


def is_denied_behind(text: str) -> bool:
    """Whether a text in lower case denies what stands before it: ` is wrong`."""
    return _DENIAL_BEHIND.match(text) is not None


def is_stated(text: str, mention: re.Match[str]) -> bool:
    """Whether a mention in a text in lower case is neither denied, in its clause, nor part of a question."""
    before = text[max(0, mention.start() - _SIGHT) : mention.start()]
    behind = text[mention.end() : mention.end() + _SIGHT]
    ends = [end.end() for end in _CLAUSE_END.finditer(before)]
    clause = before[ends[-1] if ends else 0 :]
    denials = list(_DENIAL.finditer(clause))
    if denials and len(clause[denials[-1].end() :].split()) <= MAX_DENIAL_WORDS:
        return False
    sentence_end = re.search(r"[.!?\n]", behind)
    is_asked = sentence_end is not None and sentence_end[0] == "?" and not _TAG_QUESTION.match(behind)
    return not is_asked and not is_denied_behind(behind)


# ------------------------------------------------------------------------------------------------ private


def _json_answer(text: str) -> str | None:
    """The answer in a JSON object, or a Python dict, of a text; None where there is none."""
    if "{" not in text:
        return None
    fields = {key.lower(): value for key, value in reversed(_JSON_FIELD.findall(text))}
    for key in _JSON_KEYS:
        value = fields.get(key, "null")
        if value != "null":
            return value.strip("'\"").replace('\\"', '"')
    return None
