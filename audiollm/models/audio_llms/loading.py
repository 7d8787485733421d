"""Audio LLMs of transformers in a local folder: the model that answers in words, and its processor.

VideoLLaMA 3, which sees and does not hear, is loaded as they are.

From the folder of a whole Qwen-Omni only the `thinker` is loaded: the talker and its vocoder take no part in text
answers. Nothing is downloaded, nothing of the folder is run, and only safetensors are opened.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from audiollm.files.json_files import OFFLINE, read_json_file
from audiollm.files.transformers_folders import STORED, open_model, opening
from audiollm.models.audio_llms.frames import FramePatches, TimedFramePatches

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_PATCHES: Mapping[str, type] = {
    "Qwen2_5OmniProcessor": FramePatches,
    "Qwen3OmniMoeProcessor": FramePatches,
    "VideoLlama3Processor": TimedFramePatches,
}
"""Classes that turn pictures of videos into patches, by the name of the processor's class."""


class PatchProduct(nn.Conv3d):
    """A convolution of patches that are as large as its kernel, as the product of matrices that it is.

    Both give the same numbers; libraries of convolutions take many times as long for them.
    """

    def forward(self, patches_NCTHW: Tensor) -> Tensor:
        if patches_NCTHW.shape[2:] != self.kernel_size:
            return super().forward(patches_NCTHW)
        products_ND = F.linear(patches_NCTHW.flatten(1), self.weight.flatten(1), self.bias)
        return products_ND[:, :, None, None, None]


class AudioLLM(NamedTuple):
    """A model of transformers and what makes its inputs."""

    model: PreTrainedModel
    processor: Any
    """A `ProcessorMixin`: feature extractor, tokenizer and chat template."""


class AudioLLMInputs(NamedTuple):
    """Config, generation config and processor of a model, without its weights."""

    config: Any
    generation_config: Any
    processor: Any
    """A `ProcessorMixin`: feature extractor, tokenizer and chat template."""


def load_inputs(folder: Path) -> AudioLLMInputs:
    """Load what makes the inputs of the audio LLM in a folder, without its weights.

    Raises:
        ConfigError: the folder holds no such model.
    """
    from transformers import AutoConfig, GenerationConfig

    _register_classes()
    with opening(folder, "audio LLM"):
        config = AutoConfig.from_pretrained(str(folder), **OFFLINE)
        config = getattr(config, "thinker_config", config)
        if (folder / "generation_config.json").exists():
            generation = GenerationConfig.from_pretrained(str(folder), **OFFLINE)
        else:
            generation = GenerationConfig.from_model_config(config)
        processor = _load_processor(folder)
    _end_at_turns(generation, processor)
    return AudioLLMInputs(config, generation, processor)


def load_audio_llm(folder: Path, dtype: torch.dtype | None = None) -> AudioLLM:
    """Load an audio LLM (Qwen2-Audio, Qwen-Omni, Audio Flamingo 3, Voxtral, ...) in eval mode, on the CPU.

    Args:
        dtype: of the weights; None: as they are stored.

    Raises:
        ConfigError: the folder holds no such model, holds pickled weights only, or lacks some of its weights.
    """
    from transformers import AutoConfig

    _register_classes()
    with opening(folder, "audio LLM"):
        processor = _load_processor(folder)
        config = AutoConfig.from_pretrained(str(folder), **OFFLINE)
        model = open_model(_model_class(config), folder, dtype=STORED if dtype is None else dtype)
    for module in model.modules():
        if type(module) is nn.Conv3d and module.groups == 1 and not any(module.padding):
            module.__class__ = PatchProduct
    _end_at_turns(model.generation_config, processor)
    return AudioLLM(model, processor)


def parameters_of_config(folder: Path) -> int:
    """Count the parameters of the model that answers in words, from its config.json alone and without memory for them.

    Raises:
        ConfigError: the folder describes no model of transformers that answers in words.
    """
    from transformers import AutoConfig

    _register_classes()
    with opening(folder, "model that answers in words"):
        config = AutoConfig.from_pretrained(str(folder), **OFFLINE)
        model_class = _model_class(config)
        with torch.device("meta"):
            model = model_class(getattr(config, "thinker_config", config))
    return sum(parameter.numel() for parameter in model.parameters())


