"""Runs the load generators aiperf and guidellm against the worker and llama-server."""
