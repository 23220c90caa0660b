"""Installed packages: from the files of a zip, from an sdist and editable. Each has the package and nothing else."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .test_project import ROOT, module_name, package_sources, repository_files

VERSION = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.M)[0]
DATA = {"echelon/py.typed", "echelon/cli/coverage.json", "echelon/cli/matrix.json"}
# Imports everything that is public, and prints where it is, and which folders beside it can be imported.
IMPORT = """
import importlib, sys
import echelon
for name in echelon.__all__:
    getattr(echelon, name)
def is_importable(name):
    try:
        return bool(importlib.import_module(name))
    except ImportError:
        return False
print(echelon.__file__, *filter(is_importable, ("cluster", "data", "tests", "setup", "benchmarks")))
"""


def python(interpreter: str | Path, *arguments: str, folder: Path, status: int = 0) -> str:
    """Run Python in a folder, without variables that change its imports; return its output and errors."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(interpreter), *arguments],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """Copy the files of the repository into a folder of this name, as a zip has them: without git, nothing made."""

    def copied(name: str) -> Path:
        for path in repository_files():
            target = tmp_path / name / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        return tmp_path / name

    return copied


def built(kind: str, folder: Path) -> Path:
    """Build an sdist or a wheel from a copy of the files, into its folder `dist`."""
    build = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    python(sys.executable, "-c", build, folder=folder)
    (path,) = (folder / "dist").iterdir()
    return path


def installed_files() -> set[str]:
    """Return the files that an installation has to consist of, except its metadata."""
    modules = {module_name(path).replace(".", "/") + ".py" for path in package_sources()}
    assert {"echelon/__init__.py", "echelon/__main__.py", "echelon/cli/main.py"} <= modules
    return modules | DATA


def test_the_version_of_the_project_is_that_of_the_package() -> None:
    assert f'__version__ = "{VERSION}"' in (ROOT / "__init__.py").read_text().splitlines()


@pytest.mark.parametrize("source", ["zip", "sdist"])
def test_a_wheel_has_the_package_and_nothing_else(
    copy: Callable[[str], Path], tmp_path: Path, source: str
) -> None:
    folder = copy("echelon-main")
    if source == "sdist":
        shutil.unpack_archive(built("sdist", folder), tmp_path, filter="data")
        (folder,) = tmp_path.glob("echelon-*.*/")
        assert not (folder / "tests").exists()
    with zipfile.ZipFile(built("wheel", folder)) as wheel:
        names = {name for name in wheel.namelist() if not name.startswith("echelon-")}
        wheel.extractall(tmp_path / "site")
    assert names == installed_files()
    printed = python(sys.executable, "-m", "echelon", "--version", folder=tmp_path / "site")
    assert printed == f"echelon {VERSION}\n"


def test_a_folder_of_the_name_echelon_is_the_package_for_its_parent(
    copy: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy("echelon")
    place = "import echelon.cluster; print(echelon.cluster.__file__)"
    assert python(sys.executable, "-c", place, folder=tmp_path).strip() == str(
        folder / "cluster" / "__init__.py"
    )


def test_a_folder_that_is_run_as_a_script_ends_with_a_sentence() -> None:
    for path in (".", "__main__.py"):
        assert re.fullmatch(
            r"echelon: .* call `python -m echelon`.*\n", python(sys.executable, path, folder=ROOT, status=1)
        )


def test_another_checkout_is_refused_or_imported_by_its_links(copy: Callable[[str], Path]) -> None:
    folder = copy("x")
    check = "import checkout; checkout.refuse_another_checkout()"
    refused = python(sys.executable, "-c", check, folder=folder / "benchmarks", status=1)
    assert f"ImportError: echelon is imported from {ROOT}, not from this checkout, {folder}: " in refused
    subprocess.run(["make", "links"], cwd=folder, check=True, capture_output=True)
    links = folder / "build" / "links"
    by_links = f"import sys; sys.path.insert(0, {str(links)!r}); {check}; import echelon.cluster as package"
    show = "print(package.__file__)"
    location = python(sys.executable, "-c", f"{by_links}; {show}", folder=folder / "benchmarks").strip()
    assert location == str(links / "echelon" / "cluster" / "__init__.py")
    assert {path.name for path in (links / "echelon").iterdir()} == {
        path.split("/")[1] for path in installed_files()
    }


def test_every_benchmark_that_trains_refuses_another_checkout() -> None:
    sources = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    scripts = {name for name, source in sources.items() if '"__main__"' in source} - {"sizes.py"}
    checking = {
        name
        for name, source in sources.items()
        if re.search(r"^    +(enter|refuse_\w+)\(", source, flags=re.M)
    }
    assert scripts and scripts <= checking
    assert "    refuse_another_checkout()\n" in sources["launch.py"]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Make an environment that has the packages of this one, but not Echelon; return its interpreter."""
    venv.create(tmp_path / "venv")
    interpreter = tmp_path / "venv" / "bin" / "python"
    folders = "\n".join(path for path in sys.path if Path(path).name.endswith("-packages"))
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    (Path(python(interpreter, "-c", purelib, folder=tmp_path).strip()) / "others.pth").write_text(folders)
    return interpreter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("zip", "echelon-main"),
        ("sdist", "x"),
        *(("editable", name) for name in ("x", "echelon", "echelon-main")),
    ],
)
def test_an_installation_imports_and_trains_as_one_process(
    copy: Callable[[str], Path], environment: Path, tmp_path: Path, source: str, name: str
) -> None:
    folder = copy(name)
    pip = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    path = built("sdist", folder) if source == "sdist" else folder
    python(environment, *pip, *(["--editable"] * (source == "editable")), str(path), folder=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place, *others = python(environment, "-c", IMPORT, folder=elsewhere).split()
    assert Path(place).is_relative_to(folder if source == "editable" else environment.parents[1])
    assert others == []
    assert python(environment.with_name("echelon"), "--version", folder=elsewhere) == f"echelon {VERSION}\n"
    for where in (elsewhere, tmp_path, folder):
        printed = python(environment, "-m", "echelon", "--version", folder=where)
        assert printed == f"echelon {VERSION}\n"
    verify = ["verify", "--layers", "2", "--tp", "2", "--steps", "1"]
    assert "all agree" in python(environment, "-m", "echelon", *verify, folder=elsewhere)


USERS_SCRIPT = """
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon import Booster, DistCoordinator, HybridParallelPlugin, LazyInitContext, launch_from_torch


def train(make_model: type[nn.Module], data: DataLoader[dict[str, Tensor]]) -> float:
    launch_from_torch(seed=0)
    plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, precision="bf16")
    booster = Booster(plugin=plugin)
    with LazyInitContext():
        model = make_model()
    model, optimizer, _, loader, _ = booster.boost(model, torch.optim.AdamW(model.parameters()), dataloader=data)
    assert optimizer is not None and isinstance(loader, DataLoader)
    batches: Iterator[dict[str, Tensor]] = iter(loader)
    outputs = booster.execute_pipeline(batches, model, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()
    booster.save_model(model, "trained", shard=True)
    DistCoordinator().print_on_master(f"replicas {plugin.dp_size}")
    return float(outputs["loss"])
"""


@pytest.mark.slow
def test_a_users_script_is_checked_strictly_against_the_installed_package(
    copy: Callable[[str], Path], environment: Path, tmp_path: Path
) -> None:
    pip = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    python(environment, *pip, str(copy("x")), folder=tmp_path)
    mypy = ["-m", "mypy", "--strict", "--python-executable", str(environment), "--cache-dir", "cache"]
    script = tmp_path / "train.py"
    script.write_text(USERS_SCRIPT)
    assert "no issues found" in python(sys.executable, *mypy, "train.py", folder=tmp_path)
    script.write_text(USERS_SCRIPT.replace("optimizer=optimizer", "optimizer='adam'"))
    wrong = python(sys.executable, *mypy, "train.py", folder=tmp_path, status=1)
    assert 'incompatible type "str"; expected "Optimizer | None"' in wrong
