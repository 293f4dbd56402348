"""The command `zeroxla` itself: which command is meant, and what is said when none is."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tools.quick import thinned

import zeroxla
from zeroxla.cli.main import COMMANDS, Command, main

# What takes long to import, or is not always installed.
HEAVY = ("jax", "numpy", "tyro", "rich", "grain", "matplotlib", "tensorboardX")


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


class TestHelp:
    @pytest.mark.smoke
    def test_lists_every_command(self, capsys):
        assert main(["--help"]) == 0
        printed = capsys.readouterr().out
        for name, command in COMMANDS.items():
            assert f"  {name}" in printed
            assert command.help in printed

    def test_is_printed_as_an_error_without_a_command(self, capsys):
        assert main([]) == 2
        assert "usage: zeroxla COMMAND" in capsys.readouterr().err

    @pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
    def test_imports_nothing_that_takes_long(self, arguments):
        done = run_alone(
            f"import sys\nfrom zeroxla.cli.main import main\nassert main({arguments}) == 0\n"
            f"print([name for name in {HEAVY} if name in sys.modules])"
        )
        assert done.stdout.splitlines()[-1] == "[]", done.stderr

    @pytest.mark.parametrize(
        "command", thinned(["train", "launch"], slow=["plan", "island", "coordinate", "generate"])
    )
    def test_of_a_command_does_not_import_jax(self, command):
        done = run_alone(
            "import sys\nfrom zeroxla.cli.main import main\n"
            f"try:\n    main(['{command}', '--help'])\n"
            "except SystemExit as end:\n    assert end.code == 0\n"
            "print('jax' in sys.modules)"
        )
        assert done.stdout.splitlines()[-1] == "False", done.stderr

    @pytest.mark.parametrize("command", COMMANDS)
    def test_of_every_command(self, command, capsys):
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        assert f"usage: zeroxla {command}" in capsys.readouterr().out


@pytest.mark.smoke
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["explain", "--help"]])
def test_nothing_reads_the_output(arguments, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "zeroxla", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_nothing_reads_a_table():
    code = """
import sys, types
from rich.console import Console
from zeroxla.cli.main import COMMANDS, Command, main
COMMANDS["say"] = Command("said", "Say something.")
sys.modules["said"] = types.SimpleNamespace(run=lambda arguments: Console().print("a table"))
sys.exit(main(["say"]))
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_another_broken_pipe_is_an_error(monkeypatch, tmp_path):
    def broken(arguments):
        raise BrokenPipeError("of a socket")

    monkeypatch.setitem(sys.modules, "broken_command", SimpleNamespace(run=broken))
    monkeypatch.setitem(COMMANDS, "break", Command("broken_command", "Break."))
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(BrokenPipeError, match="of a socket"):
            main(["break"])


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"zeroxla {zeroxla.__version__}\n"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "there is no command trian, only train, launch, island, coordinate, export, "),
        (["trian"], "did you mean train?"),
        (["exprot", "x"], "did you mean export?"),
        (["xyz"], "see zeroxla --help"),
        (["--steps", "3"], "--steps before a command; write the command first: zeroxla train --st"),
    ],
)
def test_no_command_of_that_name(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_public_names_are_imported_from_where_type_checkers_see_them():
    """The names are written twice in `zeroxla/__init__.py`: for type checkers, and to be imported
    when they are used."""
    tree = ast.parse(Path(zeroxla.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if node.module == "zeroxla":
                    seen[alias.name] = importlib.import_module(whole)
                else:
                    seen[alias.name] = getattr(importlib.import_module(node.module), alias.name)
    assert seen.keys() == set(zeroxla.__all__)
    assert all(getattr(zeroxla, name) is value for name, value in seen.items())
    assert set(zeroxla.__all__) <= set(dir(zeroxla))
    with pytest.raises(AttributeError, match="no attribute 'make_stepp'"):
        _ = zeroxla.make_stepp


# A package, what asks for it, and the extra that brings it.
MISSING = {
    "tyro": ("zeroxla plan needs the package tyro", "cli"),
    "grain": ("batches need the package grain", "cli"),
    "matplotlib": ("pictures need the package matplotlib", "plot"),
    "xxhash": ("state on disk needs the package xxhash", "disk"),
    "tokenizers": ("a model's tokens need the package tokenizers", "text"),
    "jinja2": ("chat templates need the package jinja2", "text"),
    "pyarrow": ("Parquet files need the package pyarrow", "parquet"),
    "safetensors": ("reading weights needs the package safetensors", "hf"),
    "sklearn": ("the digits need the package scikit-learn", "images"),
}
USES = """
import sys, tempfile
from pathlib import Path
for name in {missing}:
    sys.modules[name] = None
from zeroxla.cli.main import main
status = main(["plan", "--picture", "x.png"])
import numpy as np
from zeroxla.cli.data.chat_template import DEFAULT, ChatTemplate
from zeroxla.cli.data.images import load_images
from zeroxla.cli.data.parquet import parquet_lines
from zeroxla.cli.data.text import training_batches
from zeroxla.cli.data.vocabulary import Tokens
from zeroxla.checkpoint.weights.safetensors_reader import TensorReader
from zeroxla.inspect import plot_schedule
from zeroxla.offload.disk.block_file import BlockFile
import zeroxla
folder = Path(tempfile.mkdtemp())
(folder / "tokenizer.json").write_text("{{}}")
schedule = zeroxla.make_schedule("1f1b", 2, 4)
for use in (
    lambda: training_batches(np.zeros(100, np.uint8), batch=2, length=4, seed=0),
    lambda: plot_schedule(schedule),
    lambda: BlockFile(folder / "block", create=True),
    lambda: Tokens(folder, {{}}),
    lambda: ChatTemplate(DEFAULT, {{}}),
    lambda: next(parquet_lines(folder / "rows.parquet")),
    lambda: TensorReader(folder),
    load_images,
):
    try:
        use()
    except ImportError as error:
        print(error, file=sys.stderr)
assert not (folder / "block").exists()
sys.exit(status)
"""


def test_a_missing_package_is_named_with_the_extra_that_brings_it():
    done = run_alone(USES.format(missing=tuple(MISSING)))
    assert done.returncode == 2, done.stderr
    for message, extra in MISSING.values():
        assert f"{message}; pip install 'zeroxla[{extra}]'" in done.stderr


@pytest.mark.slow
def test_step_needs_none_of_the_extras(tmp_path):
    """A training step, its report, and a checkpoint."""
    code = f"""
import sys
for name in {(*MISSING, "tensorboardX")}:
    sys.modules[name] = None
import jax, numpy as np, zeroxla
from zeroxla.models import MLP
mesh = zeroxla.make_mesh(nodes=2)
step = zeroxla.make_step(MLP.tiny(), mesh, config=zeroxla.ZeroConfig.zeropp())
batch = {{"image": np.zeros((8, 4, 4, 1)), "label": np.zeros(8, int)}}
state = step.init(jax.random.key(0), batch)
state, metrics = step(state, batch)
print(step.describe(), zeroxla.inspect.memory(step.lower(state, batch).compile()))
with zeroxla.Checkpointer({str(tmp_path / "checkpoints")!r}) as checkpointer:
    checkpointer.save(1, state)
print(float(metrics["loss"]))
"""
    env = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "secondary shard" in done.stdout
