"""Griffe extension: the default of an option, which `option(default, check)` declares, without its check."""

from typing import Any

from griffe import Attribute, ExprCall, Extension


class OptionDefaults(Extension):
    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        if isinstance(attr.value, ExprCall) and str(attr.value.function) == "option":
            attr.value = attr.value.arguments[0]
