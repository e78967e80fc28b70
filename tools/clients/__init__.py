"""Real clients against a real worker: what their users do, with default settings.

`make clients` installs the clients into an environment of their own, starts workers and runs every
action. An action is one thing that a user of that client does; it either works or fails.
"""
