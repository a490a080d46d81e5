"""Whether what computes is installed: a proxy does without torch, so the distribution does not demand it."""

from __future__ import annotations

from importlib.util import find_spec

_PARTS = ("torch", "llguidance")


def missing_engine_text() -> str | None:
    """What to do, where nodes and `LLM` cannot run; None where they can."""
    missing = [name for name in _PARTS if find_spec(name) is None]
    if not missing:
        return None
    return f"{' and '.join(missing)} not installed: nodes and LLM need pip install 'tandem-serve[engine]'"
