"""Chat templates: the messages of a conversation as one prompt."""

from opweave.engine.chat.messages import Message
from opweave.engine.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "Message"]
