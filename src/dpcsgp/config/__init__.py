"""One validated model of all settings, and its way to and from TOML.

Keys explain themselves; `--set section.key=value` uses the same names. Per-node values are a number
or a list with one number per node.
"""

from dpcsgp.config.reading import change_config, load_config, make_config, to_toml
from dpcsgp.config.sections import (
    AlgorithmConfig,
    CompressionConfig,
    GraphConfig,
    MethodName,
    NetworkConfig,
    PrivacyConfig,
    RunConfig,
    Section,
    SimulationConfig,
    TaskConfig,
)
from dpcsgp.config.settings import Config, per_node

__all__ = [
    "AlgorithmConfig",
    "CompressionConfig",
    "Config",
    "GraphConfig",
    "MethodName",
    "NetworkConfig",
    "PrivacyConfig",
    "RunConfig",
    "Section",
    "SimulationConfig",
    "TaskConfig",
    "change_config",
    "load_config",
    "make_config",
    "per_node",
    "to_toml",
]
