"""Measurements of generation."""
