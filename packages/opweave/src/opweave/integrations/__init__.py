"""Entry points for code written against the interfaces of other projects."""
