"""Config files and options before the parser reads them, and the parser's errors as one line."""
