"""A talker as its training has it, without memory: for the plan of the stage `train`."""

from __future__ import annotations

from functools import partial

import torch

from audiollm.families.adapting import TrainedPart, adapt_model
from audiollm.families.talkers.kind import TalkerKind
from audiollm.families.talkers.policy import check_ties, expand_groups
from audiollm.families.talkers.published_weights import tie_weights
from audiollm.families.talkers.scorer import DEPTH_FRAMES
from audiollm.families.talkers.talker import DepthTalker, Talker
from audiollm.families.training_memory import BatchWork, StackWork, UnloadedModel
from audiollm.train.settings import LoRASettings


def planned_talker(kind: TalkerKind, trained: TrainedPart, lora: LoRASettings | None) -> UnloadedModel:
    """Make the model of a folder's config.json on the meta device, and choose what is trained of it.

    Raises:
        ConfigError: as `TalkerPolicy` has it.
    """
    with torch.device("meta"):
        model = kind.new_talker()
        tie_weights(model, kind.tied())
        if lora is not None:
            check_ties(lora, kind)
            lora = expand_groups(model, lora, kind)
        adapt_model(model, trained, lora)
    return UnloadedModel(model, partial(_batch_work, model))


def _batch_work(model: Talker, rows: float, frames: float) -> BatchWork:
    stacks, books = [StackWork(model.backbone.shape, rows)], model.num_codebooks
    width = model.backbone.shape.hidden_size
    if isinstance(model, DepthTalker):
        depth = model.depth.shape
        stacks.append(StackWork(depth, min(frames, DEPTH_FRAMES) * books))
        width = depth.hidden_size
    return BatchWork(stacks, frames * books * width)
