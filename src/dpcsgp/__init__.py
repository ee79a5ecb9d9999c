"""Decentralised learning with differential privacy and compressed messages.

    import dpcsgp

    result = dpcsgp.train(model, node_data, test_data=test, epsilon=2.0, delta=1e-5)
    model = dpcsgp.load_model(result.folder, model)

These names are imported when they are first used: `import dpcsgp` needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpcsgp.api import Result, load_model, train
    from dpcsgp.participation import take_part
    from dpcsgp.records.ending import Stop

__all__ = ["Result", "Stop", "load_model", "take_part", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        home = {"take_part": "participation", "Stop": "records.ending"}.get(name, "api")
        return getattr(import_module(f"dpcsgp.{home}"), name)
    raise AttributeError(f"module 'dpcsgp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
