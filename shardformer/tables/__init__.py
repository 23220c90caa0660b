"""The tables of models, registered by `config.model_type`, or by class for models without a config."""

from .decoders import TABLES as DECODERS
from .encoder_decoders import TABLES as ENCODER_DECODERS
from .encoders import TABLES as ENCODERS
from .multimodal import TABLES as MULTIMODAL
from .table import register, register_class
from .vision import TABLES as VISION
from .vision import TABLES_OF_CLASSES

for _tables in (DECODERS, ENCODERS, ENCODER_DECODERS, VISION, MULTIMODAL):
    for _name, _table in _tables.items():
        register(_table, _name)
for _name, _table in TABLES_OF_CLASSES.items():
    register_class(_table, _name)
