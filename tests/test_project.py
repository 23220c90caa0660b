"""Structure of the project: one-way imports, file sizes, docstrings, device code.

Sources are parsed and never imported, so imports inside a function or under TYPE_CHECKING count, too.
"""

import ast
import re
import runpy
import sys
from collections.abc import Container, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The layers of docs/design.md, lowest first; packages on one line do not import each other.
LAYERS = (
    ("migration",),
    ("cluster",),
    ("data",),
    ("lazy",),
    ("pipeline", "zero"),
    ("derive",),
    ("shardformer",),
    ("checkpoint",),
    ("plugins",),
    ("booster",),
    ("verify", "trainer"),
    ("planning",),
    ("echelon",),  # __init__.py: the public names
    ("cli",),
    ("__main__",),
)
LAYER_OF = {folder: layer for layer, folders in enumerate(LAYERS) for folder in folders}
FOLDERS = sorted(LAYER_OF.keys() - {"echelon", "__main__"})
OUTSIDE = (
    "examples",
    "benchmarks",
    "tests",
    "docs",
)  # an editable install offers them as echelon.tests, others do not
# Maximum numbers of lines.
FILE_LINES, FUNCTION_LINES = 500, 60
LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()
# Calls of torch.distributed that communicate are only allowed in cluster/ and pipeline/transport.py.
COMMUNICATE = re.compile(
    r"(i?send|i?recv|(all_|batch_)?(reduce|gather|scatter|broadcast|isend|to_all|barrier)\w*)$"
)
COMMUNICATING = {"checkpoint": 3, "plugins": 1, "shardformer": 1, "zero": 10}


def package_sources() -> list[Path]:
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted([*below, *ROOT.glob("*.py")])


def outside_sources() -> list[Path]:
    return sorted(path for folder in OUTSIDE for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the dotted name of a source of the package, `__init__` included."""
    return ".".join(("echelon", *path.relative_to(ROOT).with_suffix("").parts))


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree, which several tests walk."""
    return tuple(ast.walk(ast.parse(source)))


def imports(source: str, module: str) -> Iterator[tuple[int, bool, str]]:
    """Yield (line, relative, dotted name) of every import in `source`, the source of `module`.

    Each name of a `from` import counts separately: `from .. import zero` is an import of `echelon.zero`.
    """
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, False, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, node.level > 0, f"{prefix}.{alias.name}") for alias in node.names)


def layer_name(target: str) -> str:
    """Return the folder of a name below `echelon`; `echelon` itself for one of the public names."""
    first, second = [*target.split("."), ""][:2]
    return second if first == "echelon" and second in LAYER_OF else first


def errors_within(source: str, module: str) -> list[str]:
    """Return the import errors of a module of the package."""
    layer = layer_name(module)
    errors = []
    for line, relative, target in imports(source, module):
        other, where = layer_name(target), f"{module}:{line}: {target}"
        if not relative:
            if other in OUTSIDE or other in LAYER_OF:
                errors.append(f"{where}: inside the package all imports are relative")
        elif not target.startswith("echelon.") or target.split(".")[1] in OUTSIDE:
            errors.append(f"{where}: leads out of the package")
        elif other != layer and LAYER_OF[other] >= LAYER_OF[layer]:
            errors.append(f"{where}: {layer} stands below {other}, or beside it")
    return errors


def errors_outside(source: str, module: str) -> list[str]:
    """Return the import errors of a test, an example or a benchmark."""
    errors = []
    for line, relative, target in imports(source, module):
        first, second = [*target.split("."), ""][:2]
        if not relative and first in FOLDERS:
            errors.append(
                f"{module}:{line}: {target}: is a second copy of the module; import it from echelon"
            )
        if not relative and first == "echelon" and second in OUTSIDE:
            errors.append(f"{module}:{line}: {target}: only an editable install has it")
    return errors


