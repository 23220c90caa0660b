"""ColossalAI's import path of the public layers, which are in `layers`."""

from .layers import *  # noqa: F403
