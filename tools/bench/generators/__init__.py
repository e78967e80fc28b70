"""Load generators of others, aiperf and guidellm, before the worker and llama-server."""