def test_imports_of_the_package_run_one_way() -> None:
    sources = package_sources()
    assert len(sources) >= len(LAYER_OF)
    assert [error for path in sources for error in errors_within(path.read_text(), module_name(path))] == []


def test_tests_and_examples_import_the_folders_through_echelon() -> None:
    sources = outside_sources()
    assert Path(__file__) in sources
    errors = [
        error
        for path in sources
        for error in errors_outside(path.read_text(), ".".join(path.relative_to(ROOT).with_suffix("").parts))
    ]
    assert errors == []


def imported_modules(source: str, module: str, modules: Container[str]) -> set[str]:
    """Return those of `modules` that a source imports relatively, also under TYPE_CHECKING."""
    candidates = set()
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*module.split(".")[: -node.level], *([node.module] if node.module else [])]
            names = {".".join([*base, alias.name]) for alias in node.names}
            candidates |= {name if name in modules else name.rpartition(".")[0] for name in names}
    return {name for name in candidates if name in modules}


def circles(graph: Mapping[str, set[str]]) -> set[str]:
    """Return the nodes on cycles of a graph."""

    def reached(start: str) -> set[str]:
        visited: set[str] = set()
        todo = [start]
        while todo:
            fresh = graph.get(todo.pop(), set()) - visited
            visited |= fresh
            todo += fresh
        return visited

    return {node for node in graph if node in reached(node)}


def module_graph() -> dict[Path, set[Path]]:
    """Return the imported files of each file of the package."""
    paths = {module_name(path).removesuffix(".__init__"): path for path in package_sources()}
    return {
        path: {paths[name] for name in imported_modules(path.read_text(), module_name(path), paths)} - {path}
        for path in paths.values()
    }


def test_python_starts_in_every_folder_of_the_package() -> None:
    """`python -m` puts the folder that it is called in before the standard library."""
    assert not {path.stem for path in package_sources()} & sys.stdlib_module_names


def test_no_file_imports_itself_over_others() -> None:
    graph = {
        str(path.relative_to(ROOT)): {str(other.relative_to(ROOT)) for other in others}
        for path, others in module_graph().items()
    }
    assert sum(map(len, graph.values())) > 200
    assert circles(graph) == set()


def test_no_folder_imports_itself_over_others() -> None:
    graph: dict[str, set[str]] = {}
    for path, others in module_graph().items():
        if path != ROOT / "__main__.py":  # above the command line, which reads the version of the root
            folder = str(path.parent.relative_to(ROOT))
            graph.setdefault(folder, set()).update(
                {str(other.parent.relative_to(ROOT)) for other in others} - {folder}
            )
    assert circles(graph) == set()


def test_a_cycle_of_imports_is_found_also_one_for_type_checkers() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}
    modules = {"echelon.zero.norm", "echelon.zero", "echelon.cluster.mesh"}
    source = "if TYPE_CHECKING:\n    from . import norm\nfrom ..cluster.mesh import Mesh"
    assert imported_modules(source, "echelon.zero.bucket", modules) == {
        "echelon.cluster.mesh",
        "echelon.zero.norm",
    }
    assert imported_modules("def f():\n    from . import norm", "echelon.zero.bucket", modules) == {
        "echelon.zero.norm"
    }


def test_files_and_functions_are_short() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in package_sources()}
    assert {path for path, source in sources.items() if source.count("\n") > FILE_LINES} <= LONG_FILES
    assert {
        name for path, source in sources.items() for name in long_functions(source, path)
    } == LONG_FUNCTIONS
    assert list(long_functions("def f():\n" + FUNCTION_LINES * "    pass\n", "a.py")) == ["a.py:f"]


def long_functions(source: str, path: str) -> Iterator[str]:
    """Return the functions of a source whose bodies have FUNCTION_LINES lines or more, as "path:function"."""
    for node in nodes_of(source):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and (node.end_lineno or 0) - node.body[0].lineno + 1 >= FUNCTION_LINES:
            yield f"{path}:{node.name}"


