"""Command-line tools, one purpose each."""