def _register_classes() -> None:
    """Name classes that are not of transformers by the `model_type` of their config.json."""
    from transformers import AutoConfig, AutoModelForMultimodalLM, AutoProcessor

    from audiollm.models.audio_llms.higgs_v3_stt.config import MODEL_TYPE, HiggsAudio3Config
    from audiollm.models.audio_llms.higgs_v3_stt.model import HiggsAudio3Model
    from audiollm.models.audio_llms.higgs_v3_stt.processor import HiggsAudio3Processor

    AutoConfig.register(MODEL_TYPE, HiggsAudio3Config, exist_ok=True)
    AutoModelForMultimodalLM.register(HiggsAudio3Config, HiggsAudio3Model, exist_ok=True)
    AutoProcessor.register(HiggsAudio3Config, HiggsAudio3Processor, exist_ok=True)


def _end_at_turns(generation_config: Any, processor: Any) -> None:
    """Let answers end with their turn, where the processor names the token and the folder's settings leave it out."""
    turn_end = getattr(processor, "turn_end_id", None)
    if turn_end is not None:
        named = generation_config.eos_token_id
        ids = named if isinstance(named, list | tuple) else [named]
        generation_config.eos_token_id = sorted({turn_end, *(id for id in ids if id is not None)})


def _load_processor(folder: Path) -> Any:
    """Load the processor; without torchvision, one that takes text, sound, and pictures of videos of those models
    whose patches are made here.

    Raises:
        ImportError: another package is missing (`mistral-common` for Voxtral); the message names it.
    """
    import transformers
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(str(folder), **OFFLINE)
    except ImportError as error:
        if "torchvision" not in str(error).lower():
            raise
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).exists():
            kind = getattr(
                transformers, str(read_json_file(folder / name, dict).get("processor_class")), None
            )
            if kind is not None:
                processor = without_vision(kind).from_pretrained(str(folder), **OFFLINE)
                if kind.__name__ in _PATCHES:
                    processor.video_processor = _PATCHES[kind.__name__](_picture_settings(folder))
                return processor
    raise ImportError("the processor needs torchvision: pip install torchvision")


def _picture_settings(folder: Path) -> dict[str, Any]:
    """The settings of pictures in a folder: its own file, the part of another one, or none."""
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (folder / name).exists():
            settings: dict[str, Any] = read_json_file(folder / name, dict)
            if "patch_size" in settings:
                return settings
    if (folder / "processor_config.json").exists():
        content = read_json_file(folder / "processor_config.json", dict)
        return dict(content.get("video_processor") or content.get("image_processor") or {})
    return {}


def without_vision(kind: Any) -> Any:
    """Return a subclass of a processor without its parts for images and videos, which need torchvision."""
    from transformers import ProcessorMixin

    class AudioProcessor(kind):
        def __init__(self, feature_extractor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
            ProcessorMixin.__init__(self, feature_extractor, tokenizer, chat_template=chat_template)
            for sort in ("image", "audio", "video"):
                for name in (f"{sort}_token", f"{sort}_token_id"):
                    setattr(self, name, getattr(tokenizer, name, None))
            for name in ("vision_bos_token", "vision_eos_token", "audio_bos_token", "audio_eos_token"):
                setattr(self, name, getattr(tokenizer, name, None))

    class TextProcessor(kind):
        def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
            ProcessorMixin.__init__(self, tokenizer, chat_template=chat_template)
            for sort in ("image", "video"):
                token = getattr(tokenizer, f"{sort}_token", f"<|{sort}_pad|>")
                setattr(self, f"{sort}_token", token)
                setattr(self, f"{sort}_token_id", tokenizer.convert_tokens_to_ids(token))

    # transformers reads the parts of a processor from the arguments of its class
    hears = "feature_extractor" in inspect.signature(kind.__init__).parameters
    processor_type = AudioProcessor if hears else TextProcessor
    processor_type.__name__ = kind.__name__  # what `save_pretrained` notes as the processor's class
    return processor_type


def _model_class(config: Any) -> Any:
    """Return the class of the part that answers in words.

    Raises:
        ValueError: transformers knows no such class.
    """
    import transformers
    from transformers import AutoModelForMultimodalLM

    thinker = getattr(config, "thinker_config", None)
    mapping = AutoModelForMultimodalLM._model_mapping
    config_type = type(thinker if thinker is not None else config)
    if config_type in mapping:
        return mapping[config_type]
    for name in config.architectures or ():  # Audio Flamingo 3 is in no mapping of models that generate text
        model_class = getattr(transformers, name, None)
        if model_class is not None and callable(getattr(model_class, "generate", None)):
            return model_class
    raise ValueError(f"model_type {config.model_type!r} is no audio LLM that transformers knows")
