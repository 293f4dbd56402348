"""The package that users install: its contents, its dependencies, and the cost of importing it.

It is installed in an environment of its own, and used in a folder with packages of the same names
as the repository's folders. A fresh environment, with packages from the index, is slow to make. A
quick one is linked to the packages of the environment of the tests.
"""

from __future__ import annotations

import ast
import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from tools.quick import QUICK

import zeroxla

REPOSITORY = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
URL = "https://code.example/somebody/zeroxla"

# What `make_step` needs: all that rooms other than cli may import when they are imported.
CORE = {"jax", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "rich"}
BROUGHT = {
    "orbax": "orbax-checkpoint",
    "jaxlib": "jax",
    "ml_dtypes": "jax",
    "tensorstore": "orbax-checkpoint",
}


def build(source: Path, target: str, folder: Path, **env: str) -> Path:
    """Build a wheel or an sdist of a source tree, told its address or not."""
    told = ("ZEROXLA_URL", "GITHUB_REPOSITORY")
    plain = {name: value for name, value in os.environ.items() if name not in told}
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, env=plain | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the repository."""
    return build(REPOSITORY, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist, built by somebody who said where the repository is."""
    return build(REPOSITORY, "sdist", tmp_path_factory.mktemp("sdist"), ZEROXLA_URL=URL)


@pytest.fixture(scope="module")
def wheel_of_sdist(sdist, tmp_path_factory):
    """A wheel, built from the sdist."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build(source, "wheel", tmp_path_factory.mktemp("wheel_of_sdist"))


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel by name, without what describes them."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        return {name: archive.read(name) for name in names}


def metadata(wheel: Path) -> email.message.Message:
    """Return the metadata of a wheel; its body is the README."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


class TestContents:
    def test_is_zeroxla_and_nothing_else(self, wheel):
        names = contents(wheel)
        assert {name.split("/")[0] for name in names} == {"zeroxla"}
        expected = {path.relative_to(REPOSITORY).as_posix() for path in source_files()}
        assert names.keys() == expected
        for name in ("models/gpt.py", "pallas_kernels/dispatch.py", "py.typed"):
            assert f"zeroxla/{name}" in names
        assert "zeroxla/mesh/machines.toml" in names
        assert any(name.startswith("zeroxla/mesh/targets/") for name in names)

    def test_is_the_same_from_the_sdist(self, wheel, wheel_of_sdist):
        assert contents(wheel) == contents(wheel_of_sdist)

    def test_of_the_sdist_includes_the_tests(self, sdist):
        with tarfile.open(sdist) as archive:
            members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
        assert not any(member.issym() for member in members.values())
        tests = {p.relative_to(REPOSITORY).as_posix() for p in (REPOSITORY / "tests").rglob("*.py")}
        assert tests | {"pyproject.toml", "README.md", "LICENSE"} <= members.keys()


def source_files() -> list[Path]:
    """Return the files that the package is made of; links to folders are followed."""
    found = []
    for folder, folders, names in os.walk(REPOSITORY / "zeroxla", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(folder, name) for name in names]
    return found


