"""Where each backend's llama-cpp-python wheel comes from.

Runs before anything is installed: the standard library alone, on the Python that will own the venv.
One wheel holds one backend; `versions.toml` pins what it is built from, `<backend>.toml` says how.
"""
