"""The engine as the API process keeps and uses it; belongs to that process's event loop."""
