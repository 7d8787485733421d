"""The command `export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from audiollm.hub_models.options import Download, folder_option, read_folder


class ExportFormat(StrEnum):
    """Formats of exports."""

    TRANSFORMERS = "transformers"
    VLLM_OMNI = "vllm-omni"
    ONNX = "onnx"
    INT8 = "int8"
    INT4 = "int4"


def export(
    folder: Annotated[
        Path,
        typer.Argument(
            parser=read_folder,
            metavar="FOLDER",
            help="A train stage or a saved model; a codec's, too, for onnx.",
            show_default=False,
        ),
    ],
    to: Annotated[ExportFormat, typer.Option("--to", help="The format.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The new folder.", show_default=False)],
    codec: Annotated[
        Path | None,
        folder_option("The codec's folder; by default that of the model, or the run's own train_tokenizer."),
    ] = None,
    download: Download = False,
) -> None:
    """Write a model that speaks as others load it, and compare its answers with ours before it says done.

    transformers: a folder for HiggsAudioV2ForConditionalGeneration, its processor and its codec, in audio_tokenizer/.
    vllm-omni: that folder with what vLLM-Omni's server of Higgs Audio V2 reads; its README.md says how to start it.
    onnx: the codec alone, for onnxruntime: samples to codes and back, in pieces of any size.

    int8, int4: for `generate`, `serve` and `Generator`, with its linear layers in one byte or half a byte a number.

    What the format cannot hold is refused, with the way that works.

    Example: audiollm export runs/higgs/train --to transformers -o exported

    Example: audiollm export runs/higgs/train --to vllm-omni -o served

    Example: audiollm export runs/quickstart/train_tokenizer --to onnx -o codec-onnx

    Example: audiollm export runs/mine/train --to int8 -o small
    """
    from audiollm.publish.codec_export import export_to_onnx
    from audiollm.publish.stored_export import export_stored
    from audiollm.publish.transformers_export import export_to_transformers
    from audiollm.publish.vllm_omni_export import export_to_vllm_omni

    console = Console(soft_wrap=True)
    with console.status(f"writing and comparing for {to.value}"):
        checked: object
        if to is ExportFormat.TRANSFORMERS:
            checked = export_to_transformers(folder, out, codec)
        elif to is ExportFormat.VLLM_OMNI:
            checked = export_to_vllm_omni(folder, out, codec)
        elif to is ExportFormat.ONNX:
            checked = export_to_onnx(folder, out, codec)
        else:
            checked = export_stored(folder, out, "int8" if to is ExportFormat.INT8 else "int4", codec)
    console.print(f"compared: {checked}", highlight=False)
    console.print(f"exported: {out}", highlight=False, markup=False)