def communicating_calls(source: str) -> list[str]:
    """Return the calls of torch.distributed in a source that communicate."""
    return [
        node.func.attr
        for node in nodes_of(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if ast.unparse(node.func.value) in ("dist", "torch.distributed") and COMMUNICATE.match(node.func.attr)
    ]


# A note starts a line and is followed by its text; elsewhere it is cited.
NOTE = re.compile(r"\[Note: ([^\]]+)\]")
NOTE_BEGINS = re.compile(r"^\s*(?:# )?\[Note: ([^\]]+)\](?: |$)", re.MULTILINE)


def test_a_note_that_is_cited_exists() -> None:
    paths = [*package_sources(), *(ROOT / "docs").rglob("*.md")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    begun = {name for text in texts.values() for name in NOTE_BEGINS.findall(text)}
    cited = {(path, name) for path, text in texts.items() for name in NOTE.findall(text)}
    assert {(path, name) for path, name in cited if name not in begun} == set()


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a source."""
    for node in nodes_of(source):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_docstrings_are_imperative_sentences_or_noun_phrases() -> None:
    riddle = re.compile(r"(What|Whether|Which|Those|How|Where|Who)\b")
    riddles = [
        (path, text)
        for path in package_sources()
        for text in docstrings(path.read_text())
        if riddle.match(text)
    ]
    assert riddles == []
    assert [*docstrings('def f():\n    """Which of them."""')] == ["", "Which of them."]


# Folders that tools make, beside those whose name begins with a dot.
MADE = {"build", "dist", "__pycache__"}
# Lines of a merge conflict, of a diff, or of an edit that was pasted instead of applied.
REMAINS = re.compile(
    r"^[ \t]*(?:(?:<{3,}|={3,}|>{3,}|\|{7})(?:[ \t].*)?|\*\*\* (?:Begin|End|Update|Add|Delete) .*"
    r"|@@ -\d.*|diff --git .*|(?:---|\+\+\+) [ab]/.*)$",
    re.MULTILINE,
)


def repository_files(folder: Path = ROOT) -> Iterator[Path]:
    """Yield the files of the repository, also in a copy without git."""
    for path in folder.iterdir():
        is_made = path.name in MADE or path.name.endswith(".egg-info")
        if path.is_symlink() or is_made:
            continue
        if path.is_dir():
            if path.name == ".ci" or not path.name.startswith("."):
                yield from repository_files(path)
        else:
            yield path


def test_no_file_has_remains_of_an_edit() -> None:
    contents = {str(path.relative_to(ROOT)): path.read_bytes() for path in repository_files()}
    assert {"Makefile", ".ci/run", "docs/design.md", "tests/test_project.py"} <= contents.keys()
    remains = [
        (path, line[0])
        for path, content in contents.items()
        if b"\0" not in content  # weights
        for line in REMAINS.finditer(content.decode())
    ]
    assert remains == []


@pytest.mark.parametrize(
    "line",
    [
        "    ===",
        "    >>>",
        "<<<",
        "<<<<<<< HEAD",
        "=======",
        ">>>>>>> other",
        "||||||| base",
        "@@ -1,2 +1,2 @@",
        "+++ b/x.py",
        "*** End Patch",
    ],
)
def test_remains_of_an_edit_are_detected(line: str) -> None:
    assert REMAINS.findall(f"a\n{line}\nb")


def test_rules_and_comparisons_are_no_remains_of_an_edit() -> None:
    assert not REMAINS.findall("---\na == b\n>> x\n*** a\n| --- | --- |\nx >>> y\n-- a/b")


def test_few_files_beside_cluster_communicate_by_themselves() -> None:
    counts: dict[str, int] = {}
    for path in package_sources():
        folder = path.relative_to(ROOT).parts[0]
        if folder != "cluster" and path != ROOT / "pipeline" / "transport.py":
            counts[folder] = counts.get(folder, 0) + len(communicating_calls(path.read_text()))
    too_many = {folder: count for folder, count in counts.items() if count > COMMUNICATING.get(folder, 0)}
    assert too_many == {}
    assert len(communicating_calls("dist.all_reduce(x)\ndist.get_rank()\ndist.batch_isend_irecv(y)")) == 2


def device_dependent_lines(source: str) -> list[int]:
    """Return the lines of a source that name CUDA, use its functions, or compare device kinds other than the CPU."""
    return sorted({node.lineno for node in nodes_of(source) if _depends_on_device(node)})


def _depends_on_device(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and re.fullmatch(r"cuda(:.*)?", node.value) is not None
    if isinstance(node, ast.Attribute):
        return node.attr in ("cuda", "is_cuda") or ast.unparse(node) == "torch.accelerator"
    if isinstance(node, ast.Import | ast.ImportFrom):
        base = getattr(node, "module", None) or ""
        names = [f"{base}.{alias.name}" if base else alias.name for alias in node.names]
        return any(re.match(r"torch\.(cuda|accelerator)\b", name) for name in names)
    if isinstance(node, ast.Match):
        return _is_kind(node.subject)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        are_cpu = any(isinstance(side, ast.Constant) and side.value == "cpu" for side in sides)
        return any(map(_is_kind, sides)) and not are_cpu
    return False


def _is_kind(node: ast.expr) -> bool:
    """Return True for an expression of a device's kind: `….device.type`, `get_default_device().type`."""
    text = ast.unparse(node)
    return isinstance(node, ast.Attribute) and node.attr == "type" and "device" in text.lower()


# Files that name CUDA without depending on it, with the reason.
NAMING_CUDA = {
    "checkpoint/full_state.py": "a key of the file of random states",
    "shardformer/sequence/before_layers.py": "the table of a tensor's properties",
}


def test_only_one_small_file_depends_on_cuda() -> None:
    device_file = ROOT / "cluster" / "device.py"
    assert (
        len(device_dependent_lines(device_file.read_text())) > 5
        and device_file.read_text().count("\n") <= 275
    )
    dependent = {
        str(path.relative_to(ROOT))
        for path in package_sources()
        if path != device_file and device_dependent_lines(path.read_text())
    }
    assert dependent == NAMING_CUDA.keys()


def test_only_one_file_reads_the_code_of_models() -> None:
    reading = {path.name for path in package_sources() if "inspect.getsource" in path.read_text()}
    assert reading == {"forward_code.py"}


@pytest.mark.parametrize(
    "source",
    [
        'x.device.type == "cuda"',
        'x.device.type in ("cpu", "cuda")',
        "x.device.type != kind",
        "a.device.type == b.device.type",
        "device.type not in kinds",
        'match device.type:\n    case "xpu":\n        pass',
        'str(device).startswith("cuda")',
        'kinds = {"cuda": 1}',
        'torch.device("cuda:0")',
        "x.is_cuda",
        "x.cuda()",
        "torch.cuda.synchronize()",
        "torch.backends.cuda.is_built()",
        "torch.accelerator.device_count()",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Stream",
    ],
)
def test_code_that_depends_on_cuda_is_found(source: str) -> None:
    assert device_dependent_lines(source)


def test_code_that_asks_for_the_cpu_or_uses_a_device_is_none() -> None:
    assert not device_dependent_lines(
        'x.device.type == "cpu"\nx.to(y.device)\nis_cuda(x.device)\nx.type == y'
    )


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("echelon.cluster.mesh", "from ..zero import optimizer"),
        ("echelon.cluster.mesh", "from .. import zero"),
        ("echelon.cluster.mesh", "from ..zero.optimizer import ShardedOptimizer"),
        ("echelon.cluster.__init__", "from .. import __version__"),
        ("echelon.pipeline.runner", "from ..zero import optimizer"),
        ("echelon.zero.buckets", "def f():\n    from ..pipeline import runner"),
        ("echelon.shardformer.policies.bert", "from ...plugins import HybridParallelPlugin"),
        ("echelon.verify.parity", "from .. import Booster"),
        ("echelon.__init__", "from .cli import main"),
        ("echelon.booster.booster", "from echelon.cluster import mesh"),
        ("echelon.booster.booster", "import cluster.mesh"),
        ("echelon.booster.booster", "from tests import pool"),
        ("echelon.booster.booster", "from ...cluster import mesh"),
        ("echelon.cli.main", "from .. import tests"),
        ("echelon.cli.main", "from ..benchmarks.checkout import ROOT"),
    ],
)
def test_an_import_that_runs_upward_or_aside_is_found(module: str, source: str) -> None:
    assert len(errors_within(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("echelon.__init__", "from .booster import Booster\nfrom .verify.parity import parity"),
        ("echelon.cli.__init__", "from .. import __version__\nfrom ..verify import parity"),
        ("echelon.shardformer.policies.bert", "from ..table import Table\nfrom ...pipeline.plan import Plan"),
        ("echelon.zero.buckets", "import torch\nfrom ..cluster import mesh\nfrom . import norm"),
    ],
)
def test_an_import_that_runs_downward_is_allowed(module: str, source: str) -> None:
    assert errors_within(source, module) == []


