"""Tasks of `train_interpreter` on toy streams in float64, and stage settings that several tests share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.mixture import StepDraws
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.dual_ffn.rollouts import DualFFNRollouts
from audiollm.families.rollout import RolloutSettings
from audiollm.files.atomic import write_json
from audiollm.files.set_aside import SetAside
from audiollm.interpret.training.run import StreamMaker
from audiollm.interpret.training.settings import InterpreterTrainingConfig
from audiollm.interpret.training.stream_rewarder import StreamRewarder
from audiollm.recipe.ranks import Ranks
from audiollm.rl.online.prompts import PromptMaker
from audiollm.rl.online.rollout_files import RolloutFiles
from audiollm.rl.online.settings import KLChoice
from audiollm.rl.online.task import PolicyParts, PolicyTask
from audiollm.rl.policy_gradient.kl import kl_controller
from tests.audiollm.rl.online.fresh_tasks import flat_gradient, load_critic

ALL_REWARDS = {
    "detection": 1.0, "initiative": 1.0, "quality": 1.0, "format": 1.0, "lagging": 4.0, "sequence_quality": 1.0,
}  # fmt: skip
STAGE_1 = {name: ALL_REWARDS[name] for name in ("detection", "initiative", "quality", "format")}
ADAPTIVE = {"name": "proportional", "coefficient": 0.02, "target": 0.5}
PPO: dict[str, Any] = {
    "rewards": ALL_REWARDS,
    "kl": {"place": "reward", "estimator": "k1", "controller": ADAPTIVE},
}
QUALITY_AND_LAG = {"sequence_quality": 2.0, "lagging": 1.0}
NO_CRITIC: dict[str, Any] = {"critic": None, "group_size": 3}
CASES: dict[str, dict[str, Any]] = {
    "ppo": PPO,
    "ppo-actions": {**PPO, "advantage": {"name": "gae", "steps": True, "level": "step"}},
    "seqpo": {
        **NO_CRITIC, "rewards": QUALITY_AND_LAG, "combine": "seqpo", "latency": "AL",
        "advantage": {"name": "grpo", "scale": "none"}, "kl": {"controller": ADAPTIVE},
    },
    "gated": {
        **NO_CRITIC, "rewards": {"sequence_quality": 1.0, "lagging": 0.5}, "advantage": "rloo",
        "combine": {"name": "gated", "threshold": 0.3, "max_latency_s": 2.0},
    },
    "hibiki-zero": {
        **NO_CRITIC, "rewards": {"process_quality": 1.0}, "combine": "grouped",
        "advantage": {"name": "reinforce_plus_plus", "steps": True, "level": "step", "gamma": 0.0, "whiten": False},
    },
    "speech": {
        **PPO, "answer": "any", "max_frames": 3,
        "kl": {**PPO["kl"], "audio": {"name": "proportional", "coefficient": 0.3, "target": 0.42}},
    },
}  # fmt: skip
"""Settings of trainings over streams, by name."""


def config_of(
    folder: Path, settings: Mapping[str, Any], max_tokens: int = 100_000
) -> InterpreterTrainingConfig:
    given: dict[str, Any] = {
        "samples": str(folder / "streams.jsonl"), "start": folder, "steps": 10, "batch_size": 6,
        "max_answer_tokens": 2, "max_tokens": max_tokens, "seed": 4, **settings,
    }  # fmt: skip
    return InterpreterTrainingConfig(**given)


def make_stream_task(
    folder: Path, settings: Mapping[str, Any], ranks: Ranks, max_tokens: int, place: str
) -> PolicyTask:
    """A task over the streams of a folder, its policy away from the reference."""
    config = config_of(folder, settings, max_tokens)
    policy = DualFFNPolicy.load(
        folder, dtype=torch.float64, rows_multiple=1, needs_reference=config.needs_reference
    )
    with torch.no_grad():
        for number, parameter in enumerate(policy.root.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(0.02 * noise.to(parameter.dtype))
        if config.answer == "any":  # or it hardly speaks
            opens = policy.template.tokenizer.token_to_id("<|audio_out_bos|>")
            policy.root.model.text_lm_head.weight[opens] *= 40
    policy.root.model.weights_changed()
    set_aside = SetAside(folder / f"set_aside-{ranks.rank}.jsonl", "test", strict=True)
    source = ManifestSource(str(folder / "streams.jsonl"))
    prompts = PromptMaker(policy, [source], StepDraws(6, 4), set_aside, ranks)
    tokenizer = policy.template.tokenizer
    opens_speech = tokenizer.token_to_id("<|audio_out_bos|>")
    assert opens_speech is not None
    rewarder = StreamRewarder(config, tokenizer, opens_speech, 0.04, ranks)
    sampling = RolloutSettings(
        4, 0, config.temperature, config.answer, config.max_answer_tokens, config.max_frames
    )
    maker = StreamMaker(
        DualFFNRollouts(policy.root.model, policy.template), rewarder, sampling, config.group_size
    )
    kl = config.kl or KLChoice()
    of_audio = None if kl.audio is None else kl_controller(kl.audio.name, kl.audio.values)
    parts = PolicyParts(
        policy, prompts, maker, RolloutFiles(folder / place, ranks, policy.pieces),
        kl_controller(kl.controller.name, kl.controller.values), set_aside, ranks=ranks,
        critic=None if config.critic is None else load_critic(config), audio_controller=of_audio,
    )  # fmt: skip
    return PolicyTask(config, parts)


def one_stream_step(folder: Path, ranks: Ranks, case: str, max_tokens: int, place: str) -> None:
    """Write loss, gradient (some of its numbers) and figures of a step, as `fresh_tasks.compare` reads them."""
    task = make_stream_task(folder, CASES[case], ranks, max_tokens, place)
    batch = task.batch(1, torch.Generator(), ranks)
    loss = torch.zeros((), dtype=torch.float64)
    for update in task.updates(batch, 1, 2):  # one, behind which the controllers follow
        for part in update.loss:
            part.backward()
            loss += part.detach()
    total = ranks.sum(loss)
    gradient = ranks.sum(flat_gradient(task.modules()["policy"]))[::7]
    figures = {
        key: float(value)
        for key, value in update.figures.items()
        if key != "tokens" and not key.startswith("seconds/")
    }
    coefficients = [
        float(module.coefficient) for name, module in task.modules().items() if "controller" in name
    ]
    if ranks.first:
        found = {
            "loss": float(total),
            "gradient": gradient.tolist(),
            "figures": figures,
            "packs": update.losses,
        }
        write_json(folder / f"{place}.json", {**found, "coefficients": coefficients})
