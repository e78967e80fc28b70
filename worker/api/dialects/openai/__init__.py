"""OpenAI's API on top of the worker's own jobs: schemas, requests, answers, tools, routes."""
