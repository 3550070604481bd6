"""The studies that come with Moiety: one folder per paper, one file per result."""
