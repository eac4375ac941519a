"""A model in this process, without gRPC: `from services.llm import LLM`."""

from services.llm.llm import LLM, Completion, NotAdmitted

__all__ = ["LLM", "Completion", "NotAdmitted"]
