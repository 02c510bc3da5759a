"""Entry points for code that was written against other projects' interfaces."""
