"""What requests and responses hold, as types."""
