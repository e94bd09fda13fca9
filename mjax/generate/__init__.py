"""Text generation: open a model, continue texts, serve it over HTTP."""
