"""The live page of a run: what the files of the run say, answered to a browser.

Enters: a work dir. Leaves: an ASGI application and its static files. Nothing here
changes a run.
"""
