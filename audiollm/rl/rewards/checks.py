"""Checks of rewards against prompts and policy, before any work. Loads no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from audiollm.data.records.sample import Sample
from audiollm.data.text.option_forms import option_form
from audiollm.errors import ConfigError
from audiollm.rl.rewards.batch import SampledAnswer
from audiollm.rl.rewards.catalog import RewardTerm, import_reward
from audiollm.rl.rewards.settings import AccuracySettings, CosineSettings
from audiollm.rl.rewards.texts import accuracy

NAMED = 5
"""Prompts that an error names."""


def check_rewards(
    terms: Sequence[RewardTerm], samples: Sequence[Sample], speaks: bool, where: str = ""
) -> None:
    """Refuse rewards that cannot score the answers of this policy to these prompts.

    Args:
        speaks: whether the policy answers in speech.
        where: the recipe's place, for errors.

    Raises:
        ConfigError: a reward of speech for a policy that cannot speak, a user's function that cannot be imported, a
            prompt without answer key, with a key that is none of its options or that would not be right as an answer,
            or options that are there twice.
    """
    for sample in samples:
        _check_choices(sample)
    for term in terms:
        if term.speech and not speaks:
            raise ConfigError(
                f"rewards.{term.name}: scores speech, and the policy answers in words",
                where,
                "leave it out, or train a DualFFN that speaks",
            )
        if term.is_plug_in:
            import_reward(term.name)
        if term.needs_key:
            _check_keys(term, samples, where)


def _check_keys(term: RewardTerm, samples: Sequence[Sample], where: str) -> None:
    lacking = [sample.id for sample in samples if not SampledAnswer(sample, "", 0).key]
    if lacking:
        raise ConfigError(
            f"rewards.{term.name}: {len(lacking)} prompts have no answer key, the first is {lacking[0]!r}",
            where,
            "end the messages of each with the assistant's right answer",
        )
    settings = term.settings
    assert isinstance(settings, AccuracySettings | CosineSettings)
    for sample in samples if settings.match in ("auto", "letter") else ():
        answer = SampledAnswer(sample, "", 0)
        if (answer.choices or settings.match == "letter") and answer.key not in answer.choices:
            raise ConfigError(
                f"sample {sample.id!r}: its answer key {answer.key!r} is none of its options",
                where,
                "give the options in metadata.choices, and one of them as the key",
            )
    unread = [sample for sample in samples if not _is_key_right(sample, settings)]
    if unread:
        first = ", ".join(
            f"{sample.id!r} ({SampledAnswer(sample, '', 0).key!r})" for sample in unread[:NAMED]
        )
        raise ConfigError(
            f"rewards.{term.name}: of {len(unread)} prompts the answer key, given as an answer, would not be right: "
            f"{first}{', ...' if len(unread) > NAMED else ''}",
            where,
            "mend the keys, remove the prompts, or compare in another way by `match`",
        )


def _is_key_right(sample: Sample, settings: AccuracySettings | CosineSettings) -> bool:
    """Whether an answer that is the key, in the form that the prompt wants, earns `accuracy`."""
    key = SampledAnswer(sample, "", 0)
    form = key.form if settings.form == "prompt" else settings.form
    reply = {"tags": f"<answer>{key.key}</answer>", "boxed": rf"\boxed{{{key.key}}}", "free": key.key}[form]
    tolerance = getattr(settings, "tolerance", AccuracySettings().tolerance)
    compared = AccuracySettings(match=settings.match, form=form, tolerance=tolerance)
    return accuracy(SampledAnswer(sample, reply or "", 0), compared) == 1.0


def _check_choices(sample: Sample) -> None:
    choices = SampledAnswer(sample, "", 0).choices
    form = option_form(choices)
    counts = Counter(form(choice) or choice for choice in choices)
    twice = [choice for choice, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(
            f"sample {sample.id!r}: the option {twice[0]!r} is there twice",
            "metadata.choices",
            "remove one of them",
        )
