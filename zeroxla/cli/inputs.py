"""Checks of paths and packages that a command makes before it starts JAX, which takes seconds.

What is in the files is checked where they are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from zeroxla.cli.islands.folders import folder_of, island_folders
from zeroxla.cli.named_object import check_object
from zeroxla.cli.run_folder import CONFIG, check_new
from zeroxla.cli.run_lock import check_free
from zeroxla.cli.tracking.trackers import check_tracker
from zeroxla.models.folders import download_text, missing_adapter, missing_model
from zeroxla.program.extras import check_package

if TYPE_CHECKING:
    from zeroxla.cli.check.options import CheckOptions
    from zeroxla.cli.generate.options import GenerateOptions
    from zeroxla.cli.plan.options import PlanOptions
    from zeroxla.cli.rlhf.options import RlhfOptions
    from zeroxla.cli.train.options import TrainOptions


def check_train(options: TrainOptions, slot: int | None = None) -> None:
    """Check what `zeroxla train` is given. A resumed run has copies of all but the data.

    Args:
      options: the options.
      slot: the number of the island that the run is; None if it is none.

    Raises:
      ValueError: a file, a folder or a module is missing.
      MissingExtraError: a package is not installed.
    """
    from zeroxla.cli.data.sources import with_weight

    rows = [with_weight(name)[0] for name in options.text.data]
    _check_data(rows)
    for name in options.output.metric:
        check_object(name, "--metric")
    check_packages(options.tracking.track, rows)
    if options.output.resume:
        return
    if options.output.run is not None:
        folder = folder_of(options.output.run, slot)
        check_free(folder)  # first: a run that goes on is not to be continued by another
        check_new(folder, options.output.run)
    if (init := options.model.init) is not None and not init.expanduser().is_dir():
        raise ValueError(
            f"--init {init}: there is no such folder, so its config.json cannot be read; "
            f"{missing_model(init)}"
        )
    _check_file("--deepspeed", options.zero.deepspeed)
    _check_template(options.rows.chat_template)
    check_adapter("--lora-init", options.lora.lora_init)
    tokenizer = None if init is None else init.expanduser() / "tokenizer.json"
    if tokenizer is not None and tokenizer.is_file():
        check_package("tokenizers", "text", f"--init {init} needs")


def check_rlhf(options: RlhfOptions) -> None:
    """Check what `zeroxla rlhf` is given; see `check_train`."""
    data = [Path(name) for name in options.start.data]
    _check_data(data)
    check_packages(options.tracking.track, data)
    if options.output.resume:
        return
    if options.output.run is not None:
        check_free(options.output.run)
        check_new(options.output.run)
    _check_file("--deepspeed", options.zero.deepspeed)
    if (run := options.start.init_run) is not None and not run.expanduser().is_dir():
        raise ValueError(
            f"--init-run {run}: {run} holds no run, there is no such folder; name one of zeroxla "
            "train"
        )


def check_generate(options: GenerateOptions) -> None:
    """Check what `zeroxla generate` is given; see `check_train`."""
    from zeroxla.cli.data.row_readers import checked_form

    check_source(options.source)
    file = options.prompts.file
    if file is not None and file.suffix:  # of no use, whether it is there or not
        checked_form(file)
    _check_file("--file", file)
    _check_template(options.prompts.chat_template)
    check_adapter("--adapter", options.weights.adapter)


def check_plan(options: PlanOptions) -> None:
    """Check what `zeroxla plan` is given; see `check_train`."""
    _check_file("--deepspeed", options.zero.deepspeed)
    _check_file("--machines", options.cluster.machines)
    check_adapter("--lora-init", options.lora.lora_init)


def check_check(options: CheckOptions) -> None:
    """Check what `zeroxla check` is given; see `check_train`."""
    subject = options.subject
    check_object(subject.object, "check")
    for name, option in ((subject.batch, "--batch"), (subject.loss, "--loss")):
        if name is not None:
            check_object(name, option)
    _check_file("--deepspeed", options.training.deepspeed)


def check_machines(file: Path | None) -> None:
    """Check that the file of --machines is there."""
    _check_file("--machines", file)


def check_source(folder: Path) -> None:
    """Check that a folder to generate from is there.

    Raises:
      ValueError: it is not.
    """
    if not folder.expanduser().is_dir():
        raise ValueError(f"{missing_model(folder)}, or that of a run of zeroxla train or rlhf")


def check_run(folder: Path, use: str, made_by: str = "zeroxla train or rlhf") -> None:
    """Check that a folder holds a run.

    Args:
      folder: the folder.
      use: what the run is for, as in "a run to export".
      made_by: the commands whose runs serve.

    Raises:
      ValueError: it holds none.
    """
    if (folder / CONFIG).is_file():
        return
    islands = ", ".join(path.name for path in island_folders(folder))
    raise ValueError(
        f"{folder} holds no run to {use} (it has no config.json); name the folder of "
        + (f"one of its islands: {islands}" if islands else f"a run of {made_by}")
    )


def check_adapter(option: str, folder: Path | None) -> None:
    """Check that a folder holds an adapter in PEFT's format.

    Raises:
      ValueError: it does not.
    """
    if folder is not None and not (folder.expanduser() / "adapter_config.json").is_file():
        raise ValueError(
            f"{option} {folder}: its adapter_config.json cannot be read, there is no such file; "
            f"{missing_adapter(folder.expanduser())}"
        )


def check_packages(track: Iterable[str], data: Iterable[Path]) -> None:
    """Check the packages that a run needs for its trackers and its data.

    Raises:
      ValueError: there is no such tracker.
      MissingExtraError: a package is not installed.
    """
    for name in track:
        check_tracker(name)
    from zeroxla.cli.data.row_readers import form_of

    suffixes = {suffix for path in data for suffix in form_of(path) or ()}
    if ".parquet" in suffixes:
        check_package("pyarrow", "parquet", "Parquet files need")
    if ".zst" in suffixes:
        check_package("pyarrow", "parquet", "files of Zstandard need")


def _check_data(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.expanduser().stat()
        except OSError as error:
            remedy = "correct the path of --data, or leave it out"
            if len(path.parts) == 2 and (found := download_text(path, " --repo-type dataset")):
                remedy += f". {found[0].upper()}{found[1:]}"
            raise ValueError(f"cannot read {path}: {error.strerror}; {remedy}") from error


def _check_template(file: Path | None) -> None:
    if file is not None and not file.expanduser().is_file():
        raise ValueError(
            f"cannot read the chat template {file}: No such file; correct the path of "
            "--chat-template"
        )


def _check_file(option: str, path: Path | None) -> None:
    if path is not None and not path.expanduser().is_file():
        what = "it is a folder" if path.expanduser().is_dir() else "No such file or directory"
        raise ValueError(f"{option} {path}: {what}; give the path of a file")
