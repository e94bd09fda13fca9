"""An HTTP server for one opened model, in the form of OpenAI's completions API.

A request takes this way: `app` (routes, bodies, disconnects) -> `protocol` (JSON to
checked fields) -> `prompts` (text and messages to token ids, limits) -> `scheduler`
(the thread that owns the engine) -> `answers` (events to JSON). `serving` holds the
process: socket, signals, exit code.
"""
