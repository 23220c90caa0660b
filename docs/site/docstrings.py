"""Griffe extension for the API pages: defaults of options, and links to the guides that docstrings name."""

import re
from typing import Any

from griffe import Attribute, ExprCall, Extension, Object

GUIDE = re.compile(r"docs/([\w/-]+)\.md")


class Docstrings(Extension):
    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Show the default of an option, which `option(default, check)` declares, without its check."""
        if isinstance(attr.value, ExprCall) and str(attr.value.function) == "option":
            attr.value = attr.value.arguments[0]

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Link the guides; the API pages are in a folder beside them."""
        if obj.docstring is not None:
            obj.docstring.value = GUIDE.sub(r"[\1](../\1.md)", obj.docstring.value)
