"""The live page of a run: serves the records of the run to a browser.

Enters: a work dir. Leaves: an ASGI application and its static files. Nothing here
changes the run.
"""
