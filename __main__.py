"""The command `echelon` as `python -m echelon`."""

if not __package__:
    raise SystemExit(
        "echelon: this folder is a package, not a script: call `python -m echelon`, after `pip install .`"
    )

from .cli import main

if __name__ == "__main__":
    main()