class TestMetadata:
    def test_core_dependencies_are_those_of_a_step(self):
        found = {re.match(r"[\w-]+", line)[0] for line in PYPROJECT["project"]["dependencies"]}
        assert found == CORE

    def test_without_an_address_no_link_leads_nowhere(self, wheel):
        found = metadata(wheel)
        assert found.get_all("Project-URL") is None
        readme = found.get_payload()
        assert "import jax, numpy as np, optax, zeroxla" in readme
        assert not [link for link in links_of(readme) if not link.startswith(("https://", "#"))]

    def test_with_an_address_links_and_pictures_are_absolute(self, wheel_of_sdist):
        """The sdist was told; a wheel that is built from it knows."""
        found = metadata(wheel_of_sdist)
        urls = dict(line.split(", ") for line in found.get_all("Project-URL"))
        assert urls["Source"] == URL
        assert urls["Changelog"] == f"{URL}/blob/HEAD/CHANGELOG.md"
        links = links_of(found.get_payload())
        assert all(link.startswith(("https://", "#")) for link in links)
        relative = [x for x in links_of((REPOSITORY / "README.md").read_text()) if ":" not in x]
        places = {f"{URL}/{kind}/HEAD/{x}" for kind in ("blob", "raw") for x in relative}
        assert len(places & set(links)) == len({x for x in relative if not x.startswith("#")})
        assert any(link.startswith(f"{URL}/raw/HEAD/docs/pictures/") for link in links)

    def test_a_picture_that_is_a_link(self):
        spec = importlib.util.spec_from_file_location(
            "package_metadata", REPOSITORY / "scripts" / "package_metadata.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        text = "[![a b](x.svg)](docs/x.md) and [c](https://d/e), [f](#g)"
        assert module.readme_for_index(text, None) == "a b and [c](https://d/e), [f](#g)"
        assert module.readme_for_index(text, URL) == (
            f"[![a b]({URL}/raw/HEAD/x.svg)]({URL}/blob/HEAD/docs/x.md) and "
            "[c](https://d/e), [f](#g)"
        )


def links_of(markdown: str) -> list[str]:
    """Return the targets of links and pictures, Markdown's and HTML's."""
    found = re.findall(r"\]\(([^)\s]+)\)", markdown)
    return found + re.findall(r"""(?:src|href)=["']([^"']+)["']""", markdown)


class TestImports:
    def test_rooms_import_core_packages_only(self):
        """An extra's packages are imported where they are used, which names a missing one. Modules
        written in Triton's language are themselves imported where they are used."""
        wrong = []
        for path in source_files():
            if path.suffix != ".py" or "cli" in path.parts:
                continue
            for name in imported(ast.parse(path.read_text()).body):
                package = BROUGHT.get(name, name)
                if name == "triton" and path.name.startswith("triton_"):
                    continue
                if name not in sys.stdlib_module_names and package not in {*CORE, "zeroxla"}:
                    wrong.append(f"{path.relative_to(REPOSITORY)} imports {name}")
        assert not wrong

    def test_extras_that_errors_name_are_there(self):
        extras = PYPROJECT["project"]["optional-dependencies"]
        named = set()
        for path in (path for path in source_files() if path.suffix == ".py"):
            named |= set(re.findall(r'(?:\bextra\("|zeroxla\[)([\w-]+)["\]]', path.read_text()))
        assert {"cli", "plot", "disk", "text", "parquet", "hf", "images", "plan-gpu"} <= named
        assert named <= extras.keys()


def imported(statements: list[ast.stmt]) -> set[str]:
    """Return the packages that are imported when a module is, not in functions or for types."""
    found = set()
    for node in statements:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Try | ast.ClassDef):
            found |= imported(node.body)
    return found


class Environment:
    """An environment, and a folder with packages of the names of the repository's folders."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "env" / "bin"
        self.folder = root / "project"
        self.folder.mkdir(parents=True)
        for name in ("models", "pallas_kernels", "tests", "benchmarks"):
            (self.folder / name).mkdir()
            (self.folder / name / "__init__.py").write_text("raise RuntimeError(__name__)")
        (self.folder / "models.py").write_text("raise RuntimeError(__name__)")
        (self.folder / "text.txt").write_text("the quick brown fox jumps\n" * 400)

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of its programs in the folder."""
        # Not the environment of the tests, where modules are found by other ways.
        env = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "COVERAGE"))}
        return subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.folder,
            env={**env, **QUICK},
            capture_output=True,
            text=True,
        )

    def python(self, code: str) -> str:
        """Run a program; return what it printed."""
        done = self.run("python", "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def check_use(self) -> None:
        """Check what the README shows, and the commands."""
        readme = (REPOSITORY / "README.md").read_text()
        (lines,) = re.findall(r"^```python runnable\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
        place = self.python(f"{lines}\nprint(zeroxla.__file__)").splitlines()[-1]
        assert Path(place).is_relative_to(self.bin.parent)

        assert self.run("python", "-m", "zeroxla", "--version").stdout == (
            f"zeroxla {zeroxla.__version__}\n"
        )
        shape = ("--layers", "1", "--width", "16", "--heads", "2", "--length", "16", "--batch", "8")
        short = ("--steps", "3", "--eval-batches", "1", "--sample-bytes", "8")
        run = ("train", "--run", "run", "--data", "text.txt", *shape, *short)
        done = self.run("zeroxla", *run)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (self.folder / "run" / "loss.png").exists()
        planned = self.run("zeroxla", "plan", "--model", "gpt2", "--nodes", "2")
        assert planned.returncode == 0, planned.stderr
        assert "Memory of one device" in planned.stdout


def into(environment: Environment, wheel: Path) -> None:
    """Install a wheel without an installer."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(environment.python(code).strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # Lines of such a file are places of modules; editable packages there are not followed.
    here = Path(pytest.__file__).parents[1]
    (site / "packages_of_the_tests.pth").write_text(f"{here}\n")
    command = environment.bin / "zeroxla"
    command.write_text(
        f"#!{environment.bin / 'python'}\nimport sys\nfrom zeroxla.cli.main import main\n"
        "sys.exit(main())\n"
    )
    command.chmod(0o755)
    # As an installer does: without it, each import would compile the modules that it reads.
    environment.python(f"import compileall; compileall.compile_dir({str(site)!r}, quiet=1)")


@pytest.fixture(scope="module")
def linked(wheel, tmp_path_factory):
    """The wheel in an environment that is linked to the packages of this one."""
    root = tmp_path_factory.mktemp("linked")
    venv.create(root / "env")
    environment = Environment(root)
    into(environment, wheel)
    return environment


class TestInstalled:
    @pytest.mark.slow
    def test_works_beside_packages_of_the_same_names(self, linked):
        linked.check_use()

    def test_a_second_copy_of_the_models_is_refused(self, linked):
        """A class of the copy would be no instance of the first."""
        code = (
            "import zeroxla, os, sys\n"
            "sys.path.insert(0, os.path.dirname(zeroxla.__file__))\nimport models"
        )
        done = linked.run("python", "-c", code)
        assert "it as zeroxla.models" in done.stderr

    @pytest.mark.slow
    def test_works_in_a_fresh_environment(self, wheel, tmp_path):
        """With core dependencies alone a step runs, and the command names what it lacks."""
        venv.create(tmp_path / "env", with_pip=True)
        environment = Environment(tmp_path)
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        done = environment.run("python", *install, str(wheel))
        assert done.returncode == 0, done.stderr
        environment.python(
            "import jax, numpy as np, zeroxla\nfrom zeroxla.models import GPT\n"
            "zeroxla.simulate(8)\nmesh = zeroxla.make_mesh(nodes=2)\n"
            "step = zeroxla.make_step(GPT.tiny(), mesh)\n"
            "batch = {'tokens': np.zeros((16, 33), int)}\n"
            "print(step.init(jax.random.key(0), batch), step.describe())"
        )
        assert "zeroxla COMMAND" in environment.run("zeroxla", "--help").stdout
        done = environment.run("zeroxla", "train", "--steps", "3")
        assert done.returncode == 2
        missing = r"zeroxla train needs the package \w+; pip install 'zeroxla\[cli\]'"
        assert re.search(missing, done.stderr), done.stderr
        done = environment.run("python", *install, f"{wheel}[cli]")
        assert done.returncode == 0, done.stderr
        environment.check_use()


COST = """
import gc
from time import process_time
import jax, flax, optax, orbax.checkpoint
gc.freeze()  # a pass over the objects of other packages is no cost of this one
base = process_time()
import zeroxla
package = process_time()
for name in zeroxla.__all__:
    getattr(zeroxla, name)
print(base, package - base, process_time() - base)
"""


class TestCost:
    @pytest.mark.slow
    def test_importing(self, linked):
        """The package takes 0.001 s of CPU beyond what every program with it imports, and all of
        its names 0.3 s, without flax.nnx, which those who use it import; where that takes 0.8 s.

        All is measured in one process, since what else the machine does slows down all of it. Of
        several runs the least: the first one compiles the modules.
        """
        runs = [map(float, linked.python(COST).splitlines()[-1].split()) for _ in range(4)]
        scaled = [(min(1, 0.8 / base), package, names) for base, package, names in runs]
        assert min(scale * package for scale, package, _ in scaled) < 0.02
        assert min(scale * names for scale, _, names in scaled) < 0.4

    def test_help(self, linked):
        """It imports no JAX, and takes 0.03 s."""
        code = "import sys\nfrom time import process_time\nstart = process_time()\n"
        code += "from zeroxla.cli.main import main\nmain(['--help'])\n"
        code += "print('jax' in sys.modules, process_time() - start)"
        runs = [linked.python(code).splitlines()[-1].split() for _ in range(3)]
        assert {has_jax for has_jax, _ in runs} == {"False"}
        assert min(float(seconds) for _, seconds in runs) < 0.3
