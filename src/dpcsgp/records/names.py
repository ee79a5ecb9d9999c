"""How things of a run are named for people; files keep the names that programs compare."""

from __future__ import annotations


def model_name(model: str) -> str:
    """Return a model's name without the digests that a model of one's own carries.

    >>> model_name("own:Sequential:cf787f4b:1271cf25"), model_name("mlp:128")
    ('Sequential', 'mlp:128')
    """
    return model.split(":")[1] if _is_own(model) else model


def shown_model(model: str) -> str:
    """Return a model's name where nothing else tells that it is the caller's own.

    >>> shown_model("own:Sequential:cf787f4b:1271cf25"), shown_model("mlp:128")
    ('Sequential (own)', 'mlp:128')
    """
    return f"{model_name(model)} (own)" if _is_own(model) else model


def _is_own(model: str) -> bool:
    return model.startswith("own:") and model.count(":") >= 3
