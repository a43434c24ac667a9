"""Config files and options before the parser reads them, and its errors after it has."""
