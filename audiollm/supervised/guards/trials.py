"""Small trainings of a policy on codes that stand for no sound.

Shapes: K codebooks, T frames or targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import Policy, has_depth
from audiollm.families.prompts import AnswerContent, PromptedContents

TEXTS = tuple(f"{letter} clip" for letter in "ABCDEFGHIJ")
"""They differ from the first word on: prompts may show words one by one, beside the frames."""
SPEECH = AudioPart(path="speech.wav")


@dataclass(frozen=True)
class TrialSettings:
    """How a trial trains."""

    steps: int
    learning_rate: float
    seed: int = 0
    batch_size: int = 8


def spoken_prompt(text: str, codes_KT: Tensor) -> PromptedContents:
    """A text and the codes that say it, as a policy takes them."""
    message = Message(role="user", content=[TextPart(text=text)])
    return PromptedContents(text, [message], [], [AnswerContent([SPEECH], [codes_KT])])


def train_trial(
    policy: Policy[Any, Any, Any],
    clips_of: Callable[[int], Sequence[PromptedContents]],
    settings: TrialSettings,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[AnswerLogprobs]:
    """Train on the clips of each step; yield the log-probabilities of each step from before its update.

    Raises:
        BadSample: the model takes no such clip.
        FloatingPointError: the loss is no number.
    """
    trained = [parameter for parameter in policy.root.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    device = trained[0].device
    for step in range(settings.steps):
        encoded = [answer for clip in clips_of(step) for answer in policy.encode(clip)]
        batch = policy.batch(encoded).to(device)
        logprobs = policy.answer_logprobs(policy.root, batch, TokenRequest(reference=False))
        loss = trial_loss(policy, logprobs)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is no number at step {step}: take a smaller --learning-rate")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        advance()
        yield logprobs


def trial_loss(policy: Policy[Any, Any, Any], logprobs: AnswerLogprobs) -> Tensor:
    """The mean cross entropy of all targets; of two decoders, the sum of their means."""
    if not has_depth(policy) or logprobs.codebook_T is None:
        return -logprobs.policy_T.mean()
    is_first_T = logprobs.codebook_T == 0
    return -logprobs.policy_T[is_first_T].mean() - logprobs.policy_T[~is_first_T].mean()
