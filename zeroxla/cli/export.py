"""`zeroxla export`: write the weights of a run so that Hugging Face's programs read them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from zeroxla.checkpoint.weights.adapter_export import export_adapter
from zeroxla.checkpoint.weights.export import export_params
from zeroxla.checkpoint.weights.pretrained import leaves_of_folder
from zeroxla.checkpoint.weights.safetensors_writer import BESIDE
from zeroxla.checkpoint.weights.tensor_names import shapes_of
from zeroxla.cli.data.chat_template import TEMPLATE
from zeroxla.cli.errors import UsageError
from zeroxla.cli.read_options import read_options
from zeroxla.cli.run_folder import CHECKPOINTS
from zeroxla.cli.stored_run import StoredRun
from zeroxla.cli.train.model import MODEL, exported, folder_dtype
from zeroxla.frontend.lora.model import LoraModel

_OF_THE_TENSORS = ("dtype", "torch_dtype", "quantization_config")
"""Keys of a config that say how its own tensors are stored."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write the weights of a run in Hugging Face's format: config.json and safetensors files."""

    run: Annotated[Path, tyro.conf.Positional]
    """The folder of a run of `zeroxla train` or `zeroxla rlhf`."""
    output: Path | None = None
    """Folder to write to. Default: `export` in the run folder, or `adapter` with --adapter."""
    adapter: bool = False
    """Write the adapters alone, in PEFT's format. Default: all weights, the adapters merged."""
    step: int | None = None
    """Step of the checkpoint to export. Default: the newest checkpoint that is not damaged."""
    island_own: bool = False
    """Export an island's own parameters. Default: those that all islands share, whose loss the run
    reports."""
    format: Literal["safetensors"] = "safetensors"
    """Format of the files."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the tensors in the files. Values are rounded to nearest. Default: the one of the
    folder that the run began from (--init), so that the export is as large; float32 for a run that
    began from none, and with --adapter."""
    max_shard_size: str = "5GB"
    """Largest size of a file, in bytes or with a unit, such as 500MB (10^6) or 2GiB (2^30). A
    larger tensor has a file of its own."""


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla export`; return the exit status.

    Raises:
      UsageError: as `export` raises ValueError.
    """
    try:
        return export(read_options("export", arguments, ExportOptions))
    except ValueError as error:
        raise UsageError(str(error)) from error


def export(options: ExportOptions) -> int:
    """Export a run's weights, and print the names of the files.

    Returns:
      The exit status 0.

    Raises:
      ImportError: a package that the run's tokenizer needs is not installed.
      ValueError: the run holds no whole checkpoint, an option cannot work, or the folder cannot be
        written.
    """
    console = Console(highlight=False, soft_wrap=True)
    run = options.run.expanduser()
    stored = StoredRun.of(run, "export")
    model, config = exported(stored.options, run)
    model = stored.as_stored(model)
    number = stored.number(
        options.step, lambda text: console.print(f"warning: {text}", markup=False)
    )
    if options.adapter and not isinstance(model, LoraModel):
        raise ValueError(f"--adapter: {run} has no adapters; leave it out")
    folder = (options.output or run / ("adapter" if options.adapter else "export")).expanduser()
    dtype, why = _dtype(options, config)
    said: list[str] = []
    bar = Progress(
        TextColumn("writing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("export", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        source = run / CHECKPOINTS / str(number)
        base = stored.base
        if options.adapter:
            files = export_adapter(
                source,
                folder,
                model=model,
                base=None if base is None else str(base),
                dtype=dtype,
                progress=progress,
                island_own=options.island_own,
            )
        else:
            files = export_params(
                source,
                folder,
                model=model,
                dtype=dtype,
                max_shard_size=options.max_shard_size,
                config={name: x for name, x in config.items() if name not in _OF_THE_TENSORS},
                progress=progress,
                island_own=options.island_own,
                original=_original(base, model, said.append),
                report=said.append,
            )
    kept = [run / MODEL / name for name in BESIDE if name != "config.json"]
    for file in filter(Path.is_file, (*kept, run / TEMPLATE)):
        shutil.copyfile(file, folder / file.name)
    for text in said:
        console.print(text, markup=False)
    console.print(f"Exported step {number} in {dtype}{why} to {folder}:", markup=False)
    for file in files:
        console.print(f"  {file.name}  {file.stat().st_size:,} bytes", markup=False)
    return 0


def _dtype(options: ExportOptions, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the dtype of the tensors, and in words where it is from, if nobody has named it."""
    if options.dtype is not None:
        return options.dtype, ""
    if options.adapter or not config:
        return "float32", ""
    return folder_dtype(config), ", the dtype of the folder that the run began from,"


def _original(base: Path | None, model: Any, say: Callable[[str], None]) -> Path | None:
    """Return the folder of --init if a base in 8 or 4 bits can be compared with it.

    Args:
      base: the folder, which may be gone; None if there was none.
      model: the run's model.
      say: told why it cannot be compared, if it is there.
    """
    is_quantized = isinstance(model, LoraModel) and model.plan.has_wires
    if base is None or not is_quantized or not base.expanduser().is_dir():
        return None
    try:
        leaves_of_folder(model.model, shapes_of(model.plan.shapes), base.expanduser())
    except ValueError as error:
        say(f"not compared with {base}: {error}")
        return None
    return base
