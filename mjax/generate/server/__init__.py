"""An HTTP server for one opened model, compatible with OpenAI's completions API.

A request passes through: `app` (routes, bodies, disconnects) -> `protocol` (JSON to
checked fields) -> `prompts` (text and messages to token ids, limits) -> `scheduler`
(the thread that owns the engine) -> `answers` (events to JSON). `serving` holds the
process: socket, signals, exit code.
"""
