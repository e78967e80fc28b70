"""The HTTP API. It runs on the API process's event loop, unless a docstring says "any thread"."""
