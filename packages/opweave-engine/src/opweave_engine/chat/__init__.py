"""Chat templates: the messages of a conversation as one prompt."""

from opweave_engine.chat.template import ChatTemplate, Message

__all__ = ["ChatTemplate", "Message"]
