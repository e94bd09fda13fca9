"""Time marks that a device writes inside a compiled step."""
