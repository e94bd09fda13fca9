"""The live page of a run: serves the records of the run to a browser.

Input: a work dir. Output: an ASGI application and its static files. Nothing here
changes the run.
"""