def test_a_folder_imported_by_its_bare_name_is_found() -> None:
    assert len(errors_outside("from cluster.mesh import ParallelMesh", "tests.cluster.test_mesh")) == 1
    assert errors_outside("from echelon.cluster import mesh", "tests.cluster.test_mesh") == []


@pytest.mark.parametrize("source", ["from echelon import tests", "import echelon.examples.training"])
def test_an_import_that_only_an_editable_install_offers_is_detected(source: str) -> None:
    assert len(errors_outside(source, "tests.cluster.test_mesh")) == 1


def test_the_reference_of_the_parity_check_imports_nothing_of_echelon() -> None:
    path = ROOT / "verify" / "reference.py"
    if not path.exists():
        pytest.skip("there is no verify/reference.py")
    targets = [target for _, relative, target in imports(path.read_text(), module_name(path)) if relative]
    assert targets == []  # absolute imports are caught above: none is allowed inside the package


def test_import_graphs_follow_every_relative_import_without_links() -> None:
    """An import graph goes up from a file through folders with an `__init__.py`; the last one is the root."""
    for path in package_sources():
        folders = [folder for folder in path.resolve().parents if (folder / "__init__.py").exists()]
        levels = [node.level for node in nodes_of(path.read_text()) if isinstance(node, ast.ImportFrom)]
        assert max(levels, default=0) <= len(folders) and folders[-1] == ROOT, path


