"""Stamps: times that a device records inside a compiled step."""
