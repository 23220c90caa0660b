"""Check that Echelon is imported from this checkout; `import echelon` prefers the installed one."""

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def refuse_another_checkout() -> None:
    """Raise ImportError if `echelon` is imported from another folder than this checkout. Nothing is imported."""
    spec = find_spec("echelon")
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != ROOT / "__init__.py":
        folders = spec.submodule_search_locations if spec else None
        raise ImportError(
            f"echelon is imported from {', '.join(folders or ['nowhere'])}, not from this checkout, {ROOT}: delete "
            "a folder echelon/ that an older commit has left, then call `pip install -e .`; or call `make links` and "
            f"set PYTHONPATH={ROOT / 'build' / 'links'}"
        )
