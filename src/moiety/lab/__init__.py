"""Compare: trials of a study, kept on disk as they end."""
