"""Text in, text out: tokenizers, chat templates, incremental detokenising, stop strings."""

from edgespec.orchestrator.stream import Detokenizer, StopStrings
from edgespec.orchestrator.template import ChatTemplate, Message, TemplateError
from edgespec.orchestrator.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Message", "StopStrings", "TemplateError", "Tokenizer"]
