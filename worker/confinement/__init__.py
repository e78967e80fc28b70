"""Limits what a process that reads foreign bytes in native code may do to this machine."""
