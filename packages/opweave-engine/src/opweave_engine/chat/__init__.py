"""Chat templates: the messages of a conversation as one prompt."""

from opweave_engine.chat.messages import Message
from opweave_engine.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "Message"]
