"""The layer inside other projects. Each module imports its project only when it is used.

* :mod:`mok.integrations.transformers`: Hugging Face models (Qwen3-MoE, Mixtral, and others whose
  experts are laid out alike)
* :mod:`mok.integrations.megatron`: Megatron-Core
* :mod:`mok.integrations.torchtitan`: torchtitan's override registry
"""

import importlib

_MODULES = ("megatron", "torchtitan", "transformers")


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
