"""A config as one module sees it: with some settings of its own."""

from typing import Any


class ConfigView:
    """Answers as a config does, but for the settings that are given; those stay what they are.

    What is changed in the config later is seen here too.
    """

    def __init__(self, config: Any, **own: Any) -> None:
        self.__dict__.update(own, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # while it is being copied, before it has one
            raise AttributeError(name)
        return getattr(self._config, name)
