"""Run one draw again, as a failing test prints it: `python -m tests.fuzz`, with the draw on standard input."""

import sys
import tempfile
from pathlib import Path

from ..pool import Pool
from .draw import Draw, Layout
from .runs import checked

if __name__ == "__main__":
    drawn = eval(
        sys.stdin.read(), {"Draw": Draw, "Layout": Layout}
    )  # one's own draw, printed by one's own test
    with Pool() as pool, tempfile.TemporaryDirectory() as folder:
        lines = checked(drawn, pool.run, Path(folder))
    print("\n".join(lines) or "agrees with a plain loop")
    sys.exit(bool(lines))
