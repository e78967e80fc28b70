"""Makes each backend's llama-cpp-python wheel.

Runs before anything is installed: it needs only the standard library, on the Python that will own
the venv. One wheel holds one backend. `versions.toml` pins what it is built from, and
`<backend>.toml` says how.
"""
