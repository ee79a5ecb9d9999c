"""Decentralised learning with differential privacy and compressed messages.

    import dpcsgp

    print(dpcsgp.plan(model, num_examples=[60, 80, 90], epsilon=2.0))  # settings and costs
    result = dpcsgp.train(model, node_data, test_data=test, epsilon=2.0, delta=1e-5)
    model = dpcsgp.load_model(result.folder, model)

These names are imported when they are first used: `import dpcsgp` needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpcsgp.api import Result, load_model, train
    from dpcsgp.participation import take_part
    from dpcsgp.planning.own import plan
    from dpcsgp.records.ending import Stop

__all__ = ["Result", "Stop", "load_model", "plan", "take_part", "train"]
# Where a name lives; all others are in `api`.
_HOMES = {"plan": "planning.own", "Stop": "records.ending", "take_part": "participation"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"dpcsgp.{_HOMES.get(name, 'api')}"), name)
    raise AttributeError(f"module 'dpcsgp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
