"""Layers written per device: maths and logical names only."""
