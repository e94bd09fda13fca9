"""Prepare the sources of the docs site."""
