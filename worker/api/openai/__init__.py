"""OpenAI's paths on top of the worker's own jobs: schemas, requests, answers, tools, routes."""
