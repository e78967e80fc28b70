"""Real clients against a real worker: what their users do with them, with their default settings.

`make clients` installs the clients into an environment of their own, starts workers and runs every
action. An action is one thing that a user of that client does; it works or it does not.
"""