def test_tests_are_found_by_their_path_under_any_name_of_the_clone() -> None:
    assert __name__ == "tests.test_project"
    assert {str(ROOT), str(ROOT.parent)} & {*sys.path} == {str(ROOT)}


def test_the_layers_are_the_folders_at_the_top_level() -> None:
    assert sorted(path.parent.name for path in ROOT.glob("*/__init__.py")) == FOLDERS


def test_make_tries_the_oldest_transformers_that_is_allowed() -> None:
    (allowed,) = re.findall(r'"transformers>=([\d.]+)[",]', (ROOT / "pyproject.toml").read_text())
    (tried,) = re.findall(r"^OLDER \?= transformers==([\d.]+)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert f"{tried}.".startswith(f"{allowed}.")


def test_the_picture_of_the_imports_shows_every_package_and_no_cycle() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_imports.py"))
    graph = {package: drawn["imported"](package) for package in drawn["packages"]()}
    picture = drawn["picture"](graph)
    assert graph.keys() == set(FOLDERS) and all(f">{package}</text>" in picture for package in graph)
    assert drawn["direct"]({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {("a", "b"), ("b", "c")}
    with pytest.raises(ValueError, match="an import circle: a → b → a"):
        drawn["heights"]({"a": {"b"}, "b": {"a"}})
