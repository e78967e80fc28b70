"""What a process that reads foreign bytes in native code may still do to this machine."""
