"""Exit codes of all programs; docs/design.md says what a launcher does after each."""

DONE = 0
FAILED = 1
"""A run failed; or a check, a comparison or a checkpoint is not right."""
BAD_INPUT = 2
"""Flags, files or data were rejected, before any work."""
PREEMPTED = 42
"""A run was stopped, and the same command resumes it."""
GAVE_UP = 93
"""A run ended, and restarting it is useless."""
INTERRUPTED = 130
"""Ctrl-C ended a program that is no run: 128 + SIGINT, as shells report it."""
