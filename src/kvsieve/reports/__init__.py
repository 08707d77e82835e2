"""Reports: figures, pages and provenance, for every command that measures."""
